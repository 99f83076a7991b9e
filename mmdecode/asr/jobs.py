"""A folder of results that survives being interrupted.

A recording's files are written first, each under a temporary name and renamed, then its line is
appended to ``results.jsonl`` and flushed; ``run.json`` says under which settings. So whatever has a
line is complete, and what has none is transcribed again. Several processes write a part each,
``parts/rank-N.jsonl``. Where a run starts and ends, all lines are merged into ``results.jsonl`` in
the order of the input, one per recording; nothing in it depends on when a run was interrupted or by
how many processes it was made.

Each line has the ``id`` and the absolute ``audio`` path, so ``results.jsonl`` is itself a manifest
(`mmdecode.asr.manifest`).

A folder with results is continued only on request and only under the same settings; recordings that
failed are tried again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmdecode.asr import crashes
from mmdecode.asr.formats import FORMATS, Names, to_json, write_atomically
from mmdecode.asr.manifest import Entry
from mmdecode.asr.subtitles import DEFAULT, Layout
from mmdecode.asr.transcriber import Failure, Transcript
from mmdecode.errors import InputError, OptionError

RESULTS, RUN, PARTS = "results.jsonl", "run.json", "parts"
JOURNAL = ".reading-{}.tmp"


def settings_hash(settings: Mapping[str, Any]) -> str:
    """Of everything that may change a file."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keeps a second run out of a folder; the operating system ends the claim with the process.

    Raises:
        OptionError: Another run writes there.
        InputError: The folder cannot be made.
    """
    with _explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle, folder)
        yield
    finally:
        os.close(handle)


def prepare(
    folder: Path, settings: Mapping[str, Any], resume: bool, entries: Sequence[Entry]
) -> set[str]:
    """Makes a folder ready: settings checked and noted, what was left half-done merged or removed.

    Args:
        folder: Where results go; it exists.
        settings: What may change a file.
        resume: Continue what is there.
        entries: The input, in order.

    Returns:
        Ids of recordings that were being decoded when an earlier run died.

    Raises:
        OptionError: The folder holds results and ``resume`` is not set, or holds results of other
            settings.
        InputError: The folder cannot be written.
    """
    wanted = {"hash": settings_hash(settings), "settings": settings}
    with _explained(folder):
        if (folder / RESULTS).exists() or (folder / PARTS).exists():
            check_run(folder, wanted, resume)
        suspects = crashes.suspects(folder.glob(JOURNAL.format("*")))
        for left in folder.glob(".*.tmp"):
            left.unlink()
        write_atomically(folder / RUN, json.dumps(wanted, indent=1, default=str) + "\n")
    merge(folder, entries)
    return suspects


def merge(folder: Path, entries: Sequence[Entry]) -> None:
    """Puts all lines into ``results.jsonl``: one per recording, in the order of the input.

    Raises:
        InputError: A line cannot be read, or the folder cannot be written.
    """
    place = {entry.id: index for index, entry in enumerate(entries)}
    lines: dict[str, bytes] = {}
    transcribed: set[str] = set()
    with _explained(folder):
        parts = sorted((folder / PARTS).glob("*.jsonl"))
        for path in parts:  # a process of a run whose leading one was killed may still be at it
            with path.open("rb") as file:
                _lock(file.fileno(), folder)
        for path in [folder / RESULTS, *parts]:
            for line, found in _lines(path):
                source = found["source"]
                if "error" not in found:
                    transcribed.add(source)
                elif source in transcribed:
                    continue
                lines[source] = line
        # recordings of an earlier, larger input stay, behind the others
        ordered = sorted(lines, key=lambda source: place.get(source, len(place)))
        write_atomically(folder / RESULTS, b"".join(lines[source] for source in ordered))
        for path in parts:
            path.unlink()
        if (folder / PARTS).exists():
            (folder / PARTS).rmdir()


class ResultFolder:
    """Where one process of a run writes; `prepare` comes before, `merge` after.

    Args:
        folder: A prepared folder.
        formats: Written per recording.
        entries: The input, in order; all processes get the same.
        layout: Of subtitles.
        rank: Of this process; ``None``: it is alone.

    Attributes:
        done: Ids of the recordings that have a transcript.
        journal: Of what is being decoded.

    Raises:
        InputError: The folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        formats: Sequence[str],
        entries: Sequence[Entry],
        layout: Layout = DEFAULT,
        rank: int | None = None,
    ) -> None:
        self.folder, self.formats, self.layout = folder, formats, layout
        self.done: set[str] = set()
        self._names: dict[str, str] = {}
        self._failed: dict[str, bytes] = {}
        with _explained(folder):
            for line, found in _lines(folder / RESULTS):
                self._names[found["source"]] = found["name"]
                if "error" in found:
                    self._failed[found["source"]] = line
                else:
                    self.done.add(found["source"])
            part = folder / RESULTS
            if rank is not None:
                part = folder / PARTS / f"rank-{rank}.jsonl"
                part.parent.mkdir(exist_ok=True)
            self._file = part.open("ab")
            _lock(self._file.fileno(), folder)
            self.journal = crashes.Journal(folder / JOURNAL.format(rank or 0))
        names = Names(self._names.values())
        for entry in entries:  # in the order of the input, whatever is done and in which order
            if entry.id not in self._names:
                self._names[entry.id] = names.new(entry.id)
        self._entries = {entry.id: (place, entry) for place, entry in enumerate(entries)}

    def add(self, result: Transcript | Failure) -> Transcript | Failure:
        """Writes the files of a recording, then its line.

        Args:
            result: Its ``source`` is the id of an entry.

        Returns:
            The result with its place in the whole input, not among what was left to do.

        Raises:
            InputError: The folder cannot be written.
        """
        name = self._names[result.source]
        index, entry = self._entries[result.source]
        result = dataclasses.replace(result, index=index)
        audio = os.path.abspath(entry.audio) if entry.audio else None
        with _explained(self.folder):
            if isinstance(result, Transcript):
                for kind in self.formats:
                    text = FORMATS[kind](result, self.layout)
                    write_atomically(self.folder / f"{name}.{kind}", text)
                self.done.add(result.source)
            line = {"id": entry.id, "audio": audio, "name": name} | dataclasses.asdict(result)
            data = to_json(line).encode() + b"\n"
            if self._failed.get(result.source) != data:  # it failed just so in an earlier run
                self._file.write(data)
                self._file.flush()
                os.fsync(self._file.fileno())
        return result

    def close(self) -> None:
        """No more results."""
        self._file.close()
        self.journal.close()


def _lock(handle: int, folder: Path) -> None:
    """Locks an open file or folder until it is closed."""
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


def check_run(folder: Path, wanted: Mapping[str, Any], resume: bool) -> None:
    """Whether a run may continue what a folder holds.

    Args:
        folder: It holds results.
        wanted: ``hash`` and ``settings`` of the run, as ``run.json`` has those of the earlier one.
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
    if old_hash != wanted["hash"]:
        new = json.loads(json.dumps(wanted["settings"], default=str))
        differing = [k for k in sorted({*old, *new}) if old.get(k) != new.get(k)]
        shown = "; ".join(f"{k} was {old.get(k)!r}, is {new.get(k)!r}" for k in differing)
        raise OptionError(
            f"{folder} holds results of other settings ({shown}); repeat them to continue, or "
            "choose another --out"
        )


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Complete lines and what they hold; one that was cut off by a crash is not complete."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                found = json.loads(line)
                _ = found["source"], found["name"]
            except (ValueError, KeyError, TypeError):
                raise InputError(
                    f"{path}, line {number} is not a result; remove the line, and --resume "
                    "transcribes that recording again"
                ) from None
            yield line, found


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write to {folder}: {error.strerror}; choose another --out, or make room and "
            "continue with --resume"
        ) from error
