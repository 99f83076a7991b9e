"""AMBER as published, with its own idea of what is positive, and HallusionBench."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from mmdecode.errors import InputError
from mmdecode.evaluation.vision.items import YesNoItem
from mmdecode.evaluation.vision.tasks.amber import amber_scores, read_amber
from mmdecode.evaluation.vision.tasks.hallusion import hallusion_scores, read_hallusion
from mmdecode.evaluation.vision.yes_no_report import YesNoReport

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def questions():
    return read_amber(DATA / "amber")


def answered_with(items, answer):
    return [item.answered(mode="plain", output=answer(item)) for item in items]


def test_all_questions_are_read(questions):
    assert len(questions) == 14_216 and questions[0].question == "Is the sky sunny in this image?"
    assert Counter(item.sets for item in questions) == {
        ("existence",): 4924,
        ("attribute", "state"): 4764,
        ("attribute", "number"): 2072,
        ("attribute", "action"): 792,
        ("relation",): 975 + 689,
    }
    assert Counter(item.target for item in questions) == {"no": 9427, "yes": 4789}


def test_no_is_the_positive_class(questions):
    always_no = amber_scores(answered_with(questions, lambda item: "No"))
    assert always_no["all"]["recall"] == 100
    assert always_no["all"]["precision"] == always_no["all"]["accuracy"] == 66.3
    assert amber_scores(answered_with(questions, lambda item: "Yes"))["all"] == {
        **{"accuracy": 33.7, "precision": 0, "recall": 0, "f1": 0}
    }


def test_existence_has_no_yes(questions):
    """All 4,924 are no, so that its F1 shows the 0.001 below the line."""
    perfect = amber_scores(answered_with(questions, lambda item: item.target.capitalize()))
    assert perfect["existence"] == {"accuracy": 100, "precision": 100, "recall": 100, "f1": 100.0}
    half = answered_with(questions, lambda item: "No" if int(item.id) % 2 else "Yes")
    found = amber_scores(half)["existence"]
    p, r = found["precision"] / 100, found["recall"] / 100
    assert found["f1"] == round(200 * p * r / (p + r + 0.001), 1)


def published(right_no, answered_no, no, right, count, start=0.001, below=0.0001):
    """The arithmetic of the tool, counter by counter."""
    accuracy = round(right / (count + start) * 100, 1)
    precision = round(right_no / (answered_no + start) * 100, 1)
    recall = round(right_no / (no + start) * 100, 1)
    f1 = round(
        2 * (precision / 100) * (recall / 100) / (precision / 100 + recall / 100 + below) * 100, 1
    )
    return {"accuracy": accuracy, "precision": precision, "recall": recall, "f1": f1}


def few(kinds):
    return [
        YesNoItem(id=str(n), image="a", question="?", target=target, sets=sets).answered(
            mode="plain", output=output
        )
        for n, (sets, target, output) in enumerate(kinds)
    ]


def test_counters_start_above_zero():
    """With one question the start shows: 1 / 1.001 is 99.9 %, and 1 / 1.003 is 99.7 %."""
    found = amber_scores(few([(("attribute", "state"), "no", "No")]))
    assert found["state"] == published(1, 1, 1, 1, 1) | {"f1": 99.9}
    assert found["attribute"] == published(1, 1, 1, 1, 1, start=0.003)
    assert found["attribute"]["accuracy"] == 99.7
    found = amber_scores(few([(("existence",), "no", "No")]))["existence"]
    assert found == published(1, 1, 1, 1, 1, below=0.001)


def test_only_the_exact_words_count():
    items = few([(("relation",), "no", "no"), (("relation",), "yes", "Yes.")])
    assert amber_scores(items)["relation"]["accuracy"] == 0
    report = YesNoReport(items, task="amber", resamples=10)
    assert report.summary["modes"]["plain"]["sets"]["relation"]["accuracy"] == 1
    assert "| plain | relation | 0.0 |" in report.table()
    assert "no is positive" in report.about()


def test_questions_without_annotation_are_refused(tmp_path):
    (tmp_path / "annotations.json").write_text('[{"id": 1, "type": "generative"}]')
    (tmp_path / "query_discriminative.json").write_text('[{"id": 1, "image": "a", "query": "?"}]')
    with pytest.raises(InputError, match="no annotation of a known type"):
        read_amber(tmp_path)
    (tmp_path / "annotations.json").write_text("{}")
    with pytest.raises(InputError, match="no list of objects"):
        read_amber(tmp_path)


# HallusionBench


def test_hallusion_questions():
    items = read_hallusion(DATA / "hallusionbench" / "HallusionBench.json.gz")
    assert len(items) == len({item.id for item in items}) == 1129
    assert Counter(item.target for item in items) == {"no": 645, "yes": 484}
    scores = hallusion_scores(items, [item.target == "no" for item in items])
    assert scores["aacc"] == pytest.approx(645 / 1129)
    assert scores["qacc"] < scores["aacc"]
    assert hallusion_scores(items, [True] * 1129) == {"aacc": 1, "facc": 1, "qacc": 1}


def test_figures_and_questions_are_different_groups(tmp_path):
    """Two questions on two figures, and the second question is wrong on the second figure."""
    rows = [
        {
            **{"category": "VS", "subcategory": "ocr", "set_id": "0", "filename": None},
            **{"figure_id": figure, "question_id": question, "question": "?", "gt_answer": "1"},
        }
        for figure in "01"
        for question in "01"
    ]
    rows += [row | {"category": "VD"} for row in rows]  # another part has an "ocr", too
    path = tmp_path / "h.json.gz"
    path.write_bytes(gzip.compress(json.dumps(rows).encode()))
    items = read_hallusion(path)
    found = hallusion_scores(items, [True, True, True, False] + [True] * 4)
    assert found == {"aacc": 7 / 8, "facc": 3 / 4, "qacc": 3 / 4}
    found = hallusion_scores(items, [True, False, True, False] + [True] * 4)
    assert found == {"aacc": 6 / 8, "facc": 2 / 4, "qacc": 3 / 4}
    rows[0]["gt_answer"] = "2"
    path.write_bytes(gzip.compress(json.dumps(rows).encode()))
    with pytest.raises(InputError, match="expected '0' or '1'"):
        read_hallusion(path)


def test_f1_is_made_of_rounded_percentages():
    kinds = [(("relation",), "no", "No")] * 2 + [(("relation",), "no", "Yes")] * 3
    kinds += [(("relation",), "yes", "No")] * 4
    assert amber_scores(few(kinds))["relation"]["f1"] == 36.3  # 36.4 of precise ones
