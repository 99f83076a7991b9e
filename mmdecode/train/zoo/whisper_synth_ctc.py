"""Recipe of ``zoo:whisper-synth-ctc``: a CTC head on the decoder's subwords, with case and marks.

The head reads the encoder's states, which stay as they are. Its labels are the model's own
transcripts of synthetic speech; windows of silence, noise and music have none, so that blanks mean
that nobody speaks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmdecode.asr.transcriber import Transcriber
from mmdecode.errors import MMDecodeError
from mmdecode.runs.files import marked_json, write_file, write_folder
from mmdecode.train.drafters.ctc import CTCOptions, Sample, collect, train_head
from mmdecode.train.drafters.recordings import forget, stored
from mmdecode.train.speech_windows import WINDOW_S, Windows, synthesise_corpus
from mmdecode.zoo import synthesis


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """Settings of the recipe.

    Attributes:
        base: The Whisper that the head is for.
        utterances: Number of synthesised sentences.
        windows: Number of windows with speech.
        quiet: Number of windows without speech.
        head: Settings of the head.
        seed: Seed of the windows.
    """

    base: str = "zoo:whisper-synth"
    utterances: int = 12_000
    windows: int = 8000
    quiet: int = 800
    head: CTCOptions = field(
        default_factory=lambda: CTCOptions(
            vocabulary=2000, strides=(), heads=4, feed_forward=640, epochs=30, peak_rate=1e-3
        )
    )
    seed: int = 17


def quiet_windows(windows: Windows, count: int, seed: int) -> Iterator[Tensor]:
    """Yields windows without speech: silence, noise, and music, some with noise."""
    rng = random.Random(f"quiet/{seed}")
    for index in range(count):
        if index % 2:
            yield windows.silence().wave
        else:
            wave = torch.from_numpy(synthesis.music(WINDOW_S, rng)) * 10 ** rng.uniform(-1, 0)
            noise = windows.noise(len(wave)) * 10 ** rng.uniform(-2, 0)
            yield wave + (noise if rng.random() < 0.3 else 0.0)


def run(options: HeadOptions, work: Path, out: Path) -> dict[str, Any]:
    """Synthesises speech, transcribes it and trains the head; needs espeak-ng.

    Args:
        options: Settings.
        work: Folder of the corpus, see `mmdecode.train.zoo.whisper_synth`, and of the state in
            ``ctc``, from which an interrupted training resumes.
        out: Folder of the head.
    """
    synthesise_corpus(work / "corpus", options.utterances, options.seed)
    transcriber = Transcriber.from_pretrained(options.base, device="cpu", timestamps=False)
    recognizer = transcriber.recognizer
    windows = Windows(work / "corpus", recognizer.processor, options.seed)
    windows.refresh()
    if not windows.shards:
        raise MMDecodeError(f"no corpus in {work / 'corpus'}")
    language = recognizer.language_of_name("en")
    spoken = [windows.draw(index % 3 > 0).wave.numpy() for index in range(options.windows)]
    samples = stored(
        work / "ctc",
        Sample,
        spoken,
        lambda part: collect(recognizer, part, language),
        (options.base, options.seed),
    )
    quiet = [wave.numpy() for wave in quiet_windows(windows, options.quiet, options.seed)]
    samples += [Sample([], sample.states) for sample in _encoded(recognizer, quiet)]
    head, report = train_head(
        recognizer.model,
        recognizer.tokenizer,
        samples,
        replace(options.head, seed=options.seed),
        work / "ctc" / "head.pt",
    )
    write_folder(out, head.save_pretrained)
    write_file(out / "report.json", marked_json(report))
    forget(work / "ctc")
    return {"folder": str(out)} | report


@torch.no_grad()
def _encoded(recognizer: Any, waves: list[Any], size: int = 16) -> Iterator[Sample]:
    """Yields the encoder states of windows, without a transcript."""
    for start in range(0, len(waves), size):
        part = waves[start : start + size]
        encoded = recognizer.encode(recognizer.features(part), [WINDOW_S] * len(part))
        for states in encoded.states:
            yield Sample([], states.half())
