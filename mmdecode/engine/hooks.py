"""Hooks on modules that several threads may run at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def of_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a module's hook so that it runs only in the thread that created it."""
    owner = threading.get_ident()

    def run(*args: Any) -> Any:
        return hook(*args) if threading.get_ident() == owner else None

    return run
