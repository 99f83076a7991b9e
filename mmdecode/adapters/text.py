"""Adapter of decoder-only text models of transformers with a key-value cache in every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmdecode._compat import attention_implementation
from mmdecode.adapters.attention import refuse_attention
from mmdecode.engine.adapter import Adapter, BranchSpec, Mask, Prompt
from mmdecode.engine.call import Call
from mmdecode.engine.views import origin
from mmdecode.errors import IncompatibleError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_EMBEDS = "inputs_embeds"
"""Input that models which merge images themselves, such as InstructBLIP, pass with the ids."""


class DecoderOnlyAdapter(Adapter):
    """Llama-like models: a base model with a final norm, followed by a linear head.

    Layers may have sliding-window attention; logits may be scaled or soft-capped.

    Raises:
        UnsupportedModelError: A layer has neither full nor sliding-window attention, or the
            attention implementation is neither sdpa nor eager.
    """

    summary = "Llama, Qwen, Mistral, Gemma and other causal language models"
    model_types: tuple[str, ...] = (
        "llama",
        "qwen2",
        "qwen3",
        "mistral",
        "gemma",
        "gemma2",
        "gemma3_text",
    )
    shows_inside = True
    takes_block_masks = True
    no_transforms: ClassVar = (
        "a text model has no input to change",
        "use a prompt instead, or a model with images or audio; where another model gave it "
        "embeddings, call mmdecode.generate, or generate inside mmdecode.attach(model)",
    )
    """Why a branch with a transform is refused, and what to do about it."""

    def __init__(self, model: PreTrainedModel) -> None:
        refuse_attention(model)
        config = model.config.get_text_config(decoder=True)
        self.model = model
        self.vocab = config.vocab_size
        self.num_layers = config.num_hidden_layers
        self.windows = windows_of(config)
        self.max_positions = steady_positions(config)
        self._cap = getattr(config, "final_logit_softcapping", None)
        self._scale = getattr(config, "logit_scale", None) or 1.0
        self._scale /= getattr(config, "logits_scaling", None) or 1.0
        both_ways = getattr(config, "use_bidirectional_attention", False)
        self._causal = getattr(config, "is_causal", True) and not both_ways
        self._sdpa = attention_implementation(config) == "sdpa"
        self._body = model.base_model
        self._head = model.get_output_embeddings()

    def prompt(self, call: Call, spec: BranchSpec) -> Prompt:
        """Returns the prompt of a branch: the caller's, its last token alone, or ids of its own."""
        if spec.transform is not None:
            raise IncompatibleError.between(
                f"branch {spec.name!r} with transform {spec.transform!r}",
                self.name,
                *self.no_transforms,
            )
        prompt = super().prompt(call, spec)
        embeds = call.request.model_kwargs.get(_EMBEDS)
        own = call.plan.adapter is None or origin(call.plan.adapter.model) is origin(self.model)
        same = isinstance(spec.prompt, str) and spec.prompt == "same"
        if same and own and embeds is not None:
            return replace(prompt, inputs={_EMBEDS: embeds})
        return prompt

    def stack(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Concatenates all prompts into one, branch by branch, padded to the longest."""
        if len(prompts) == 1:
            return list(prompts)
        width = max(p.ids.shape[1] for p in prompts)
        inputs = {}
        if any(_EMBEDS in p.inputs for p in prompts):
            inputs[_EMBEDS] = torch.cat(
                [pad(self._embeds(p), (0, 0, width - p.ids.shape[1], 0)) for p in prompts]
            )
        return [Prompt.stacked(prompts, inputs)]

    def _embeds(self, prompt: Prompt) -> Tensor:
        """Returns the prompt's embeddings: the given ones, or the embeddings of its ids."""
        embeds = prompt.inputs.get(_EMBEDS)
        return self.model.get_input_embeddings()(prompt.ids) if embeds is None else embeds

    def masks_itself(self, prompt: Prompt) -> bool:
        """Whether the model's own causal mask suffices: it is causal, and no token is padding."""
        return self._causal and prompt.prompt_attention is None and bool(prompt.mask.all())

    def steps_unmasked(self, visible: int) -> bool:
        """Whether attention is sdpa, and no window is shorter than ``visible``."""
        windows = (window for window in self.windows.values() if window is not None)
        return self._sdpa and all(visible < window for window in windows)

    def piece(self, prompt: Prompt, rows: Tensor | None, columns: slice) -> Prompt | None:
        """Some ids or embeddings of a prompt that is read from left to right."""
        if (
            not self._causal
            or prompt.prompt_attention is not None
            or prompt.inputs.keys() - {_EMBEDS}
        ):
            return None
        embeds = prompt.inputs.get(_EMBEDS)
        if embeds is None:
            return prompt.narrowed(rows, columns)
        embeds = embeds[:, columns] if rows is None else embeds[rows, columns]
        return prompt.narrowed(rows, columns, {_EMBEDS: embeds})

    def prefix(self, prompt: Prompt, rows: Sequence[int], columns: slice) -> Prompt | None:
        """First tokens of some rows, like any other piece of a prompt read from left to right."""
        return self.piece(prompt, torch.tensor(rows, device=prompt.ids.device), columns)

    def prefill(self, prompt: Prompt, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """Computes the states of the prompt, from its embeddings if these were given."""
        embeds = prompt.inputs.get(_EMBEDS)
        if embeds is None:
            return self.forward(prompt.ids, mask, positions, past)
        return self._run(mask, positions, past, inputs_embeds=embeds)

    def forward(self, tokens: Tensor, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """Computes the states after the final norm."""
        return self._run(mask, positions, past, input_ids=tokens)

    def _run(self, mask: Mask, positions: Tensor, past: Any, **tokens: Tensor) -> Tensor:
        return self._body(
            **tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=past,
            use_cache=True,
        ).last_hidden_state

    def head(self, hidden: Tensor) -> Tensor:
        """Computes logits, scaled and soft-capped as in the model."""
        logits = self._head(hidden)
        if self._scale != 1.0:
            logits = logits * self._scale
        return logits if self._cap is None else (logits / self._cap).tanh() * self._cap

    def unembed(self, hidden: Tensor) -> Tensor:
        """Applies the output matrix, without scaling or soft-capping."""
        return self._head(hidden)

    def norm(self, hidden: Tensor) -> Tensor:
        """Applies the final norm."""
        decoder = self.model.get_decoder()
        norm = getattr(decoder, "norm", None)
        if norm is None:
            raise UnsupportedModelError(
                f"the final norm of {type(decoder).__name__} is unknown, and early exits need it; "
                "use a guide or draft without early exits"
            )
        return norm(hidden)

    def layers(self) -> Sequence[torch.nn.Module]:
        """Returns the decoder's layers."""
        return self.model.get_decoder().layers

    def attention_sites(self) -> Sequence[torch.nn.Module]:
        """Returns the self-attention module of each layer."""
        return [layer.get_submodule("self_attn") for layer in self.layers()]


def steady_positions(config: Any) -> int | None:
    """Returns up to how many positions rotary frequencies are constant; ``None``: always.

    The rotary types "longrope" and "dynamic" change their frequencies when the largest position of
    a pass exceeds a limit. Cached keys would keep the old frequencies, and drafted tokens would
    already cause the change, even if they are rejected.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    found = []
    for part in (rope, *rope.values()):  # one for all layers, or one per type
        kind = part.get("rope_type") if isinstance(part, Mapping) else None
        if kind is not None and (kind == "longrope" or "dynamic" in kind):
            named = part.get("original_max_position_embeddings") if kind == "longrope" else None
            found.append(int(named or config.max_position_embeddings))
    return min(found, default=None)


def windows_of(config: Any) -> dict[str, int | None]:
    """Returns the attention window of each type in ``config.layer_types``; ``None``: unlimited.

    Raises:
        UnsupportedModelError: A layer has neither full nor sliding-window attention.
    """
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if not types:
        types = ["full_attention" if window is None else "sliding_attention"]
    known = {"full_attention": None, "sliding_attention": window}
    strange = sorted(set(types) - set(known))
    if strange:
        raise UnsupportedModelError(
            f"a {config.model_type} model has layers of {', '.join(strange)}; expected "
            "full_attention or sliding_attention: decode it with plain generate"
        )
    return {kind: known[kind] for kind in known if kind in types}
