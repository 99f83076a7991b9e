"""Kangaroo: drafts a chain with the target's first layers and a trained adapter after them.

The drafting model consists of the target's first layers, the adapter, and the target's head, with a
cache of its own. Drafting ends after a token whose distribution has a low top probability. The
adapter is in `mmdecode.models.kangaroo`.

Source: Liu et al. 2024, arXiv:2404.18911, section 3, with its defaults. Differs from the reference:
batches of any size and every acceptance rule; and drafting and verification each run the first
layers, whereas the reference's verification continues from the states computed while drafting.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from mmdecode.draft.assistant import AssistantSession, Going, adapter_like
from mmdecode.draft.features import refuse_foreign
from mmdecode.draft.layer_skip import LayerSkip, shallow
from mmdecode.draft.shipped import shipped
from mmdecode.draft.target import TargetDistribution, warp_alone
from mmdecode.engine.adapter import MAIN, Adapter
from mmdecode.engine.branches import ModelRunner
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput, Requirements
from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.models.feature_drafter import FeatureDrafter, load_drafter
from mmdecode.models.kangaroo import Exit, KangarooModel
from mmdecode.models.placed import Placed


class Kangaroo(LayerSkip):
    """Drafts with a trained adapter after the target's first layers.

    Args:
        drafter: The adapter; its configuration names the layer that it follows.
        length: Maximum number of tokens drafted per round; 0 drafts nothing.
        confidence_threshold: Drafting ends in a row after a token if the top probability of its
            distribution is below this value; 0: never before ``length``. The paper has 0.6.

    Proposes argmax, sampled or coupled chains, as `mmdecode.draft.assistant.Assistant` does.
    Lossless under every exact acceptance rule, since whether a chain ends depends only on tokens
    that are proposed.

    Raises:
        OptionError: An option is out of range.
        IncompatibleError: When decoding begins: the adapter was trained for another model, or the
            model has sliding-window layers or no rotary positions.
    """

    summary = "the model's first layers and a trained adapter draft a chain until they are in doubt"
    source = "Kangaroo, Liu et al. 2024"
    modules: ClassVar[Mapping[str, type[FeatureDrafter]]] = {KangarooModel.kind: KangarooModel}

    def __init__(
        self, drafter: KangarooModel, length: int = 6, confidence_threshold: float = 0.6
    ) -> None:
        super().__init__(exit_layer=drafter.exit_layer, length=length)
        if not 0 <= confidence_threshold <= 1:
            raise OptionError(
                f"confidence_threshold={confidence_threshold}; expected a probability from 0 to 1"
            )
        self.drafter, self.confidence_threshold = drafter.eval(), confidence_threshold
        self.placed = Placed(self.drafter)

    @classmethod
    def from_pretrained(cls, name: str | Path, **options: Any) -> Kangaroo:
        """Loads an adapter from a folder, a Hub id or ``zoo:NAME``; takes the class's options.

        Raises:
            InputError: The checkpoint contains no Kangaroo adapter.
        """
        drafter = load_drafter(name, cls.modules)
        assert isinstance(drafter, KangarooModel)
        return cls(drafter, **options)

    @classmethod
    def from_options(  # type: ignore[override]
        cls,
        path: str | None = None,
        model_id: str | None = None,
        length: int = 6,
        confidence_threshold: float = 0.6,
    ) -> Kangaroo:
        """Builds the drafter from options; without ``path``, with the model's shipped adapter."""
        path = path or shipped(cls.modules, model_id)
        return cls.from_pretrained(path, length=length, confidence_threshold=confidence_threshold)

    def needs(self, adapter: Adapter) -> Requirements:
        """Returns the final hidden states, whose width and dtype the adapter must have."""
        return Requirements(hidden=frozenset({"last"}))

    def begin(self, call: Call, prefill: BranchOutput) -> AssistantSession:
        """Builds the drafting model from first layers and adapter, and runs it on the prompt."""
        adapter = call.plan.adapter
        refuse_foreign(self.drafter, adapter, prefill)
        own = self.placed.like(prefill.hidden["last"])
        view = adapter_like(adapter, self._view(adapter, own))
        view.num_layers = own.exit_layer + 1  # the drafter's keys and values have a layer too
        branch = ModelRunner(view, [MAIN])
        branch.prefill(call, {})
        return KangarooSession(
            call, branch, warp_alone(call), self.length, self.confidence_threshold
        )

    def _view(self, adapter: Any, own: KangarooModel) -> Any:
        """Returns a model of the target's first layers with the adapter ``own`` after them."""
        first, count = own.exit_layer, len(adapter.layers())
        if not 1 <= first <= count:
            raise IncompatibleError.between(
                f"draft Kangaroo after layer {first}",
                adapter.name,
                f"the model has {count} layers",
                "use an adapter that was trained for this model",
            )
        refuse_unsuited(adapter)

        def change(index: int, layer: Any) -> Any:
            return Exit(layer, own) if index == first - 1 else layer

        view = shallow(adapter, range(first), change)
        view.get_decoder()._modules["norm"] = own.norm
        return view


def refuse_unsuited(adapter: Any) -> None:
    """Raises an error if the adapter cannot be run in a model.

    Raises:
        IncompatibleError: The model has sliding-window layers, or no rotary positions.
    """
    decoder = adapter.model.get_decoder() if hasattr(adapter.model, "get_decoder") else None
    plain = all(window is None for window in adapter.windows.values())
    if not (plain and hasattr(decoder, "rotary_emb") and hasattr(decoder, "norm")):
        raise IncompatibleError.between(
            "draft Kangaroo",
            adapter.name,
            "the adapter needs layers that attend to all tokens with rotary positions, and a "
            "norm before the head",
            "use layer_skip",
        )


class KangarooSession(AssistantSession):
    """One call of a `Kangaroo`.

    Args:
        call: The generation call.
        branch: Runner of the model's first layers and the adapter, which has read the prompt.
        target: Warpers that turn the logits into the distribution to draft from.
        length: Maximum number of tokens drafted per round.
        confidence_threshold: Minimum top probability to continue, see `Kangaroo`.
    """

    def __init__(
        self,
        call: Call,
        branch: ModelRunner,
        target: TargetDistribution,
        length: int,
        confidence_threshold: float,
    ) -> None:
        super().__init__(call, branch, target, length)
        self.confidence_threshold = confidence_threshold

    def going(self) -> Going:
        """Returns the stop condition: rows stop after a token with a low top probability."""
        return _GoingConfident(self.confidence_threshold, self.call)


class _GoingConfident(Going):
    """Stops drafting in a row once the top probability falls below ``confidence_threshold``."""

    def __init__(self, confidence_threshold: float, call: Call) -> None:
        super().__init__(0.0 if confidence_threshold else 1.0, call)
        self.confidence_threshold = confidence_threshold

    def chance(self, probs: Tensor, token: Tensor) -> Tensor:
        """Returns 1 where the top probability reaches the threshold, else 0."""
        return (probs.amax(-1) >= self.confidence_threshold).float()
