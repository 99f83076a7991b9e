"""`evaluate` in Python does what the command does."""

import json
import typing
from pathlib import Path

import pytest

from mmdecode.cli.evaluate import OPTIONS
from mmdecode.errors import OptionError, UnknownNameError
from mmdecode.evaluation import YesNoReport, evaluate
from mmdecode.evaluation.runner import LISTS, PATHS
from tests.support.commands import invoke

ASKED = {"data": "zoo", "part": "development", "limit": 6, "resamples": 50, "device": "cpu"}
VARYING = {"mean_seconds", "load_average"}


def without_times(found):
    if isinstance(found, dict):
        return {n: without_times(v) for n, v in found.items() if n not in VARYING}
    return [without_times(one) for one in found] if isinstance(found, list) else found


def test_the_report_is_that_of_the_command_and_its_folder_is_continued_by_either(tmp_path):
    out, rows = tmp_path / "run", []
    how = {"model": "zoo:llava-scenes", "guide": "vcd", "sample": False, **ASKED}
    report = evaluate("pope", **how, output=str(out), progress=rows.append)
    assert isinstance(report, YesNoReport) and len(rows) == len(report.recorded) == 24
    words = ["--model", "zoo:llava-scenes", "--guide", "vcd", "--greedy", "--data", "zoo"]
    words += ["--part", "development", "--limit", 6, "--resamples", 50, "--device", "cpu"]
    done = invoke("evaluate", "pope", *words, "--json")
    found = json.loads(done.stdout)
    del found["failures"], found["files"]
    known = json.loads(json.dumps(report.summary, default=str))
    assert without_times(known) == without_times(found)
    written = (out / "items.jsonl").read_bytes()
    again = evaluate("pope", **how, output=out, resume=True, progress=rows.append)
    assert len(rows) == len(report.recorded) and again.table() == report.table()
    assert (out / "items.jsonl").read_bytes() == written
    scored = evaluate("pope", rescore=out, resamples=50)
    assert scored.verdict() == report.verdict()
    with pytest.raises(OptionError, match="holds an earlier report"):
        evaluate("pope", **how, output=out)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("poppe", {}, "did you mean 'pope'"),
        ("pope", {"guides": "vcd"}, "option of pope.*'guides'.*did you mean 'guide'"),
        ("pope", {"data": "zoo"}, "no model"),
        ("pope", {"data": "zoo", "model": object()}, "model is a object; expected a folder"),
        ("wer", {"model": "x", "rescore": "y"}, "expected one of --model, --hypotheses and"),
        ("pope", {"model": "x", "data": "zoo", "resume": True}, "--out"),
    ],
)
def test_what_the_command_refuses_is_refused(task, options, message):
    with pytest.raises((OptionError, UnknownNameError), match=message):
        evaluate(task, **options)


def test_options_with_several_values_and_of_paths_are_those_of_the_command():
    kinds = {name: typing.get_args(kind) for name, kind in OPTIONS.items()}
    several = [n for n, k in kinds.items() if any(typing.get_origin(one) is list for one in k)]
    assert sorted(LISTS) == sorted(several)
    assert sorted(PATHS) == sorted(name for name, kind in kinds.items() if Path in kind)
