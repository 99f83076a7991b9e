"""How far a job got that writes its results to a folder, see `mmdecode.runs.journal`."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmdecode.errors import InputError
from mmdecode.runs.files import RUN
from mmdecode.runs.journal import Journal
from mmdecode.runs.lines import Lines, written_in


@dataclass(frozen=True)
class Status:
    """State of a job.

    Attributes:
        done: Number of items with a result.
        failures: Line of each item that failed, by its id.
        missing: Ids of items without a line, in order.
        settings: Settings of the job.
        command: Words of the command line that wrote the results; empty: not known.
        folder: Working directory of that command.
        lines: Line of each item that has one, if asked for; a result outweighs a failure.
    """

    done: int
    failures: dict[str, dict[str, Any]]
    missing: list[str]
    settings: dict[str, Any]
    command: list[str]
    folder: str
    lines: list[dict[str, Any]]

    @property
    def failed(self) -> dict[str, str]:
        """Messages of the items that failed, by id."""
        return {name: line["error"] for name, line in self.failures.items()}

    @property
    def causes(self) -> Counter[str]:
        """Number of failed items by the class of their error, the most frequent first."""
        kinds = (line.get("kind", "") for line in self.failures.values())
        return Counter(dict(Counter(kinds).most_common()))


def status_of(folder: Path, lines: bool = False) -> Status:
    """Reads the state of a job, which may be running.

    Args:
        folder: Folder of the results.
        lines: Whether to keep all lines, which takes more memory than all else.

    Raises:
        InputError: The folder holds no results of a job, or a line is no result.
    """
    try:
        run = json.loads((folder / RUN).read_text(encoding="utf-8"))
        work, settings = run["work"], run["settings"]
        ids = [name for _, unit in work["units"] for name in unit]
    except FileNotFoundError as error:
        raise InputError(
            f"{folder} has no {RUN}; expected --out of transcribe, ask or generate-image"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder / RUN} cannot be read as the settings of a job ({type(error).__name__}); "
            "expected --out of transcribe, ask or generate-image. If an evaluation wrote it, see "
            "its report.html; one that was interrupted goes on with its command and --resume"
        ) from error
    with contextlib.closing(Lines(written_in(folder), Journal[Any](folder, settings))) as found:
        failed = [name for name in found if name in found.failed]
        failures = map(json.loads, found.read(failed))
        return Status(
            done=len(found) - len(failed),
            failures=dict(zip(failed, failures, strict=True)),
            missing=[name for name in ids if name not in found],
            settings=settings,
            command=work["command"],
            folder=work["in"],
            lines=list(map(json.loads, found.read(found))) if lines else [],
        )
