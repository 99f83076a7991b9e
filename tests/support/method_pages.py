"""Parts of the pages on methods that the registry and the tables of results decide.

A page ``docs/methods/NAME.md`` is written by hand but for two kinds of blocks: the facts of the
registry with the docstring, and rows that are taken from the page where they were measured.
"""

import re
from pathlib import Path

from mmdecode import registry

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted((DOCS / "methods").glob("*.md"))

ROWS = re.compile(r"<!-- rows: ([^\n]+?) -->\n.*?<!-- end of rows -->", re.DOTALL)
"""A block of rows: the page that has them, words before the table there, the first cells."""
FACTS = re.compile(r"<!-- method -->\n.*?<!-- end of method -->", re.DOTALL)

MEASURED_BY = {
    "drafters.md": ("`zoo:whisper-synth`", "python benchmarks/drafters.py"),
    "real_speech.md": ("`moonshine:tiny-en`, **published**", "python benchmarks/real_speech.py"),
    "vlm_speed.md": ("`zoo:llava-scenes`", "python benchmarks/vlm_speed.py"),
    "image_speed.md": ("`zoo:llamagen-scenes`", "python benchmarks/image_speed.py"),
    "hallucination.md": ("`zoo:llava-scenes`", "python benchmarks/hallucination.py report"),
    "benchmarks/results/silence/README.md": ("`zoo:whisper-synth`", "mmdecode evaluate silence"),
}
"""By page, the model and the command of its tables."""

LEFT_OUT = {
    *("drafted ones among them", "accepted by depth", "draft's share", "first token, ms"),
    *("end to end", "accepted", "with the encoder", "timestamps: tokens a pass", "tokens a clip"),
    *("timestamps: over undrafted", "encoder: ms a second of audio", "real-time factor"),
    *("wrong words", "passes", "with pixels", "peak MB", "AUROC, adv.", "CHAIR_s %", "words"),
}
"""Columns that the page with the whole table has alone."""

SEEN = {
    "draft": ("drafters", "vlm_speed", "real_speech", "int8_speed"),
    "guide": ("hallucination",),
}
"""By kind, pages whose marked tables have a row for each method that was measured."""
LABELS = {"jacobi": "SJD", "coupled": "coupled", "cool_sd": "Cool-SD", "lantern": "LANTERN"}
LABELS["gsd"] = "grouped"
"""Names of the rows in the tables of image tokens."""
JUDGED = {"rejection": "rejection", "sample_match": "membership"}
"""Names of rules in the rows of drafters, after a semicolon."""
WITHOUT_ROW = {
    "bias": "Measured: [Rare names](bias.md).",
    "greedy": "Measured: the greedy rows of [Drafters](drafters.md).",
    "guidance": "Measured: all rows of [How fast image tokens are drawn](image_speed.md) have it.",
    "margin_shift": "Measured: *over the shifted* in [Which methods help](hallucination.md).",
}
"""What was measured without a row of its own."""


def cells(line):
    """The cells of a row of a table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def table(header, rows):
    """Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def excerpt(spec):
    """Rows of a table on another page, without its widest columns, and where they are from."""
    page, before, *wanted = [part.strip() for part in spec.split(" | ")]
    home = ROOT / page if "/" in page else DOCS / page
    text, _, _ = home.read_text(encoding="utf-8").partition("<!-- end of tables -->")
    lines = text.splitlines()
    at = [number for number, line in enumerate(lines) if line == before]
    at = at or [number for number, line in enumerate(lines) if before in line]
    assert len(at) == 1, f"{page} has {before!r} {len(at)} times"
    first = next(number for number in range(at[0], len(lines)) if lines[number].startswith("|"))
    header, _, *rows = [cells(line) for line in lines[first : lines.index("", first)]]
    kept = [number for number, name in enumerate(header) if name not in LEFT_OUT]
    found = {row[0].replace("`", ""): [row[number] for number in kept] for row in rows}
    shown = table([header[number] for number in kept], [found[name] for name in wanted])
    model, command = MEASURED_BY[page]
    where = f"`{page}`" if "/" in page else f"[all rows and conditions](../{page})"
    return f"{shown}\n\n{before.strip('#* .')}, on {model}; {where}, `{command}`."


def classes_of(module):
    """Names of the methods whose classes are in a module."""
    entries = [(kind, e) for kind in ("draft", "accept", "guide") for e in registry.describe(kind)]
    classes = [registry.resolve(kind, e.name)[0] for kind, e in entries if not e.plugin]
    return [cls.__name__ for cls in classes if cls.__module__ == module]


def documented(cls):
    """Whose docstrings the site shows: module, class, and the base class that has the options."""
    if len(classes_of(cls.__module__)) == 1:
        yield cls.__module__
    first = next((base for base in cls.__mro__ if "Args:" in (base.__dict__["__doc__"] or "")), cls)
    yield from (f"{one.__module__}.{one.__qualname__}" for one in dict.fromkeys((cls, first)))


def facts(kind, name):
    """Source, guarantee and docstrings."""
    [entry] = [entry for entry in registry.describe(kind) if entry.name == name]
    says = f"Source: {entry.source}."
    if kind != "guide":
        says += f" Guarantee: {entry.guarantee}."
    cls, _ = registry.resolve(kind, name)
    return "\n\n".join([says, *(f"::: {one}" for one in documented(cls))])


def kind_of(page):
    """Kind of part of the method that a page is about."""
    kinds = ("draft", "accept", "guide")
    [kind] = [kind for kind in kinds if page.stem in {e.name for e in registry.describe(kind)}]
    return kind


def written(page):
    """A page with its blocks filled."""
    text = page.read_text(encoding="utf-8")
    block = f"<!-- method -->\n{facts(kind_of(page), page.stem)}\n<!-- end of method -->"
    text = FACTS.sub(lambda _: block, text)
    return ROWS.sub(
        lambda found: f"<!-- rows: {found[1]} -->\n{excerpt(found[1])}\n<!-- end of rows -->", text
    )


def measured(kind, name):
    """Pages that have a row of measurements for a method, as links."""
    rows = [(stem, name) for stem in SEEN.get(kind, ())]
    rows += [("image_speed", LABELS[name])] if name in LABELS else []
    rows += [("drafters", rf"[^|]+; {JUDGED[name]}")] if name in JUDGED else []
    found = []
    for stem, called in rows:
        text = (DOCS / f"{stem}.md").read_text(encoding="utf-8")
        title = text.splitlines()[0].removeprefix("# ")
        row = re.compile(rf"^\| `?{called}(?![\w-])", re.MULTILINE)
        if row.search(text.partition("<!-- tables -->")[2]):
            found.append(f"[{title}]({stem}.md)")
    return f"Measured: {', '.join(found)}." if found else WITHOUT_ROW.get(name, "Not measured.")


def sections(kind):
    """A section for every method of a kind: its page, or what the site puts below it."""
    own = {page.stem for page in PAGES}
    parts = []
    for entry in registry.describe(kind):
        if not entry.plugin:
            says = entry.summary[0].upper() + entry.summary[1:]
            parts.append(f"## `{entry.name}`")
            if entry.name in own:
                parts.append(f"{says}. [Example, measured rows, options](methods/{entry.name}.md).")
            else:
                parts += [f"{says}. {measured(kind, entry.name)}", facts(kind, entry.name)]
    return "\n" + "\n\n".join(parts) + "\n"


def methods(kind):
    """The table of a kind: a link for each method, what it does, its guarantee and source."""
    own = {page.stem for page in PAGES}
    rows = []
    for entry in registry.describe(kind):
        if not entry.plugin:
            home = f"methods_{kind}.md#{entry.name}"
            home = f"methods/{entry.name}.md" if entry.name in own else home
            row = [f"[`{entry.name}`]({home})", entry.summary, entry.source]
            if kind == "accept":
                row.insert(2, entry.guarantee.replace("lossy", "**lossy**"))
            rows.append(row)
    header = ["name", "what it does", "source"]
    if kind == "accept":
        header.insert(2, "guarantee")
    return table(header, rows)
