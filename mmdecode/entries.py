"""Entries of the registry: the location and the description of each registered class.

Classes of this package are not imported to describe them; their source is parsed instead.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import re
import sys
import warnings
from dataclasses import dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING

from mmdecode.errors import MMDecodeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Entry", "loadable", "plugins"]

_ATTRIBUTES = ("summary", "guarantee", "source")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One registered name.

    Attributes:
        kind: One of `mmdecode.registry.KINDS`.
        name: Name that a user types.
        target: Location of the class, as ``module:Attr``.
        summary: One line about what the class does.
        guarantee: Distribution of an acceptance rule's output: ``exact`` (the guided distribution),
            ``exact for ...`` (another distribution, which is named) or ``lossy`` (neither). For
            drafters it is ``as the rule``, for other kinds ``-``.
        source: The paper that the class implements.
        plugin: Name of the Python distribution that registers the class by an entry point; empty
            for classes of this package.
    """

    kind: str
    name: str
    target: str
    summary: str = ""
    guarantee: str = "-"
    source: str = ""
    plugin: str = ""

    def load(self) -> type:
        """Imports the class.

        Raises:
            MMDecodeError: The class of a plug-in cannot be imported.
        """
        if not self.plugin:
            module, _, attribute = self.target.partition(":")
            return getattr(importlib.import_module(module), attribute)
        try:
            point = metadata.EntryPoint(self.name, self.target, f"mmdecode.{self.kind}")
            return point.load()
        except Exception as error:  # a plug-in may fail in any way
            raise MMDecodeError(
                f"{self.kind} {self.name!r} of {self.plugin} ({self.target}) cannot be loaded: "
                f"{type(error).__name__}: {error}; repair or uninstall {self.plugin}"
            ) from error

    def described(self) -> Entry:
        """Returns the entry with its class's summary, source and guarantee; imports a plug-in."""
        attributes = (
            _attributes_of(self.load()) if self.plugin else _attributes_in_source(self.target)
        )
        rule = {"guarantee": "as the rule"} if self.kind == "draft" else {}
        return replace(self, **attributes | rule)


def plugins(kind: str, taken: Iterable[str]) -> dict[str, Entry]:
    """Returns the plug-ins registered for a kind, by name, without loading them.

    Args:
        kind: One of `mmdecode.registry.KINDS`.
        taken: Names in use; a plug-in with one of them is ignored, with a warning.
    """
    return _scan(kind, tuple(taken), tuple(sys.path))


def loadable(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yields the plug-ins whose class can be loaded; warns about the others."""
    for entry in entries:
        try:
            entry.load()
        except MMDecodeError as error:  # the others must still work
            warnings.warn(f"left out: {error}", RuntimeWarning, stacklevel=3)
            continue
        yield entry


@functools.lru_cache(maxsize=16)
def _scan(kind: str, taken: tuple[str, ...], path: tuple[str, ...]) -> dict[str, Entry]:
    """See `plugins`; cached per ``sys.path``, since reading all metadata takes milliseconds."""
    found: dict[str, Entry] = {}
    for point in metadata.entry_points(group=f"mmdecode.{kind}"):
        plugin = point.dist.name if point.dist else "an unnamed distribution"
        if point.name in taken or point.name in found:
            warnings.warn(
                f"{plugin} registers {kind} {point.name!r}, which exists already, and is ignored; "
                "choose another name in its entry points",
                RuntimeWarning,
                stacklevel=4,
            )
            continue
        found[point.name] = Entry(kind=kind, name=point.name, target=point.value, plugin=plugin)
    return found


def _attributes_of(cls: type) -> dict[str, str]:
    first_line = (inspect.getdoc(cls) or "").partition("\n")[0]
    found = {name: str(getattr(cls, name)) for name in _ATTRIBUTES if hasattr(cls, name)}
    return {"summary": first_line} | found


def _attributes_in_source(target: str) -> dict[str, str]:
    """Parses summary, source and guarantee of a class of this package from its source code."""
    module, _, name = target.partition(":")
    package, _, path = module.partition(".")
    text = (pkgutil.get_data(package, path.replace(".", "/") + ".py") or b"").decode()
    [head] = re.findall(rf"^class {name}\b.*?(?=^ {{4}}(?:def|@)|^[^\s)]|\Z)", text, re.M | re.S)
    found = {}
    for node in ast.walk(ast.parse(head)):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(literal))):
                found[name] = literal
    return {name: found[name] for name in _ATTRIBUTES if name in found}
