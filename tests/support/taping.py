"""Captured rounds without a GPU."""

from contextlib import contextmanager

import pytest

from mmdecode.engine import capture
from mmdecode.testing import tape
from tests.support import seams


@contextmanager
def taping():
    """Captures on the CPU; yields a list that grows by one with each replay."""
    replays = []

    def record(call, device, pool):
        result, replay, pool = tape.record(call)
        return result, lambda: (replays.append(1), replay()), pool

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "available", lambda device: True)
        patch.setattr(capture, "record", record)
        seams.STEP.plant(patch, lambda _: 8)
        seams.MAY_READ.plant(patch, lambda _: lambda device: False)
        yield replays
