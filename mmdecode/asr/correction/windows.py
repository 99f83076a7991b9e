"""Correction of the transcripts of long recordings, window by window."""

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


class WindowCorrector:
    """Corrects transcripts window by window.

    The part of each window that is in the transcript is encoded again by itself. Its N-best list
    consists of its text in the transcript, followed by the hypotheses of a beam search. Each
    corrected word is put into the segment of the word that it replaces.

    Args:
        method: Correction method for the N-best lists of the windows.
        loop: The transcriber's loop over windows.
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
        """Returns the transcript with corrected segments and their ``decided`` words.

        Args:
            job: The decoded recording.
            transcript: Transcript of the recording.
        """
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
            # on out-of-memory errors batches are halved
            for _, found in each(pairs[start : start + size], correct, hint=HINT):
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

    def _given(self, waves: Sequence[Any], prompt: tuple[int, ...]) -> list[Given]:
        """Returns the encoder inputs of the parts."""
        return [Given(features=one, prompt=prompt) for one in self.recognizer.features(waves)]

    def _lists(
        self, transcript: Transcript, stretches: Sequence[Stretch], given: Sequence[Given]
    ) -> list[NBestList]:
        """Returns the N-best list of each part: its text, then hypotheses of a beam search."""
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
