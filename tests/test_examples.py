"""Every script in ``examples/`` runs offline, without arguments, and says what it promises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


def run(script):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=250
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_an_example_runs(script):
    done = run(script)
    assert done.returncode == 0, done.stderr
    if script.stem == "cfg_with_drafts":
        assert [line.split(": ")[1] for line in done.stdout.splitlines()] == ["False", "True"]
