"""The scripts that need a large GPU are tried on toys."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*words):
    command = [sys.executable, str(ROOT / "benchmarks" / "step_speed.py"), *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_step_speed_measures_toys_and_finds_the_ids_of_generate(tmp_path):
    words = ["--device", "cpu", "--dtype", "float32", "--tiny", "--repeats", "1"]
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
