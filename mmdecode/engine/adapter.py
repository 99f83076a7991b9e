"""What runs one model family: adapters, the prompts that they make and the branches asked of them.

`mmdecode.adapters` holds those of the families; B rows, P tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmdecode.engine.call import Call

if TYPE_CHECKING:
    from mmdecode.engine.contracts import BranchRunner


@dataclass(frozen=True, kw_only=True)
class BranchSpec:
    """One more conditioning that a guide wants scored.

    Attributes:
        name: How the guide finds its scores; ``"main"`` is the model as called.
        prompt: ``"same"``; ``"last_token"`` keeps the last prompt token alone; or ids ``(B, P')``.
        prompt_mask: Beside ids.
        view: What the adapter is asked to change in the inputs, for example ``"noise"``.
        view_options: Arguments of the view.
        model: Another model with the same vocabulary; ``None``: the called one.
        stage: Branches of a later stage see the scores of earlier ones.
        replaces: Name of a branch that is read with the prompt only: from round 1 on this one
            answers in its place. For a law that depends on what the other said of the prompt.
        build: Makes a `BranchRunner` of one's own instead (another tokenizer, sparse answers);
            called with the context.
    """

    name: str
    prompt: Literal["same", "last_token"] | Tensor = "same"
    prompt_mask: Tensor | None = None
    view: str | None = None
    view_options: Mapping[str, Any] = field(default_factory=dict)
    model: Any = None
    stage: int = 1
    replaces: str | None = None
    build: Callable[[Call], BranchRunner] | None = None


MAIN = BranchSpec(name="main")
"""The model as called."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What one branch reads before the first token.

    Attributes:
        ids: ``(B, P)``, padded on the left.
        mask: True where not padding, ``(B, P)``.
        inputs: What else the model's forward takes, by name, rows first.
        sees: What each token may see of the others, ``(B, P, P)`` bool, where the engine's mask is
            used and a prompt is not read from left to right; ``None``: all before it.
    """

    ids: Tensor
    mask: Tensor
    inputs: Mapping[str, Any] = field(default_factory=dict)
    sees: Tensor | None = None

    @classmethod
    def stacked(cls, prompts: Sequence[Prompt], inputs: Mapping[str, Any]) -> Prompt:
        """Rows of all, one prompt after the other, padded to the widest; ``inputs`` are theirs."""
        width = max(p.ids.shape[1] for p in prompts)
        ids, mask = (
            torch.cat([pad(part, (width - part.shape[1], 0)) for part in parts])
            for parts in ([p.ids for p in prompts], [p.mask for p in prompts])
        )
        return cls(ids=ids, mask=mask, inputs=inputs)


Mask = Tensor | Mapping[str, Tensor] | None
"""Additive, ``(B, 1, Q, K)``; by layer type where these differ; ``None``: the model makes what it
needs."""


class Adapter(Protocol):
    """What a branch needs to run one model family; `mmdecode.adapters` holds them."""

    model: Any
    vocab: int
    num_layers: int
    max_positions: int | None
    """Size of a learned position table; ``None`` where positions are unbounded."""
    inputs: frozenset[str]
    """What the model reads other than ids: ``"image"``, ``"audio"``."""
    windows: Mapping[str, int | None]
    """Tokens a layer sees, by layer type, itself included; ``None``: all. With several types a mask
    is a dict by type."""

    def prompt(self, call: Call, spec: BranchSpec) -> Prompt:
        """The whole prompt of a branch."""

    def stack(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts of all branches, in order, as few passes as they can be read in."""

    def masks_itself(self, prompt: Prompt) -> bool:
        """Whether the model reads a prompt right without a mask of the engine's.

        Most spare a mask of all queries and keys where nothing is padding.
        """

    def open(self, cache: Any, prompt: Prompt) -> Any:
        """What the model is given as ``past_key_values``, around the engine's ragged cache."""

    def join(self, pasts: Sequence[Any], cache: Any) -> Any:
        """As `open`, around a cache joined of several that `open` was given, in order."""

    def prefill(self, prompt: Prompt, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """States of the whole prompt; a model that sees images or mixes directions looks here."""

    def forward(self, tokens: Tensor, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """States after the final norm, ``(B, Q, H)``; ``mask`` is additive, ``(B, 1, Q, K)``."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of ``(..., H)``."""

    def unembed(self, hidden: Tensor) -> Tensor:
        """By the shared output matrix alone, which extra heads use too."""

    def norm(self, hidden: Tensor) -> Tensor:
        """By the norm behind the last layer: what `head` wants of an earlier layer's states."""

    def layers(self) -> Sequence[torch.nn.Module]:
        """The decoder's layers, first to last."""

    def attention_sites(self) -> Sequence[torch.nn.Module]:
        """The decoder's self-attention, by layer: the modules that call an attention function."""

    def image_mask(self, ids: Tensor) -> Tensor:
        """Which tokens of a prompt stand for parts of an image, bool ``(B, P)``."""


def model_name(adapter: Any) -> str:
    """What messages call the model of an adapter."""
    return getattr(adapter, "name", type(adapter.model).__name__)
