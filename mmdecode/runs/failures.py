"""Handling of failed inputs, the same for transcripts, answers and images.

A call with a single input returns its result, or raises its error. A call with a list of inputs
returns a list in the same order, which has a failure at the index of each input that failed. The
option ``on_error`` overrides this: it raises the first error, or returns failures.
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
    """Collects the outcomes of a call in input order, or raises the first error.

    Args:
        outcomes: Outcomes in any order. Each has the ``index`` of its input, the message of its
            error as ``error`` (``None`` if it succeeded) and the name of the error's class as
            ``kind``. ``on_error`` is checked before the iterable is read.
        single: Whether a single input was given instead of a list.
        on_error: ``raise``: raise the first error; ``return``: return failures in the list;
            ``None``: raise for a single input, return for a list.

    Returns:
        One outcome for a single input, else a list in the order of the input.

    Raises:
        OptionError: ``on_error`` has another value.
        MMDecodeError: The first error, if errors are raised. It has the class that ``kind`` names,
            which may also be a built-in error.
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
        kind: Name of the error's class; ``None`` or an unknown name gives `MMDecodeError`.
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
