"""The README and the first steps run as they stand; tables of ``docs`` are those of the registry.

``python tests/test_readme.py`` writes the tables again.
"""

import re
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest

from mmdecode import registry
from mmdecode.asr.recognizers import Capabilities
from tests.support import method_pages
from tests.support.hub import publish_named
from tests.support.method_pages import methods, sections, table
from tests.support.moonshine import NAME, hide_wheel, needs_wheel, takes_default
from tests.support.sandbox import commands_of, lay_out, run_line, run_python

README = Path(__file__).parents[1] / "README.md"
DOCS = README.parent / "docs"
FIRST = DOCS / "first_steps.md"


def families():
    """Every adapter for models of transformers, with the `model_type` of the configs it takes."""
    rows = []
    for entry in registry.describe("adapters"):
        if not entry.plugin and entry.name != "table":
            cls, _ = registry.resolve("adapters", entry.name)
            written = getattr(cls, "image_types", ())
            names = ", ".join(f"`{name}`" for name in cls.model_types or written)
            names = f"{names}, image mode" if written else names or "any other, once checked"
            rows.append([f"`{entry.name}`", entry.summary, names])
    return table(["adapter", "models", "`model_type`"], rows)


CAN = {
    "timestamps": "says when segments begin and end",
    "languages": "can be told language and task",
    "prompts": "prompts, hotwords, text so far",
    "silence": "probability that nobody speaks",
    "word_times": "word times",
    "fixed_windows": "windows of one length",
    "audio_transforms": "guides that change the sound",
    "drafts": "drafts, guides",
}


def able(cls, name):
    """Whether a recogniser can do something, as the table says it."""
    if name == "drafts" and not cls.model_types:
        return "with an adapter"
    return "yes" if getattr(cls.capabilities, name) else "no"


def recognisers():
    """What every recogniser can do, and the models it takes."""
    entries = [entry for entry in registry.describe("recognizers") if not entry.plugin]
    classes = [registry.resolve("recognizers", entry.name)[0] for entry in entries]
    types = [", ".join(f"`{name}`" for name in cls.model_types) for cls in classes]
    rows = [["`model_type`", *(names or "any other" for names in types)]]
    rows.append(["models", *(entry.summary.partition(":")[0] for entry in entries)])
    for one in fields(Capabilities):
        rows.append([CAN.get(one.name, one.name), *(able(cls, one.name) for cls in classes)])
    return table(["recogniser", *(f"`{entry.name}`" for entry in entries)], rows)


TABLES = {
    DOCS / "methods.md": {
        "drafters": partial(methods, "draft"),
        "rules": partial(methods, "accept"),
        "guides": partial(methods, "guide"),
    },
    DOCS / "methods_draft.md": {"drafters": partial(sections, "draft")},
    DOCS / "methods_accept.md": {"rules": partial(sections, "accept")},
    DOCS / "methods_guide.md": {"guides": partial(sections, "guide")},
    DOCS / "models.md": {"families": families},
    DOCS / "recognisers.md": {"recognisers": recognisers},
}
GENERATED = [*TABLES, *method_pages.PAGES]
pages = pytest.mark.parametrize("page", GENERATED, ids=lambda page: page.stem)


def written(page):
    if page not in TABLES:
        return method_pages.written(page)
    text = page.read_text(encoding="utf-8")
    for name, make in TABLES[page].items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        assert text.count(begin) == text.count(end) == 1, f"{page.name} has no place for {name}"
        section = re.compile(f"{begin}.*{end}", re.DOTALL)
        text = section.sub(lambda _, n=make, b=begin, e=end: f"{b}\n{n()}\n{e}", text)
    return text


@pages
def test_tables_are_those_of_the_registry(page):
    text = page.read_text(encoding="utf-8")
    assert text == written(page), "run: python tests/test_readme.py"


TRAINS = ("mmdecode train",)
"""Commands that take hours by nature; a test of their options parses them."""
TEXT = README.read_text(encoding="utf-8") + FIRST.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.M | re.S)
PROGRAMS = [text for kind, text in BLOCKS if kind == "python"]
LINES = [
    line
    for kind, text in BLOCKS
    if kind == "bash"
    for line in commands_of(text)
    if "mmdecode " in line and not line.startswith(("make ", "pip ", *TRAINS))
]
LONG = (
    *("mmdecode evaluate", "mmdecode bench", "mmdecode demo", "mmdecode audit"),
    *(
        "mmdecode generate-image --model zoo",
        "mmdecode transcribe recordings/ --model small --correct",
    ),
)
"""Commands that take more than a second or two even on the smallest model."""


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    lay_out(folder)
    publish_named(TEXT)
    return folder


def timed(text, long):
    marks = [pytest.mark.slow] * long + [needs_wheel] * (NAME in text)
    return pytest.param(text, marks=marks)


# of libraries that the examples import: what they do at import is no fault of ours
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("code", [timed(code, "llamagen-scenes" in code) for code in PROGRAMS])
def test_an_example_runs_as_it_stands(code, sandbox, monkeypatch):
    monkeypatch.chdir(sandbox)
    run_python(code)


@pytest.mark.parametrize("line", [timed(line, line.startswith(LONG)) for line in LINES])
def test_a_command_runs_as_it_stands(line, sandbox, monkeypatch, tmp_path):
    monkeypatch.chdir(sandbox)
    if takes_default(line):
        hide_wheel(monkeypatch, tmp_path)
    run_line(line)


@needs_wheel
@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in LINES if takes_default(line)])
def test_a_command_without_a_model_runs_the_published_one(line, tmp_path, monkeypatch):
    lay_out(tmp_path)  # in the folder of the others are their results
    monkeypatch.chdir(tmp_path)
    run_line(line)


def test_there_are_examples_of_every_kind():
    assert len(PROGRAMS) >= 6
    assert len(LINES) >= 15
    for name in ("transcribe", "stream", "ask", "generate-image", "evaluate", "bench"):
        assert any(f"mmdecode {name}" in line for line in LINES), name


def test_the_readme_is_short_and_its_numbers_are_those_of_the_page_of_results():
    text = README.read_text(encoding="utf-8")
    assert len(text.encode()) <= 10_240
    [measured] = re.findall(r"^\| checkpoint \|.*?\n\n", text, re.M | re.S)
    rows = measured.strip().splitlines()
    assert len(rows) == 2 + 4
    assert set(rows) <= set((DOCS / "results.md").read_text(encoding="utf-8").splitlines())


def test_the_readme_shows_three_programs_and_its_links_lead_somewhere():
    text = README.read_text(encoding="utf-8")
    assert text.count("```python\n") == 3
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert len(links) > 15
    assert [link for link in links if not (README.parent / link).exists()] == []


if __name__ == "__main__":
    for path in GENERATED:
        path.write_text(written(path), encoding="utf-8")
