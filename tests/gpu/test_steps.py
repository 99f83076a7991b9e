"""`make gpu` and `make gpu-bench`: what is done is not done again, and every step runs on toys."""

import importlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("on_gpu")


@pytest.fixture
def work(on_gpu, tmp_path):
    """Does steps; returns the exit code."""

    def work(*steps, budget=60.0, keep=False, anyway=False):
        return on_gpu.work(steps, tmp_path, budget, keep, anyway)

    return work


def counted(on_gpu, tmp_path, name, code=0, part="toys", seconds=30, wait=0):
    """A step that notes each run of it."""
    program = (
        f"import sys, time; open({str(tmp_path / name)!r}, 'a').write('x'); "
        f"time.sleep({wait}); sys.exit({code})"
    )
    return on_gpu.Step(name, part, ("-c", program), seconds)


def runs(tmp_path, name):
    file = tmp_path / name
    return len(file.read_text()) if file.exists() else 0


def test_a_step_is_done_once_until_the_library_changes(on_gpu, work, tmp_path, monkeypatch):
    first, second = (counted(on_gpu, tmp_path, name) for name in "ab")
    assert work(first) == 0
    assert work(first, second) == 0
    assert [runs(tmp_path, name) for name in "ab"] == [1, 1]
    monkeypatch.setattr(on_gpu, "digest", lambda step: "another")
    assert work(first, second, keep=True) == 0
    assert [runs(tmp_path, name) for name in "ab"] == [1, 1]
    assert work(first) == 0
    assert [runs(tmp_path, name) for name in "ab"] == [2, 1]
    other = counted(on_gpu, tmp_path, "a", wait=0.001)
    assert work(other) == 0 and runs(tmp_path, "a") == 3, "another command"


def test_a_failed_step_is_tried_again_and_nothing_is_measured_after_a_failed_test(
    on_gpu, work, tmp_path, capsys
):
    test = counted(on_gpu, tmp_path, "test", code=4, part=on_gpu.TESTS)
    later = counted(on_gpu, tmp_path, "later", part=on_gpu.TESTS)
    bench = counted(on_gpu, tmp_path, "bench")
    assert work(test, later, bench) == 1
    assert [runs(tmp_path, name) for name in ("test", "later", "bench")] == [1, 1, 0]
    output = capsys.readouterr().out
    assert "failed with code 4" in output and "not begun: bench" in output
    assert work(test, later, bench, anyway=True) == 1
    assert [runs(tmp_path, name) for name in ("test", "later", "bench")] == [2, 1, 1]


def test_a_step_ends_after_its_time_with_all_that_it_started(on_gpu, work, tmp_path, capsys):
    child = f"import time; time.sleep(2); open({str(tmp_path / 'alive')!r}, 'w')"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    began = time.monotonic()
    assert work(on_gpu.Step("slow", "toys", ("-c", program), 1)) == 1
    assert time.monotonic() - began < 2 and "stopped after" in capsys.readouterr().out
    time.sleep(1.5)
    assert not (tmp_path / "alive").exists()


def test_a_call_ends_with_its_budget_and_the_next_one_goes_on(on_gpu, work, tmp_path, capsys):
    steps = [counted(on_gpu, tmp_path, name, wait=0.2) for name in "ab"]
    assert work(*steps, budget=0.15) == 1, "the first one has no more time than the call"
    assert runs(tmp_path, "b") == 0 and "not begun: b" in capsys.readouterr().out
    assert work(*steps, budget=0.0) == 3
    assert work(*steps) == 0


def test_parts_fit_their_time_and_come_after_the_tests(on_gpu):
    bench = on_gpu.steps_of("gpu-bench", "cuda", False, Path("out"))
    assert {step.part for step in bench} >= {"passes", "steps", "speech", "images", "vlm"}
    assert not [step.name for step in bench if "--quick" in step.words]
    gpu = [step.part for step in on_gpu.steps_of("gpu", "cuda", False, Path("out"))]
    assert set(gpu) == {on_gpu.TESTS, "toys"}
    assert gpu.index("toys") == gpu.count(on_gpu.TESTS), "tests come first"
    assert all(step.seconds <= 60 * on_gpu.BUDGET for step in bench)
    files = {file.stem for file in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert files == {*on_gpu.FEW, "test_steps"}


def test_without_a_gpu_nothing_is_noted_as_done(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "on_gpu.py"), "gpu"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2 and "no CUDA device" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_every_step_of_both_targets_runs_on_toys(tmp_path):
    words = ["QUICK=1", "DEVICE=cpu", f"GPU_OUT={tmp_path}", f"PYTHON={sys.executable}"]
    # the machine may be busy: a call goes on where the one before it ended
    for _ in range(2):
        done = subprocess.run(["make", "gpu", *words], cwd=ROOT, capture_output=True, text=True)
        if "not begun" not in done.stdout:
            break
    assert done.returncode == 0, done.stdout
    done = subprocess.run(["make", "gpu-bench", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    output = done.stdout.splitlines()
    assert sum(line.endswith(": done before") for line in output) >= 10, "they share their toys"
    tested = (tmp_path / "steps-cpu" / "test_few.log").read_text()
    assert int(tested.rpartition(" passed")[0].split()[-1]) >= 6 and "failed" not in tested
    for name in ("passes", "long"):
        [file] = (tmp_path / "toys").glob(f"{name}-llama-7b-cpu-*.json")
        rows = json.loads(file.read_text())["rows"]
        assert {(row["nodes"], row["flex"]) for row in rows} == {
            (nodes, flex) for nodes in (0, 8, 63) for flex in (False, True)
        }
    [file] = (tmp_path / "toys").glob("batch-llama-7b-cpu-*.json")
    assert all(row["gain"] > 0 for row in json.loads(file.read_text())["rows"])
    found = sorted((tmp_path / "toys").glob("step-*.json"))
    assert len(found) == 4
    for file in found:
        [shape] = json.loads(file.read_text())["shapes"]
        assert {bar["bar"] for bar in shape["bars"]} == {"over generate", "kept"}
        rows = {row["engine"]: row for row in shape["rows"]}
        assert rows["undrafted, compiled"]["same_ids_as_generate"]
