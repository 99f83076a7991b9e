"""Copies of a drafter's weights on the device and in the precision of the target model."""

from __future__ import annotations

import copy
from threading import Lock
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from mmdecode.quantization.models import round_linears

Module = TypeVar("Module", bound=nn.Module)


class Placed(Generic[Module]):
    """Copies of a module by device and precision, made once and shared by all calls and threads.

    Copies are made because converting the original to half precision would round its weights.

    Args:
        module: The original, which is used without a copy if device and precision already match.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self._copies: dict[tuple[torch.device, torch.dtype, bool], Module] = {}
        self._lock = Lock()

    def like(self, states: Tensor, int8: bool = False) -> Module:
        """Returns the module on the device and in the precision of ``states``.

        Args:
            states: States of the target.
            int8: Whether the weights of its linear layers are rounded to int8, as the target's.
        """
        key = (states.device, states.dtype, int8)
        own = next(self.module.parameters())
        if (own.device, own.dtype, False) == key:
            return self.module
        with self._lock:
            if key not in self._copies:
                made = copy.deepcopy(self.module).to(states)
                self._copies[key] = round_linears(made) if int8 else made
            return self._copies[key]
