"""The pages under ``docs``: code and commands run as they stand, links go somewhere."""

import contextlib
import io
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmdecode.cli.app import app
from mmdecode.zoo.speech import speech_test

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.glob("*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples():
    """Each block of Python, with the text block behind it."""
    for page in PAGES:
        blocks = FENCE.findall(page.read_text(encoding="utf-8"))
        for index, (kind, text) in enumerate(blocks):
            if kind == "python":
                follows = blocks[index + 1] if index + 1 < len(blocks) else ("", "")
                shown = follows[1] if follows[0] == "text" else ""
                yield pytest.param(text, shown, id=f"{page.stem}-{index}")


@pytest.mark.parametrize(("code", "shown"), [*examples()])
def test_an_example_prints_what_the_page_shows(code, shown):
    assert shown, "an example that shows nothing proves nothing"
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "example", "exec"), {"__name__": "example"})
    assert out.getvalue() == shown


def test_the_commands_on_transcribing_run_as_they_stand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    clips = [clip.path for clip in speech_test()]
    Path("recordings/sub").mkdir(parents=True)
    for clip, name in zip((3, 5, 4), ("recordings/a", "recordings/sub/a", "talk"), strict=True):
        shutil.copy(clips[clip], f"{name}.ogg")
    blocks = FENCE.findall((DOCS / "transcribe.md").read_text(encoding="utf-8"))
    [manifest] = [text for kind, text in blocks if kind == "json"]
    Path("calls.jsonl").write_text(manifest)
    commands = [line for kind, text in blocks if kind == "sh" for line in text.splitlines()]
    assert len(commands) > 15
    for command in commands:
        before, _, words = command.partition("mmdecode ")  # alone where accelerate starts several
        stdin = b""
        if before.endswith("| "):
            stdin = subprocess.run(before[:-2], shell=True, check=True, capture_output=True).stdout
        done = CliRunner().invoke(app, shlex.split(words), input=stdin)
        assert done.exit_code == 0, (command, done.output, done.exception)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_paths_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    paths = re.findall(r"`(mmdecode/[\w/]+\.py)`", text)
    missing = [link for link in links if not (DOCS / link).exists()]
    missing += [path for path in paths if not (DOCS.parent / path).exists()]
    assert not missing


def test_every_page_is_there():
    assert {"loop", "lossless", "transcribe", "write_a_part"} <= {page.stem for page in PAGES}
