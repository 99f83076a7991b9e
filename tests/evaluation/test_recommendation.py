"""The recommended way of decoding, by rows of measurements that are made up."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from mmdecode.evaluation.speed.draft_speed import AGAIN, PLAIN
from mmdecode.evaluation.speed.recogniser_speed import GENERATE, Errors, RecogniserSpeed
from mmdecode.evaluation.speed.recommendation import (
    is_broken,
    noise_of,
    recommend,
    with_errors,
)


def row(draft, precision="fp32", speed=1.0, same=1.0, fp32=1.0, **more):
    speedup = speed if isinstance(speed, tuple) else (speed, speed - 0.05, speed + 0.05)
    given = {
        "exact": precision != "bf16",
        "same_as_undrafted": same,
        "same_as_fp32": fp32,
        "texts": ("a", "b", "c", "d"),
    }
    return RecogniserSpeed(draft=draft, precision=precision, speedup=speedup, **given | more)


def wer(more, low, high):
    return Errors(value=0.1 + more, low=0, high=1, more=more, more_low=low, more_high=high)


NOISE = (1.0, 0.95, 1.04)
BOTH = [row(PLAIN), row(AGAIN, speed=NOISE)]


def chosen(*rows):
    best, _ = recommend([*BOTH, *rows])
    return best.draft, best.precision


def test_the_noise_is_the_larger_deviation_of_the_second_run():
    assert noise_of([row(PLAIN), row(AGAIN, speed=(1.0, 0.8, 1.1))]) == 1.25
    assert noise_of([row(PLAIN), row(AGAIN, speed=(1.0, 0.95, 1.2))]) == 1.2


def test_the_fastest_row_with_the_same_tokens_is_recommended():
    assert chosen(row("slow", speed=1.3), row("quick", speed=1.7)) == ("quick", "fp32")
    _, words = recommend([*BOTH, row("quick", speed=(1.7, 1.6, 1.9))])
    assert words == (
        "The same text, 1.70 times as fast as undrafted fp32 [1.60, 1.90]: the drafter changes no "
        "token."
    )


@pytest.mark.parametrize("speed", [(1.05, 1.01, 1.1), (1.3, 1.0, 1.6), (0.5, 0.4, 0.6)])
def test_gains_within_the_noise_are_none(speed):
    best, words = recommend([*BOTH, row("lookup", speed=speed)])
    assert best is BOTH[0]
    assert "the noise of this measurement, x1.05: decode without a drafter." in words


def test_a_gain_just_above_the_noise_counts():
    assert chosen(row("lookup", speed=(1.06, 1.01, 1.1))) == ("lookup", "fp32")


def test_the_second_undrafted_row_and_the_peer_are_not_recommended():
    best, _ = recommend([row(PLAIN), row(AGAIN, speed=(1.9, 1.8, 1.95)), row(GENERATE, speed=3.0)])
    assert best.draft == PLAIN
    assert chosen(row(GENERATE, speed=3.0)) == (PLAIN, "fp32")


def test_failed_rows_are_not_recommended():
    assert chosen(row("medusa", speed=2.0, problem="does not fit")) == (PLAIN, "fp32")


def test_a_draft_that_changes_tokens_where_it_must_not_is_never_recommended():
    fine = wer(0.0, -0.1, 0.1)
    for precision in ("fp32", "int8"):
        broken = row("medusa", precision, 2.0, same=0.9, fp32=0.9, errors=fine)
        assert is_broken(broken) and chosen(broken) == (PLAIN, "fp32")
    rounding = row("medusa", "bf16", 2.0, same=0.9, fp32=0.9, errors=fine)
    assert not is_broken(rounding) and chosen(rounding) == ("medusa", "bf16")
    assert not is_broken(row("medusa", same=0.0, problem="does not fit"))


def test_another_model_is_recommended_if_it_wrote_the_same_tokens():
    best, words = recommend([*BOTH, row("medusa", speed=1.3), row("medusa", "int8", 2.0)])
    assert (best.draft, best.precision) == ("medusa", "int8")
    assert words.startswith("2.00 times as fast as undrafted fp32 [1.95, 2.05]. int8 is ")
    assert words.endswith("wrote the same tokens on these recordings, and may not on others.")


def test_another_model_needs_references_if_it_wrote_other_tokens():
    other = row("medusa", "int8", 2.0, fp32=0.75, other_texts=1)
    best, words = recommend([*BOTH, row("medusa", speed=1.3), other])
    assert (best.draft, best.precision) == ("medusa", "fp32")
    assert words.endswith(
        " Faster, and not recommended: medusa in int8, x2.00. int8 is another model: 1 of 4 "
        "recordings have another text; a table with texts as --data would tell its word errors."
    )


def test_another_model_is_recommended_unless_its_errors_are_more_than_chance():
    def with_more(*more):
        return row("medusa", "int8", 2.0, fp32=0.75, other_texts=1, errors=wer(*more))

    first = row(PLAIN, errors=wer(0, 0, 0))
    best, words = recommend([first, BOTH[1], with_more(0.02, -0.01, 0.05)])
    assert best.precision == "int8"
    assert words.endswith(
        "int8 is another model: 1 of 4 recordings have another text, WER 12.0 % instead of 10.0 % "
        "(difference +2.0 points [-1.0, +5.0])."
    )
    best, words = recommend([first, BOTH[1], with_more(0.02, 0.001, 0.05)])
    assert best.precision == "fp32"
    assert "Faster, and not recommended: medusa in int8, x2.00." in words
    assert "[+0.1, +5.0])." in words and "a table with texts" not in words


def test_of_equally_fast_rows_the_model_in_fp32_is_recommended():
    assert chosen(row("medusa", speed=1.95), row("medusa", "int8", 2.0)) == ("medusa", "fp32")
    assert chosen(row("medusa", speed=1.9), row("medusa", "int8", 2.0)) == ("medusa", "int8")
    fine = wer(0.0, -0.1, 0.1)
    rows = [row("a", "bf16", 2.0, fp32=0.5, errors=fine), row("b", "int8", 1.98)]
    assert chosen(*rows) == ("b", "int8")


def test_a_slower_row_with_another_text_is_not_mentioned():
    other = row("medusa", "int8", 1.75, fp32=0.75)
    assert "not recommended" not in recommend([*BOTH, row("medusa", speed=1.7), other])[1]


def test_word_errors_are_compared_with_those_of_the_first_row():
    references = ["one two three four", "five six seven eight"]
    texts = ("one two three", "five six seven eight"), ("one two three", "five x y eight")
    rows = [row("a", texts=texts[0]), row("b", texts=texts[1]), row("c", problem="does not fit")]
    entries = [SimpleNamespace(text=text, language="fi") for text in references]
    (first, second, third), unscored = with_errors(rows, entries, None)
    assert unscored is None
    assert first.errors.value == 1 / 8 and first.errors.more == first.errors.more_high == 0
    assert second.errors.value == 3 / 8 and second.errors.more == 2 / 8
    assert (second.errors.more_low, second.errors.more_high) == (0, 0.5)
    assert second.errors.low < 3 / 8 < second.errors.high
    assert third == replace(rows[2]) and third.errors is None
