"""Input files that a user names: found in folders, read; URLs are refused with a hint."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from mmdecode.errors import InputError

_ADDRESS = re.compile(r"(?i)data:|[a-z][a-z0-9+.-]+:/")  # pathlib makes one slash of two


def refuse_address(path: str | bytes | os.PathLike[Any]) -> None:
    """Refuses a path that is a URL, since nothing is downloaded.

    A path that looks like a URL is accepted if a file of that name exists.

    Raises:
        InputError: The path is a URL. The message does not contain the path: callers put it first.
    """
    text = os.fsdecode(path)
    if not _ADDRESS.match(text) or os.path.exists(text):
        return
    scheme = text.partition(":")[0].lower()
    if scheme == "data":
        raise InputError(
            "is a data URI; expected a file or its bytes: decode the part after the comma with "
            "base64.b64decode and give the bytes"
        )
    if scheme == "file":
        raise InputError("is a file URI; expected a path: leave out file://")
    raise InputError(
        "is a URL, and nothing is downloaded; expected a file: download it first, for example with "
        "curl -LO, or from cloud storage with the provider's own tool"
    )


def path_in(folder: Path, name: str) -> str:
    """Returns a path of a table, relative to the table's folder; URLs are returned unchanged.

    Args:
        folder: Folder of the table.
        name: Path or URL in the table; a URL is refused later, when the file is read.
    """
    return (
        name if _ADDRESS.match(name) and not os.path.exists(folder / name) else str(folder / name)
    )


def content_of(file: Any) -> bytes:
    """Reads an open file from its current position to the end, as bytes.

    Raises:
        InputError: The file is closed, cannot be read, or was opened in text mode.
    """
    try:
        data = file.read()
    except (OSError, ValueError) as error:  # a closed file is a ValueError
        raise InputError(f"cannot be read ({error}); give an open file or a path") from error
    if not isinstance(data, bytes):
        raise InputError("is open in text mode; expected bytes: open it with mode 'rb'")
    return data


def find_files(paths: Iterable[str], suffixes: Collection[str], kind: str) -> list[str]:
    """Returns the paths of files and of the files in folders, each once; see `files_below`."""
    return list(files_below(paths, suffixes, kind))


def files_below(paths: Iterable[str], suffixes: Collection[str], kind: str) -> dict[str, str]:
    """Finds the files that paths name directly or that lie in folders, each once.

    Links to files are included. Links to folders inside a folder are not followed, so that no
    search is endless; each of them, and each broken link, gives a warning. A folder in ``paths`` is
    searched even if it is a link.

    Args:
        paths: Paths of files and folders.
        suffixes: Suffixes of the files to find in folders, with the dot.
        kind: Kind of these files, for the message.

    Returns:
        By path of each file: its subfolder relative to the searched folder; an empty string for
        files directly in that folder and for files in ``paths``.

    Raises:
        InputError: A folder holds no file with such a suffix.
    """
    found: dict[str, str] = {}
    for path in paths:
        if not os.path.isdir(path):
            found.setdefault(path, "")
            continue
        inside = dict(_searched(Path(path), suffixes))
        if not inside:
            raise InputError(
                f"the folder {path} holds no {kind} files ({', '.join(sorted(suffixes))})"
            )
        found.update({file: below for file, below in inside.items() if file not in found})
    return found


def _searched(folder: Path, suffixes: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yields the files in a folder with their subfolders; warns about links that are skipped."""
    for file in sorted(folder.rglob("*")):
        meant = file.suffix.lower() in suffixes and file.name[0] != "."
        if file.is_symlink() and file.is_dir():
            _warn_of_skipped(file, "a link to a folder, not followed; give its path to search it")
        elif meant and file.is_file():
            below = str(file.parent.relative_to(folder))
            yield str(file), "" if below == "." else below
        elif meant and file.is_symlink():
            _warn_of_skipped(file, f"a link that leads nowhere ({os.readlink(file)})")


def _warn_of_skipped(path: Path, what: str) -> None:
    text = f"skipped {path}: {what}"
    warnings.warn(text.encode("utf-8", "backslashreplace").decode(), stacklevel=2)
