"""Chunked mode: windows at fixed places, joined where they overlap."""

import jiwer
import numpy as np
import pytest

from mmdecode.asr import TranscribeOptions, Transcriber
from mmdecode.asr.audio.vad import Timeline
from mmdecode.asr.decoding.chunks import join
from mmdecode.asr.decoding.fallback import Result
from mmdecode.asr.decoding.job import Job
from mmdecode.asr.results import Piece
from mmdecode.errors import OptionError
from mmdecode.zoo.speech import speech_test

STAMPS = 1000


def is_text(token):
    return token < STAMPS


RESULT = Result([], 0.0)


def pieces(*parts):
    """From (start, end, words), the words as numbers."""
    return [Piece(a, b, [STAMPS, *words, STAMPS + 9], RESULT) for a, b, words in parts]


def words(found):
    return [[token for token in piece.tokens if token < STAMPS] for piece in found]


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        # the same segment heard twice
        (
            [(0, 3, [1, 2]), (3, 6, [3, 4, 5, 6])],
            [(3, 6, [3, 4, 5, 6]), (6, 9, [7])],
            [12, 3456, 7],
        ),
        # each knows less about its edge
        ([(2, 8, [1, 2, 3, 4, 5, 99])], [(3.5, 9.5, [98, 3, 4, 5, 6, 7])], [1234567]),
        # one heard a word more
        ([(3, 8, [1, 2, 3, 4, 5])], [(4, 10, [2, 3, 9, 4, 5, 6])], [1239456]),
        # said twice: the same words at another time are others
        ([(2, 8, [1, 2, 3, 1, 2, 3])], [(5, 11, [1, 2, 3, 4, 5, 6])], [123123456]),
        # nothing in common: the segment that ended counts, the sentence begun in the middle not
        ([(0, 3, [1]), (3, 6, [2, 3, 4])], [(4, 6.5, [8, 9]), (6.5, 9, [5, 6])], [1, 234, 56]),
        # one word in common is chance
        ([(0, 6, [1, 2, 3])], [(6, 9, [3, 4, 5])], [123, 345]),
        ([], [(4, 6, [1, 2])], [12]),
        ([(0, 6, [1, 2])], [], [12]),
    ],
)
def test_two_windows_are_joined_where_they_agree(left, right, expected):
    found = join(pieces(*left), pieces(*right), 3.5, is_text)
    assert ["".join(map(str, part)) for part in words(found)] == list(map(str, expected))
    assert all(piece.start <= piece.end for piece in found)
    assert [p.start for p in found] == sorted(p.start for p in found)


def test_what_lies_before_the_overlap_is_not_matched():
    left = pieces((0, 3, [1, 2, 3, 4]), (3, 6, [5, 6]))
    right = pieces((4, 6, [5, 6]), (6, 9, [1, 2, 3, 4]))
    assert words(join(left, right, 3.5, is_text)) == [[1, 2, 3, 4], [5, 6], [1, 2, 3, 4]]


def test_a_seam_keeps_the_times_of_both():
    [seam] = join(pieces((1, 7, [1, 2, 3])), pieces((3.5, 9.5, [2, 3, 4])), 3.5, is_text)
    assert (seam.start, seam.end) == (1, 9.5)
    assert seam.tokens == [STAMPS, 1, 2, 3, 4, STAMPS + 9]


def test_each_window_decides_the_times_on_its_side_of_the_seam():
    left = pieces((0, 3, [1, 2]), (3, 6, [3, 4]))
    right = pieces((0.1, 3.1, [1, 2]), (3.1, 6.1, [3, 4]), (6.1, 9, [5]))
    found = join(left, right, 0.0, is_text)
    assert [(piece.start, piece.end) for piece in found] == [(0, 3), (3, 6.1), (6.1, 9)]


def test_what_is_new_begins_after_what_is_kept():
    found = join(pieces((3, 6, [1, 2])), pieces((5, 9, [8, 9])), 3.5, is_text)
    assert [(piece.start, piece.end) for piece in found] == [(3, 6), (6, 9)]


def follow_one_another(segments):
    edges = [edge for segment in segments for edge in (segment.start_s, segment.end_s)]
    return edges == sorted(edges) and all(s.start_s < s.end_s for s in segments)


def test_times_in_which_windows_contradict_each_other_are_put_in_order(model, processor):
    ours = Transcriber(model, processor, options=TranscribeOptions(mode="chunked"))
    found = pieces((1, 4, [1]), (3, 3, [2]), (2.5, 6, [3]), (8, 9, [4]))
    job = Job(0, "a", None, 0.01, Timeline.whole(9.0), None, False, [], pieces=found)
    segments = ours._transcript(job, 0).segments
    assert follow_one_another(segments)
    assert (segments[0].start_s, segments[3].start_s, segments[3].end_s) == (1, 8, 9)


def test_segments_hold_their_words(trained):
    clips = [clip.samples() for clip in speech_test()[7:12]]
    options = {"mode": "chunked", "overlap_s": 2.0, "word_timestamps": "ctc"}
    found = Transcriber.from_pretrained(trained, device="cpu", **options)(np.concatenate(clips))
    assert len(found.segments) > 4 and follow_one_another(found.segments)
    for segment in found.segments:
        assert segment.start_s == segment.words[0].start_s
        assert segment.end_s == segment.words[-1].end_s


def test_windows_overlap_and_reach_the_end(model, processor, kit):
    seen = []

    def spied(overlap_s, seconds):
        ours = Transcriber(
            model, processor, options=TranscribeOptions(mode="chunked", overlap_s=overlap_s)
        )
        step, seen[:] = ours._loop._step, []
        ours._loop._step = lambda read: (seen.extend(window for window, _ in read), step(read))[1]
        found = ours(kit.noise(seconds))
        assert found.stats["windows"] == len(seen)
        return [(round(w.seek * 0.02, 2), round(w.count * 0.02, 2)) for w in seen]

    assert spied(0.8, 4.0) == [(0.0, 2.0), (1.2, 2.0), (2.4, 1.6)]
    assert spied(0.8, 3.2) == [(0.0, 2.0), (1.2, 2.0)]  # the end was heard: no third window
    assert spied(0.0, 4.0) == [(0.0, 2.0), (2.0, 2.0)]
    assert spied(None, 4.0) == [(0.0, 2.0), (1.0, 2.0), (2.0, 2.0)]
    assert spied(None, 1.5) == [(0.0, 1.5)]


def test_one_window_has_the_text_of_the_sequential_mode(trained):
    clips = [str(clip.path) for clip in speech_test() if clip.duration_s < 7][:4]
    texts = [
        [t.text for t in Transcriber.from_pretrained(trained, device="cpu", mode=mode)(clips)]
        for mode in ("sequential", "chunked")
    ]
    assert texts[0] == texts[1]


def plain(text):
    return text.lower().replace(".", "").replace(",", "").replace("?", "")


@pytest.mark.slow
def test_the_long_recording_is_read_about_as_well_in_both_modes(trained):
    [recording] = speech_test(long=True)
    rates = {}
    for mode in ("sequential", "chunked"):
        medusa = "medusa:path=zoo:whisper-synth-medusa"
        ours = Transcriber.from_pretrained(trained, device="cpu", draft=medusa, mode=mode)
        found = ours(str(recording.path))
        rates[mode] = jiwer.wer(plain(recording.text), plain(found.text))
        starts = [segment.start_s for segment in found.segments]
        assert starts == sorted(starts)
        assert found.segments[-1].end_s == pytest.approx(recording.duration_s, abs=2.0)
    assert rates["sequential"] < 0.16
    assert rates["chunked"] < 0.19


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "chunk"}, "did you mean 'chunked'"),
        ({"mode": "chunked", "condition_on_prev_tokens": True}, "needs mode='sequential'"),
        ({"mode": "chunked", "timestamps": False}, "needs timestamps=True"),
        ({"mode": "chunked", "overlap_s": -1.0}, "0 or more"),
        ({"overlap_s": 1.0}, "needs mode='chunked'"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, words):
    with pytest.raises(OptionError, match=words):
        TranscribeOptions(**options)


def test_an_overlap_as_long_as_a_window_is_refused(model, processor):
    with pytest.raises(OptionError, match="less than a window, 2 s"):
        Transcriber(model, processor, options=TranscribeOptions(mode="chunked", overlap_s=2.0))
