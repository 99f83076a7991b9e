"""Files that a run reads and writes: whole or not there, one run at a time, continued as begun.

Results go to a folder, or to one file of lines. `RUN` in the folder, or a file of that ending
beside the file, says under which settings they were made; whatever else is there belongs to its
kind of run (`mmdecode.asr.jobs`, `mmdecode.vlm.jobs`, `mmdecode.evaluation.runs`).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mmdecode.errors import InputError, OptionError

RUN = "run.json"


def write_atomically(path: Path, data: str | bytes) -> None:
    """Writes a file that either is complete or does not exist."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON that can be written as UTF-8 and does not depend on how recordings were batched.

    Numbers that JSON cannot hold become null. Times, whose names end in ``_s`` or are those of a
    manifest, are kept as they are; probabilities and other fractions are rounded to four decimals,
    since their last digits vary with the other recordings of the batch.
    """
    text = json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, indent=indent)
    # half characters, as in names of files that are not UTF-8, have an escape of the same form
    return text.encode("utf-8", "backslashreplace").decode()


def _plain(value: Any, exact: bool = False) -> Any:
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return value if exact else round(value, 4)
    if isinstance(value, Mapping):
        times = ("_s", "offset", "duration")
        return {key: _plain(item, str(key).endswith(times)) for key, item in value.items()}
    return [_plain(item, exact) for item in value] if isinstance(value, (list, tuple)) else value


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


def lock(handle: int, place: Path) -> None:
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
            f"another run is writing to {place}; wait for it, or choose another --out"
        ) from None


def run_of(place: Path) -> Path:
    """Where the settings of results stand: in their folder, or beside their file."""
    return place / RUN if place.is_dir() else place.with_name(f"{place.name}.{RUN}")


def note_settings(place: Path, settings: Mapping[str, Any]) -> None:
    """Writes down under which settings the results in a folder or file are made."""
    noted = json.dumps(_noted(settings), indent=1, default=str)
    write_atomically(run_of(place), noted + "\n")


def check_settings(place: Path, settings: Mapping[str, Any], resume: bool) -> None:
    """Whether a run may continue what a folder or file holds.

    Args:
        place: It holds results.
        settings: Whatever may change a result.
        resume: Whether the user asked to continue.

    Raises:
        OptionError: It may not.
    """
    if not resume:
        raise OptionError(
            f"{place} holds results of an earlier run; continue it with --resume, or choose "
            "another --out"
        )
    run = run_of(place)
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
            f"{place} holds results of other settings ({shown}); repeat them to continue, or "
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
def explained(place: Path) -> Iterator[None]:
    """Turns what the operating system refuses into an error that says what to do.

    Raises:
        InputError: It cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write to {place}: {error.strerror}; choose another --out, or make room and "
            "continue with --resume"
        ) from error


def find_files(paths: Iterable[str], suffixes: Collection[str], kind: str) -> list[str]:
    """Named files as they are, folders searched; each file once.

    Args:
        paths: Of files and folders.
        suffixes: Endings by which a file in a folder is meant, with their dot.
        kind: What such files hold, for the message.

    Raises:
        InputError: A folder holds no such file.
    """
    found: dict[str, None] = {}
    for path in paths:
        if not os.path.isdir(path):
            found[path] = None
            continue
        inside = [
            str(file)
            for file in sorted(Path(path).rglob("*"))
            if file.suffix.lower() in suffixes and file.is_file() and file.name[0] != "."
        ]
        if not inside:
            raise InputError(
                f"the folder {path} holds no {kind} files; expected {', '.join(sorted(suffixes))}"
            )
        found.update(dict.fromkeys(inside))
    return list(found)
