"""Batched encoding without padding: inputs of one length share a batch, their states are padded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Inputs = Mapping[str, Tensor]
"""Inputs of an encoder for one row, by name, each with a batch of 1."""


def shape_of(inputs: Inputs) -> tuple[Any, ...]:
    """Names and shapes of inputs; rows that agree in them can be stacked."""
    return tuple((name, tuple(value.shape)) for name, value in sorted(inputs.items()))


def grouped(kinds: Sequence[Any], rows: Iterable[int] | None = None) -> list[list[int]]:
    """Row indices in groups of one kind, smallest kind first.

    Args:
        kinds: Kind of each row; kinds must be sortable.
        rows: Rows to group; ``None``: all.
    """
    groups: dict[Any, list[int]] = {}
    for row in range(len(kinds)) if rows is None else rows:
        groups.setdefault(kinds[row], []).append(row)
    return [group for _, group in sorted(groups.items())]


def alike(rows: Sequence[Inputs]) -> list[list[int]]:
    """Row indices in groups of one shape, smallest first."""
    return grouped([shape_of(inputs) for inputs in rows])


def stacked(rows: Sequence[Inputs]) -> dict[str, Tensor]:
    """Rows of one shape as one batch."""
    return {name: torch.cat([one[name] for one in rows]) for name in rows[0]}


def encode_unpadded(encoder: Any, rows: Sequence[Inputs]) -> tuple[Tensor, Tensor | None]:
    """Hidden states of each row, equal to those of the row encoded alone, right-padded.

    Args:
        encoder: Takes the inputs by name and returns ``last_hidden_state (B, S, H)``.
        rows: Inputs of each row.

    Returns:
        States ``(B, S, H)``, and a mask, true where not padding, bool ``(B, S)``; ``None``:
        nothing is padding.
    """
    found: dict[int, Tensor] = {}
    for group in alike(rows):
        states = encoder(**stacked([rows[index] for index in group])).last_hidden_state
        found |= dict(zip(group, states, strict=True))
    return padded([found[index] for index in range(len(rows))])


def padded(ordered: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Pads states ``(S, H)`` of rows on the right; returns them with a mask as above."""
    lengths = torch.tensor([len(states) for states in ordered], device=ordered[0].device)
    mask = None
    if len(set(lengths.tolist())) > 1:
        positions = torch.arange(int(lengths.max()), device=lengths.device)
        mask = positions < lengths[:, None]
    return torch.nn.utils.rnn.pad_sequence(ordered, batch_first=True), mask
