"""Correction of the transcripts of long recordings, window by window."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from mmdecode.asr.correction.n_best_lists import NBestList
from mmdecode.asr.correction.transcripts import FusedCorrection
from mmdecode.asr.decoding.fallback import Attempts
from mmdecode.asr.decoding.job import Ended
from mmdecode.asr.decoding.long_form import HINT
from mmdecode.asr.decoding.n_best import hypotheses
from mmdecode.errors import IncompatibleError
from mmdecode.guide.fusion import Given
from mmdecode.runs.items import Failed, Watch, each, tried

if TYPE_CHECKING:
    from mmdecode.asr.audio.recording import Tape
    from mmdecode.asr.correction.transcripts import Corrected, ListCorrection
    from mmdecode.asr.decoding.job import Job
    from mmdecode.asr.decoding.long_form import LongForm
    from mmdecode.asr.results import DecidedWord, Piece, Segment, Transcript

_SHORTEST_S = 0.025  # shorter stretches are not corrected

_PAD_S = 0.2  # most padding on either side of a stretch, up to half of the gap to its neighbour


@dataclass(frozen=True)
class Stretch:
    """A part of a recording that is decoded again for correction.

    Attributes:
        segments: Segments of the transcript in it: index of the first, and one after the last.
        start: Index of its first sample.
        end: Index after its last sample.
    """

    segments: tuple[int, int]
    start: int
    end: int


@dataclass(eq=False)
class _Recording:
    """A recording that is being corrected.

    Attributes:
        job: The decoded recording.
        transcript: Its transcript.
        stretches: Its stretches.
        prompt: Ids of the recogniser's decoder prompt.
        tape: Its audio.
        corrected: The corrected lists of its first stretches so far.
        failed: Its failure; ``None``: it did not fail.
    """

    job: Job
    transcript: Transcript
    stretches: list[Stretch]
    prompt: tuple[int, ...]
    tape: Tape
    corrected: list[Corrected] = field(default_factory=list)
    failed: Failed | None = None

    @property
    def open(self) -> bool:
        """Whether stretches of it are still to be corrected."""
        return self.failed is None and len(self.corrected) < len(self.stretches)


@dataclass(frozen=True, eq=False)
class _Window:
    """A stretch of a recording, and its samples once they are read."""

    recording: _Recording
    stretch: Stretch
    samples: Any = None


class WindowCorrector:
    """Corrects transcripts window by window, the windows of several recordings in one batch.

    The part of each window that is in the transcript is encoded again by itself. Its N-best list
    consists of its text in the transcript, followed by the hypotheses of a beam search. Each
    corrected word is put into the segment of the word that it replaces. The result of a window does
    not depend on the batch.

    Args:
        method: Correction method for the N-best lists of the windows.
        loop: The transcriber's loop over windows.

    Raises:
        IncompatibleError: The method is a fusion, and the engine has no adapter for the recogniser.
    """

    def __init__(self, method: ListCorrection, loop: LongForm) -> None:
        if isinstance(method, FusedCorrection) and not loop.recognizer.capabilities.drafts:
            raise IncompatibleError.between(
                f"correction by {type(method).__name__}",
                loop.recognizer.name,
                "the recogniser's decoder scores each token, for which the engine needs an adapter",
                "use correct='llm:model=...', which corrects without the audio, or register an "
                "adapter under the entry-point group mmdecode.adapters",
            )
        self.method, self.loop = method, loop
        options = replace(
            loop.options,
            timestamps=False,
            condition_on_prev_tokens=False,
            prompt_condition_type="first-segment",
            mode="sequential",
            overlap_s=None,
        )
        self.recognizer = loop.recognizer.with_options(options)
        self.attempts = Attempts(self.recognizer, loop.attempts.decoder, options)

    def corrected(
        self,
        transcribed: Iterable[Ended[Transcript | Failed]],
        watch: Watch | None = None,
        batch_size: int | None = None,
    ) -> Iterator[Ended[Transcript | Failed]]:
        """Yields recordings with corrected segments and their ``decided`` words.

        A batch is corrected as soon as enough windows wait for it, and the last ones when there are
        no more recordings. Recordings without text to correct, or that failed, are not held back.

        Args:
            transcribed: Recordings in the order in which they were transcribed.
            watch: Records which recordings are being corrected, in case the process crashes.
            batch_size: Most windows in a batch, if fewer than the method's batch size.
        """
        size = min(batch_size or self.method.batch_size, self.method.batch_size)
        waiting: dict[int, list[_Window]] = {}  # by length of the prompt, the same in a batch
        held: list[_Recording] = []
        for ended in transcribed:
            found = ended.result
            if not isinstance(found, Failed):
                opened = tried(partial(self._open, found, ended.job), HINT)
                if isinstance(opened, _Recording):
                    held.append(opened)
                    queue = waiting.setdefault(len(opened.prompt), [])
                    queue += [_Window(opened, stretch) for stretch in opened.stretches]
                    while len(queue) >= size:
                        yield from self._next(queue, size, held, watch)
                    continue
                ended = ended if opened is None else replace(ended, result=opened)
            yield ended
        for queue in waiting.values():
            while queue:
                yield from self._next(queue, size, held, watch)

    def _open(self, transcript: Transcript, job: Job | None) -> _Recording | None:
        """Returns a recording that is to be corrected; ``None``: there is nothing to correct."""
        assert job is not None, "it has a transcript"
        stretches = self._stretches(job.pieces, transcript.segments)
        if not stretches:
            return None
        assert job.speech is not None, "somebody speaks"
        prompt = tuple(self.recognizer.prompt(job.language, ()))
        return _Recording(job, transcript, stretches, prompt, job.speech.tape())

    def _next(
        self, queue: list[_Window], size: int, held: list[_Recording], watch: Watch | None
    ) -> Iterator[Ended[Transcript | Failed]]:
        """Corrects the next batch of a queue, and yields the recordings that ended with it."""
        batch: list[_Window] = []
        while queue and len(batch) < size:
            window = queue.pop(0)
            one, stretch = window.recording, window.stretch
            if one.failed is None:
                samples = tried(partial(one.tape.read, stretch.start, stretch.end), HINT)
                if isinstance(samples, Failed):
                    one.failed = samples
                else:
                    batch.append(replace(window, samples=samples))
        # on out-of-memory errors batches are halved
        name = lambda window: window.recording.job.name  # noqa: E731
        for window, found in each(batch, self._correct, hint=HINT, name=name, watch=watch):
            one = window.recording
            if not isinstance(found, Failed):
                one.corrected.append(found)
            elif one.failed is None:
                one.failed = found
        ended = [one for one in held if not one.open]
        held[:] = [one for one in held if one.open]
        for one in ended:
            if one.failed is not None:
                yield Ended(one.job.index, one.failed, one.job)
            else:
                yield Ended(one.job.index, tried(partial(_with_words, one), HINT), one.job)

    @torch.no_grad()
    def _correct(self, windows: Sequence[_Window]) -> list[Corrected]:
        """Corrects windows, whose recordings have prompts of one length."""
        waves = [window.samples for window in windows]
        given = [
            Given(features=one, prompt=window.recording.prompt)
            for one, window in zip(self.recognizer.features(waves), windows, strict=True)
        ]
        return self.method(self._lists(windows, given), given)

    def _stretches(self, pieces: Sequence[Piece], segments: Sequence[Segment]) -> list[Stretch]:
        """Returns parts of the recording: the segments with text that came from one window."""
        ours = self.recognizer
        longest = round(ours.window_frames * ours.frame_s * ours.rate)
        found = []
        for _, group in groupby(range(len(pieces)), key=lambda index: id(pieces[index].result)):
            own = list(group)
            first, last = own[0], own[-1]
            before = pieces[first - 1].end if first else 0.0
            after = pieces[last + 1].start if last + 1 < len(pieces) else pieces[last].end + 1.0
            start_s = pieces[first].start - min(_PAD_S, max(0.0, pieces[first].start - before) / 2)
            end_s = pieces[last].end + min(_PAD_S, max(0.0, after - pieces[last].end) / 2)
            start, end = (round(seconds * ours.rate) for seconds in (start_s, end_s))
            has_text = any(segments[index].text for index in own)
            if has_text and _SHORTEST_S * ours.rate < end - start <= longest:
                found.append(Stretch((first, last + 1), start, end))
        return found

    def _lists(self, windows: Sequence[_Window], given: Sequence[Given]) -> list[NBestList]:
        """Returns the N-best list of each window: its text, then hypotheses of a beam search."""
        ours = self.recognizer
        seconds = [(one.stretch.end - one.stretch.start) / ours.rate for one in windows]
        encoded = ours.encode([one.features for one in given], seconds)
        prompt = torch.tensor([one.prompt for one in given], device=ours.model.device)
        count = max(self.method.count, 2)
        lists = []
        rows = self.attempts.searched(prompt, encoded, count, count)
        for one, found in zip(windows, rows, strict=True):
            transcript, (first, last) = one.recording.transcript, one.stretch.segments
            own = " ".join(s.text for s in transcript.segments[first:last] if s.text)
            texts = (hypothesis.text for hypothesis in hypotheses(found, ours.text))
            unlike = [text for text in texts if text != own]
            lists.append(NBestList(f"{transcript.source}#{first}", (own, *unlike)))
        return lists


def _with_words(one: _Recording) -> Transcript:
    """Returns the transcript of a recording whose stretches are all corrected."""
    transcript, corrected = one.transcript, one.corrected
    segments = list(transcript.segments)
    for stretch, found in zip(one.stretches, corrected, strict=True):
        first, last = stretch.segments
        segments[first:last] = shared_out(segments[first:last], found.words)
    edited = sum(found.correction.edited for found in corrected)
    refused = sum(found.correction.refused is not None for found in corrected)
    return dataclasses.replace(
        transcript,
        text=" ".join(segment.text for segment in segments if segment.text),
        uncorrected=transcript.text,
        segments=segments,
        stats=transcript.stats | {"edited": edited, "refused": refused},
    )


def shared_out(segments: Sequence[Segment], words: Sequence[DecidedWord]) -> list[Segment]:
    """Distributes the words of a corrected text over the segments of the words they replace.

    Args:
        segments: Consecutive segments whose texts were corrected together.
        words: Words of the corrected text, in order.
    """
    owners = [index for index, one in enumerate(segments) for _ in one.text.split()]
    before = [word for one in segments for word in one.text.split()]
    own: list[list[DecidedWord]] = [[] for _ in segments]
    for word, index in zip(words, aligned_positions(before, [w.text for w in words]), strict=True):
        own[owners[index]].append(word)
    return [
        dataclasses.replace(one, text=" ".join(word.text for word in decided), decided=decided)
        for one, decided in zip(segments, own, strict=True)
    ]


def aligned_positions(before: Sequence[str], words: Sequence[str]) -> list[int]:
    """Returns, for each word of a text, the index of the earlier text's word that it replaces.

    A word that is unchanged gets the index of its equal in the earlier text.

    Args:
        before: Words of the earlier text, at least one.
        words: Words of the text.
    """
    positions = []
    matcher = SequenceMatcher(None, before, words, autojunk=False)
    for _, first, last, start, end in matcher.get_opcodes():
        for index in range(start, end):
            # replacements share the indices of the words replaced, insertions have that before them
            at = (
                first + (index - start) * (last - first) // (end - start)
                if last > first
                else first - 1
            )
            positions.append(max(at, 0))
    return positions
