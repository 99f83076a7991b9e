"""Views of a model: copies that share its weights and are given what it was given.

A view is another object, but the images that were encoded for the model are its own, and what was
checked of the model holds for it.
"""

from __future__ import annotations

from typing import Any

_ORIGIN = "_mmdecode_origin"


def mark(view: Any, model: Any) -> None:
    """Notes that ``view`` was made from ``model``."""
    vars(view)[_ORIGIN] = origin(model)  # not as an attribute: a module would become its part


def origin(model: Any) -> Any:
    """The model that ``model`` is a view of, or the model itself."""
    return getattr(model, _ORIGIN, model)
