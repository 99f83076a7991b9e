"""The pages under ``docs``: code and commands run as they stand, links go somewhere."""

import contextlib
import inspect
import io
import json
import re
from pathlib import Path

import pytest

import mmdecode as mm
from mmdecode import registry
from tests.draft.test_ctc import random_head
from tests.support import method_pages
from tests.support.hub import publish_named
from tests.support.moonshine import NAME, WAYS, hide_wheel, needs_wheel, takes_default
from tests.support.sandbox import commands_of, lay_out, run_line, run_python

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
EXECUTED = [page for page in PAGES if page.stem != "first_steps"]
"""Pages whose code is run here; that of the first steps is run with the README's."""
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples():
    """Each block of Python, with the text block after it."""
    for page in EXECUTED:
        blocks = FENCE.findall(page.read_text(encoding="utf-8"))
        for index, (kind, text) in enumerate(blocks):
            if kind == "python":
                follows = blocks[index + 1] if index + 1 < len(blocks) else ("", "")
                shown = follows[1] if follows[0] == "text" else ""
                needs = needs_wheel if NAME in text else ()
                yield pytest.param(text, shown, id=f"{page.stem}-{index}", marks=needs)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("code", "shown"), [*examples()])
def test_an_example_prints_what_the_page_shows(code, shown):
    assert shown, "an example that shows nothing proves nothing"
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run_python(code)
    assert out.getvalue() == shown


ROWS_CALLED = {"jacobi": "SJD", "lantern": "LANTERN", "sample_match": "membership"}
ROWS_CALLED |= {"assistant": "text-only", "whisper_cd": "-20 dB"}
"""How the tables of results call a method."""

TABLES = {"transcribe": "calls.jsonl", "ask": "questions.jsonl"}
"""Files that a page's block of JSON shows."""

LONG = {"drafters", "evaluate", "generate_image", "hallucination", "lossless", "peers"}
LONG |= {"ask", "bias", "quantization", "scale", "train_drafter", "transcribe", "vlm_speed"}
"""Pages whose commands take long together."""


def commands_on(page):
    """What the shell blocks of a page give to ``mmdecode``; benchmarks are not run here."""
    blocks = FENCE.findall(page.read_text(encoding="utf-8"))
    lines = [line for kind, text in blocks if kind in ("sh", "bash") for line in commands_of(text)]
    return [line for line in lines if "mmdecode " in line and not line.startswith("python ")]


def foreign_tokens():
    """What a server would have answered with ``my-llama``, as lists of ids."""
    model, tokenizer = mm.load("my-llama", "cpu")
    for line in Path("prompts.txt").read_text(encoding="utf-8").splitlines():
        inputs = tokenizer(line, return_tensors="pt")
        found = model.generate(**inputs, do_sample=False, max_new_tokens=64)
        yield found[0, inputs.input_ids.shape[1] :].tolist()


def run_pages():
    """Pages with commands, and whether the published model is hidden while they run."""
    for page in EXECUTED:
        lines = commands_on(page)
        slow = [pytest.mark.slow] * (page.stem in LONG)
        if any(map(takes_default, lines)):
            for hidden, name, marks in WAYS:
                yield pytest.param(page, hidden, id=f"{page.stem}-{name}", marks=[*marks, *slow])
        elif lines:
            yield pytest.param(page, False, id=page.stem, marks=slow)


@pytest.mark.parametrize(("page", "hidden"), [*run_pages()])
def test_the_commands_of_a_page_run_as_they_stand(page, hidden, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if hidden:
        hide_wheel(monkeypatch, tmp_path / ".cache")
    lay_out(tmp_path)
    text = page.read_text(encoding="utf-8")
    publish_named(text)
    if page.stem in TABLES:
        [table] = [block for kind, block in FENCE.findall(text) if kind == "json"]
        Path(TABLES[page.stem]).write_text(table, encoding="utf-8")
    for kind, block in FENCE.findall(text):
        if kind == "csv":
            Path("mine.csv").write_text(block, encoding="utf-8")
    if page.stem == "lossless":
        rows = [json.dumps(row) for row in foreign_tokens()]
        Path("from_my_server.jsonl").write_text("\n".join(rows), encoding="utf-8")
    for line in commands_on(page):
        run_line(line)


def test_commands_are_found_where_they_stand():
    found = {page.stem: len(commands_on(page)) for page in PAGES}
    assert found["transcribe"] > 15 and found["ask"] > 10 and found["generate_image"] > 10
    assert found["lossless"] == 4 and found["drafters"] == 1


def settings_of(name):
    """What a string can give a guide, as the page writes it; objects are left out."""
    cls, _ = registry.resolve("guide", name)
    make = getattr(cls, "from_options", cls)
    objects = {"tokenizer", "yes", "no", "negative_ids", "negative_mask", "guide", "model_id"}
    names = {None: "none", False: "false", True: "true"}
    found = []
    for option in inspect.signature(make).parameters.values():
        value = option.default
        if value is option.empty:
            found.append(f"`{option.name}` (needed)")
        elif option.name not in objects:
            text = f"{value:.4g}" if isinstance(value, float) else names.get(value, value)
            found.append(f"`{option.name}={text}`")
    return ", ".join(found)


def test_the_table_of_guides_says_what_the_code_says(tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("Marion")
    head = tmp_path / "head"
    random_head().save_pretrained(head)
    text = (DOCS / "guides.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \| ([^|]+) \| ([\d /]+) \|", text, re.MULTILINE
    )
    shipped = [entry.name for entry in registry.describe("guide") if not entry.plugin]
    assert [name for name, *_ in rows] == shipped
    for name, settings, neutral, count in rows:
        assert settings == settings_of(name)
        needed = {
            "contrast": ":prompt=last_token",
            "bias": f":words={words}",
            "ctc": f":head={head}",
        }
        spec = name + needed.get(name, "")
        branches = registry.create("guide", spec).branches
        after = 1 + sum(branch.replaces_after_prefill is None for branch in branches)
        assert [int(n) for n in count.split(" / ")] in ([after], [1 + len(branches), after])
        assert ("/" in count) == (after != 1 + len(branches))
        if name == "prompt_bias":  # a string cannot give an empty text
            assert registry.resolve("guide", name)[0](instruction="").neutral
        else:
            options = [needed[name][1:]] if name in ("bias", "ctc") else []
            options.append(neutral.strip("`"))
            assert registry.create("guide", f"{name}:{','.join(options)}").neutral


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_paths_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    paths = re.findall(r"`(mmdecode/[\w/]+\.py)`", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [path for path in paths if not (DOCS.parent / path).exists()]
    assert not missing


def test_every_page_is_there():
    assert {"ask", "guides", "loop", "lossless", "transcribe", "write_a_part"} <= {
        page.stem for page in PAGES
    }


def test_every_page_is_in_the_navigation_of_the_site():
    text = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"([\w/]+\.md)$", text.partition("\nnav:\n")[2], re.MULTILINE)
    own = [page for page in listed if not page.startswith("notebooks/")]
    assert sorted(own) == sorted(str(page.relative_to(DOCS)) for page in PAGES)
    stems = ["index", *sorted(path.stem for path in DOCS.parent.glob("notebooks/*.ipynb"))]
    assert listed[listed.index("notebooks/index.md") :][: len(stems)] == [
        f"notebooks/{stem}.md" for stem in stems
    ]


@pytest.mark.parametrize("page", method_pages.PAGES, ids=lambda page: page.stem)
def test_a_page_of_a_method_has_an_example_measured_rows_and_options(page):
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# `{page.stem}`\n\n")
    assert [kind for kind, _ in FENCE.findall(text)] == ["python", "text"]
    assert page.stem in text.partition("```python")[2].partition("```text")[0]
    names = [found[1] for found in method_pages.ROWS.finditer(text)]
    assert names and len(method_pages.FACTS.findall(text)) == 1
    own = [cell for name in names for cell in name.split(" | ")[2:]]
    called = ROWS_CALLED.get(page.stem, page.stem)
    assert any(called in cell for cell in own)


def test_what_was_not_measured_is_called_so():
    found = {}
    for kind in ("draft", "accept", "guide"):
        text = (DOCS / f"methods_{kind}.md").read_text(encoding="utf-8")
        parts = re.split(r"^## `(\w+)`$", text, flags=re.MULTILINE)[1:]
        found |= dict(zip(parts[::2], parts[1::2], strict=True))
    silent = {"typical", "relative_threshold", "ensemble", "cfg", "contrast", "ctc"}
    assert {name for name, text in found.items() if "Not measured." in text} == silent
    pages = {page.stem for page in method_pages.PAGES}
    assert pages < set(found) and all(f"(methods/{name}.md)" in found[name] for name in pages)
    assert all("Measured: " in text for name, text in found.items() if name not in pages | silent)


def test_the_site_loads_nothing_from_elsewhere_and_has_two_plugins():
    text = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    plugins = re.search(r"^plugins:\n(.*?)^\w", text, re.MULTILINE | re.DOTALL)
    assert re.findall(r"^  - (\w+)", plugins[1], re.MULTILINE) == ["search", "mkdocstrings"]
    assert "  font: false" in text and "https:" not in text


def test_the_page_of_the_loop_names_every_file_of_the_engine():
    text = (DOCS / "loop.md").read_text(encoding="utf-8")
    files = {file.name for file in (DOCS.parent / "mmdecode" / "engine").glob("*.py")}
    assert {name for name in files if f"`{name}`" not in text} == {"__init__.py"}
