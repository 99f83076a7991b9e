"""What the benchmarks share: seconds on the wall, and the bytes per second of a large copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def timed(device: torch.device, call: Callable[[], T]) -> tuple[float, T]:
    """Seconds on the wall, work on the device included, and the result."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, result


def bandwidth(device: torch.device) -> float:
    """Bytes per second that a large copy reads and writes."""
    source = torch.zeros(2**28 if device.type == "cuda" else 2**25, device=device)
    target = torch.empty_like(source)
    best = min(timed(device, lambda: target.copy_(source))[0] for _ in range(5))
    return 2 * source.numel() * source.element_size() / best
