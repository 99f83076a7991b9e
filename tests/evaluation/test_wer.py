import functools
import gzip
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmdecode.asr.output.manifest import read_manifest
from mmdecode.errors import InputError, MMDecodeError, OptionError, UnknownNameError
from mmdecode.evaluation.nbest.n_best import SHIPPED
from mmdecode.evaluation.speech import normalisers
from mmdecode.evaluation.speech import wer as scoring
from mmdecode.evaluation.speech.normalisers import is_scored, join_acronyms, normaliser_of
from mmdecode.evaluation.speech.wer import align, count_errors, readings, summed, wer
from tests.support.files import json_lines

DATA = Path(__file__).parents[1] / "data"
SHARED = Path(__file__).parents[3] / "shared" / "data"
EXPECTED = json.loads((DATA / "nbest" / "expected.json").read_text())
CONVENTIONS = {
    "raw": ("none", "plain"),
    "whisper": ("whisper", "plain"),
    "oalb": ("leaderboard", "plain"),
    "oalb_merge": ("leaderboard", "merge"),
}


def rows(name):
    return json_lines(DATA / "asr_text" / name)


# Normalisers


def mismatches(name, column):
    normalise = normaliser_of(name)
    found = [(row["input"], row[column]) for row in rows("normalizer_cases.jsonl") if column in row]
    assert len(found) >= 78
    return [text for text, expected in found if normalise(text).strip() != expected.strip()]


def test_whisper_normaliser_gives_what_the_reference_gives():
    assert mismatches("whisper", "expected") == []


def test_leaderboard_normaliser_gives_what_the_reference_gives():
    assert mismatches("leaderboard", "leaderboard_2026_08") == []


TABLES = json.loads((normalisers.DATA / "leaderboard_tables.json").read_text())


@pytest.mark.parametrize(
    ("table", "broken"),
    [
        ("fillers", ["hmm", "mm", "mhm", "mmm", "uh", "um"]),
        ("names", {}),
        ("compounds", []),
        ("spelling", {"ok": "okay"}),
        ("replacements", [[p, r] for p, r in TABLES["replacements"] if "it|he" not in p]),
    ],
)
def test_every_table_of_the_leaderboard_is_needed(table, broken, tmp_path, monkeypatch):
    for name in ("leaderboard_tables.json", "whisper_english_spelling.json"):
        (tmp_path / name).write_text((normalisers.DATA / name).read_text())
    (tmp_path / "leaderboard_tables.json").write_text(json.dumps({**TABLES, table: broken}))
    mutant = functools.partial(normalisers.leaderboard, tmp_path)
    monkeypatch.setitem(normalisers.NORMALISERS, "leaderboard", mutant)
    assert mismatches("leaderboard", "leaderboard_2026_08") != []


def test_joining_acronyms_is_needed(monkeypatch):
    monkeypatch.setattr(normalisers, "join_acronyms", lambda words: words)
    assert mismatches("leaderboard", "leaderboard_2026_08") != []


@pytest.mark.parametrize(
    ("words", "joined"),
    [
        ("b b c news", "bbc news"),
        ("on 5 g now", "on 5g now"),
        ("a b test", "a b test"),
        ("a b c test", "abc test"),
        ("i a m", "iam"),
        ("plan b", "plan b"),
        ("$ 5 x", "$ 5x"),
    ],
)
def test_acronyms(words, joined):
    assert " ".join(join_acronyms(words.split())) == joined


def test_diacritics_of_transformers_are_those_of_the_leaderboard():
    from transformers.models.whisper import english_normalizer

    assert TABLES["diacritics"] == english_normalizer.ADDITIONAL_DIACRITICS


def test_basic_normaliser_keeps_characters_of_any_language():
    assert normaliser_of("basic")("Ça va? [noise] (rires) STRASSE, größer!").split() == [
        "ça",
        "va",
        "strasse",
        "größer",
    ]


def test_names_with_a_typo_get_a_suggestion():
    with pytest.raises(UnknownNameError, match="did you mean 'leaderboard'"):
        normaliser_of("leaderbord")
    with pytest.raises(UnknownNameError, match="did you mean 'merge'"):
        align("a", "a", "none", "merg")


def test_references_that_the_leaderboard_leaves_out():
    assert not is_scored("uh, hmm (laughs)")
    assert not is_scored("Ignore time segment in scoring")
    assert is_scored("uh no")
    assert is_scored("hmm", normaliser_of("none"))


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30), st.sampled_from(["basic", "whisper", "leaderboard"]))
def test_no_text_breaks_a_normaliser(text, name):
    assert isinstance(normaliser_of(name)(text), str)


# Rates


def test_rates_are_those_of_other_scorers():
    for row in rows("wer_cases.jsonl"):
        plain = wer(row["ref"], row["hyp"], normaliser="none", resamples=2)
        merged = wer(row["ref"], row["hyp"], normaliser="none", scorer="merge", resamples=2)
        found = {
            "wer": plain.value,
            "mer": plain.mer,
            "wil": plain.wil,
            "cer": plain.cer,
            "insertions": plain.insertions,
            "deletions": plain.deletions,
            "substitutions": plain.substitutions,
            "total": plain.errors,
            "total_merge_compounds": merged.errors,
            "ref_words": merged.words,
        }
        wanted = {name: row[name] for name in found if name in row}
        assert len(wanted) >= 1
        assert {name: found[name] for name in wanted} == pytest.approx(wanted), row


def test_rate_is_by_corpus_and_not_the_mean_of_ratios():
    result = wer(["a", "a b c d e f g h i"], ["b", "a b c d e f g h i"], normaliser="none")
    assert result.value == pytest.approx(0.1)
    assert result.low <= result.value <= result.high


def test_words_recognised_in_silence_count_as_insertions():
    result = wer(["", "one two"], ["ghost words", "one two"], normaliser="none", resamples=1)
    assert (result.insertions, result.words) == (2, 2)


@pytest.mark.parametrize(("reference", "hypothesis"), [(["a"], []), ([], [])])
def test_unscorable_input_is_refused(reference, hypothesis):
    with pytest.raises(OptionError):
        wer(reference, hypothesis, normaliser="none")


@functools.lru_cache
def nbest():
    with gzip.open(SHIPPED["cv"], "rt") as lines:
        return read_lists(lines)


def read_lists(lines):
    items = [json.loads(line) for line in lines]
    return [i["output"] for i in items], list(zip(*(i["input"] for i in items), strict=True))


@functools.lru_cache
def counted(rank, normaliser="whisper", scorer="plain"):
    references, ranks = nbest()
    return count_errors(references, ranks[rank], normaliser=normaliser, scorer=scorer)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_counts_of_real_lists_are_those_of_the_reference_normalisers(convention):
    expected = EXPECTED["nbest_wer"]["sets"]["cv"][convention]
    table = counted(0, *CONVENTIONS[convention])
    assert (table[:, 0].sum(), table[:, 2:5].sum()) == (
        expected["ref_words"],
        expected["err_1best"],
    )


def oracle_errors(tables):
    return np.stack([table[:, 2:5].sum(1) for table in tables]).min(0).sum()


def test_best_of_five_is_the_published_oracle():
    expected = EXPECTED["nbest_wer"]["sets"]["cv"]["raw"]
    assert oracle_errors(counted(rank, "none") for rank in range(5)) == expected["err_oracle5"]


def test_interval_of_real_lists_is_the_published_one():
    score = summed(counted(0), "whisper", "plain")
    expected = EXPECTED["bootstrap_wer_95pct_whisper_norm"]["cv"]
    assert [100 * score.low, 100 * score.high] == pytest.approx(expected, abs=0.05)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="reads N-best lists that may not be shipped")
def test_counts_of_lists_that_are_not_shipped():
    name = "atis"
    with gzip.open(SHARED / "nbest" / f"hyporadise_test_{name}.jsonl.gz", "rt") as lines:
        references, ranks = read_lists(lines)
    for convention, (normaliser, scorer) in CONVENTIONS.items():
        expected = EXPECTED["nbest_wer"]["sets"][name][convention]
        tables = [
            count_errors(references, hypothesis, normaliser=normaliser, scorer=scorer)
            for hypothesis in ranks[: 5 if "err_oracle5" in expected else 1]
        ]
        assert tables[0][:, 0].sum() == expected["ref_words"]
        assert tables[0][:, 2:5].sum() == expected["err_1best"]
        if "err_oracle5" in expected:
            assert oracle_errors(tables) == expected["err_oracle5"]


# Alignment


def sctk():
    references = read_manifest(DATA / "sctk" / "csrnab.ref", audio=False)
    hypotheses = {
        e.id.lower(): e.text for e in read_manifest(DATA / "sctk" / "csrnab.hyp", audio=False)
    }
    return [e.text for e in references], [hypotheses[e.id.lower()] for e in references]


def sclite_counts(reference, hypothesis):
    score = wer(reference, hypothesis, normaliser="none", scorer="sclite", resamples=1)
    hits = score.words - score.substitutions - score.deletions
    return score.words, hits, score.substitutions, score.deletions, score.insertions


def test_counts_are_those_of_sclite():
    assert sclite_counts(*sctk()) == (1406, 1263, 131, 12, 26)


def test_unit_costs_have_as_many_errors_but_other_kinds():
    total = np.zeros(7, dtype=int)
    for reference, hypothesis in zip(*sctk(), strict=True):
        found = [
            count_errors([reading], [hypothesis.lower()], normaliser="none")[0]
            for reading in readings(reference.lower())
        ]
        total += min(found, key=lambda row: row[2:5].sum())
    assert total[2:5].tolist() == [133, 11, 25]


@pytest.mark.parametrize(
    "mutant",
    [
        {"readings": lambda text: [text]},
        {"readings": lambda text: readings(text)[:1]},
        {"_sclite_cost": lambda steps: -sum(step.kind != "equal" for step in steps)},
    ],
)
def test_sclite_mutants_fail(mutant, monkeypatch):
    for name, broken in mutant.items():
        monkeypatch.setattr(scoring, name, broken)
    assert sclite_counts(*sctk()) != (1406, 1263, 131, 12, 26)


def test_readings_of_alternatives():
    assert readings("for { @ / an } investor { x / y }") == [
        "for investor x",
        "for investor y",
        "for an investor x",
        "for an investor y",
    ]
    with pytest.raises(InputError, match="alternatives of a reference"):
        readings("{ a / b } " * 20)


WORDS = st.lists(st.sampled_from(["a", "b", "ab", "ba", "aab"]), max_size=5).map(" ".join)


def cheapest(reference, hypothesis, merge):
    """Errors by trying everything."""

    @functools.lru_cache
    def rest(i, j):
        if i == len(reference) and j == len(hypothesis):
            return 0
        found = []
        if i < len(reference):
            found.append(1 + rest(i + 1, j))
        if j < len(hypothesis):
            found.append(1 + rest(i, j + 1))
        if i < len(reference) and j < len(hypothesis):
            found.append((reference[i] != hypothesis[j]) + rest(i + 1, j + 1))
            if merge:
                for k in range(2, len(reference) - i + 1):
                    if "".join(reference[i : i + k]) == hypothesis[j]:
                        found.append(rest(i + k, j + 1))
                for k in range(2, len(hypothesis) - j + 1):
                    if "".join(hypothesis[j : j + k]) == reference[i]:
                        found.append(rest(i + 1, j + k))
        return min(found)

    return rest(0, 0)


@settings(max_examples=300, deadline=None)
@given(WORDS, WORDS)
def test_errors_are_the_fewest_possible(reference, hypothesis):
    for scorer in ("plain", "merge"):
        steps = align(reference, hypothesis, "none", scorer)
        errors = sum(step.kind != "equal" for step in steps)
        assert errors == cheapest(
            tuple(reference.split()), tuple(hypothesis.split()), scorer == "merge"
        )
        assert " ".join(step.reference for step in steps if step.reference) == reference
        assert " ".join(step.hypothesis for step in steps if step.hypothesis) == hypothesis


@settings(max_examples=200, deadline=None)
@given(WORDS, WORDS)
def test_bounds(reference, hypothesis):
    plain, merged, sclite = (
        count_errors([reference], [hypothesis], normaliser="none", scorer=scorer)[0]
        for scorer in ("plain", "merge", "sclite")
    )
    for row in (plain, merged, sclite):
        words, hypothesis_words, substitutions, deletions, insertions, _, _ = row
        assert substitutions + deletions <= words
        assert substitutions + insertions <= hypothesis_words
        assert row[:2].tolist() == [len(reference.split()), len(hypothesis.split())]
    assert merged[2:5].sum() <= plain[2:5].sum() <= max(plain[:2])
    assert plain[2:5].sum() <= sclite[2:5].sum()


@settings(max_examples=100, deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=3), st.sampled_from(["plain", "merge", "sclite"]))
def test_a_text_has_no_errors_against_itself(texts, scorer):
    score = wer(texts, texts, normaliser="none", scorer=scorer, resamples=2)
    assert score.value == score.cer == score.mer == score.wil == score.low == score.high == 0


def test_errors_of_a_text_are_refused_with_our_errors_only():
    for reference, hypothesis in itertools.product(["", " ", "a"], ["", "a b"]):
        for scorer in scoring.SCORERS:
            try:
                wer([reference], [hypothesis], scorer=scorer, resamples=1)
            except MMDecodeError:
                pytest.fail(f"{reference!r} {hypothesis!r} {scorer}")
