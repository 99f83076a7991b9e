"""The record of a batch during which the system killed the process."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest

from mmdecode.runs.crashes import Batches, ended_over

CODE = """
import os, signal, sys
from pathlib import Path
from mmdecode.runs.crashes import Batches, ended_over
path, *names = sys.argv[1:]
earlier = ended_over([Path(path)], ["a", "b", *names])
with Batches(Path(path), earlier).decoding(names):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def opened(*paths):
    names = {"a", "b", "ü\udcff".encode("utf-8", "surrogateescape").decode("latin-1")}
    return Batches(paths[0], ended_over(paths, names))


def killed(path, *names):
    done = subprocess.run([sys.executable, "-c", CODE, str(path), *names])
    assert done.returncode == -signal.SIGKILL


def test_items_over_which_a_process_ended_are_decoded_one_by_one_and_fail_after_twice(tmp_path):
    path = tmp_path / ".decoding-0"
    killed(path, "a", "b", "ü\udcff".encode("utf-8", "surrogateescape").decode("latin-1"))
    batches = opened(path)
    assert list(batches.alone.values()) == [0, 0, 0]
    batches.cleared("a")
    batches.close()
    assert os.path.exists(path)
    killed(path, "b")
    batches = opened(path)
    assert batches.problem("b") is None
    batches.close()
    killed(path, "b")
    batches = opened(path)
    assert "ended the process 2 times while it decoded this input alone" in batches.problem("b")
    for name in [*batches.alone]:
        batches.cleared(name)
    batches.close()
    assert not path.exists()


def test_a_batch_that_ended_well_or_raised_leaves_nothing(tmp_path):
    batches = Batches(tmp_path / "x", {})
    with batches.decoding(["a", "b"]):
        pass
    with pytest.raises(ValueError), batches.decoding(["c"]):
        raise ValueError
    batches.close()
    assert not (tmp_path / "x").exists()


def test_what_several_processes_ended_over_counts_once_for_each(tmp_path):
    one, two, third = (tmp_path / f".decoding-{rank}" for rank in range(3))
    killed(one, "a", "b")
    batches = opened(one)
    batches.close()
    killed(two, "a")
    killed(third, "gone")
    for paths in ((one, two, third), (third, two, one)):
        assert ended_over(paths, {"a", "b"}) == {"a": 1, "b": 0}


def test_a_batch_within_a_unit_is_noted_alone_until_it_is_decoded(tmp_path):
    batches = Batches(tmp_path / "note", {})
    noted = lambda: json.loads((tmp_path / "note").read_text())["batch"]  # noqa: E731
    with contextlib.closing(batches), batches.decoding(["a", "b", "c"]):
        with batches.decoding(["b"]):
            assert noted() == ["b"]
        assert noted() == ["a", "b", "c"]
        batches.add({"a": 1})
        assert noted() == ["a", "b", "c"]
        batches.cleared("a")
        assert noted() == ["a", "b", "c"]
