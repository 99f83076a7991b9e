"""Helper function of drafters that wrap other drafters."""

from __future__ import annotations

from mmdecode import registry
from mmdecode.engine.checks import refuse_no_part
from mmdecode.engine.contracts import Drafter


def drafter_of(given: Drafter | str) -> Drafter:
    """Returns the given drafter, or builds one from a string such as ``lookup:length=8``.

    Raises:
        OptionError: The given object is not a drafter.
        UnknownNameError: The name is not registered.
    """
    found: Drafter = registry.create("draft", given) if isinstance(given, str) else given
    refuse_no_part("draft", found)
    return found
