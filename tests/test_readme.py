"""The README's tables are those of the registry; `python tests/test_readme.py` writes them anew."""

import re
from pathlib import Path

from mmdecode import registry

README = Path(__file__).parents[1] / "README.md"
LAWS = {"exact": "exact", "exact for v": "exact for its own law", "heuristic": "**heuristic**"}

KEPT = {"draft": "unchanged", "guide": "its own"}


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def methods():
    """Every draft, rule and guide that ships."""
    rows = []
    for kind in ("draft", "accept", "guide"):
        for entry in registry.describe(kind):
            if not entry.plugin:
                law = LAWS[entry.law] if kind == "accept" else KEPT[kind]
                rows.append([kind, f"`{entry.name}`", entry.summary, law, entry.source])
    return table(["part", "name", "what it does", "law", "source"], rows)


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


TABLES = {"methods": methods, "families": families}


def written(text):
    for name, make in TABLES.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        assert text.count(begin) == text.count(end) == 1, f"README has no place for {name}"
        place = re.compile(f"{begin}.*{end}", re.DOTALL)
        text = place.sub(lambda _, n=make, b=begin, e=end: f"{b}\n{n()}\n{e}", text)
    return text


def test_the_tables_of_the_readme_are_those_of_the_registry():
    text = README.read_text()
    assert text == written(text), "run: python tests/test_readme.py"


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
