"""Measurement of wall-clock time, memory bandwidth and the machine's properties."""

from __future__ import annotations

import os
import platform
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import transformers

from mmdecode.evaluation.stats.intervals import interval, resampled_sums
from mmdecode.runs.conditions import now

T = TypeVar("T")


def timed(device: torch.device, call: Callable[[], T]) -> tuple[float, T]:
    """Calls a function; returns its wall-clock seconds, device work included, and its result."""
    began = now(device)
    result = call()
    return now(device) - began, result


def interleaved(
    calls: Mapping[str, Callable[[int, int], T]],
    items: int,
    repeats: int,
    device: torch.device,
    done: Callable[[], object] = lambda: None,
) -> tuple[dict[str, list[list[float]]], dict[str, list[T]]]:
    """Times every call on every item, interleaved item by item, so that drift affects all alike.

    Args:
        calls: Functions of an item's index and the repeat's index, by name.
        items: Number of items.
        repeats: Number of repeats of all calls on all items.
        device: Device on which the work runs; the clock waits for it.
        done: Called after each timed call.

    Returns:
        Seconds by name, repeat and item; and the results of each name, repeat by repeat.
    """
    order = random.Random(0)
    seconds: dict[str, list[list[float]]] = {name: [] for name in calls}
    results: dict[str, list[T]] = {name: [] for name in calls}
    for repeat in range(repeats):
        for own in seconds.values():
            own.append([])
        for item in range(items):
            at_hand = {name: partial(call, item, repeat) for name, call in calls.items()}
            for name, (spent, result) in turn(at_hand, order, device, done).items():
                seconds[name][-1].append(spent)
                results[name].append(result)
    return seconds, results


def turn(
    calls: Mapping[str, Callable[[], T]],
    order: random.Random,
    device: torch.device,
    done: Callable[[], object] = lambda: None,
) -> dict[str, tuple[float, T]]:
    """Times every call once, in random order, so that it does not matter which follows which.

    Args:
        calls: Functions without arguments, by name.
        order: Source of the order.
        device: Device on which the work runs; the clock waits for it.
        done: Called after each timed call.

    Returns:
        Seconds and result by name, in the order of ``calls``.
    """
    found: dict[str, tuple[float, T]] = {}
    for name in order.sample(list(calls), len(calls)):
        found[name] = timed(device, calls[name])
        done()
    return {name: found[name] for name in calls}


def ratio(over: np.ndarray, under: np.ndarray) -> tuple[float, list[float]]:
    """Ratio of two sums over the same items, with its 95 % interval by a paired bootstrap."""
    sums = resampled_sums(np.stack([over, under], 1))
    low, high = interval(sums[:, 0] / sums[:, 1])
    return round(float(over.sum() / under.sum()), 3), [round(float(low), 3), round(float(high), 3)]


@dataclass(frozen=True)
class Cost:
    """Costs of one way of decoding, for each unit (an item or a batch of items).

    Attributes:
        amount: Seconds or passes of each unit, ``(units,)``.
        tokens: Number of tokens of each unit, end-of-sequence tokens included, ``(units,)``; or
            another measure of the work, such as seconds of audio.
    """

    amount: np.ndarray
    tokens: np.ndarray

    def over(self, other: Cost) -> tuple[float, float, float]:
        """Cost per token of ``other`` divided by this one's, with its low and high ends.

        The ends are a 95 % interval by a paired bootstrap over units; with fewer than eight units
        they are the smallest and largest ratio of a unit.
        """
        table = np.column_stack([self.amount, self.tokens, other.amount, other.tokens])

        def ratio(sums: np.ndarray) -> np.ndarray:
            mine, my_tokens, theirs, their_tokens = sums.T
            return (theirs / their_tokens) / (mine / my_tokens)

        if len(table) < 8:
            low, high = ratio(table).min(), ratio(table).max()
        else:
            low, high = interval(ratio(resampled_sums(table)))
        return round(float(ratio(table.sum(0))), 3), round(float(low), 3), round(float(high), 3)


def bandwidth(device: torch.device) -> float:
    """Memory bandwidth of a device: bytes per second that a large copy reads and writes."""
    source = torch.zeros(2**28 if device.type == "cuda" else 2**25, device=device)
    target = torch.empty_like(source)
    best = min(timed(device, lambda: target.copy_(source))[0] for _ in range(5))
    return 2 * source.numel() * source.element_size() / best


def load() -> float:
    """Load average of the last minute; NaN if the system does not provide it."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else float("nan")


def machine(device: torch.device, dtype: str) -> dict[str, Any]:
    """Properties of the machine, versions and date, to be stored with a measurement."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else platform.processor()
    return {
        "device": name or platform.machine(),
        "dtype": dtype,
        "cores": os.cpu_count(),
        "load_at_start": load(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "bandwidth_gb_per_s": round(bandwidth(device) / 1e9, 1),
    }
