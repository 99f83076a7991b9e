"""Files of a run: written atomically, never over a user's files, resumed with the same settings.

Results are a folder of files or one file of JSON lines. The settings that they were made with are
in the file `RUN` in that folder, or in ``FILE.run.json`` next to the file. In this module "our
files" are those that mmdecode wrote and nobody has changed since; see `write_file`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO

import mmdecode
from mmdecode.errors import InputError, OptionError
from mmdecode.runs.conditions import changes_of
from mmdecode.runs.locks import Claim, locked, make_folder, refuse_url

RUN = "run.json"

MAKER = f"mmdecode {mmdecode.__version__}"
"""Text in the first bytes of our files: ``<meta name="generator" content=MAKER>`` in HTML, ``made
by MAKER`` in a comment, ``"made_by": MAKER`` as the first key of JSON, ``Software`` in a PNG."""

LISTING = ".mmdecode-files"
"""Name of a file that lists those of our files in its folder that do not contain `MAKER`: a first
line with a random id, then a line for each file with digest (`_ANY` for files that are appended to)
and name. A file is listed before it is written, so that a crash leaves no unlisted file."""

_MADE = re.compile(
    rb"made by mmdecode |\"made_by\": ?\"mmdecode |content=\"mmdecode |Software\0mmdecode "
)
_PARTIAL = re.compile(r"\.\d+-\d+\.tmp")
"""Pattern of the names of `_temporary`."""
_HEAD = 1024
_OVERWRITE: ContextVar[bool] = ContextVar("overwrite", default=False)
_ANY = "-"
_digest = functools.partial(hashlib.blake2b, digest_size=16)
_numbers = itertools.count()


def write_file(path: Path, data: str | bytes | Iterable[bytes], overwrite: bool = False) -> None:
    """Writes a file atomically; replaces an existing file only if mmdecode wrote it.

    All files of this library are written by this function, `write_files`, `open_append` or
    `write_folder`. A file counts as ours if its first bytes contain `MAKER`, as in HTML pages, JSON
    reports and PNGs, or if `LISTING` in its folder has its name with the digest of its content, so
    that it is unchanged since this library wrote it. Missing folders are created.

    Args:
        path: Path of the file. A special file such as ``/dev/stdout`` is written to directly.
        data: Content of the file, whole or in pieces.
        overwrite: Whether to replace a file that is not ours.

    Raises:
        OptionError: A file that is not ours exists there.
        OSError: The file cannot be written; see `explained`.
    """
    if isinstance(data, str):
        data = data.encode("utf-8", "backslashreplace")  # half characters, see to_json
    pieces = [data] if isinstance(data, bytes) else data
    if path.exists() and not path.is_file() and not path.is_dir():
        with path.open("wb") as device:
            device.writelines(pieces)
        return
    refuse_foreign([path], overwrite)
    with _made(path.parent), _temporary(path.parent) as temporary:
        with temporary.open("wb") as file:
            file.writelines(pieces)
        _replace(temporary, path)


def write_files(
    folder: Path, files: Mapping[str, str | bytes], overwrite: bool = False
) -> list[Path]:
    """Writes several files into a folder, or none if one of them may not be replaced.

    Returns:
        Paths of the files.

    Raises:
        OptionError: A file that is not ours exists under one of the names.
    """
    paths = [folder / name for name in files]
    refuse_foreign(paths, overwrite)
    for path, data in zip(paths, files.values(), strict=True):
        write_file(path, data, overwrite)
    return paths


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replaces the text between two marker lines of a user's Markdown page.

    Raises:
        OptionError: The page cannot be read, or does not contain both markers.
    """
    before = page_with(page, begin, end)
    section = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
    changed = section.sub(lambda _: f"{begin}\n{text}\n{end}", before)
    with _temporary(page.parent) as temporary:
        temporary.write_text(changed, encoding="utf-8")
        temporary.replace(page)


def page_with(page: Path, begin: str, end: str) -> str:
    """Reads a page and checks that it contains both marker lines; returns its text.

    Raises:
        OptionError: The page cannot be read, or does not contain both markers.
    """
    try:
        text = page.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise OptionError(f"{page} cannot be read as a page: {error}") from error
    if begin not in text or end not in text.partition(begin)[2]:
        raise OptionError(
            f"{page} has no place for the tables; add the line {begin} and below it the line {end} "
            "where the tables should appear"
        )
    return text


def open_append(path: Path) -> BinaryIO:
    """Opens a file for appending, unless it is a file that mmdecode did not write.

    Args:
        path: Path of the file; the file and its folder are created if they do not exist.

    Raises:
        OptionError: A file that is not ours exists there.
        OSError: The file cannot be opened; see `explained`.
    """
    refuse_foreign([path])
    if _OVERWRITE.get() and not is_own(path):
        path.unlink(missing_ok=True)
    with _made(path.parent):
        if _ANY not in _listed(path):
            _list(path, _ANY)
        return path.open("ab")


def write_folder(folder: Path, fill: Callable[[Path], object], overwrite: bool = False) -> None:
    """Writes the files that another library saves; replaces existing files only if they are ours.

    Args:
        folder: Folder of the files; created if it does not exist.
        fill: Function that saves files into an empty folder, such as ``model.save_pretrained``.
            The files are then moved to ``folder`` one by one.
        overwrite: Whether to replace files that are not ours.

    Raises:
        OptionError: A file that is not ours exists there; the saved files are kept in a folder that
            the message names. Long computations call `refuse_foreign` first to avoid this.
        OSError: A file cannot be written; see `explained`.
    """
    with _made(folder), _temporary(folder) as temporary:  # in the folder, which may be mounted
        temporary.mkdir()
        fill(temporary)
        saved = sorted(f for f in temporary.rglob("*") if f.is_file() and f.name != LISTING)
        targets = [folder / file.relative_to(temporary) for file in saved]
        try:
            refuse_foreign(targets, overwrite)
        except OptionError as error:
            kept = folder / f"computed-{os.getpid()}"
            temporary.rename(kept)
            raise OptionError(f"{error}; the computed files are in {kept}") from None
        for file, target in zip(saved, targets, strict=True):
            file.chmod(temporary.stat().st_mode & 0o666)  # safetensors': the owner alone
            target.parent.mkdir(parents=True, exist_ok=True)
            _replace(file, target)


def write_once(folder: Path, make: Callable[[], Mapping[str, bytes]]) -> None:
    """Creates a folder of the user's cache atomically, once for all processes.

    If several processes call this at once, one creates the folder and the others wait. An existing
    folder is left unchanged.

    Args:
        folder: Path of the folder, below `mmdecode.checkpoints.cache_folder`.
        make: Returns contents of files by name; called only if the folder does not exist.

    Raises:
        InputError: The folder cannot be written.
    """
    parent = folder.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # on Windows, or a file system without locks
                stack.enter_context(locked(parent, wait=True))
                _tidy(parent)
            if folder.exists():
                return
            files = make()
            temporary = stack.enter_context(_temporary(parent))
            temporary.mkdir()
            for name, data in files.items():
                with (temporary / name).open("wb") as file:
                    append_line(file, data)
            temporary.rename(folder)
    except OSError as error:
        if folder.exists():  # of another process, where files cannot be locked
            return
        raise InputError(
            f"cannot write to the cache {parent}: {error.strerror}; check disk space and "
            "permissions, or set MMDECODE_CACHE to another folder"
        ) from error


def write_arrays(path: Path, arrays: Mapping[str, Any], packed: bool = False) -> None:
    """Writes NumPy arrays by name to an ``.npz``, compressed if ``packed``; see `write_folder`."""
    import numpy as np

    save = np.savez_compressed if packed else np.savez
    write_folder(path.parent, lambda into: save(into / path.name, **arrays))


@contextlib.contextmanager
def overwriting(allowed: bool = True) -> Iterator[None]:
    """Lets the functions of this module replace files that are not ours inside the context.

    Args:
        allowed: Whether to allow it; ``False`` leaves an outer context's permission as it is.
    """
    before = _OVERWRITE.set(allowed or _OVERWRITE.get())
    try:
        yield
    finally:
        _OVERWRITE.reset(before)


def refuse_foreign(paths: Iterable[Path], overwrite: bool = False) -> None:
    """Raises if files would be replaced that are not ours; called before anything is computed.

    Args:
        paths: Paths of files that would be written.
        overwrite: Whether the user allows replacing such files.

    Raises:
        OptionError: Files that are not ours exist (the message lists them), or a path is a folder.
    """
    paths = iter(paths)
    asked = list(itertools.islice(paths, 2))
    if len(asked) > 1:  # one listing of a folder, for any number of files
        asked = list(_existing(itertools.chain(asked, paths)))
    foreign: list[str] = []
    for path in asked:
        if not os.path.lexists(path) or is_own(path):
            continue
        if path.is_dir():
            raise OptionError(f"{path} is a folder; expected a file; choose another --out")
        foreign.append(str(path))
    if foreign and not (overwrite or _OVERWRITE.get()):
        shown = ", ".join(foreign[:5]) + (f" and {len(foreign) - 5} more" if foreign[5:] else "")
        raise OptionError(
            f"{shown}: there already, and not written by mmdecode (or changed since); choose "
            "another folder, or allow replacing with --overwrite (overwrite=True)"
        )


def _existing(paths: Iterable[Path]) -> Iterator[Path]:
    """Yields those paths whose names are in their folders, each of which is listed once."""
    there: dict[str, set[str]] = {}
    for path in paths:
        folder, name = os.path.split(path)
        if folder not in there:
            there[folder] = set()
            with contextlib.suppress(OSError):
                there[folder].update(os.listdir(folder or "."))
        if name in there[folder]:
            yield path


def refuse_foreign_in(folder: Path, overwrite: bool = False, *, but: Collection[str] = ()) -> None:
    """Raises if a folder holds any file that is not ours, where names of results are unknown yet.

    Args:
        folder: Folder of the results; it need not exist.
        overwrite: Whether the user allows replacing files that are not ours.
        but: Names of files that are ignored, since they are never replaced.

    Raises:
        OptionError: The folder holds such files, or is a file itself.
    """
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"{folder} is a file; expected a folder")
    files = (f for f in folder.glob("*") if f.name[0] != "." and f.name not in but)
    refuse_foreign(sorted(file for file in files if not file.is_dir()), overwrite)


def is_own(path: Path) -> bool:
    """Returns whether mmdecode wrote a file and nobody changed it since; see `write_file`."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
            if not head or _MADE.search(head):  # an empty file has nothing to lose
                return True
            known = _listed(path)
            if not known or _ANY in known:
                return bool(known)
            file.seek(0)
            return hashlib.file_digest(file, _digest).hexdigest() in known
    except OSError:
        return False


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Creates a folder; created folders that are empty at the end of the context are removed."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    make_folder(folder)
    try:
        yield
    finally:
        remove_empty(missing)


def _is_note(path: Path) -> bool:
    """Returns whether a file is empty, hidden or settings of a run; for a folder: all its files."""
    if path.is_dir():
        return all(map(_is_note, path.iterdir()))
    return path.name[0] == "." or path.name.endswith(RUN) or path.stat().st_size == 0


def remove_empty(folders: Iterable[Path]) -> None:
    """Removes empty folders, inner ones first."""
    for folder in sorted(folders, key=lambda one: len(one.parts), reverse=True):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _replace(temporary: Path, path: Path) -> None:
    """Adds a complete file to `LISTING` if it needs an entry, then moves it to its path."""
    with temporary.open("rb") as file:
        if not _MADE.search(file.read(_HEAD)):
            file.seek(0)
            _list(path, hashlib.file_digest(file, _digest).hexdigest())
    temporary.replace(path)


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """Gives a unique path for a temporary file or folder, which is removed after the context."""
    path = folder / f".{os.getpid()}-{next(_numbers)}.tmp"  # short enough for every file system
    try:
        yield path
    finally:
        _remove(path)


def _remove(path: Path) -> None:
    """Removes a file or a folder with its files, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_partial(folder: Path, tree: bool = False) -> None:
    """Removes partial files that killed processes have left.

    Args:
        folder: Folder that no other process writes to, see `claimed`.
        tree: Whether to search subfolders too.
    """
    for path in [*(folder.rglob if tree else folder.glob)(".*.tmp")]:
        if _PARTIAL.fullmatch(path.name):
            _remove(path)


def _list(path: Path, content: str) -> None:
    """Adds a line for a file to `LISTING`: its digest or `_ANY`, and its name."""
    with (path.parent / LISTING).open("ab") as file:
        if not file.tell():  # distinguishes it from a later listing of the same path
            file.write(b"# " + os.urandom(8).hex().encode() + b"\n")
        file.write(content.encode() + b" " + _name(path) + b"\n")


def _listed(path: Path) -> Collection[str]:
    """Returns the digests that `LISTING` has for a file's name."""
    listing = path.parent / LISTING
    try:
        with listing.open("rb") as file:
            about = os.fstat(file.fileno())
            mark = (about.st_dev, about.st_ino, file.readline())
            size, known = _listings.get(mark, (0, {}))
            if size > about.st_size:
                size, known = 0, {}
            file.seek(size)  # reads only the lines that were added since
            for line in itertools.takewhile(lambda line: line.endswith(b"\n"), file):
                content, _, name = line[:-1].partition(b" ")
                if (digest := content.decode()) not in (others := known.get(name, ())):
                    known[name] = (*others, digest)
                size += len(line)
            _listings[mark] = size, known
    except OSError:
        return ()
    return known.get(_name(path), ())


_listings: dict[tuple[int, int, bytes], tuple[int, dict[bytes, tuple[str, ...]]]] = {}
"""Number of bytes and entries of listings read so far, by device, inode and first line."""


def _name(path: Path) -> bytes:
    """Returns a file's name as bytes without line breaks, which become zero bytes."""
    return os.fsencode(path.name).replace(b"\n", b"\0")


def marked_json(value: Mapping[str, Any], indent: int | None = 2) -> str:
    """Formats a mapping as the text of a JSON file, with `MAKER` under the first key ``made_by``.

    Infinite values and NaN become null; other numbers are not rounded.
    """
    marked = {"made_by": MAKER} | _plain(value, exact=True)
    return json.dumps(marked, indent=indent, allow_nan=False, default=str) + "\n"


def to_json(value: Any, indent: int | None = None) -> str:
    """Formats a value as JSON that is valid UTF-8 and the same for every batching of recordings.

    Infinite values and NaN become null. Times, whose keys end in ``_s``, ``offset`` or
    ``duration``, are not rounded; other floats, such as probabilities, are rounded to four
    decimals, since their last digits vary with the other recordings of the batch.
    """
    text = json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, indent=indent)
    # half characters, as in names of files that are not UTF-8, have an escape of the same form
    return text.encode("utf-8", "backslashreplace").decode()


def _plain(value: Any, exact: bool = False) -> Any:
    if value is None or isinstance(value, (str, int)):  # most are
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return value if exact else round(value, 4)
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        times = ("_s", "offset", "duration")
        return {k: _plain(item, exact or str(k).endswith(times)) for k, item in value.items()}
    return [_plain(item, exact) for item in value] if isinstance(value, (list, tuple)) else value


@contextlib.contextmanager
def claimed(folder: Path, shared: bool = False) -> Iterator[Claim]:
    """Locks a folder against other runs inside the context; the lock ends with the process.

    The folder is created, and partial files of a killed run are removed. A run that ends without a
    result, since it was refused or failed, removes what it created: the folder, its settings, and
    files that are still empty.

    Args:
        folder: The folder.
        shared: Whether processes of one job share it, see `mmdecode.runs.locks.Claim.join`.

    Raises:
        OptionError: Another run writes to the folder.
        InputError: The folder cannot be created, or its file system has no locks.
    """
    refuse_url(folder)
    with contextlib.ExitStack() as stack:
        with explained(folder):
            stack.enter_context(_made(folder))
            if (claim := stack.enter_context(locked(folder, shared=shared))).first:
                _tidy(folder)
        before = set(os.listdir(folder))
        try:
            yield claim
        finally:
            if claim.held and claim.alone():  # not again, once it was given back
                made = [folder / name for name in os.listdir(folder) if name not in before]
                for path in made if all(map(_is_note, made)) else ():
                    _remove(path)


def _tidy(folder: Path) -> None:
    """Removes partial files that killed processes left."""
    with contextlib.suppress(OSError):  # of another user: it is never read
        remove_partial(folder)


def run_of(path: Path) -> Path:
    """Returns the path of the settings of results: in their folder, or next to their file."""
    return path.with_name(f"{path.name}.{RUN}") if path.is_file() else path / RUN


def note_settings(
    path: Path, settings: Mapping[str, Any], overwrite: bool = False, work: Any = None
) -> None:
    """Writes the settings that the results in a folder or file are made with, and units of work."""
    text = marked_json(_noted(settings) | ({} if work is None else {"work": 0}), indent=1)
    line = f'"work": {json.dumps(work)}'  # one line, however many units
    write_file(run_of(path), text.replace('"work": 0\n', f"{line}\n"), overwrite)


def check_settings(
    path: Path, settings: Any, resume: bool, replaceable: bool = True
) -> dict[str, Any]:
    """Raises if the results in a folder or file may not be continued with these settings.

    Args:
        path: Folder or file with the results.
        settings: All settings that may change a result.
        resume: Whether the user asked to continue.
        replaceable: Whether ``--overwrite`` replaces them, for the messages.

    Returns:
        What `note_settings` wrote earlier.

    Raises:
        OptionError: The earlier settings differ or cannot be read, or ``resume`` is false.
    """
    ways = "continue it with --resume, replace it with --overwrite, or choose another --out"
    if not resume:
        raise OptionError(f"{path} holds results of an earlier run; {ways}")
    run = run_of(path)
    instead = "replace the results with --overwrite in place of --resume, " * replaceable
    try:
        before: dict[str, Any] = json.loads(run.read_text(encoding="utf-8"))
        old_hash, old = before["hash"], dict(before["settings"])
    except (OSError, ValueError, KeyError, TypeError):
        raise OptionError(
            f"{run} cannot be read, so nothing shows that the results next to it were made with "
            f"these settings; {instead}or choose another --out"
        ) from None
    wanted = _noted(settings)
    if old_hash != wanted["hash"]:
        new = json.loads(json.dumps(wanted["settings"], default=str))
        differing = changes_of(old, new)
        named = old.get("model") if "model" in differing else None  # the default may be another now
        again = f"the earlier ones, including --model {named}," if named else "the earlier ones"
        raise OptionError(
            f"{path} holds results of other settings ({'; '.join(differing.values())}); give "
            f"{again} to continue, {instead}or choose another --out"
        )
    return before


def append_line(file: BinaryIO, line: bytes) -> None:
    """Appends a line, or several, and syncs it to disk, so that a crash does not lose it."""
    file.write(line)
    file.flush()
    os.fsync(file.fileno())


def complete_lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file without the last one if a crash has truncated it."""
    with path.open("rb") as file:
        yield from itertools.takewhile(lambda line: line.endswith(b"\n"), file)


def _noted(settings: Mapping[str, Any]) -> dict[str, Any]:
    text = json.dumps(settings, sort_keys=True, default=str)
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return {"hash": digest, "settings": dict(settings)}


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Converts an `OSError` inside the context into an error that says what to do.

    Raises:
        InputError: The context raised an `OSError`.
    """
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write to {path}: {error.strerror}; choose another --out, or free disk space "
            "and continue with --resume"
        ) from error
