"""Tables of the page on the server, and what must hold. See serve.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pages import table

Row = Mapping[str, Any]
MOST_GROWN = 5.0
"""Most growth of resident memory, in percent."""
NONE_OF = {
    "wrong": "wrong texts",
    "lost": "streams without their last word",
    "stuck": "requests that never end",
    "unanswered": "requests without an answer",
    "failed": "requests that failed",
    "ended_early": "streams that ended early",
    "faults": "answers 5xx besides 503",
    "bugs": "errors in the server's log",
    "opened": "connections to addresses that uploads name",
}
"""Numbers of a row that have to be 0."""


def missed(result: Mapping[str, Any]) -> list[str]:
    """Says what does not hold."""
    found = []
    for part, measured in result["parts"].items():
        for row in measured["rows"]:
            own = [f"{row[name]} {text}" for name, text in NONE_OF.items() if row.get(name)]
            if row.get("held") and row["held_counts"]:
                own.append(f"{row['held']} connections that nobody reads are not closed")
            if row.get("grown_counts") and row["grown_percent"] > MOST_GROWN:
                own.append(f"memory grew by {row['grown_percent']:.1f} %")
            found += [f"{part}, {name_of(row)}: {text}" for text in own]
    return found


def name_of(row: Row) -> str:
    """Words for a row."""
    names = (("way", ""), ("kind", ""), ("clients", "clients"), ("streams", "streams"))
    return " ".join(f"{row[name]} {text}".strip() for name, text in names if row.get(name))


def seconds(value: float | None, digits: int = 2) -> str:
    """A time in seconds."""
    return "" if value is None else f"{value:.{digits}f} s"


def ms(value: float | None) -> str:
    """A time in milliseconds."""
    return "" if value is None else f"{1000 * value:.0f} ms"


def tables(result: Mapping[str, Any], name: str) -> str:
    """Tables of the page, from the result file called ``name``."""
    facts = result["machine"]
    loads = ", ".join(
        f"{part} {own['load'][0]:.1f} to {own['load'][1]:.1f}"
        for part, own in result["parts"].items()
    )
    failed = missed(result)
    verdict = "All that has to hold, held." if not failed else f"MISSED: {'; '.join(failed)}."
    lines = [
        f"Written by `{facts['command']}` from `benchmarks/results/{name}`: {facts['model']} with "
        f"`--draft {facts['draft']}`, {facts['chat_model']}, server and clients on "
        f"{facts['device']} with {facts['cores']} cores, {facts['threads']} thread, "
        f"{facts['dtype']}, torch {facts['torch']}, transformers {facts['transformers']}, "
        f"{facts['date']}; load: {loads}. {verdict}"
    ]
    shown = {"files": files, "capacity": capacity, "overload": overload, "vanish": vanish,
             "slow": slow, "hostile": hostile}  # fmt: skip
    for part, show in shown.items():
        if part in result["parts"]:
            lines += show(result["parts"][part]["rows"])
    return "\n\n".join(lines)


def files(rows: list[Row]) -> Iterator[str]:
    """Tables of files and questions."""
    cells = [
        [row["way"], str(row["clients"] or ""), f"{row['audio_per_s']:.0f}",
         ms(row["median_s"]), ms(row["p95_s"])]
        for row in rows
        if "audio_per_s" in row
    ]  # fmt: skip
    [tiny] = [row for row in rows if row["way"] == "overhead"]
    yield "**Files**: each client sends a clip when it has the text of the one before"
    yield table(["", "clients", "seconds of audio a second", "median", "95 % within"], cells)
    yield (
        f"A clip of 0.2 s takes {ms(tiny['server_median_s'])} through the server (median of "
        f"{tiny['requests']}) and {ms(tiny['here_median_s'])} in this process: a request costs "
        f"{ms(tiny['server_median_s'] - tiny['here_median_s'])} more."
    )
    cells = [
        [row["way"], str(row["clients"]), f"{row['answers_per_s']:.1f}", ms(row["median_s"]),
         ms(row["p95_s"]), ms(row.get("first_median_s")), ms(row.get("first_p95_s"))]
        for row in rows
        if "answers_per_s" in row
    ]  # fmt: skip
    yield "**Questions about images**"
    header = ["", "clients", "answers a second", "median", "95 % within"]
    yield table([*header, "first piece, median", "95 % within"], cells)


def capacity(rows: list[Row]) -> Iterator[str]:
    """Table of streams at real time."""
    yield (
        f"**Streams for {rows[0]['seconds']:g} s at real time**, steps of 1 s, agreement; delay "
        "from the moment the end of a word was sent to the moment the word came back committed"
    )
    cells = [
        [
            str(row["streams"]), seconds(row["delay_s"]), seconds(row["delay_p95_s"]),
            seconds(row["waiting_s"], 1), seconds(row["waiting_most_s"], 1),
            seconds(row["late_s"], 1), f"{row['decoded_s']:.0f} of {row['sent_s']:.0f} s",
            seconds(row["drain_s"], 1), f"{100 * row['equal']:.0f} %",
        ]
        for row in rows
    ]  # fmt: skip
    header = ["streams", "mean delay", "95 % of words within", "audio waiting, mean", "most"]
    header += ["sending held up, most", "decoded when sending ended", "last word after it"]
    yield table([*header, "same text as alone"], cells)


def overload(rows: list[Row]) -> Iterator[str]:
    """Sentence on streams that the machine cannot keep up with."""
    for row in rows:
        yield (
            f"**Overload**: {row['streams']} streams of {row['seconds']:g} s at real time, to the "
            f"last word: it came {row['drain_s']:.1f} s after the last sample. Streams without "
            f"their last word: {row['lost']}; with another text than alone: {row['wrong']}."
        )


def vanish(rows: list[Row]) -> Iterator[str]:
    """Sentence on clients that go."""
    for row in rows:
        before, after = row["memory_mb"]
        yield (
            f"**Clients that vanish**: {row['requests']} requests of {row['clients']} clients, "
            f"{row['vanished']} given up at a random moment. Texts of another client or otherwise "
            f"wrong: {row['wrong']}; requests that are stuck: {row['stuck']}; resident memory "
            f"{before:.0f} MB before and {after:.0f} MB after ({row['grown_percent']:+.1f} %)."
        )


def slow(rows: list[Row]) -> Iterator[str]:
    """Sentence on clients that do not read."""
    for row in rows:
        closed = "" if row["closed_s"] is None else f", all after {row['closed_s']:.0f} s"
        yield (
            f"**Clients that read slowly or not at all**: {row['clients']}, a quarter each events "
            "of a file at 32 bytes a second, events of an answer, requests in a row, and a stream. "
            f"A clip of another client takes {ms(row['alone_median_s'])} before (median; 95 % "
            f"within {ms(row['alone_p95_s'])}) and {ms(row['meanwhile_median_s'])} meanwhile "
            f"({ms(row['meanwhile_p95_s'])}; the longest of {row['meanwhile']}: "
            f"{ms(row['meanwhile_most_s'])}). The server closed {row['closed']} of their "
            f"connections{closed}; stuck: {row['stuck']}."
        )


def hostile(rows: list[Row]) -> Iterator[str]:
    """Table of what uploads were answered."""
    total = rows[-1]
    memory_mb = total["memory_mb"]
    warm = memory_mb[min(total["settled"], len(memory_mb) - 1)]
    names = sorted(total["statuses"])
    cells = [
        [
            row["kind"],
            f"{row['uploads']:,}",
            *(str(row["statuses"].get(name, "")) for name in names),
        ]
        for row in rows
    ]
    yield "**Uploads that are broken or made to do harm**, by what was answered"
    yield table(["", "uploads", *names], cells)
    yield (
        f"A good recording sent after every 500 had a wrong text {total['wrong']} times. Resident "
        f"memory after the first 500: {total['memory_mb'][1]:.0f} MB, after "
        f"{500 * total['settled']:,}, when caches and heap are warm: {warm:.0f} MB, at most "
        f"{total['grown_percent']:.1f} % more later. Processes that decode uploads: "
        f"{total['children']} were started, {total['killed']} ended for what they decoded. Files "
        f"and addresses that uploads name and that were opened: {total['opened']}."
    )
