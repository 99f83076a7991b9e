"""The pages under ``docs``: code and commands run as they stand, links go somewhere."""

import contextlib
import inspect
import io
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from mmdecode import registry
from mmdecode.cli.app import app
from mmdecode.zoo.scenes import draw_scene, render
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


def test_the_commands_on_asking_run_as_they_stand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("scenes").mkdir()
    for seed, name in enumerate(("scene", "scenes/1", "scenes/2")):
        Image.fromarray(render(draw_scene(seed))).save(f"{name}.png")
    blocks = FENCE.findall((DOCS / "ask.md").read_text(encoding="utf-8"))
    [table] = [text for kind, text in blocks if kind == "json"]
    Path("questions.jsonl").write_text(table)
    commands = [line for kind, text in blocks if kind == "sh" for line in text.splitlines()]
    assert len(commands) == 11
    for command in commands:
        done = CliRunner().invoke(app, shlex.split(command)[1:])
        assert done.exit_code == 0, (command, done.output, done.exception)


def settings_of(name):
    """What a string can give a guide, as the page writes it; objects are left out."""
    cls, _ = registry.resolve("guide", name)
    make = getattr(cls, "from_options", cls)
    objects = {"tokenizer", "yes", "no", "negative_ids", "negative_mask"}
    names = {None: "none", False: "false", True: "true"}
    found = []
    for option in inspect.signature(make).parameters.values():
        value = option.default
        if option.name not in objects:
            text = f"{value:.4g}" if isinstance(value, float) else names.get(value, value)
            found.append(f"`{option.name}={text}`")
    return ", ".join(found)


def test_the_table_of_guides_says_what_the_code_says():
    text = (DOCS / "guides.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \| ([^|]+) \| ([\d /]+) \|", text, re.MULTILINE
    )
    shipped = [entry.name for entry in registry.describe("guide") if not entry.plugin]
    assert [name for name, *_ in rows] == shipped
    for name, settings, neutral, count in rows:
        assert settings == settings_of(name)
        spec = f"{name}:prompt=last_token" if name == "contrast" else name
        branches = registry.create("guide", spec).branches
        after = 1 + sum(branch.replaces is None for branch in branches)
        assert [int(n) for n in count.split(" / ")] in ([after], [1 + len(branches), after])
        assert ("/" in count) == (after != 1 + len(branches))
        if name == "prompt_bias":  # a string cannot give an empty text
            assert registry.resolve("guide", name)[0](instruction="").neutral
        else:
            assert registry.create("guide", f"{name}:{neutral.strip('`')}").neutral


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_paths_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    paths = re.findall(r"`(mmdecode/[\w/]+\.py)`", text)
    missing = [link for link in links if not (DOCS / link).exists()]
    missing += [path for path in paths if not (DOCS.parent / path).exists()]
    assert not missing


def test_every_page_is_there():
    assert {"ask", "guides", "loop", "lossless", "transcribe", "write_a_part"} <= {
        page.stem for page in PAGES
    }
