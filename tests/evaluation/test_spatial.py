"""Spatial relations: single questions, pairs and sets; VSR's statements."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import precision_recall_fscore_support

from mmdecode.errors import InputError, OptionError
from mmdecode.evaluation.vision.answers import choice
from mmdecode.evaluation.vision.choice_report import ChoiceReport
from mmdecode.evaluation.vision.items import ChoiceItem, read_items
from mmdecode.evaluation.vision.tasks.spatial import count_choices, read_choices, read_whats_up
from mmdecode.evaluation.vision.tasks.vsr import read_vsr
from mmdecode.runs.tables import write_rows
from tests.support.scores import score_answers, score_choices

DATA = Path(__file__).parents[1] / "data"
OPTIONS = ("left", "right", "on", "under")


def whole(group, answers, mode="plain", options=OPTIONS):
    return [
        ChoiceItem(
            id=f"{group}: {target}",
            image=f"{group} {target}.png",
            question="Where is it?",
            options=options,
            target=target,
            group=group,
        ).answered(mode=mode, output=answer)
        for target, answer in zip(options, answers, strict=True)
    ]


def test_questions_pairs_and_sets():
    items = whole("mug, table", ["Left", "To the right", "On", "Under"])
    items += whole("cap, chair", ["Left", "Left", "on the chair", "under"])
    score = score_choices(items, resamples=50)
    assert (score.individual, score.pair, score.set) == (7 / 8, 3 / 4, 1 / 2)
    assert (score.questions, score.pairs, score.sets) == (8, 4, 2)
    assert (score.chance, score.majority, score.unparsed) == (1 / 4, 1 / 4, 0)


def test_one_answer_to_everything_earns_the_majority_and_no_pair():
    items = [i for n in range(5) for i in whole(str(n), ["Left"] * 4)]
    score = score_choices(items, resamples=50)
    assert (score.individual, score.pair, score.set) == (score.majority, 0, 0)


def test_substrings_do_not_count():
    score = score_choices(whole("a, b", ["", "", "positioned beside it", "left or right"]))
    assert (score.individual, score.unparsed) == (0, 1)


def test_questions_without_a_group_have_no_pairs():
    items = [
        ChoiceItem(id=str(n), image=str(n), question="?", options=("top", "bottom"), target=t)
        .answered(mode="plain", output="bottom")
        for n, t in enumerate(["bottom", "bottom", "top"])
    ]  # fmt: skip
    score = score_choices(items, resamples=20)
    assert (score.individual, score.majority, score.chance) == (2 / 3, 2 / 3, 1 / 2)
    assert score.pair is None and score.set is None
    pairs = whole("a, b", ["above", "below"], options=("above", "below"))
    score = score_choices(pairs, resamples=20)
    assert (score.pair, score.set) == (1, None)


def test_bad_groups_are_refused():
    with pytest.raises(OptionError, match="two questions with the answer 'left'"):
        count_choices(whole("a", ["left"] * 4) + whole("a", ["left"] * 4))
    with pytest.raises(OptionError, match="no answers to score"):
        score_choices([])
    with pytest.raises(InputError, match="has the answer 'off'"):
        ChoiceItem(id="a", image="a", question="?", options=("on",), target="off")


def test_failures_stay_in_the_denominator():
    items = whole("a", ["Left", "Right", "On", "Under"])
    items[3] = items[3].answered(mode="plain", output="Under", error="out of memory")
    assert score_choices(items, resamples=10).individual == 3 / 4


def test_modes_are_compared_by_groups_of_questions(tmp_path):
    items = []
    for n in range(12):
        items += whole(str(n), ["left", "left", "on", "on"])
        items += whole(str(n), ["left", "right", "on", "on" if n % 3 else "under"], mode="scaled")
    report = ChoiceReport(items, resamples=200)
    (found,) = report.comparisons
    assert found.differences["individual"].value == pytest.approx(1 / 3)
    assert found.differences["set"].value == pytest.approx(1 / 3)
    assert found.flips.gained == {"left": 0, "on": 0, "right": 12, "under": 4}
    assert found.p_holm < 0.001 and report.compare("scaled") == report.comparisons
    assert "| scaled |" in report.table() and len(report.worst(3)) == 3
    report.save(tmp_path)
    again = ChoiceReport(read_items(tmp_path, ChoiceItem), resamples=200)
    assert again.summary == report.summary


def test_rows_survive_the_file(tmp_path):
    items = whole("a", ["left"] * 4)
    write_rows(tmp_path / "items.jsonl", [item.as_dict() for item in items])
    assert read_items(tmp_path / "items.jsonl", ChoiceItem) == items


def test_questions_with_options_are_read(tmp_path):
    path = tmp_path / "c.jsonl"
    row = {"image": "a.png", "question": "Where?", "options": ["on", "under"], "answer": "on"}
    path.write_text(json.dumps(row | {"group": "cup, box"}))
    (item,) = read_choices(path)
    other = {"image": "a.png", "text": "Where?", "options": ["on", "under"], "target": "on"}
    path.write_text(json.dumps(other | {"group": "cup, box"}))
    assert read_choices(path) == [item]
    assert (item.options, item.target, item.group) == (("on", "under"), "on", "cup, box")
    path.write_text(json.dumps(row | {"options": "on"}))
    with pytest.raises(InputError, match="list of texts"):
        read_choices(path)
    path.write_text("")
    with pytest.raises(InputError, match="holds no line"):
        read_choices(path)


# What's Up and VSR


def test_whats_up_is_read_from_the_names_of_its_images(tmp_path):
    names = [
        "beer-bottle_on_armchair",
        "mug_left_of_table",
        "mug_right_of_table",
        "cup_under_chair",
    ]
    path = tmp_path / "controlled_images_dataset.json"
    path.write_text(
        json.dumps([{"image_path": f"data/controlled_images/{name}.jpeg"} for name in names])
    )
    items = read_whats_up(path)
    assert [(i.target, i.group) for i in items] == [
        ("on", "beer-bottle, armchair"),
        ("left", "mug, table"),
        ("right", "mug, table"),
        ("under", "cup, chair"),
    ]
    assert items[0].options == ("left", "right", "on", "under")
    assert items[0].question == (
        "Where is the beer bottle in relation to the armchair? Answer with left, right, on or "
        "under."
    )
    path.write_text(json.dumps([{"image_path": "book_in-front_of_knife.jpeg"}] * 1 + [
        {"image_path": "book_behind_knife.jpeg"}
    ]))  # fmt: skip
    assert [i.target for i in read_whats_up(path)] == ["in front", "behind"]
    path.write_text('[{"image_path": "photo.jpeg"}]')
    with pytest.raises(InputError, match="mug_left_of_table"):
        read_whats_up(path)


@pytest.mark.parametrize(
    ("name", "count", "true"), [("zeroshot", 1222, 629), ("random", 2195, 1181)]
)
def test_vsr_with_its_true_precision_and_recall(name, count, true):
    items = read_vsr(DATA / "vsr" / f"{name}_test.jsonl.gz")
    assert (len(items), sum(item.target == "yes" for item in items)) == (count, true)
    outputs = ["Yes" if len(item.question) % 3 else "No" for item in items]
    score = score_answers(
        outputs, [i.target for i in items], [i.image for i in items], resamples=100
    )
    precision, recall, f1, _ = precision_recall_fscore_support(
        [i.target for i in items], [o.lower() for o in outputs], pos_label="yes", average="binary"
    )
    assert (score.precision, score.recall, score.f1) == pytest.approx((precision, recall, f1))


def test_vsr_asks_with_the_given_question(tmp_path):
    path = tmp_path / "v.jsonl"
    path.write_text('{"image": "a", "caption": "The cat is on it.", "label": 1}')
    assert (
        read_vsr(path, ask="Is it true that {}")[0].question == "Is it true that The cat is on it."
    )
    path.write_text('{"image": "a", "caption": "The cat is on it.", "label": "yes"}')
    with pytest.raises(InputError, match="expected 0 or 1"):
        read_vsr(path)


def test_on_the_left_is_left():
    options = ("left", "right", "on", "under")
    assert choice("The mug is on the left of the plate.", options) == "left"
    assert choice("On the right side", options) == "right"
    assert choice("It is on the lefthand table", options) == "on"
    assert choice("on, not left", options) is None


def test_seeds_have_an_interval_and_a_spread():
    items = []
    for n in range(12):
        items += [dataclasses.replace(i, seed=1) for i in whole(str(n), ["left"] * 4)]
        outputs = ["left", "right", "on", "under" if n % 2 else "on"]
        items += [dataclasses.replace(i, seed=2) for i in whole(str(n), outputs)]
    report = ChoiceReport(items, resamples=200)
    score = report.summary["modes"]["plain"]["sets"]["all"]
    assert (score["individual"], score["pair"], score["set"]) == (0.5625, 0.375, 0.25)
    assert (score["questions"], score["pairs"], score["sets"]) == (96, 48, 24)
    assert (score["chance"], score["majority"]) == (0.25, 0.25)
    low, high = score["intervals"]["individual"]
    assert 0.4 < low < 0.5625 < high < 0.7
    assert score["seed_sd"]["individual"] == pytest.approx(np.std([0.25, 0.875], ddof=1))
    (row,) = report.rows()
    assert row["95 %"] and row["seeds sd"] == "44.19"
    assert report.summary["interval"]["unit"].startswith("group")


def test_what_a_longer_option_holds_is_not_named():
    assert choice("It is on top of the box.", ("on", "on top of")) == "on top of"
    assert choice("on, or rather on top of it", ("on", "on top of")) is None


def test_in_front_and_at_the_back_make_a_pair():
    options = ("left", "right", "in front", "behind")
    outputs = ["left", "left", "in front of it", "behind"]
    score = score_choices(whole("a, b", outputs, options=options), resamples=20)
    assert (score.pair, score.individual) == (1 / 2, 3 / 4)


def test_chance_is_of_each_question_its_own():
    items = whole("a, b", ["left"] * 4) + whole("c", ["above"] * 2, options=("above", "below"))
    assert score_choices(items, resamples=20).chance == pytest.approx((4 / 4 + 2 / 2) / 6)


def test_comparisons_without_a_pair_and_of_failures():
    groups = ["one", "two"]
    items = [i for name in groups for i in whole(name, OPTIONS)]
    items += [
        i.answered(mode="fails", output=i.output, error="out of memory")
        for name in groups
        for i in whole(name, OPTIONS)
    ]
    report = ChoiceReport(items, resamples=50)
    (found,) = report.comparisons
    assert found.flips.lost == dict.fromkeys(OPTIONS, 2) and len(report.worst(3, "fails")) == 3
    single = [dataclasses.replace(item, group="") for item in items if "one" in item.id]
    (found,) = ChoiceReport(items + [dataclasses.replace(i, id=f"{i.id}!") for i in single],
                            resamples=50).comparisons  # fmt: skip
    assert list(found.differences) == ["individual"]
