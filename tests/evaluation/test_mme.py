"""MME: scores of pairs, whatever their order."""

import random
from pathlib import Path

import pytest

from mmdecode.errors import InputError
from mmdecode.evaluation.vision.answers import PARSERS
from mmdecode.evaluation.vision.items import YesNoItem, read_table
from mmdecode.evaluation.vision.tasks.mme import mme_scores, read_mme
from mmdecode.evaluation.vision.yes_no_report import YesNoReport

SAMPLE = Path(__file__).parents[3] / "shared" / "data" / "mme" / "lavin_sample_results.jsonl.gz"


def right(items):
    return [PARSERS["mme"].parse(item.output, item.target) == item.target for item in items]


def pair(image, category="count", outputs=("Yes", "No")):
    return [
        YesNoItem(
            id=f"{category}/{image}/{target}",
            image=image,
            question="?",
            target=target,
            sets=(category,),
        ).answered(mode="plain", output=output)
        for target, output in zip(("yes", "no"), outputs, strict=True)
    ]


@pytest.mark.skipif(not SAMPLE.exists(), reason="the sample answers may not be shipped")
def test_published_scores_of_the_sample():
    outputs = [row["prediction"] for _, row in read_table(SAMPLE)]
    pairs = zip(read_mme(SAMPLE), outputs, strict=True)
    items = [item.answered(mode="lavin", output=output) for item, output in pairs]
    scores = mme_scores(items, right(items))
    assert scores["perception"] == pytest.approx(963.6114, abs=5e-5)
    assert scores["cognition"] == pytest.approx(249.6429, abs=5e-5)
    assert scores["existence"] == pytest.approx(185)
    assert scores["hallucination"] == pytest.approx(185 + 88.3333 + 63.3333 + 75, abs=1e-3)
    assert sum(PARSERS["mme"].parse(i.output, i.target) is None for i in items) == 12
    shuffled = random.Random(0).sample(items, len(items))
    assert mme_scores(shuffled, right(shuffled)) == pytest.approx(scores)
    report = YesNoReport(items, task="mme", parser="mme", resamples=50)
    assert report.summary["modes"]["lavin"]["task"]["perception"] == pytest.approx(963.6114)
    assert "963.61" in report.table()


def test_one_answer_of_thirty_images_moves_up_to_five_points():
    items = [item for n in range(30) for item in pair(str(n))]
    assert mme_scores(items, right(items)) == {"count": 200}
    items[0] = items[0].answered(mode="plain", output="No")
    assert mme_scores(items, right(items))["count"] == pytest.approx(195)


def test_sums_need_all_their_categories():
    items = [i for c in ("existence", "count", "position", "color") for i in pair("a", c)]
    assert set(mme_scores(items, right(items))) == {
        *("existence", "count", "position", "color", "hallucination"),
    }


def test_pairs_are_of_one_category_and_image():
    items = pair("a") + pair("a", "color") + pair("b", "color", ("No", "No"))
    assert mme_scores(items, right(items)) == {"count": 200, "color": 75 + 50}


@pytest.mark.parametrize("items", [pair("a")[:1], [*pair("a"), *pair("a")]])
def test_images_without_two_questions_are_refused(items):
    with pytest.raises(InputError, match="expected two for each image"):
        mme_scores(items, right(items))


def test_lines_of_question_and_answer(tmp_path):
    (tmp_path / "count").mkdir()
    file = tmp_path / "count" / "a.txt"
    file.write_text("One?\tYes\n\nTwo?\tNo\tno\n")
    items = read_mme(tmp_path)
    assert [(i.sets, i.question, i.target) for i in items] == [
        (("count",), "One?", "yes"),
        (("count",), "Two?", "no"),
    ]
    file.write_text("One?\tYes\nTwo? No\n")
    with pytest.raises(InputError, match=r"a.txt, line 2 has 1 column; expected a question"):
        read_mme(tmp_path)
    left_out = []
    with pytest.raises(InputError, match="no other row can be used"):
        read_mme(tmp_path, left_out)
    assert "line 2 has 1 column" in left_out[0] and "other question of the pair" in left_out[1]


def test_questions_in_folders(tmp_path):
    for folder, image in (("count", "count/1.png"), ("scene/questions", "scene/images/1.png")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "1.txt").write_text("One?\tYes\nTwo?\tNo\n")
        (tmp_path / image).parent.mkdir(exist_ok=True)
        (tmp_path / image).write_bytes(b"")
    items = read_mme(tmp_path)
    assert [(i.image, i.sets[0], i.target) for i in items] == [
        ("count/1.png", "count", "yes"),
        ("count/1.png", "count", "no"),
        ("scene/images/1.png", "scene", "yes"),
        ("scene/images/1.png", "scene", "no"),
    ]
    (tmp_path / "mme.jsonl").write_text(
        '{"category": "count", "image": "a", "question": "One?", "answer": "yes"}'
    )
    assert [i.id for i in read_mme(tmp_path / "mme.jsonl")] == ["count: a: One?"]

    with pytest.raises(InputError, match="no questions"):
        read_mme(tmp_path / "count")
