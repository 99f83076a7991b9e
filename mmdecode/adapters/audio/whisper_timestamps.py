"""Whisper's rules for timestamps, applied to all drafted tokens of a proposal at once."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.generation import logits_process as lp

from mmdecode._compat import detects_timestamps_from_logprob
from mmdecode.engine.nodes import Nodes
from mmdecode.engine.processors import NodeProcessors, Vectorised


def timestamps(processor: lp.WhisperTimeStampLogitsProcessor) -> Vectorised:
    """Returns a vectorised version of transformers' processor for Whisper's timestamps.

    Timestamps come in pairs, never decrease, and start the transcript. Text is excluded where all
    timestamps together are more likely than the most likely text token. The comparison uses
    unnormalised scores, since the normaliser of the softmax cancels.
    """
    first, begin = processor.timestamp_begin, processor.begin_index
    eos = processor.eos_token_id
    eos = min(eos) if isinstance(eos, (list, tuple)) else int(eos)
    latest = processor.max_initial_timestamp_index

    def run(scores: Tensor, nodes: Nodes) -> Tensor:
        size = scores.shape[-1]
        tokens, since_begin = nodes.tokens, nodes.prefix_length - begin
        last_is = (tokens >= first) & (since_begin >= 1)
        previous_is = (nodes.previous() >= first) | (since_begin < 2)
        last = nodes.last_on_path(last_is, nodes.last_committed(first, begin))
        opening = last_is & ~previous_is  # text has just been closed by a timestamp
        at_begin = since_begin == 0
        low_text = torch.where(at_begin, first, opening * eos)
        low_stamp = torch.where(last >= first, last + (~opening).long(), first)
        low_stamp = torch.where(last_is & previous_is, size, low_stamp)
        vocab = nodes.vocabulary(size)
        text, stamps = scores[..., :first], scores[..., first:]
        text = text.masked_fill(vocab[:first] < low_text[..., None], -torch.inf)
        text[..., processor.no_timestamps_token_id] = -torch.inf
        banned = vocab[first:] < low_stamp[..., None]
        if latest is not None:
            banned |= at_begin[..., None] & (vocab[first:] > first + latest)
        stamps = stamps.masked_fill(banned, -torch.inf)
        if detects_timestamps_from_logprob(processor):
            # softmax is several times as fast as logsumexp
            together = stamps.amax(-1) - stamps.softmax(-1).amax(-1).log()
            only_stamps = together > text.amax(-1)
            text = text.masked_fill(only_stamps[..., None], -torch.inf)
        return torch.cat([text, stamps], -1)

    return run


NODE_PROCESSORS: NodeProcessors = {lp.WhisperTimeStampLogitsProcessor: timestamps}
"""Vectorised logits processors that Whisper's adapter adds to those of the engine."""
