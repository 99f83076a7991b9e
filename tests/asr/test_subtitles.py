"""Cues: short lines, none overlapping, long enough to read, at the time of their words."""

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmdecode.asr.output import subtitles
from mmdecode.asr.output.subtitles import Cue, Layout, cues, width
from mmdecode.asr.results import Segment
from mmdecode.errors import OptionError


@dataclass(frozen=True)
class Word:
    text: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timed:
    """A segment with words."""

    start_s: float
    end_s: float
    text: str
    words: list[Word] | None = None


def segment(start, end, text):
    return Segment(start_s=start, end_s=end, text=text, tokens=[])


NUMBERS = " ".join(f"number{i:02d}" for i in range(20))  # 20 words of 8 letters


def test_a_short_segment_is_one_cue_with_its_own_times():
    (cue,) = cues([segment(1.0004, 3.0, " What  is it? ")])
    assert (cue.start_ms, cue.end_ms, cue.lines) == (1000, 3000, ("What is it?",))


def test_long_segments_are_split_into_even_lines_with_times_by_characters():
    found = cues([segment(10.0, 28.0, NUMBERS)])
    assert [cue.lines for cue in found] == [
        tuple(" ".join(NUMBERS.split()[i : i + 4]) for i in pair)
        for pair in ((0, 4), (8, 12), (16,))
    ]
    assert found[0].start_ms == 10_000 and found[-1].end_ms == 28_000
    per_character = 18_000 / len(NUMBERS)
    assert found[1].start_ms == round(10_000 + NUMBERS.index("number08") * per_character)


def test_lines_are_about_equally_wide():
    text = "Add six spoons of sugar and a little potato to the cake."
    (cue,) = cues([segment(0.0, 5.0, text)])
    assert cue.lines == ("Add six spoons of sugar and", "a little potato to the cake.")


def test_words_with_times_decide_when_their_cue_is_shown():
    words = [Word(f" {w}", 10 + i + (i > 7) * 30, 10.9 + i + (i > 7) * 30)
             for i, w in enumerate(NUMBERS.split())]  # fmt: skip
    found = cues([Timed(10.0, 70.0, NUMBERS, words)])
    assert [(c.start_ms, c.end_ms) for c in found] == [
        (10_000, 17_900), (48_000, 55_900), (56_000, 59_900),
    ]  # fmt: skip


def test_words_that_are_not_in_the_text_are_not_used():
    found = cues([Timed(0.0, 5.0, "one two", [Word("three", 1.0, 2.0)])])
    assert [(c.start_ms, c.end_ms) for c in found] == [(0, 5000)]


def test_scripts_without_spaces_are_broken_and_wide_characters_count_twice():
    found = cues([segment(0.0, 20.0, "語" * 70)])
    assert [cue.lines for cue in found] == [("語" * 21, "語" * 21), ("語" * 21, "語" * 7)]


def test_fast_speech_stays_on_screen_while_nobody_speaks():
    text = "a" * 40  # two seconds to read
    found = cues([segment(0.0, 1.0, text), segment(5.0, 6.0, text), segment(6.5, 7.0, text)])
    assert [(c.start_ms, c.end_ms) for c in found] == [(0, 2000), (5000, 6500), (6500, 8500)]
    free = Layout(max_reading_speed=None)
    assert cues([segment(0.0, 1.0, text)], free)[0].end_ms == 1000


def test_a_cue_that_follows_too_soon_waits_until_the_one_before_was_shown():
    found = cues([segment(0.0, 0.1, "a"), segment(0.1, 0.2, "b"), segment(0.2, 3.0, "c")], Layout())
    assert [(c.start_ms, c.end_ms) for c in found] == [(0, 833), (833, 1666), (1666, 3000)]


def test_without_a_width_a_segment_is_a_cue():
    (cue,) = cues([segment(0.0, 9.0, NUMBERS)], Layout(max_line_width=None))
    assert cue.lines == (NUMBERS,)


@pytest.mark.parametrize(
    "options",
    [
        {"max_line_width": 1},
        {"max_line_count": 0},
        {"max_reading_speed": 0.0},
        {"max_reading_speed": float("nan")},
        {"min_duration_s": -1.0},
    ],
    ids=str,
)
def test_limits_out_of_range_are_refused(options):
    with pytest.raises(OptionError, match="expected"):
        Layout(**options)


TEXT = st.text(st.sampled_from("ab ,.é語\u0301-\n"), max_size=120)
TIME = st.floats(0, 100, allow_nan=False)
LAYOUT = st.builds(
    Layout,
    max_line_width=st.integers(4, 42),
    max_line_count=st.integers(1, 3),
    max_reading_speed=st.one_of(st.none(), st.floats(5, 30)),
    min_duration_s=st.sampled_from([0.0, 5 / 6]),
)


def check(found, texts, layout):
    """The rules that hold for any input."""
    shortest = round(1000 * layout.min_duration_s)
    assert all(cue.end_ms <= following.start_ms for cue, following in itertools.pairwise(found))
    for cue, following in itertools.zip_longest(found, found[1:]):
        assert cue.end_ms - cue.start_ms >= shortest
        assert 1 <= len(cue.lines) <= layout.max_line_count
        assert all(line and width(line) <= layout.max_line_width for line in cue.lines)
        if layout.max_reading_speed is not None and (
            following is None or following.start_ms > cue.end_ms
        ):
            shown = (cue.end_ms - cue.start_ms) / 1000
            assert cue.characters / layout.max_reading_speed <= shown + 1e-3
    shown = sorted("".join("".join(cue.lines) for cue in found).replace(" ", ""))
    assert shown == sorted("".join("".join(text.split()) for text in texts))


segments = st.lists(st.tuples(TIME, TIME, TEXT), max_size=6)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(segments, LAYOUT)
def test_every_rule_holds_for_any_segments(parts, layout):
    found = cues([segment(start, end, text) for start, end, text in parts], layout)
    check(found, [text for _, _, text in parts], layout)


# What the rules above would not be worth if they could not fail


def overlapping(found):
    return [Cue(start_ms=0, end_ms=cue.end_ms, lines=cue.lines) for cue in found]


@pytest.mark.parametrize("broken", ["wrap", "width", "overlap", "speed", "duration", "text"])
def test_a_broken_rule_is_seen(monkeypatch, broken):
    parts = [(0.0, 9.0, NUMBERS), (9.0, 9.1, "語" * 30), (12.0, 12.1, "word " * 9), (15, 15, "a")]
    layout = limits = Layout()
    if broken == "wrap":
        monkeypatch.setattr(subtitles, "wrap", lambda text, columns: [(0, len(text))])
    if broken == "width":
        monkeypatch.setattr(subtitles, "width", len)
    if broken == "speed":
        layout = Layout(max_reading_speed=None)
    if broken == "duration":
        layout = Layout(min_duration_s=0.0)
    found = cues([segment(*part) for part in parts], layout)
    monkeypatch.undo()
    if broken == "overlap":
        found = overlapping(found)
    if broken == "text":
        found.pop()
    with pytest.raises(AssertionError):
        check(found, [text for _, _, text in parts], limits)


def test_words_that_are_not_used_are_seen(monkeypatch):
    monkeypatch.setattr(subtitles, "_located", lambda text, words: [])
    with pytest.raises(AssertionError):
        test_words_with_times_decide_when_their_cue_is_shown()
