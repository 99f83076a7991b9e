"""The published recogniser on recordings of people, cut in every way there is, and in int8."""

import platform

import jiwer
import numpy as np
import pytest
import torch

from mmdecode.asr import Transcriber
from mmdecode.asr.audio.reading import blocks, recording
from mmdecode.evaluation.speech.normalisers import normaliser_of
from mmdecode.quantization.products import CHUNK, gain, steps
from mmdecode.zoo.real_clips import real_clips
from tests.support.commands import invoke
from tests.support.files import json_lines
from tests.support.int8 import counted
from tests.support.moonshine import NAME, needs_wheel

RATE = 16_000
WAYS = {
    "windows of the model": {},
    "short windows": {"window_s": 10},
    "overlap": {"window_s": 10, "mode": "chunked", "overlap_s": 3.0},
    "speech detection": {"window_s": 10, "vad": True},
}


@pytest.fixture(scope="module")
def talk():
    """All clips with two and a half seconds between them, and what they say."""
    clips = real_clips()
    waves = []
    for clip in clips:
        waves += [*blocks(recording(str(clip.path)), RATE), np.zeros(5 * RATE // 2, "f4")]
    return np.concatenate(waves), " ".join(clip.text for clip in clips)


@needs_wheel
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_however_it_is_cut_words_are_neither_lost_nor_repeated(way, talk):
    if "vad" in WAYS[way]:
        pytest.importorskip("silero_vad")
    samples, text = talk
    ours = Transcriber.from_pretrained(NAME, device="cpu", **WAYS[way])
    found = ours(samples)
    clean = normaliser_of("whisper")
    errors = jiwer.process_words(clean(text), clean(found.text))
    assert errors.wer < 0.08, (errors.wer, found.text)
    assert errors.insertions <= 8 and errors.deletions <= 8
    last = 0.0
    for segment in found.segments:
        assert last <= segment.start_s < segment.end_s <= found.duration_s
        last = segment.end_s


def transcribed(model, out, *more):
    """Lines of real clips; numbers of int8 products, passes, windows and parts of states."""
    made, parts, begin = [], [], Transcriber.__init__

    def note(self, *given, **options):
        begin(self, *given, **options)
        made.append(self)
        self.model.get_encoder().register_forward_hook(
            lambda *given: parts.append(-(-given[-1].last_hidden_state.shape[1] // CHUNK))
        )

    words = ["--data", "zoo:real-clips", "--model", model, "--device", "cpu", "--dtype", "fp32"]
    words += ["--batch-size", 1, "--quantize", "int8", *more]
    with counted() as count, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transcriber, "__init__", note)
        done = invoke("transcribe", *words, "--out", out, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    assert "int8 weights" in done.stderr
    lines, transcriber = json_lines(out / "results.jsonl"), made[-1]
    windows = sum(line["stats"]["windows"] for line in lines)
    counts = np.array([count.products, transcriber.stats.passes, windows, sum(parts)])
    return lines, counts, transcriber.model


@pytest.mark.slow
@pytest.mark.parametrize("model", ["zoo:whisper-synth", pytest.param(NAME, marks=needs_wheel)])
def test_real_clips_have_the_same_text_in_int8_with_a_draft_and_without(model, tmp_path):
    if torch.backends.cpu.get_cpu_capability().startswith("AVX") and platform.machine() == "x86_64":
        assert steps(), "int8 products of this processor were not found"
    gain("int8")  # once in a process, products are timed
    found = {}
    for draft in ("none", "lookup"):
        more = () if draft == "none" else ("--draft", draft)
        first = transcribed(model, tmp_path / f"{draft}-first", *more, "--limit", 1)[1]
        lines, whole, network = transcribed(model, tmp_path / draft, *more)
        products, passes, windows, parts = whole - first  # what a model is tried with cancels out
        encoder, layers = (
            len(part.layers) for part in (network.get_encoder(), network.get_decoder())
        )
        # six matrices of an encoder's layer, by parts of the states; in a pass eight of each
        # decoder layer, the projections to keys and values, two of the states, and the head
        assert windows >= 10 and passes > 100
        assert products == parts * 6 * encoder + (passes + windows) * (12 * layers + 1)
        found[draft] = [(line["id"], line["text"], line["tokens"]) for line in lines], passes
    (plain, most), (drafted, fewer) = found.values()
    assert len(plain) == len(real_clips()) and all(text for _, text, _ in plain)
    assert drafted == plain
    assert fewer < most
