"""Speech synthesis by the espeak-ng library, with noise and reverberation.

Used by the recipes that train and test the zoo's speech models; nothing here runs at decoding
time. espeak-ng is a system package (``apt-get install espeak-ng``); its shared library is found by
the system's loader, or through the environment variables ``MMDECODE_ESPEAK_LIB`` (the ``.so``) and
``MMDECODE_ESPEAK_DATA`` (the folder that holds ``espeak-ng-data``).
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
    """A voice: accent and timbre of espeak-ng, words per minute, pitch and its range (0 to 99)."""

    accent: str
    variant: str
    rate: int
    pitch: int
    pitch_range: int

    @classmethod
    def draw(cls, rng: random.Random, variants: tuple[str, ...] = TRAIN_VARIANTS) -> Voice:
        """Samples a voice."""
        return cls(
            accent=rng.choice(ACCENTS),
            variant=rng.choice(variants),
            rate=rng.randint(135, 190),
            pitch=rng.randint(25, 75),
            pitch_range=rng.randint(25, 75),
        )


class Espeak:
    """The espeak-ng library, loaded once per process; ``speak`` is not thread-safe."""

    def __init__(self) -> None:
        path = os.environ.get("MMDECODE_ESPEAK_LIB") or ctypes.util.find_library("espeak-ng")
        if path is None:
            raise MMDecodeError(
                "the espeak-ng library was not found, and this recipe speaks through it; "
                "install the system package espeak-ng (apt-get install espeak-ng) or set "
                "MMDECODE_ESPEAK_LIB and MMDECODE_ESPEAK_DATA"
            )
        self._lib = ctypes.CDLL(path)
        data = os.environ.get("MMDECODE_ESPEAK_DATA")
        self._rate = self._lib.espeak_Initialize(
            _SYNCHRONOUS, 0, data.encode() if data else None, 0
        )
        if self._rate <= 0:
            raise MMDecodeError(f"espeak-ng at {path} failed to start: its voice data is missing")
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
        """Synthesises mono float32 samples at 16 kHz, peak 0.5, silence at both ends removed."""
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
    """``wave`` plus coloured noise at a signal-to-noise ratio measured over the loud samples.

    Args:
        wave: Samples, ``(T,)``.
        snr_db: Signal-to-noise ratio in decibels.
        generator: Random generator of the noise.
        tilt: Exponent of the spectral fall-off: 0 is white, 1 pink, 2 brown noise.
    """
    white = torch.randn(wave.shape[-1], generator=generator)
    spectrum = torch.fft.rfft(white)
    frequency = torch.arange(len(spectrum)).clamp_min(1).float()
    noise = torch.fft.irfft(spectrum * frequency.pow(-tilt / 2), n=wave.shape[-1])
    loud = wave[wave.abs() > 0.02]
    power = loud.square().mean() if len(loud) else torch.tensor(0.01)
    noise = noise * (power / noise.square().mean().clamp_min(1e-12) / 10 ** (snr_db / 10)).sqrt()
    return wave + noise


def add_reverberation(wave: Tensor, decay_s: float, generator: torch.Generator) -> Tensor:
    """Adds reverberation: convolves with exponentially decaying noise, -60 dB after ``decay_s``."""
    length = int(decay_s * SAMPLING_RATE)
    time = torch.arange(length) / SAMPLING_RATE
    response = torch.randn(length, generator=generator) * torch.exp(-6.9 * time / decay_s) * 0.05
    response[0] = 1.0
    size = wave.shape[-1] + length
    mixed = torch.fft.irfft(
        torch.fft.rfft(wave, n=size) * torch.fft.rfft(response, n=size), n=size
    )[: wave.shape[-1]]
    return mixed * (wave.abs().max() / mixed.abs().max().clamp_min(1e-6))
