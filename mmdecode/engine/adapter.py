"""What runs one model family: adapters, the prompts that they make and the branches asked of them.

`mmdecode.adapters` holds those of the families; B rows, P tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmdecode.engine.call import Call
from mmdecode.engine.capabilities import Part
from mmdecode.engine.request import left_padded
from mmdecode.errors import IncompatibleError, refuse_unknown

if TYPE_CHECKING:
    from mmdecode.engine.contracts import BranchRunner
    from mmdecode.engine.target_logits import NodeProcessors


@dataclass(frozen=True, kw_only=True)
class BranchSpec:
    """One more conditioning that a guide wants scored.

    Attributes:
        name: By which the guide finds its outputs; ``"main"`` is the model as called.
        prompt: ``"same"``; ``"last_token"`` keeps the last prompt token alone; or ids ``(B, P')``.
        prompt_mask: Given along with ids: True where not padding, ``(B, P')``.
        transform: What the adapter is asked to change in the inputs, for example ``"noise"``.
        transform_options: Arguments of the transform.
        model: Another model with the same vocabulary; ``None``: the called one.
        stage: Branches of a later stage see the outputs of earlier ones.
        replaces_after_prefill: Name of a prefill-only branch. After prefill, this branch takes over
            its name. For a distribution that depends on the other's outputs at the prompt.
        build: Makes a `BranchRunner` of one's own instead (another tokenizer, sparse answers);
            called with the call.

    Raises:
        OptionError: There is no prompt of that name.
    """

    name: str
    prompt: Literal["same", "last_token"] | Tensor = "same"
    prompt_mask: Tensor | None = None
    transform: str | None = None
    transform_options: Mapping[str, Any] = field(default_factory=dict)
    model: Any = None
    stage: int = 1
    replaces_after_prefill: str | None = None
    build: Callable[[Call], BranchRunner] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.prompt, str):
            refuse_unknown([self.prompt], ("same", "last_token"), "prompt of a branch")


MAIN = BranchSpec(name="main")
"""The model as called."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The tokens and inputs that one branch reads before the first generated token.

    Attributes:
        ids: ``(B, P)``, padded on the left.
        mask: True where not padding, ``(B, P)``.
        inputs: What else the model's forward takes, by name, rows first.
        prompt_attention: What each token may see of the others, ``(B, P, P)`` bool, where the
            engine's mask is used and a prompt is not read from left to right; ``None``: all before
            it.
    """

    ids: Tensor
    mask: Tensor
    inputs: Mapping[str, Any] = field(default_factory=dict)
    prompt_attention: Tensor | None = None

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


class Adapter(Part):
    """Base of what runs one model family; a family overrides what it has and others do not.

    What it does not override is not there: no inputs but ids, no grid, no codebook, no access to
    layers. `mmdecode.adapters` holds the families; most inherit from its classes, not this one.

    Attributes:
        summary: What the family is, in a line.
        source: Where the model was published.
        model_types: Its ``config.model_type``.
        image_types: The same, of models that write image tokens.
        model: The model.
        vocab: Tokens that can be generated.
        num_layers: Layers with keys and values.
        max_positions: Size of a learned position table; ``None`` where positions are unbounded.
        inputs: What the model reads other than ids: ``"image"``, ``"audio"``.
        windows: Tokens a layer sees, by layer type, itself included; ``None``: all. With several
            types a mask is a dict by type.
        shows_inside: Whether `layers`, `norm` and `attention_sites` let parts read and edit what
            happens inside.
        layout: Where generated tokens stand in a grid, a `mmdecode.models.image_layout.Layout`;
            ``None``: in none.
    """

    summary: str = ""
    source: str = ""
    model_types: tuple[str, ...] = ()
    image_types: tuple[str, ...] = ()
    model: Any
    vocab: int
    num_layers: int
    max_positions: int | None = None
    inputs: frozenset[str] = frozenset()
    windows: Mapping[str, int | None] = MappingProxyType({"full_attention": None})
    shows_inside: bool = False
    layout: Any = None

    @staticmethod
    def inner(model: Any) -> Any:
        """The part of a model that ``generate`` hands a decoder in its place; ``None``: itself."""
        return None

    @staticmethod
    def fits(model: Any) -> bool:
        """Whether it may run a model whose type it does not name."""
        return False

    @property
    def name(self) -> str:
        """The model's name in messages: the class that the caller knows."""
        return type(self.model).__name__

    # a pass

    def prompt(self, call: Call, spec: BranchSpec) -> Prompt:
        """The whole prompt of a branch; as it stands, of models that read ids alone.

        Raises:
            IncompatibleError: The branch asks for a transform of inputs.
        """
        if spec.transform is not None:
            raise IncompatibleError.between(
                f"branch {spec.name!r} with transform {spec.transform!r}",
                self.name,
                f"{type(self).__name__} changes no inputs",
                "use a guide without it, or let the adapter's prompt make it",
            )
        ids, mask = call.request.prompt_ids, call.request.prompt_mask
        if isinstance(spec.prompt, Tensor):
            ids, given = spec.prompt.to(call.device), spec.prompt_mask
            ids = ids.expand(call.batch, -1) if len(ids) == 1 else ids
            mask = torch.ones_like(ids) if given is None else given.to(call.device).expand_as(ids)
            return Prompt(ids=ids, mask=left_padded(mask))
        if spec.prompt == "last_token":
            return Prompt(ids=ids[:, -1:], mask=mask[:, -1:])
        return Prompt(ids=ids, mask=mask)

    def stack(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts of all branches, in order, stacked into as few passes as possible."""
        return list(prompts)

    def masks_itself(self, prompt: Prompt) -> bool:
        """Whether the model reads a prompt correctly without a mask of the engine's.

        Most need no mask of all queries and keys where nothing is padding.
        """
        return False

    def open(self, cache: Any, prompt: Prompt) -> Any:
        """The model's ``past_key_values``, around the engine's ragged cache."""
        return cache

    def join(self, pasts: Sequence[Any], cache: Any) -> Any:
        """Same as `open`, around a cache joined from several that `open` was given, in order."""
        return cache

    def prefill(self, prompt: Prompt, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """States of the whole prompt; overridden by models with images or a prefix mask."""
        return self.forward(prompt.ids, mask, positions, past)

    def forward(self, tokens: Tensor, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """States after the final norm, ``(B, Q, H)``; ``mask`` is additive, ``(B, 1, Q, K)``."""
        raise NotImplementedError

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of ``(..., H)``."""
        raise NotImplementedError

    # what parts may ask for

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of generated tokens, ``(..., H)``."""
        return self.model.get_input_embeddings()(tokens)

    def unembed(self, hidden: Tensor) -> Tensor:
        """Applies the shared output matrix alone, which extra heads use too."""
        return self.head(hidden)

    def norm(self, hidden: Tensor) -> Tensor:
        """Applies the final norm, which `head` expects of an earlier layer's states."""
        raise NotImplementedError

    def layers(self) -> Sequence[torch.nn.Module]:
        """The decoder's layers, first to last."""
        raise NotImplementedError

    def attention_sites(self) -> Sequence[torch.nn.Module]:
        """The decoder's self-attention, by layer: the modules that call an attention function."""
        return ()

    def spans(self, kind: str, ids: Tensor) -> Tensor:
        """Which tokens of a prompt stand for parts of a ``kind`` of `inputs`, bool ``(B, P)``."""
        return torch.zeros_like(ids, dtype=torch.bool)

    def span_sizes(self, kind: str, prompt: Prompt) -> list[int] | None:
        """Tokens of each input of a kind in a prompt, row by row; ``None``: not known."""
        return None

    def contents(self, raw: Mapping[str, Any], ids: Tensor) -> list[list[Tensor]]:
        """Inputs of each row that the caller handed over, to name it by."""
        return [[] for _ in ids]

    def node_processors(self) -> NodeProcessors:
        """Processors of the family's own that can be evaluated at all nodes together."""
        return {}

    def codebook(self) -> Tensor | None:
        """Embedding of each code of `layout`, ``(C, d)``; ``None``: there is none."""
        return None

    @property
    def on_grid(self) -> bool:
        """Whether `grid_places` knows where a position lies."""
        return False

    def grid_places(self, positions: Tensor) -> Tensor:
        """Time, row and column of positions ``(B, Q)``, ``(B, 3, Q)``."""
        raise NotImplementedError

    def companion(self, model: Any) -> Adapter | None:
        """The adapter of another model that writes the same; ``None``: the registered one."""
        return None

    @staticmethod
    def extra_layer(config: Any) -> torch.nn.Module | None:
        """A decoder layer of the family, untrained; ``None``: drafters can bring none."""
        return None

    @staticmethod
    def run_extra_layer(layer: torch.nn.Module, hidden: Tensor, mask: Tensor, past: Any) -> Tensor:
        """``hidden (B, Q, H)`` through such a layer; ``past`` comes from `open`."""
        raise NotImplementedError
