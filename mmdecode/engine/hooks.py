"""Hooks on modules that several threads may run at once; those that read and edit states."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmdecode.engine.attention import layer_range

if TYPE_CHECKING:
    from mmdecode.engine.contracts import StateEdit


def of_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a module's hook so that it runs only in the thread that created it."""
    owner = threading.get_ident()

    def run(*args: Any) -> Any:
        return hook(*args) if threading.get_ident() == owner else None

    return run


def record_states(module: torch.nn.Module, into: dict[int | str, Tensor], key: int) -> Any:
    """Records a module's input as ``into[key]`` in every pass; returns the hook's handle."""

    def before(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        into[key] = args[0] if args else kwargs["hidden_states"]

    return module.register_forward_pre_hook(of_this_thread(before), with_kwargs=True)


def edit_states(
    hooks: ExitStack, layers: Sequence[torch.nn.Module], edit: StateEdit, rows: slice
) -> None:
    """Applies a `StateEdit` to each layer's output, by hooks that last as long as ``hooks``."""
    before: list[Tensor] = []
    covered = layer_range(edit.layers, len(layers))

    def after(layer: int) -> Callable[..., Any]:
        def change(_: torch.nn.Module, args: Any, output: Any) -> Any:
            states = output[0] if isinstance(output, tuple) else output
            if layer == 0:
                before.clear()
            own = states[rows]
            edited = edit.change(layer, own, before) if layer in covered else own
            before.append(edited)
            if edited is own:
                return output
            states = torch.cat([states[: rows.start], edited, states[rows.stop :]])
            return (states, *output[1:]) if isinstance(output, tuple) else states

        return change

    for index, layer in enumerate(layers):
        hooks.enter_context(layer.register_forward_hook(of_this_thread(after(index))))
