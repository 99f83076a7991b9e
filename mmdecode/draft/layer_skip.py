"""Layer skipping: drafts a chain with the target model itself, using some of its layers.

The drafting model is a shallow copy of the target that shares every weight and runs a subset of the
layers, then the target's final norm and head. It drafts like an assistant model, with a cache of
its own. No parameters are added. Running only the first layers (early exit) works best with models
that were trained for it.

Sources: Zhang et al. 2023 (Draft & Verify), arXiv:2309.08168; Elhoushi et al. 2024 (LayerSkip),
arXiv:2404.16710, section 4.3. Differs from the papers: the layers to skip are given, not searched
for (`mmdecode.draft.layer_search` does that), and verification does not reuse the keys and values
computed while drafting.
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
    """Drafts ``length`` tokens per round with a subset of the target's layers.

    Args:
        exit_layer: Number of first layers to run. Give either this or ``skip``.
        skip: Indices of the layers to leave out, counted from 0; ``()`` runs the whole model.
        length: Number of tokens drafted per round; 0 drafts nothing.

    Proposes argmax, sampled or coupled chains, as `mmdecode.draft.assistant.Assistant` does.
    Lossless under every exact acceptance rule.

    Raises:
        OptionError: When decoding begins: the model does not have the given layers.
        IncompatibleError: When decoding begins: the model cannot be run with some of its layers.
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
        """Builds the drafter from options; slashes separate layers to skip: ``skip=3/5/7``."""
        try:
            layers = None if skip is None else [int(part) for part in str(skip).split("/")]
        except ValueError as error:
            raise OptionError(f"skip={skip!r} lists no indices; write skip=3/5/7") from error
        return cls(exit_layer, layers, length)

    def begin(self, call: Call, prefill: BranchOutput) -> AssistantSession:
        """Builds the drafting model, and runs it on the prompt."""
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
                    "the attention window of a layer depends on its index in the model",
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
    """Returns a copy of the adapter's model with only the layers ``keep``, and shared weights.

    If given, ``change(index, layer)`` returns the module to run instead of a kept layer.

    Only the modules between the model and its list of layers are copied. Layers know their own
    index in a cache, so the copy needs a cache with an entry for every layer of the model; the
    entries of skipped layers stay empty. A copied module runs the ``forward`` of its class, since a
    ``forward`` set as an attribute (as accelerate does) is bound to the original and would run all
    its layers. Hooks of the original modules are not copied.

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
    """Copies a module, with shared submodules and without hooks and wrappers."""
    module = copy.copy(module)
    module._modules = dict(module._modules)
    own = vars(module)
    for name in ("forward", "_old_forward", "_hf_hook"):
        own.pop(name, None)
    own |= {name: OrderedDict() for name in own if "_hooks" in name}
    return module
