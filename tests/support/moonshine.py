"""The published recogniser: for tests that need its wheel, which say so where it is missing, and
for those of what happens without and with it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from mmdecode.checkpoints import is_installed
from mmdecode.models.moonshine import wheel

NAME = "moonshine:tiny-en"

needs_wheel = pytest.mark.skipif(
    not is_installed(NAME), reason="the wheel moonshine-voice is not installed"
)


def hide_wheel(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """As if nobody had installed or converted it."""
    monkeypatch.setitem(sys.modules, wheel.PACKAGE, None)
    monkeypatch.setenv("MMDECODE_CACHE", str(cache))


def show_wheel(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """As if it were installed, by files of its size with nothing in them."""
    assets = folder / "site" / wheel.PACKAGE / "assets" / "tiny-en"
    assets.mkdir(parents=True)
    (assets.parents[1] / "__init__.py").touch()  # else one that is really installed comes first
    for name, size in wheel.SIZES.items():
        with (assets / name).open("wb") as file:
            file.truncate(size)
    monkeypatch.delitem(sys.modules, wheel.PACKAGE, raising=False)
    monkeypatch.syspath_prepend(str(folder / "site"))
    monkeypatch.setenv("MMDECODE_CACHE", str(folder / "cache"))


def takes_default(line: str) -> bool:
    """Whether a line of shell runs the default recogniser."""
    return bool(re.search(r"\bmmdecode (transcribe|stream)\b", line)) and "--model" not in line


WAYS = [(True, "without", ()), (False, "with", (needs_wheel, pytest.mark.slow))]
"""How documented commands run: whether the wheel is hidden, what that is called, and marks."""
