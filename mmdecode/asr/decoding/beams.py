"""Beam search over windows of audio, by transformers' ``generate``."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessorList

from mmdecode.engine.request import token_ids, up_to_end

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessor

Scored = tuple[list[int], float]
"""Tokens of a hypothesis, and its score."""


def beam_search(
    model: Any,
    prompt: Tensor,
    inputs: Mapping[str, Any],
    rules: list[LogitsProcessor],
    config: GenerationConfig,
    beams: int,
    keep: int,
) -> list[list[Scored]]:
    """Returns the ``keep`` best token sequences of each row, best first.

    Args:
        model: An encoder-decoder model.
        prompt: Decoder prompts, ``(B, P)``, without padding.
        inputs: Further inputs of ``generate``: features of the windows, or their encoder states.
        rules: Logits processors in addition to those of the checkpoint's settings.
        config: Generation configuration with lengths and special tokens.
        beams: Number of beams.
        keep: Number of sequences returned per row, at most ``beams``.

    Returns:
        For each row ``keep`` sequences with the end token, and their ``sequences_scores``: at the
        default length penalty the mean log-probability per token.
    """
    config = copy.copy(config)
    config.update(
        num_beams=beams,
        num_return_sequences=keep,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    # not the model's own generate, which is the loop over windows
    output = GenerationMixin.generate(
        model,
        decoder_input_ids=prompt,
        decoder_attention_mask=torch.ones_like(prompt),
        logits_processor=LogitsProcessorList(rules),
        generation_config=config,
        **inputs,
    )
    ends = token_ids(config.eos_token_id)
    tokens = [up_to_end(row, ends) for row in output.sequences[:, prompt.shape[1] :].tolist()]
    ranked = list(zip(tokens, output.sequences_scores.tolist(), strict=True))
    return [ranked[row : row + keep] for row in range(0, len(ranked), keep)]
