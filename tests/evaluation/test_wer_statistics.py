import gzip
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from mmdecode.errors import OptionError
from mmdecode.evaluation.nbest.n_best import SHIPPED
from mmdecode.evaluation.speech.wer import Step, align, count_errors
from mmdecode.evaluation.stats import intervals as statistics
from mmdecode.evaluation.stats.intervals import (
    bootstrap_p,
    holm,
    mapsswe,
    paired_bootstrap,
    paired_test,
    resampled_sums,
    segments,
    sums_by,
)

DATA = Path(__file__).parents[1] / "data"
EXPECTED = json.loads((DATA / "nbest" / "expected.json").read_text())
CLOSE = EXPECTED["nbest_paired_close_calls_whisper_norm"]


@pytest.fixture(scope="module")
def tables():
    with gzip.open(SHIPPED["cv"], "rt") as lines:
        items = [json.loads(line) for line in lines]
    references = [item["output"] for item in items]
    return {
        rank: count_errors(references, [item["input"][rank - 1] for item in items])
        for rank in (3, 4, 5)
    }


@pytest.mark.one_in(3)
@pytest.mark.parametrize("pair", [(4, 5), (3, 4), (3, 5)])
def test_paired_tests_of_close_calls_are_the_published_ones(tables, pair):
    expected = CLOSE["cv_hyp{}_vs_hyp{}".format(*pair)]
    first, second = (tables[rank][:, 2:5].sum(1) for rank in pair)
    assert [first.sum(), second.sum()] == expected["errors"]
    found = paired_test(first - second)
    assert [found.mean, found.sd] == pytest.approx(
        [expected["mean_diff"], expected["sd_diff"]], abs=1e-6
    )
    assert round(found.z, 3) == expected["Z"]
    bootstrap = paired_bootstrap(first, second, tables[3][:, 0])
    assert [100 * bootstrap.low, 100 * bootstrap.high] == pytest.approx(
        expected["boot95_delta_wer"], abs=0.05
    )
    assert bootstrap.p_second_better == pytest.approx(expected["p_second_better"], abs=0.01)


# Matched pairs


PATHS = re.compile(r'<PATH id="([^"]*)"(?:[^">]|"[^"]*")*>(.*?)</PATH>', re.DOTALL)
WORDS = re.compile(r'(?:^|:)([CSDI]),("[^"]*")?,("[^"]*")?')
KINDS = {"C": "equal", "S": "substitute", "D": "delete", "I": "insert"}


def read_sgml(path):
    """Alignments by utterance, as sclite writes them with ``-o sgml``."""
    return {
        name: [
            Step(KINDS[kind], reference.strip('"'), hypothesis.strip('"'))
            for kind, reference, hypothesis in WORDS.findall(body.strip())
        ]
        for name, body in PATHS.findall(path.read_text())
    }


def systems():
    first, second = (read_sgml(DATA / "sctk" / name) for name in ("file1.sgml", "file2.sgml"))
    return [*first.values()], [second[name] for name in first]


def published():
    text = (DATA / "sctk" / "mapsswe.expected.txt").read_text()
    line = next(line for line in text.splitlines() if line.startswith("MTCH_PR_RESULTS"))
    numbers = [line.split(f"({name}: ")[1].split(")")[0] for name in ("mean", "std dev", "Z Stat")]
    return [int(line.split("(# segs: ")[1].split(")")[0]), *map(float, numbers)]


def found():
    test = mapsswe(*systems())
    return [test.count, *(round(value, 3) for value in (test.mean, test.sd, test.z))]


def test_matched_pairs_are_those_of_sclite():
    assert found() == published() == [3, 0.667, 0.577, 2.0]
    pieces = [cut for a, b in zip(*systems(), strict=True) for cut in segments(a, b)]
    assert np.sum(pieces, axis=0).tolist() == [13, 9, 7]  # its "Totals"
    assert mapsswe(*systems()[::-1]).z == pytest.approx(-2)


def test_one_word_between_segments_is_not_enough():
    assert mapsswe(*systems(), between=1).count != 3


@pytest.mark.parametrize(
    "mutant",
    [
        lambda steps: (original(steps)[0], [0] * len(original(steps)[1])),  # insertions forgotten
        lambda steps: ([True] * len(original(steps)[0]), original(steps)[1]),  # all words right
    ],
)
def test_matched_pair_mutants_fail(mutant, monkeypatch):
    monkeypatch.setattr(statistics, "_by_word", mutant)
    assert found() != published()


original = statistics._by_word


def cut(reference, first, second):
    return segments(align(reference, first, "none"), align(reference, second, "none"))


def test_segments_by_hand():
    text = "a b c d e f"
    assert cut(text, text, text) == []
    assert cut(text, "x b c d e y", text) == [(3, 1, 0), (3, 1, 0)]
    assert cut(text, "x b y d e f", text) == [(5, 2, 0)]  # one right word does not separate
    assert cut(text, "x b c d e f", "a b c d e y") == [(3, 1, 0), (3, 0, 1)]
    assert cut(text, "x b z c d e f", text) == [(4, 2, 0)]  # nor two with an insertion between
    assert cut(text, text + " x y", text) == [(2, 2, 0)]
    assert cut("", "x", "") == [(0, 1, 0)] and cut("", "", "x") == [(0, 0, 1)]


def test_errors_are_neither_lost_nor_counted_twice():
    random = np.random.default_rng(0)
    for _ in range(200):
        reference, *hypotheses = (
            " ".join(random.choice(list("abc"), random.integers(9))) for _ in "123"
        )
        steps = [align(reference, text, "none") for text in hypotheses]
        errors = [sum(step.kind != "equal" for step in one) for one in steps]
        assert np.sum([(0, 0, 0), *segments(*steps)], axis=0)[1:].tolist() == errors


def test_merged_words_count_as_the_words_of_the_reference():
    merged = [Step("equal", "white paper", "whitepaper"), Step("substitute", "a", "b")]
    plain = [Step("equal", w, w) for w in ("white", "paper")] + [Step("substitute", "a", "c")]
    assert segments(merged, plain) == [(3, 1, 1)]


@pytest.mark.parametrize(
    ("differences", "p"),
    [([1] * 10, 2**-9), ([-1] * 3, 0.25), ([2], 1.0), ([0] * 9, 1.0), ([], 1.0)],
)
def test_differences_that_are_all_the_same_are_tested_by_their_signs(differences, p):
    test = paired_test(differences)
    assert test.p == p and np.sign(test.z) == (np.sign(test.mean) if p < 1 else 0)
    assert np.isclose(test.p, math.erfc(abs(test.z) / math.sqrt(2)))


def test_different_readings_of_a_reference_are_one_segment():
    first = [Step("substitute", "an", "the"), Step("equal", "investor", "investor")]
    assert segments(first, [Step("equal", "investor", "investor")]) == [(1, 1, 0)]


def test_systems_with_other_utterances_are_refused():
    with pytest.raises(OptionError, match="1 and 0 utterances"):
        mapsswe([[]], [])


# Intervals and corrections


def test_a_system_against_itself_does_not_differ():
    errors = np.array([0, 3, 1, 2])
    found = paired_bootstrap(errors, errors, np.array([5, 5, 5, 5]))
    assert (found.difference, found.low, found.high, found.p_second_better) == (0, 0, 0, 0)


def test_unpaired_draws_would_be_wider(tables):
    first, second = (tables[rank][:, 2:5].sum(1) for rank in (4, 5))
    words = tables[4][:, 0]
    paired = paired_bootstrap(first, second, words, resamples=2000)
    one, two = (
        resampled_sums(np.column_stack([e, words]), 2000, seed)
        for e, seed in ((first, 1), (second, 2))
    )
    loose = np.quantile(one[:, 0] / one[:, 1] - two[:, 0] / two[:, 1], [0.025, 0.975])
    assert loose[1] - loose[0] > 1.5 * (paired.high - paired.low)


def test_groups_are_resampled_whole():
    table = np.array([[1, 10], [2, 10], [4, 10]])
    assert sums_by(table, ["x", "y", "x"]).tolist() == [[5, 20], [2, 10]]
    sums = resampled_sums(sums_by(table, ["x"] * 3), 50)
    assert (sums == [7, 30]).all()


def test_draws_do_not_depend_on_how_many_are_held_at_once():
    table = np.arange(20).reshape(10, 2)
    whole = resampled_sums(table, 100, 3)
    assert (resampled_sums(table, 100, 3, at_once=30) == whole).all()


def test_spread_of_the_draws_is_the_standard_error():
    values = np.random.default_rng(0).poisson(3, (400, 1))
    bootstrap = resampled_sums(values, 4000)[:, 0] / 400
    assert bootstrap.std() == pytest.approx(values.std() / 20, rel=0.05)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []


def test_a_small_p_comes_from_the_tail_that_no_draw_reaches():
    rng = np.random.default_rng(0)
    assert bootstrap_p(rng.normal(1, 1, 10_000)) == pytest.approx(0.317, abs=0.02)
    assert bootstrap_p(rng.normal(-5, 1, 10_000)) == pytest.approx(5.7e-7, rel=0.5)
    assert bootstrap_p(rng.normal(0, 1, 10_000)) > 0.9
    assert bootstrap_p(np.zeros(99)) == 1
    assert bootstrap_p(np.ones(99)) == 0.02, "no spread: the draws are all there is"
