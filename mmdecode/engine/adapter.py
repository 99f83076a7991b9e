"""`Adapter`, the base of classes that run one model family; `BranchSpec` and `Prompt`.

`mmdecode.adapters` has one for each family. In shapes: B rows, P tokens of a prompt.
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
    from mmdecode.engine.processors import NodeProcessors


@dataclass(frozen=True, kw_only=True)
class BranchSpec:
    """A branch of a guide: the model, run on other inputs than those of the call.

    Attributes:
        name: Key of the branch's outputs in `Guide.apply`; ``"main"`` is the model as called.
        prompt: ``"same"``; ``"last_token"`` keeps the last prompt token alone; or ids ``(B, P')``.
        prompt_mask: Mask of the ids in ``prompt``: True where not padding, ``(B, P')``.
        transform: Name of the adapter's change to the inputs, for example ``"noise"``.
        transform_options: Arguments of the transform.
        model: Another model with the same vocabulary; ``None``: the called one.
        stage: Order of the branches; those of a later stage get the outputs of earlier stages.
        replaces_after_prefill: Name of a branch that only runs at prefill. Afterwards this branch
            has its name. For branches that depend on the other's outputs at the prompt.
        build: Makes a custom `BranchRunner` from the call, which is used instead of the model (for
            another tokenizer, or scores of few candidates).

    Raises:
        OptionError: ``prompt`` is a string other than ``"same"`` and ``"last_token"``.
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
    """Tokens and inputs that one branch reads before the first generated token.

    Attributes:
        ids: ``(B, P)``, padded on the left.
        mask: True where not padding, ``(B, P)``.
        inputs: Further arguments of the model's forward pass, by name; the first axis is rows.
        prompt_attention: Whether each prompt token may attend to each other one (last axis), ``(B,
            P, P)`` bool, for prompts without causal attention; ``None``: causal.
    """

    ids: Tensor
    mask: Tensor
    inputs: Mapping[str, Any] = field(default_factory=dict)
    prompt_attention: Tensor | None = None

    def narrowed(
        self, rows: Tensor | None, columns: slice, inputs: Mapping[str, Any] | None = None
    ) -> Prompt:
        """Some rows and columns, with ``inputs`` or without any; see `Adapter.piece`."""
        ids, mask = self.ids[:, columns], self.mask[:, columns]
        if rows is not None:
            ids, mask = ids[rows], mask[rows]
        return Prompt(ids=ids, mask=mask, inputs=inputs or {})

    @classmethod
    def stacked(cls, prompts: Sequence[Prompt], inputs: Mapping[str, Any]) -> Prompt:
        """Joins prompts along the rows, padded on the left to the widest, with new ``inputs``."""
        width = max(p.ids.shape[1] for p in prompts)
        ids, mask = (
            torch.cat([pad(part, (width - part.shape[1], 0)) for part in parts])
            for parts in ([p.ids for p in prompts], [p.mask for p in prompts])
        )
        return cls(ids=ids, mask=mask, inputs=inputs)


Mask = Tensor | Mapping[str, Tensor] | None
"""Additive attention mask, ``(B, 1, Q, K)``; a dict by layer type where they differ; ``None``: the
model makes its own mask."""


class Adapter(Part):
    """Base of adapters, which run one model family.

    The defaults are for a model whose only input is ids, without grid, codebook or access to its
    layers; the adapter of a family overrides them. The adapters are in `mmdecode.adapters`; most
    inherit from a more specific class there.

    Attributes:
        summary: The family in one line.
        source: Where the model was published.
        model_types: Values of ``config.model_type`` that it runs.
        image_types: Values of ``config.model_type`` of models that generate image tokens.
        model: The model.
        vocab: Number of tokens that can be generated.
        num_layers: Number of layers with keys and values.
        max_positions: Size of a learned position table; ``None`` where positions are unbounded.
        inputs: Kinds of inputs that the model reads besides ids: ``"image"``, ``"audio"``.
        windows: Size of the attention window by layer type, the token itself included; ``None``:
            unlimited. With several types a mask is a dict by type.
        shows_inside: Whether `layers`, `norm` and `attention_sites` are implemented, so that parts
            can read and edit hidden states and attention.
        takes_block_masks: Whether masks go unchanged to the layers' attention function, so that
            they may be those of `mmdecode.engine.flex`.
        layout: Grid in which generated tokens lie, a `mmdecode.models.image_layout.Layout`;
            ``None``: there is none.
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
    takes_block_masks: bool = False
    layout: Any = None

    @staticmethod
    def inner(model: Any) -> Any:
        """The submodel whose ``generate`` a model calls; ``None``: the model calls its own."""
        return None

    @staticmethod
    def fits(model: Any) -> bool:
        """Whether the adapter can run a model whose type is not among `model_types`."""
        return False

    @property
    def name(self) -> str:
        """The model's name in messages: the name of its class."""
        return type(self.model).__name__

    # a pass

    def prompt(self, call: Call, spec: BranchSpec) -> Prompt:
        """The prompt of a branch; the default is for models whose only input is ids.

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
        """Whether the model reads a prompt correctly without the engine's mask.

        True for most models where no row is padded; it saves a mask of all queries and keys.
        """
        return False

    def steps_unmasked(self, visible: int) -> bool:
        """Whether one token that may attend to all of ``visible`` slots needs no mask."""
        return False

    def piece(self, prompt: Prompt, rows: Tensor | None, columns: slice) -> Prompt | None:
        """Some rows and columns of a prompt; ``None``: it has to be read as a whole.

        Args:
            prompt: The prompt.
            rows: Rows to keep, ``(G,)``; ``None``: all.
            columns: Columns to keep; in these rows none of them is padding.
        """
        return None

    def prefix(self, prompt: Prompt, rows: Sequence[int], columns: slice) -> Prompt | None:
        """First tokens of some rows, up to the end of their images, that are read as a prompt.

        Args:
            prompt: The prompt.
            rows: Rows to keep.
            columns: Columns of these tokens; in these rows none of them is padding.

        Returns:
            The prefix; ``None``: it depends on what comes after it, or on other rows.
        """
        return None

    def open(self, cache: Any, prompt: Prompt) -> Any:
        """The model's ``past_key_values`` for a prompt: the engine's cache, or a wrapper of it."""
        return cache

    def join(self, pasts: Sequence[Any], cache: Any) -> Any:
        """Same as `open`, for a cache joined from those of several prompts, in their order."""
        return cache

    def prefill(self, prompt: Prompt, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """Final hidden states of the whole prompt; overridden for images or a prefix mask."""
        return self.forward(prompt.ids, mask, positions, past)

    def forward(self, tokens: Tensor, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """States after the final norm, ``(B, Q, H)``; ``mask`` is additive, ``(B, 1, Q, K)``."""
        raise NotImplementedError

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of final hidden states ``(..., H)``."""
        raise NotImplementedError

    # internals that parts may ask for

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of generated tokens, ``(..., H)``."""
        return self.model.get_input_embeddings()(tokens)

    def unembed(self, hidden: Tensor) -> Tensor:
        """Logits by the output matrix alone, which heads such as Medusa's share."""
        return self.head(hidden)

    def unembed_some(self, ids: Tensor) -> Callable[[Tensor], Tensor] | None:
        """`unembed` for the logits of some ids only; ``None``: it would be no faster."""
        return None

    def norm(self, hidden: Tensor) -> Tensor:
        """Applies the final norm, which states of an earlier layer need before `head`."""
        raise NotImplementedError

    def layers(self) -> Sequence[torch.nn.Module]:
        """The decoder's layers, first to last."""
        raise NotImplementedError

    def attention_sites(self) -> Sequence[torch.nn.Module]:
        """The decoder's self-attention, by layer: the modules that call an attention function."""
        return ()

    def spans(self, kind: str, ids: Tensor) -> Tensor:
        """Mask of the prompt tokens that represent images or audio (``kind``), ``(B, P)`` bool."""
        return torch.zeros_like(ids, dtype=torch.bool)

    def span_sizes(self, kind: str, prompt: Prompt) -> list[int] | None:
        """Number of tokens of each input of a kind, in order of rows; ``None``: not known."""
        return None

    def contents(self, raw: Mapping[str, Any], ids: Tensor) -> list[list[Tensor]]:
        """Raw images or audio of each row, which key the row's noise together with its ids."""
        return [[] for _ in ids]

    def node_processors(self) -> NodeProcessors:
        """The family's own logits processors that can be evaluated at all nodes together."""
        return {}

    def codebook(self) -> Tensor | None:
        """Embedding of each code of `layout`, ``(C, d)``; ``None``: there is none."""
        return None

    @property
    def on_grid(self) -> bool:
        """Whether `grid_positions` is implemented."""
        return False

    def grid_positions(self, positions: Tensor) -> Tensor:
        """Time, row and column of positions: ``(B, Q)`` to ``(B, 3, Q)``."""
        raise NotImplementedError

    def companion(self, model: Any) -> Adapter | None:
        """Adapter of a draft model for the same outputs; ``None``: the one registered for it."""
        return None

    @staticmethod
    def extra_layer(config: Any) -> torch.nn.Module | None:
        """An untrained layer of the decoder, to load a drafter's weights; ``None``: unsupported."""
        return None

    def run_extra_layer(
        self, layer: torch.nn.Module, hidden: Tensor, mask: Tensor, past: Any
    ) -> Tensor:
        """Runs ``hidden (B, Q, H)`` through an `extra_layer`; ``past`` comes from `open`."""
        raise NotImplementedError
