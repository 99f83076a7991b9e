"""What `--quick` of the benchmarks for a GPU does on a CPU: the same code, captured on a tape."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers


@contextmanager
def toy(device: torch.device, quick: bool) -> Iterator[None]:
    """Captures rounds on a CPU too, if ``quick``: with `mmdecode.testing.tape` instead of a graph.

    A tape refuses what a CUDA graph refuses. Times on it mean nothing.
    """
    if not quick or device.type == "cuda":
        yield
        return
    from tests.support.taping import taping

    with taping():
        yield


def toy_device(device: torch.device, dtype: str) -> dict[str, Any]:
    """Facts of a machine, as of a measurement, with an invented bandwidth."""
    return {
        "device": device.type,
        "dtype": dtype,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "bandwidth_gb_per_s": 1.0,
        "toy": True,
    }
