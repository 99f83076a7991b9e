"""Computes Whisper's log-mel features window by window, with only a few windows in memory.

Whisper clips its features at eight decades below the loudest value of the whole *recording*, which
is found in a first pass over the recording (`mmdecode.asr.audio.recording`).

The last window is padded in one of two ways. ``zeros``: the features are padded with 0, as in
transformers' long form. ``silence``: the audio is padded with silence, as in openai/whisper and in
transformers' processor for short recordings. ``auto`` follows transformers: ``silence`` if the
recording fits into one window, else ``zeros``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from mmdecode.asr.audio.reading import source_of
from mmdecode.asr.audio.recording import KEEP_S, Recording, Tape
from mmdecode.errors import InputError, UnsupportedModelError

if TYPE_CHECKING:
    from mmdecode.asr.audio.reading import Source

Padding = Literal["auto", "silence", "zeros"]
PADDINGS: tuple[str, ...] = get_args(Padding)
STEP = 1024
"""Frames computed at once in the search for the loudest value of a recording."""


class Mel:
    """The feature extractor's log-mel transform, applied to parts of a recording.

    Args:
        extractor: A ``WhisperFeatureExtractor``.
        window_frames: Number of feature frames that the encoder reads.
        step: Frames computed at once in the search for the loudest value of a recording.

    Attributes:
        rate: Sampling rate in Hz.
        hop: Samples per frame.
        size: Samples of the Fourier transform.
        filters: Mel filters, ``(mels, bins)``.

    Raises:
        UnsupportedModelError: The extractor adds dither.
    """

    def __init__(self, extractor: Any, window_frames: int, *, step: int = STEP) -> None:
        if extractor.dither:
            raise UnsupportedModelError(
                f"the feature extractor adds noise (dither={extractor.dither}), which would differ "
                "from window to window; set dither=0.0"
            )
        self.rate, self.hop = int(extractor.sampling_rate), int(extractor.hop_length)
        self.size, self.window_frames = int(extractor.n_fft), window_frames
        self.filters = torch.from_numpy(np.asarray(extractor.mel_filters)).float().T
        self._step = step
        self._hann = torch.hann_window(self.size)

    def frames(self, tape: Tape, first: int, count: int) -> Tensor:
        """Returns log10 mel energies of ``count`` frames from ``first`` on, ``(mels, count)``."""
        start = first * self.hop - self.size // 2
        samples = tape.read(start, start + (count - 1) * self.hop + self.size)
        return self.energies(torch.from_numpy(samples))

    def energies(self, samples: Tensor) -> Tensor:
        """Returns log10 mel energies ``(mels, count)`` of all whole frames of samples ``(T,)``."""
        spectrum = torch.stft(
            samples,
            self.size,
            self.hop,
            window=self._hann,
            center=False,
            return_complex=True,
        )
        return (self.filters @ (spectrum.abs() ** 2)).clamp(min=1e-10).log10()

    def features(self, energies: Tensor, peak: float) -> Tensor:
        """Returns the encoder input of a window, padded with zeros, ``(mels, window frames)``.

        Args:
            energies: log10 mel energies, ``(mels, count)``.
            peak: Largest log10 mel energy of the recording; values below ``peak - 8`` are clipped.
        """
        padding = self.window_frames - energies.shape[1]
        return torch.nn.functional.pad((energies.clamp(min=peak - 8.0) + 4.0) / 4.0, (0, padding))

    def maximum(self, tape: Tape) -> float:
        """Returns the largest log10 mel energy of a whole recording."""
        first, loudest = 0, -10.0
        while True:
            tape.fill((first + self._step) * self.hop + self.size)
            count = min(self._step, tape.end // self.hop - first)
            if count > 0:
                loudest = max(loudest, float(self.frames(tape, first, count).max()))
            if count < self._step:
                return loudest
            first += count


class Speech(Recording):
    """A recording that is read as log-mel features, window by window.

    Args:
        source: Source of the recording.
        mel: The model's log-mel transform.
        padding: Padding of the last window.
        keep_s: Longest recording that is kept in memory, in seconds.

    Attributes:
        peak: Its largest log10 mel energy.

    Raises:
        InputError: The recording cannot be read, or is damaged.
    """

    def __init__(
        self, source: Source, mel: Mel, padding: Padding = "auto", *, keep_s: float = KEEP_S
    ) -> None:
        self.mel, self._padding = mel, padding
        super().__init__(source, mel.rate, keep_s=keep_s)
        self._tape = Tape(itertools.chain(self._replay(), self._silence()))

    def _first_pass(self, parts: Iterator[np.ndarray], known: int | None) -> None:
        mel, padding = self.mel, self._padding
        if padding == "auto":
            fits = known is not None and known // mel.hop <= mel.window_frames
            padding = "silence" if fits else "zeros"
        self._trailing_silence = mel.window_frames * mel.hop if padding == "silence" else 0
        if known is not None and known < mel.size:  # the transform needs one whole frame
            self._trailing_silence = max(self._trailing_silence, mel.size)
        self.peak = mel.maximum(Tape(itertools.chain(parts, self._silence())))

    @property
    def frames(self) -> int:
        """Number of feature frames to transcribe, without padding."""
        return max(1, self.samples // self.mel.hop)

    def window(self, seek: int, count: int | None = None) -> Tensor:
        """Returns the features of the window at frame ``seek``, ``(mels, window_frames)``.

        Calls have to be in order of ``seek``.

        Args:
            seek: First frame.
            count: Number of frames, after which silence follows; ``None``: all.
        """
        kept, silence = self._kept(seek, count)
        energies = self.mel.frames(self._tape, seek, kept)
        return self.mel.features(_followed(energies, silence), self.peak)

    def window_waveform(self, seek: int, count: int | None = None) -> WindowWaveform:
        """Returns the waveform of the window at frame ``seek``; calls have to be in order.

        Args:
            seek: First frame.
            count: See `window`.
        """
        mel, (kept, silence) = self.mel, self._kept(seek, count)
        start = seek * mel.hop - mel.size // 2
        samples = self._tape.read(start, start + (kept - 1) * mel.hop + mel.size)
        return WindowWaveform(torch.from_numpy(samples), mel, self.peak, silence)

    def _kept(self, seek: int, count: int | None) -> tuple[int, int]:
        """Returns the number of frames of a window that are read, and of silent ones after them."""
        frames = self.mel.window_frames
        if count in (None, min(frames, self.frames - seek)):
            left = self.frames - seek + self._trailing_silence // self.mel.hop
            return min(frames, left), 0
        assert count is not None, "checked"
        return count, frames - count

    def window_samples(self, seek: int, frames: int) -> np.ndarray:
        """Returns the samples ``(T,)`` of a window, no padding; call it right after `window`."""
        mel, count = self.mel, frames * self.mel.hop
        # begins where the window's first frame does: the tape never goes back
        start = seek * mel.hop - mel.size // 2
        return self._tape.read(start, start + mel.size // 2 + count)[mel.size // 2 :]

    def _silence(self) -> list[np.ndarray]:
        return [np.zeros(self._trailing_silence, np.float32)] if self._trailing_silence else []


@dataclass(frozen=True)
class WindowWaveform:
    """Waveform of a window, for guides that change it; see `mmdecode.adapters.audio.transforms`.

    Attributes:
        samples: Samples ``(T,)``, with half a frame of the recording before and after the window.
        mel: The model's log-mel transform.
        peak: Largest log10 mel energy of the recording.
        silence: Number of silent frames after them.
        certain: Whether it certainly belongs to the features of the call; False if a user passes
            waveform and features separately.
    """

    samples: Tensor
    mel: Mel
    peak: float
    silence: int = 0
    certain: bool = True

    def features(self, samples: Tensor) -> Tensor:
        """Returns the encoder input for changed samples of this window, ``(mels, frames)``."""
        return self.mel.features(_followed(self.mel.energies(samples), self.silence), self.peak)


def _followed(energies: Tensor, silence: int) -> Tensor:
    """Returns log10 mel energies ``(mels, frames)`` with silent frames after them."""
    return torch.nn.functional.pad(energies, (0, silence), value=-10.0)


def window_waveform(samples: np.ndarray, extractor: Any) -> WindowWaveform:
    """Makes the waveform of a recording of at most one window, for ``mm_inputs["audio"]``.

    Args:
        samples: Mono samples ``(T,)``, at the extractor's rate.
        extractor: The ``WhisperFeatureExtractor`` that made the call's features.

    Raises:
        InputError: The recording is longer than a window, or is damaged.
    """
    mel = Mel(extractor, int(extractor.nb_max_frames))
    speech = Speech(source_of((samples, mel.rate), mel.rate), mel, "silence")
    if speech.frames > mel.window_frames:
        raise InputError(
            f"the recording has {speech.duration_s:g} s, which is longer than one window; cut it, "
            "or use mmdecode.asr.Transcriber"
        )
    return replace(speech.window_waveform(0), certain=False)
