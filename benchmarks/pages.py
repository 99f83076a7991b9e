"""What the benchmarks share to show their results: Markdown tables, and pages that hold them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path


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
