"""CHAIR: objects in captions, and reports with captions of equal length."""

import json
from pathlib import Path

import numpy as np
import pytest

from mmdecode.errors import InputError, OptionError
from mmdecode.evaluation.vision.caption_report import CaptionReport
from mmdecode.evaluation.vision.items import CaptionItem, read_items, read_table
from mmdecode.evaluation.vision.tasks.chair import (
    Vocabulary,
    coco_image,
    coco_vocabulary,
    count_mentions,
    rates,
    read_chair,
    read_synonyms,
    shortened,
)
from tests.support.scores import chair

DATA = Path(__file__).parents[1] / "data" / "chair"
SCENES = Vocabulary({"cup": ["mug", "tea cup"], "fish": [], "box": ["crate"]})


@pytest.fixture(scope="module")
def images():
    return read_chair(DATA / "gt_objects.jsonl.gz")


# Counting


@pytest.mark.parametrize(
    "name", ["instructblip_brief", "llava_short", "mplugowl_short", "minigpt4_concise"]
)
def test_real_captions_score_as_elsewhere(images, name):
    """Ours counts as the other tokeniser does, whose results are given with two decimals."""
    expected = json.loads((DATA / "expected.json").read_text())[f"captions_{name}"]
    objects = {item.image: item.objects for item in images}
    rows = [row for _, row in read_table(DATA / f"captions_{name}.jsonl.gz")]
    assert len(rows) == 2000
    counts = count_mentions(
        [row["caption"] for row in rows],
        [objects[coco_image(row["image_id"])] for row in rows],
        coco_vocabulary(),
    ).sum(0)
    found = {key: 100 * float(value) for key, value in rates(counts).items()}
    assert found["chair_s"] == pytest.approx(expected["CHAIR_s"], abs=0.006)
    assert found["chair_i"] == pytest.approx(expected["CHAIR_i"], abs=0.006)
    assert found["recall"] == pytest.approx(expected["recall"], abs=0.006)
    assert counts[1] == expected["mentions"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Two women and a man", ["person", "person"]),
        ("knives, buses and couches", ["knife", "bus", "couch"]),
        ("a hot dog for the dog", ["hot dog", "dog"]),
        ("a baby elephant", ["elephant"]),
        ("a passenger train on train tracks", ["train"]),
        ("the toilet seat and another seat", ["toilet"]),
        ("a seat", ["chair"]),
        ("home plate", []),
        ("a bow tie", ["tie"]),
        ("Wine glasses on the dining tables", ["wine glass", "dining table"]),
        ("a pair of skis, an iPhone", ["skis", "cell phone"]),
        ("does this pass as grass?", []),
        ("skies, manes, weather vanes, copes, ice cubes, capes and cares", []),
        ("buses, benches, dishes, boxes, volcanoes and sandwiches", ["bus", "bench", "sandwich"]),
    ],
)
def test_words_of_coco(text, expected):
    assert coco_vocabulary().objects(text) == expected


def test_es_is_an_ending_of_its_own_only_where_a_plural_needs_it():
    """After s, x, z, ch, sh and o; elsewhere it is the e of the word and an s."""
    words = Vocabulary({name: [] for name in "gas box quiz coach brush hero fin man plan".split()})
    found = words.objects("gases boxes quizzes quizes coaches brushes heroes fines manes planes")
    assert found == ["gas", "box", "quiz", "coach", "brush", "hero"]


def test_another_vocabulary():
    assert len(coco_vocabulary().names) == 80
    assert SCENES.hash != coco_vocabulary().hash
    assert SCENES.objects("Boxes, a tea cup, cups; fishes and a crate.") == [
        *["box", "cup", "cup", "fish", "box"]
    ]
    with pytest.raises(OptionError, match="'mug' is a word for 'cup' and 'jar'"):
        Vocabulary({"cup": ["mug"], "jar": ["mug"]})
    with pytest.raises(OptionError, match="empty"):
        Vocabulary({})


def test_what_the_scores_mean():
    """Three mentions, one of them wrong; four objects, two of them mentioned."""
    score = chair(
        ["A cup, a mug and a fish.", "Nothing is here."],
        [("cup",), ("cup", "box", "fish")],
        vocabulary=SCENES,
        resamples=50,
    )
    assert score.chair_i == pytest.approx(1 / 3)
    assert (score.chair_s, score.recall, score.mentions) == (1 / 2, 1 / 4, 1.5)
    assert score.length == (7 + 3) / 2


def test_oracles_of_the_protocol():
    captions = ["a fish in a box", "a mug", "no words", "a fish and a cup"]
    objects = [("box",), ("cup",), ("cup",), ("cup",)]
    score = chair(captions, objects, vocabulary=SCENES, resamples=10)
    turned = chair(captions[::-1], objects[::-1], vocabulary=SCENES, resamples=10)
    assert (score.chair_i, score.chair_s, score.recall) == (
        *(turned.chair_i, turned.chair_s, turned.recall),
    )
    more = chair(["a box with " + captions[0], *captions[1:]], objects, vocabulary=SCENES)
    assert more.chair_s == score.chair_s and more.chair_i < score.chair_i
    silent = chair(["nothing"], [("cup",)], vocabulary=SCENES, resamples=10)
    assert (silent.chair_i, silent.chair_s, silent.recall) == (0, 0, 0)


def test_bad_pairs_are_refused():
    with pytest.raises(OptionError, match="1 captions for 2 images"):
        count_mentions(["a"], [(), ()], SCENES)


# Length


def test_captions_are_cut_to_a_mean_length():
    captions = ["one two three four", "one", "one  two\nthree"]
    assert shortened(captions, 2) in (
        ["one two", "one", "one  two"],
        ["one two three", "one", "one  two\nthree"],
    )
    assert shortened(captions, 100) == captions
    assert shortened(captions, 0) == ["", "", ""]


def captioned(objects, texts, mode, **known):
    return [
        CaptionItem(id=str(n), image=f"{n}.png", objects=o).answered(
            mode=mode, output=text, **known
        )
        for n, (o, text) in enumerate(zip(objects, texts, strict=True))
    ]


@pytest.fixture(scope="module")
def report():
    """A mode that says the same and stops early, and one that leaves out what is wrong."""
    random = np.random.default_rng(0)
    objects, full, short, careful = [], [], [], []
    for _ in range(60):
        objects.append(("cup", "fish"))
        sentences = [
            "there is a cup",
            "and a fish",
            "and a box" if random.random() < 0.6 else "and some air",
        ]
        full.append(" ".join(sentences))
        short.append(" ".join(sentences[:2]))
        careful.append(" ".join([*sentences[:2], "and some air"]))
    items = captioned(objects, full, "plain", tokens=9, passes=9, seconds=1.0)
    items += captioned(objects, short, "short") + captioned(objects, careful, "careful")
    return CaptionReport(items, vocabulary=SCENES, resamples=300)


def test_a_method_that_only_says_less_gains_nothing_at_its_length(report):
    found = {(one.first, one.second): one for one in report.comparisons}
    assert found["plain", "short"].differences["chair_i"].high < -0.1
    cut = found["plain cut to short", "short"].differences["chair_i"]
    assert cut.value == 0
    assert report.modes[:3] == ["plain", "short", "plain cut to short"]


def test_a_method_that_leaves_out_what_is_wrong_does(report):
    found = {(one.first, one.second): one for one in report.comparisons}
    alike = found["plain", "careful cut to plain"]  # it is as long, so nothing is cut
    assert alike.differences["chair_i"].high < -0.1 and alike.p_holm < 0.05


def test_longer_captions_are_cut_themselves():
    objects = [("cup",)] * 8
    items = captioned(objects, ["a cup"] * 8, "plain")
    items += captioned(objects, ["a cup and then a box"] * 8, "longer")
    report = CaptionReport(items, vocabulary=SCENES, resamples=50)
    assert report.modes == ["plain", "longer", "longer cut to plain"]
    assert report.summary["modes"]["longer cut to plain"]["length"] == 2
    assert report.summary["modes"]["longer cut to plain"]["chair_i"] == 0
    assert [(c.first, c.second) for c in report.comparisons] == [
        ("plain", "longer"),
        ("plain", "longer cut to plain"),
    ]


def test_report_can_be_saved_and_scored_again(report, tmp_path):
    report.save(tmp_path)
    again = CaptionReport(read_items(tmp_path, CaptionItem), vocabulary=SCENES, resamples=300)
    assert again.summary == report.summary
    assert "CHAIR_i %" in report.table() and "not there: box" in repr(report.worst(1))
    assert report.summary["modes"]["plain"]["rows_per_token"] == 1


def test_failed_captions_miss_everything():
    items = captioned([("cup",)] * 2, ["a cup", "a cup"], "plain")
    items[1] = items[1].answered(mode="plain", error="no such image")
    found = CaptionReport(items, vocabulary=SCENES, resamples=10).summary["modes"]["plain"]
    assert (found["failed"], found["recall"]) == (1, 0.5)


def test_reports_are_compared_as_modes_are(report):
    plain = CaptionReport(
        [i for i in report.recorded if i.mode == "plain"], vocabulary=SCENES, resamples=300
    )
    short = CaptionReport(
        [i for i in report.recorded if i.mode == "short"], vocabulary=SCENES, resamples=300
    )
    assert plain.compare(short).differences == report.compare("short").differences
    other = CaptionReport(captioned([("cup",)], ["a"], "plain"), vocabulary=SCENES, resamples=10)
    with pytest.raises(OptionError, match="different images"):
        plain.compare(other)


# Files


def test_requests_and_synonyms_may_be_given(tmp_path):
    (tmp_path / "o.jsonl").write_text('{"image": "a", "question": "What is it?", "objects": []}')
    assert read_chair(tmp_path / "o.jsonl")[0].question == "What is it?"
    (tmp_path / "s.txt").write_text("cup, mug\n\nfish\n")
    assert read_synonyms(tmp_path / "s.txt") == {"cup": ["mug"], "fish": []}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"image_id": 1}', "expected a list of names"),
        ('{"objects": ["cup"]}', "neither 'image' nor 'image_id'"),
        ("", "holds no line"),
    ],
)
def test_damaged_files_are_refused(tmp_path, text, message):
    (tmp_path / "o.jsonl").write_text(text)
    with pytest.raises(InputError, match=message):
        read_chair(tmp_path / "o.jsonl")


def test_captions_are_scored_against_the_objects_of_their_own_image():
    objects = [("cup",), ("fish",)]
    right = chair(["a cup", "a fish"], objects, vocabulary=SCENES, resamples=5)
    swapped = chair(["a fish", "a cup"], objects, vocabulary=SCENES, resamples=5)
    assert (right.chair_i, right.recall, swapped.chair_i, swapped.recall) == (0, 1, 1, 0)
    with pytest.raises(OptionError, match="1 captions for 2 images"):
        count_mentions(["a cup"], objects, SCENES)


def test_objects_that_are_listed_twice_are_there_once():
    score = chair(["a cup"], [("cup", "cup", "fish")], vocabulary=SCENES, resamples=5)
    assert score.recall == 1 / 2


@pytest.mark.parametrize(
    ("plural", "name"),
    [("firemen", "fireman"), ("knives", "knife"), ("leaves", "leaf"), ("berries", "berry"),
     ("boxes", "box"), ("buses", "bus"), ("people", "person"), ("cups", "cup")],
)  # fmt: skip
def test_plurals_are_mentions(plural, name):
    assert Vocabulary({name: []}).objects(f"Two {plural}.") == [name]


def test_a_cut_counts_captions_that_are_shorter_already():
    assert shortened(["a b c d e f g h i j", "k l"], 4) == ["a b c d e f", "k l"]


def test_intervals_draw_images_with_all_their_captions():
    captions, objects = ["a cup"] * 20 + ["a fish"] * 20, [("cup",)] * 40
    alone = chair(captions, objects, vocabulary=SCENES, resamples=200)
    images = ["one"] * 20 + ["two"] * 20
    together = chair(captions, objects, images, vocabulary=SCENES, resamples=200)
    assert together.intervals["chair_i"] == (0, 1) and together.images == 2
    assert 0.2 < alone.intervals["chair_i"][0] < alone.intervals["chair_i"][1] < 0.8


def test_words_of_a_failed_caption_do_not_count():
    items = captioned([("cup",)] * 2, ["a fish", "a fish"], "plain")
    items[1] = items[1].answered(mode="plain", output="a fish", error="out of memory")
    found = CaptionReport(items, vocabulary=SCENES, resamples=10).summary["modes"]["plain"]
    assert found["mentions"] == 1 / 2


def test_seeds_are_compared_together():
    objects = [("cup",)] * 8
    items = captioned(objects, ["a cup"] * 8, "plain")
    items += captioned(objects, ["a cup"] * 8, "drawn", seed=1)
    items += captioned(objects, ["a fish"] * 8, "drawn", seed=2)
    report = CaptionReport(items, vocabulary=SCENES, resamples=20, baseline_controls=False)
    (found,) = report.comparisons
    assert found.differences["chair_i"].value == 1 / 2
    assert report.summary["modes"]["drawn"]["seed_sd"]["chair_i"] == pytest.approx(0.5**0.5)


def test_a_cut_caption_has_no_cost_of_its_own(report):
    cut = report.summary["modes"]["plain cut to short"]
    assert cut["mean_seconds"] is cut["rows_per_token"] is cut["mean_tokens"] is None
    assert report.summary["modes"]["plain"]["mean_seconds"] == 1
