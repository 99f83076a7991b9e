"""``mmdecode zoo``: what ships with the package."""

from __future__ import annotations

import json as json_module

from rich.table import Table

from mmdecode.checkpoints import ZOO, zoo_names
from mmdecode.cli.output import JsonFlag, emit_json, out


def command(json: JsonFlag = False) -> None:
    """List the tiny models that ship with the package, with their measured numbers."""
    rows = []
    for name in zoo_names():
        card = ZOO / name / "card.json"
        facts = json_module.loads(card.read_text(encoding="utf-8")) if card.exists() else {}
        size = sum(f.stat().st_size for f in (ZOO / name).rglob("*") if f.is_file())
        rows.append({"name": f"zoo:{name}", "mib": round(size / 2**20, 1)} | facts)
    if json:
        emit_json(rows)
        return
    table = Table("name", "MiB", "what", "measured")
    for row in rows:
        table.add_row(row["name"], str(row["mib"]), row.get("what", ""), row.get("measured", ""))
    out.print(table)
