"""``mmdecode results``: how far a job got, and why items failed."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from mmdecode.cli.output import JsonFlag, emit_json, show_tables
from mmdecode.errors import OptionError
from mmdecode.runs.console import console, print_line
from mmdecode.runs.tables import write_table

SHOWN = 10  # failures listed one by one


def command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER")],
    retry: bool = False,
    table: Path | None = None,
    json: JsonFlag = False,
) -> None:
    """Show how far a job got, and why items failed.

    The exit code is 1 if items failed or are missing. --retry continues the job with the command
    that began it.

    For example:

      mmdecode results texts

      mmdecode results texts --retry

      mmdecode results texts --table texts.csv

    Options:
        folder: --out of transcribe, ask or generate-image.
        retry: Run the job's command again, for what failed or is missing, of all shards.
        table: Also write all results to this file: .csv, .tsv, .json, .jsonl or .parquet.
    """
    from mmdecode.runs.status import status_of

    found = status_of(folder, lines=table is not None)
    if retry:
        if not found.command:
            raise OptionError(f"{folder} does not say which command wrote it; run it with --resume")
        words = _all_shards([word for word in found.command if word != "--overwrite"])
        words += ["--resume"] * ("--resume" not in words)
        print_line(f"in {found.folder}: mmdecode {shlex.join(words)}", console)
        done = subprocess.run([sys.executable, "-m", "mmdecode", *words], cwd=found.folder)
        raise typer.Exit(done.returncode)
    if table is not None:
        write_table(table, found.lines)
    failed = found.failed
    if json:
        emit_json(
            {
                "done": found.done,
                "failed": [{"id": name, "error": error} for name, error in failed.items()],
                "causes": dict(found.causes),
                "missing": found.missing,
                "settings": found.settings,
                "command": found.command,
            }
        )
    else:
        print_line(f"{found.done} done, {len(failed)} failed, {len(found.missing)} missing")
        if found.causes:
            show_tables([[{"cause": k, "items": str(n)} for k, n in found.causes.items()]])
        for name, error in list(failed.items())[:SHOWN]:
            print_line(f"failed: {name}: {error.removeprefix(f'{name}: ')}")
        if len(failed) > SHOWN:
            print_line(f"and {len(failed) - SHOWN} more; all are in --json")
        if failed or found.missing:
            print_line(f"go on with: mmdecode results {shlex.quote(str(folder))} --retry", console)
    if failed or found.missing:
        raise typer.Exit(1)


def _all_shards(words: list[str]) -> list[str]:
    """Returns the words of a command without the option that says which share it decodes."""
    kept = iter(words)
    return [
        word
        for word in kept
        if not word.startswith("--shard=") and not (word == "--shard" and next(kept, ""))
    ]
