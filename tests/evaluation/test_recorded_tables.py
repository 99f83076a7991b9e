"""Tables of recorded rows have the cells that they had when the rows were recorded.

``tests/data/recorded`` holds rows of every task, 40 to 60 items each, decoded by models of the zoo,
with the tables that were made of them at the time (``table.md``).
"""

import gzip
import math
from pathlib import Path

import pytest

from mmdecode.evaluation.images.runs import read_images
from mmdecode.evaluation.report.layout import markdown
from mmdecode.evaluation.task import task_of
from mmdecode.runs.files import write_file
from tests.support.commands import invoke

RECORDED = Path(__file__).parents[1] / "data" / "recorded"
RESCORED = ("wer", "silence", "pope", "chair", "mme", "spatial")


@pytest.fixture
def folder(tmp_path):
    """A recorded run, unpacked as a run writes it."""

    def unpacked(task):
        for file in (RECORDED / task).iterdir():
            data = file.read_bytes()
            if file.suffix == ".gz":
                data = gzip.decompress(data)
            if file.name != "table.md":
                write_file(tmp_path / file.name.removesuffix(".gz"), data)
        return tmp_path

    return unpacked


def tables(text):
    """The tables of a Markdown page, each as a list of rows from column name to cell."""
    found, names = [], None
    for line in text.splitlines():
        if not line.startswith("|"):
            names = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if names is None:
            names = cells
            found.append([])
        elif set(line) - set("|- "):
            found[-1].append(dict(zip(names, cells, strict=True)))
    return found


def comparisons(text):
    """Lines that compare two modes."""
    return [line for line in text.splitlines() if line.startswith("- ") and " against " in line]


def holds(table, rows, alike=lambda one, other: one == other):
    """Whether a table has recorded rows one after the other, with their columns and cells."""
    return any(
        all(
            all(name in row and alike(row[name], cell) for name, cell in known.items())
            for row, known in zip(table[start:], rows, strict=False)
        )
        for start in range(len(table) - len(rows) + 1)
    )


def missing(task, text, **how):
    """Recorded tables and comparisons that a page does not have."""
    before = (RECORDED / task / "table.md").read_text()
    made = tables(text)
    assert made and tables(before)
    lost = [rows[0] for rows in tables(before) if not any(holds(t, rows, **how) for t in made)]
    return lost + [line for line in comparisons(before) if line not in comparisons(text)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("task", RESCORED)
def test_scoring_again_gives_every_recorded_cell(task, folder):
    run = folder(task)
    done = invoke("evaluate", task, "--rescore", run, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert missing(task, (run / "table.md").read_text()) == []


def test_n_best_lists_give_every_recorded_cell(folder):
    run = folder("nbest")
    options = ["--data", "ls_other", "--data", "cv", "--limit", 60, "--methods", "mbr,table"]
    options += ["--corrector", "zoo:lm-synth", "--device", "cpu"]
    done = invoke("evaluate", "nbest", *options, "--out", run, "--resume", catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert missing("nbest", (run / "table.md").read_text()) == []


def alike(one, other):
    """Whether two cells are equal, but for the last digits of numbers that a processor rounds."""
    pairs = [cell.translate(str.maketrans("[],", "   ")).split() for cell in (one, other)]
    if len(pairs[0]) != len(pairs[1]):
        return False
    for a, b in zip(*pairs, strict=True):
        if a != b and not math.isclose(float(a), float(b), rel_tol=0.02, abs_tol=2e-3):
            return False
    return True


@pytest.mark.slow
def test_images_give_every_recorded_cell(folder):
    run, task = folder("images"), task_of("images")
    given = dict(task.options) | {"model": "zoo:llamagen-scenes", "n": 40}
    given |= {"device": "cpu", "dtype": "float32"}
    report = task.open(given).report(read_images(run / "images.jsonl"))
    text = "\n".join(map(markdown, report.tables()))
    assert missing("images", text, alike=alike) == []


def test_a_changed_cell_a_lost_row_and_a_lost_comparison_are_noticed():
    text = (RECORDED / "mme" / "table.md").read_text()
    assert missing("mme", text) == []
    row = next(line for line in text.splitlines() if line.startswith("| vcd |"))
    compared = comparisons(text)[0]
    for other in (text.replace(row, row.replace("8", "9")), text.replace(row + "\n", "")):
        assert other != text and missing("mme", other)
    assert missing("mme", text.replace(compared, ""))
