"""Sorts questions into batches of similar length, or about the same images."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from mmdecode.runs.items import Failed
from mmdecode.vlm.requests import AnswerRequest

_LONGER = 32  # a question this many times longer than its batch's first begins a new batch

Sized = tuple[AnswerRequest, tuple[int, int] | Failed]
"""A request with its number of images and of text tokens, or why it has none."""


def _size(length: tuple[int, int] | Failed) -> tuple[int, int]:
    return (0, 0) if isinstance(length, Failed) else length


def by_length(asked: Sequence[Sized]) -> list[Sized]:
    """Questions of similar length next to each other."""
    return sorted(asked, key=lambda one: _size(one[1]))


def by_image(asked: Sequence[Sized]) -> list[Sized]:
    """Questions about the same images next to each other; these, and others, by length."""
    groups: dict[Any, list[Sized]] = {}
    for request, length in by_length(asked):
        images = tuple(image.identity or image.name for image in request.images)
        groups.setdefault(images or request.index, []).append((request, length))
    return [one for group in groups.values() for one in group]


def batches(ordered: Sequence[Sized], size: int) -> Iterator[list[Sized]]:
    """Yields batches; a question much longer than the first of its batch begins a new batch."""
    batch: list[Sized] = []
    for one in ordered:
        longest = _LONGER * (_size(batch[0][1])[1] + _LONGER) if batch else math.inf
        if len(batch) == size or _size(one[1])[1] > longest:
            yield batch
            batch = []
        batch.append(one)
    if batch:
        yield batch
