"""Models that the documentation names by their Hub ids, put into the test session's cache.

The session is offline and its cache empty (``tests/conftest.py``), so that a test uses what is put
there and nothing else. `STANDS_FOR` is the one table of what stands for what: a model of the same
class, shipped or with random weights.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from mmdecode.checkpoints import ZOO

STANDS_FOR = {
    "openai/whisper-tiny": "whisper-synth",
    "openai/whisper-small": "whisper-synth",
    "openai/whisper-large-v3": "whisper-synth",
    "llava-hf/llava-1.5-7b-hf": "llava-scenes",
}
"""Shipped models by the Hub id that they stand for."""


def publish(name: str, folder: str | Path | None = None) -> Path:
    """Puts a model into the cache.

    Args:
        name: Its Hub id.
        folder: Its files; ``None``: those of `STANDS_FOR`.

    Returns:
        The folder that holds them from now on.
    """
    source = ZOO / STANDS_FOR[name] if folder is None else Path(folder)
    cache = Path(os.environ["HF_HOME"]) / "hub" / f"models--{name.replace('/', '--')}"
    files = cache / "snapshots" / ("0" * 40)
    if not files.exists():
        shutil.copytree(source, files)
        (cache / "refs").mkdir()
        (cache / "refs" / "main").write_text("0" * 40)
    return files
