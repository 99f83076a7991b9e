"""Recordings of synthesised sentences with noise and reverberation, to train draft heads on.

``mmdecode train zoo spoken-sentences`` writes WAV files and ``manifest.jsonl`` (``audio``,
``text``), which ``mmdecode train medusa`` and ``mmdecode train ctc`` read. The sentences are those
of the domain ``general`` of `mmdecode.train.zoo.sentences`; none is that of a real clip.
"""

from __future__ import annotations

import io
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track

from mmdecode.runs.files import write_file
from mmdecode.runs.tables import write_rows
from mmdecode.train.zoo.sentences import Domain, training_sentences
from mmdecode.zoo import synthesis


@dataclass(frozen=True, kw_only=True)
class SpokenOptions:
    """Settings of the recordings.

    Attributes:
        domain: Domain of the sentences, see `mmdecode.train.zoo.sentences`.
        count: Number of recordings.
        snr_db: Minimum and maximum signal-to-noise ratio of noisy recordings, in decibels.
        noisy: Share of the recordings with noise.
        reverberant: Share of the recordings with reverberation.
        seed: Seed of sentences, voices, rooms and noise.
    """

    domain: Domain = "general"
    count: int = 3600
    snr_db: tuple[float, float] = (6.0, 30.0)
    noisy: float = 0.75
    reverberant: float = 0.2
    seed: int = 0


def spoken(
    engine: synthesis.Espeak, text: str, rng: random.Random, options: SpokenOptions
) -> np.ndarray:
    """Synthesises a sentence in a random training voice, mono float32 at 16 kHz."""
    wave = torch.from_numpy(engine.speak(text, synthesis.Voice.draw(rng)))
    before, after = (round(rng.uniform(0.1, 0.5) * synthesis.SAMPLING_RATE) for _ in range(2))
    wave = torch.nn.functional.pad(wave, (before, after))
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    if rng.random() < options.reverberant:
        wave = synthesis.add_reverberation(wave, rng.uniform(0.1, 0.5), generator)
    if rng.random() < options.noisy:
        snr_db, tilt = rng.uniform(*options.snr_db), rng.uniform(0.0, 1.5)
        wave = synthesis.add_noise(wave, snr_db, generator, tilt)
    return wave.clamp(-1, 1).numpy()


def run(options: SpokenOptions, out: Path) -> dict[str, Any]:
    """Writes the recordings and their manifest; files that exist are kept.

    Args:
        options: Settings.
        out: Folder of the result.
    """
    import soundfile

    engine = synthesis.Espeak()
    texts = training_sentences(options.domain, options.count, options.seed)
    rows = []
    try:
        for index, text in enumerate(track(texts, description="speaking")):
            path = out / f"{index:06d}.wav"
            if not path.exists():
                rng = random.Random(f"spoken/{options.domain}/{options.seed}/{index}")
                data, wave = io.BytesIO(), spoken(engine, text, rng, options)
                soundfile.write(data, wave, synthesis.SAMPLING_RATE, format="WAV", subtype="PCM_16")
                write_file(path, data.getvalue())
            rows.append({"audio": path.name, "text": text})
    finally:  # what is there can be used
        if rows:
            write_rows(out / "manifest.jsonl", rows)
    return {"folder": str(out), "recordings": len(rows)}
