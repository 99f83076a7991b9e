"""Files of a run: written atomically, never over other people's files, resumed with equal settings.

Results go to a folder, or to one file of lines. `RUN` in the folder, or a file of that ending
next to the file, holds the settings under which they were made; other files belong to the kind of
run (`mmdecode.asr.output.jobs`, `mmdecode.vlm.jobs`, `mmdecode.evaluation.speech.runs`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO

import mmdecode
from mmdecode.errors import InputError, OptionError

RUN = "run.json"

MAKER = f"mmdecode {mmdecode.__version__}"
"""Mark of our files, in their head: ``<meta name="generator" content=MAKER>`` in HTML, ``made by
MAKER`` in a comment, ``"made_by": MAKER`` as the first key of JSON, ``Software`` in a PNG."""

LISTING = ".mmdecode-files"
"""In a folder: a line for each file without such a head, its digest (`_ANY`: it is appended to) and
its name, under a line that identifies this listing. It is written first, so that a crash leaves no
file that is not listed."""

_MADE = re.compile(
    rb"made by mmdecode |\"made_by\": ?\"mmdecode |content=\"mmdecode |Software\0mmdecode "
)
_PARTIAL = re.compile(r"\.\d+-\d+\.tmp")
"""Names that `_temporary` gives."""
_HEAD = 1024
_OVERWRITE: ContextVar[bool] = ContextVar("overwrite", default=False)
_ANY = "-"
_digest = functools.partial(hashlib.blake2b, digest_size=16)
_numbers = itertools.count()


def write_file(path: Path, data: str | bytes | BinaryIO, overwrite: bool = False) -> None:
    """Writes a file atomically, and replaces no file that is not ours.

    Every file of this library is written here or by its relatives, `write_files`, `open_append`
    and `write_folder`. A file is ours if its head names the maker (`MAKER`, as pages, JSON reports
    and PNGs do), or if `LISTING` in its folder holds its name and what it contains: then this
    library wrote it and nobody changed it since. Missing folders are made.

    Args:
        path: Path of the file. One that is not regular (``/dev/stdout``) is written into.
        data: Its content; a file that is open for reading is copied.
        overwrite: Replace a file that is not ours.

    Raises:
        OptionError: A file that is not ours is there.
        OSError: It cannot be written; see `explained`.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        with path.open("wb") as device:
            _put(data, device)
        return
    refuse_foreign([path], overwrite)
    with _made(path.parent):
        temporary = path.with_name(_temporary())
        try:
            with temporary.open("wb") as file:
                _put(data, file)
            _replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def write_files(
    folder: Path, files: Mapping[str, str | bytes], overwrite: bool = False
) -> list[Path]:
    """Writes several files of a folder by name; if one is refused, none is written.

    Returns:
        Their paths.

    Raises:
        OptionError: A file that is not ours is there.
    """
    paths = [folder / name for name in files]
    refuse_foreign(paths, overwrite)
    for path, data in zip(paths, files.values(), strict=True):
        write_file(path, data, overwrite)
    return paths


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replaces the part of a user's page between two marks, which show that the part is ours.

    Raises:
        OptionError: The page cannot be read, or does not have the marks.
    """
    before = page_with(page, begin, end)
    section = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
    temporary = page.with_name(_temporary())
    try:
        changed = section.sub(lambda _: f"{begin}\n{text}\n{end}", before)
        temporary.write_text(changed, encoding="utf-8")
        temporary.replace(page)
    finally:
        temporary.unlink(missing_ok=True)


def page_with(page: Path, begin: str, end: str) -> str:
    """A page that has both marks.

    Raises:
        OptionError: It cannot be read, or does not have them.
    """
    try:
        text = page.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise OptionError(f"{page} cannot be read as a page: {error}") from error
    if begin not in text or end not in text.partition(begin)[2]:
        raise OptionError(
            f"{page} has no place for the tables; write {begin} and below it {end} where they "
            "should stand"
        )
    return text


def open_append(path: Path, overwrite: bool = False) -> BinaryIO:
    """Opens a file to append to, under the rule of `write_file`.

    Args:
        path: Path of the file; made where there is none, with its folder.
        overwrite: Replace a file that is not ours.

    Raises:
        OptionError: A file that is not ours is there.
        OSError: It cannot be opened; see `explained`.
    """
    refuse_foreign([path], overwrite)
    if (overwrite or _OVERWRITE.get()) and not is_own(path):
        path.unlink(missing_ok=True)
    with _made(path.parent):
        if _ANY not in _listed(path):
            _list(path, _ANY)
        return path.open("ab")


def write_folder(folder: Path, fill: Callable[[Path], object], overwrite: bool = False) -> None:
    """Writes what another library saves into a folder, under the rule of `write_file`.

    Args:
        folder: Folder of the files; created if it does not exist.
        fill: Is given an empty folder and saves into it, as ``model.save_pretrained`` does. Its
            files are then moved to ``folder`` one by one.
        overwrite: Replace files that are not ours.

    Raises:
        OptionError: A file that is not ours is there; what was saved stays in a folder that the
            message names. Commands that compute for long ask `refuse_foreign` first.
        OSError: It cannot be written; see `explained`.
    """
    with _made(folder):
        temporary = folder / _temporary()  # in the folder, which may be a mounted one
        temporary.mkdir()
        try:
            fill(temporary)
            found = sorted(temporary.rglob("*"))
            saved = [file for file in found if file.is_file() and file.name != LISTING]
            targets = [folder / file.relative_to(temporary) for file in saved]
            try:
                refuse_foreign(targets, overwrite)
            except OptionError as error:
                kept = folder / f"computed-{os.getpid()}"
                temporary.rename(kept)
                raise OptionError(f"{error}; what was computed is in {kept}") from None
            for file, target in zip(saved, targets, strict=True):
                target.parent.mkdir(parents=True, exist_ok=True)
                _replace(file, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def write_once(folder: Path, make: Callable[[], Mapping[str, bytes]]) -> None:
    """Writes a folder of the user's cache atomically, once for all processes.

    If several processes ask for it at once, one makes its files and the others wait. Existing
    files stay.

    Args:
        folder: In `mmdecode.checkpoints.cache_folder`.
        make: Returns the files by name; called if the folder does not exist.

    Raises:
        InputError: It cannot be written.
    """
    temporary = folder.with_name(_temporary())
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.parent):
            if folder.exists():
                return
            files = make()
            temporary.mkdir()
            for name, data in files.items():
                with (temporary / name).open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            temporary.rename(folder)
    except OSError as error:
        if folder.exists():  # of another process, where files cannot be locked
            return
        raise InputError(
            f"cannot write to the cache {folder.parent}: {error.strerror}; make room or free the "
            "way, or set MMDECODE_CACHE to another folder"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits until no other process is inside, and removes partial files of killed processes."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
            remove_partial(folder)
        yield
    finally:
        os.close(handle)


def write_arrays(path: Path, arrays: Mapping[str, Any], packed: bool = False) -> None:
    """Writes NumPy arrays by their names to an ``.npz``, under the rule of `write_file`."""
    import numpy as np

    save = np.savez_compressed if packed else np.savez
    write_folder(path.parent, lambda into: save(into / path.name, **arrays))


@contextlib.contextmanager
def overwriting(allowed: bool = True) -> Iterator[None]:
    """Allows writing functions inside the context to replace files that are not ours.

    Args:
        allowed: ``False`` changes nothing.
    """
    before = _OVERWRITE.set(allowed or _OVERWRITE.get())
    try:
        yield
    finally:
        _OVERWRITE.reset(before)


def refuse_foreign(paths: Iterable[Path], overwrite: bool = False) -> None:
    """Refuses to replace files that are not ours; called before anything is computed.

    Args:
        paths: Paths of files that would be written.
        overwrite: The user allows to replace them.

    Raises:
        OptionError: Some are there; the message names them. Or one is a folder.
    """
    foreign: list[str] = []
    there: dict[Path, set[str]] = {}
    asked = list(paths)
    for path in asked:
        if len(asked) == 1:
            found = os.path.lexists(path)
        else:  # one listing of a folder, for any number of files
            if path.parent not in there:
                there[path.parent] = set()
                with contextlib.suppress(OSError):
                    there[path.parent].update(os.listdir(path.parent))
            found = path.name in there[path.parent]
        if not found or is_own(path):
            continue
        if path.is_dir():
            raise OptionError(f"{path} is a folder; expected a file; choose another --out")
        foreign.append(str(path))
    if foreign and not (overwrite or _OVERWRITE.get()):
        shown = ", ".join(foreign[:5]) + (f" and {len(foreign) - 5} more" if foreign[5:] else "")
        raise OptionError(
            f"{shown}: there already, and not written by mmdecode or changed since; choose another "
            "place, or replace with --overwrite (overwrite=True)"
        )


def refuse_foreign_in(folder: Path, overwrite: bool = False, *, but: Collection[str] = ()) -> None:
    """Refuses a folder that holds files that are not ours, for results of names not known yet.

    Args:
        folder: It need not exist.
        overwrite: The user allows to replace them.
        but: Names of files that may be there, since they are not replaced.

    Raises:
        OptionError: It holds some, or is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"{folder} is a file; expected a folder")
    files = (f for f in folder.glob("*") if f.name[0] != "." and f.name not in but)
    refuse_foreign(sorted(file for file in files if not file.is_dir()), overwrite)


def is_own(path: Path) -> bool:
    """Whether this library wrote a file and nobody changed it since; see `write_file`."""
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
    """Creates a folder; if the context raises, created folders that are still empty are removed."""
    missing = _missing(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        remove_empty(missing)
        raise


def _missing(folder: Path) -> list[Path]:
    return [one for one in (folder, *folder.parents) if not one.exists()]


def _is_note(path: Path) -> bool:
    """Whether a file is no result, but empty or about the run; for a folder, all its files."""
    if path.is_dir():
        return all(map(_is_note, path.iterdir()))
    return path.name[0] == "." or path.name.endswith(RUN) or path.stat().st_size == 0


def remove_empty(folders: Iterable[Path]) -> None:
    """Removes empty folders, inner ones first."""
    for folder in sorted(folders, key=lambda one: len(one.parts), reverse=True):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _put(data: str | bytes | BinaryIO, file: BinaryIO) -> None:
    if isinstance(data, str):
        data = data.encode()
    if isinstance(data, bytes):
        file.write(data)
    else:
        shutil.copyfileobj(data, file)


def _replace(temporary: Path, path: Path) -> None:
    """Moves a complete file to its path, and lists it as ours first."""
    with temporary.open("rb") as file:
        if not _MADE.search(file.read(_HEAD)):
            file.seek(0)
            _list(path, hashlib.file_digest(file, _digest).hexdigest())
    temporary.replace(path)


def _temporary() -> str:
    """A unique name; short, since the file's own name may have the maximal length."""
    return f".{os.getpid()}-{next(_numbers)}.tmp"


def remove_partial(folder: Path, tree: bool = False) -> None:
    """Removes partial files that killed processes have left.

    Args:
        folder: No other process writes there, see `claimed`.
        tree: Whether folders below it count too.
    """
    for path in [*(folder.rglob if tree else folder.glob)(".*.tmp")]:
        if not _PARTIAL.fullmatch(path.name):
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _list(path: Path, content: str) -> None:
    """Notes that a file of this content is ours."""
    with (path.parent / LISTING).open("ab") as file:
        if not file.tell():  # distinguishes it from a later listing of the same path
            file.write(b"# " + os.urandom(8).hex().encode() + b"\n")
        file.write(content.encode() + b" " + _name(path) + b"\n")


def _listed(path: Path) -> Collection[str]:
    """Contents that mark a file as ours."""
    listing = path.parent / LISTING
    try:
        with listing.open("rb") as file:
            about = os.fstat(file.fileno())
            mark = (about.st_dev, about.st_ino, file.readline())
            known = _listings.get(mark)
            if known is None or known.size > about.st_size:
                known = _listings[mark] = _Listing()
            size = known.size
            file.seek(size)  # reads only the lines that were added since
            for line in itertools.takewhile(lambda line: line.endswith(b"\n"), file):
                content, _, name = line[:-1].partition(b" ")
                known.contents.setdefault(name, set()).add(content.decode())
                size += len(line)
            known.size = size  # set, since another thread may have read the same lines
    except OSError:
        return ()
    return known.contents.get(_name(path), ())


class _Listing:
    """Names read from a `LISTING`, and up to which byte."""

    def __init__(self) -> None:
        self.size = 0
        self.contents: dict[bytes, set[str]] = {}


_listings: dict[tuple[int, int, bytes], _Listing] = {}
"""Listings by device, inode and first line."""


def _name(path: Path) -> bytes:
    """Name in the form of a line; no name has a zero byte of its own."""
    return os.fsencode(path.name).replace(b"\n", b"\0")


def marked_json(value: Mapping[str, Any], indent: int | None = 2) -> str:
    """The text of a JSON file whose first key names the maker.

    Numbers that JSON cannot hold become null; the others stay as they are.
    """
    marked = {"made_by": MAKER} | _plain(value, exact=True)
    return json.dumps(marked, indent=indent, allow_nan=False, default=str) + "\n"


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
        return {k: _plain(item, exact or str(k).endswith(times)) for k, item in value.items()}
    return [_plain(item, exact) for item in value] if isinstance(value, (list, tuple)) else value


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Locks a folder against a second run; the operating system releases it with the process.

    The folder is created, and partial files of a killed run are removed. A run that ends without a
    result, since it was refused or failed, removes what it created: the folder, its settings, and
    files that are still empty.

    Raises:
        OptionError: Another run writes there.
        InputError: The folder cannot be made.
    """
    missing = _missing(folder)
    with contextlib.ExitStack() as stack:
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            stack.callback(remove_empty, missing)
            handle = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, handle)
        lock(handle, folder)
        with explained(folder):
            remove_partial(folder)
        before = set(folder.iterdir())
        try:
            yield
        finally:
            made = [path for path in folder.iterdir() if path not in before]
            if all(map(_is_note, made)):
                for path in made:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def lock(handle: int, path: Path) -> None:
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
            f"another run is writing to {path}; wait for it, or choose another --out"
        ) from None


def run_of(path: Path) -> Path:
    """Path of the settings of results: in their folder, or next to their file."""
    return path.with_name(f"{path.name}.{RUN}") if path.is_file() else path / RUN


def note_settings(path: Path, settings: Mapping[str, Any], overwrite: bool = False) -> None:
    """Writes the settings of the results in a folder or file."""
    write_file(run_of(path), marked_json(_noted(settings), indent=1), overwrite)


def check_settings(path: Path, settings: Mapping[str, Any], resume: bool) -> None:
    """Refuses to continue the results in a folder or file with other settings.

    Args:
        path: The folder or file with results.
        settings: All settings that may change a result.
        resume: Whether the user asked to continue.

    Raises:
        OptionError: The settings differ or cannot be read, or ``resume`` is not set.
    """
    if not resume:
        raise OptionError(
            f"{path} holds results of an earlier run; continue it with --resume, or choose "
            "another --out"
        )
    run = run_of(path)
    try:
        before = json.loads(run.read_text(encoding="utf-8"))
        old_hash, old = before["hash"], dict(before["settings"])
    except (OSError, ValueError, KeyError, TypeError):
        raise OptionError(
            f"{run} cannot be read, so nothing shows that the results next to it belong to this "
            "run; choose another --out"
        ) from None
    wanted = _noted(settings)
    if old_hash != wanted["hash"]:
        new = json.loads(json.dumps(wanted["settings"], default=str))
        differing = [k for k in sorted({*old, *new}) if old.get(k) != new.get(k)]
        shown = "; ".join(f"{k} was {old.get(k)!r}, is {new.get(k)!r}" for k in differing)
        named = old.get("model") if "model" in differing else None  # the default may be another now
        again = f"repeat them, --model {named} among them," if named else "repeat them"
        raise OptionError(
            f"{path} holds results of other settings ({shown}); {again} to continue, or choose "
            "another --out"
        )


def append_line(file: BinaryIO, line: bytes) -> None:
    """Appends a line and syncs it to disk, so that a crash does not lose it."""
    file.write(line)
    file.flush()
    os.fsync(file.fileno())


def complete_lines(path: Path) -> Iterator[bytes]:
    """Complete lines of a file; a crash may have cut the last one."""
    with path.open("rb") as file:
        yield from itertools.takewhile(lambda line: line.endswith(b"\n"), file)


def _noted(settings: Mapping[str, Any]) -> dict[str, Any]:
    text = json.dumps(settings, sort_keys=True, default=str)
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return {"hash": digest, "settings": dict(settings)}


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns an `OSError` of writing into an error that says what to do.

    Raises:
        InputError: It cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write to {path}: {error.strerror}; choose another --out, or make room and "
            "continue with --resume"
        ) from error


def find_files(paths: Iterable[str], suffixes: Collection[str], kind: str) -> list[str]:
    """Files by path, with folders searched, each file once; see `files_below`."""
    return list(files_below(paths, suffixes, kind))


def files_below(paths: Iterable[str], suffixes: Collection[str], kind: str) -> dict[str, str]:
    """Files by path, with folders searched, each file once.

    Links to files are read. Links to folders are not followed, so that no search runs in circles;
    they, and links that lead nowhere, are named in a warning. A folder that is named itself is
    searched even where it is a link.

    Args:
        paths: Paths of files and folders.
        suffixes: Suffixes of the files to find in folders, with their dot.
        kind: Kind of these files, for the message.

    Returns:
        The folder of each file below the folder that was named: empty for files in that folder and
        for files that were named themselves.

    Raises:
        InputError: A folder holds no such file.
    """
    found: dict[str, str] = {}
    for path in paths:
        if not os.path.isdir(path):
            found.setdefault(path, "")
            continue
        inside = dict(_searched(Path(path), suffixes))
        if not inside:
            raise InputError(
                f"the folder {path} holds no {kind} files; expected {', '.join(sorted(suffixes))}"
            )
        found.update({file: below for file, below in inside.items() if file not in found})
    return found


def _searched(folder: Path, suffixes: Collection[str]) -> Iterator[tuple[str, str]]:
    """Files in a folder, with the subfolder of each; warns about those that are skipped."""
    for file in sorted(folder.rglob("*")):
        meant = file.suffix.lower() in suffixes and file.name[0] != "."
        if file.is_symlink() and file.is_dir():
            _warn_of_skipped(file, "a link to a folder, not followed; name it to search it")
        elif meant and file.is_file():
            below = str(file.parent.relative_to(folder))
            yield str(file), "" if below == "." else below
        elif meant and file.is_symlink():
            _warn_of_skipped(file, f"a link that leads nowhere ({os.readlink(file)})")


def _warn_of_skipped(path: Path, what: str) -> None:
    text = f"skipped {path}: {what}"
    warnings.warn(text.encode("utf-8", "backslashreplace").decode(), stacklevel=2)
