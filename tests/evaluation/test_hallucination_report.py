"""Verdicts of the report on hallucination, on answers whose cause is known."""

import re
from pathlib import Path

import numpy as np
import pytest

from mmdecode.evaluation import CaptionReport, YesNoReport
from mmdecode.evaluation.vision.items import CaptionItem, YesNoItem
from mmdecode.evaluation.vision.modes import modes_of
from mmdecode.evaluation.vision.tasks.chair import Vocabulary

ROOT = Path(__file__).parents[2]
SPLITS = ("random", "popular", "adversarial")


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import hallucination_tables

    return hallucination_tables


def pope(margins_of, guides=("vcd", "icd", "pai", "dola")):
    """A summary of answers; ``margins_of`` are functions of right answers and plain margins."""
    rng = np.random.default_rng(0)
    right = np.arange(600) % 2 == 0
    plain = rng.normal(np.where(right, -0.7, -2.3), 1)  # says no far too often
    modes = modes_of(guides, seeds=[0, 1])
    items = []
    for mode in modes:
        for seed in mode.seeds or (None,):
            sampled = plain + rng.normal(0, 2, len(plain)) * bool(mode.seeds)
            margins = margins_of.get(mode.name, lambda right, plain: plain)(right, sampled)
            items += [
                YesNoItem(
                    id=str(i),
                    image=f"{i}.png",
                    question="?",
                    target="yes" if right[i] else "no",
                    sets=(SPLITS[i % 3],),
                    mode=mode.name,
                    seed=seed,
                    output="Yes" if margins[i] > 0 else "No",
                    margin=float(margins[i]),
                )
                for i in range(len(plain))
            ]
    return YesNoReport(
        items,
        task="pope",
        resamples=300,
        against={mode.name: mode.against for mode in modes},
        controls=[mode.name for mode in modes if mode.control],
    ).summary


@pytest.fixture(scope="module")
def greedy():
    return pope(
        {
            "vcd": lambda right, plain: plain + np.where(right, 3, -3),
            "icd": lambda right, plain: plain + 1.5,
            "pai": lambda right, plain: plain - np.where(right, 1, -1),
        }
    )


def test_better_seeing_helps_and_saying_yes_does_not(tables, greedy):
    assert tables.greedy_verdict(greedy, "vcd") == "**helps** (random, popular, adversarial)"
    assert tables.greedy_verdict(greedy, "icd") == "beats greedy, not the shift"
    assert tables.greedy_verdict(greedy, "pai") == "hurts"
    assert tables.greedy_verdict(greedy, "dola") == "none shown"


def test_sampling_is_judged_by_its_own_controls(tables):
    def certain(right, sampled):
        return np.where(right, 5.0, -5.0)

    def rather(right, sampled):
        return sampled + np.where(right, 1.2, -1.2)

    cut = "plausible:beta=0.1, sampled"
    alone = pope({"vcd, sampled": certain}, ["vcd"])
    assert tables.sampled_verdict(alone, "vcd, sampled").startswith("**helps** (random, popular")
    assert "greedy" not in tables.sampled_verdict(alone, "vcd, sampled")
    both = pope({"vcd, sampled": certain, cut: certain}, ["vcd"])
    assert tables.sampled_verdict(both, "vcd, sampled") == "beats sampling, not its controls"
    assert tables.rivals(both, "vcd, sampled") == ["sampled", cut]
    some = pope({"vcd, sampled": rather, "greedy": certain}, ["vcd"])
    assert tables.sampled_verdict(some, "vcd, sampled").endswith("not greedy's shift")
    none = pope({"vcd, sampled": lambda right, sampled: -sampled}, ["vcd"])
    assert tables.sampled_verdict(none, "vcd, sampled") == "hurts"


def test_a_table_has_every_mode_that_was_run(tables, greedy):
    shown = tables.pope_table(greedy)
    assert re.findall("^\\| `([\\w:.=]+)`", shown, re.MULTILINE) == [
        *("greedy", "prompt_bias", "near_ties", "vcd", "icd", "pai", "dola")
    ]
    table = tables.sampled_table(greedy)
    named = set(re.findall("^\\| `([^`]+)`", table, re.MULTILINE))
    assert named == {"sampled", "plausible:beta=0.1", "vcd", "icd", "pai", "dola"}


def captions(made):
    """A summary of captions; each mode says the same words of every image, or a list of them."""
    texts_by_mode = {"greedy": ["cat and dog and cup and hat"] * 40, **made}
    items = [
        CaptionItem(id=str(i), image=f"{i}.png", objects=("cat", "dog"), mode=mode, output=text)
        for mode, texts in texts_by_mode.items()
        for i, text in enumerate(texts)
    ]
    words = Vocabulary(dict.fromkeys(("cat", "dog", "cup", "hat"), ()))
    return CaptionReport(items, vocabulary=words, resamples=2_000).summary


def test_captions_are_judged_at_equal_length(tables):
    summary = captions(
        {
            "truer": ["cat and dog and dog and cat"] * 20 + ["cat and dog and cup and dog"] * 20,
            "shorter": ["cat and dog"] * 40,
            "silent": ["a and a and a and a"] * 39 + ["cat and a and a and a"],
            "wilder": ["cat and hat and cup and hat"] * 40,
            "luckier": ["cat and dog and dog and hat", *["cat and dog and cup and hat"] * 39],
            "narrower": ["cat and a and cat and a", *["cat and dog and cup and dog"] * 39],
        }
    )
    assert tables.caption_verdicts(summary) == {
        "truer": "**makes up less**",
        "shorter": "none shown",
        "silent": "makes up less, finds less",
        "wilder": "makes up more, finds less",
        "luckier": "none shown",
        "narrower": "**makes up less**",  # one object that is missed is not surely fewer
    }


def test_the_page_shows_the_results(tables):
    text = (ROOT / "docs" / "hallucination.md").read_text()
    shown = re.search("<!-- tables -->\n(.*)\n<!-- end of tables -->", text, re.DOTALL)
    found = tables.read(ROOT / "benchmarks" / "results" / "hallucination")
    assert shown and shown[1] == tables.tables(found)
