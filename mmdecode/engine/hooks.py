"""Hooks on modules that several threads may run at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def of_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A module's hook for passes of the thread that asks for it; those of others go by it."""
    owner = threading.get_ident()

    def run(*args: Any) -> Any:
        return hook(*args) if threading.get_ident() == owner else None

    return run
