"""Benchmarks are tried on toys or on a clip; pages show what their result files hold."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mmdecode import registry

ROOT = Path(__file__).parents[1]


@pytest.fixture
def drafters(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import drafters

    return drafters


def run(*words, script="step_speed.py"):
    command = [sys.executable, str(ROOT / "benchmarks" / script), *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_step_speed_measures_toys_and_finds_the_ids_of_generate(tmp_path):
    words = ["--device", "cpu", "--dtype", "float32", "--scale", "tiny", "--repeats", "1"]
    run(*words, "--out", str(tmp_path))
    (path,) = tmp_path.glob("step-cpu-*.json")
    shapes = json.loads(path.read_text())["shapes"]
    assert [shape["shape"] for shape in shapes] == ["whisper", "llama"]
    for shape in shapes:
        rows = {row["engine"]: row for row in shape["rows"]}
        assert rows["undrafted"]["same_ids_as_generate"]
        drafted = [row for name, row in rows.items() if name.startswith("free drafter")]
        lengths = [row["tokens_per_pass"] for row in drafted]
        assert len(lengths) == 3 and lengths == sorted(lengths)
        assert shape["floor_ms"] > 0


def test_step_speed_says_that_it_was_not_run(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "not run" in run()


def test_drafters_are_measured_on_a_clip(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- tables -->\nold\n<!-- end of tables -->\nbehind\n")
    words = ["--limit", "1", "--repeats", "1", "--warm", "0", "--out", str(tmp_path)]
    run(*words, "--page", str(page), script="drafters.py")
    (path,) = tmp_path.glob("drafters-cpu-*.json")
    result = json.loads(path.read_text())
    cases = {
        case["case"]: {row["drafter"]: row for row in case["rows"]} for case in result["cases"]
    }
    for rows in cases.values():
        assert all(row["identical"] in (True, None) for row in rows.values())
        assert rows["undrafted"]["tokens_per_pass"] == 1
    greedy = cases["greedy"]
    assert greedy["assistant: the model itself"]["accepted_share"] == 1
    assert greedy["medusa, block, 12 nodes"]["tokens_per_pass"] > 2
    judged = {name for name, row in cases["sampled"].items() if row["identical"] is None}
    assert judged and all(re.search("rejection|membership", name) for name in judged)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("behind\n") and "old" not in text
    assert path.name in text and "| lookup |" in text


def test_the_page_of_drafters_shows_its_result_file(drafters):
    page = (ROOT / "docs" / "drafters.md").read_text()
    shown = re.search("<!-- tables -->\n(.*)\n<!-- end of tables -->", page, re.DOTALL)[1]
    name = re.search("benchmarks/results/([\\w.-]+json)", shown)[1]
    result = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    assert shown == drafters.tables(result, name)
    rows = [row for case in result["cases"] for row in case["rows"]]
    assert False not in [row["identical"] for row in rows]
    registered = {e.name for e in registry.describe("draft") if not e.plugin}
    assert registered <= {re.match("\\w+", row["drafter"])[0] for row in rows}
    assert registered <= set(re.findall("^\\| `(\\w+)` ", page, re.MULTILINE))


def test_gains_are_per_token_and_compared_clip_by_clip(drafters):
    rng = np.random.default_rng(1)
    tokens, pace = rng.integers(5, 50, 40), rng.uniform(0.5, 5, 40)
    base = drafters.Cost(tokens * pace, tokens)
    value, low, high = drafters.Cost(tokens * pace / 2, tokens).over(base)
    assert (value, low, high) == (2, 2, 2)  # clips differ by far more than the ways do
    longer = drafters.Cost(tokens * pace * 3, tokens * 3)
    assert longer.over(base) == (1, 1, 1)
    noisy = drafters.Cost(tokens * pace * rng.uniform(0.4, 0.6, 40), tokens)
    value, low, high = noisy.over(base)
    assert 1.8 < low < value < high < 2.2
    few = drafters.Cost(np.array([1.0, 4.0]), np.array([1, 1]))
    assert drafters.Cost(np.array([1.0, 2.0]), np.array([1, 1])).over(few) == (1.667, 1, 2)
