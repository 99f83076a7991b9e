"""Chunked mode: windows at fixed places, joined where they overlap."""

import jiwer
import pytest

from mmdecode.asr import TranscribeOptions, Transcriber
from mmdecode.asr.chunks import join
from mmdecode.asr.long_form import Piece, Result
from mmdecode.errors import OptionError
from mmdecode.zoo.speech import speech_test

STAMPS = 1000
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
        ([(0, 6, [1, 2, 3, 4, 5, 99])], [(3, 9, [98, 3, 4, 5, 6, 7])], [1234567]),
        # one heard a word more
        ([(0, 6, [1, 2, 3, 4, 5])], [(3, 9, [2, 3, 9, 4, 5, 6])], [1239456]),
        # nothing in common: the segment that ended counts, the sentence begun in the middle not
        ([(0, 3, [1]), (3, 6, [2, 3, 4])], [(4, 6.5, [8, 9]), (6.5, 9, [5, 6])], [1, 234, 56]),
        # one word in common is chance
        ([(0, 6, [1, 2, 3])], [(6, 9, [3, 4, 5])], [123, 345]),
        ([], [(4, 6, [1, 2])], [12]),
        ([(0, 6, [1, 2])], [], [12]),
    ],
)
def test_two_windows_are_joined_where_they_agree(left, right, expected):
    found = join(pieces(*left), pieces(*right), 3.5, STAMPS)
    assert ["".join(map(str, part)) for part in words(found)] == list(map(str, expected))
    assert all(piece.start <= piece.end for piece in found)
    assert [p.start for p in found] == sorted(p.start for p in found)


def test_what_lies_before_the_overlap_is_not_matched():
    left = pieces((0, 3, [1, 2, 3, 4]), (3, 6, [5, 6]))
    right = pieces((4, 6, [5, 6]), (6, 9, [1, 2, 3, 4]))
    assert words(join(left, right, 3.5, STAMPS)) == [[1, 2, 3, 4], [5, 6], [1, 2, 3, 4]]


def test_a_seam_keeps_the_times_of_both():
    [seam] = join(pieces((1, 6, [1, 2, 3])), pieces((4, 9, [2, 3, 4])), 3.5, STAMPS)
    assert (seam.start, seam.end) == (1, 9)
    assert seam.tokens == [STAMPS, 1, 2, 3, 4, STAMPS + 9]


def test_each_window_decides_the_times_on_its_side_of_the_seam():
    left = pieces((0, 3, [1, 2]), (3, 6, [3, 4]))
    right = pieces((0.1, 3.1, [1, 2]), (3.1, 6.1, [3, 4]), (6.1, 9, [5]))
    found = join(left, right, 0.0, STAMPS)
    assert [(piece.start, piece.end) for piece in found] == [(0, 3), (3, 6.1), (6.1, 9)]


def test_windows_overlap_and_reach_the_end(model, processor, kit):
    seen = []

    def spied(overlap_s, seconds):
        ours = Transcriber(
            model, processor, options=TranscribeOptions(mode="chunked", overlap_s=overlap_s)
        )
        step, seen[:] = ours._loop._step, []
        ours._loop._step = lambda windows, features: (seen.extend(windows), step(windows, features))
        [found] = ours(kit.noise(seconds))
        assert found.stats["windows"] == len(seen)
        return [(round(w.seek * 0.02, 2), round(w.count * 0.02, 2)) for w in seen]

    assert spied(0.8, 4.0) == [(0.0, 2.0), (1.2, 2.0), (2.4, 1.6)]
    assert spied(0.8, 3.2) == [(0.0, 2.0), (1.2, 2.0)]  # the end was heard: no third window
    assert spied(0.0, 4.0) == [(0.0, 2.0), (2.0, 2.0)]
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


def test_the_long_recording_is_read_about_as_well_in_both_modes(trained):
    [recording] = speech_test(long=True)
    rates = {}
    for mode, overlap in (("sequential", None), ("chunked", 4.0)):
        ours = Transcriber.from_pretrained(
            trained,
            device="cpu",
            draft="medusa:path=zoo:whisper-synth-medusa",
            mode=mode,
            overlap_s=overlap,
        )
        [found] = ours(str(recording.path))
        rates[mode] = jiwer.wer(plain(recording.text), plain(found.text))
        starts = [segment.start_s for segment in found.segments]
        assert starts == sorted(starts)
        assert found.segments[-1].end_s == pytest.approx(recording.duration_s, abs=2.0)
    assert rates["sequential"] < 0.16
    assert rates["chunked"] < 0.22


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "chunk"}, "did you mean 'chunked'"),
        ({"mode": "chunked", "condition_on_prev_tokens": True}, "needs mode='sequential'"),
        ({"mode": "chunked", "timestamps": False}, "needs timestamps=True"),
        ({"mode": "chunked", "overlap_s": -1.0}, "0 or more"),
        ({"overlap_s": 1.0}, "is for mode='chunked'"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, words):
    with pytest.raises(OptionError, match=words):
        TranscribeOptions(**options)


def test_an_overlap_as_long_as_a_window_is_refused(model, processor):
    with pytest.raises(OptionError, match="less than a window, 2 s"):
        Transcriber(model, processor, options=TranscribeOptions(mode="chunked", overlap_s=2.0))
