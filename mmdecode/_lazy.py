"""Names of packages that are imported on first use, so that importing a package costs nothing.

A package lists its names in ``__all__``, imports them under ``TYPE_CHECKING`` for type checkers,
and sets ``__getattr__, __dir__ = lazy(...)``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def lazy(
    package: str, modules: Mapping[str, Iterable[str]], packages: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Makes the functions ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: The package's ``__name__``.
        modules: Public names by the module that has them, which is relative to the package.
        packages: Subpackages that are public names as well.
    """
    home = {name: module for module, names in modules.items() for name in names}
    known = frozenset(packages)

    def get(name: str) -> Any:
        if name in home:
            value = getattr(importlib.import_module(f"{package}.{home[name]}"), name)
        elif name in known:
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        held = vars(sys.modules[package])
        return sorted({*held, *held["__all__"]})

    return get, names
