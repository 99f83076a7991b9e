"""Tables of docs/asr_speed.md and docs/int8_speed.md, from results of asr_speed.py."""

from __future__ import annotations

from typing import Any

from pages import table


def number(value: float | None, form: str = ".2f") -> str:
    """A cell; empty where nothing was measured."""
    return "" if value is None else format(value, form)


def share(value: float | None) -> str:
    """A share in percent."""
    return "" if value is None else f"{100 * value:.0f} %"


def rate(value: float | None) -> str:
    """A word error rate."""
    return "" if value is None else f"{100 * value:.1f} %"


def per_window(row: dict[str, Any]) -> float | None:
    """Milliseconds of a window, encoder included."""
    if row["decode_s"] is None:
        return None
    return 1e3 * (row["encoder_s"] + row["decode_s"]) / row["windows"]


def short_table(best: list[dict[str, Any]], batch: int) -> str:
    """Engines of one batch size, without timestamps and with them."""
    plain, times = (
        {r["engine"]: r for r in best if (r["batch"], r["timestamps"]) == (batch, timestamps)}
        for timestamps in (False, True)
    )
    rows = []
    for name, row in plain.items():
        cells = {
            column: [
                number(one["ms_per_token_row"]) or "ids differ",
                number(one["over_generate"]),
                number(one["over_undrafted"]),
                number(one["tokens_per_pass"]),
                number(per_window(one), ".0f"),
                share(one["identical_share"]),
            ]
            for column, one in (("plain", row), ("times", times[name]))
        }
        rows.append(
            [name, *cells["plain"], share(row["encoder_share"]), rate(row["wer"]), *cells["times"]]
        )
    header = [
        "ms a step",
        "over generate",
        "over undrafted",
        "tokens a pass",
        "ms a window",
        "same ids",
    ]
    with_times = [f"timestamps: {name}" for name in header]
    return table(["engine", *header, "encoder's share", "WER", *with_times], rows)


def long_table(rows: list[dict[str, Any]]) -> str:
    """Engines on whole recordings."""
    lines = [
        [
            row["engine"],
            str(row["batch"]),
            number(row["rtfx"], ".1f") or "tokens differ",
            number(row["over_generate"]),
            number(row["over_undrafted"]),
            share(row["encoder_share"]),
            str(row["threads"]),
            share(row["identical_share"]),
            rate(row["wer"]),
        ]
        for row in sorted(rows, key=lambda row: row["batch"])
    ]
    header = ["engine", "batch", "RTFx", "over generate", "over undrafted", "encoder's share"]
    return table([*header, "threads", "same tokens", "WER"], lines)


def memory_table(rows: list[dict[str, Any]]) -> str:
    """Memory of the engines in megabytes."""
    batches = max((row["peak_mb"] for row in rows), key=len)
    lines = [
        [
            row["engine"],
            number(row["loaded_mb"], ".0f"),
            *[number(row["peak_mb"].get(batch), ".0f") for batch in batches],
        ]
        for row in rows
    ]
    return table(["engine", "loaded", *[f"peak, batch {batch}" for batch in batches]], lines)


TOKENS = 80
"""Tokens of a window of half a minute, about."""


def wide_table(best: list[dict[str, Any]], batch: int, timestamps: bool) -> str:
    """Engines on a widened model: encoder, first token, further tokens, and a whole window."""
    rows = [r for r in best if (r["batch"], r["timestamps"]) == (batch, timestamps)]
    parts = {row["engine"]: parts_of(row) for row in rows if row["decode_s"] and "first_s" in row}
    peer = parts.get("CTranslate2 int8")
    lines = []
    for row in rows:
        name = row["engine"]
        if name not in parts:
            lines.append([name, "ids differ", *[""] * 9])
            continue
        encoder, first, further = parts[name]
        own = _times(parts[name])
        ratios = (
            [number(p / o) for p, o in zip(_times(peer), own, strict=True)] if peer else [""] * 3
        )
        *_, window = own
        lines.append(
            [
                name,
                number(encoder, ".0f"),
                number(first, ".0f"),
                number(further, ".1f"),
                number(row["tokens_per_pass"]),
                number(window, ".0f"),
                *ratios,
                share(row["identical_share"]),
                rate(row["wer"]),
            ]
        )
    header = ["engine", "encoder, ms", "first token, ms", "a further token, ms", "tokens a pass"]
    header += [f"window of {TOKENS} tokens, ms", "further tokens over CTranslate2 int8"]
    header += ["from encoder states", "whole window", "ids of generate", "WER"]
    return table(header, lines)


def _times(parts: tuple[float, float, float]) -> tuple[float, float, float]:
    """Milliseconds of a further token, of all tokens from the encoder's states, and of a window."""
    encoder, first, further = parts
    states = first + (TOKENS - 1) * further
    return further, states, encoder + states


def parts_of(row: dict[str, Any]) -> tuple[float, float, float]:
    """Milliseconds of the encoder and of the first token, a window, and of a further token."""
    count = row["windows"]
    further = (row["decode_s"] - row["first_s"]) / (row["tokens"] - count)
    return 1e3 * row["encoder_s"] / count, 1e3 * row["first_s"] / count, 1e3 * further


def wide_tables(result: dict[str, Any], name: str) -> str:
    """What was measured of a widened model into the result file called ``name``."""
    facts = result["machine"]
    weights = facts["weights_mb"]
    found = [_written(facts, name), "; ".join(facts["notes"])]
    sizes = [f"{kind} {size:.0f} MB" for kind, size in weights.items()]
    if {"model", "rounded"} <= set(weights):
        sizes.append(f"int8 over float32 {weights['rounded'] / weights['model']:.2f}")
    found.append(f"Weights in memory: {', '.join(sizes)}.")
    for batch in sorted({row["batch"] for row in result.get("best", [])}):
        for timestamps in (False, True):
            words = "with timestamps" if timestamps else "without timestamps"
            found.append(f"**Batch {batch}, {words}**")
            found.append(wide_table(result["best"], batch, timestamps))
    if result.get("memory"):
        found += ["**Memory**, megabytes.", memory_table(result["memory"])]
    return "\n\n".join(filter(None, found))


def tables(result: dict[str, Any], name: str) -> str:
    """Everything that was measured into the result file called ``name``."""
    facts = result["machine"]
    found = [_written(facts, name)]
    best = result.get("best", [])
    for batch in sorted({row["batch"] for row in best}):
        count = next(row["windows"] for row in best if row["batch"] == batch)
        found += [f"**Short form, batch {batch}**, {count} windows.", short_table(best, batch)]
    if "long" in result:
        long = result["long"]
        found.append(f"**Long form**, {long['recordings']} recordings, {long['audio_s']:.0f} s.")
        found.append(long_table(long["rows"]))
    if result.get("memory"):
        found += ["**Memory**, megabytes.", memory_table(result["memory"])]
    return "\n\n".join(found)


def _written(facts: dict[str, Any], name: str) -> str:
    """How the numbers came about."""
    versions = [f"{package} {facts[package]}" for package in ("torch", "transformers")]
    if facts["ctranslate2"]:
        versions.append(f"CTranslate2 {facts['ctranslate2']}")
    return (
        f"Written by `{facts['command']}` from `benchmarks/results/{name}`: {facts['model']}, "
        f"{facts['repeats']} repeats, {facts['device']} with {facts['cores']} cores, "
        f"{facts['dtype']}, {', '.join(versions)}, {facts['date']}; load "
        f"{facts['load_at_start']} at the start, {facts['load_at_end']} at the end."
    )
