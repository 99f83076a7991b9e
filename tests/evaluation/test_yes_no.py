"""Parsers, scores of yes/no answers, margins, and the check of published rows."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest
from sklearn.metrics import average_precision_score, precision_recall_fscore_support, roc_auc_score

from mmdecode.errors import OptionError, UnknownNameError
from mmdecode.evaluation.report.item_comparison import flips
from mmdecode.evaluation.stats.intervals import (
    bootstrap_p,
    bootstrap_sums,
    draw_units,
    interval,
    item_weights,
    mcnemar,
)
from mmdecode.evaluation.stats.margins import (
    auroc,
    auroc_draws,
    average_precision,
    best_threshold,
    cross_fitted_shifts,
    fit_shift,
)
from mmdecode.evaluation.vision.answers import PARSERS, choice, leading, original, parser_of
from mmdecode.evaluation.vision.items import YesNoItem
from mmdecode.evaluation.vision.yes_no_report import YesNoReport, count_answers, rates
from tests.support.files import json_lines
from tests.support.scores import score_answers

CASES = Path(__file__).parents[1] / "data" / "pope" / "parser_cases.jsonl"

# Parsers


def cases():
    return json_lines(CASES)


def test_every_column_of_the_published_parsers():
    assert len(cases()) == 28
    unknown = {"other": None, "unknown": None}
    for case in cases():
        text = case["text"]
        assert PARSERS["original"].parse(text, "no") == case["pope_original"], text
        for label in ("yes", "no"):
            right = PARSERS["vcd"].parse(text, label) == label
            assert right == case["vcd_counts_correct"][f"if_gold_{label}"], (text, label)
        columns = {"lmms": "lmms_eval", "vlmevalkit": "vlmevalkit", "mme": "mme_otter"}
        for name, column in columns.items():
            expected = unknown.get(case[column], case[column])
            assert PARSERS[name].parse(text, "yes") == expected, (text, name)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *[("Yes", "yes"), ("**No**, it is not", "no"), (" yes, there is", "yes"), ("NO.", "no")],
        *[("Nope", None), ("no-one is", None), ("nothing", None), ("yesterday", None)],
        *[("yes/no", None), ("", None), ("It is not", None), ("\u201cYes\u201d", "yes")],
    ],
)
def test_the_recommended_parser_reads_the_first_word(text, expected):
    assert leading(text) == expected


@pytest.mark.parametrize(("text", "expected"), [("y", "yes"), ("N", "no"), ("x", None)])
def test_the_mme_rule_takes_one_letter(text, expected):
    assert parser_of("mme").parse(text, "yes") == expected


def test_label_free_parsers_do_not_look_at_the_label():
    for case in cases():
        for name in set(PARSERS) - {"vcd"}:
            labels = {PARSERS[name].parse(case["text"], label) for label in ("yes", "no")}
            assert len(labels) == 1, (name, case["text"])


def test_an_unknown_parser_is_refused():
    with pytest.raises(UnknownNameError, match="did you mean 'leading'"):
        parser_of("leadin")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *[("Left", "left"), ("It is on the left of it.", "left"), ("positioned there", None)],
        *[("in front of the cup", "in front"), ("left or right", None), ("", None)],
    ],
)
def test_a_choice_is_one_option_in_whole_words(text, expected):
    assert choice(text, ["left", "right", "on", "in front"]) == expected


def test_a_longer_option_hides_the_shorter_one_inside_it():
    assert choice("On top of it", ["on", "on top of"]) == "on top of"
    with pytest.raises(OptionError, match="different words"):
        choice("on", ["on", "On"])


# Scores


def random_answers(seed=0, count=300):
    random = np.random.default_rng(seed)
    targets = random.choice(["yes", "no"], count)
    outputs = random.choice(["Yes", "No, none", "maybe"], count, p=[0.5, 0.4, 0.1])
    return list(outputs), list(targets), [f"{number}" for number in random.integers(60, size=count)]


def test_scores_agree_with_scikit_learn():
    outputs, targets, images = random_answers()
    score = score_answers(outputs, targets, images)
    answered_yes = [leading(output) == "yes" for output in outputs]
    truth = [target == "yes" for target in targets]
    precision, recall, f1, _ = precision_recall_fscore_support(
        truth, answered_yes, average="binary"
    )
    assert (score.precision, score.recall, score.f1) == pytest.approx((precision, recall, f1))
    right = [leading(o) == t for o, t in zip(outputs, targets, strict=True)]
    assert score.accuracy == pytest.approx(np.mean(right))
    assert score.yes_ratio == pytest.approx(np.mean(answered_yes))
    assert score.unparsed == pytest.approx(np.mean([o == "maybe" for o in outputs]))


def test_unparsed_answers_are_wrong_and_stay_in_the_recall():
    score = score_answers(["Yes", "what?", "No"], ["yes", "yes", "no"], ["a", "a", "b"])
    assert (score.accuracy, score.recall, score.unparsed) == pytest.approx((2 / 3, 1 / 2, 1 / 3))


def test_only_lmms_leaves_them_out_of_the_recall():
    outputs, targets = ["Yes", "Yes.", "no"], ["yes", "yes", "no"]
    score = score_answers(outputs, targets, list("abc"), parser="lmms")
    assert (score.accuracy, score.recall) == pytest.approx((2 / 3, 1))


def test_parsers_give_one_model_five_scores():
    outputs, targets = ["", "NO", "I know", "Yes."] * 5, ["no", "no", "no", "yes"] * 5
    images = list("abcd") * 5
    found = {name: score_answers(outputs, targets, images, parser=name) for name in PARSERS}
    assert {name: score.accuracy for name, score in found.items()} == {
        **{"leading": 0.5, "original": 0.25, "vcd": 0.75, "lmms": 0.25},
        **{"vlmevalkit": 0.5, "mme": 0.5},
    }


def test_always_no_has_no_precision_and_counts_as_0():
    score = score_answers(["No", "No"], ["yes", "no"], ["a", "b"])
    assert (score.precision, score.recall, score.f1, score.yes_ratio) == (0, 0, 0, 0)


def test_intervals_draw_images_and_not_questions():
    right = np.repeat(np.random.default_rng(1).random(40) < 0.7, 25)
    outputs = np.where(right, "Yes", "No").tolist()
    clustered = score_answers(outputs, ["yes"] * 1000, np.repeat(np.arange(40), 25).astype(str))
    single = score_answers(outputs, ["yes"] * 1000, np.arange(1000).astype(str))
    widths = [s.intervals["accuracy"][1] - s.intervals["accuracy"][0] for s in (clustered, single)]
    assert widths[0] == pytest.approx(5 * widths[1], rel=0.15)  # sqrt(25) times as wide


def test_bad_pairs_are_refused():
    with pytest.raises(OptionError, match="2 answers for 1 questions"):
        count_answers(["yes", "no"], ["yes"])
    with pytest.raises(OptionError, match="expected pairs"):
        count_answers([], [])


def test_metrics_obey_the_identities_of_a_balanced_set():
    counts = np.array([1200, 140, 1360, 300, 0, 0])
    found = {name: float(value) for name, value in rates(counts).items()}
    precision, recall = found["precision"], found["recall"]
    assert found["accuracy"] == pytest.approx(0.5 + 0.5 * recall * (2 - 1 / precision))
    assert found["yes_ratio"] == pytest.approx(recall / (2 * precision))


# Paired flips


@pytest.mark.parametrize(
    ("gained", "lost"), [(0, 0), (1, 0), (5, 5), (3, 14), (40, 22), (700, 650)]
)
def test_mcnemar_is_the_exact_binomial_test(gained, lost):
    flipped = gained + lost
    expected = binomtest(gained, flipped).pvalue if flipped else 1.0
    assert mcnemar(gained, lost) == pytest.approx(expected)


def test_flips_are_split_by_the_right_answer():
    before = np.array([True, False, False, True, True, False])
    after = np.array([True, True, True, False, True, False])
    found = flips(before, after, ["yes", "yes", "no", "no", "no", "no"])
    assert (found.gained, found.lost) == ({"yes": 1, "no": 1}, {"yes": 0, "no": 1})
    assert found.p == mcnemar(2, 1)


def test_tables_of_the_same_groups_share_their_draws():
    table = np.arange(12).reshape(6, 2)
    groups = list("aabbcc")
    both = bootstrap_sums(np.concatenate([table, table + 1], 1), groups, 50, seed=3)
    np.testing.assert_array_equal(both[:, :2], bootstrap_sums(table, groups, 50, seed=3))
    assert (draw_units(3, 50, 3).sum(1) == 3).all()


# Margins


@pytest.mark.parametrize("decimals", [0, 1, 8])  # with many ties, some, none
def test_ranking_scores_agree_with_scikit_learn(decimals):
    random = np.random.default_rng(decimals)
    positive = random.random(200) < 0.4
    margins = np.round(random.normal(size=200) + positive, decimals)
    assert float(auroc(margins, positive)) == pytest.approx(roc_auc_score(positive, margins))
    expected = average_precision_score(positive, margins)
    assert float(average_precision(margins, positive)) == pytest.approx(expected)
    accuracy, threshold = best_threshold(margins, positive)
    tried = [np.mean((margins > t) == positive) for t in [-np.inf, *margins]]
    assert accuracy == pytest.approx(max(tried)) == np.mean((margins > threshold) == positive)


def test_weights_are_repeated_items():
    random = np.random.default_rng(5)
    positive, margins = random.random(30) < 0.5, np.round(random.normal(size=30), 1)
    weights = random.integers(0, 4, size=(1, 30))
    index = np.repeat(np.arange(30), weights[0])
    expected = roc_auc_score(positive[index], margins[index])
    assert auroc(margins, positive, weights)[0] == pytest.approx(expected)


def test_a_constant_changes_accuracy_and_not_the_ranking():
    random = np.random.default_rng(2)
    positive = np.arange(400) % 2 == 0
    margins = random.normal(size=400) + np.where(positive, 0.3, -1.7)
    moved = margins + 0.7
    accuracies = [np.mean((m > 0) == positive) for m in (margins, moved)]
    assert accuracies[1] > accuracies[0] + 0.05
    assert float(auroc(moved, positive)) == float(auroc(margins, positive))
    images = (np.arange(400) // 8).astype(str)
    np.testing.assert_array_equal(
        auroc_draws(moved, positive, images, 50), auroc_draws(margins, positive, images, 50)
    )


def test_one_answer_is_best_where_the_margin_ranks_backwards():
    accuracy, threshold = best_threshold(np.array([3.0, 2, 1, 0]), np.array([0, 0, 0, 1]) > 0)
    assert (accuracy, threshold) == (0.75, math.inf)


@pytest.mark.parametrize("wanted", [0, 0.1, 0.25, 0.5, 0.9, 1])
def test_the_shift_reaches_the_wanted_share_of_yes(wanted):
    margins = np.random.default_rng(0).normal(size=200) - 1
    assert np.mean(margins + fit_shift(margins, wanted) > 0) == pytest.approx(wanted)


def test_nothing_moves_where_nothing_has_to():
    margins = np.array([-2.0, -1, 3, 4])
    assert fit_shift(margins, 0.5) == 0.0


def test_ties_move_together():
    margins = np.array([-1.0] * 10 + [2.0])
    assert np.mean(margins + fit_shift(margins, 0.3) > 0) == pytest.approx(1 / 11)


def test_a_shift_is_fitted_on_other_images():
    """One image alone is answered yes; fitted on itself, its own shift would say so."""
    random = np.random.default_rng(0)
    margins = random.normal(size=100)
    images = np.repeat(np.arange(10), 10).astype(str)
    yes_share = np.zeros(100)
    yes_share[:10] = 1
    shifts = cross_fitted_shifts(margins, yes_share, images, folds=10)
    assert (margins[:10] + shifts[:10] <= 0).all()  # nothing else was ever answered yes
    assert len(set(shifts[:10])) == 1
    yes_share[:10], margins[:10] = 0, 9  # what its own questions say does not enter
    assert (cross_fitted_shifts(margins, yes_share, images, folds=10)[:10] == shifts[:10]).all()
    with pytest.raises(OptionError, match="other images"):
        cross_fitted_shifts(margins, yes_share, ["a"] * 100)


def test_counts_have_one_column_for_each_answer():
    table = count_answers(["yes", "yes", "no", "no", None, None], ["yes", "no"] * 3)
    assert table.argmax(1).tolist() == [0, 1, 3, 2, 4, 5]


def test_the_original_parser_takes_commas_away():
    assert original("no, a cat") == "no" and original("a cat") == "yes"


def test_p_values_of_draws():
    assert bootstrap_p(np.ones(99)) == bootstrap_p(-np.ones(99)) == 2 / 100
    assert bootstrap_p(np.zeros(99)) == 1
    assert bootstrap_p(np.array([-1.0] * 30 + [1.0] * 69)) == 2 * 31 / 100
    assert bootstrap_p(np.array([0.0] * 30 + [1.0] * 69)) == 2 * 31 / 100


def test_intervals_hold_95_percent_of_the_draws():
    assert interval(np.arange(1001.0)) == pytest.approx((25, 975))


def test_draws_depend_on_their_seed_alone():
    first = draw_units(7, 50, 3).copy()
    draw_units.cache_clear()
    assert (draw_units(7, 50, 3) == first).all() and (draw_units(7, 50, 4) != first).any()
    groups = ["b", "a", "b", "c"]
    table = np.arange(4.0)[:, None]
    weights = item_weights(groups, 50, 3)
    assert (weights @ table == bootstrap_sums(table, groups, 50, 3)).all()
    assert (weights[:, 0] == weights[:, 2]).all()


def test_yes_to_everything_may_be_best():
    accuracy, threshold = best_threshold(np.array([3.0, 2, 1, 0]), np.array([0, 1, 1, 1]) > 0)
    assert (accuracy, threshold) == (3 / 4, -np.inf)


def test_a_mode_does_not_differ_from_itself():
    random = np.random.default_rng(0)
    verdicts = [("yes", "no", None)[n] for n in random.integers(3, size=60)]
    items = [
        YesNoItem(
            id=str(n),
            image=str(n // 3),
            question="?",
            target=("yes", "no")[n % 2],
            mode=mode,
            output=verdict or "",
        )
        for mode in ("plain", "same")
        for n, verdict in enumerate(verdicts)
    ]
    report = YesNoReport(items, resamples=100, baseline_controls=False)
    [found] = report.compare("same")
    assert {"accuracy", "f1"} <= found.differences.keys()
    for one in found.differences.values():
        assert (one.value, one.low, one.high, one.p) == (0, 0, 0, 1)
