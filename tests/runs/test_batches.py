"""What a process leaves of its batch where the system ended it."""

import os
import signal
import subprocess
import sys

from mmdecode.crashes import Batches

CODE = """
import os, signal, sys
from pathlib import Path
from mmdecode.crashes import Batches
with Batches(Path(sys.argv[1])).decoding(sys.argv[2:]):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(path, *names):
    done = subprocess.run([sys.executable, "-c", CODE, str(path), *names])
    assert done.returncode == -signal.SIGKILL


def test_items_over_which_a_process_ended_are_decoded_one_by_one_and_fail_after_twice(tmp_path):
    path = tmp_path / ".decoding-0"
    killed(path, "a", "b", "ü\udcff".encode("utf-8", "surrogateescape").decode("latin-1"))
    batches = Batches(path)
    assert list(batches.alone.values()) == [0, 0, 0]
    batches.cleared("a")
    batches.close()
    assert os.path.exists(path)
    killed(path, "b")
    batches = Batches(path)
    assert batches.problem("b") is None
    batches.close()
    killed(path, "b")
    batches = Batches(path)
    assert "ended the process 2 times while this was decoded alone" in batches.problem("b")
    for name in [*batches.alone]:
        batches.cleared(name)
    batches.close()
    assert not path.exists()


def test_a_batch_that_ended_well_or_raised_leaves_nothing(tmp_path):
    batches = Batches(tmp_path / "x")
    with batches.decoding(["a", "b"]):
        pass
    try:
        with batches.decoding(["c"]):
            raise ValueError
    except ValueError:
        pass
    batches.close()
    assert not (tmp_path / "x").exists()
