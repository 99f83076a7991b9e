"""Layer skipping: the model drafts for itself with some of its own layers.

A shallow view of the model shares every weight and runs a subset of its layers; it drafts a chain
like an assistant, with a small cache of its own. The first layers alone are an early exit through
the model's own last norm and head. No parameters; how well it drafts depends on the model, since
ordinary models were not trained to be cut short.

Sources: Zhang et al. 2023 (Draft & Verify), arXiv:2309.08168; Elhoushi et al. 2024 (LayerSkip),
arXiv:2404.16710, section 4.3. Differs from both: the layers to skip are given, not searched for (as
in `mmdecode.draft.layer_search`), and verification does not reuse the draft's keys and values.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from mmdecode.draft.assistant import Assistant, AssistantSession, adapter_like
from mmdecode.draft.target import warp_alone
from mmdecode.engine.adapter import MAIN
from mmdecode.engine.branches import ModelRunner
from mmdecode.engine.call import Call
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.engine.contracts import BranchOutput, Drafter
from mmdecode.engine.proposal import Kind
from mmdecode.engine.views import mark
from mmdecode.errors import IncompatibleError, OptionError


class LayerSkip(Drafter):
    """Drafts ``length`` tokens with a subset of the target's layers.

    Args:
        exit_layer: Number of first layers to run; the number of all layers is the whole model. Give
            this or ``skip``.
        skip: Indices of layers to leave out, from 0; ``()`` is the whole model.
        length: Tokens per round; 0 is neutral.

    Proposes what `mmdecode.draft.assistant.Assistant` does: argmax, sampled or coupled chains.
    Lossless under every exact rule.

    Raises:
        OptionError: At the call: the model has no such layers.
        IncompatibleError: At the call: the model's adapter offers no view of some of its layers.
    """

    summary = "some of the model's own layers draft a chain"
    source = "Zhang et al. 2023 (Draft & Verify); LayerSkip, Elhoushi et al. 2024"
    kinds: tuple[Kind, ...] = Assistant.kinds
    # its cache lacks what another draft proposed
    capabilities = DrafterCapabilities(graph_safe=True, composable=False, follows_target=True)

    def __init__(
        self, exit_layer: int | None = None, skip: Sequence[int] | None = None, length: int = 4
    ) -> None:
        if (exit_layer is None) == (skip is None):
            raise OptionError(
                f"exit_layer={exit_layer}, skip={skip}; expected one of the two: the number of "
                "first layers to run, or the indices of layers to leave out"
            )
        if length < 0:
            raise OptionError(f"length must be >= 0, got {length}")
        self.exit_layer, self.skip, self.length = exit_layer, skip, length

    @classmethod
    def from_options(
        cls, exit_layer: int | None = None, skip: int | str | None = None, length: int = 4
    ) -> LayerSkip:
        """Builds it from a string; layers to skip are joined by a slash: ``skip=3/5/7``."""
        try:
            layers = None if skip is None else [int(part) for part in str(skip).split("/")]
        except ValueError as error:
            raise OptionError(f"skip={skip!r} lists no layers; write skip=3/5/7") from error
        return cls(exit_layer, layers, length)

    def begin(self, call: Call, prefill: BranchOutput) -> AssistantSession:
        """Makes the view, and lets it read the prompt."""
        adapter = call.plan.adapter
        count = len(adapter.layers())
        if self.exit_layer is not None:
            keep = list(range(self.exit_layer))
        else:
            assert self.skip is not None
            keep = [layer for layer in range(count) if layer not in self.skip]
            if len(adapter.windows) > 1 and len(keep) < count:
                raise IncompatibleError.between(
                    "draft LayerSkip with skip",
                    type(adapter).__name__,
                    "what a layer attends to depends on its index in the model",
                    "use exit_layer, which keeps the index of every layer",
                )
        asked = keep if self.exit_layer is not None else [*(self.skip or ())]
        if not keep or any(not 0 <= layer < count for layer in asked):
            raise OptionError(
                f"exit_layer={self.exit_layer}, skip={self.skip}; the model has {count} layers: "
                f"exit_layer may be 1..{count}, skip may hold 0..{count - 1} but not all of them"
            )
        view = adapter_like(adapter, shallow(adapter, keep))
        branch = ModelRunner(view, [MAIN])
        branch.prefill(call, {})
        return AssistantSession(call, branch, warp_alone(call), self.length)


def shallow(
    adapter: Any, keep: Sequence[int], change: Callable[[int, nn.Module], nn.Module] | None = None
) -> Any:
    """The adapter's model with the layers ``keep`` alone; it shares every weight with the model.

    ``change(index, layer)`` returns what to run instead of a layer that is kept.

    Only the modules between the model and its list of layers are copied. Layers know their own
    index in a cache, so a cache of the full depth serves the view, and skipped layers stay empty in
    it. A copied module runs the ``forward`` of its class: one that was put on the original as an
    attribute (accelerate does so) is bound to the original, and would run all its layers. Hooks of
    the original are not taken along.

    Raises:
        IncompatibleError: The layers are in no ``ModuleList`` of the model.
    """
    layers = list(adapter.layers())
    lists = [
        name
        for name, module in adapter.model.named_modules()
        if isinstance(module, nn.ModuleList) and list(module) == layers
    ]
    if not lists:
        raise IncompatibleError.between(
            "draft LayerSkip",
            type(adapter).__name__,
            f"the {len(layers)} layers of {type(adapter.model).__name__} are in no module list",
            "use an assistant model, or a draft without one",
        )
    view = copied = without_hooks(adapter.model)
    *above, last = lists[0].split(".")
    for part in above:
        copied._modules[part] = without_hooks(copied._modules[part])
        copied = copied._modules[part]
    copied._modules[last] = nn.ModuleList(
        change(index, layers[index]) if change else layers[index] for index in keep
    )
    mark(view, adapter.model)
    return view


def without_hooks(module: Any) -> Any:
    """A copy of a module that shares its parts, and has none of its hooks or wrappers."""
    module = copy.copy(module)
    module._modules = dict(module._modules)
    own = vars(module)
    for name in ("forward", "_old_forward", "_hf_hook"):
        own.pop(name, None)
    own |= {name: OrderedDict() for name in own if "_hooks" in name}
    return module
