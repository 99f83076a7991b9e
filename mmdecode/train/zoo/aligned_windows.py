"""Synthetic speech with the ends of its words, which the base's own aligner finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from torch import Tensor
from transformers import WhisperProcessor

from mmdecode.asr.alignment.cross_attention import forced_spans
from mmdecode.asr.alignment.ctc import LetterHead, LetterModel
from mmdecode.checkpoints import code_trusted, local_path
from mmdecode.runs.files import write_arrays
from mmdecode.train.speech_windows import Windows
from mmdecode.zoo.synthesis import SAMPLING_RATE


def align_corpus(folder: Path, base: str) -> None:
    """Writes the word ends of each sentence of a corpus, in seconds; resumable.

    Args:
        folder: Folder of the corpus, see `mmdecode.train.speech_windows.synthesise_corpus`.
        base: Model with an aligner.
    """
    path = local_path(base)
    processor = WhisperProcessor.from_pretrained(path, trust_remote_code=code_trusted())
    aligner = LetterModel(
        LetterHead.from_pretrained(path), processor.feature_extractor, SAMPLING_RATE
    )
    for file in track(sorted(folder.glob("*[0-9].npz")), description="aligning"):
        found = file.with_suffix(".words.npz")
        if found.exists():
            continue
        with np.load(file) as data:
            samples, ends, texts = data["samples"], data["ends"], data["texts"].tolist()
        times, counts = [], []
        for index, text in enumerate(texts):
            wave = samples[ends[index - 1] if index else 0 : ends[index]].astype(np.float32) / 32767
            words = [f" {word}" for word in text.split()]
            log_probs, frame_s = aligner.emit(None, wave, len(wave) / SAMPLING_RATE)
            times += [end * frame_s for _, end in forced_spans(log_probs, words, aligner)]
            counts.append(len(words))
        write_arrays(found, {"times": np.array(times, np.float32), "counts": np.array(counts)})


class AlignedWindows(Windows):
    """Sampler of sentences with the ends of their words; `align_corpus` found them."""

    def refresh(self) -> None:
        """Loads the files of the corpus, and the word ends."""
        super().refresh()
        self.times = []
        for path in sorted(self.known):
            with np.load(path.with_suffix(".words.npz")) as data:
                self.times.append(np.split(data["times"], np.cumsum(data["counts"])[:-1]))

    def sentence(self) -> tuple[Tensor, list[tuple[str, float]]]:
        """Samples a sentence of the corpus; returns its waveform, and its words with their ends."""
        number = self.rng.randrange(len(self.shards))
        samples, ends, texts = self.shards[number]
        i = self.rng.randrange(len(texts))
        wave = samples[ends[i - 1] if i else 0 : ends[i]].astype(np.float32) / 32767
        words = zip(texts[i].split(), self.times[number][i].tolist(), strict=True)
        return torch.from_numpy(wave), list(words)
