"""Test set of word timestamps: speech synthesised word by word, so that word times are known.

The speech synthesiser does not return the times of the words in a sentence. Therefore single words
are synthesised and concatenated, with short gaps and some long pauses. `build_joined_words`
generated the Ogg Vorbis files in ``data/joined-words``, from sentences and voices on which no model
of this package was trained.
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
    """Speech of one sentence, concatenated from single words.

    Attributes:
        wave: Mono float32 samples at 16 kHz.
        text: The sentence.
        times: Start and end of each word, in seconds.
    """

    wave: np.ndarray
    text: str
    times: list[tuple[float, float]]


def join_words(
    engine: synthesis.Espeak, text: str, voice: synthesis.Voice, rng: random.Random
) -> Joined:
    """Synthesises the words of a text one by one and concatenates them.

    The gap before a word is up to 0.15 s, or in one of seven cases a pause of 0.5 to 1.5 s.

    Args:
        engine: Speech synthesiser.
        text: The sentence.
        voice: Voice of all words.
        rng: Random generator of the gaps.
    """
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
    """Synthesises sentences of the grammar's training or test side; needs espeak-ng.

    Args:
        count: Maximum number of sentences.
        seed: Seed of sentences, voices and gaps.
        side: ``train`` or ``test``, for the sentences and for the voices.
        longest_s: Maximum duration in seconds; longer recordings are discarded.
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
    """Reads the test set that comes with the package."""
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
    """Synthesises the test set and writes it to a folder; needs espeak-ng.

    Args:
        folder: Folder of the recordings and of ``manifest.jsonl``.
        count: Number of recordings.
        seed: Seed of sentences, voices and gaps.
    """
    import soundfile

    rows = []
    for index, joined in enumerate(draw_joined_words(count, seed, "test", 8.0)):
        name = f"joined_{index}.ogg"
        data = io.BytesIO()
        soundfile.write(data, joined.wave, RATE, format="OGG", subtype="VORBIS")
        write_file(folder / name, data.getvalue())
        rows.append({"file": name} | {k: v for k, v in asdict(joined).items() if k != "wave"})
    write_rows(folder / "manifest.jsonl", rows)
