"""Writes the first table of docs/results.md: published and synthetic checkpoints side by side.

    python benchmarks/measured.py      # from the newest results, measures nothing

The table puts the published recogniser above the synthetic Whisper. The numbers are those of
``real_speech.py`` and ``asr_speed.py``: what they did not measure is called so.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from asr_tables import number, rate, share
from pages import table, write_page
from real_speech_tables import Row, errors, is_draft, is_int8, with_interval

from mmdecode.errors import InputError, run_script

HERE = Path(__file__).parent
PAGE, NAME = HERE.parent / "docs" / "results.md", "measured"
"""The page, and the name of the marks around the table."""
PUBLISHED, SYNTHETIC = "`moonshine:tiny-en`, **published**", "`zoo:whisper-synth`, synthetic"
NONE = "not measured"
UNDRAFTED, INT8 = "undrafted", "onnxruntime"


def newest(results: Path, pattern: str) -> dict[str, Any] | None:
    """The newest result of a benchmark that was not cut short, with its ``file``."""
    found = []
    for path in sorted(results.glob(pattern)):
        result = json.loads(path.read_text(encoding="utf-8"))
        if not result["machine"].get("limited"):
            found.append(result | {"file": path.name})
    return max(found, key=lambda result: result["machine"]["date"], default=None)


def rows_of(real: dict[str, Any] | None, batch: int) -> dict[str, Row]:
    """Ways on single clips, with as many threads as suit ``generate`` best."""
    rows = [row for row in (real or {}).get("short", ()) if row["batch"] == batch]
    plain = [row for row in rows if row["way"] == "generate"]
    if not plain:
        return {}
    threads = min(plain, key=lambda row: row["ms_per_token"])["threads"]
    return {row["way"]: row for row in rows if row["threads"] == threads}


def best_draft(rows: dict[str, Row]) -> Row | None:
    """The quickest draft of the float model."""
    drafts = [row for row in rows.values() if is_draft(row) and not is_int8(row)]
    return max(drafts, key=lambda row: row["over_generate"][0], default=None)


def real_cells(row: Row | None) -> list[str]:
    """Cells of one way on real speech."""
    if row is None:
        return [NONE] * 4
    over, length = with_interval(row["over_generate"]), number(row["tokens_per_pass"])
    return [over, length, f"{row['identical']} of {row['clips']}", errors(row)]


def synthetic_cells(row: Row) -> list[str]:
    """Cells of one way on synthetic speech."""
    same = share(row["identical_share"])
    return [number(row["over_generate"]), number(row["tokens_per_pass"]), same, rate(row["wer"])]


def source_of(real: dict[str, Any] | None) -> str:
    """Where the numbers of the published checkpoint come from."""
    if real is None:
        return "The published checkpoint was not measured yet: `python benchmarks/real_speech.py`."
    facts = real["machine"]
    return (
        f"Published checkpoint: {facts['clips']} recordings of people, {facts['audio_s']:.0f} s, "
        f"{facts['reference_words']} words, which is little for word errors; "
        f"`benchmarks/results/{real['file']}`, {facts['date']}, load {facts['load_at_start']:.1f} "
        "at the start."
    )


def first_table(real: dict[str, Any] | None, synthetic: dict[str, Any]) -> str:
    """The first table of docs/results.md: batch 1, without timestamps, decoding alone."""
    rows = rows_of(real, 1)
    quick = best_draft(rows)
    name = f": {quick['way']}" if quick else ""
    int8 = next((row for way, row in rows.items() if way.startswith(INT8)), None)
    lines = [
        [PUBLISHED, "our loop, no draft", *real_cells(rows.get(UNDRAFTED))],
        [PUBLISHED, f"our loop, the quickest drafter{name}", *real_cells(quick)],
        [PUBLISHED, "its publisher's program, int8", *real_cells(int8)],
    ]
    if ours := rows.get("undrafted int8"):
        lines.insert(2, [PUBLISHED, "our loop, int8 weights, no draft", *real_cells(ours)])
    best = {
        row["engine"]: row
        for row in synthetic["best"]
        if row["batch"] == 1 and not row["timestamps"]
    }
    for engine, way in (("undrafted", "our loop, no draft"), ("medusa", "our loop, Medusa heads")):
        lines.append([SYNTHETIC, way, *synthetic_cells(best[engine])])
    header = ["checkpoint", "way", "decoding, times as fast as `generate`", "tokens a pass"]
    listed = table([*header, "same ids", "word errors"], lines)
    facts = synthetic["machine"]
    below = (
        f"Two CPU cores, one recording at a time, float32. {source_of(real)} Synthetic: "
        f"{facts['windows']} clips; `benchmarks/results/{synthetic['file']}`, {facts['date']}, "
        f"load {facts['load_at_start']:.1f}."
    )
    return f"{listed}\n\n{below}"


def shown(results: Path) -> str:
    """The text between the marks of the page."""
    real = newest(results, "real-speech-cpu-*.json")
    synthetic = newest(results, "asr-cpu-*.json")
    if synthetic is None:
        raise InputError(f"{results} has no asr-cpu-*.json: run benchmarks/asr_speed.py first")
    return first_table(real, synthetic)


def main() -> None:
    """Writes the table."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    write_page(PAGE, shown(HERE / "results"), NAME)
    print(f"written: {PAGE}")


if __name__ == "__main__":
    run_script(main)
