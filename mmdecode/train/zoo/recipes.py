"""Recipes of the zoo by name, for ``mmdecode train zoo``."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def run_recipe(name: str, work: Path, out: Path, minutes: float, base: str, device: str) -> Any:
    """Trains a zoo model, or generates a zoo data set, and returns its report.

    Args:
        name: Name of the recipe, see ``mmdecode train zoo --help``.
        work: Folder of corpus and training state.
        out: Folder of the result.
        minutes: Minutes of training, for ``whisper-synth``.
        base: The Whisper that Medusa heads or an aligner are made for.
        device: ``cpu`` or ``cuda``.
    """
    from mmdecode.train.zoo import whisper_synth

    if name == "whisper-synth":
        return whisper_synth.run(whisper_synth.WhisperSynthOptions(minutes=minutes), work, out)
    if name == "whisper-synth-medusa":
        return whisper_synth.run_heads(base, work, out)
    if name == "whisper-synth-ctc":
        from mmdecode.train.zoo import whisper_synth_ctc

        return whisper_synth_ctc.run(whisper_synth_ctc.HeadOptions(base=base), work, out)
    if name in ("whisper-synth-320ms", "whisper-synth-960ms"):
        from mmdecode.train.zoo import whisper_synth_stream

        chunk = round(int(name[-5:-2]) / 40)
        options = whisper_synth_stream.StreamOptions(base=base, chunk=chunk, minutes=minutes)
        return whisper_synth_stream.run(options, work, out)
    if name == "punctuation":
        from mmdecode.train import punctuation

        return punctuation.run(punctuation.PunctuationOptions(), out)
    if name == "aligner":
        from mmdecode.checkpoints import local_path
        from mmdecode.train import aligner

        aligner.run(local_path(base), out, aligner.AlignerOptions())
        return {"folder": str(out)}
    if name.startswith("lm-"):
        from mmdecode.train.zoo import lm_synth

        return lm_synth.run(lm_synth.RECIPES[name], work, out)
    if name == "spoken-sentences":
        from mmdecode.train.zoo import spoken_sentences

        return spoken_sentences.run(spoken_sentences.SpokenOptions(), out)
    if name == "joined-words":
        from mmdecode.zoo.joined_words import build_joined_words

        build_joined_words(out)
        return {"folder": str(out)}
    if name == "speech-test":
        from mmdecode.zoo.speech import build_speech_test

        build_speech_test(out)
        return {"folder": str(out)}
    if name == "llava-scenes":
        from mmdecode.train.zoo import llava_scenes

        return llava_scenes.run(llava_scenes.LlavaScenesOptions(), work, out)
    if name == "scenes-test":
        from mmdecode.zoo import scene_sets

        scene_sets.build_scene_sets(out)
        scene_sets.write_images(out / "images")
        return {"folder": str(out)}
    if name == "llamagen-scenes":
        from mmdecode.train.zoo import llamagen_scenes

        plan = (
            llamagen_scenes.LlamaGenScenesOptions()
            if device == "cpu"
            else llamagen_scenes.on_cuda()
        )
        return llamagen_scenes.run(plan, work, out)
    if name == "llamagen-digits":
        from mmdecode.train.zoo import llamagen_digits

        return llamagen_digits.run(llamagen_digits.LlamaGenDigitsOptions(device=device), work, out)
    if name == "var-scenes":
        from mmdecode.train.zoo import var_scenes

        shapes = var_scenes.VarScenesOptions() if device == "cpu" else var_scenes.on_cuda()
        return var_scenes.run(shapes, work, out)
    from mmdecode.train.zoo import scene_classifier

    return scene_classifier.run(scene_classifier.SceneClassifierOptions(), work, out)
