"""``mmdecode demo`` from end to end, and the page it writes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mmdecode.asr.results import Word
from mmdecode.demo.speech import clips_page as page
from mmdecode.demo.speech import command as demo_speech
from mmdecode.engine.trace import Round
from mmdecode.evaluation.speech.wer import align_as_written, wer
from mmdecode.runs import conditions
from mmdecode.runs.files import is_own
from mmdecode.zoo.speech import speech_test
from tests.support.pages import checked

ROOT = Path(__file__).parents[2]
TEXT = {1: " six", 2: " spoons", 3: "ful", 4: " of", 5: " <b>", 6: "0.40 s", 7: "end"}


def item(**changes):
    fields = {
        "name": "clip_00",
        "audio": speech_test()[0].path,
        "about": "voice en, 4.2 s",
        "reference": "six spoons of sugar",
        "hypothesis": "six spoonful of brown",
        "noisy": None,
        "windows": [[Round((), (), 6, True, 1), Round((1, 2, 3), (1, 2), 4, False, 3)]],
        "histogram": [0, 0, 1],
        "tokens": 4,
        "plain_passes": 3,
        "passes": 1,
        "tokens_per_pass": 3.0,
        "plain_s": 0.03,
        "drafted_s": 0.02,
        "plain_total_s": 0.04,
        "drafted_total_s": 0.03,
        "identical": True,
        "words": [
            Word(text=" six", start_s=0.1, end_s=0.4, confidence=0.9),
            Word(text=" <b>", start_s=0.4, end_s=0.6, confidence=0.4),
        ],
    }
    return page.Item(**{**fields, **changes})


def report(*items, **changes):
    items = items or (item(),)
    fields = {
        "model": "zoo:m",
        "draft": "zoo:m-medusa",
        "items": items,
        "ratio": (1.5, 1.4, 1.6),
        "clips": len(items),
        "wer": {"clean": wer(["six spoons of sugar"], ["six spoonful of brown"])},
        "conditions": {"device": "cpu", "threads": "1 thread", "load": "load average 0.1"},
        "label": TEXT.__getitem__,
    }
    return page.Report(**{**fields, **changes})


# The command


def test_demo_writes_a_page_and_says_where(tmp_path):
    words = ["demo", "speech", "--limit", "2", "--repeats", "1", "--json"]
    words += ["--model", "zoo:whisper-synth"]  # which is not asked to hear people
    done = subprocess.run(
        [sys.executable, "-m", "mmdecode.cli.app", *words, "--out", str(tmp_path / "demo")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"},
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert result["identical"] is True and result["different"] == [] and result["real"] is None
    assert result["clips"] == 2 and set(result["wer"]) == {"clean", "noisy"}
    assert result["tokens_per_pass"] >= 1 and result["passes"] <= result["plain_passes"]
    assert set(result["conditions"]) >= {"device", "threads", "load", "versions"}
    assert result["times"]["clips"]["ratio"] > 0
    shown = Path(result["files"]["report.html"])
    assert shown == tmp_path / "demo" / "report.html" and str(shown) in done.stderr
    parser = checked(shown.read_text())
    assert parser.audio == 2 and {"clip_00", "clip_01"} <= parser.ids
    assert all(address.startswith("data:") for address in parser.fetched)
    rows = Path(result["files"]["transcripts.jsonl"]).read_text().splitlines()
    assert [json.loads(row)["set"] for row in rows] == ["noisy", "clean"] * 2
    subtitles = Path(result["files"]["subtitles"])
    assert sorted(path.name for path in subtitles.glob("*.*t")) == ["clip_00.srt", "clip_01.srt"]
    written = [p for p in (tmp_path / "demo").rglob("*") if p.is_file() and p.name[0] != "."]
    assert len(written) >= 4 and all(map(is_own, written)), "a second demo needs no flag"
    starts = [float(at) for at in re.findall(r'data-start="([\d.]+)"', shown.read_text())]
    assert len(starts) == sum(len(json.loads(row)["text"].split()) for row in rows[1::2])


# The page


def test_page_is_one_well_formed_file_with_a_player_per_clip():
    parser = checked(page.page(report(item(), item(name="clip_01"))))
    assert parser.audio == 2
    assert parser.fetched and all(address.startswith("data:") for address in parser.fetched)


def test_page_fetches_nothing():
    text = page.page(report())
    assert not re.search(r"https?://|@import|url\(|src=[\"'](?!data:)", text)


def test_text_from_outside_is_escaped():
    bad = '<script>alert("1")</script>&'
    text = page.page(
        report(
            item(reference=bad, hypothesis=bad, noisy=bad, about=bad),
            model=bad,
            draft=bad,
            conditions={bad: bad},
            label=lambda token: bad,
        )
    )
    assert "alert" in text and '<script>alert("1")' not in text
    checked(text)


def test_words_can_be_clicked_and_those_of_low_confidence_are_marked():
    text = page.page(report(item()))
    times = 'data-start="0.10" data-end="0.40" aria-label="six: 0.10 s, 90 %"'
    assert f'<button class="word" tabindex="0" {times}>six' in text
    assert 'class="word doubt" tabindex="-1" data-start="0.40"' in text and "&lt;b&gt;" in text


def test_words_of_a_clip_are_one_stop_of_the_tab_key_and_players_say_what_they_play():
    text = page.page(report(item(), item(name='clip "2"')))
    parser = checked(text)
    words = ["0"] + ["-1"] * (len(item().words) - 1)
    assert [group for group in parser.groups if len(group) == len(words)].count(words) >= 2
    tables = [("div", "0")] * 2
    assert parser.stops == [*[("audio", "0")] * 2, *tables]
    assert 'aria-label="words of clip &#34;2&#34;"' in text
    assert 'aria-label="recording clip &#34;2&#34;"' in text
    assert "ArrowRight" in text  # what the group is for


def test_headline_says_when_tokens_differ_and_when_drafting_is_slower():
    good, bad = page.page(report()), page.page(report(item(identical=False), ratio=(0.5, 0.4, 0.6)))
    assert "1.50 times as fast" in good and "every token is the same" in good
    assert "2.00 times slower" in bad and "but 1 of 1 texts differ" in bad


def test_word_errors_are_marked_as_they_are_counted():
    reference, hypothesis = "add the two red cakes", "add two blue cakes please"
    steps = align_as_written(reference, hypothesis)
    kinds = ["equal", "delete", "equal", "substitute", "equal", "insert"]
    assert [step.kind for step in steps] == kinds
    score = wer([reference], [hypothesis])
    assert score.substitutions == score.deletions == score.insertions == 1
    shown = page.page(report(item(reference=reference, hypothesis=hypothesis)))
    assert '<span class="substitute">blue<del>red</del></span>' in shown
    assert (
        '<del class="delete">the</del>' in shown and '<span class="insert">please</span>' in shown
    )


@pytest.mark.parametrize(
    ("before", "after", "busy"),
    [(0.1, 2.3, False), (None, None, False), (2.0, 3.0, False), (2.1, 2.1, True), (0.1, 3.1, True)],
)
def test_times_of_a_machine_at_work_are_called_not_comparable(before, after, busy, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    found = conditions.load_note(*(None if one is None else str(one) for one in (before, after)))
    assert found.startswith("times are not comparable: the load average of") == busy
    assert bool(found) == busy and ("exceeds the 2 cores" in found) == busy


def test_the_table_of_times_says_that_the_machine_was_at_work(monkeypatch, capsys):
    loads = iter(("0.1", "9.0"))
    monkeypatch.setattr(conditions, "load_average", lambda: next(loads))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    _, synthetic, _ = demo_speech._parts("zoo:whisper-synth", None, "cpu", "float32")
    found = demo_speech._conditions(synthetic, 1, conditions.load_average())
    assert found["load"] == "load average 0.1 before, 9.0 after"
    times = {"plain_s": 2, "drafted_s": 1, "plain_total_s": 3, "drafted_total_s": 2}
    times |= {"ratio": 2.0, "ratio_total": 1.5}
    summary = {
        "plain_passes": 3,
        "passes": 1,
        "times": {"clips": times},
        "ratio_interval": (1, 2),
    }
    demo_speech._show(report(conditions=found), summary)
    printed = " ".join(capsys.readouterr().err.split())
    assert "1.00 to 2.00; times are not comparable: the load average of 9.0" in printed


def test_words_show_as_written_unless_the_normaliser_joined_them():
    assert [step.hypothesis for step in align_as_written("Add six.", "Add six.")] == ["Add", "six."]
    joined = align_as_written("twenty three cakes", "Twenty three cakes.")
    assert [(step.reference, step.hypothesis) for step in joined] == [
        ("23", "23"),
        ("cakes", "cakes."),
    ]


def test_an_empty_reference_or_hypothesis_is_shown():
    assert [step.kind for step in align_as_written("", "a word")] == ["insert", "insert"]
    assert [step.kind for step in align_as_written("a word", "")] == ["delete", "delete"]
    checked(page.page(report(item(hypothesis="", noisy=""))))


@pytest.mark.parametrize(
    ("step", "committed", "rejected"),
    [
        (
            Round((1, 2, 3), (1, 2), 4, False, 3),
            [(1, "accepted"), (2, "accepted"), (4, "corrected")],
            (3,),
        ),
        (Round((1, 2), (1, 2), 4, True, 3), [(1, "accepted"), (2, "accepted"), (4, "bonus")], ()),
        (Round((1, 2), (3,), 4, False, 2), [(3, "other"), (4, "corrected")], (1, 2)),
        (Round((1, 2), (), 4, False, 1), [(4, "corrected")], (1, 2)),
        (Round((), (), 4, False, 1), [(4, "corrected")], ()),
        (Round((), (), 4, True, 1), [(4, "corrected")], ()),
        (Round((1, 7, 3), (1, 7), 4, False, 2), [(1, "accepted"), (7, "accepted")], ()),
    ],
    ids=[
        "rejection",
        "all accepted",
        "second guess",
        "none accepted",
        "no draft",
        "empty draft",
        "end inside",
    ],
)
def test_every_token_has_its_origin(step, committed, rejected):
    first, found = page.passes([Round((), (), 6, True, 1), step])
    assert first.committed == ((6, "first"),)
    assert list(found.committed) == committed and found.rejected == rejected
