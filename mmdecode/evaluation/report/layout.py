"""Rows of text as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmdecode.runs.files import MAKER

Rows = Sequence[Mapping[str, str]]
"""Table as a list of rows, each a mapping from column name to text; all have the same columns."""

MADE_BY = f"<!-- made by {MAKER} -->\n"
"""Marker of generated files: first line of Markdown, second line of SVG."""


def without_empty(rows: Rows) -> list[dict[str, str]]:
    """Returns the rows without the columns that are empty in all rows."""
    used = [name for name in rows[0] if any(row[name] for row in rows)] if rows else []
    return [{name: row[name] for name in used} for row in rows]


def markdown(rows: Rows) -> str:
    """Formats rows as a Markdown table."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "".join(
        "| " + " | ".join(" ".join(cell.replace("|", "\\|").splitlines()) for cell in line) + " |\n"
        for line in lines
    )


def markdown_page(text: str) -> str:
    """Adds the marker of generated files to Markdown text."""
    return f"{MADE_BY}\n{text}"


def drawing(svg: str) -> str:
    """Adds the marker of generated files to SVG text, after its first line."""
    first, rest = svg.split("\n", 1)
    return f"{first}\n{MADE_BY}{rest}"


def number(value: float | None, form: str = ".2f") -> str:
    """Formats a number; empty for ``None``."""
    return "" if value is None else format(value, form)


def percent(value: float | None, form: str = ".2f") -> str:
    """Formats a share (0..1) in percent, without the percent sign; empty for ``None``."""
    return "" if value is None else format(100 * value, form)


def between(low: float, high: float, form: str = ".2f") -> str:
    """Formats an interval of a share (0..1) in percent."""
    return f"{percent(low, form)} to {percent(high, form)}"
