"""``mmdecode demo vlm``: questions about scenes answered plainly and with guides, and its page."""

import dataclasses
import functools
import io
import math
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.demo.vision import command as demo_vlm
from mmdecode.demo.vision import page
from mmdecode.demo.vision.attention_map import AttentionMap, attention_map
from mmdecode.engine.trace import Round
from mmdecode.errors import MMDecodeError
from mmdecode.evaluation.vision.benchmarks import zoo_image
from mmdecode.evaluation.vision.tasks.chair import vocabulary_of
from mmdecode.guide.edited import Edited
from mmdecode.vlm import Answerer
from mmdecode.zoo.scene_sets import image_name, scenes_from
from mmdecode.zoo.scenes import COMPANIONS
from tests.support.commands import invoke, json_of
from tests.support.pages import checked


@pytest.fixture(scope="module")
def answerer():
    return Answerer.from_pretrained("zoo:llava-scenes", device="cpu")


@pytest.fixture(scope="module")
def scene():
    return scenes_from(demo_vlm.FIRST[demo_vlm.TEMPTING], 1, wanted=demo_vlm.is_tempting)[0]


@pytest.fixture(scope="module")
def png(scene):
    return zoo_image(image_name(scene))


def given(**changes):
    fields = {
        "method": page.PLAIN,
        "tokens": [page.Token(text=" Yes")],
        "right": True,
        "margins": {"main": 0.5},
        "seconds": 0.1,
    }
    return page.Given(**fields | changes)


def named(*images, title="Images as they come"):
    return page.ImageSet(title=title, about="Drawn <at> random.", images=images)


CHANGED = page.Token(text=" No", instead=" Yes", survivors=2, distances={"noised": 0.25}, total=1.0)


def report(*answers, **changes):
    answers = answers or (given(), given(method="vcd", tokens=[CHANGED], right=False))
    asked = page.Asked(text="Is there a ring in the image?", truth="Yes", answers=answers)
    fields = {
        "model": "zoo:m",
        "methods": [one.method for one in answers],
        "sets": [named(page.Pictured(name="image 1", about="red ring", png=b"png", asked=[asked]))],
        "conditions": {"device": "cpu"},
    }
    return page.Answers(**fields | changes)


# The command


run = functools.partial(invoke, "demo", env={"COLUMNS": "120"})


def test_demo_asks_and_writes_a_page(tmp_path):
    guides = ["--guide", "vcd", "--guide", "pai:alpha=1"]
    done = run("vlm", "--limit", "1", *guides, "--json", "--out", str(tmp_path / "demo"))
    assert done.exit_code == 0, done.output
    found = json_of(done)
    assert found["methods"] == ["plain", "vcd", "pai:alpha=1"] and found["images"] == 1
    kinds = " ".join(one["question"].split()[0] for one in found["questions"])
    assert kinds == "Is Is How Describe"
    (fair,) = found["sets"].values()
    assert (fair["images"], fair["short_questions"]) == (["image 1"], 3)
    assert fair["right"]["plain"] == 3
    absent = found["questions"][1]
    assert absent["truth"] == "No"
    answers = absent["answers"]
    assert list(answers["plain"]["margins"]) == ["main"]
    assert list(answers["vcd"]["margins"]) == ["main", "noised", "guided"]
    looked = answers["pai:alpha=1"]["attention_on_image"]
    assert 0 < looked["plain"] < looked["edited"] < 1
    assert "attention_on_image" not in answers["vcd"]
    assert found["draft"] == "eagle:path=zoo:llava-scenes-eagle" and found["identical"]
    captions = [one for one in found["questions"] if one["question"].startswith("Describe")]
    short = [one["answers"].values() for one in found["questions"] if one not in captions]
    assert not any("drafted" in answer for answers in short for answer in answers)
    written = [answer["drafted"] for one in captions for answer in one["answers"].values()]
    passes = [(one["passes"], one["undrafted"]) for one in written]
    assert all(0 < drafted < undrafted for drafted, undrafted in passes)
    sums = [sum(column) for column in zip(*passes, strict=True)]
    assert sums == [found["drafted"]["passes"], found["drafted"]["undrafted"]]
    for one in found["questions"]:
        assert one["answers"]["plain"]["changed"] == []
        for method in found["methods"][1:]:
            answer = one["answers"][method]
            same = answer["text"] == one["answers"]["plain"]["text"]
            assert same == (not answer["changed"])
    shown = Path(found["files"]["report.html"])
    assert shown == tmp_path / "demo" / "report.html" and str(shown) in done.stderr
    text = shown.read_text()
    parser = checked(text)
    assert all(address.startswith("data:") for address in parser.fetched)
    assert text.count('<div class="strip"') == 3 and text.count("<details open>") == 1
    assert "3 of 3 short questions right" in text and "3 of 3 short questions right" in done.stderr
    assert f"<b>{sums[0]}</b> passes of the model in place of {sums[1]}" in text
    assert "every token the same" in text and "every token the same" in done.stderr
    assert "pai:alpha=1" in done.stderr and "Is there" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["vlm", "--draft", "lookup"], "--draft does nothing without 'mmdecode demo speech'"),
        (["speech", "--guide", "vcd"], "--guide does nothing without 'mmdecode demo vlm'"),
        (["image", "--guide", "vcd"], "--guide does nothing without 'mmdecode demo vlm'"),
        (["image", "--repeats", "2"], "--repeats does nothing without 'mmdecode demo speech'"),
        (["images"], "no demo named 'images'; did you mean 'image'?; known: image, speech, vlm"),
    ],
)
def test_options_of_the_other_demo_are_refused(words, message):
    with pytest.raises(MMDecodeError, match=re.escape(message)):
        raise run(*words).exception


# What is asked, and what is right


def test_images_as_they_come_stand_before_those_that_tempt():
    every = demo_vlm.chosen(None)
    assert {title: len(found) for title, found in every.items()} == {
        "Images as they come": 3,
        "Images that tempt": 2,
    }
    assert list(every) == list(demo_vlm.SETS)
    fair, tempting = every.values()
    assert all(map(demo_vlm.is_tempting, tempting)) and not any(scene in fair for scene in tempting)
    assert demo_vlm.chosen(2) == {demo_vlm.FAIR: fair[:2]}
    assert demo_vlm.chosen(4) == {demo_vlm.FAIR: fair, demo_vlm.TEMPTING: tempting[:1]}
    assert demo_vlm.chosen(9) == every


def test_questions_have_true_answers_and_one_tempts(scene):
    tasks = list(demo_vlm.tasks(scene, tempting=True))
    fair = list(demo_vlm.tasks(scene, tempting=False))
    assert fair == [tasks[0], *tasks[2:]]
    *asked, count, caption = tasks
    there, tempting, stranger = (re.search(r"an? ([a-z ]+) in", task.text)[1] for task in asked)
    assert there in scene.names and tempting not in scene.names and stranger not in scene.names
    companions = {COMPANIONS[name] for name in scene.names}
    assert tempting in companions and stranger not in companions
    assert [task.truth for task in (*asked, count)] == ["Yes", "No", "No", "Two"]
    assert caption.truth.split(", ") == list(scene.names)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("Yes", True),
        ("Yes, there is no cup.", True),
        ("No, I cannot say yes", False),
        ("No", False),
        ("Maybe", False),
        ("", False),
    ],
)
def test_the_first_word_that_could_be_an_answer_counts(scene, text, right):
    task = page.Asked("Is there a ring in the image?", "Yes", ("yes", "no"))
    assert demo_vlm._judged(task, text, scene, vocabulary_of("zoo")) == {"right": right}


def test_a_caption_is_judged_by_what_it_makes_up(scene):
    *_, task = demo_vlm.tasks(scene, tempting=True)
    words = vocabulary_of("zoo")
    text = f"There is a {scene.names[0]} and a fish beside a fish."
    found = demo_vlm._judged(task, text, scene, words)
    assert not found["right"] and found["hallucinated"] == 1
    assert found["note"] == f"1 of {len(scene.names)} named, made up: fish"
    found = demo_vlm._judged(task, f"A {scene.names[0]}.", scene, words)
    assert found["right"] and found["hallucinated"] == 0


def test_what_plain_would_say_is_what_plain_says(answerer, png):
    asked = ["Is there a ring in the image?", "Describe the image."]
    plain = answerer(png, asked, max_new_tokens=12)
    for one in plain:
        assert demo_vlm._plain_choices(answerer, png, one) == one.token_ids


# Drafted captions


def test_a_zoo_model_drafts_with_its_own_drafter_and_others_with_what_needs_none():
    assert demo_vlm.drafter_of("zoo:llava-scenes") == "eagle:path=zoo:llava-scenes-eagle"
    assert demo_vlm.drafter_of("zoo:lm-synth") == demo_vlm.drafter_of("llava-scenes") == "lookup"


def test_a_caption_that_drafting_changed_is_reported(answerer, png):
    plain = answerer(png, "Describe the image.", max_new_tokens=demo_vlm.CAPTION_TOKENS)
    decoder = Decoder(registry.create("draft", "lookup"))
    drafting = Answerer(answerer.model, answerer.processor, decoder)
    found = demo_vlm._drafted(drafting, png, plain)
    assert found.same and found.undrafted == plain.passes
    tokens = [t for step in found.rounds for t in (*step.accepted, step.decided)[: step.kept]]
    assert tokens == plain.token_ids and len(found.rounds) == found.passes + 1
    written = "".join(map(found.label, tokens))
    assert written == f" {plain.text}[end]"
    other = dataclasses.replace(plain, token_ids=plain.token_ids[:-1])
    assert not demo_vlm._drafted(drafting, png, other).same


def drafted(**changes):
    rounds = [Round((), (), 1, False, 1), Round((2, 3), (2,), 4, False, 2)]
    fields = {"rounds": rounds, "passes": 1, "undrafted": 2, "same": True, "label": str}
    return page.Drafted(**fields | changes)


def test_page_shows_who_wrote_each_token_of_a_drafted_caption():
    answers = [given(drafted=drafted()), given(method="vcd", drafted=drafted(passes=3))]
    text = page.page(report(*answers, draft="eagle:path=<p>"))
    checked(text)
    assert "<code>eagle:path=&lt;p&gt;</code>" in text
    assert "<b>4</b> passes of the model in place of 4" in text
    assert "<details open><summary>plain, drafted: 1 passes in place of 2</summary>" in text
    assert "<details><summary>vcd, drafted: 3 passes in place of 2</summary>" in text
    for chip in ("first", "accepted", "corrected"):
        assert text.count(f'<span class="chip {chip}">') == 2 + 1  # and the legend
    assert 'class="chip bonus"' not in text and text.count('<del class="chip">3</del>') == 2
    assert "tokens differ" not in text
    text = page.page(
        report(given(drafted=drafted(same=False)), given(method="vcd", drafted=drafted()))
    )
    assert 'class="bad">but tokens differ' in text and '<b class="bad">tokens differ' in text
    assert 'class="chip' not in page.page(report())


def test_the_table_of_five_methods_fits_a_terminal():
    names = [page.PLAIN, "vcd", "ritual", "damro", "pai"]
    note = {"note": "2 of 5 named, made up: heart, moon", "hallucinated": 2, "right": False}
    asked = [
        page.Asked(text=text, truth=truth, answers=[given(method=n, **changes) for n in names])
        for text, truth, changes in (
            ("Is there an umbrella in the image?", "Yes", {}),
            ("Describe the image.", "circle, boat, square, fish, ring", note),
        )
    ]
    part = named(page.Pictured(name="image 1", about="", png=b"", asked=asked))
    console = Console(width=80, file=io.StringIO())
    console.print(demo_vlm.table_of(part, names))
    printed = console.file.getvalue()
    assert max(map(len, printed.splitlines())) <= 80 and "\u2026" not in printed
    assert printed.count("2/5 +2") == 5 and " ".join(names) in " ".join(printed.split())


# Attention


def test_a_boost_draws_attention_to_the_image_and_the_plain_map_stays(answerer, png):
    question = "Is there a ring in the image?"
    weak, strong = (
        attention_map(answerer, png, question, registry.create("guide", f"pai:alpha={alpha}"))
        for alpha in (0.2, 2)
    )
    assert torch.equal(weak.plain, strong.plain) and weak.side == 8
    assert weak.plain.sum() < weak.edited.sum() < strong.edited.sum() < 1
    layers = [*range(8)]
    assert list(weak.layers) == layers and weak.branch == "main"


def test_attention_is_read_where_a_branch_of_a_later_stage_is_edited(answerer, png):
    guide = registry.create("guide", "conscious_gaze:threshold=0,alpha=2")
    found = attention_map(answerer, png, "Is there a ring in the image?", guide)
    assert found.branch == "edited" and found.edited.sum() > found.plain.sum()


def test_a_guide_that_edits_no_attention_has_no_map(answerer, png):
    assert attention_map(answerer, png, "What?", registry.create("guide", "vcd")) is None
    assert attention_map(answerer, png, "What?", Edited()) is None


# The page


def test_page_is_one_well_formed_file_that_fetches_nothing():
    flat = torch.full((64,), 0.01)
    look = AttentionMap(flat, 2 * flat, (0, 1), "edited")
    text = page.page(report(given(), given(method="pai", attention=look)))
    parser = checked(text)
    assert all(address.startswith("data:") for address in parser.fetched)
    assert not re.search(r"https?://|@import|url\(|src=[\"'](?!data:)", text)
    assert text.count('<rect class="look"') == 2 * 64
    assert 'fill-opacity="0.45"' in text and 'fill-opacity="0.90"' in text
    assert "Attention of pai over image 1: 128 % on the image, most at row 1, column 1 of 8" in text
    assert text.count('alt="image 1: red ring"') == text.count("alt=") == 2  # at the top and below


def test_tokens_that_changed_say_why():
    text = page.page(report())
    words = "plain would say &#39;Yes&#39;; 2 tokens left by the guide; noised differs by up to"
    assert f'aria-label="No: {words} 0.25 nats; S = 1.00"' in text
    assert text.count('role="note"') == text.count('class="changed token" tabindex="0"') == 1


def test_bars_point_to_yes_and_no_on_one_scale():
    margins = {"main": -2.0, "noised": 1.0, "guided": math.inf}
    text = page.page(report(given(margins=margins)))
    assert re.search(r'class="negative" x="115.0" y="[\d.]+" width="60.0"', text)
    assert re.search(r'class="positive" x="175.0" y="[\d.]+" width="30.0"', text)
    assert "main \u22122.00, noised +1.00, guided +\u221e" in text


def test_text_from_outside_is_escaped():
    bad = '<script>alert("1")</script>&'
    tokens = [page.Token(text=bad), page.Token(text=bad, instead=bad, distances={bad: 1.0})]
    answer = given(method=bad, tokens=tokens, note=bad, margins={bad: 1.0})
    asked = page.Asked(text=bad, truth=bad, answers=[answer])
    part = named(page.Pictured(name=bad, about=bad, png=b"", asked=[asked]), title=bad)
    text = page.page(report(answer, model=bad, sets=[part], conditions={bad: bad}))
    assert "alert" in text and '<script>alert("1")' not in text
    checked(text)


def test_headline_says_what_is_shown_and_the_lead_counts_by_set():
    one = given(method="vcd", right=False, tokens=[page.Token(text=" No")])
    captions = [given(hallucinated=0), given(method="vcd", hallucinated=0, margins={})]
    asked = [
        page.Asked(text="?", truth="Yes", answers=[given(), one]),
        page.Asked(text="!", truth="ring", answers=captions),
    ]
    pictured = page.Pictured(name="image 1", about="", png=b"", asked=asked)
    other = page.Pictured(name="image 2", about="", png=b"", asked=asked[:1])
    parts = [named(pictured), named(other, title="Images that tempt")]
    found = report(given(), one, sets=parts)
    assert page.headline(found) == "Guides change <b>2 of 3</b> answers"
    assert page.outcome(found) == (
        "Images as they come: 1 of 1 short questions right, 0 under the guides. "
        "Images that tempt: 1 of 1 short questions right, 0 under the guides."
    )
    fine = given(drafted=drafted(passes=2, undrafted=9), hallucinated=0)
    alone = report(
        sets=[
            named(
                dataclasses.replace(
                    pictured, asked=[page.Asked(text="!", truth="ring", answers=[fine])]
                )
            )
        ],
        methods=[page.PLAIN],
    )
    assert page.headline(alone).startswith('Captions in <b>1/4.5</b> of the passes, <b class="good')
    assert "under the guides" not in page.outcome(alone)
    checked(page.page(alone))


def test_changed_words_of_an_image_are_one_stop_of_the_tab_key():
    parser = checked(page.page(report(given(), given(method="vcd", tokens=[CHANGED] * 3))))
    tables = [("div", "0")] * 2
    assert parser.groups == [["0", "-1", "-1"]] and parser.stops == tables
