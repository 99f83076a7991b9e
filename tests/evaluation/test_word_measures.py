"""Characters of scripts without spaces, hallucinations, marks and case; in report and command."""

import pytest

from mmdecode.errors import OptionError
from mmdecode.evaluation.speech.samples import Sample
from mmdecode.evaluation.speech.scripts import is_spaceless, script, units
from mmdecode.evaluation.speech.wer import align, wer
from mmdecode.evaluation.speech.word_measures import (
    RUN,
    count_hallucinations,
    marked_words,
    score_punctuation,
)
from mmdecode.evaluation.speech.word_report import WERReport
from mmdecode.runs.tables import write_rows
from tests.support.commands import invoke, json_of

# Scripts


@pytest.mark.parametrize(
    ("character", "name"),
    [
        ("a", "LATIN"),
        ("\u00e9", "LATIN"),
        ("\uff21", "LATIN"),
        ("\u0436", "CYRILLIC"),
        ("\u4f1a", "CJK"),
        ("\u304b", "HIRAGANA"),
        ("\uff76", "KATAKANA"),
        ("\u0e01", "THAI"),
        ("\u0627", "ARABIC"),
        ("\u3002", ""),
        (" ", ""),
    ],
)
def test_a_character_has_a_script(character, name):
    assert script(character) == name


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("two words", ["two", "words"]),
        ("我用 laptop写", ["我", "用", "laptop", "写"]),
        ("กำลังที่", ["ก", "ำ", "ลั", "ง", "ที่"]),
        ("コーヒー", ["コ", "ー", "ヒ", "ー"]),
        ("안녕 하세요", ["안녕", "하세요"]),
    ],
)
def test_characters_of_scripts_without_spaces_are_units(text, found):
    assert units(text) == found
    assert "".join(units(text)) == text.replace(" ", "")


def test_references_without_spaces_are_scored_by_characters():
    score = wer(["我们今天开会"], ["我们 昨天开会"], normaliser="basic", resamples=20)
    assert (score.words, score.substitutions, score.errors) == (6, 1, 1)
    assert score.value == score.cer == 1 / 6
    mixed = wer(["我用 laptop"], ["我 用 laptops"], normaliser="none", resamples=20)
    assert (mixed.words, mixed.errors) == (3, 1)


def test_other_references_are_scored_by_words_whatever_was_recognised():
    assert not is_spaceless("日".replace("日", "day"))
    score = wer(["good day"], ["日本"], normaliser="none", resamples=20)
    assert (score.words, score.hypothesis_words) == (2, 1)


# Hallucinations


def counted(*pairs):
    return count_hallucinations(
        [align(reference, hypothesis, "none") for reference, hypothesis in pairs]
    )


def test_words_of_empty_references_are_hallucinated():
    found = counted(("", "thank you"), ("", ""), ("one", "one two"))
    assert (found["empty"], found["empty_heard"], found["empty_words"]) == (2, 1, 2)
    assert (found["rate"], found["runs"]) == (0.5, 0)
    assert counted(("one", "one"))["rate"] is None


def test_insertions_in_a_row_are_a_run_and_others_are_not():
    inserted = [f"w{n}" for n in range(RUN)]
    found = counted(
        ("a b", " ".join(["a", *inserted, "b"])),
        ("a b", " ".join(["a", *inserted[1:], "b"])),
        ("a b", " ".join([*inserted[:3], "a", *inserted[3:], "b"])),
    )
    assert (found["runs"], found["run_words"], found["run_rate"]) == (1, RUN, 1 / 3)


def test_a_text_that_ends_in_repetition_counts_unless_the_reference_does():
    loop = " ".join(["so", "I", "said"] * 5)
    found = counted(("yes", f"yes {loop}"), (loop, loop), ("yes", "yes"))
    assert (found["loops"], found["loop_rate"]) == (1, 1 / 3)


# Marks and case


def agreement(score, mark):
    found = score["marks"][mark]
    return found["right"], found["missed"], found["false"]


def test_marks_are_compared_after_aligned_words():
    score = score_punctuation(["Well, yes. Is it? It is!"], ["well yes. Is it. It is!"])
    assert agreement(score, ",") == (0, 1, 0)
    assert agreement(score, ".") == (1, 0, 1)
    assert agreement(score, "?") == (0, 1, 0)
    assert agreement(score, "!") == (1, 0, 0)
    overall = score["overall"]
    assert (overall["precision"], overall["recall"], overall["f1"]) == (2 / 3, 0.5, 4 / 7)


def test_a_wrong_word_is_a_position_and_a_missing_or_added_one_is_none():
    wrong = score_punctuation(["I saw Ann, today."], ["I saw Anna, today."])
    assert agreement(wrong, ",") == (1, 0, 0)
    missing = score_punctuation(["I saw Ann, today."], ["I saw today."])
    assert agreement(missing, ",") == (0, 0, 0)
    assert (missing["unplaced"], missing["places"]) == (1, 3)
    added = score_punctuation(["I saw today."], ["I saw Ann! today."])
    assert (added["unplaced_heard"], agreement(added, "!")) == (1, (0, 0, 0))


def test_case_is_compared_where_the_word_is_the_same():
    score = score_punctuation(["Ann met NASA in Rome"], ["ann met Nasa In Rim"])
    assert (score["same_words"], score["same_case"]) == (4, 1)
    assert [score["capitals"][name] for name in ("right", "missed", "false")] == [0, 2, 2]
    same = score_punctuation(["Ann met NASA"], ["Ann met NASA"])
    assert (same["case"], same["capitals"]["f1"]) == (1, 1)


def test_identical_texts_agree_and_texts_without_marks_have_no_rate():
    text = "Yes, it is 3.5 metres. Isn't it? Well-made!"
    assert score_punctuation([text], [text])["overall"]["f1"] == 1
    assert score_punctuation(["a b"], ["a b"])["overall"]["f1"] is None


def test_numbers_and_words_keep_the_signs_inside_them():
    found = [*marked_words("It's 3.5, or 1,000. A well-made one?")]
    assert found == [
        ("It's", ""), ("3.5", ","), ("or", ""), ("1,000", "."), ("A", ""), ("well-made", ""),
        ("one", "?"),
    ]  # fmt: skip


def test_ideographic_marks_are_marks():
    score = score_punctuation(["你好，世界。"], ["你好,世界!"])  # noqa: RUF001
    assert (agreement(score, ","), agreement(score, ".")) == ((1, 0, 0), (0, 1, 0))


# In the report and the command

ROWS = [
    ("a", "das <tag Meeting> ist heute.", "Das mieting ist heute."),
    ("b", "", "vielen dank fürs zuschauen bis bald"),
    ("c", "我们今天开会。", "我们昨天开会"),
]


def samples():
    return [
        Sample(id=i, mode="m", text=reference, pred_text=hypothesis)
        for i, reference, hypothesis in ROWS
    ]


def test_a_report_scores_what_it_is_asked_to():
    report = WERReport(
        samples(), normaliser="basic", resamples=20, hallucinations=True, punctuation=True
    )
    found = report.summary["modes"]["m"]
    assert found["pier"]["value"] == 1 and found["pier"]["points"] == "tags"
    assert (found["words"], report.by_characters) == (4 + 6, 1)
    assert found["made_up"]["rate"] == 1 and found["made_up"]["runs"] == 1
    assert found["punctuation"]["marks"]["."]["recall"] == 0.5
    table = report.table()
    for text in ("PIER %", "hallucinated %", "marks F1 %", "scored by characters", "capitals"):
        assert text in table
        assert text in report.page()
    assert "<tag" not in "".join(sample.text for sample in report.samples)


def test_keys_of_results_stay_where_fields_have_other_names():
    report = WERReport(samples(), resamples=20, hallucinations=True, punctuation=True)
    found = report.summary["modes"]["m"]
    assert found["heard_words"] == report.counts["m"][:, 1].sum()
    assert found["made_up"]["empty_heard"] == 1
    assert {"places", "unplaced", "unplaced_heard"} < set(found["punctuation"])
    sample = Sample(id="a", mode="m", text="x", pred_text="x", repetitive_windows=2)
    assert sample.as_dict()["looped"] == 2 and Sample.from_dict(sample.as_dict()) == sample


def test_a_report_shows_nothing_that_was_not_asked_for():
    report = WERReport(samples()[1:2], normaliser="none", resamples=20)
    assert not {"pier", "made_up", "punctuation"} & set(report.summary["modes"]["m"])
    assert "PIER" not in report.table()


def test_hyphens_cannot_be_split_for_nothing():
    with pytest.raises(OptionError, match="split_hyphens"):
        WERReport(samples()[1:2], split_hyphens=True)


def test_the_command_scores_them_from_files(tmp_path):
    write_rows(tmp_path / "r.jsonl", [{"id": i, "text": reference} for i, reference, _ in ROWS])
    write_rows(tmp_path / "h.jsonl", [{"id": i, "text": hypothesis} for i, _, hypothesis in ROWS])
    asked = ["--hallucinations", "--punctuation", "--normalizer", "basic", "--resamples", "20"]
    files = ["--data", str(tmp_path / "r.jsonl"), "--hypotheses", str(tmp_path / "h.jsonl")]
    result = invoke("evaluate", "wer", *files, *asked, "--json")
    assert result.exit_code == 0, result.output
    found = json_of(result)["modes"]["h.jsonl"]
    assert (found["pier"]["value"], found["made_up"]["rate"]) == (1, 1)
    assert found["punctuation"]["overall"]["missed"] == 1
    people = invoke("evaluate", "wer", *files, *asked)
    assert "capitals" in people.stdout and "points of interest" in people.stdout
    refused = invoke("evaluate", "wer", *files, "--points", "latn")
    assert refused.exit_code != 0
