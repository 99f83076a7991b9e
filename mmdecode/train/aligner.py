"""Training recipe of `LetterHead`, which gives CTC character probabilities for forced alignment.

The head is trained on synthetic sentences that are concatenated from single words, so that word
times are known (`mmdecode.zoo.joined_words`), with noise and reverberation. In the labels, the
characters of a word divide the word's frames evenly, and all other frames are blank. The head thus
learns where words begin and end, and roughly where characters are.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

from mmdecode.asr.alignment.ctc import FILE, SYMBOLS, LetterHead
from mmdecode.runs.files import refuse_foreign, write_folder
from mmdecode.zoo import synthesis
from mmdecode.zoo.joined_words import RATE, Joined, draw_joined_words


@dataclass(frozen=True, kw_only=True)
class AlignerOptions:
    """Settings of the recipe.

    Attributes:
        sentences: Number of training sentences.
        steps: Number of training steps.
        batch: Sentences per step.
        peak_rate: Highest learning rate (AdamW, cosine schedule).
        seed: Seed of data, weights and batches.
    """

    sentences: int = 1500
    steps: int = 1500
    batch: int = 12
    peak_rate: float = 3e-3
    seed: int = 0


def frame_labels(text: str, times: list[tuple[float, float]], frame_s: float, count: int) -> Tensor:
    """Returns the CTC label of each frame, ``(count,)``; 0 is the blank.

    A character that repeats the one before it starts with one blank frame, as CTC requires.

    Args:
        text: Words, separated by spaces.
        times: Start and end of each word, in seconds.
        frame_s: Duration of a frame in seconds.
        count: Number of frames.
    """
    labels = torch.zeros(count, dtype=torch.long)
    for word, (start, end) in zip(text.lower().split(), times, strict=True):
        symbols = [SYMBOLS.index(c) for c in word if c in SYMBOLS[1:]]
        edges = np.linspace(start / frame_s, end / frame_s, len(symbols) + 1).round().astype(int)
        for i, symbol in enumerate(symbols):
            repeats = i > 0 and symbols[i - 1] == symbol
            labels[edges[i] + repeats : edges[i + 1]] = symbol
    return labels


def damage(wave: Tensor, rng: random.Random, generator: torch.Generator) -> Tensor:
    """Adds reverberation (20 % of calls) and noise (60 %), and lowers the volume at random."""
    if rng.random() < 0.2:
        wave = synthesis.add_reverberation(wave, rng.uniform(0.1, 0.4), generator)
    if rng.random() < 0.6:
        wave = synthesis.add_noise(wave, rng.uniform(3, 30), generator, tilt=rng.uniform(0, 1.5))
    return wave * 10 ** rng.uniform(-1, 0)


def train_aligner(extractor: Any, data: list[Joined], options: AlignerOptions) -> LetterHead:
    """Trains a head on sentences with known word times.

    Args:
        extractor: The ``WhisperFeatureExtractor`` whose features are the head's input.
        data: Training sentences, none longer than the extractor's window.
        options: Settings.
    """
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    head = LetterHead(extractor.feature_size)
    optimizer = torch.optim.AdamW(head.parameters(), lr=options.peak_rate, weight_decay=0.01)
    frame_s = extractor.hop_length / RATE
    for step in track(range(options.steps), description="letters"):
        sampled = rng.sample(data, options.batch)
        waves = [damage(torch.from_numpy(j.wave), rng, generator).numpy() for j in sampled]
        features = extractor(waves, sampling_rate=RATE, return_tensors="pt").input_features
        labels = torch.stack(
            [frame_labels(j.text, j.times, frame_s, features.shape[-1]) for j in sampled]
        )
        loss = F.cross_entropy(head(features).flatten(0, 1), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        warm = min(1.0, (step + 1) / 100)
        for group in optimizer.param_groups:
            cosine = 0.5 * (1 + math.cos(math.pi * step / options.steps))
            group["lr"] = options.peak_rate * warm * (0.02 + 0.98 * cosine)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return head.eval()


def run(model_folder: str, out: Path, options: AlignerOptions) -> LetterHead:
    """Synthesises the training data, trains a head and saves it; needs espeak-ng.

    Args:
        model_folder: Folder of the Whisper whose feature extractor makes the head's input.
        out: Folder to write the head to.
        options: Settings.
    """
    from transformers import WhisperFeatureExtractor

    refuse_foreign([out / FILE])
    extractor = WhisperFeatureExtractor.from_pretrained(model_folder, trust_remote_code=False)
    data = draw_joined_words(options.sentences, options.seed, "train", extractor.chunk_length)
    head = train_aligner(extractor, data, options)
    write_folder(out, head.save_pretrained)
    return head
