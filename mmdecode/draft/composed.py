"""What drafters that are made of other drafters share.

Not a drafter itself.
"""

from __future__ import annotations

from mmdecode import registry
from mmdecode.engine.checks import refuse_no_part
from mmdecode.engine.contracts import Drafter


def drafter_of(given: Drafter | str) -> Drafter:
    """A drafter, from itself or from its name with options.

    Raises:
        OptionError: It is none.
        UnknownNameError: The name is not registered.
    """
    found: Drafter = registry.create("draft", given) if isinstance(given, str) else given
    refuse_no_part("draft", found)
    return found
