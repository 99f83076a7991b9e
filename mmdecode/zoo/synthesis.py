"""Speech synthesis with the espeak-ng library, and functions that add noise and reverberation.

It makes the training and test data of the zoo's speech models and is not used for decoding.
espeak-ng is a system package (``apt-get install espeak-ng``). Its shared library is found by the
system's loader, or given by the environment variables ``MMDECODE_ESPEAK_LIB`` (path of the ``.so``)
and ``MMDECODE_ESPEAK_DATA`` (folder that contains ``espeak-ng-data``).
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmdecode.errors import MMDecodeError

SAMPLING_RATE = 16_000
ACCENTS = ("en", "en-us", "en-gb-scotland", "en-gb-x-rp", "en-029", "en-us-nyc")
TRAIN_VARIANTS = tuple(
    "m1 m2 m3 m4 m5 m7 f1 f2 f4 f5 Andy Annie Lee adam anika john linda paul".split()
)
TEST_VARIANTS = ("m6", "f3", "Michael", "steph", "max")
_SYNCHRONOUS, _UTF8, _RATE, _PITCH, _RANGE = 2, 1, 1, 3, 4


@dataclass(frozen=True, kw_only=True)
class Voice:
    """Settings of a synthetic voice.

    Attributes:
        accent: Language code of espeak-ng, such as ``en-us``.
        variant: Timbre: a voice variant of espeak-ng.
        rate: Words per minute.
        pitch: Pitch from 0 to 99.
        pitch_range: Range of the pitch from 0 to 99.
    """

    accent: str
    variant: str
    rate: int
    pitch: int
    pitch_range: int

    @classmethod
    def draw(cls, rng: random.Random, variants: tuple[str, ...] = TRAIN_VARIANTS) -> Voice:
        """Samples a voice.

        Args:
            rng: Random generator.
            variants: Variants to choose from.
        """
        return cls(
            accent=rng.choice(ACCENTS),
            variant=rng.choice(variants),
            rate=rng.randint(135, 190),
            pitch=rng.randint(25, 75),
            pitch_range=rng.randint(25, 75),
        )


class Espeak:
    """Speech synthesiser of the espeak-ng library; ``speak`` is not thread-safe.

    Raises:
        MMDecodeError: The library or its voice data was not found.
    """

    def __init__(self) -> None:
        path = os.environ.get("MMDECODE_ESPEAK_LIB") or ctypes.util.find_library("espeak-ng")
        if path is None:
            raise MMDecodeError(
                "the espeak-ng library, which synthesises the speech, was not found; "
                "install the system package espeak-ng (apt-get install espeak-ng) or set "
                "MMDECODE_ESPEAK_LIB and MMDECODE_ESPEAK_DATA"
            )
        self._lib = ctypes.CDLL(path)
        data = os.environ.get("MMDECODE_ESPEAK_DATA")
        self._rate = self._lib.espeak_Initialize(
            _SYNCHRONOUS, 0, data.encode() if data else None, 0
        )
        if self._rate <= 0:
            raise MMDecodeError(
                f"espeak-ng at {path} failed to start, since its voice data was not found; set "
                "MMDECODE_ESPEAK_DATA to the folder that contains espeak-ng-data"
            )
        self._blocks: list[np.ndarray] = []
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
        )
        self._callback = kind(self._collect)  # kept: the library holds only a bare pointer
        self._lib.espeak_SetSynthCallback(self._callback)

    def _collect(self, wave: object, count: int, events: object) -> int:
        if wave and count > 0:
            self._blocks.append(np.ctypeslib.as_array(wave, shape=(count,)).copy())
        return 0

    def speak(self, text: str, voice: Voice) -> np.ndarray:
        """Synthesises mono float32 samples at 16 kHz with peak 0.5, without silence at the ends.

        Raises:
            MMDecodeError: espeak-ng does not have the voice.
        """
        import torchaudio

        name = f"{voice.accent}+{voice.variant}".encode()
        if self._lib.espeak_SetVoiceByName(name) != 0:
            raise MMDecodeError(f"espeak-ng has no voice {name.decode()!r}")
        for parameter, value in (
            (_RATE, voice.rate),
            (_PITCH, voice.pitch),
            (_RANGE, voice.pitch_range),
        ):
            self._lib.espeak_SetParameter(parameter, value, 0)
        self._blocks.clear()
        encoded = text.encode()
        self._lib.espeak_Synth(encoded, len(encoded) + 1, 0, 1, 0, _UTF8, None, None)
        wave = np.concatenate(self._blocks).astype(np.float32) / 32768
        wave = torchaudio.functional.resample(
            torch.from_numpy(wave), self._rate, SAMPLING_RATE
        ).numpy()
        loud = np.flatnonzero(np.abs(wave) > 0.01)
        wave = wave[loud[0] : loud[-1] + 1]
        return (0.5 * wave / np.abs(wave).max()).astype(np.float32)


def add_noise(wave: Tensor, snr_db: float, generator: torch.Generator, tilt: float = 1.0) -> Tensor:
    """Adds coloured noise to a waveform; the signal's power is measured over its loud samples.

    Args:
        wave: Samples, ``(T,)``.
        snr_db: Signal-to-noise ratio in decibels.
        generator: Random generator of the noise.
        tilt: Exponent of the spectral fall-off: 0 gives white, 1 pink, 2 brown noise.
    """
    white = torch.randn(wave.shape[-1], generator=generator)
    spectrum = torch.fft.rfft(white)
    frequency = torch.arange(len(spectrum)).clamp_min(1).float()
    noise = torch.fft.irfft(spectrum * frequency.pow(-tilt / 2), n=wave.shape[-1])
    loud = wave[wave.abs() > 0.02]
    power = loud.square().mean() if len(loud) else torch.tensor(0.01)
    noise = noise * (power / noise.square().mean().clamp_min(1e-12) / 10 ** (snr_db / 10)).sqrt()
    return wave + noise


def music(seconds: float, rng: random.Random) -> np.ndarray:
    """Makes simple music: chords of decaying harmonics with a melody and a beat of noise.

    Args:
        seconds: Its length.
        rng: Random generator of tempo, chords, melody and timbre.

    Returns:
        Mono float32 samples at 16 kHz with peak 0.5.
    """
    count = round(seconds * SAMPLING_RATE)
    wave = np.zeros(count + 2 * SAMPLING_RATE, np.float32)
    beat = round(60 / rng.uniform(70, 150) * SAMPLING_RATE)
    scale, root = (0, 2, 4, 5, 7, 9, 11), rng.uniform(110, 220)
    timbre = [rng.uniform(0, 1) / (k + 1) for k in range(6)]

    def note(start: int, step: int, beats: float, loud: float) -> None:
        length = min(round(beats * beat), len(wave) - start)
        time = np.arange(length) / SAMPLING_RATE
        pitch = root * 2 ** ((scale[step % 7] + 12 * (step // 7)) / 12)
        tone = sum(
            part * np.sin(2 * np.pi * pitch * (k + 1) * time)
            for k, part in enumerate(timbre)
            if pitch * (k + 1) < SAMPLING_RATE / 2
        )
        envelope = np.minimum(1, time * 50) * np.exp(-time * rng.uniform(1, 4))
        wave[start : start + length] += (loud * envelope * tone).astype(np.float32)

    noise = np.random.default_rng(rng.randrange(2**31))
    drums, melody = rng.random() < 0.6, rng.randrange(7, 14)
    for index, start in enumerate(range(0, count, beat)):
        if index % 4 == 0:
            degree = rng.choice((0, 3, 4, 5))
            for step in (degree, degree + 2, degree + 4):
                note(start, step, 4, 0.5)
        melody = min(max(melody + rng.randint(-2, 2), 5), 16)
        note(start, melody, rng.choice((0.5, 1, 2)), 0.6)
        if drums:
            hit = noise.standard_normal(1600) * np.exp(-np.arange(1600) / 300)
            wave[start : start + 1600] += (0.3 * hit).astype(np.float32)
    wave = wave[:count]
    return (0.5 * wave / max(1e-6, float(np.abs(wave).max()))).astype(np.float32)


def add_reverberation(wave: Tensor, decay_s: float, generator: torch.Generator) -> Tensor:
    """Adds reverberation, by convolution with exponentially decaying noise; keeps the peak.

    Args:
        wave: Samples at 16 kHz, ``(T,)``.
        decay_s: Seconds after which the noise has decayed by 60 dB.
        generator: Random generator of the noise.
    """
    length = int(decay_s * SAMPLING_RATE)
    time = torch.arange(length) / SAMPLING_RATE
    response = torch.randn(length, generator=generator) * torch.exp(-6.9 * time / decay_s) * 0.05
    response[0] = 1.0
    size = wave.shape[-1] + length
    mixed = torch.fft.irfft(
        torch.fft.rfft(wave, n=size) * torch.fft.rfft(response, n=size), n=size
    )[: wave.shape[-1]]
    return mixed * (wave.abs().max() / mixed.abs().max().clamp_min(1e-6))
