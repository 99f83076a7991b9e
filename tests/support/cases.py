"""Cases of a test, of which some run by default and the rest with the slow tests."""

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(step: int, cases: Iterable[Any], offset: int = 0) -> list[Any]:
    """The cases, of which all but one in ``step`` are slow, counted from ``offset`` on."""
    return [
        case if (at + offset) % step == 0 else pytest.param(case, marks=pytest.mark.slow)
        for at, case in enumerate(cases)
    ]
