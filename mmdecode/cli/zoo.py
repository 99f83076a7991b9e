"""``mmdecode zoo``: lists shipped models and recordings, and convertible published checkpoints."""

from __future__ import annotations

import json as json_module
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from mmdecode.checkpoints import ZOO, scheme_card, scheme_names, zoo_names
from mmdecode.cli.output import JsonFlag, emit_json
from mmdecode.runs.console import out


def command(json: JsonFlag = False) -> None:
    """List the tiny models and recordings that ship, and models such as moonshine:tiny-en."""
    from mmdecode.asr.output.manifest import shipped_manifests

    folders = {name: ZOO / name for name in zoo_names()}
    folders |= {name: manifest.parent for name, manifest in shipped_manifests().items()}
    rows = []
    for name, folder in folders.items():
        card = folder / "card.json"
        facts = json_module.loads(card.read_text(encoding="utf-8")) if card.exists() else {}
        size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
        rows.append({"name": f"zoo:{name}", "mib": round(size / 2**20, 1)} | facts)
    published = [{"name": name} | scheme_card(name) for name in scheme_names()]
    if json:
        emit_json(rows + published)
        return
    # a cut name cannot be given as a model
    names = Column("name", no_wrap=True, overflow="fold")
    table = Table(names, "MiB", "what", "measured")
    for row in rows:
        table.add_row(row["name"], str(row["mib"]), row.get("what", ""), row.get("measured", ""))
    out.print(table)
    for one in published:
        out.print(_published(one))


def _published(card: dict[str, Any]) -> Table:
    """Makes the table of a checkpoint that does not ship."""
    table = Table("", "", title=card["name"], title_justify="left", show_header=False)
    installed = "yes" if card["installed"] else f"no; {card.get('install', '')}"
    keys = ("what", "measured", "licence", "notice", "origin")
    facts = {"installed": installed, "MiB": card.get("mib", "")}
    for key, value in (facts | {key: card.get(key, "") for key in keys}).items():
        table.add_row(key, escape(str(value)))
    return table
