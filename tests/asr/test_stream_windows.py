"""Recordings of a queue join a batch, and their segments come as they are final."""

import numpy as np
import pytest

from mmdecode.asr.audio.reading import source_of
from mmdecode.asr.decoding.segments import SegmentBuilder
from mmdecode.asr.transcriber import Transcriber
from mmdecode.errors import OptionError
from mmdecode.zoo.speech import speech_test
from tests.support import tiny_recognizers

RATE = 16_000


def made(name):
    if name == "whisper":
        return Transcriber.from_pretrained("zoo:whisper-synth", device="cpu")
    return Transcriber(*getattr(tiny_recognizers, name)())


def waves():
    """Recordings of one to four windows of the shortest model."""
    clips = [clip.samples() for clip in speech_test()]
    return [np.concatenate(clips[at : at + count]) for at, count in ((0, 4), (4, 1), (5, 2))]


class Queue:
    """Recordings that come one by one: after each it has none for a moment."""

    def __init__(self, sources):
        self.sources, self.pause = list(sources), False

    def __iter__(self):
        return self

    def __next__(self):
        self.pause = not self.pause
        if self.pause or not self.sources:
            raise StopIteration
        return self.sources.pop(0)


def queued(transcriber, waves, **how):
    """Segments and results by index; a queue that is empty for a moment is asked again."""
    queue = Queue(source_of(wave, RATE, index) for index, wave in enumerate(waves))
    segments, results, offset = {}, {}, 0
    while queue.sources:
        seen = 0
        for index, new, result in transcriber.stream_windows(queue, **how):
            seen = max(seen, index + 1)
            segments.setdefault(offset + index, []).extend(new)
            if result is not None:
                results[offset + index] = result
        offset += seen
    return segments, results


def equal_to_a_call(name):
    transcriber = made(name)
    segments, results = queued(transcriber, waves(), batch_size=2)
    for index, expected in enumerate(transcriber(waves())):
        assert results[index].text == expected.text
        assert results[index].segments == expected.segments == segments[index]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name", ["whisper", "moonshine", pytest.param("speech_to_text", marks=pytest.mark.slow)]
)
def test_segments_and_results_are_those_of_a_call(name):
    equal_to_a_call(name)


def test_segments_that_come_twice_are_noticed(monkeypatch):
    advance = SegmentBuilder.advance

    def forgetful(self, last=False):
        self._taken = 0
        return advance(self, last)

    monkeypatch.setattr(SegmentBuilder, "advance", forgetful)
    with pytest.raises(AssertionError):
        equal_to_a_call("whisper")


def test_one_that_is_not_wanted_ends_without_a_result_and_a_broken_one_fails_alone():
    transcriber = made("whisper")
    broken = np.full(RATE, np.nan, np.float32)
    given = [waves()[0], broken, waves()[1]]
    sources = [source_of(wave, RATE, index) for index, wave in enumerate(given)]
    found = [*transcriber.stream_windows(sources, lambda index: index != 0, 8)]
    results = {index: result for index, _, result in found if result is not None}
    assert set(results) == {1, 2} and "NaN" in results[1].error
    assert results[1].source == "array 1" and results[2].text == transcriber(waves()[1]).text


def test_options_that_know_segments_only_at_the_end_are_refused():
    transcriber = made("whisper").with_options(mode="chunked")
    with pytest.raises(OptionError, match="stream_windows needs mode='sequential'"):
        next(transcriber.stream_windows([]))
