"""Tables and sentences of docs/real_speech.md, from a result of real_speech.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asr_tables import number
from pages import table

PIPELINE = "transformers' pipeline"
PEERS = ("generate", "undrafted", "onnxruntime", PIPELINE)
"""Prefixes of the names of rows without a drafter."""
Row = dict[str, Any]


def with_interval(value: Sequence[float] | None) -> str:
    """A ratio and its interval."""
    return "" if value is None else f"{value[0]:.2f} [{value[1]:.2f}, {value[2]:.2f}]"


def errors(row: Row) -> str:
    """Wrong words, and their share."""
    if row["word_errors"] is None:
        return ""
    return f"{row['word_errors']} ({100 * row['word_errors'] / row['words']:.1f} %)"


def is_draft(row: Row) -> bool:
    """Whether a row is our loop with a drafter."""
    return not row["way"].startswith(PEERS)


def is_int8(row: Row) -> bool:
    """Whether a row is our loop with int8 weights."""
    return "int8" in row["way"] and not row["way"].startswith("onnxruntime")


def short_table(rows: list[Row]) -> str:
    """Single clips of one batch size and number of threads."""
    header = ["way", "decoder: ms a token", "over generate", "encoder: ms a second of audio"]
    header += ["real-time factor", "tokens a pass", "same ids", "wrong words"]
    lines = [
        [
            row["way"],
            number(row["ms_per_token"]),
            with_interval(row["over_generate"]),
            number(row["encoder_ms_per_audio_s"], ".1f"),
            number(row["rtf"], ".4f"),
            number(row["tokens_per_pass"]),
            f"{row['identical']} of {row['clips']}",
            errors(row),
        ]
        for row in rows
    ]
    return table(header, lines)


def long_table(recording: dict[str, Any]) -> str:
    """Table of one recording."""
    header = ["way", "batch", "real-time factor", "over the pipeline's", "decoder: ms a token"]
    header += ["encoder: ms a second of audio", "tokens a pass", "windows with the same ids"]
    lines = [
        [
            row["way"],
            str(row["batch"]),
            number(row["rtf"], ".4f"),
            number(row["over_pipeline"]),
            number(row["ms_per_token"]),
            number(row["encoder_ms_per_audio_s"], ".1f"),
            number(row["tokens_per_pass"]),
            "" if row["identical"] is None else f"{row['identical']} of {recording['windows']}",
        ]
        for row in recording["rows"]
    ]
    return table(header, lines)


def memory_table(rows: list[Row], minutes: float) -> str:
    """Memory of all ways in megabytes."""
    batches = list(rows[0]["peak_mb"])
    header = ["way", "loaded", *[f"peak, {batch} clips at once" for batch in batches]]
    lines = [
        [
            row["way"],
            number(row["loaded_mb"], ".0f"),
            *[number(row["peak_mb"][batch], ".0f") for batch in batches],
            number(row["recording_mb"], ".0f"),
        ]
        for row in rows
    ]
    return table([*header, f"peak, {minutes:g} minutes"], lines)


def bar_sentences(bars: list[dict[str, Any]]) -> list[str]:
    """A sentence for each bar."""
    found = []
    for bar in bars:
        verdict = "held" if bar["held"] else "MISSED"
        if "way" in bar:
            asked = f"at most {bar['most']} asked for"
            found.append(
                f"{bar['way'].capitalize()}, one clip at a time, {threads(bar['threads'])}: "
                + (
                    f"{bar['value']:.2f} [{bar['low']:.2f}, {bar['high']:.2f}] times as long a "
                    f"token as the publisher's int8 graphs, {asked}: {verdict}. Wrong words: "
                    f"{bar['wrong']} against {bar['their_wrong']}."
                    if bar["value"] is not None
                    else f"not compared with the publisher's int8 graphs, which did not run; "
                    f"{asked}."
                )
            )
        elif "least" in bar:
            found.append(
                f"Undrafted, one clip at a time, {threads(bar['threads'])}: {bar['value']:.2f} "
                f"[{bar['low']:.2f}, {bar['high']:.2f}] times as fast a token as `generate`, at "
                f"least {bar['least']} asked for: {verdict}."
            )
        else:
            found.append(
                f"Real-time factor of the 30-minute recording, undrafted, batch {bar['batch']}, "
                f"{threads(bar['threads'])}: {bar['value']:.2f} of the pipeline's, at most "
                f"{bar['most']} asked for: {verdict}."
            )
    return found


def threads(count: int) -> str:
    """A number of threads in words."""
    return f"{count} thread" + "s" * (count != 1)


def id_sentences(result: dict[str, Any]) -> list[str]:
    """Which rows have the ids of ``generate``, and which have not."""
    mine = [r for r in result.get("short", []) if is_draft(r) or r["way"].startswith("undrafted")]
    own = [row for row in mine if not is_int8(row)]
    other = sorted({row["way"] for row in own if row["identical"] < row["clips"]})
    found = []
    kind = "float32 " if len(own) < len(mine) else ""
    if own and not other:
        found.append(
            f"Every {kind}row of ours has the ids that plain `generate` gives of each clip alone, "
            "in batches too."
        )
    elif own:
        found.append(f"DIFFERENT ids than `generate` in rows of ours: {', '.join(other)}.")
    int8 = [row for row in mine if is_int8(row)]
    other = sorted({row["way"] for row in int8 if row["as_undrafted"] < row["clips"]})
    if other:
        found.append(f"DIFFERENT ids than without a draft in int8 rows: {', '.join(other)}.")
    elif int8:
        found.append("Every int8 row of ours has the ids of the int8 model without a draft.")
    for way, why in (
        (
            "generate, padded batch",
            "the encoder's first norm runs over time, padding included, so that a padded batch "
            "hears other states",
        ),
        ("onnxruntime", "its products are of 8 bits, and it promises none"),
        (PIPELINE, "compared by text, batches are padded"),
    ):
        rows = [row for row in result.get("short", []) if row["way"].startswith(way)]
        worst = min(rows, key=lambda row: row["identical"] / row["clips"], default=None)
        if worst is not None and worst["identical"] < worst["clips"]:
            found.append(
                f"{worst['way'][0].upper()}{worst['way'][1:]} has them in {worst['identical']} of "
                f"{worst['clips']} clips in batches of {worst['batch']}: {why}."
            )
    return found


def draft_sentences(result: dict[str, Any]) -> list[str]:
    """Whether any draft gains time, on clips and on recordings."""
    found = []
    rows = result.get("short", [])
    cases = {(row["threads"], row["batch"]) for row in rows}
    gains = []
    for case in sorted(cases):
        here = [row for row in rows if (row["threads"], row["batch"]) == case]
        base = {row["way"]: row["ms_per_token"] for row in here}
        for row in filter(is_draft, here):
            without = base["undrafted int8" if is_int8(row) else "undrafted"]
            gains.append((without / row["ms_per_token"], row))
    if gains:
        best, row = max(gains, key=lambda one: one[0])
        longest = max((row for _, row in gains), key=lambda row: row["tokens_per_pass"])
        where = f"batch {row['batch']}, {threads(row['threads'])}"
        same = " with the same weights" if any(map(is_int8, rows)) else ""
        says = "None of these drafts gains time" if best <= 1 else "Some draft gains time here"
        found.append(
            f"{says}: the best, {row['way']}, is {best:.2f} times as fast a token as our loop "
            f"without a draft{same} ({where}). Most tokens a pass has {longest['way']}, "
            f"{longest['tokens_per_pass']:.2f}."
        )
        if best <= 1:
            found.append(
                "What is lost and why: these clips repeat little, so that drafters which copy have "
                "little to copy, and a pass over more tokens, or a draft by the model's own "
                "layers, costs more time than the tokens that it saves."
            )
    return found


def word_sentences(result: dict[str, Any]) -> list[str]:
    """Word errors, with what they are worth."""
    rows = [row for row in result.get("short", []) if row["word_errors"] is not None]
    base = next((row for row in rows if row["way"] == "generate"), None)
    if base is None:
        return []
    return [
        f"Word errors are those of single clips, {base['words']} reference words after "
        f"normalisation: {errors(base)} wrong by `generate`. This is little data, and LibriSpeech, "
        "of which two clips are, may be in the model's training data: it shows that the model "
        "hears, and ranks nothing."
    ]


def loss_sentences(result: dict[str, Any]) -> list[str]:
    """Where another engine is ahead, and by how much."""
    found = []
    rows = [row for row in result.get("short", []) if row["batch"] == 1]
    for count in sorted({row["threads"] for row in rows}):
        here = {row["way"]: row for row in rows if row["threads"] == count}
        int8 = next((row for name, row in here.items() if name.startswith("onnx")), None)
        own = here.get("undrafted")
        if int8 and own:
            ratio = own["ms_per_token"] / int8["ms_per_token"]
            word = "less" if ratio > 1 else "more"
            found.append(
                f"On {threads(count)} the publisher's int8 graphs take {word} than our float32 "
                f"loop, {int8['ms_per_token']:.2f} ms a token and "
                f"{int8['encoder_ms_per_audio_s']:.1f} ms a second of audio against "
                f"{own['ms_per_token']:.2f} and {own['encoder_ms_per_audio_s']:.1f}."
            )
    return found


def tables(result: dict[str, Any], name: str) -> str:
    """Everything that was measured into the result file called ``name``."""
    facts = result["machine"]
    versions = [f"{package} {facts[package]}" for package in ("torch", "transformers")]
    if facts["onnxruntime"]:
        versions.append(f"onnxruntime {facts['onnxruntime']}")
    found = [
        f"Written by `{facts['command']}` from `benchmarks/results/{name}`: {facts['model']}, "
        f"{facts['parameters'] / 1e6:.1f} M parameters, {facts['clips']} clips of "
        f"{facts['audio_s']:.0f} s, {facts['repeats']} repeats, {facts['device']} with "
        f"{facts['cores']} cores, {facts['dtype']}, {', '.join(versions)}, {facts['date']}; load "
        f"{facts['load_at_start']} at the start, {facts['load_at_end']} at the end."
        + (" A smoke test, not to be quoted." if facts["limited"] else "")
    ]
    sentences = [*bar_sentences(result["bars"]), *id_sentences(result), *draft_sentences(result)]
    sentences += [*loss_sentences(result), *word_sentences(result)]
    found.append("\n".join(f"- {sentence}" for sentence in sentences))
    rows = result.get("short", [])
    for case in dict.fromkeys((row["threads"], row["batch"]) for row in rows):
        here = [row for row in rows if (row["threads"], row["batch"]) == case]
        together = "one at a time" if case[1] == 1 else f"{case[1]} at a time"
        found += [f"**Single clips, {together}, {threads(case[0])}.**", short_table(here)]
    for recording in result.get("long", []):
        count = recording["rows"][0]["threads"]
        found.append(
            f"**A recording of {recording['audio_s'] / 60:.1f} minutes**, {recording['clips']} "
            f"clips in {recording['windows']} windows, {threads(count)}, {recording['repeats']} "
            f"repeat{'s' * (recording['repeats'] != 1)}."
        )
        found.append(long_table(recording))
    if result.get("memory", {}).get("rows"):
        measured = result["memory"]
        found += [
            "**Memory**, megabytes.",
            memory_table(measured["rows"], measured["seconds"] / 60),
        ]
    if result["refused"]:
        found.append("**Left out**, because the model does not offer what they need:")
        found.append("\n".join(f"- {way}: {why}." for way, why in result["refused"].items()))
    return "\n\n".join(found)
