"""Oracles of N-best lists, what edits did, the shipped sets against published counts."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmdecode.asr.correction.n_best_lists import NBestList, read_lists
from mmdecode.asr.output.manifest import Entry
from mmdecode.errors import InputError, OptionError
from mmdecode.evaluation.nbest import n_best
from mmdecode.evaluation.nbest.methods import Output, Parts
from mmdecode.evaluation.nbest.n_best import (
    SHIPPED,
    Aligner,
    count_lists,
    errors_in,
    with_references,
)
from mmdecode.evaluation.nbest.report import NBestReport
from mmdecode.evaluation.speech.wer import count_errors, summed, wer
from mmdecode.evaluation.stats.intervals import paired_bootstrap, paired_test

EXPECTED = json.loads((Path(__file__).parents[1] / "data" / "nbest" / "expected.json").read_text())
CONVENTIONS = {
    "raw": ("none", "plain"),
    "whisper": ("whisper", "plain"),
    "oalb": ("leaderboard", "plain"),
    "oalb_merge": ("leaderboard", "merge"),
}
TEXT = st.lists(st.sampled_from(["a", "b", "ab", "ba", "c"]), max_size=5).map(" ".join)
LIST = st.tuples(st.lists(TEXT, min_size=1, max_size=4), TEXT)


def lists_from(pairs):
    return [
        NBestList(f"u{n}", tuple(texts), reference=reference)
        for n, (texts, reference) in enumerate(pairs)
    ]


def totals(lists, aligner):
    """Errors of the first, of the best, and words missing."""
    counts = count_lists(lists, aligner)
    return counts.first[:, 2:5].sum(), counts.best[:, 2:5].sum(), counts.missing.sum()


# Oracles


@pytest.mark.parametrize("scorer", ["plain", "merge"])
@settings(max_examples=150, deadline=None)
@given(pairs=st.lists(LIST, min_size=1, max_size=3))
def test_composing_is_never_worse_than_choosing_nor_that_than_copying(scorer, pairs):
    lists, aligner = lists_from(pairs), Aligner("none", scorer)
    counts = count_lists(lists, aligner)
    assert (counts.missing <= counts.best[:, 2:5].sum(1)).all()
    assert (counts.best[:, 2:5].sum(1) <= counts.first[:, 2:5].sum(1)).all()


@settings(max_examples=60, deadline=None)
@given(LIST)
def test_equal_hypotheses_leave_nothing_to_choose(pair):
    [one] = lists_from([pair])
    repeated = NBestList("u", (one.best,) * 5, reference=one.reference)
    first, best, _ = totals([repeated], Aligner("none"))
    assert first == best


@pytest.mark.parametrize("scorer", ["plain", "merge"])
@settings(max_examples=100, deadline=None)
@given(pair=LIST, more=TEXT)
def test_a_further_hypothesis_never_raises_an_oracle(scorer, pair, more):
    [one] = lists_from([pair])
    longer = NBestList("u", (*one.hypotheses, more), reference=one.reference)
    aligner = Aligner("none", scorer)
    assert totals([longer], aligner)[1] <= totals([one], aligner)[1]
    assert totals([longer], aligner)[2] <= totals([one], aligner)[2]


def test_oracles_by_hand():
    lists = [
        NBestList("u", ("a x c", "a b", "y b c d"), reference="a b c"),
        NBestList("v", ("p", "p p"), reference="q p p"),
    ]
    counts = count_lists(lists, Aligner("none"))
    assert counts.first[:, 2:5].sum(1).tolist() == [1, 2]
    assert counts.best[:, 2:5].sum(1).tolist() == [1, 1]
    assert counts.missing.tolist() == [0, 1]  # the second p is there as a word of the set
    assert counts.present[0] == {"a", "b", "c", "d", "x", "y"}
    assert counts.distinct.tolist() == [3, 2]


def test_a_merged_compound_is_present():
    one = NBestList("u", ("whitepaper",), reference="white paper")
    assert count_lists([one], Aligner("none", "merge")).missing.tolist() == [0]
    assert count_lists([one], Aligner("none", "plain")).missing.tolist() == [2]


def test_merged_compounds_must_count_as_present_for_the_identity(monkeypatch):
    monkeypatch.setattr(n_best, "_right", lambda alignments: [False] * 2)
    one = NBestList("u", ("whitepaper",), reference="white paper")
    counts = count_lists([one], Aligner("none", "merge"))
    assert counts.missing.sum() > counts.first[:, 2:5].sum()


def test_the_rate_of_a_corpus_is_not_the_mean_of_rates():
    lists = lists_from([(["x"], "a"), (["a b c d e f g h i"], "a b c d e f g h i")])
    counts = count_lists(lists, Aligner("none"))
    score = summed(counts.best, "none", "plain", resamples=2)
    each = counts.best[:, 2:5].sum(1) / counts.best[:, 0]
    assert score.value == pytest.approx(0.1)
    assert each.mean() == pytest.approx(0.5)


def test_lists_that_cannot_be_scored_are_refused():
    with pytest.raises(InputError, match="'u' has no reference"):
        count_lists([NBestList("u", ("a",))], Aligner("none"))
    with pytest.raises(OptionError, match="no list"):
        count_lists([], Aligner("none"))
    with pytest.raises(OptionError, match="sclite"):
        Aligner("none", "sclite")


@settings(max_examples=60, deadline=None)
@given(TEXT, TEXT, st.sampled_from(["none", "whisper", "leaderboard"]))
def test_the_aligner_counts_as_the_word_error_rate_does(reference, hypothesis, normaliser):
    score = wer([reference], [hypothesis], normaliser=normaliser, resamples=1)
    aligner = Aligner(normaliser)
    assert (
        aligner.errors(reference, hypothesis)
        == errors_in(aligner.steps(reference, hypothesis))
        == score.errors
    )


def test_texts_are_normalised_once():
    aligner = Aligner("leaderboard")
    assert aligner.normal("10mm") == "10 hmm" and aligner.normal("10 hmm") == "10"
    assert aligner.errors("10mm", "10") == 1


# Edits


def made(lists, texts, aligner):
    """What texts changed, by the report on them."""
    found = {"edits": Output(texts=list(texts))}
    report = NBestReport(
        "set", Parts(training=[], development=[], test=lists), found, aligner, resamples=2
    )
    names = "improved unchanged worse edited new_words new_words_right".split()
    return {name: report.summary["methods"]["edits"][name] for name in names}


def test_edits_by_hand():
    lists = lists_from(
        [
            (["a x", "a b"], "a b"),  # chosen right
            (["a b", "a c"], "a b"),  # chosen wrong
            (["a x"], "a b"),  # another wrong word, which is new
            (["a x"], "a d"),  # the right word, which is new
            (["A, x"], "a y"),  # the same under the normaliser
        ]
    )
    found = made(lists, ["a b", "a c", "a z", "a d", "a x"], Aligner("whisper"))
    assert found == {
        **{"improved": 2, "unchanged": 2, "worse": 1},
        **{"edited": 4, "new_words": 2, "new_words_right": 1},
    }


def test_copying_changes_nothing():
    lists = lists_from([(["a x", "a b"], "a b"), (["", "c"], "")])
    found = made(lists, [one.best for one in lists], Aligner("none"))
    assert found.pop("unchanged") == 2 and not any(found.values())


# References


def test_references_of_a_manifest_are_found_by_id_and_path():
    lists = [
        NBestList("a", ("x",), reference="own"),
        NBestList("b", ("x",)),
        NBestList("c.wav", ("x",), audio="/c.wav"),
    ]
    entries = [
        Entry(id="a", audio=None, text="other"),
        Entry(id="b", audio=None, text="by id"),
        Entry(id="c", audio="/c.wav", text="by path"),
    ]
    found = with_references(lists, entries)
    assert [one.reference for one in found] == ["own", "by id", "by path"]
    for name in ("d", "c.wav#2"):  # the text of a recording is not that of a window
        with pytest.raises(InputError, match=f"no text for the list '{name}'"):
            with_references([NBestList(name, ("x",), audio="/c.wav")], entries[2:] * (name != "d"))


# The shipped sets


@pytest.fixture(scope="module")
def shipped():
    return {name: read_lists(path) for name, path in SHIPPED.items()}


QUICK = {("ls_other", "raw"), ("ls_other", "oalb_merge"), *(("cv", one) for one in CONVENTIONS)}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "convention"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow)
        for pair in itertools.product(SHIPPED, CONVENTIONS)
    ],
)
def test_counts_of_shipped_sets_are_the_published_ones(name, convention, shipped):
    expected = EXPECTED["nbest_wer"]["sets"][name][convention]
    lists, aligner = shipped[name], Aligner(*CONVENTIONS[convention])
    found = {
        "ref_words": sum(len(aligner.normal(one.reference).split()) for one in lists),
        "err_1best": sum(aligner.errors(one.reference, one.best) for one in lists),
    }
    if "err_oracle5" in expected:
        found["err_oracle5"] = int(count_lists(lists, aligner).best[:, 2:5].sum())
    assert len(lists) == EXPECTED["nbest_wer"]["sets"][name]["n"]
    assert found == {key: expected[key] for key in found}


def test_shipped_sets_are_three_and_their_repeats_are_as_published(shipped):
    assert [*shipped] == ["cv", "ls_clean", "ls_other"]
    distinct = {
        name: round(np.mean([len({*one.hypotheses}) for one in lists]), 2)
        for name, lists in shipped.items()
    }
    assert distinct == {"cv": 3.21, "ls_clean": 4.99, "ls_other": 4.99}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ls_clean", "ls_other"])
def test_intervals_and_paired_tests_are_the_published_ones(name, shipped):
    lists = shipped[name]
    tables = [
        count_errors([one.reference for one in lists], [one.hypotheses[rank] for one in lists])
        for rank in (0, 1)
    ]
    score = summed(tables[0], "whisper", "plain")
    expected = EXPECTED["bootstrap_wer_95pct_whisper_norm"][name]
    assert [100 * score.low, 100 * score.high] == pytest.approx(expected, abs=0.05)
    expected = EXPECTED["nbest_paired_hyp1_vs_hyp2_whisper_norm"][name]
    first, second = (table[:, 2:5].sum(1) for table in tables)
    assert [first.sum(), second.sum()] == [expected["errors_hyp1"], expected["errors_hyp2"]]
    paired = paired_test(first - second)
    assert round(paired.z, 3) == expected["utterance_paired"]["Z"]
    bootstrap = paired_bootstrap(first, second, tables[0][:, 0])
    assert [100 * bootstrap.low, 100 * bootstrap.high] == pytest.approx(
        expected["bootstrap_delta_wer_95pct"], abs=0.05
    )
