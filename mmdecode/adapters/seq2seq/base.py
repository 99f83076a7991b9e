"""Base of adapters of encoder-decoder models, which run the decoder on given encoder states."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from mmdecode.adapters.attention import refuse_attention
from mmdecode.engine.adapter import Adapter, BranchSpec, Mask, Prompt
from mmdecode.engine.call import Call
from mmdecode.engine.growing_source import SOURCES
from mmdecode.errors import IncompatibleError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mmdecode.engine.cache import RaggedCache


class EncoderDecoderAdapter(Adapter):
    """Runs the decoder alone; the call provides the encoder's states and their padding mask.

    Args:
        model: The whole model.
        num_layers: Number of layers of its decoder. A copy that runs fewer layers still needs a
            cache with an entry for each of them.
    """

    source_is_padded: ClassVar = True
    """Whether encoder states may be padding, see `source_mask`."""
    takes_positions: ClassVar = False
    """Whether the decoder's forward pass takes ``position_ids``."""
    takes_source_mask: ClassVar = True
    """Whether the decoder's forward pass takes ``encoder_attention_mask``; else it masks itself."""
    changes_source: ClassVar = False
    """Whether the decoder's forward pass changes the states that it is given, in place."""

    def __init__(self, model: PreTrainedModel, num_layers: int) -> None:
        refuse_attention(model)
        self.model = model
        self.vocab = model.config.vocab_size
        self._decoder = model.get_decoder()
        self._head = model.get_output_embeddings()
        self.num_layers = num_layers

    @property
    def source_width(self) -> int:
        """Returns the width of the encoder's states."""
        return int(self.model.config.d_model)

    def source_mask(self, call: Call) -> Tensor | None:
        """Returns True at encoder states that are not padding, ``(B, S)``; ``None``: no padding."""
        return call.request.model_kwargs.get("attention_mask")

    def prompt(self, call: Call, spec: BranchSpec) -> Prompt:
        """Returns the caller's decoder prompt, or its last token, with the encoder's states."""
        if spec.transform is not None or isinstance(spec.prompt, Tensor):
            raise IncompatibleError.between(
                f"branch {spec.name!r}",
                self.name,
                "an encoder-decoder has no transforms, and its branches have no other prompts",
                "use prompt='same' or prompt='last_token'",
            )
        ids, mask = call.request.prompt_ids, call.request.prompt_mask
        if spec.prompt == "last_token":
            ids, mask = ids[:, -1:], mask[:, -1:]
        source = call.request.model_kwargs["encoder_outputs"][0]
        width = self.source_width
        if source.shape[0] != len(ids) or source.shape[-1] != width:
            raise IncompatibleError(
                f"encoder states of shape {tuple(source.shape)} for {len(ids)} decoder rows; "
                f"{self.name} expects one each, of width {width}: an assistant that reads the "
                "target's encoder states must have the same width"
            )
        inputs: dict[str, Any] = {"source": source}
        read = self.source_mask(call) if self.source_is_padded else None
        if read is not None:
            inputs["source_mask"] = read.bool()
        if grown := call.request.inputs.get(SOURCES):
            copies = len(ids) // len(grown)
            inputs[SOURCES] = [one for one in grown for _ in range(copies)]
        return Prompt(ids=ids, mask=mask, inputs=inputs)

    def stack(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Concatenates all prompts into one, branch by branch, padded to the longest."""
        if len(prompts) == 1:
            return list(prompts)
        names = prompts[0].inputs
        parts = {name: [p.inputs[name] for p in prompts] for name in names}
        inputs = {
            name: torch.cat(own) if isinstance(own[0], Tensor) else [*itertools.chain(*own)]
            for name, own in parts.items()
        }
        return [Prompt.stacked(prompts, inputs)]

    def join(self, pasts: Sequence[Any], cache: RaggedCache) -> Any:
        """Never called, since all prompts are read in one pass."""
        raise AssertionError("one pass reads all prompts")

    def open(self, cache: RaggedCache, prompt: Prompt) -> Any:
        """Returns the self-attention cache and a cross-attention cache that is filled once."""
        return SourcePast(cache, prompt)

    def forward(self, tokens: Tensor, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """Computes the states after the decoder's final norm."""
        options = {"position_ids": positions} if self.takes_positions else {}
        if self.source_is_padded and self.takes_source_mask:
            options["encoder_attention_mask"] = past.source_mask
        return self._decoder(
            input_ids=tokens,
            attention_mask=mask,
            encoder_hidden_states=past.source.clone() if self.changes_source else past.source,
            past_key_values=past.caches,
            use_cache=True,
            **options,
        ).last_hidden_state

    def head(self, hidden: Tensor) -> Tensor:
        """Computes logits."""
        return self.unembed(hidden)

    def unembed(self, hidden: Tensor) -> Tensor:
        """Applies the output matrix."""
        return self._head(hidden)

    def layers(self) -> Sequence[torch.nn.Module]:
        """Returns the decoder's layers."""
        return self._decoder.layers


class SourcePast:
    """The self-attention cache, and the encoder states for cross-attention.

    Attributes:
        cache: The engine's self-attention cache, whose rows may have different lengths.
        caches: Self-attention and cross-attention caches together, as the decoder expects them.
        source: The encoder's states, ``(R, S, H)``.
        source_mask: Additive cross-attention mask, ``(R, 1, 1, S)``; ``None``: no padding.
        pads: Number of padding tokens at the left of the decoder's prompt, ``(R,)``.
    """

    def __init__(self, cache: RaggedCache, prompt: Prompt) -> None:
        self.cache = cache
        self.caches = EncoderDecoderCache(cache, DynamicCache())
        self.source = prompt.inputs["source"]
        self.source_mask: Tensor | None = None
        if "source_mask" in prompt.inputs:
            read = prompt.inputs["source_mask"][:, None, None]
            mask = torch.zeros(read.shape, dtype=self.source.dtype, device=read.device)
            self.source_mask = mask.masked_fill_(~read, torch.finfo(mask.dtype).min)
        self.pads = (~prompt.mask).sum(1)

    def reorder_cache(self, rows: Tensor) -> None:
        """Keeps the rows ``rows``, in that order."""
        self.caches.reorder_cache(rows)
        self.source = self.source[rows]
        if self.source_mask is not None:
            self.source_mask = self.source_mask[rows]
        self.pads = self.pads[rows]
