"""Lagging against closed forms, and which provisional words change."""

import pytest

from mmdecode.asr.results import Word
from mmdecode.asr.streaming import Update
from mmdecode.errors import OptionError
from mmdecode.evaluation.speed.latency import (
    StreamMeter,
    average_lagging,
    average_proportion,
    differentiable_average_lagging,
    lagging,
    percentile,
)


def wait_k(k, source, words):
    """Read k, then write and read in turn."""
    return [min(k + i, source) for i in range(words)]


@pytest.mark.parametrize("k", [1, 2, 5, 9, 10])
def test_wait_k_lags_by_k_where_both_sides_are_as_long(k):
    assert average_lagging(wait_k(k, 10, 10), 10) == pytest.approx(k)
    assert differentiable_average_lagging(wait_k(k, 10, 10), 10) == pytest.approx(k)


def test_a_k_beyond_the_source_is_offline_and_lags_by_all_of_it():
    assert wait_k(12, 10, 10) == wait_k(10, 10, 10) == [10] * 10
    assert average_lagging([10] * 10, 10) == 10
    assert differentiable_average_lagging([10] * 10, 10) == 10


@pytest.mark.parametrize(("k", "share"), [(1, 0.55), (3, 0.72), (5, 0.85), (10, 1.0)])
def test_the_proportion_of_wait_k(k, share):
    """Of ten words: k + (k + 1) + ... up to 10, by a hundred."""
    assert average_proportion(wait_k(k, 10, 10), 10) == pytest.approx(share)
    assert lagging(wait_k(k, 10, 10), 10).ap == pytest.approx(share)
    assert average_proportion([12, 14], 10) == 1.0 and average_proportion([], 10) is None


def test_the_unit_does_not_matter():
    delays = [1.5, 2.5, 2.5, 4.0, 6.0, 6.0]
    for measure in (average_lagging, differentiable_average_lagging):
        seconds = measure(delays, 6.0)
        assert measure([1000 * d for d in delays], 6000.0) == pytest.approx(1000 * seconds)


def test_lagging_by_hand():
    delays = [2.0, 2.0, 3.0, 4.0, 4.0]  # r = 0.8; the fourth word saw the whole source
    expected = (2.0 + (2.0 - 0.8) + (3.0 - 1.6) + (4.0 - 2.4)) / 4
    assert average_lagging(delays, 4.0) == pytest.approx(expected)
    delayed = [2.0, 2.8, 3.6, 4.4, 5.2]  # each word takes 0.8
    expected = sum(e - 0.8 * i for i, e in enumerate(delayed)) / 5
    assert differentiable_average_lagging(delays, 4.0) == pytest.approx(expected)
    assert expected == pytest.approx(2.0)


def test_a_burst_costs_dal_and_hardly_al():
    even, burst = [1, 2, 3, 4], [3, 3, 3, 4]
    assert differentiable_average_lagging(even, 4) == 1
    assert differentiable_average_lagging(burst, 4) == 3  # what follows waits for it
    assert average_lagging(burst, 4) == 1.75


def test_too_long_a_text_is_rewarded_by_al_alone():
    delays = [1.0, 2.0, 3.0, 4.0]
    longer = [d for d in delays for _ in range(3)]
    right, wrong = lagging(delays, 4.0, 4), lagging(longer, 4.0, 4)
    assert right.al == right.laal == 1
    assert wrong.al < 0 < wrong.laal


def test_too_short_a_text_has_the_pace_of_the_reference():
    assert lagging([2.0], 4.0, 4) == lagging([2.0], 4.0, 1)  # one word, no pace
    short = lagging([2.0, 3.0], 4.0, 4)
    assert short.al == short.laal == pytest.approx((2.0 + 3.0 - 1.0) / 2)


def test_words_that_were_ready_after_the_end_count_once():
    assert average_lagging([4.5, 5.0, 5.5], 4.0) == 4.5  # the first saw everything


def test_no_words_have_no_lag():
    assert average_lagging([], 4.0) is None
    assert differentiable_average_lagging([], 4.0) is None
    assert lagging([], 0.0).al is None


def test_what_cannot_be_is_refused():
    with pytest.raises(OptionError, match="in order"):
        average_lagging([2.0, 1.0], 4.0)
    with pytest.raises(OptionError, match="source=0"):
        average_lagging([2.0], 0.0)
    with pytest.raises(OptionError, match="words=0"):
        average_lagging([2.0], 4.0, 0)


def update(audio_s, committed, provisional, late_s=0.0, ends=None):
    words = None
    if ends is not None:
        words = [
            Word(text=w, start_s=0.0, end_s=e, confidence=1.0)
            for w, e in zip(committed.split(), ends, strict=True)
        ]
    return Update(
        audio_s=audio_s,
        ready_s=audio_s + late_s,
        committed=committed.split(),
        provisional=provisional.split(),
        words=words,
    )


def measured(*updates, reference_words=None):
    meter = StreamMeter()
    for one in updates:
        meter.add(one)
    return meter.report(reference_words)


def test_provisional_words_that_change_are_counted_and_committed_ones_are_not():
    report = measured(
        update(1.0, "", "a b c"),
        update(2.0, "a", "b x y"),  # c became x
        update(3.0, "b", "z"),  # x, y became z
        update(4.0, "z d", ""),
    )
    assert report.committed_words == 4
    assert report.provisional_change_rate == pytest.approx(3 / 7)  # c, x, y of a b c x y z d


def test_no_change_is_counted_where_provisional_words_are_committed_as_they_were():
    report = measured(update(1.0, "", "a b"), update(2.0, "a b", "c"), update(2.5, "c", ""))
    assert report.provisional_change_rate == 0


def test_a_report_tells_audio_from_wall_and_knows_the_ends_of_words():
    report = measured(
        update(1.0, "a", "", late_s=0.25, ends=[0.5]),
        update(2.0, "b c", "", late_s=0.75, ends=[1.25, 1.5]),
        update(3.0, "d", "", late_s=0.25, ends=[3.0]),
        reference_words=4,
    )
    assert report.received.al == pytest.approx(lagging([1, 2, 2, 3], 3.0, 4).al)
    assert report.ready.al == pytest.approx(lagging([1.25, 2.75, 2.75, 3.25], 3.0, 4).al)
    assert report.lag_s == pytest.approx((0.5 + 0.75 + 0.5 + 0.0) / 4)
    assert report.lag_p95_s == 0.75
    assert report.delay_s == 0.75


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.95, 95), (0.951, 96), (1.0, 100)])
def test_percentiles_are_values_that_occurred(share, value):
    assert percentile(list(range(100, 0, -1)), share) == value
    assert percentile([], share) is None


def test_an_empty_stream_has_a_report():
    report = measured(update(0.0, "", ""))
    assert (
        report.committed_words,
        report.received.al,
        report.lag_s,
        report.provisional_change_rate,
    ) == (0, None, None, 0)
