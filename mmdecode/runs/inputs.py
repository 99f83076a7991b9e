"""Inputs that a user names: files are read, URLs are refused with a hint."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mmdecode.errors import InputError

_ADDRESS = re.compile(r"(?i)data:|[a-z][a-z0-9+.-]+:/")  # pathlib makes one slash of two


def refuse_address(path: str | bytes | os.PathLike[Any]) -> None:
    """Refuses a path that is a URL, since nothing is downloaded.

    An existing file of that name is accepted.

    Raises:
        InputError: It is a URL; the message does not begin with its name.
    """
    text = os.fsdecode(path)
    if not _ADDRESS.match(text) or os.path.exists(text):
        return
    scheme = text.partition(":")[0].lower()
    if scheme == "data":
        raise InputError(
            "is a data URI; expected a file or its bytes: give base64.b64decode of what stands "
            "after the comma"
        )
    if scheme == "file":
        raise InputError("is a file URI; expected a path: leave out file://")
    raise InputError(
        "is an address, and nothing is downloaded; expected a file: download it first, for example "
        "with curl -LO, or from a bucket with its own tool"
    )


def path_in(folder: Path, name: str) -> str:
    """The path that a table in a folder names; URLs are kept, to be refused as such."""
    return name if _ADDRESS.match(name) and not (folder / name).exists() else str(folder / name)


def content_of(file: Any) -> bytes:
    """The rest of an open file, as bytes.

    Raises:
        InputError: It is closed, cannot be read, or was opened as text.
    """
    try:
        data = file.read()
    except (OSError, ValueError) as error:  # a closed file is a ValueError
        raise InputError(f"cannot be read ({error}); give an open file, or its path") from error
    if not isinstance(data, bytes):
        raise InputError("is open as text; expected bytes: open it with mode 'rb'")
    return data
