"""Argmax of logits where nothing else of them is needed: in greedy decoding without processors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mmdecode.engine.adapter import Adapter

LOGITS = 2**24
"""Most logits that are computed at once on a CPU where only their argmax is needed; elsewhere four
times as many, since a GPU reads the output matrix again for the next ones."""


def argmax_of(adapter: Adapter, states: Tensor) -> Tensor:
    """Most likely tokens of states, ``(R, Q, H)`` to ``(R, Q)``; of equal ones the lowest id.

    Logits are computed for some rows at a time, so that there is no tensor of all of them.
    """
    rows, most = states.flatten(0, 1), LOGITS if states.device.type == "cpu" else 4 * LOGITS
    parts = rows.split(max(1, most // adapter.vocab))
    if len(parts) == 1:
        return adapter.head(states).argmax(-1)
    found = [adapter.head(part[None])[0].argmax(-1) for part in parts]
    return torch.cat(found).view(states.shape[:2])
