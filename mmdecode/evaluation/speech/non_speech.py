"""Synthetic non-speech: silence, noises at several levels, music.

A level is the root mean square in decibels below full scale. ``babble`` has the spectrum, pitch and
rhythm of several talkers at once, and no words; ``music`` is chords of decaying harmonic tones.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from mmdecode.asr.audio.reading import import_or_explain
from mmdecode.asr.output.manifest import Entry
from mmdecode.runs.files import write_file

RATE = 16_000
LEVELS_DB: dict[str, tuple[int | None, ...]] = {
    "silence": (None,),
    "white": (-60, -40, -20),
    "pink": (-60, -40, -20),
    "babble": (-60, -40, -20),
    "music": (-40, -20),
}
"""Levels of each kind in dB relative to full scale; ``None``: digital silence."""
_TALKERS = 6


def sound(kind: str, level_db: int | None, seconds: float, seed: int) -> np.ndarray:
    """Generates one sound, mono float32 at 16 kHz, clipped to full scale.

    Args:
        kind: Key of `LEVELS_DB`.
        level_db: Level in dB relative to full scale; ``None``: digital silence.
        seconds: Length in seconds.
        seed: Seed of the random samples.
    """
    count = round(seconds * RATE)
    if level_db is None:
        return np.zeros(count, np.float32)
    random = np.random.default_rng([seed, zlib.crc32(kind.encode()), -level_db])
    wave = _MAKERS[kind](count, random)
    wave *= 10 ** (level_db / 20) / np.sqrt(np.mean(wave**2))
    return np.clip(wave, -1, 1).astype(np.float32)


def sounds(
    folder: Path, clips: int, seconds: float, seed: int
) -> Iterator[tuple[Entry, Callable[[], np.ndarray]]]:
    """Yields clips of every kind and level.

    Each clip is a manifest entry, with an empty text and an id ``KIND LEVEL/NUMBER``, together with
    a function that generates its samples. No file is written; see `write_flac`.

    Args:
        folder: Folder of the files that the entries name.
        clips: Number of clips of each kind and level.
        seconds: Length of each clip.
        seed: Seed of all clips.
    """
    for kind, levels in LEVELS_DB.items():
        for level in levels:
            name = kind if level is None else f"{kind} {level} dB"
            for number in range(clips):
                path = folder / f"{name.replace(' ', '_')}_{number:02d}.flac"
                entry = Entry(
                    id=f"{name}/{number}", audio=str(path), text="", duration_s=float(seconds)
                )
                yield entry, partial(sound, kind, level, seconds, seed * 1000 + number)


def write_flac(path: Path, wave: np.ndarray, overwrite: bool = False) -> None:
    """Writes mono samples at 16 kHz as 16-bit FLAC.

    Raises:
        MissingExtraError: soundfile is not installed.
    """
    soundfile = import_or_explain("soundfile", "writing audio files")
    data = io.BytesIO()
    soundfile.write(data, wave, RATE, format="FLAC", subtype="PCM_16")
    write_file(path, data.getvalue(), overwrite)


def _white(count: int, random: np.random.Generator) -> np.ndarray:
    return random.standard_normal(count)


def _pink(count: int, random: np.random.Generator) -> np.ndarray:
    spectrum = np.fft.rfft(random.standard_normal(count))
    return np.fft.irfft(spectrum / np.sqrt(np.maximum(np.arange(len(spectrum)), 1)), count)


def _babble(count: int, random: np.random.Generator) -> np.ndarray:
    return np.sum([_talker(count, random) for _ in range(_TALKERS)], axis=0)


def _talker(count: int, random: np.random.Generator) -> np.ndarray:
    """Voiced, unvoiced or silent sounds with random formants, a new sound every 0.1 seconds."""
    size = RATE // 5  # two sounds: each fades into the next
    fade = np.hanning(size)
    frequency = np.fft.rfftfreq(size, 1 / RATE)
    wave = np.zeros(count + size)
    pitch = random.uniform(90, 220)
    for start in range(0, count, size // 2):
        pitch_now = pitch * 2 ** random.uniform(-0.25, 0.25)
        voiced = 2 * (np.arange(size) * pitch_now / RATE % 1) - 1
        source = voiced if random.random() < 0.7 else 0.3 * random.standard_normal(size)
        formants = random.uniform((300, 900, 2200), (800, 2300, 3000))
        gain = sum(1 / (1 + ((frequency - f) / 120) ** 2) for f in formants)
        loudness = random.choice([0.0, 0.3, 1.0], p=[0.25, 0.25, 0.5])
        part = np.fft.irfft(np.fft.rfft(source) * gain, size)
        wave[start : start + size] += loudness * fade * part
    return wave[:count]


def _music(count: int, random: np.random.Generator) -> np.ndarray:
    wave = np.zeros(count)
    start = 0
    while start < count:
        size = min(round(random.uniform(0.3, 1.2) * RATE), count - start)
        times = np.arange(size) / RATE
        root = 110 * 2 ** (random.integers(0, 24) / 12)
        chord = root * 2 ** (np.array([0, random.choice([3, 4]), 7, 12]) / 12)
        for tone in chord:
            for harmonic in range(1, 6):
                phase = 2 * np.pi * (tone * harmonic * times + random.random())
                wave[start : start + size] += np.sin(phase) * np.exp(-2 * times) / harmonic
        start += size
    return wave


_MAKERS: dict[str, Callable[[int, np.random.Generator], np.ndarray]] = {
    "white": _white,
    "pink": _pink,
    "babble": _babble,
    "music": _music,
}
