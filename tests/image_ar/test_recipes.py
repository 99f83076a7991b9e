"""The scripts of ``image_ar/`` run as their page says."""

import re
from pathlib import Path

import pytest

from tests.support.files import contents
from tests.support.scripts import run_script

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(monkeypatch, capsys, classes):
    """Runs a script as if from the command line: its exit code, and what it prints."""

    def call(script, *words):
        given = [*words, "--model", classes, "--device", "cpu"]
        done = run_script(monkeypatch, capsys, ROOT / "image_ar" / script, *given)
        return done.code, done.out

    return call


@pytest.mark.recipe
def test_a_file_becomes_a_folder(run, tmp_path):
    (tmp_path / "wanted.txt").write_text("ring\n\nstar\n")
    code, output = run("draw_folder.py", tmp_path / "wanted.txt", tmp_path / "out", "-n", 2)
    assert code == 0 and [line.split(": ")[1].split(",")[0] for line in output.splitlines()] == [
        "ring",
        "ring",
        "star",
        "star",
    ]
    assert len(list((tmp_path / "out").glob("*.png"))) == 4
    whole = contents(tmp_path / "out")
    (tmp_path / "out" / "results.jsonl").write_bytes(whole["results.jsonl"][:300])  # killed
    words = ("draw_folder.py", tmp_path / "wanted.txt", tmp_path / "out", "-n", 2)
    assert run(*words, "--batch-size", 1, "--resume")[0] == 0
    assert contents(tmp_path / "out") == whole


@pytest.mark.recipe
def test_modes_are_compared(run):
    code, output = run(
        "compare_modes.py", "ring", "star", "-n", 3, "--batch-size", 6, "--guidance", 2
    )
    assert code == 0
    rows = {row[1]: row for row in (re.split(r" *\| *", line) for line in output.splitlines()[2:])}
    assert list(rows) == ["ar", "exact", "fast", "relaxed"]
    assert rows["ar"][3] == "1.00" and float(rows["exact"][3]) > 1
    assert rows["exact"][5] == "6 of 6" and rows["exact"][6] == rows["ar"][6]
    assert [row[2] for row in rows.values()] == ["exact"] * 3 + ["heuristic"]


@pytest.mark.recipe
def test_images_are_completed(run, tmp_path):
    code, output = run("in_painting.py", "ring", "star", "--out", tmp_path)
    assert code == 0 and output.endswith("continued as it was: True\n")
    assert "10 codes given, continued" in output and "16 codes given, locally constrained" in output
