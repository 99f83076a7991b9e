"""Voice activity: finds stretches of speech and cuts out the rest of a recording.

The stretches are concatenated and transcribed as one recording; the times of the transcript are
then mapped back to the original recording. Stretches are found as in silero-vad's
``get_speech_timestamps``. The defaults for padding and for the shortest silence that is cut out are
those of faster-whisper's ``VadOptions``. Unlike in silero-vad, the last stretch of a recording also
ends with its last speech frame.

`mmdecode.asr.audio.blanks` needs no detector of its own, but a CTC head on the encoder.

Source: Silero Team 2021, https://github.com/snakers4/silero-vad; its weights are in its wheel.
"""

from __future__ import annotations

import bisect
import itertools
import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mmdecode.asr.audio.reading import Source, blocks
from mmdecode.errors import MissingExtraError

if TYPE_CHECKING:
    from mmdecode.asr.options import TranscribeOptions

RATE, FRAME = 16_000, 512  # Silero's sampling rate in Hz, and samples per frame
_HYSTERESIS = 0.15  # speech ends when its probability is this much below the threshold
_LEAST = 0.01  # but at least below this
_WORD = 0.2  # seconds; a shorter part of a stretch contains no word
_NEAR = 1e-6  # seconds from a seam: below the resolution of times, above their rounding errors
_ROUNDED = 0.01  # seconds before a seam in which no window begins but by rounding


@dataclass(frozen=True)
class Stretch:
    """Speech from ``start`` to ``end``, with padding from ``begin`` to ``stop``, in seconds."""

    begin: float
    start: float
    end: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """Maps times in the concatenated stretches of a recording to times in the recording.

    Attributes:
        stretches: Stretches in order.
        duration_s: Length of the recording, in seconds.
    """

    stretches: tuple[Stretch, ...]
    duration_s: float

    @classmethod
    def whole(cls, duration_s: float) -> Timeline:
        """Makes the timeline of an uncut recording: one stretch, which leaves times unchanged."""
        return cls((Stretch(0.0, 0.0, math.inf, duration_s),), duration_s)

    @cached_property
    def seams(self) -> list[float]:
        """Start of each stretch in the concatenated audio, then the audio's end, in seconds."""
        lengths = (part.stop - part.begin for part in self.stretches)
        return list(itertools.accumulate(lengths, initial=0.0))

    def span(self, start: float, end: float) -> tuple[float, float]:
        """Maps start and end of a span from the concatenated stretches to the recording.

        A start in padding is moved to the start of the speech, an end to the end of the speech. If
        the span reaches into another stretch by less than a word, that part is left out: it is an
        error of the model's times, and would extend the span over the silence that was cut out.

        Args:
            start: Start in the concatenated stretches, in seconds.
            end: End in the concatenated stretches, in seconds.
        """
        first, last = self._stretch(start + _NEAR), self._stretch(end - _NEAR)
        before, after = (
            min(_WORD, (part.stop - part.begin) / 2)
            for part in (self.stretches[first], self.stretches[last])
        )
        at, to = self._in_recording(start, first), self._in_recording(end, last)
        if first < last and at > self.stretches[first].end - before:
            first, at = first + 1, 0.0
        if first < last and to < self.stretches[last].start + after:
            last, to = last - 1, math.inf
        at, to = max(at, self.stretches[first].start), min(to, self.stretches[last].end)
        return (at, to) if at < to else (self.at(start), self.at(end))

    def at(self, seconds: float) -> float:
        """Maps a time in the concatenated stretches to a time in the recording, in seconds."""
        return self._in_recording(seconds, self._stretch(seconds))

    def window_at(self, seconds: float) -> float:
        """Maps the start of a window, rounded to a frame, as `at` does; a seam begins a stretch."""
        stretch = self._stretch(seconds + _ROUNDED)
        return self._in_recording(max(seconds, self.seams[stretch]), stretch)

    def _stretch(self, seconds: float) -> int:
        index = bisect.bisect_right(self.seams, seconds) - 1
        return min(max(index, 0), len(self.stretches) - 1)

    def _in_recording(self, seconds: float, stretch: int) -> float:
        return seconds - self.seams[stretch] + self.stretches[stretch].begin


class VoiceActivity:
    """Base of detectors of speech.

    Args:
        options: Settings; the fields that begin with ``vad_`` are used.

    Attributes:
        settings: Settings in use.
        frame_s: Seconds of a frame, for which there is a probability.
    """

    frame_s: float

    def __init__(self, options: TranscribeOptions) -> None:
        self.settings = options.voice_activity

    def listen(self, source: Source) -> tuple[list[float], float]:
        """Returns the speech probability of each frame, and the length of the audio in seconds.

        Raises:
            InputError: The recording cannot be read.
        """
        raise NotImplementedError

    def cut(self, source: Source, rate: int) -> tuple[Source, Timeline]:
        """Returns a source of the speech alone, at ``rate`` Hz, and the map of its times.

        The recording is read once here to find its speech, and again each time that the returned
        source is read.

        Raises:
            InputError: The recording cannot be read.
        """
        probabilities, duration_s = self.listen(source)
        found = tuple(self.stretches(probabilities, duration_s))

        def speech() -> Iterator[tuple[int, np.ndarray]]:
            edges = [(round(part.begin * rate), round(part.stop * rate)) for part in found]
            position = 0
            for part in blocks(source, rate):
                while edges and edges[0][0] < position + len(part):
                    first, last = edges[0]
                    piece = part[max(first - position, 0) : last - position]
                    if len(piece):
                        yield rate, piece[:, None]
                    if last > position + len(part):
                        break
                    edges.pop(0)
                position += len(part)

        return replace(source, read=speech), Timeline(found, duration_s)

    def stretches(self, probabilities: Iterable[float], duration_s: float) -> list[Stretch]:
        """Returns the stretches of speech with padding; overlapping stretches are merged.

        Args:
            probabilities: Speech probability of each frame.
            duration_s: Length of the recording, in seconds.
        """
        settings, step = self.settings, self.frame_s
        found: list[Stretch] = []
        for first, last in self._runs(probabilities):
            start, end = first * step, min(last * step, duration_s)
            if end - start < settings.min_speech_s:
                continue
            begin = max(0.0, start - settings.pad_s)
            stop = min(duration_s, end + settings.pad_s)
            if found and begin <= found[-1].stop:
                found[-1] = replace(found[-1], end=end, stop=stop)
            else:
                found.append(Stretch(begin, start, end, stop))
        return found

    def _runs(self, probabilities: Iterable[float]) -> Iterator[tuple[int, int]]:
        """Yields the first frame of each run of speech frames, and the first frame after it."""
        silence = self.settings.min_silence_s / self.frame_s
        least = max(self.settings.threshold - _HYSTERESIS, _LEAST)
        start: int | None = None
        quiet: int | None = None
        frame = -1
        for frame, probability in enumerate(probabilities):
            if probability >= self.settings.threshold:
                start, quiet = frame if start is None else start, None
            elif start is not None and probability < least:
                quiet = frame if quiet is None else quiet
                if frame - quiet >= silence:
                    yield start, quiet
                    start = quiet = None
        if start is not None:
            yield start, frame + 1 if quiet is None else quiet


class Silero(VoiceActivity):
    """Silero's voice activity detector.

    Args:
        options: Settings.

    Raises:
        MissingExtraError: silero-vad is not installed.
    """

    frame_s = FRAME / RATE

    def __init__(self, options: TranscribeOptions) -> None:
        super().__init__(options)
        self._model = _load()

    def listen(self, source: Source) -> tuple[list[float], float]:
        """Returns the speech probability of each frame, and the length of the audio in seconds."""
        self._model.reset_states()
        found: list[float] = []
        held, samples = np.zeros(0, np.float32), 0
        for part in blocks(source, RATE):
            samples += len(part)
            held = np.concatenate([held, part])
            whole = len(held) // FRAME * FRAME
            found += self._probabilities(held[:whole])
            held = held[whole:]
        if len(held):
            found += self._probabilities(np.pad(held, (0, FRAME - len(held))))
        return found, samples / RATE

    @torch.no_grad()
    def _probabilities(self, samples: np.ndarray) -> list[float]:
        frames = torch.from_numpy(samples).view(-1, FRAME)
        return [float(self._model(frame, RATE)) for frame in frames]


def _load() -> Any:
    threads = torch.get_num_threads()
    try:
        import silero_vad
    except ImportError as error:
        raise MissingExtraError("vad needs silero_vad", extra="vad") from error
    finally:
        torch.set_num_threads(threads)  # the package sets it to 1 when it is imported
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit.load
        return silero_vad.load_silero_vad()
