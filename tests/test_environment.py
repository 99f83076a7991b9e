"""Differences between machines: hidden from the tests, and explicit in the code."""

import ast
import locale
import os
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch

ROOT = Path(__file__).parents[1]
PROGRAMS = ("ffmpeg", "ffprobe", "sox", "espeak-ng")


def test_tests_run_offline_with_a_cache_of_their_own():
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    assert "mmdecode-tests-" in huggingface_hub.constants.HF_HUB_CACHE


def test_tests_see_no_programs_and_devices_that_only_some_machines_have():
    assert not any(shutil.which(name) for name in PROGRAMS)
    assert shutil.which("sh")
    assert not torch.cuda.is_available()


def test_tests_read_and_write_text_in_one_encoding():
    assert locale.getencoding().lower().replace("-", "") == "utf8"


@pytest.mark.slow
def test_a_machine_that_has_more_is_hidden_as_well(tmp_path):
    for name in PROGRAMS:
        (tmp_path / name).write_text("#!/bin/sh\nexit 0\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "other").symlink_to("/bin/sh")
    odd = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_CACHE": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "TZ": "Asia/Kathmandu",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    own = f"{__file__}::test_tests_"
    names = ("run_offline_with_a_cache_of_their_own", "read_and_write_text_in_one_encoding")
    names += ("see_no_programs_and_devices_that_only_some_machines_have",)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(own + name for name in names)],
        cwd=ROOT,
        env=os.environ | odd,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


TEXT_CALLS = {"read_text": 0, "write_text": 1}
"""Methods of paths whose encoding is the machine's unless one is given, and its position."""


def without_encoding(text):
    """Lines that read or write text in whatever encoding the machine prefers."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        given = {keyword.arg for keyword in node.keywords}
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name in TEXT_CALLS and "encoding" not in given and len(node.args) <= TEXT_CALLS[name]:
            found.append(node.lineno)
        if isinstance(node.func, ast.Name) and node.func.id == "open":
            modes = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
            if "encoding" not in given and not any("b" in mode for mode in modes):
                found.append(node.lineno)
    return found


@pytest.mark.parametrize("room", ["mmdecode", "asr", "vlm", "image_ar"])
def test_text_is_read_and_written_in_a_named_encoding(room):
    texts = {file: file.read_text(encoding="utf-8") for file in (ROOT / room).rglob("*.py")}
    found = {str(file): without_encoding(text) for file, text in texts.items() if "open" in text
             or "_text(" in text}  # fmt: skip
    assert {file: lines for file, lines in found.items() if lines} == {}


def test_the_search_for_encodings_finds_them():
    text = """
path.read_text()
path.read_text(encoding="utf-8")
path.write_text("x")
open("x")
open("x", "rb")
open("x", "w", encoding="utf-8")
"""
    assert without_encoding(text) == [2, 4, 5]
