"""Whisper's log-mel features of one recording, window by window, in memory of a few windows.

Whisper clips its features at eight decades below the *recording's* loudest value, so a recording
is read twice: once for its length and its maximum, once for the windows. Recordings of up to
`KEEP_S` seconds are kept in memory instead; longer ones are decoded again.

The last window is filled up in one of two ways. ``zeros``: the features are padded with 0, as in
transformers' long form. ``silence``: the audio is padded with silence, as openai/whisper does and
as transformers' processor does with short recordings. ``auto`` follows transformers in both:
silence where the recording fits into one window, zeros where it does not.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from mmdecode.asr.audio import blocks, source_of
from mmdecode.errors import InputError, UnsupportedModelError

if TYPE_CHECKING:
    from mmdecode.asr.audio import Source

KEEP_S = 300
Padding = Literal["auto", "silence", "zeros"]
PADDINGS: tuple[str, ...] = get_args(Padding)
_STEP = 1024  # frames per step when looking for the maximum


class Mel:
    """The feature extractor's transform on parts of a recording.

    Args:
        extractor: A ``WhisperFeatureExtractor``.
        window_frames: Frames that the encoder takes.
    """

    def __init__(self, extractor: Any, window_frames: int) -> None:
        if extractor.dither:
            raise UnsupportedModelError(
                f"the feature extractor adds noise (dither={extractor.dither}), which would differ "
                "from window to window; set dither=0.0"
            )
        self.rate, self.hop = int(extractor.sampling_rate), int(extractor.hop_length)
        self.size, self.window_frames = int(extractor.n_fft), window_frames
        self.filters = torch.from_numpy(np.asarray(extractor.mel_filters)).float().T
        self._hann = torch.hann_window(self.size)

    def frames(self, tape: Tape, first: int, count: int) -> Tensor:
        """log10 mel energies of frames ``first`` to ``first + count``, ``(mels, count)``."""
        start = first * self.hop - self.size // 2
        samples = tape.read(start, start + (count - 1) * self.hop + self.size)
        return self.energies(torch.from_numpy(samples))

    def energies(self, samples: Tensor) -> Tensor:
        """log10 mel energies of every whole frame of some samples, ``(mels, count)``."""
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
        """What the model is given of a window, filled up with zeros, ``(mels, window frames)``.

        Args:
            energies: ``(mels, count)``.
            peak: The loudest of the recording; what is eight decades below is clipped.
        """
        padding = self.window_frames - energies.shape[1]
        return torch.nn.functional.pad((energies.clamp(min=peak - 8.0) + 4.0) / 4.0, (0, padding))

    def maximum(self, tape: Tape) -> float:
        """The loudest value of a whole recording."""
        first, loudest = 0, -10.0
        while True:
            tape.fill((first + _STEP) * self.hop + self.size)
            count = min(_STEP, tape.end // self.hop - first)
            if count > 0:
                loudest = max(loudest, float(self.frames(tape, first, count).max()))
            if count < _STEP:
                return loudest
            first += count


class Tape:
    """Samples by position from blocks that arrive in order; what was left behind is dropped.

    Beyond both ends of the recording it is mirrored, as ``torch.stft`` mirrors it.
    """

    def __init__(self, parts: Iterator[np.ndarray]) -> None:
        self._parts = parts
        self._held = np.zeros(0, np.float32)
        self._start = 0

    @property
    def end(self) -> int:
        """Samples that have arrived."""
        return self._start + len(self._held)

    def fill(self, end: int) -> None:
        """Takes blocks until ``end`` samples have arrived or none are left."""
        taken, size = [self._held], self.end
        while size < end and (part := next(self._parts, None)) is not None:
            taken.append(part)
            size += len(part)
        if len(taken) > 1:
            self._held = np.concatenate(taken)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Samples ``start`` to ``stop``; ``start`` never goes back."""
        self.fill(stop)
        low, high = max(start, 0), min(stop, self.end)
        self._held, self._start = self._held[low - self._start :], low
        inside = self._held[: high - low]
        return np.pad(inside, (low - start, stop - high), mode="reflect")


class Speech:
    """One recording, measured and ready to be read window by window.

    Args:
        source: The recording.
        mel: The model's features.
        padding: How the last window is filled up.

    Attributes:
        name: The recording's name.
        key: A hash of its samples.
        duration_s: Its length.
        frames: Feature frames to transcribe; padding is not among them.

    Raises:
        InputError: The recording cannot be read or trusted.
    """

    def __init__(self, source: Source, mel: Mel, padding: Padding = "auto") -> None:
        self.name, self.mel = source.name, mel
        meter = _Meter(blocks(source, mel.rate))
        kept = list(itertools.takewhile(lambda _: meter.samples <= KEEP_S * mel.rate, meter))
        self._replay: Callable[[], Iterator[np.ndarray]]
        if meter.ended:
            samples = np.concatenate(kept) if kept else np.zeros(0, np.float32)
            self._replay = lambda: iter([samples])
            first = self._replay()
        else:
            self._replay = lambda: blocks(source, mel.rate)
            # takewhile has swallowed the block that was one too many
            first = itertools.chain(kept, [meter.last], meter)
            kept = []
        window_samples = mel.window_frames * mel.hop
        if padding == "auto":
            fits = meter.ended and meter.samples // mel.hop <= mel.window_frames
            padding = "silence" if fits else "zeros"
        self._behind = window_samples if padding == "silence" else 0
        if meter.ended and meter.samples < mel.size:  # the transform needs one whole frame
            self._behind = max(self._behind, mel.size)
        self.peak = mel.maximum(Tape(itertools.chain(first, self._silence())))
        if not meter.samples:
            raise InputError(f"{self.name}: holds no samples; expected at least one")
        self.duration_s = meter.samples / mel.rate
        self.frames = max(1, meter.samples // mel.hop)
        self.key = meter.digest.hexdigest()
        self._tape = Tape(itertools.chain(self._replay(), self._silence()))

    def window(self, seek: int) -> Tensor:
        """Features from frame ``seek`` on, ``(mels, window_frames)``; ``seek`` never goes back."""
        return self.mel.features(self.mel.frames(self._tape, seek, self._count(seek)), self.peak)

    def heard(self, seek: int) -> Heard:
        """The waveform of `window` from frame ``seek`` on; ``seek`` never goes back."""
        mel = self.mel
        start = seek * mel.hop - mel.size // 2
        samples = self._tape.read(start, start + (self._count(seek) - 1) * mel.hop + mel.size)
        return Heard(torch.from_numpy(samples), mel, self.peak)

    def _count(self, seek: int) -> int:
        """Frames of a window that are not padded with zeros."""
        left = self.frames - seek + self._behind // self.mel.hop
        return min(self.mel.window_frames, left)

    def samples(self, seek: int) -> np.ndarray:
        """What is heard from frame ``seek`` on, no padding; right after `window` of that frame."""
        mel = self.mel
        count = min(mel.window_frames, self.frames - seek) * mel.hop
        # begins where the window's first frame does: the tape never goes back
        start = seek * mel.hop - mel.size // 2
        return self._tape.read(start, start + mel.size // 2 + count)[mel.size // 2 :]

    def tape(self) -> Tape:
        """The recording once more, from its beginning, without padding."""
        return Tape(self._replay())

    def _silence(self) -> list[np.ndarray]:
        return [np.zeros(self._behind, np.float32)] if self._behind else []


@dataclass(frozen=True)
class Heard:
    """A window as a waveform that can be changed; see `mmdecode.adapters.audio_views`.

    Attributes:
        samples: ``(T,)``, with half a frame of what stands before and behind the window.
        mel: The model's features.
        peak: The loudest value of the recording.
        certain: Whether who hands it over knows that the model reads this window.
    """

    samples: Tensor
    mel: Mel
    peak: float
    certain: bool = True

    def features(self, samples: Tensor) -> Tensor:
        """What the model is given of other samples at this place, ``(mels, window frames)``."""
        return self.mel.features(self.mel.energies(samples), self.peak)


def heard(samples: np.ndarray, extractor: Any) -> Heard:
    """The waveform of a recording of one window, for ``mm_inputs["audio"]`` of a call.

    Args:
        samples: Mono, at the extractor's rate.
        extractor: A ``WhisperFeatureExtractor``, the one that made the call's features.

    Raises:
        InputError: The recording is longer than a window, or cannot be trusted.
    """
    mel = Mel(extractor, int(extractor.nb_max_frames))
    speech = Speech(source_of((samples, mel.rate), mel.rate), mel, "silence")
    if speech.frames > mel.window_frames:
        raise InputError(
            f"the recording has {speech.duration_s:g} s; expected at most one window: cut it, or "
            "use mmdecode.asr.Transcriber"
        )
    return replace(speech.heard(0), certain=False)


class _Meter:
    """Passes blocks on, counting and hashing them."""

    def __init__(self, parts: Iterator[np.ndarray]) -> None:
        self._parts = parts
        self.samples, self.ended = 0, False
        self.digest = hashlib.blake2b(digest_size=16)
        self.last = np.zeros(0, np.float32)

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        part = next(self._parts, None)
        if part is None:
            self.ended = True
            raise StopIteration
        self.samples += len(part)
        self.digest.update(np.ascontiguousarray(part).tobytes())
        self.last = part
        return part
