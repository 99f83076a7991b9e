"""Reading of input files that a user names; URLs are refused with a hint."""

from __future__ import annotations

import os
import re
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
