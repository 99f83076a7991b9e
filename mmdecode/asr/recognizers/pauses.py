"""Finds the pause at which a window is cut, by the energy of frames.

A pause is a stretch of at least `SHORTEST_S` seconds that is much quieter than the speech around
it. The range of energies is measured from the 10th to the 95th percentile of the window's frames,
in decibels; frames in the lowest share `QUIET` of that range are quiet. The window is cut in the
middle of the longest pause.
"""

from __future__ import annotations

import numpy as np

FRAME_S, STEP_S = 0.025, 0.01
SHORTEST_S = 0.15
RANGE_DB = 10.0
"""Least range of energies, in decibels, at which a window is searched for pauses."""
QUIET = 0.35
"""Share of the range of energies, from its lower end, that counts as quiet."""


def levels(samples: np.ndarray, rate: int) -> np.ndarray:
    """Returns the energy in decibels of frames of 25 ms, one every 10 ms, ``(F,)``."""
    size, step = round(FRAME_S * rate), round(STEP_S * rate)
    if len(samples) < size:
        return np.zeros(0)
    sums = np.concatenate([[0.0], np.cumsum(np.square(samples, dtype=np.float64))])
    starts = np.arange(0, len(samples) - size + 1, step)
    power = (sums[starts + size] - sums[starts]) / size
    return 10 * np.log10(np.maximum(power, 1e-10))


def pause_in(samples: np.ndarray, rate: int, earliest: int) -> int | None:
    """Finds the middle of the longest pause of a window.

    Args:
        samples: Samples of the longest possible window, ``(T,)``.
        rate: Sampling rate, in Hz.
        earliest: Index of the first sample at which the window may be cut.

    Returns:
        Index of a sample, at a multiple of `STEP_S` seconds; ``None``: there is no pause.
    """
    found = levels(samples, rate)
    if not len(found):
        return None
    quiet, loud = np.percentile(found, [10, 95])
    if loud - quiet < RANGE_DB:
        return None
    silent = np.flatnonzero(np.diff(np.r_[False, found < quiet + QUIET * (loud - quiet), False]))
    step, size = round(STEP_S * rate), round(FRAME_S * rate)
    best: tuple[int, int] | None = None
    for first, last in silent.reshape(-1, 2):
        begin, end = max(int(first) * step, earliest), (int(last) - 1) * step + size
        length = end - begin
        if length >= SHORTEST_S * rate and (best is None or length >= best[0]):
            best = length, (begin + end) // 2
    return None if best is None else best[1] // step * step
