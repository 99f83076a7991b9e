"""What tests of several folders share."""

import pytest

from mmdecode.engine import capture
from mmdecode.testing import tape


@pytest.fixture
def taped(monkeypatch):
    """Captures on the CPU, and counts replays."""
    replays = []

    def record(call, device, pool):
        result, replay, pool = tape.record(call)
        return result, lambda: (replays.append(1), replay()), pool

    monkeypatch.setattr(capture, "available", lambda device: True)
    monkeypatch.setattr(capture, "record", record)
    monkeypatch.setattr(capture, "STEP", 8)
    return replays
