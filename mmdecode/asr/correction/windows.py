"""Correction of long recordings, window by window, with word times kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from mmdecode.asr.correction.n_best_lists import NBestList
from mmdecode.asr.decoding.fallback import Attempts
from mmdecode.asr.decoding.long_form import HINT
from mmdecode.asr.decoding.n_best import hypotheses
from mmdecode.guide.fusion import Given
from mmdecode.runs.items import Failed, each

if TYPE_CHECKING:
    from mmdecode.asr.correction.transcripts import Corrected, ListCorrection
    from mmdecode.asr.decoding.job import Job
    from mmdecode.asr.decoding.long_form import LongForm
    from mmdecode.asr.results import DecidedWord, Piece, Segment, Transcript

_SHORTEST_S = 0.025  # a stretch that is heard again

_PAD_S = 0.2  # of silence around what is heard again, where neighbours leave room


@dataclass(frozen=True)
class Stretch:
    """A stretch of a recording that is heard again.

    Attributes:
        segments: Indices of the transcript's segments that it holds, first and after the last.
        start: Its first sample.
        end: After its last.
    """

    segments: tuple[int, int]
    start: int
    end: int


class WindowCorrector:
    """Corrects transcripts window by window.

    A window of the first transcription, as far as it was kept, is heard again by itself: its
    N-best list is the text it has, then what a beam search finds, and it gets a correction of its
    own. Corrected words go to the segment in which the words next to them were.

    Args:
        method: Corrects the windows.
        loop: The transcriber's.
    """

    def __init__(self, method: ListCorrection, loop: LongForm) -> None:
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

    @torch.no_grad()
    def __call__(self, job: Job, transcript: Transcript) -> Transcript:
        """The transcript with corrected segments, each with its words and who decided them."""
        stretches = self._stretches(job.pieces, transcript.segments)
        if not stretches:
            return transcript
        prompt = tuple(self.recognizer.prompt(job.language, ()))
        assert job.speech is not None, "somebody speaks"
        tape = job.speech.tape()
        waves = [tape.read(one.start, one.end) for one in stretches]
        corrected: list[Corrected] = []
        size = self.loop.options.batch_size

        def correct(some: Sequence[tuple[Stretch, Any]]) -> list[Corrected]:
            given = self._given([wave for _, wave in some], prompt)
            return self.method(self._lists(transcript, [one for one, _ in some], given), given)

        pairs = list(zip(stretches, waves, strict=True))
        for start in range(0, len(pairs), size):
            # half of them may fit into memory where all do not
            for _, found in each(pairs[start : start + size], correct, advice=HINT):
                if isinstance(found, Failed):
                    raise found.problem
                corrected.append(found)
        segments = list(transcript.segments)
        for one, found in zip(stretches, corrected, strict=True):
            first, last = one.segments
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

    def _stretches(self, pieces: Sequence[Piece], segments: Sequence[Segment]) -> list[Stretch]:
        """Neighbouring segments that one window made, with text and no longer than a window."""
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

    def _given(self, waves: Sequence[Any], prompt: tuple[int, ...]) -> list[Given]:
        """Encoder inputs of some stretches."""
        return [Given(features=one, prompt=prompt) for one in self.recognizer.features(waves)]

    def _lists(
        self, transcript: Transcript, stretches: Sequence[Stretch], given: Sequence[Given]
    ) -> list[NBestList]:
        """Text of each stretch, and the hypotheses of a beam search."""
        ours = self.recognizer
        seconds = [(one.end - one.start) / ours.rate for one in stretches]
        encoded = ours.encode([one.features for one in given], seconds)
        prompt = torch.tensor([one.prompt for one in given], device=ours.model.device)
        count = max(self.method.count, 2)
        lists = []
        rows = self.attempts.searched(prompt, encoded, count, count)
        for one, found in zip(stretches, rows, strict=True):
            own = " ".join(s.text for s in transcript.segments[slice(*one.segments)] if s.text)
            texts = (hypothesis.text for hypothesis in hypotheses(found, ours.text))
            unlike = [text for text in texts if text != own]
            name = f"{transcript.source}#{one.segments[0]}"
            lists.append(NBestList(name, (own, *unlike)))
        return lists


def shared_out(segments: Sequence[Segment], words: Sequence[DecidedWord]) -> list[Segment]:
    """Segments with the words of a corrected text, each in the segment of the word it replaces.

    Args:
        segments: Neighbours, whose texts were corrected together.
        words: In order.
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
    """For each word of a text, the place of the word in an earlier one that it is or replaces.

    Args:
        before: Words of the earlier text, at least one.
        words: Words of the text.
    """
    positions = []
    matcher = SequenceMatcher(None, before, words, autojunk=False)
    for _, first, last, start, end in matcher.get_opcodes():
        for index in range(start, end):
            # words in the place of others share their places; those put in follow the word before
            at = (
                first + (index - start) * (last - first) // (end - start)
                if last > first
                else first - 1
            )
            positions.append(max(at, 0))
    return positions
