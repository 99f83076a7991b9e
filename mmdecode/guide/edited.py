"""Base of guides that take the main branch's own logits, changed by edits inside the model."""

from __future__ import annotations

from collections.abc import Mapping
from warnings import warn

from torch import Tensor

from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput, Guide
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import OptionError


class Edited(Guide):
    """The main branch's logits under ``edits``; a subclass sets them, and ``neutral``.

    Attributes:
        images: Whether the guide changes how images are read; then it warns if there are none.
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
    """Warns where a guide that is about image tokens finds none in any row."""
    if call.plan.is_draft:
        return
    if not bool(call.plan.adapter.spans("image", call.request.prompt_ids).any()):
        warn(
            f"guide {guide} is inactive: the prompts have no image tokens; give images, or leave "
            "it out",
            stacklevel=3,
        )


def checked_layers(layers: tuple[float, float]) -> tuple[float, float]:
    """First and last layer as fractions of the depth.

    Raises:
        OptionError: They are not in 0..1, or in the wrong order.
    """
    first, last = layers
    if not 0 <= first <= last <= 1:
        raise OptionError(
            f"layers from {first} to {last}; expected two fractions of the depth in 0..1, the "
            "first not above the last"
        )
    return float(first), float(last)


def exit_layers(layers: tuple[float, float], depth: int, least: int = 0, step: int = 1) -> range:
    """Layers whose inputs are read through the final norm and head: ``first <= i / depth < last``.

    The input of layer 0 are the embeddings; the output of the last layer is no early exit.

    Args:
        layers: First and last fraction.
        depth: Layers of the model.
        least: First layer that may be read.
        step: Distance between two of them.

    Returns:
        At least one layer.
    """
    first, last = (round(fraction * depth) for fraction in layers)
    first = min(max(first, least), depth - 1)
    return range(first, max(min(last, depth), first + 1), step)
