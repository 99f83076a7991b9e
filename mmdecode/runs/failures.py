"""Treatment of inputs that fail: one rule for transcripts, answers and images.

A call with a single input returns its result, or raises its error. A call with many returns a list
in their order, with a failure at the index of each input without a result. ``on_error`` selects
either behaviour for any input.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterable
from typing import Any, Literal

from mmdecode import errors
from mmdecode.errors import MissingExtraError, MMDecodeError, OptionError
from mmdecode.runs.items import OUT_OF_MEMORY

OnError = Literal["raise", "return"]


def collected(outcomes: Iterable[Any], single: bool, on_error: OnError | None = None) -> Any:
    """Results of a call.

    Args:
        outcomes: Outcomes as they come: each with its ``index`` in the input, its problem as
            ``error`` (``None``: nothing was) and the name of that error's class as ``kind``. The
            iterable is not read before ``on_error`` is checked.
        single: Whether a single input was given, and not a list.
        on_error: ``raise`` the first error, or ``return`` every failure in its position; ``None``:
            raise for a single input, return for many.

    Returns:
        One outcome for a single input, else a list in the order of the input.

    Raises:
        OptionError: ``on_error`` is something else.
        MMDecodeError: The error of a failure; built-in errors too.
    """
    if on_error not in (None, "raise", "return"):
        raise OptionError(f"on_error={on_error!r}; expected 'raise' or 'return'")
    raises = single if on_error is None else on_error == "raise"
    found = []
    for outcome in outcomes:
        if raises and outcome.error is not None:
            raise error_of(outcome.kind, outcome.error)
        found.append(outcome)
    found.sort(key=lambda outcome: outcome.index)
    return found[0] if single else found


def error_of(kind: str | None, message: str) -> Exception:
    """Rebuilds the error that a recorded failure describes.

    Args:
        kind: Name of its class.
        message: Text of the error.
    """
    if kind == MissingExtraError.__name__:
        found = re.fullmatch(r"(.*); install it with: pip install 'mmdecode\[(\w+)\]'", message)
        return MissingExtraError(found[1], extra=found[2]) if found else MMDecodeError(message)
    if kind == OUT_OF_MEMORY:  # whichever library's it was
        return MemoryError(message)
    known = getattr(errors, kind or "", None) or getattr(builtins, kind or "", None)
    if isinstance(known, type) and issubclass(known, Exception):
        try:
            return known(message)
        except TypeError:  # as UnicodeDecodeError, which is made of five parts
            pass
    return MMDecodeError(f"{kind}: {message}" if kind else message)
