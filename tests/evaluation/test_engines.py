"""Workers compute the rows of an evaluation that one process computes."""

import itertools
from pathlib import Path

import pytest

from mmdecode.errors import OptionError
from mmdecode.evaluation import evaluate
from mmdecode.evaluation.by_workers import FOLDER, TIMES, RowsFolder
from mmdecode.runs import engines
from mmdecode.runs.console import console
from mmdecode.runs.crashes import Batches
from tests.support.files import json_lines

STAND_IN = Path(__file__).with_name("stand_in_task.py").as_posix()
WORKERS = {"engine": "processes", "workers": 2}


def listed(path, count=40, **special):
    """A file of names of items, of which some do what their name says."""
    kinds = {number: kind for kind, number in special.items()}
    path.write_text(" ".join(f"{kinds.get(n, 'item')}-{'x' * n}" for n in range(count)))
    return path


def rows(folder, name="items.jsonl"):
    """Rows of a run without their times."""
    return [
        row | {name: None for name in TIMES if name in row} for row in json_lines(folder / name)
    ]


@pytest.fixture
def whole(tmp_path):
    """Rows of one process."""
    data = listed(tmp_path / "whole-data", **{"raise": 21})
    evaluate(STAND_IN, data=data, output=tmp_path / "whole")
    return rows(tmp_path / "whole")


@pytest.fixture
def at_home(monkeypatch):
    """Lets this process do what workers do, in the same files."""
    monkeypatch.setitem(engines.ENGINES, "processes", engines.ENGINES["local"])
    monkeypatch.setattr(console, "errors_only", False)


def stopped_after(count, monkeypatch):
    decode = engines.Engine.decode

    def decoded(self, job, units, meter):
        yield from itertools.islice(decode(self, job, units, meter), count)
        raise KeyboardInterrupt

    monkeypatch.setattr(engines.Engine, "decode", decoded)


def test_two_workers_write_the_rows_of_one_process(whole, tmp_path, capsys):
    data = listed(tmp_path / "data", **{"raise": 21})
    out, seen = tmp_path / "out", []
    report = evaluate(STAND_IN, data=data, output=out, progress=seen.append, **WORKERS)
    assert rows(out) == whole and len(whole) == 80
    assert len(seen) == len(report.recorded) == 80 and len(report.failures()) == 2
    assert "times are left out, since workers share the machine" in capsys.readouterr().err
    assert {row["seconds"] for row in json_lines(out / "items.jsonl")} == {None}
    assert not (out / FOLDER).exists()


@pytest.mark.slow
def test_an_item_that_ends_its_worker_fails_in_all_modes(whole, tmp_path):
    data = listed(tmp_path / "data", **{"raise": 21, "kill": 3})
    evaluate(STAND_IN, data=data, output=tmp_path / "out", **WORKERS)
    found = rows(tmp_path / "out")
    for mine, theirs in zip(found, whole, strict=True):
        if mine["id"].startswith("kill"):
            assert "2 times while it decoded this input alone" in mine["error"]
        else:
            assert mine == theirs
    failed = [(row["mode"], row["id"][:4]) for row in found if row["error"]]
    assert failed == [(mode, name) for mode in ("plain", "guided") for name in ("kill", "rais")]


def test_an_item_that_is_not_tried_again_has_a_failed_row_in_each_mode(
    at_home, tmp_path, monkeypatch
):
    monkeypatch.setattr(Batches, "problem", lambda self, name: f"{name} ends workers")
    out = tmp_path / "out"
    evaluate(STAND_IN, data=listed(tmp_path / "data", 1), output=out, **WORKERS)
    found = [(row["mode"], row["error"]) for row in rows(out)]
    assert found == [("plain", "item- ends workers"), ("guided", "item- ends workers")]


@pytest.mark.parametrize("engine", ["local", "processes"])
def test_rows_of_workers_that_were_stopped_are_kept(
    whole, at_home, tmp_path, monkeypatch, capsys, engine
):
    data = listed(tmp_path / "data", **{"raise": 21})
    out, seen = tmp_path / "out", []
    with monkeypatch.context() as patch:
        stopped_after(25, patch)
        with pytest.raises(KeyboardInterrupt):
            evaluate(STAND_IN, data=data, output=out, **WORKERS)
    assert "stopped: " in capsys.readouterr().err and (out / FOLDER).exists()
    how = {"data": data, "output": out, "progress": seen.append, "resume": True}
    evaluate(STAND_IN, **how, **(WORKERS if engine == "processes" else {}))
    assert rows(out) == whole and not (out / FOLDER).exists()
    assert 25 < len(seen) < 40  # of the last items, and of the one that failed


def test_workers_go_on_with_the_rows_of_one_process(whole, at_home, tmp_path, monkeypatch):
    added, add = [], RowsFolder.add
    monkeypatch.setattr(RowsFolder, "add", lambda self, row: added.append(row) or add(self, row))
    data = listed(tmp_path / "data", **{"raise": 21})
    out, seen = tmp_path / "out", []
    evaluate(STAND_IN, data=data, output=out)
    lines = (out / "items.jsonl").read_text().splitlines(keepends=True)
    del lines[50:], lines[10:13]
    (out / "items.jsonl").write_text("".join(lines))
    evaluate(STAND_IN, data=data, output=out, resume=True, progress=seen.append, **WORKERS)
    assert rows(out) == whole
    assert len(seen) == 80 - len(lines) + 1  # and the one that failed
    assert len(added) == 30  # the first ten have the rows of both modes
    times = [row["seconds"] for row in json_lines(out / "items.jsonl")]
    assert (times[0], times[11], times[79]) == (1.5, None, None)


def test_a_changed_input_file_is_read_again_by_whichever_engine(at_home, tmp_path, monkeypatch):
    data, files, out = listed(tmp_path / "data", 6), tmp_path / "files", tmp_path / "out"
    files.mkdir()
    for name in data.read_text().split():
        (files / name).write_text("before")
    how = {"data": data, "images": files, "output": out}
    with monkeypatch.context() as patch:
        stopped_after(4, patch)
        with pytest.raises(KeyboardInterrupt):
            evaluate(STAND_IN, **how, **WORKERS)
    (files / "item-x").write_text("after")
    seen = []
    evaluate(STAND_IN, **how, resume=True, progress=seen.append)
    assert {row.id for row in seen} == {"item-x", "item-xxxx", "item-xxxxx"}
    (files / "item-").write_text("after")
    (files / "item-xxxx").write_text("after")
    seen.clear()
    evaluate(STAND_IN, **how, resume=True, progress=seen.append, **WORKERS)
    assert {row.id for row in seen} == {"item-", "item-xxxx"}
    assert len(rows(out)) == 12


def test_overwriting_removes_rows_of_workers(at_home, tmp_path, monkeypatch):
    data, out = listed(tmp_path / "data", 6), tmp_path / "out"
    with monkeypatch.context() as patch:
        stopped_after(4, patch)
        with pytest.raises(KeyboardInterrupt):
            evaluate(STAND_IN, data=data, output=out, **WORKERS)
    seen = []
    with pytest.raises(OptionError, match="holds an earlier report"):
        evaluate(STAND_IN, data=data, output=out)
    evaluate(STAND_IN, data=data, output=out, overwrite=True, progress=seen.append)
    assert len(seen) == 12 and not (out / FOLDER).exists()


def test_workers_without_a_folder_are_refused(tmp_path):
    data = listed(tmp_path / "data", 1)
    with pytest.raises(OptionError, match="--engine processes writes rows to a folder; give --out"):
        evaluate(STAND_IN, data=data, **WORKERS)
    with pytest.raises(OptionError, match="--workers does nothing with --engine local"):
        evaluate(STAND_IN, data=data, workers=2)


MODELS = {
    "pope": (
        "items.jsonl",
        {"model": "zoo:llava-scenes", "data": "zoo", "limit": 12, "guide": "vcd", "seeds": 2}
        | {"prompt_cache": 0},
    ),
    "wer": (
        "samples.jsonl",
        {"model": "zoo:whisper-synth", "data": "zoo:speech-test", "limit": 20, "draft": "lookup"},
    ),
    "images": (
        "images.jsonl",
        {"model": "zoo:llamagen-scenes", "n": 5, "modes": "relaxed", "permutations": 99}
        | {"real": "none"},
    ),
    "nbest": ("rows.jsonl", {"data": "cv", "methods": "mbr,lm:zoo:lm-synth", "limit": 30}),
}


@pytest.mark.slow
@pytest.mark.parametrize("task", MODELS)
def test_rows_of_models_are_those_of_one_process(task, tmp_path):
    name, how = MODELS[task]
    how = how | {"device": "cpu", "batch_size": 2, "resamples": 20}
    report = evaluate(task, **how, output=tmp_path / "one")
    other = evaluate(task, **how, output=tmp_path / "two", **WORKERS)
    found, known = rows(tmp_path / "two", name), rows(tmp_path / "one", name)
    assert len(found) == len(known) >= 15
    for mine, theirs in zip(found, known, strict=True):
        for key in ("totals", "margin", "main_margin"):  # batches and cached prompts are others
            if theirs.get(key) is not None:
                assert mine.pop(key) == pytest.approx(theirs.pop(key), rel=1e-6, abs=1e-5)
        assert mine == theirs
    assert [len(table) for table in other.tables()] == [len(table) for table in report.tables()]
    shown = " ".join(name for table in other.tables() for row in table for name in row)
    assert not {"s/answer", "RTFx", "s/image"} & set(shown.split())
    assert (tmp_path / "two" / "report.html").exists()
