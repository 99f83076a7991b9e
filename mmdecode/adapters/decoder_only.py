"""Decoder-only text models of transformers whose layers all attend to everything before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from mmdecode.adapters.attention import refuse_attention
from mmdecode.engine.contracts import BranchSpec, Context, Mask, Prompt
from mmdecode.engine.setup import left_padded
from mmdecode.errors import IncompatibleError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mmdecode.engine.cache import RaggedCache


class DecoderOnlyAdapter:
    """Llama-like models: `base_model` gives states after the final norm, a linear head logits.

    Raises:
        UnsupportedModelError: A layer attends to a window, or attention is neither sdpa nor eager.
    """

    model_types = ("llama", "qwen2")
    max_positions = None
    windows: ClassVar = {"full_attention": None}

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config(decoder=True)
        mixed = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
        if mixed:
            raise UnsupportedModelError(
                f"{type(model).__name__} has layers of type {', '.join(sorted(mixed))}; this "
                "version decodes models whose layers all attend to the full context"
            )
        refuse_attention(model)
        self.model = model
        self.vocab = config.vocab_size
        self.num_layers = config.num_hidden_layers
        self._body = model.base_model
        self._head = model.get_output_embeddings()

    def prompt(self, ctx: Context, spec: BranchSpec) -> Prompt:
        """The caller's prompt, its last token alone, or the ids of the branch."""
        if spec.view is not None:
            raise IncompatibleError.between(
                f"branch {spec.name!r} with view {spec.view!r}",
                type(self.model).__name__,
                "a text model has no input to change",
                "use a prompt instead, or a model with images or audio",
            )
        if isinstance(spec.prompt, Tensor):
            ids = spec.prompt.to(ctx.device)
            ids = ids.expand(ctx.batch, -1) if len(ids) == 1 else ids
            mask = spec.prompt_mask
            mask = torch.ones_like(ids) if mask is None else mask.to(ctx.device).expand_as(ids)
            return Prompt(ids=ids, mask=left_padded(mask))
        if spec.prompt == "last_token":
            return Prompt(ids=ctx.prompt_ids[:, -1:], mask=ctx.prompt_mask[:, -1:])
        return Prompt(ids=ctx.prompt_ids, mask=ctx.prompt_mask)

    def stack(self, prompts: Sequence[Prompt]) -> Prompt:
        """Rows of all prompts, branch by branch."""
        return Prompt(
            ids=torch.cat([p.ids for p in prompts]), mask=torch.cat([p.mask for p in prompts])
        )

    def open(self, cache: RaggedCache, prompt: Prompt) -> Any:
        """The ragged cache itself."""
        return cache

    def prefill(self, prompt: Prompt, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """The prompt like any block."""
        return self.forward(prompt.ids, mask, positions, past)

    def forward(self, tokens: Tensor, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """States after the final norm."""
        return self._body(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=past,
            use_cache=True,
        ).last_hidden_state

    def head(self, hidden: Tensor) -> Tensor:
        """Logits."""
        return self._head(hidden)

    def unembed(self, hidden: Tensor) -> Tensor:
        """The same: there is nothing between the last norm and the output matrix."""
        return self._head(hidden)

    def layers(self) -> Sequence[torch.nn.Module]:
        """The decoder's layers."""
        return self.model.get_decoder().layers
