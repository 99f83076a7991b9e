"""Beam search over windows of audio, by transformers' ``generate``."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from mmdecode.engine.request import token_ids, up_to_end

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessor

Scored = tuple[list[int], float]
"""Tokens of a hypothesis, and its score."""


class RowLimits(StoppingCriteria):
    """Ends hypotheses at the largest number of tokens of their row.

    Args:
        limits: Largest number of tokens of each row, with those of the prompt.
    """

    def __init__(self, limits: Sequence[int]) -> None:
        self.limits = torch.tensor(limits)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Returns which hypotheses have reached their limit; each row has equally many."""
        limits = self.limits.to(input_ids.device)
        return input_ids.shape[1] >= limits.repeat_interleave(len(input_ids) // len(limits))


class BeamCache(EncoderDecoderCache):
    """Key-value cache whose encoder keys and values, equal in all beams of a row, stay in place."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorders keys and values of the decoder."""
        self.self_attention_cache.reorder_cache(beam_idx)


def beam_search(
    model: Any,
    prompt: Tensor,
    inputs: Mapping[str, Any],
    rules: list[LogitsProcessor],
    config: GenerationConfig,
    beams: int,
    keep: int,
    limits: Sequence[int],
) -> list[list[Scored]]:
    """Returns the ``keep`` best token sequences of each row, best first.

    Args:
        model: An encoder-decoder model.
        prompt: Decoder prompts, ``(B, P)``, without padding.
        inputs: Further inputs of ``generate``: features of the windows, or their encoder states.
        rules: Logits processors in addition to those of the checkpoint's settings.
        config: Generation configuration with the largest length and the special tokens.
        beams: Number of beams.
        keep: Number of sequences returned per row, at most ``beams``.
        limits: Largest number of new tokens of each row.

    Returns:
        For each row ``keep`` sequences with the end token, and their ``sequences_scores``: at the
        default length penalty the mean log-probability per token.
    """
    config = copy.copy(config)
    width = prompt.shape[1]
    config.update(
        num_beams=beams,
        num_return_sequences=keep,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    own = {}
    if "encoder_outputs" in inputs:
        text_config = model.config.get_text_config(decoder=True)
        own["past_key_values"] = BeamCache(*(DynamicCache(config=text_config) for _ in range(2)))
        config.cache_implementation = None
    # not the model's own generate, which is the loop over windows
    output = GenerationMixin.generate(
        model,
        decoder_input_ids=prompt,
        decoder_attention_mask=torch.ones_like(prompt),
        logits_processor=LogitsProcessorList(rules),
        stopping_criteria=StoppingCriteriaList([RowLimits([width + most for most in limits])]),
        generation_config=config,
        **inputs,
        **own,
    )
    ends = token_ids(config.eos_token_id)
    # beyond a row's limit there is padding
    most = [limit for limit in limits for _ in range(keep)]
    sequences = output.sequences[:, width:].tolist()
    tokens = [up_to_end(row[:end], ends) for row, end in zip(sequences, most, strict=True)]
    ranked = list(zip(tokens, output.sequences_scores.tolist(), strict=True))
    return [ranked[row : row + keep] for row in range(0, len(ranked), keep)]
