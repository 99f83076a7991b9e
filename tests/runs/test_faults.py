"""Kills of workers, of runs and of Ray's own processes, see `tests.runs.faults`."""

import json
import subprocess
import sys

import pytest

COUNTS = {"kills of workers": 30, "kills of runs": 10}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["processes", "ray"])
def test_kills_lose_nothing_and_double_nothing(engine, tmp_path):
    if engine == "ray":
        pytest.importorskip("ray.data")
    words = ["--engine", engine, "--kills", "30", "--runs", "10", "--items", "300"]
    words += ["--seconds", "0.2", "--pause", "0.5"]
    command = [sys.executable, "-m", "tests.runs.faults", str(tmp_path), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name: found[name] for name in COUNTS} == COUNTS
    assert engine != "ray" or found["kills of the raylet"] == 2
