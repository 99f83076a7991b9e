"""What a report says first: which methods help, against which controls, in a few sentences."""

import dataclasses

import pytest

from mmdecode.evaluation import CaptionReport, ChoiceReport, YesNoReport
from mmdecode.evaluation.vision.items import CaptionItem, ChoiceItem, YesNoItem
from mmdecode.evaluation.vision.tasks.chair import Vocabulary
from tests.support.pages import checked

BASIS = {"resamples": 100, "baseline_controls": False}


def yes_no(mode, right, sets=("easy",), count=40):
    """Answers of which the first so many are right, yes and no in turn."""
    found = []
    for number in range(count):
        target = ("yes", "no")[number % 2]
        answer = target if number < right else ("no", "yes")[number % 2]
        found.append(
            YesNoItem(
                id=f"{number}",
                image=f"{number // 2}",
                question="?",
                target=target,
                mode=mode,
                output=answer.capitalize(),
                sets=sets,
            )
        )
    return found


def report(**rights):
    items = [item for mode, right in rights.items() for item in yes_no(mode, right)]
    against = {"vcd": ("plain", "cut")} if "cut" in rights else {}
    return YesNoReport(items, against=against, controls=("cut",), **BASIS)


@pytest.mark.parametrize(
    ("rights", "first", "expected"),
    [
        ({"plain": 20, "cut": 20, "vcd": 40}, "vcd", "better than plain and than every control"),
        ({"plain": 20, "cut": 40, "vcd": 40}, None, "better than plain, but not than cut"),
        ({"plain": 20, "cut": 20, "vcd": 22}, None, "no difference from plain shown"),
        ({"plain": 40, "cut": 20, "vcd": 20}, None, "worse than plain"),
    ],
)
def test_a_method_helps_where_it_beats_its_baseline_and_every_control(rights, first, expected):
    lines = report(**rights).verdict()
    assert lines[0].startswith(f"1 of 1 methods help: {first}" if first else "vcd is not shown to")
    assert "after Holm's correction for 3 comparisons" in lines[0]
    assert lines[1].startswith(f"plain: accuracy {rights['plain'] / 0.4:.1f} %, F1")
    (line,) = lines[2:]  # no verdict on a control
    assert line.startswith(f"vcd: {expected}. accuracy {rights['vcd'] / 0.4:.1f} %, F1 ")
    gain = (rights["vcd"] - rights["cut"]) / 0.4
    assert "yes 50 %; against plain accuracy" in line and f"against cut {gain:+.1f} points" in line


def test_the_shifted_baseline_is_a_control_of_its_mode():
    items = []
    for mode, right in (("plain", 20), ("vcd", 40)):
        for item in yes_no(mode, right):
            certain = 1.0 if item.output == "Yes" else -1.0
            items.append(dataclasses.replace(item, margin=certain))
    found = YesNoReport(items, resamples=100)
    assert found.against("vcd") == ["plain"]
    assert found.paired == {"vcd": ("plain shifted to vcd", "vcd")}
    assert "against plain shifted to vcd +50.0 points" in found.verdict()[2]


def test_of_several_sets_the_hardest_is_named_and_all_are_counted():
    items = []
    for mode, rights in (("plain", (38, 20)), ("vcd", (38, 40))):
        for name, right in zip(("easy", "hard"), rights, strict=True):
            items += [
                YesNoItem(**(item.__dict__ | {"id": f"{name}{item.id}"}))
                for item in yes_no(mode, right, sets=(name,))
            ]
    found = YesNoReport(items, **BASIS)
    first, plain, line = found.verdict()
    assert first.startswith("1 of 1 methods help: vcd")
    assert plain.startswith("plain in hard, where it scores lowest: accuracy 50.0 %")
    assert line.startswith("vcd: better than plain in hard. hard: accuracy 100.0 %")
    [[row, other, *_]] = found.brief()
    assert (row["mode"], row["easy %"], row["hard %"], row["accuracy %"]) == (
        *("plain", "95.0", "50.0", "72.5"),
    )
    assert other["hard %"] == "100.0" and len(row) < len(found.rows()[0])


def test_without_a_method_the_verdict_is_the_score():
    assert report(plain=20).verdict() == ["plain: accuracy 50.0 %, F1 50.0 %, yes 50 %."]


def test_the_verdict_leads_table_and_page():
    found = report(plain=20, vcd=40)
    first = found.verdict()[0]
    assert found.table().startswith(f"- {first}\n")
    page = found.page()
    assert checked(page) and page.index(first.replace("'", "&#39;")) < page.index("<table")


def captions(mode, texts):
    return [
        CaptionItem(id=f"{n}", image=f"{n}", objects=("cup",), mode=mode, output=text)
        for n, text in enumerate(texts)
    ]


def test_captions_are_held_against_the_baseline_at_equal_length():
    """Half of a caption makes up half as much; so the baseline does, cut in half."""
    long = ["a cup and a cup and a fish and a fish"] * 30
    short = ["a cup and a cup and"] * 30
    words = Vocabulary({"cup": [], "fish": []})
    items = [*captions("plain", long), *captions("brief", short)]
    found = CaptionReport(items, vocabulary=words, resamples=100)
    lines = found.verdict()
    assert lines[0].startswith("brief is not shown to help")
    assert "better than plain, but not than plain cut to brief" in lines[2]
    assert "CHAIR_i 0.0 %, CHAIR_s 0.0 %, recall 100.0 %, 6.0 words" in lines[2]
    assert [*found.brief()[0][0]] == ["mode", "CHAIR_i %", "CHAIR_s %", "recall %", "words"]
    truer = [
        *captions("plain", long),
        *captions("true", ["a cup and a cup and a cup or a cup"] * 30),
    ]
    found = CaptionReport(truer, vocabulary=words, resamples=100)
    assert found.verdict()[0].startswith("1 of 1 methods help: true")


def test_choices_are_reported_next_to_chance():
    items = [
        ChoiceItem(
            id=f"{n}",
            image=f"{n}",
            question="?",
            target="left",
            options=("left", "right"),
            mode=mode,
            output="left" if mode == "map" or n < 15 else "right",
            sets=("all",),
        )
        for mode in ("plain", "map")
        for n in range(30)
    ]
    found = ChoiceReport(items, resamples=100)
    first, plain, line = found.verdict()
    assert first.startswith("1 of 1 methods help: map")
    assert plain == "plain: 50.0 % right, by chance 50.0 %."
    assert "against plain individual +50.0 points" in line
