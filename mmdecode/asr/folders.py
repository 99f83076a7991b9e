"""Folders that runs write results to: one run at a time, continued only as it was begun.

`RUN` says under which settings a folder's results were made; whatever else is in it belongs to its
kind of run (`mmdecode.asr.jobs`, `mmdecode.evaluation.runs`).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mmdecode.asr.formats import write_atomically
from mmdecode.errors import InputError, OptionError

RUN = "run.json"


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keeps a second run out of a folder; the operating system ends the claim with the process.

    Raises:
        OptionError: Another run writes there.
        InputError: The folder cannot be made.
    """
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    try:
        lock(handle, folder)
        yield
    finally:
        os.close(handle)


def lock(handle: int, folder: Path) -> None:
    """Locks an open file or folder until it is closed.

    Raises:
        OptionError: Another run has it.
    """
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OptionError(
            f"another run is writing to {folder}; wait for it, or choose another --out"
        ) from None


def note_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Writes down under which settings results are made."""
    noted = json.dumps(_noted(settings), indent=1, default=str)
    write_atomically(folder / RUN, noted + "\n")


def check_settings(folder: Path, settings: Mapping[str, Any], resume: bool) -> None:
    """Whether a run may continue what a folder holds.

    Args:
        folder: It holds results.
        settings: Whatever may change a result.
        resume: Whether the user asked to continue.

    Raises:
        OptionError: It may not.
    """
    if not resume:
        raise OptionError(
            f"{folder} holds results of an earlier run; continue it with --resume, or choose "
            "another --out"
        )
    run = folder / RUN
    try:
        before = json.loads(run.read_text(encoding="utf-8"))
        old_hash, old = before["hash"], dict(before["settings"])
    except (OSError, ValueError, KeyError, TypeError):
        raise OptionError(
            f"{run} cannot be read, so nothing shows that the results beside it belong to this "
            "run; choose another --out"
        ) from None
    wanted = _noted(settings)
    if old_hash != wanted["hash"]:
        new = json.loads(json.dumps(wanted["settings"], default=str))
        differing = [k for k in sorted({*old, *new}) if old.get(k) != new.get(k)]
        shown = "; ".join(f"{k} was {old.get(k)!r}, is {new.get(k)!r}" for k in differing)
        raise OptionError(
            f"{folder} holds results of other settings ({shown}); repeat them to continue, or "
            "choose another --out"
        )


def append_line(file: BinaryIO, line: bytes) -> None:
    """Writes a line where a crash cannot lose it."""
    file.write(line)
    file.flush()
    os.fsync(file.fileno())


def complete_lines(path: Path) -> Iterator[bytes]:
    """Lines that were written to their end, which a crash may keep the last one from."""
    with path.open("rb") as file:
        yield from itertools.takewhile(lambda line: line.endswith(b"\n"), file)


def _noted(settings: Mapping[str, Any]) -> dict[str, Any]:
    text = json.dumps(settings, sort_keys=True, default=str)
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return {"hash": digest, "settings": dict(settings)}


@contextlib.contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turns what the operating system refuses into an error that says what to do.

    Raises:
        InputError: The folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write to {folder}: {error.strerror}; choose another --out, or make room and "
            "continue with --resume"
        ) from error
