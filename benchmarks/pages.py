"""Shared output of the benchmarks: Markdown tables, pages, result files, and a load warning."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmdecode.errors import OptionError
from mmdecode.evaluation.speed.stopwatch import load
from mmdecode.runs.console import only_our_output
from mmdecode.runs.files import (
    marked_json,
    overwriting,
    page_with,
    refuse_foreign,
    write_between,
    write_file,
)

RESULTS = Path(__file__).parent / "results"
"""Folder of result files."""
SECTION = "tables"
"""Name of the marks around a page's main tables."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def marks(name: str) -> tuple[str, str]:
    """First and last line of the generated part of a page."""
    return f"<!-- {name} -->", f"<!-- end of {name} -->"


def write_page(page: Path, tables: str, name: str = SECTION) -> None:
    """Puts the tables between the marks of the page."""
    write_between(page, *marks(name), tables)


def with_section(name: str, section: str) -> str:
    """Name of a result file, with the section of the page that its tables are put into."""
    return name if section == SECTION else f"{name}-{section.replace(' ', '-')}"


def write_result(path: Path, result: Mapping[str, Any], indent: int | None = 1) -> None:
    """Writes a result file."""
    write_file(path, marked_json(result, indent))


def parsed(parser: argparse.ArgumentParser, page: str = SECTION) -> argparse.Namespace:
    """The arguments, with ``--overwrite``; what could not be written is refused here.

    Args:
        parser: With ``--out``, a folder, or ``--report``, a file, and perhaps ``--page``.
        page: Name of the marks of ``--page``, where there is no ``--section``.
    """
    parser.add_argument("--overwrite", action="store_true", help="also what mmdecode did not write")
    arguments = parser.parse_args()
    if arguments.overwrite:
        overwriting().__enter__()  # until the process ends
    try:
        single = getattr(arguments, "report", None)
        refuse_foreign([single] if single else sorted(arguments.out.glob("*.json")))
        if getattr(arguments, "page", None):
            page_with(arguments.page, *marks(getattr(arguments, "section", page)))
    except OptionError as error:
        parser.error(str(error))
    return arguments


def publish(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], Path],
    tables: Callable[[Mapping[str, Any], str], str],
) -> None:
    """Runs a benchmark, or takes an earlier result; prints its tables, and writes its page.

    Args:
        parser: Parser with the benchmark's own options; those of output are added.
        run: Function that measures, and returns the result file.
        tables: Function that makes the tables of a result, given the name of its file.
    """
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, help="write tables into this page")
    parser.add_argument("--result", type=Path, help="show this earlier result, measure nothing")
    arguments = parsed(parser)
    only_our_output()
    path = arguments.result or run(arguments)
    text = tables(json.loads(path.read_text()), path.name)
    print(f"\n{text}\n\nwritten: {path}")
    if arguments.page:
        write_page(arguments.page, text)


def add_parts(parser: argparse.ArgumentParser, parts: Sequence[str]) -> None:
    """Adds the options of a benchmark that measures in parts, see `measure_parts`."""
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="what to measure")
    parser.add_argument("--onto", type=Path, help="earlier result, whose other parts stay")


def measure_parts(
    arguments: argparse.Namespace,
    path: Path,
    result: dict[str, Any],
    parts: Mapping[str, Callable[[], Iterable[Mapping[str, Any]]]],
) -> Path:
    """Measures the parts that are asked for, and writes the result after each of them.

    Args:
        arguments: Parsed arguments, with those of `add_parts`.
        path: The result file.
        result: The result so far, with ``machine``; rows are added to it by part.
        parts: Functions that yield the rows of each part; they may add to ``result``.

    Returns:
        The result file.
    """
    if arguments.onto:
        result |= json.loads(arguments.onto.read_text()) | {"machine": result["machine"]}
    for part in arguments.parts:
        result[part] = []
        for row in parts[part]():
            print(part, {key: value for key, value in row.items() if key != "texts"}, flush=True)
            result[part].append(row)
        write_result(path, result, indent=None)
    result["machine"]["load_at_end"] = load()
    write_result(path, result, indent=None)
    return path


def warn_if_busy(facts: Mapping[str, Any]) -> None:
    """Warns if the machine was busy when the benchmark began."""
    if facts["load_at_start"] > 0.7:
        print(f"WARNING: load {facts['load_at_start']}: times below are not to be quoted")
