"""Sentences synthesised word by word, so that each word's time is known: ``data/joined-words``.

A synthesiser does not return the times of words in a sentence, so the words are synthesised one by
one and joined, with short gaps and some long pauses. `build_joined_words` made the Ogg Vorbis files
of the test set, from sentences and voices that the zoo's models were never trained on.
"""

from __future__ import annotations

import io
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mmdecode.runs.files import write_file
from mmdecode.runs.tables import write_rows
from mmdecode.zoo import grammar, synthesis

FOLDER = Path(__file__).parent / "data" / "joined-words"
RATE = synthesis.SAMPLING_RATE


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A sentence of joined words.

    Attributes:
        wave: Mono float32 samples at 16 kHz.
        text: The sentence.
        times: Start and end of each of its words, in seconds.
    """

    wave: np.ndarray
    text: str
    times: list[tuple[float, float]]


def join_words(
    engine: synthesis.Espeak, text: str, voice: synthesis.Voice, rng: random.Random
) -> Joined:
    """Synthesises the words of ``text`` one by one, with gaps up to 0.15 s and some longer ones."""
    parts: list[np.ndarray] = []
    times: list[tuple[float, float]] = []
    position = 0

    def add(wave: np.ndarray) -> tuple[float, float]:
        nonlocal position
        start, position = position, position + len(wave)
        parts.append(wave)
        return round(start / RATE, 3), round(position / RATE, 3)

    add(_silence(rng.uniform(0.1, 0.8)))
    for word in text.split():
        if times:
            pause = rng.random() < 1 / 7
            add(_silence(rng.uniform(0.5, 1.5) if pause else rng.uniform(0.0, 0.15)))
        times.append(add(engine.speak(word.strip(".,?!"), voice)))
    add(_silence(rng.uniform(0.1, 0.8)))
    return Joined(wave=np.concatenate(parts), text=text, times=times)


def _silence(seconds: float) -> np.ndarray:
    return np.zeros(round(seconds * RATE), dtype=np.float32)


def draw_joined_words(count: int, seed: int, side: str, longest_s: float) -> list[Joined]:
    """Samples sentences of one side of the grammar in that side's voices; needs espeak-ng.

    Args:
        count: Number of sentences.
        seed: Seed of the sampling.
        side: ``train`` or ``test``.
        longest_s: Maximum duration in seconds; longer ones are left out.
    """
    rng = random.Random(f"joined/{side}/{seed}")
    variants = synthesis.TRAIN_VARIANTS if side == "train" else synthesis.TEST_VARIANTS
    engine = synthesis.Espeak()
    found: list[Joined] = []
    for text in grammar.sentences(20 * count, seed, "train" if side == "train" else "test"):
        voice = synthesis.Voice.draw(rng, variants)
        joined = join_words(engine, text, voice, rng)
        if len(joined.wave) <= longest_s * RATE:
            found.append(joined)
        if len(found) == count:
            break
    return found


def joined_words() -> list[Joined]:
    """The shipped test set."""
    import soundfile

    rows = [
        json.loads(line)
        for line in (FOLDER / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return [
        Joined(
            wave=soundfile.read(FOLDER / row["file"], dtype="float32")[0],
            text=row["text"],
            times=[tuple(pair) for pair in row["times"]],
        )
        for row in rows
    ]


def build_joined_words(folder: Path = FOLDER, count: int = 6, seed: int = 2026) -> None:
    """Synthesises the test set into a folder; needs espeak-ng."""
    import soundfile

    rows = []
    for index, joined in enumerate(draw_joined_words(count, seed, "test", 8.0)):
        name = f"joined_{index}.ogg"
        data = io.BytesIO()
        soundfile.write(data, joined.wave, RATE, format="OGG", subtype="VORBIS")
        write_file(folder / name, data.getvalue())
        rows.append({"file": name} | {k: v for k, v in asdict(joined).items() if k != "wave"})
    write_rows(folder / "manifest.jsonl", rows)
