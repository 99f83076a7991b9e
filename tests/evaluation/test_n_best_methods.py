"""What methods make of lists, and what is fixed on the development part."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmdecode.asr.correction.n_best_lists import NBestList, hash_fraction
from mmdecode.errors import InputError, OptionError, UnknownNameError
from mmdecode.evaluation.nbest import substitutions
from mmdecode.evaluation.nbest.methods import (
    WEIGHTS,
    Edit,
    Method,
    ModelRow,
    Parts,
    copy_threshold,
    corrected,
    outputs,
    parts_of,
    read_model_rows,
)
from mmdecode.evaluation.nbest.n_best import Aligner
from mmdecode.evaluation.nbest.substitutions import Rule, Substitutions, fitted, learned

NONE = Aligner("none")


def lists_from(pairs):
    """From pairs of hypotheses and references."""
    return [
        NBestList(
            f"u{n}", (texts,) if isinstance(texts, str) else tuple(texts), reference=reference
        )
        for n, (texts, reference) in enumerate(pairs)
    ]


# Parts


def test_parts_are_cut_by_ids_and_the_test_does_not_hang_on_who_trains():
    lists = lists_from([("a", "a")] * 500)
    first, second = parts_of(lists, 0.0, 0.5), parts_of(lists, 0.4, 0.1)
    assert first.test == second.test == [one for one in lists if hash_fraction(one.id) >= 0.5]
    assert first.training == [] and first.development == [
        o for o in lists if hash_fraction(o.id) < 0.5
    ]
    assert second.training == [one for one in lists if hash_fraction(one.id) < 0.4]
    assert len(second.before) == len(first.before)
    assert parts_of(lists, 0.0, 0.0).test == lists


@pytest.mark.parametrize("shares", [(0.5, 0.5), (-0.1, 0.5), (0.0, 1.0)])
def test_shares_without_a_test_are_refused(shares):
    with pytest.raises(OptionError, match="a sum below 1"):
        parts_of(lists_from([("a", "a")] * 9), *shares)
    with pytest.raises(OptionError, match="none of 0 lists"):
        parts_of([], 0.0, 0.5)


# Methods


def test_names_of_methods():
    assert Method.of("lm+scores:zoo:lm-synth") == Method("lm+scores", "zoo:lm-synth")
    assert Method.of("lm-total:m").source == Method.of("lm:m").source == "lm:m"
    assert Method.of("corrector:a/b").source == "corrector:a/b" and Method.of("mbr").source is None
    assert Method.of("lm:m").name == "lm:m"
    with pytest.raises(UnknownNameError, match="did you mean 'mbr'"):
        Method.of("mrb")
    for text in ("lm", "lm:", "mbr:m", "corrector"):
        with pytest.raises(OptionError, match="expected"):
            Method.of(text)


def rows_of(lists, means):
    return {
        one.id: ModelRow(data="d", source="lm:m", id=one.id, totals=[2 * m for m in row],
                         tokens=[2] * len(row))
        for one, row in zip(lists, means, strict=True)
    }  # fmt: skip


def test_copying_is_the_first_hypothesis():
    parts = parts_of(lists_from([(["a", "b"], "b")] * 20), 0.0, 0.5)
    assert outputs(Method("1best"), parts, NONE, {}).texts == ["a"] * len(parts.test)


def test_language_models_rank_by_mean_and_by_total():
    lists = lists_from([(["a", "b b"], "b b")])
    row = ModelRow(data="d", source="lm:m", id="u0", totals=[-4.0, -6.0], tokens=[2, 4])
    parts = Parts([], [], lists)
    assert outputs(Method.of("lm:m"), parts, NONE, {"u0": row}).texts == ["b b"]
    assert outputs(Method.of("lm-total:m"), parts, NONE, {"u0": row}).texts == ["a"]


def test_the_weight_of_a_language_model_is_the_one_with_the_fewest_errors():
    scored = [
        NBestList(f"u{n}", ("bad", "good"), (-1.0, -1.2), "good" if n % 3 else "bad")
        for n in range(30)
    ]
    # one third is wrong from a weight on; which one follows from the scores
    means = [[-1.0, -0.5] if n % 3 else [-1.0, -0.9] for n in range(30)]
    parts = Parts([], scored[:15], scored[15:])
    found = outputs(Method.of("lm+scores:m"), parts, NONE, rows_of(scored, means))
    assert found.weight == 0.5 and found.weight in WEIGHTS
    assert found.texts == [one.reference for one in scored[15:]]
    with pytest.raises(OptionError, match="development"):
        outputs(Method.of("lm+scores:m"), Parts([], [], scored), NONE, {})
    bare = lists_from([(["a", "b"], "a")] * 4)
    with pytest.raises(InputError, match="no scores"):
        outputs(Method.of("lm+scores:m"), Parts([], bare, bare), NONE, rows_of(bare, [[0, 1]] * 4))


def test_a_threshold_keeps_what_gains_on_the_development_part_only():
    lists = lists_from([(["a", "b"], "b")] * 4 + [(["a", "b"], "a")] * 6)
    edits = [Edit("b", 0.9), Edit("b", 0.9), Edit("b", 0.5), Edit("b", 0.1)]
    edits += [Edit("b", 0.5)] + [Edit("b", 0.05)] * 5
    # 0.9: 2 saved; 0.5: one saved and one made; 0.1: 3; 0.05: 5 made
    assert copy_threshold(lists, edits, NONE) == 0.1
    assert copy_threshold(lists[:3] + lists[4:5], edits[:3] + edits[4:5], NONE) == 0.9
    assert copy_threshold(lists[4:], edits[4:], NONE) == math.inf
    assert copy_threshold([], [], NONE) == math.inf


GAINS = st.tuples(st.sampled_from([0.1, 0.2, 0.3, 0.4]), st.booleans())


@settings(max_examples=100, deadline=None)
@given(st.lists(GAINS, max_size=8))
def test_no_threshold_saves_more_and_none_is_higher(gains):
    lists = lists_from([(["a", "b"], "b" if good else "a") for _, good in gains])
    edits = [Edit("b", gain) for gain, _ in gains]

    def saved(threshold):
        return sum(2 * good - 1 for gain, good in gains if gain >= threshold)

    found = copy_threshold(lists, edits, NONE)
    best = max(saved(t) for t in (0.1, 0.2, 0.3, 0.4, math.inf))
    assert saved(found) == best
    assert all(saved(t) < best for t in (0.1, 0.2, 0.3, 0.4, math.inf) if t > found)


def test_what_is_held_back_is_copied():
    development = lists_from([(["a b", "a c", "a c"], "a c")] * 3 + [(["a", "b", "c"], "a")])
    test = lists_from([(["x y", "x z", "x z"], "x z"), (["x", "y x", "y x", "x"], "x")])
    found = outputs(Method("mbr"), Parts([], development, test), NONE, {})
    assert found.texts == ["x z", "x"] and found.thresholded == ["x z", "x"]
    assert found.threshold == pytest.approx(1 / 3)
    worse = lists_from([(["a b", "a c", "a c"], "a b")] * 3)
    found = outputs(Method("mbr"), Parts([], worse, test), NONE, {})
    assert found.texts == ["x z", "x"] and found.thresholded == ["x y", "x"]
    assert found.fixed == {"threshold": "copy all"}
    assert outputs(Method("mbr"), Parts([], [], test), NONE, {}).thresholded is None


def test_weighted_votes_need_scores():
    with pytest.raises(InputError, match="no scores"):
        outputs(Method("mbr+scores"), Parts([], [], lists_from([("a", "a")])), NONE, {})


# Correctors


class Copier:
    """Hands hypothesis 1 on, as batches of a real one end: not in order."""

    def corrections(self, lists, watch=None):
        for one in reversed(lists):
            yield SimpleNamespace(
                id=one.id, text=one.best, refused=None, preference=0.0, error=None
            )


def test_a_corrector_that_copies_is_the_first_hypothesis():
    lists = lists_from([(["a b", "c"], "c")] * 40)
    parts = parts_of(lists, 0.0, 0.5)
    rows = {row.id: row for row in corrected(Copier(), lists, "d", "corrector:m")}
    found = outputs(Method.of("corrector:m"), parts, NONE, rows)
    assert found.texts == found.thresholded == [one.best for one in parts.test]
    assert found.fixed == {"threshold": "copy all", "refused": 0}


def test_corrections_are_held_by_the_share_of_words_they_change():
    lists = lists_from([("a b c d", "a b c e"), ("a b c d", "a b c d"), ("p q", "p r")])
    texts = ["a b c e", "a x y z", "p r"]
    rows = {
        one.id: ModelRow(data="d", source="corrector:m", id=one.id, text=text)
        for one, text in zip(lists, texts, strict=True)
    }
    rows["u2"] = ModelRow(data="d", source="corrector:m", id="u2", text="p r", refused="no")
    found = outputs(Method.of("corrector:m"), Parts([], lists, lists), NONE, rows)
    assert found.threshold == -0.5 and found.texts == texts
    assert found.thresholded == ["a b c e", "a b c d", "p r"] and found.refused == 1


def test_corrections_are_held_by_preference_where_it_is_known():
    lists = lists_from([("a b c d", "e f g h"), ("a b c d", "a b c d"), ("p q", "p r")])
    edits = [("e f g h", 3.0), ("a b c x", 1.0), ("p r", 2.0)]
    rows = {
        one.id: ModelRow(data="d", source="corrector:m", id=one.id, text=text, preference=gain)
        for one, (text, gain) in zip(lists, edits, strict=True)
    }
    found = outputs(Method.of("corrector:m"), Parts([], lists, lists), NONE, rows)
    assert found.threshold == 2.0
    assert found.thresholded == ["e f g h", "a b c d", "p r"]


def test_rows_of_a_run_come_back(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = ModelRow(data="d", source="lm:m", id="u", totals=[-4.0], tokens=[2])
    text = '{"data": "d", "source": "lm:m", "id": "u", "totals": [-4.0], "tokens": [2]}\n'
    path.write_text(text + text[:20])
    assert [*read_model_rows(path)] == [row] and row.means == [-2.0]
    for damaged in ("no\n", '{"id": "u"}\n', "[]\n"):
        path.write_text(text + damaged)
        with pytest.raises(InputError, match="line 2 is not a row of model outputs"):
            [*read_model_rows(path)]


# The table of spellings


def test_the_longest_match_is_replaced_and_each_word_once():
    rules = {("a",): ("b",), ("a", "b"): ("c",), ("b",): (), ("c",): ("a",)}
    table = Substitutions(
        [Rule(hypothesis, reference, 1, 1) for hypothesis, reference in rules.items()]
    )
    assert table("a b  a c b d") == "c b a d"
    assert Substitutions()(" x  y ") == "x y"


def spelt(count=12):
    """Two conventions, one of which needs its context, and words that are wrong once."""
    pairs = [("fly us air to x", "fly u s air to x"), ("by us air to y", "by u s air to y")]
    pairs += [("the colour is red", "the color is red"), ("red is nice", "red is nice")]
    pairs += [("come join us", "come join us"), ("come join us now", "come join us now")]
    return lists_from(pairs * count + [(f"n{k} here", f"m{k} here") for k in range(count)])


def test_a_table_learns_conventions_with_the_context_they_need():
    table = learned(spelt(), NONE, 2)
    replaced = {rule.hypothesis: rule.reference for rule in table.rules}
    assert table("book us air and join us in colour") == "book u s air and join us in color"
    assert ("us",) not in replaced and replaced[("colour",)] == ("color",)
    assert all(rule.errors_saved >= 2 and rule.seen >= 2 for rule in table.rules)
    assert table.at_least(1000).rules == []
    assert not any(
        hypothesis[0].startswith("n") and len(hypothesis) == 1 for hypothesis in replaced
    )


def test_a_rule_that_is_wrong_as_often_as_right_is_not_learned():
    pairs = [("two", "too")] * 5 + [("two", "two")] * 5
    assert learned(lists_from(pairs), NONE).rules == []


def test_rules_save_what_they_say():
    lists = spelt()
    table = learned(lists, NONE)
    before, after = (
        sum(NONE.errors(one.reference, text(one.best)) for one in lists) for text in (str, table)
    )
    assert before - after == sum(rule.errors_saved for rule in table.rules)


def test_the_threshold_of_a_rule_is_chosen_on_lists_it_was_not_learned_from():
    table, minimum = fitted(spelt(), NONE)
    assert minimum in substitutions.MINIMUMS and table("us air") == "u s air"


def test_rules_that_never_come_again_are_not_kept():
    # by fives, each fold has a word of its own
    lists = lists_from([(f"n{k % 5}", f"m{k % 5}") for k in range(30)])
    assert len(learned(lists, NONE).rules) == 5
    assert fitted(lists, NONE) == (Substitutions(), None)


def test_a_table_is_learned_in_the_normalisers_own_terms():
    pairs = [("the colour is red", "the color is red"), ("a b", "a c")] * 6
    replaced = {rule.hypothesis for rule in learned(lists_from(pairs), Aligner("whisper")).rules}
    assert not any("colour" in hypothesis for hypothesis in replaced) and ("b",) in replaced


def test_a_table_needs_lists_before_the_test():
    with pytest.raises(OptionError, match="development"):
        outputs(Method("table"), Parts([], [], spelt()), NONE, {})
    found = outputs(Method("table"), Parts(spelt(), [], spelt()), NONE, {})
    assert found.thresholded is None and found.fixed["rules"] == len(found.rules) > 0
