"""Base of guides that edit attention or hidden states inside the model, and checks of options."""

from __future__ import annotations

from collections.abc import Mapping
from warnings import warn

from torch import Tensor

from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput, Guide
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import OptionError


class Edited(Guide):
    """Base of guides whose target logits are the main branch's logits under the guide's ``edits``.

    A subclass sets ``edits`` and ``neutral``. If its ``requires_inputs`` contain images, the guide
    warns if the prompts have none.
    """

    def begin(self, call: Call, prefill: Mapping[str, BranchOutput]) -> None:
        """Returns ``None``: this guide computes nothing in advance."""
        if "image" in self.requires_inputs:
            warn_without_images(type(self).__name__, call)

    def apply(
        self, constants: None, call: Call, proposal: Proposal, outputs: Mapping[str, BranchOutput]
    ) -> Tensor:
        """Computes the guided logits; see `mmdecode.engine.contracts.Guide.apply`."""
        return outputs["main"].logits


def warn_without_images(guide: str, call: Call) -> None:
    """Warns if a guide that concerns image tokens finds none in any row."""
    if call.plan.is_draft:
        return
    if not bool(call.plan.adapter.spans("image", call.request.prompt_ids).any()):
        warn(
            f"guide {guide} is inactive: the prompts have no image tokens; give images, or leave "
            "it out",
            stacklevel=3,
        )


def checked_layers(layers: tuple[float, float]) -> tuple[float, float]:
    """Checks that two layers are given as fractions of the depth, in order, and returns them.

    Raises:
        OptionError: A fraction is not in 0..1, or the first is above the last.
    """
    first, last = layers
    if not 0 <= first <= last <= 1:
        raise OptionError(
            f"layers from {first} to {last}; expected two fractions of the depth in 0..1, the "
            "first not above the last"
        )
    return float(first), float(last)


def exit_layers(layers: tuple[float, float], depth: int, least: int = 0, step: int = 1) -> range:
    """Returns the layers i with ``first <= i / depth < last`` for early exits, at least one.

    The early exit of layer i applies the final norm and the head to the input of layer i. The input
    of layer 0 is the embeddings; the output of the last layer is no early exit.

    Args:
        layers: The fractions ``first`` and ``last`` of the depth.
        depth: Number of layers of the model.
        least: Lowest layer that may be returned.
        step: Distance between neighbouring layers.
    """
    first, last = (round(fraction * depth) for fraction in layers)
    first = min(max(first, least), depth - 1)
    return range(first, max(min(last, depth), first + 1), step)
