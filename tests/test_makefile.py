"""`make` goes on without the published recogniser where it cannot be installed, and says so."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def install(tmp_path):
    """Runs the target with a program instead of pip, whose exit code is given for each call."""
    for name in ("Makefile", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").touch()
    pip = tmp_path / "pip"

    def install(code):
        pip.write_text(f'#!/bin/sh\necho "$@" >> asked\necho ERROR >&2\nexit {code}\n')
        pip.chmod(0o755)
        command = ["make", ".venv/.moonshine", "PIP=./pip"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        asked = (tmp_path / "asked").read_text().splitlines()
        return done.returncode, done.stderr.splitlines(), asked

    return install


def test_a_failure_is_one_line_stops_nothing_and_is_tried_again(install):
    code, output, asked = install(1)
    assert (code, len(output), len(asked)) == (0, 1, 1)
    assert output[0].startswith("going on without moonshine:tiny-en, which could not be installed")
    assert output[0].endswith("pip install --no-deps -c constraints.txt moonshine-voice")
    assert install(1) == (0, output, asked * 2)


def test_what_is_installed_is_not_asked_for_again(install):
    asked = "--retries 0 --timeout 10 --no-deps moonshine-voice"
    assert install(0) == (0, [], [asked])
    assert install(1) == (0, [], [asked])


def test_tests_and_demo_share_it():
    recipes = (ROOT / "Makefile").read_text(encoding="utf-8").split("\n\n")
    for goal in ("demo:", "test:", "test-all:"):
        [recipe] = [one for one in recipes if one.startswith(goal) or f"\n{goal}" in one]
        assert "$(VENV)/.moonshine" in recipe
