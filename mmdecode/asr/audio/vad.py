"""Voice activity: finds stretches of speech and cuts out the rest of a recording.

The stretches are concatenated and transcribed as one recording; the times of the transcript are
then mapped back to the original recording. Stretches are found as in silero-vad's
``get_speech_timestamps``. The defaults for padding and for the shortest silence that is cut out are
those of faster-whisper's ``VadOptions``. Unlike in silero-vad, the last stretch of a recording also
ends with its last speech frame.

`Silero` is a detector of its own. `Blanks` needs none: where a CTC head on the recogniser's encoder
finds only blanks, nobody speaks.

Sources: Silero Team 2021, https://github.com/snakers4/silero-vad, whose weights are in its wheel;
Inaguma and Kawahara 2021, arXiv:2107.07509, for blanks as pauses (there at fixed blocks, here in
the middle of the pause, with padding).
"""

from __future__ import annotations

import bisect
import itertools
import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mmdecode import registry
from mmdecode.asr.audio.reading import Source, blocks
from mmdecode.checkpoints import ZOO
from mmdecode.errors import IncompatibleError, MissingExtraError
from mmdecode.models.ctc_head import BLANK, CTCHead
from mmdecode.models.placed import Placed

if TYPE_CHECKING:
    from mmdecode.asr.options import TranscribeOptions
    from mmdecode.asr.recognizers.base import Recognizer

RATE, FRAME = 16_000, 512  # Silero's sampling rate in Hz, and samples per frame
LONGEST_S = 30.0
"""Longest window that is encoded for `Blanks`, in seconds."""
_HYSTERESIS = 0.15  # speech ends when its probability is this much below the threshold
_WORD = 0.2  # seconds; a shorter part of a stretch contains no word
_NEAR = 1e-6  # seconds from a seam: below the resolution of times, above their rounding errors


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
        at, to = self._in_recording(start, first), self._in_recording(end, last)
        if first < last and at > self.stretches[first].end - _WORD:
            first, at = first + 1, 0.0
        if first < last and to < self.stretches[last].start + _WORD:
            last, to = last - 1, math.inf
        at, to = max(at, self.stretches[first].start), min(to, self.stretches[last].end)
        return (at, to) if at < to else (self.at(start), self.at(end))

    def at(self, seconds: float) -> float:
        """Maps a time in the concatenated stretches to a time in the recording, in seconds."""
        return self._in_recording(seconds, self._stretch(seconds))

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
        frame_s: Seconds of a frame, for which there is a probability.
    """

    frame_s: float

    def __init__(self, options: TranscribeOptions) -> None:
        self.options = options

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
        options, step = self.options, self.frame_s
        found: list[Stretch] = []
        for first, last in self._runs(probabilities):
            start, end = first * step, min(last * step, duration_s)
            if end - start < options.vad_min_speech_s:
                continue
            begin = max(0.0, start - options.vad_pad_s)
            stop = min(duration_s, end + options.vad_pad_s)
            if found and begin <= found[-1].stop:
                found[-1] = replace(found[-1], end=end, stop=stop)
            else:
                found.append(Stretch(begin, start, end, stop))
        return found

    def _runs(self, probabilities: Iterable[float]) -> Iterator[tuple[int, int]]:
        """Yields the first frame of each run of speech frames, and the first frame after it."""
        silence = self.options.vad_min_silence_s / self.frame_s
        start: int | None = None
        quiet: int | None = None
        frame = -1
        for frame, probability in enumerate(probabilities):
            if probability >= self.options.vad_threshold:
                start, quiet = frame if start is None else start, None
            elif start is not None and probability < self.options.vad_threshold - _HYSTERESIS:
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


class Blanks(VoiceActivity):
    """Speech where a CTC head finds labels; everything between labels far apart is silence.

    The recording is encoded in windows that overlap, so that every frame has audio on either side.

    Args:
        options: Settings.
        recognizer: Recogniser whose encoder the head reads.
        head: The head.
    """

    def __init__(self, options: TranscribeOptions, recognizer: Recognizer, head: CTCHead) -> None:
        super().__init__(options)
        self._recognizer, self._head = recognizer, head.eval()
        self._placed = Placed(self._head)
        wave = np.zeros(round(min(recognizer.window_s, LONGEST_S) * recognizer.rate), np.float32)
        self._window = len(wave)
        self.frame_s = len(wave) / recognizer.rate / len(self._chances(wave))

    def listen(self, source: Source) -> tuple[list[float], float]:
        """Returns the speech probability of each frame, and the length of the audio in seconds."""
        rate, found = self._recognizer.rate, list[float]()
        margin = round(self._window / 8 / rate / self.frame_s)  # frames on either side
        step = round(margin * self.frame_s * rate)
        held, samples, first = np.zeros(0, np.float32), 0, True
        for part in itertools.chain(blocks(source, rate), [None]):
            if part is not None:
                samples += len(part)
                held = np.concatenate([held, part])
            while len(held) > self._window or (part is None and len(held)):
                last = len(held) <= self._window
                chances = self._chances(held[: self._window])
                begin = 0 if first else margin
                found += chances[begin:] if last else chances[begin : len(chances) - margin]
                held = held[:0] if last else held[self._window - 2 * step :]
                first = False
        return found, samples / rate

    @torch.no_grad()
    def _chances(self, wave: np.ndarray) -> list[float]:
        """Returns the probability of a label for each frame of a waveform."""
        ours, seconds = self._recognizer, len(wave) / self._recognizer.rate
        encoded = ours.encode(ours.features([wave]), [seconds])
        assert encoded.states is not None, "the head reads them"
        states = encoded.states
        head = self._placed.like(states)
        embeddings = ours.model.get_input_embeddings()(head.ids).to(states)
        lengths = torch.tensor([states.shape[1]], device=states.device)
        blank = head.log_probs(states, lengths, embeddings)[0, :, BLANK].exp()
        if ours.capabilities.fixed_windows:  # padded to the whole window
            blank = blank[: max(1, round(len(blank) * seconds / ours.window_s))]
        return (1 - blank).tolist()


def detector_for(options: TranscribeOptions, recognizer: Recognizer) -> VoiceActivity | None:
    """Returns the detector that the options ask for; ``None``: none.

    Args:
        options: The options.
        recognizer: Recogniser of the recordings.

    Raises:
        MissingExtraError: silero-vad is asked for and not installed.
        OptionError: No CTC head ships with the model.
        IncompatibleError: The head was trained for another model.
    """
    if not options.vad:
        return None
    if not str(options.vad).startswith("ctc"):
        return Silero(options)
    named = str(options.vad).partition("head=")[2] or None
    folder = Path(recognizer.model.name_or_path)
    name = f"zoo:{folder.name}" if folder.parent == ZOO else f"{folder}"
    head = CTCHead.of_option(named, name, "vad 'ctc'")
    problem = head.misfit(registry.adapter_for(recognizer.model))
    if problem is not None:
        raise IncompatibleError.between(
            "vad 'ctc'", recognizer.name, problem, "train a head with 'mmdecode train ctc'"
        )
    return Blanks(options, recognizer, head)


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
