"""POPE's files, and reports on yes/no answers with their controls."""

import dataclasses
import gzip
import hashlib
import json
import re
from collections import Counter
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from mmdecode.errors import InputError, OptionError, UnknownNameError
from mmdecode.evaluation.report.item_comparison import compared_rows
from mmdecode.evaluation.report.layout import MADE_BY
from mmdecode.evaluation.vision.items import YesNoItem, file_hash, read_items, text_hash
from mmdecode.evaluation.vision.tasks.chair import coco_image, read_chair
from mmdecode.evaluation.vision.tasks.pope import SPLITS, find_pope, read_pope, warnings_of
from mmdecode.evaluation.vision.yes_no_report import (
    ALWAYS,
    YesNoReport,
    count_answers,
    rates,
    shifted,
)
from mmdecode.runs.files import MAKER
from tests.support.pages import checked

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def questions():
    return read_pope(find_pope(DATA / "pope", "coco"))


def answered(items, margins, mode, seed=None, **known):
    return [
        item.answered(
            mode=mode,
            output="Yes" if margin > 0 else "No",
            margin=float(margin),
            seed=seed,
            **known,
        )
        for item, margin in zip(items, margins, strict=True)
    ]


def synthetic(images=40, seed=0):
    """Questions in the construction of POPE on made-up images, and margins of a plain model."""
    random = np.random.default_rng(seed)
    items = []
    for image in range(images):
        for number in range(3):
            name = f"{image}.png"
            items.append(
                YesNoItem(
                    id=f"{name}: {number}", image=name, question=f"{number}?", target="yes",
                    sets=SPLITS,
                )
            )  # fmt: skip
            items += [
                YesNoItem(
                    id=f"{name}: {split} {number}", image=name, question=f"{split} {number}?",
                    target="no", sets=(split,),
                )
                for split in SPLITS
            ]  # fmt: skip
    sign = np.array([1 if item.target == "yes" else -1 for item in items])
    return items, random.normal(size=len(items)) + sign - 0.4, sign


# Files


def test_the_structure_of_the_published_files(questions):
    expected = json.loads((DATA / "pope" / "structure.json").read_text())
    assert len(questions) == expected["distinct_questions_over_three_splits"] == 5127
    rows = {name: [i for i in questions for one in i.sets if one == name] for name in SPLITS}
    yes, no = (
        {name: Counter(i.id for i in row if i.target == target) for name, row in rows.items()}
        for target in ("yes", "no")
    )
    for row in rows.values():
        assert len(row) == expected["questions_per_split"] == 3000
        assert len({item.image for item in row}) == expected["images"]
        assert {*Counter(item.image for item in row).values()} == {6}
        assert not any("imange" in item.question for item in row)
    assert {one.total() for one in yes.values()} == {expected["yes_per_split"]}
    assert (yes["random"] == yes["popular"] == yes["adversarial"]) is expected[
        "yes_questions_identical_across_splits"
    ]
    assert {
        f"{a}&{b}": len(no[a].keys() & no[b].keys()) for a, b in combinations(SPLITS, 2)
    } == expected["no_question_overlap"]
    for row in rows.values():
        for word, more in (("yes", {}), ("no", {"precision": 0})):
            wanted = expected[f"always_{word}"] | more
            counts = count_answers([word] * len(row), [item.target for item in row]).sum(0)
            assert {name: float(rates(counts)[name]) for name in wanted} == pytest.approx(wanted)
    assert warnings_of(questions) == []


def test_some_labels_are_contradicted_by_the_captions(questions):
    expected = json.loads((DATA / "pope" / "structure.json").read_text())
    objects = {i.image: i.objects for i in read_chair(DATA / "chair" / "gt_objects.jsonl.gz")}
    asked = {
        i.id: re.fullmatch(r"is there an? (.+?) in the image\?", i.question.lower())[1]
        for i in questions
    }
    found = [i for i in questions if (asked[i.id] in objects[i.image]) != (i.target == "yes")]
    assert {item.target for item in found} == {"no"}
    count = sum(len(item.sets) for item in found)
    assert count == expected["no_objects_present_in_chair_ground_truth"] == 6


def test_old_versions_are_distinguished(questions):
    short = [q for q in questions if q.target == "yes" or q.sets != ("random",)][:3000]
    assert "not half" in " ".join(warnings_of(short))
    rows = [YesNoItem(id=str(n), image="a", question="q", target="no") for n in range(2910)]
    assert "2,910" in warnings_of(rows)[0]
    text = "Is there an apple in the imange?"
    typo = [YesNoItem(id="0", image="a", question=text, target="yes")]
    assert "imange" in warnings_of(typo)[0]


def test_a_file_and_its_gzip_have_one_hash(tmp_path):
    packed = DATA / "pope" / "coco_pope_random.jsonl.gz"
    plain = tmp_path / "coco_pope_random.json"
    plain.write_bytes(gzip.decompress(packed.read_bytes()))
    assert file_hash(plain) == file_hash(packed) == hashlib.sha256(plain.read_bytes()).hexdigest()
    assert read_pope({"random": plain}) == read_pope({"random": packed})


def test_questions_are_asked_once_and_count_in_each_split(tmp_path):
    rows = [
        '{"image": "a.jpg", "question": "Is there a cat?", "answer": "Yes"}',
        '{"image": "a.jpg", "question": "Is there a dog?", "answer": "no"}',
    ]
    (tmp_path / "random.jsonl").write_text("\n".join(rows))
    (tmp_path / "popular.jsonl").write_text("\n".join([*rows[:1], *rows[:1]]))
    found = read_pope(find_pope(tmp_path))
    assert [(i.id, i.target, i.sets) for i in found] == [
        ("a.jpg: Is there a cat?", "yes", ("random", "popular", "popular")),
        ("a.jpg: Is there a dog?", "no", ("random",)),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"image": "a", "text": "t", "label": "maybe"}', "expected yes or no"),
        ('{"image": "a", "label": "no"}', "'text' or 'question'"),
        ("[1]", "expected an object"),
        ("{", "not JSON"),
        ("\n", "holds no line"),
        (
            '{"image": "a", "text": "t", "label": "no"}\n'
            '{"image": "a", "text": "t", "label": "yes"}',
            "and before 'no'",
        ),
    ],
)
def test_damaged_files_are_refused(tmp_path, text, message):
    path = tmp_path / "random.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_pope({"random": path})


def test_missing_broken_and_doubled_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_pope({"random": tmp_path / "none.jsonl"})
    (tmp_path / "random.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(InputError, match="cannot be read"):
        read_pope(find_pope(tmp_path))
    (tmp_path / "old_random.json").write_text("")
    with pytest.raises(InputError, match="several files of random"):
        find_pope(tmp_path)
    with pytest.raises(InputError, match="no file named after"):
        find_pope(tmp_path / "nothing")


# Reports


def test_a_deterministic_answerer_has_one_recall(questions):
    # answers depend on image and question only, as greedy answers do
    margins = [int(text_hash(item.id), 16) % 100 - 45 for item in questions]
    report = YesNoReport(answered(questions, margins, "plain"), task="pope", resamples=200)
    sets = report.summary["modes"]["plain"]["sets"]
    assert len({score["recall"] for score in sets.values()}) == 1
    assert [score["answers"] for score in sets.values()] == [3000] * 3
    assert report.summary["modes"][ALWAYS]["sets"]["random"]["f1"] == pytest.approx(2 / 3)


@pytest.fixture(scope="module")
def report():
    """A plain model, a method that only says yes more often, and one that looks closer."""
    items, margins, sign = synthetic()
    answers = answered(items, margins, "plain", tokens=1, passes=1, seconds=0.5)
    answers += answered(items, margins + 0.5, "shift", tokens=1, passes=2)
    answers += answered(items, margins + 0.8 * sign, "look")
    random = np.random.default_rng(4)
    for seed in range(3):
        noisy = margins + random.normal(size=len(items))
        answers += answered(items, noisy, "sampled", seed)
    return YesNoReport(answers, task="pope", resamples=500)


def comparison(report, first, second, within="random"):
    (found,) = [
        one
        for one in report.comparisons
        if (one.first, one.second, one.within) == (first, second, within)
    ]
    return found


def test_controls_stand_next_to_their_mode(report):
    assert report.modes == [
        *["plain", "shift", "plain shifted to shift", "look", "plain shifted to look"],
        *["sampled", "plain shifted to sampled", ALWAYS],
    ]


def test_a_pure_shift_gains_nothing_on_its_control(report):
    against_plain = comparison(report, "plain", "shift")
    against_control = comparison(report, "plain shifted to shift", "shift")
    assert against_plain.differences["yes_ratio"].low > 0.05
    assert against_plain.differences["auroc"].value == 0
    assert abs(against_control.differences["accuracy"].value) < 0.02
    assert against_control.differences["accuracy"].low <= 0
    assert abs(against_control.differences["yes_ratio"].value) < 0.03
    assert against_control.p_holm == 1


def test_looking_closer_beats_its_control(report):
    found = comparison(report, "plain shifted to look", "look")
    assert found.differences["accuracy"].low > 0.05 and found.differences["auroc"].low > 0
    assert found.p_holm < 0.01
    assert found.flips.lost["yes"] + found.flips.lost["no"] < found.flips.gained["no"]


def test_p_values_are_corrected_over_all_cells(report):
    tested = sorted(report.comparisons, key=lambda one: one.p)
    assert len(tested) == 3 * 6
    assert tested[0].p_holm == pytest.approx(min(1, 18 * tested[0].p))
    assert all(one.p_holm >= one.p for one in tested)


def test_flips_of_a_comparison_add_up(report):
    found = comparison(report, "plain", "look")
    gain = sum(found.flips.gained.values()) - sum(found.flips.lost.values())
    assert found.differences["accuracy"].value == pytest.approx(gain / 240)


def test_seeds_are_averaged_and_their_spread_shown(report):
    score = report.summary["modes"]["sampled"]["sets"]["random"]
    assert score["answers"] == 3 * 240
    by_seed = report.counts["sampled"]["random"][:, :, [0, 2]].sum((1, 2)) / 240
    assert score["accuracy"] == pytest.approx(by_seed.mean())
    assert score["seed_sd"]["accuracy"] == pytest.approx(by_seed.std(ddof=1))
    assert comparison(report, "plain", "sampled").flips is None
    assert report.summary["modes"]["plain"]["sets"]["random"]["seed_sd"] is None


def test_the_cost_of_a_mode(report):
    assert report.cost("shift")["rows_per_token"] == 2
    assert report.cost("plain")["mean_seconds"] == 0.5
    assert report.cost("look")["rows_per_token"] is None


def test_failures_are_wrong_under_every_parser():
    items, margins, _ = synthetic(2)
    answers = answered(items, margins + 9, "plain")  # yes to all
    answers[0] = items[0].answered(mode="plain", error="no such image")
    for parser in ("leading", "original", "vcd"):
        report = YesNoReport(answers, parser=parser, resamples=10)
        found = report.summary["modes"]["plain"]
        assert found["failed"] == 1
        assert found["sets"]["random"]["unparsed"] == pytest.approx(1 / 12)
        assert found["sets"]["random"]["recall"] == pytest.approx(5 / 6)
        assert found["sets"]["random"]["margin"]["missing"] == 1


def test_rescoring_needs_only_the_rows(report, tmp_path):
    files = report.save(tmp_path)
    assert {path.name for path in files} >= {"summary.json", "table.md", "report.html"}
    checked((tmp_path / "report.html").read_text())
    assert (tmp_path / "table.md").read_text().startswith(MADE_BY)
    saved = json.loads((tmp_path / "summary.json").read_text())
    again = YesNoReport(read_items(tmp_path, YesNoItem), task="pope", resamples=500)
    assert {"made_by": MAKER} | json.loads(json.dumps(again.summary)) == saved
    strict = YesNoReport(read_items(tmp_path, YesNoItem), parser="lmms", resamples=50)
    assert strict.summary["parser"] == "lmms"


def test_a_row_tells_what_was_parsed_and_a_cut_line_is_left_out(tmp_path):
    items, margins, _ = synthetic(1)
    rows = [item.as_dict() for item in answered(items, margins, "plain", prompt_hash="ab")]
    assert {row["parsed"] for row in rows} == {"yes", "no"}
    lines = [json.dumps(row) for row in (*rows, rows[0] | {"output": "Maybe", "parsed": None})]
    path = tmp_path / "items.jsonl"
    path.write_text("\n".join([*lines, lines[0][:20]]))
    found = read_items(path, YesNoItem)
    assert len(found) == len(items)
    assert found[0].output == "Maybe"  # the last of two rows counts
    path.write_text('{"id": "a"}\n')
    with pytest.raises(InputError, match="line 1 is no YesNoItem"):
        read_items(path, YesNoItem)
    with pytest.raises(InputError, match="cannot be read"):
        read_items(tmp_path / "none", YesNoItem)


def test_margins_that_are_no_numbers_are_refused():
    with pytest.raises(InputError, match="finite"):
        YesNoItem(id="a", image="a", question="?", target="yes", margin=float("inf"))
    with pytest.raises(InputError, match="expected 'yes' or 'no'"):
        YesNoItem(id="a", image="a", question="?", target="Yes")


def test_modes_must_answer_the_same_questions():
    items, margins, _ = synthetic(2)
    answers = answered(items, margins, "plain") + answered(items[1:], margins[1:], "other")
    with pytest.raises(OptionError, match="lacks answers"):
        YesNoReport(answers)
    with pytest.raises(OptionError, match="two answers"):
        YesNoReport(answered([*items, items[0]], [*margins, 0], "plain"))
    with pytest.raises(OptionError, match="no answers"):
        YesNoReport([])
    with pytest.raises(UnknownNameError, match="pope"):
        YesNoReport(answers, task="popes")


def test_reports_are_compared_as_modes_are(report):
    items, margins, sign = synthetic()
    plain = YesNoReport(answered(items, margins, "plain"), resamples=500)
    look = YesNoReport(answered(items, margins + 0.8 * sign, "plain"), resamples=500)
    apart = plain.compare(look)[0]
    together = report.compare("look")[0]
    assert apart.differences == together.differences and apart.flips == together.flips
    with pytest.raises(OptionError, match="parsed by"):
        plain.compare(YesNoReport(look.recorded, parser="mme"))
    with pytest.raises(OptionError, match="different questions"):
        plain.compare(YesNoReport(answered(items[:8], margins[:8], "plain")))
    with pytest.raises(UnknownNameError):
        plain.compare("nothing")


def test_the_worst_answers_are_surely_wrong(report):
    shown = report.worst(3, "plain")
    assert len(shown) == 3 and "right is" in repr(shown)
    known = {item.id: item for item in report.answers("plain")[0]}
    items = [known[one.name] for one in shown]
    sizes = [abs(item.margin) for item in items]
    assert sizes == sorted(sizes, reverse=True)
    assert all(item.parsed != item.target for item in items)


def test_images_are_shown_from_a_folder_or_a_function(tmp_path, report):
    png = b"\x89PNG\r\n"
    known = {item.id: item for item in report.questions}
    (tmp_path / known[report.worst(1)[0].name].image).write_bytes(png)
    report.images = tmp_path
    assert "data:image/png" in report.worst(1)._repr_html_()
    report.images = lambda name: png
    assert "data:image/png" in report.worst(1)._repr_html_()
    report.images = None
    assert "<img" not in report.worst(1)._repr_html_()


def test_tables_escape_what_comes_from_outside():
    items, margins, _ = synthetic(2)
    report = YesNoReport(answered(items, margins, "<b>|"), resamples=10)
    assert "&lt;b&gt;" in report._repr_html_() and "<b>" not in report._repr_html_()
    assert "<b>\\|" in report.table()
    assert len(report.to_pandas()) == 2 * len(items)


def test_a_shift_weighs_questions_by_the_splits_that_hold_them():
    items, margins, _ = synthetic(20)
    control = shifted(answered(items, margins, "plain"), margins > -1, "control")
    answered_yes = {item.id: item.parsed == "yes" for item in control}
    share = np.mean([answered_yes[i.id] for i in items for _ in i.sets])
    wanted = np.mean([m > -1 for i, m in zip(items, margins, strict=True) for _ in i.sets])
    assert share == pytest.approx(wanted, abs=0.03)


def test_many_unparsed_answers_are_pointed_out():
    items, margins, _ = synthetic(2)
    answers = answered(items, margins, "plain")
    answers[0] = items[0].answered(mode="plain", output="There is one")
    assert "neither yes nor no" in YesNoReport(answers, resamples=10).about()


def test_names_of_coco_images():
    assert coco_image(310196) == "COCO_val2014_000000310196.jpg"


# Margins that are missing


def without_margins(answers, lost):
    return [
        dataclasses.replace(one, margin=None) if index in lost else one
        for index, one in enumerate(answers)
    ]


def test_auroc_leaves_out_what_has_no_margin_and_counts_it():
    items, margins, sign = synthetic()
    random = [index for index, item in enumerate(items) if "random" in item.sets]
    lost = random[::7]
    answers = without_margins(answered(items, margins, "plain"), [random[0]])
    answers += without_margins(answered(items, margins + 0.5 * sign, "look"), lost)
    with pytest.warns(UserWarning, match="1 answers of 'plain' have no margin"):
        report = YesNoReport(answers, resamples=100)
    found = report.summary["modes"]["look"]["sets"]["random"]["margin"]
    left = [index for index in random if index not in lost]
    positive = sign[left] > 0
    assert found["missing"] == len(lost) and found["auroc"] == pytest.approx(
        roc_auc_score(positive, (margins + 0.5 * sign)[left])
    )
    assert found["average_precision"] == pytest.approx(
        average_precision_score(positive, (margins + 0.5 * sign)[left])
    )
    assert found["auroc_low"] < found["auroc"] < found["auroc_high"]
    ranked = comparison(report, "plain", "look").differences["auroc"]
    assert ranked.value == pytest.approx(
        roc_auc_score(positive, (margins + 0.5 * sign)[left])
        - roc_auc_score(positive, margins[left])
    )
    rows = {(row["mode"], row["set"]): row for row in report.rows()}
    assert rows["look", "random"]["no margin"] == str(len(lost))
    assert rows["plain", "popular"]["no margin"] in ("", "1")
    assert "leave out questions without a margin" in report.about()
    whole = YesNoReport(answered(items, margins, "plain"), resamples=100)
    assert "no margin" not in whole.table() and "without a margin" not in whole.about()


def test_a_margin_that_one_seed_lacks_is_left_out_of_all():
    items, margins, sign = synthetic(12)
    answers = without_margins(answered(items, margins, "drawn", seed=1), [0, 1])
    answers += without_margins(answered(items, -margins, "drawn", seed=2), [1, 2])
    report = YesNoReport(answers, resamples=50)
    found = report.summary["modes"]["drawn"]["sets"]["random"]["margin"]
    random = [n for n, item in enumerate(items) if "random" in item.sets and n > 2]
    one = roc_auc_score(sign[random] > 0, margins[random])
    assert found["auroc"] == pytest.approx((one + 1 - one) / 2)
    assert (found["auroc_low"], found["auroc_high"]) == pytest.approx((0.5, 0.5))
    nothing = without_margins(answered(items, margins, "plain"), range(len(items)))
    report = YesNoReport(nothing, resamples=50)
    assert report.summary["modes"]["plain"]["sets"]["random"]["margin"] is None


def test_a_damaged_archive_is_refused(tmp_path):
    header = gzip.compress(b"")[:10]
    (tmp_path / "random.jsonl.gz").write_bytes(header + bytes([255]) * 20)
    with pytest.raises(InputError, match="cannot be read"):
        read_pope(find_pope(tmp_path))


# The shifted baseline


def test_a_shift_counts_a_question_in_each_of_its_splits():
    """A method says yes to all that stands three times, to nothing else: half of each split."""
    items, _, _ = synthetic(40)
    margins = np.random.default_rng(1).normal(size=len(items))
    answered_yes = np.array([len(item.sets) == 3 for item in items])
    control = shifted(answered(items, margins, "plain"), answered_yes, "control")
    share = np.mean([one.output == "Yes" for one in control for _ in one.sets])
    assert share == pytest.approx(0.5, abs=0.05)


def test_a_margin_of_nothing_is_no():
    items, _, _ = synthetic(4)
    margins = np.zeros(len(items))
    control = shifted(answered(items, margins, "plain"), margins, "control")
    assert {(one.output, one.margin) for one in control} == {("No", 0.0)}


def test_a_shift_is_fitted_to_all_seeds():
    items, margins, _ = synthetic(20)
    answers = answered(items, margins, "plain")
    answers += answered(items, margins * 0 + 1, "drawn", seed=1)
    answers += answered(items, margins * 0 - 1, "drawn", seed=2)
    report = YesNoReport(answers, resamples=20)
    control = report.summary["modes"]["plain shifted to drawn"]["sets"]["random"]
    assert control["yes_ratio"] == pytest.approx(0.5, abs=0.1)


def test_modes_are_compared_with_what_is_named():
    items, margins, _ = synthetic(4)
    answers = [one for name in "abcd" for one in answered(items, margins, name)]
    report = YesNoReport(
        answers, resamples=20, baseline_controls=False, against={"c": ["b"], "d": ["gone"]}
    )
    pairs = {(one.first, one.second) for one in report.comparisons}
    assert pairs == {("a", "b"), ("b", "c"), ("a", "d")}


def test_the_page_has_a_row_for_each_comparison(report):
    rows = compared_rows(report.comparisons)
    (look,) = [
        row
        for row in rows
        if (row["mode"], row["against"], row["set"]) == ("look", "plain", "random")
    ]
    found = comparison(report, "plain", "look")
    assert look["accuracy"].startswith(f"{100 * found.differences['accuracy'].value:+.2f} [")
    gained, lost = (sum(side.values()) for side in (found.flips.gained, found.flips.lost))
    assert look["flips"] == f"+{gained} -{lost}" and look["p by Holm"] == f"{found.p_holm:.4f}"
    assert len(rows) == len(report.comparisons) and "Differences in points" in report.page()
    alone = YesNoReport([one for one in report.recorded if one.mode == "plain"], resamples=20)
    assert "Differences" not in alone.page()


def test_a_short_table_that_leaves_its_sets_out_says_that_it_has_their_means():
    for count in (2, 9):
        items = [
            YesNoItem(id=f"{n}", image=f"{n}", question="?", target="yes", sets=(f"set {n}",))
            for n in range(count)
        ]
        report = YesNoReport(answered(items, [1.0] * count, "plain"), resamples=5)
        assert ("means over 9 sets" in report.about()) == (count == 9)
        assert ("set 0 %" in report.brief()[0][0]) == (count == 2)
