"""What the benchmarks share to show results: tables, pages that hold them, and a warning."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_page(page: Path, tables: str, name: str = "tables") -> None:
    """Puts the tables between the marks of the page."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    place = re.compile(f"{begin}.*{end}", re.DOTALL)
    text = f"{begin}\n{tables}\n{end}"
    page.write_text(place.sub(lambda _: text, page.read_text()))


def warn_if_busy(facts: Mapping[str, Any]) -> None:
    """Says so where others were at work when the benchmark began."""
    if facts["load_at_start"] > 0.7:
        print(f"WARNING: load {facts['load_at_start']}: times below are not to be quoted")
