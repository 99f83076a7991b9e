"""Weight-sharing copies of a model that accept the same inputs.

A view is another object than the model, but images encoded for the model, and checks made of it,
also count for its views.
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
