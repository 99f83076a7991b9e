"""Runnable recipes, run in this process."""

import runpy
import sys
from types import SimpleNamespace


def run_script(monkeypatch, capsys, path, *words):
    """Runs a script as if from the command line: its exit ``code``, and what it prints."""
    monkeypatch.setattr(sys, "argv", [str(path), *map(str, words)])
    code = 0
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    return SimpleNamespace(code=code, **capsys.readouterr()._asdict())
