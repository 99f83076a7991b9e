"""A task for tests of workers, which read it as a file: it invents rows, and items end processes.

An item whose name begins with ``kill`` ends the process that decodes it; ``raise`` fails.
"""

import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmdecode.evaluation import Report, Task
from mmdecode.evaluation.task import ENGINE, Run
from mmdecode.runs.items import Failed, Watch, each
from mmdecode.runs.rows import RowJournal
from mmdecode.runs.tables import rows_of

MODES = ("plain", "guided")


@dataclass(frozen=True)
class Item:
    id: str


@dataclass(frozen=True)
class Row:
    id: str
    mode: str
    margin: float = 0.0
    seconds: float | None = None
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Rows(Report):
    """Report that counts rows."""

    def __init__(self, rows):
        self.recorded, self.conditions = rows, {}

    @property
    def summary(self):
        return {"rows": len(self.recorded)}

    def verdict(self):
        return [f"{len(self.recorded)} rows."]

    def rows(self):
        return [{"rows": str(len(self.recorded))}]

    def about(self):
        return "a stand-in"

    def records(self):
        return [row.as_dict() for row in self.recorded]


def read(path):
    return [Row(**row) for _, row in rows_of(path)]


def decoded(batch):
    for item in batch:
        if item.id.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if item.id.startswith("raise"):
            raise ValueError("as asked")
    return [len(item.id) / 3 for item in batch]


@dataclass(frozen=True, kw_only=True)
class Invented(Task):
    """The task; each word of the file ``data`` is an item, and a file's name in ``images``."""

    def open(self, given):
        [data], files = given["data"], given["images"]
        items = [Item(name) for name in Path(data).read_text().split()]

        def record(journal, progress, items=items, noted=None):
            rows = {(row.mode, row.id): row for row in (journal.rows.values() if journal else ())}
            rows = {key: row for key, row in rows.items() if row.error is None}
            watch = Watch(noted) if noted else None
            for start in range(0, len(items), given["batch_size"]):
                for mode in MODES:
                    batch = items[start : start + given["batch_size"]]
                    batch = [item for item in batch if (mode, item.id) not in rows]
                    for item in batch if journal and files else ():
                        journal.note_read(str(files / item.id))
                    for item, found in each(
                        batch, decoded, hint="", name=lambda one: one.id, watch=watch
                    ):
                        known = {"error": found.error} if isinstance(found, Failed) else {}
                        known = known or {"margin": found, "seconds": 1.5}
                        row = Row(item.id, mode, **known)
                        rows[mode, item.id] = row
                        if journal:
                            journal.add(row)
                        progress(row)
            ordered = [rows[mode, item.id] for mode in MODES for item in items]
            if journal:
                journal.finish_with(ordered)
            return ordered

        return Run(
            report=Rows,
            record=record,
            items=items,
            failed=lambda item, error: [Row(item.id, mode, error=error) for mode in MODES],
            journal=lambda folder, *how: RowJournal(
                folder / self.rows,
                read,
                lambda row: (row.mode, row.id),
                {"a": 1},
                *how,
                lambda row: str(files / row.id) if files else None,
            ),
            total=len(items) * len(MODES),
        )


TASK = Invented(
    name="invented",
    about="A stand-in.",
    options={
        "data": None,
        "images": None,
        "batch_size": 2,
        "output": None,
        "resume": False,
        "overwrite": False,
        "resamples": 10,
        "seed": 0,
        **ENGINE,
    },
)
