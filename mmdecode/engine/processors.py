"""Logits processors at all nodes of a proposal at once.

A processor of transformers is given one prefix a row. Here each score row has a prefix of its own:
the committed ids, padding included as in transformers, then the tokens on the node's path. For each
known exact type a function turns the processor into one that gives every score row what the stock
one gives for that row's prefix. None needs the host, but for those in `ON_HOST`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as lp

from mmdecode.engine import host, nucleus
from mmdecode.engine.nodes import Nodes

Vectorised = Callable[[Tensor, Nodes], Tensor]
NodeProcessors = Mapping[type, Callable[..., Vectorised]]
"""Exact type of a processor to a function that turns one into a `Vectorised`."""

_PREFIX_FREE = {
    getattr(lp, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "TopHLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
    )
}


def _flat(processor: lp.LogitsProcessor) -> Vectorised:
    def run(scores: Tensor, nodes: Nodes) -> Tensor:
        return _warped(processor, scores.flatten(0, 1)).view_as(scores)

    return run


def _warped(processor: lp.LogitsProcessor, scores: Tensor) -> Tensor:
    """A processor that does not read ids, on scores ``(R, V)``."""
    quick = _WITHOUT_SORTING.get(type(processor))
    if quick is not None and scores.shape[-1] >= LARGE and host.may_read(scores.device):
        return quick(processor, scores)
    ids = torch.empty(len(scores), 0, dtype=torch.long, device=scores.device)
    return processor(ids, scores)


LARGE = 1024
"""Vocabularies from which on sorting costs more than what replaces it."""
_WITHOUT_SORTING: Mapping[type, Callable[..., Tensor]] = {
    lp.TopPLogitsWarper: nucleus.top_p,
    lp.TypicalLogitsWarper: nucleus.typical,
}


class _Mask:
    """A set of token ids as a mask over the vocabulary, cached for one device and size."""

    def __init__(self, ids: Tensor) -> None:
        self._ids, self._mask = ids, torch.empty(0, dtype=torch.bool)

    def like(self, scores: Tensor) -> Tensor:
        """``(V,)`` bool."""
        if len(self._mask) != scores.shape[-1] or self._mask.device != scores.device:
            vocab = torch.arange(scores.shape[-1], device=scores.device)
            self._mask = torch.isin(vocab, self._ids.to(scores.device))
        return self._mask


def _suppress(processor: lp.SuppressTokensLogitsProcessor) -> Vectorised:
    mask = _Mask(processor.suppress_tokens)

    def run(scores: Tensor, nodes: Nodes) -> Tensor:
        return scores.masked_fill(mask.like(scores), -torch.inf)

    return run


def _suppress_at_begin(processor: lp.SuppressTokensAtBeginLogitsProcessor) -> Vectorised:
    mask = _Mask(processor.begin_suppress_tokens)

    def run(scores: Tensor, nodes: Nodes) -> Tensor:
        if nodes.call.rows.cur_len and processor.begin_index <= nodes.call.prompt_length:
            return scores  # every row is past its first token
        at_begin = nodes.prefix_length == processor.begin_index
        return scores.masked_fill(at_begin[..., None] & mask.like(scores), -torch.inf)

    return run


def _min_length(processor: lp.MinLengthLogitsProcessor) -> Vectorised:
    mask = _Mask(processor.eos_token_id)

    def run(scores: Tensor, nodes: Nodes) -> Tensor:
        short = nodes.prefix_length < processor.min_length
        return scores.masked_fill(short[..., None] & mask.like(scores), -torch.inf)

    return run


def _min_new_tokens(processor: lp.MinNewTokensLengthLogitsProcessor) -> Vectorised:
    mask = _Mask(processor.eos_token_id)

    def run(scores: Tensor, nodes: Nodes) -> Tensor:
        short = nodes.prefix_length < processor.prompt_length_to_skip + processor.min_new_tokens
        return scores.masked_fill(short[..., None] & mask.like(scores), -torch.inf)

    return run


def written(scores: Tensor, index: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Changes the values at some tokens, in place; returns ``scores``.

    Args:
        scores: ``(B, N + 1, V)``; a processor that calls this is listed in `OVERWRITING`.
        index: Tokens, ``(B, N + 1, K)``; those outside of ``0 .. V - 1`` are ignored, and a token
            may occur several times.
        change: From values ``(B, N + 1, K)`` to new ones; of each value on its own.
    """
    inside = (index >= 0) & (index < scores.shape[-1])
    # what is ignored writes to token 0 what that token gets anyway
    index = torch.where(inside, index, 0)
    values = scores.gather(-1, index)
    at_zero = ((index == 0) & inside).any(-1, keepdim=True)
    return scores.scatter_(-1, index, torch.where(inside | at_zero, change(values), values))


def repetition_penalty(processor: lp.RepetitionPenaltyLogitsProcessor) -> Vectorised:
    """Penalises the tokens of the prefix, ``prompt_ignore_length`` first ones excepted."""
    left_out = processor.prompt_ignore_length
    tables = _Placed([] if left_out is None else [torch.as_tensor(left_out).view(-1, 1)])

    def run(scores: Tensor, nodes: Nodes) -> Tensor:
        (ids, used), path = nodes.committed(), nodes.path_tokens()
        for begin in tables(ids.device):
            used = used & (nodes.vocabulary(ids.shape[1]) >= begin)
            path = torch.where((nodes.prefix_length[:, 1:] > begin)[:, None], path, -1)
        here = ids.masked_fill(~used, -1)[:, None].expand(-1, scores.shape[1], -1)
        return written(scores, torch.cat([here, path], -1), _scaled(processor))

    return run


def encoder_repetition_penalty(
    processor: lp.EncoderRepetitionPenaltyLogitsProcessor,
) -> Vectorised:
    """Favours the tokens of the encoder's input; the same at every node."""
    tables = _Placed([processor.encoder_input_ids])

    def run(scores: Tensor, nodes: Nodes) -> Tensor:
        ids = _for_rows(tables(scores.device)[0], len(scores))
        return written(scores, ids[:, None].expand(-1, scores.shape[1], -1), _scaled(processor))

    return run


class _Placed:
    """Tensors that are copied to a device once."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._given = list(tensors)
        self._copies: dict[torch.device, list[Tensor]] = {}

    def __call__(self, device: torch.device) -> list[Tensor]:
        """The tensors on a device."""
        if device not in self._copies:
            self._copies[device] = [tensor.to(device) for tensor in self._given]
        return self._copies[device]


def _scaled(processor: lp.LogitsProcessor) -> Callable[[Tensor], Tensor]:
    penalty = processor.penalty
    return lambda values: torch.where(values < 0, values * penalty, values / penalty)


def _for_rows(given: Tensor, rows: int) -> Tensor:
    """Given rows, each for its ``num_return_sequences`` consecutive rows of the batch."""
    return given.repeat_interleave(rows // len(given), dim=0) if rows > len(given) else given


def _banned(scores: Tensor, index: Tensor) -> Tensor:
    return written(scores, index, lambda values: torch.full_like(values, -torch.inf))


def no_repeat_ngram(processor: lp.NoRepeatNGramLogitsProcessor) -> Vectorised:
    """Bans tokens that would complete an n-gram which the prefix already has."""
    size = processor.ngram_size

    def run(scores: Tensor, nodes: Nodes) -> Tensor:
        ends = nodes.suffix(size)
        suffix = ends[..., 1:]  # (B, N + 1, n - 1)
        ids, used = nodes.committed()
        found = []
        if ids.shape[1] >= size:
            windows, last = ids.unfold(1, size, 1), used[:, size - 1 :]
            same = last[:, None].expand(-1, scores.shape[1], -1)
            for at in range(size - 1):
                same = same & (windows[:, None, :, at] == suffix[:, :, None, at])
            found.append(torch.where(same, windows[:, None, :, -1], -1))
        # n-grams that end at a node on the path; those that end at the root are committed
        ends = ends[:, 1:]
        whole = (ends >= 0).all(-1)[:, None] & nodes.on_path()
        same = whole & (ends[:, None, :, :-1] == suffix[:, :, None]).all(-1)
        found.append(torch.where(same, ends[:, None, :, -1], -1))
        return _banned(scores, torch.cat(found, -1))

    return run


def encoder_no_repeat_ngram(processor: lp.EncoderNoRepeatNGramLogitsProcessor) -> Vectorised:
    """Bans tokens that would complete an n-gram of the encoder's input."""
    size = processor.ngram_size
    rows = [
        [(*prefix, token) for prefix, tokens in grams.items() for token in tokens]
        for grams in processor.generated_ngrams
    ]
    most = max(map(len, rows), default=0)
    table = torch.tensor([row + [(-2,) * size] * (most - len(row)) for row in rows]).view(
        len(rows), most, size
    )

    tables = _Placed([table])

    def run(scores: Tensor, nodes: Nodes) -> Tensor:
        grams = _for_rows(tables(scores.device)[0], len(scores))[:, None]  # (B, 1, G, n)
        suffix = nodes.suffix(size - 1)[:, :, None]
        same = (grams[..., :-1] == suffix).all(-1)
        return _banned(scores, torch.where(same, grams[..., -1], -1))

    return run


def sequence_bias(processor: lp.SequenceBiasLogitsProcessor) -> Vectorised:
    """Adds biases to tokens, and to the last tokens of sequences that the prefix has begun."""
    groups: dict[int, list[tuple[Sequence[int], float]]] = {}
    for sequence, bias in processor.sequence_bias.items():
        groups.setdefault(len(sequence), []).append((sequence, bias))
    outside = [t for sequence in processor.sequence_bias for t in sequence]
    largest = max(outside, default=0)

    tables = _Placed(
        tensor
        for _, group in sorted(groups.items())
        for tensor in (
            torch.tensor([sequence for sequence, _ in group]),
            torch.tensor([bias for _, bias in group]),
        )
    )

    def run(scores: Tensor, nodes: Nodes) -> Tensor:
        if largest >= scores.shape[-1]:
            raise ValueError(
                f"sequence_bias names token {largest}; expected ids below {scores.shape[-1]}"
            )
        flat = scores.new_zeros(scores.shape).flatten(0, 1)
        found = tables(scores.device)
        for sequences, biases in zip(found[::2], found[1::2], strict=True):
            same = (nodes.suffix(sequences.shape[1] - 1)[:, :, None] == sequences[:, :-1]).all(-1)
            added = torch.where(same, biases.to(scores.dtype), 0.0).flatten(0, 1)
            flat.index_add_(1, sequences[:, -1], added)
        return scores + flat.view_as(scores)

    return run


def _alone(scores: Tensor, at: Tensor, ids: Tensor) -> Tensor:
    """Scores that allow ``ids`` alone where ``at (B, N + 1)`` is true."""
    only = scores.new_full((scores.shape[-1],), -torch.inf).index_fill_(0, ids, 0.0)
    return torch.where(at[..., None], only, scores)


def forced_bos(processor: lp.ForcedBOSTokenLogitsProcessor) -> Vectorised:
    """Forces a token after a prefix of one token."""
    tables = _Placed([torch.tensor([processor.bos_token_id])])

    def run(scores: Tensor, nodes: Nodes) -> Tensor:
        if nodes.call.prompt_length > 1:
            return scores
        [ids] = tables(scores.device)
        return _alone(scores, nodes.prefix_length == 1, ids)

    return run


def forced_eos(processor: lp.ForcedEOSTokenLogitsProcessor) -> Vectorised:
    """Forces an end token as the last token of the longest text."""
    tables = _Placed([processor.eos_token_id.view(-1)])

    def run(scores: Tensor, nodes: Nodes) -> Tensor:
        [ids] = tables(scores.device)
        return _alone(scores, nodes.prefix_length == processor.max_length - 1, ids)

    return run


def exponential_decay(processor: lp.ExponentialDecayLengthPenalty) -> Vectorised:
    """Raises the end tokens by a factor that grows with the length."""
    tables = _Placed([processor.eos_token_id.view(-1)])

    def run(scores: Tensor, nodes: Nodes) -> Tensor:
        [ids] = tables(scores.device)
        beyond = (nodes.prefix_length - processor.regulation_start)[..., None]
        # in float64, in which Python computes the factor
        factor = torch.pow(float(processor.regulation_factor), beyond.clamp_min(0).double()) - 1
        values = scores[..., ids]
        penalty = (values.abs() * factor.to(scores.dtype)).masked_fill(~values.isfinite(), 0.0)
        raised = torch.where(beyond > 0, values + penalty, values)
        return scores.index_copy(-1, ids, raised)

    return run


def watermark(processor: lp.WatermarkLogitsProcessor) -> Vectorised:
    """Adds a bias to tokens chosen by a generator that the prefix's last tokens seed.

    The generator is seeded on the host, node by node.
    """
    width = processor.context_width

    def run(scores: Tensor, nodes: Nodes) -> Tensor:
        ends = nodes.suffix(width)
        marked = processor(ends.clamp_min(0).flatten(0, 1), scores.flatten(0, 1)).view_as(scores)
        return torch.where((nodes.prefix_length >= width)[..., None], marked, scores)

    return run


ON_HOST = frozenset({lp.WatermarkLogitsProcessor, lp.TopHLogitsWarper})
"""Types that no captured round can run."""

OVERWRITING = frozenset(
    {
        lp.RepetitionPenaltyLogitsProcessor,
        lp.EncoderRepetitionPenaltyLogitsProcessor,
        lp.NoRepeatNGramLogitsProcessor,
        lp.EncoderNoRepeatNGramLogitsProcessor,
    }
)
"""Types whose vectorised form changes the scores in place."""

KNOWN: NodeProcessors = {
    **dict.fromkeys(_PREFIX_FREE, _flat),
    lp.SuppressTokensLogitsProcessor: _suppress,
    lp.SuppressTokensAtBeginLogitsProcessor: _suppress_at_begin,
    lp.MinLengthLogitsProcessor: _min_length,
    lp.MinNewTokensLengthLogitsProcessor: _min_new_tokens,
    lp.RepetitionPenaltyLogitsProcessor: repetition_penalty,
    lp.EncoderRepetitionPenaltyLogitsProcessor: encoder_repetition_penalty,
    lp.NoRepeatNGramLogitsProcessor: no_repeat_ngram,
    lp.EncoderNoRepeatNGramLogitsProcessor: encoder_no_repeat_ngram,
    lp.SequenceBiasLogitsProcessor: sequence_bias,
    lp.NoBadWordsLogitsProcessor: sequence_bias,
    lp.ForcedBOSTokenLogitsProcessor: forced_bos,
    lp.ForcedEOSTokenLogitsProcessor: forced_eos,
    lp.ExponentialDecayLengthPenalty: exponential_decay,
    lp.WatermarkLogitsProcessor: watermark,
}


def _vectorised(processor: lp.LogitsProcessor, table: NodeProcessors) -> Vectorised | None:
    """The processor as a function of all nodes; ``None``: it must run node by node."""
    known = table.get(type(processor))
    return known(processor) if known else getattr(processor, "at_nodes", None)


def prefix_free(processors: LogitsProcessorList) -> Callable[[Tensor], Tensor] | None:
    """Combines the processors that do not depend on previous tokens, such as temperature.

    Custom processors declare this by a class attribute ``prefix_free``.

    Returns:
        A function of logits ``(..., V)``; ``None`` if there is no such processor.
    """
    found = [
        one
        for one in processors
        if type(one) in _PREFIX_FREE or getattr(type(one), "prefix_free", False)
    ]
    if not found:
        return None

    def warp(logits: Tensor) -> Tensor:
        flat = logits.flatten(0, -2)
        for processor in found:
            flat = _warped(processor, flat)
        return flat.view_as(logits)

    return warp


class Processors:
    """The caller's logits processors, with their vectorised forms.

    Args:
        processors: The processors, in order.
        known: Further types that can be evaluated at all nodes together, from the adapter.

    Attributes:
        vectorised: Whether every processor can be evaluated at all nodes together.
        on_host: Whether one of them needs the host, so that no round is captured whole.
        paths: How often they ran at all nodes, or on the host; see `mmdecode.engine.stats.Stats`.
    """

    uncaptured: ClassVar = {"paths"}

    def __init__(
        self, processors: LogitsProcessorList, known: NodeProcessors = MappingProxyType({})
    ) -> None:
        self.processors = processors
        table = {**KNOWN, **known}
        runs = [_vectorised(processor, table) for processor in processors]
        self._runs = [run for run in runs if run is not None]
        self._overwrites = [type(processor) in OVERWRITING for processor in processors]
        self.vectorised = len(self._runs) == len(runs)
        self.paths: Counter[str] = Counter()
        self.on_host = not self.vectorised or any(type(p) in ON_HOST for p in processors)

    def run_all(self, scores: Tensor, nodes: Nodes) -> Tensor:
        """Processes the scores of root and nodes at once; only if `vectorised`."""
        if self._runs:
            self.paths["processors at all nodes"] += 1
        given = scores.data_ptr()  # others read them too, and a processor may change nothing
        for run, overwrites in zip(self._runs, self._overwrites, strict=True):
            copied = overwrites and scores.data_ptr() == given
            scores = run(scores.clone() if copied else scores, nodes)
        return scores
