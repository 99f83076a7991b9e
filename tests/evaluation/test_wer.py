import json
from pathlib import Path

import pytest

from mmdecode.errors import OptionError
from mmdecode.evaluation.wer import wer, whisper_english

DATA = Path(__file__).parents[1] / "data" / "asr_text"
SHARED = Path(__file__).parents[3] / "shared" / "data"


def rows(name):
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def test_normaliser_gives_what_the_reference_gives():
    wrong = []
    normalise = whisper_english()
    for row in rows("normalizer_cases.jsonl"):
        if row["normalizer"] in ("number", "number+text", "text", "english"):
            found = normalise(row["input"])
            if found != row["expected"]:
                wrong.append((row["input"], row["expected"], found))
    assert wrong == []


def test_rates_are_those_of_other_scorers():
    checked = 0
    for row in rows("wer_cases.jsonl"):
        if row.get("wer") is None or not any(r.split() for r in row["ref"]):
            continue
        result = wer(row["ref"], row["hyp"], normaliser="none", resamples=1)
        assert result.value == pytest.approx(row["wer"]), row
        checked += 1
    assert checked >= 8


@pytest.mark.skipif(not SHARED.exists(), reason="reads N-best lists that are not part of a clone")
def test_corpus_rate_of_real_lists_equals_the_published_count():
    import gzip

    expected = json.loads((SHARED / "expected.json").read_text())["nbest_wer"]["sets"]["ls_clean"]
    file = SHARED / "nbest" / "hyporadise_test_ls_clean.jsonl.gz"
    with gzip.open(file, "rt") as lines:
        items = [json.loads(line) for line in lines]
    result = wer([i["output"] for i in items], [i["input"][0] for i in items], resamples=1)
    errors = result.substitutions + result.deletions + result.insertions
    assert (result.words, errors) == (
        expected["whisper"]["ref_words"],
        expected["whisper"]["err_1best"],
    )


def test_rate_is_by_corpus_and_not_the_mean_of_ratios():
    result = wer(["a", "a b c d e f g h i"], ["b", "a b c d e f g h i"], normaliser="none")
    assert result.value == pytest.approx(0.1)
    assert result.low <= result.value <= result.high


def test_words_heard_in_silence_count_as_insertions():
    result = wer(["", "one two"], ["ghost words", "one two"], normaliser="none", resamples=1)
    assert (result.insertions, result.words) == (2, 2)


@pytest.mark.parametrize(("said", "heard"), [(["a"], []), ([""], ["a"])])
def test_unscorable_input_is_refused(said, heard):
    with pytest.raises(OptionError):
        wer(said, heard, normaliser="none")
