"""Collects the recordings to transcribe: from paths, folders, lists, manifests or stdin."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mmdecode.asr.audio.reading import SUFFIXES
from mmdecode.asr.output.manifest import Entry, read_manifest
from mmdecode.errors import InputError, OptionError
from mmdecode.runs.files import write_file
from mmdecode.runs.inputs import files_below, find_files, refuse_address

STDIN = "-"
"""Path that stands for standard input."""


@contextlib.contextmanager
def gathered(
    paths: Sequence[str] = (),
    files_from: str | None = None,
    manifest: str | None = None,
    limit: int | None = None,
    keep_tree: bool = False,
) -> Iterator[list[Entry]]:
    """Collects the recordings to transcribe as entries, in order, each with a unique id.

    A recording on standard input is kept in a temporary file inside the context, since recordings
    are read more than once.

    Args:
        paths: Audio files, folders to search for them, or ``-`` for a recording on standard input.
        files_from: A file with one path per line; ``-`` for standard input.
        manifest: Path of a manifest, see `mmdecode.asr.output.manifest`.
        limit: Number of entries to take, from the first; ``None``: all.
        keep_tree: Whether ``Entry.folder`` is set to the file's folder, relative to the folder that
            was searched.

    Raises:
        OptionError: No input is given, or standard input is given twice.
        InputError: A folder holds no audio, or a list or manifest cannot be read.
    """
    named = [*paths, *(_listed(files_from) if files_from else ())]
    if [*named, files_from].count(STDIN) > 1:
        raise OptionError("'-' (standard input) is given twice; give files instead of one of them")
    entries = [
        Entry(id=path, audio=path, folder=below if keep_tree else "")
        for path, below in files_below(named, SUFFIXES, "audio").items()
    ]
    entries += read_manifest(manifest, limit, failing=True) if manifest else []
    if not entries:
        raise OptionError("nothing to transcribe; give paths, --files-from or --data")
    with contextlib.ExitStack() as stack:
        for index, entry in enumerate(entries[:limit]):
            if entry.audio == STDIN:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                blocks = iter(functools.partial(sys.stdin.buffer.read, 1 << 20), b"")
                write_file(folder / "stdin", blocks)
                entries[index] = Entry(id="stdin", audio=str(folder / "stdin"), stdin=True)
        for name, count in Counter(entry.id for entry in entries).items():
            if count > 1:
                raise InputError(f"{count} recordings are called {name!r}; name each once")
        yield entries[:limit]


def find_audio(paths: Iterable[str]) -> list[str]:
    """Returns the given files, and the audio files found in given folders; each file once.

    Raises:
        InputError: A folder holds no audio.
    """
    return find_files(paths, SUFFIXES, "audio")


def recordings_in(data: Path, limit: int | None = None) -> list[Entry]:
    """Returns the recordings of a table, or of a folder, as entries.

    Args:
        data: A table (JSON lines, JSON, csv or tsv) with one recording per row, or a folder to
            search for audio files.
        limit: Number of recordings to take, from the first; ``None``: all.

    Raises:
        InputError: The table or folder cannot be read, or holds no recording.
    """
    if not data.is_dir():
        return read_manifest(data, limit)
    return [Entry(id=path, audio=path) for path in find_audio([str(data)])[:limit]]


def sizes(entries: Sequence[Entry]) -> list[float]:
    """Returns the amount of work per entry: seconds of audio if known for all, else bytes."""
    seconds = [entry.duration_s for entry in entries]
    known = [second for second in seconds if second is not None]
    if len(known) == len(entries):
        return known
    return [_bytes(entry.audio) for entry in entries]


def _bytes(path: str | None) -> float:
    try:
        return float(os.path.getsize(path or ""))
    except (OSError, ValueError):
        return 0.0


def _listed(file: str) -> list[str]:
    """Reads paths, one per line, as ``find`` prints them; bytes that are not UTF-8 are kept."""
    try:
        if file != STDIN:
            refuse_address(file)
        data = sys.stdin.buffer.read() if file == STDIN else Path(file).read_bytes()
    except InputError as error:
        raise InputError(f"{file} {error}") from None
    except OSError as error:
        raise InputError(f"{file} cannot be read as a list of files: {error.strerror}") from error
    lines = (line.removesuffix(b"\r") for line in data.split(b"\n"))
    return [os.fsdecode(line) for line in lines if line.strip()]
