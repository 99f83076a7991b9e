"""The pages under ``docs``: their code runs and prints what they say, their links go somewhere."""

import contextlib
import io
import re
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_paths_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    paths = re.findall(r"`(mmdecode/[\w/]+\.py)`", text)
    missing = [link for link in links if not (DOCS / link).exists()]
    missing += [path for path in paths if not (DOCS.parent / path).exists()]
    assert not missing


def test_every_page_is_there():
    assert {"loop", "lossless", "write_a_part"} <= {page.stem for page in PAGES}
