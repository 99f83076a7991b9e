"""The published recogniser, for tests that need its wheel; they say so where it is missing."""

from __future__ import annotations

import pytest

from mmdecode.checkpoints import is_installed

NAME = "moonshine:tiny-en"

needs_wheel = pytest.mark.skipif(
    not is_installed(NAME), reason="the wheel moonshine-voice is not installed"
)
