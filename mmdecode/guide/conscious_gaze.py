"""Conscious Gaze: increases attention to the image where image and text interact.

Four branches measure the interaction: the unchanged prompt, the prompt with noise in place of its
images, the images without the text, and noise without the text. With their logits L, the Harsanyi
interaction is ``I = L(image, words) - L(image) - L(words) + L(neither)``. If its variance over the
most likely tokens of the first branch is above ``threshold``, a fifth branch adds ``alpha`` times
the mean over heads of ``|s|`` to the attention scores s of image keys in middle layers. The fifth
branch is the target distribution. The interaction at a position decides about the attention at the
same position; in the released code it decides about the next position.

The release supports only InstructBLIP, so two choices for other models are made here: images are
replaced by uniform noise in the range of their normalised pixels, and the prompt without text
consists of the image tokens and the last token of the prompt. With InstructBLIP, the Q-Former still
reads the question in the branches without text.

Source: Bu et al. 2025, arXiv:2512.05546, with the settings of its released code. The threshold is
from its README and script; the default in the code is 0.5.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mmdecode.engine.adapter import BranchSpec
from mmdecode.engine.attention import AttentionEdit, Site
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput, Guide
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import OptionError
from mmdecode.guide.edited import checked_layers
from mmdecode.guide.linear import checked_cut, not_negative, plausible, warn_inactive

LAYERS = (5 / 31, 18 / 31)
"""Layers 5 to 18 of 32, as published."""


class ConsciousGaze(Guide):
    """Boosts attention to the image in a fifth branch, controlled by four other branches.

    Args:
        alpha: Strength of the boost of image keys; 0 leaves the fifth branch out. With 0 and
            ``update`` off, the guide has no effect.
        threshold: Variance of the interaction above which attention is boosted, ``k``.
        candidates: Number of most likely tokens over which the variance is computed.
        update: Whether the interaction is also added to the logits, as the released sampler does.
        update_from: Minimum variance of the interaction over the whole vocabulary for ``update``.
        beta: Plausibility cut after ``update``, 0 to 1: excludes tokens with a probability below
            ``beta * max p``.
        layers: First and last layer with boosted attention, as fractions of the depth.
    """

    summary = "more attention to the image where image and words act together"
    source = "Conscious Gaze 2025"
    requires_inputs = ("image",)

    def __init__(
        self,
        alpha: float = 0.5,
        threshold: float = 1.0,
        candidates: int = 50,
        update: bool = False,
        update_from: float = 1.0,
        beta: float = 0.1,
        layers: tuple[float, float] = LAYERS,
    ) -> None:
        if candidates < 2:
            raise OptionError(f"a variance needs at least 2 candidates, got {candidates}")
        self.alpha = not_negative("alpha", alpha)
        self.threshold, self.candidates = threshold, candidates
        self.update, self.update_from = update, update_from
        self.beta = checked_cut("beta", beta)
        self.neutral = self.alpha == 0 and not update
        noise = {"change": uniform_noise}
        self.branches = [
            BranchSpec(name="words", transform="pixels", transform_options=noise),
            BranchSpec(name="image", transform="only_images"),
            BranchSpec(name="neither", transform="only_images", transform_options=noise),
        ]
        self.edits = []
        if self.alpha:
            self.branches.append(BranchSpec(name="edited", stage=2))
            boost = AttentionEdit(
                branch="edited",
                layers=checked_layers(layers),
                scores=self._boosted,
                strength=self.gate,
            )
            self.edits.append(boost)

    @classmethod
    def from_options(
        cls,
        alpha: float = 0.5,
        threshold: float = 1.0,
        candidates: int = 50,
        update: bool = False,
        update_from: float = 1.0,
        beta: float = 0.1,
        first: float = LAYERS[0],
        last: float = LAYERS[1],
    ) -> ConsciousGaze:
        """Builds the guide from the options of a string; ``first`` and ``last`` give ``layers``."""
        return cls(alpha, threshold, candidates, update, update_from, beta, (first, last))

    def gate(self, call: Call, outputs: Mapping[str, BranchOutput]) -> Tensor:
        """Returns 1.0 at positions whose attention is boosted, else 0.0; ``(B, N + 1)``."""
        interaction, main = harsanyi(outputs), outputs["main"].logits
        best = main.topk(min(self.candidates, main.shape[-1]), -1).indices
        return (interaction.gather(-1, best).var(-1) > self.threshold).float()

    def _boosted(self, scores: Tensor, site: Site) -> Tensor:
        boost = self.alpha * site.strength * scores.abs().mean(1, keepdim=True)
        return torch.where(site.images, scores + boost, scores)

    def begin(self, call: Call, prefill: Mapping[str, BranchOutput]) -> None:
        """Warns if noise in place of the images changes no logits; computes nothing in advance."""
        warn_inactive(type(self).__name__, call, prefill, "words")

    @property
    def total(self) -> float:
        """Returns S, the sum of the branches' weights."""
        return 1.0

    def combine(
        self, constants: None, call: Call, proposal: Proposal, outputs: Mapping[str, BranchOutput]
    ) -> Tensor:
        """Computes the guided logits before the plausibility cut, ``(B, N + 1, V)``."""
        logits = self._uncut_logits(outputs)
        if not self.update:
            return logits
        interaction = harsanyi(outputs)
        strong = interaction.var(-1, keepdim=True) >= self.update_from
        return torch.where(strong, logits + interaction, logits)

    def apply(
        self, constants: None, call: Call, proposal: Proposal, outputs: Mapping[str, BranchOutput]
    ) -> Tensor:
        """Computes the guided logits; see `mmdecode.engine.contracts.Guide.apply`."""
        combined = self.combine(constants, call, proposal, outputs)
        return (
            plausible(combined, self._uncut_logits(outputs), self.beta) if self.update else combined
        )

    def _uncut_logits(self, outputs: Mapping[str, BranchOutput]) -> Tensor:
        return outputs["edited" if self.alpha else "main"].logits


def harsanyi(outputs: Mapping[str, BranchOutput]) -> Tensor:
    """Computes the Harsanyi interaction, ``(B, N + 1, V)``; 0 if both effects just add up."""
    both, image, words, neither = (
        outputs[name].logits for name in ("main", "image", "words", "neither")
    )
    return both - image - words + neither


def uniform_noise(values: Tensor, draw: torch.Generator) -> Tensor:
    """Replaces an image by uniform noise in the range of its normalised pixels."""
    low, high = values.aminmax()
    return low + (high - low) * torch.rand(values.shape, generator=draw).to(values)
