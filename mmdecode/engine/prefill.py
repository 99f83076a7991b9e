"""How a prompt is read: in one pass, row by row where rows are padded, or in chunks.

A prompt without padding takes one pass without a mask. Rows of a padded prompt are read without
their padding, rows of one length together, each into its own slots; the cache, and the states that
parts ask for, keep the padded layout. A pass that would take too much memory is split into chunks,
each of which attends to those before it. Short padded prompts, prompts that are not causal, and
passes in which attention is read or edited take the engine's mask, or the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mmdecode._compat import attention_implementation, text_config
from mmdecode.engine.adapter import Adapter, BranchSpec, Prompt
from mmdecode.engine.cache import Piece, bucket
from mmdecode.engine.encoding import grouped
from mmdecode.engine.masks import chain
from mmdecode.runs.memory import cache_bytes, pass_bytes

if TYPE_CHECKING:
    from mmdecode.engine.branches import ModelRunner
    from mmdecode.engine.prompt_cache import Found

LONG = 512
"""Tokens of a prompt from which on it may take several passes. Below, a pass for each length costs
more than mask and padding: on a CPU, 3 and 8 rows took 1.1 to 2.1 times as long at 128 tokens, .8
to 1.4 times at 256, .8 to 1.0 at 512 and .5 to .8 at 1024."""
MASKED = 2**26
"""Bytes that one pass with a mask may take; more are split into chunks, which is faster too, since
a chunk has no scores for what comes after it."""
ONE_PASS = 2**32
"""Bytes that one pass without a mask may take. Chunks need a mask, and attention takes up to twice
as long with one."""
CHUNK = 2**26
"""Bytes that a chunk may take."""
LEAST = 64
"""Tokens of the smallest chunk."""

States = dict[int | str, Tensor]


class Pass(NamedTuple):
    """One pass of a prompt.

    Attributes:
        prompt: The tokens that it reads, with their inputs.
        piece: Where these are in the whole prompt; ``None``: all of it, with the engine's mask
            over the padding.
        masked: Whether the model is given the engine's mask.
        path: Its key in `mmdecode.engine.stats.Stats.paths`.
    """

    prompt: Prompt
    piece: Piece | None
    masked: bool
    path: str


@dataclass(frozen=True)
class Cost:
    """Estimates of memory for the passes of one model.

    Attributes:
        config: Configuration of the text model; ``None``: nothing is known.
        itemsize: Bytes of one number of the model.
        windows: Attention windows of the layers.
    """

    config: Any
    itemsize: int
    windows: Sequence[int | None]

    @classmethod
    def of(cls, adapter: Adapter) -> Cost:
        """Estimates for the adapter's model."""
        config = text_config(adapter.model)
        itemsize = 4 if config is None else adapter.model.dtype.itemsize
        return cls(config, itemsize, list(adapter.windows.values()))

    def needs_mask(self, tokens: int) -> bool:
        """Whether attention to ``tokens`` takes a mask, though none of them is padding."""
        explicit = attention_implementation(self.config) != "sdpa"
        return explicit or any(window is not None and window <= tokens for window in self.windows)

    def seen(self, first: int) -> int:
        """The first column that a chunk from ``first`` on can attend to."""
        reach = [first + 1 if window is None else window for window in self.windows]
        return max(first + 1 - max(reach), 0)

    def of_pass(self, rows: int, tokens: int, seen: int, masked: bool) -> int:
        """Memory of a pass; see `mmdecode.runs.memory.pass_bytes`."""
        if self.config is None:
            return 0
        eager = attention_implementation(self.config) == "eager"
        shape = (rows, tokens, seen, self.itemsize)
        return pass_bytes(self.config, *shape, masked=masked, eager=eager)

    def chunk(self, rows: int, tokens: int) -> int:
        """Tokens to read at once, of so many without padding: all, or as many as fit `CHUNK`."""
        if self.config is None:
            return tokens
        masked = self.needs_mask(tokens)
        if self.of_pass(rows, tokens, tokens, masked) <= (MASKED if masked else ONE_PASS):
            return tokens
        return _halved(
            tokens,
            lambda n: self.of_pass(rows, n, tokens - self.seen(tokens - n), True) <= CHUNK,
        )

    def part(self, rows: int, tokens: int, seen: int) -> int:
        """Tokens to read at once, of so many after others, with a mask over ``seen`` slots."""
        return _halved(tokens, lambda n: self.of_pass(rows, n, seen, True) <= MASKED)

    def of_passes(self, prompt: Prompt, passes: Sequence[Pass]) -> int:
        """Memory of a prompt's cache and of the largest of its passes."""
        if self.config is None:
            return 0
        (rows, width), needed = prompt.ids.shape, []
        for one in passes:
            part, tokens = one.prompt.ids.shape
            seen = bucket(width) if one.piece is None else one.piece.last - one.piece.seen
            masked = one.masked or one.path == "prefill masked" or self.needs_mask(tokens)
            needed.append(self.of_pass(part, tokens, seen, masked))
        return cache_bytes(self.config, rows, bucket(width), self.itemsize) + max(needed)


def _halved(tokens: int, fits: Callable[[int], bool]) -> int:
    """``tokens``, halved until they fit, but not below `LEAST`."""
    while tokens > LEAST and not fits(tokens):
        tokens = max(-(-tokens // 2), LEAST)
    return tokens


def planned(
    adapter: Adapter, prompt: Prompt, lengths: Sequence[int], *, by_rows: bool, chunks: bool
) -> list[Pass]:
    """The passes that read a prompt.

    Args:
        adapter: Adapter of the model.
        prompt: The prompt.
        lengths: Its tokens per row.
        by_rows: Whether rows may be read apart.
        chunks: Whether tokens of a row may be read apart.
    """
    rows, width = prompt.ids.shape
    cost, whole = Cost.of(adapter), Piece(None, 0, 0, width)
    padded, found = min(lengths) < width, None
    if width >= LONG and padded and by_rows:
        found = _groups(adapter, prompt, lengths, cost, chunks)
    elif width >= LONG and not padded and chunks:
        found = _chunked(adapter, prompt, whole, rows, cost)
    if found is not None:
        return found
    if not adapter.masks_itself(prompt):
        return [Pass(prompt, None, True, "prefill masked")]
    path = "prefill masked" if padded or cost.needs_mask(width) else "prefill causal"
    return [Pass(prompt, whole, False, path)]


def _groups(
    adapter: Adapter, prompt: Prompt, lengths: Sequence[int], cost: Cost, chunks: bool
) -> list[Pass] | None:
    """A pass, or several chunks, for the rows of each length; ``None``: rows stay together."""
    passes: list[Pass] = []
    width = prompt.ids.shape[1]
    if not min(lengths):
        return None  # a row of padding alone
    for group in grouped(lengths):
        tokens = lengths[group[0]]
        rows = None
        if len(group) < len(lengths):
            rows = torch.tensor(group, device=prompt.ids.device)
        piece = Piece(rows, width - tokens, 0, tokens)
        found = _chunked(adapter, prompt, piece, len(group), cost) if chunks else None
        if found is None:
            own = adapter.piece(prompt, rows, piece.columns)
            if own is None:
                return None
            found = [Pass(own, piece, False, "prefill by rows")]
        passes += found
    return passes


def _chunked(
    adapter: Adapter, prompt: Prompt, piece: Piece, rows: int, cost: Cost
) -> list[Pass] | None:
    """A piece in chunks; ``None``: it need not, or cannot, be split."""
    count = cost.chunk(rows, piece.last)
    if count >= piece.last:
        return None
    masked, passes = cost.needs_mask(piece.last), []
    for first in range(0, piece.last, count):
        last = min(first + count, piece.last)
        part = piece._replace(first=first, last=last, seen=cost.seen(first))
        own = adapter.piece(prompt, part.rows, part.columns)
        if own is None:
            return None
        passes.append(Pass(own, part, masked or first > 0, "prefill in chunks"))
    return passes


class Read(NamedTuple):
    """Result of reading a prompt.

    Attributes:
        last: Hidden states of the last token by layer, ``(R, 1, H)``.
        whole: Hidden states of all tokens, ``(R, P, H)``, where parts need them.
        weights: Attention weights by layer, ``(R, heads, 1, P)``, where parts read them.
        prefixes: Prefix that each row shares with others; see `mmdecode.engine.prompt_cache`.
    """

    last: States
    whole: States
    weights: Mapping[int, Tensor]
    prefixes: Sequence[Found | None] = ()


@dataclass
class Reader:
    """Reads a prompt.

    Attributes:
        prompt: The prompt.
        lengths: Its tokens per row, without padding.
        passes: The passes that read it.
    """

    prompt: Prompt
    lengths: Sequence[int]
    passes: Sequence[Pass]

    def read(self, runner: ModelRunner, specs: Sequence[BranchSpec]) -> Read:
        """Runs the passes, into the empty cache of a runner.

        Args:
            runner: Runner of the model.
            specs: Branches of the prompt's rows.
        """
        runner.prompt_tokens["read"] += sum(self.lengths)
        (rows, width), keep = self.prompt.ids.shape, runner.needs.prompt_hidden
        last, whole = dict[int | str, Tensor](), dict[int | str, Tensor]()
        for one in self.passes:
            piece = one.piece or Piece(None, 0, 0, width)
            states, weights = run(runner, one, specs, width)
            if piece.columns.stop == width:
                # copies, so that the states of the whole prompt are freed
                ends = {key: value[:, -1:] for key, value in states.items()}
                put(last, ends, piece.rows, slice(0, 1), (rows, 1))
            if keep and len(self.passes) == 1:
                whole = states
            elif keep:
                put(whole, states, piece.rows, piece.columns, (rows, width))
        return Read(last, whole, {layer: value[..., :width] for layer, value in weights.items()})


def run(
    runner: ModelRunner, one: Pass, specs: Sequence[BranchSpec], width: int
) -> tuple[States, Mapping[int, Tensor]]:
    """Runs one pass over a prompt of ``width`` columns; see `ModelRunner.run`."""
    runner.paths[one.path] += 1
    ids, piece = one.prompt.ids, one.piece
    block = (chain(ids.shape[1], ids.device)[0], one.prompt.prompt_attention)
    visible = bucket(width) if piece is None else piece.last - piece.seen
    where: Any = {"specs": specs, "piece": piece, "masked": one.masked}
    return runner.run(ids, *block, visible=visible, prompt=one.prompt, **where)


def put(
    into: States, states: States, rows: Tensor | None, columns: slice, shape: tuple[int, int]
) -> None:
    """Writes states of a pass into those of ``shape`` rows and columns; others stay 0."""
    for key, value in states.items():
        if key not in into:
            into[key] = value.new_zeros(*shape, value.shape[2])
        into[key][slice(None) if rows is None else rows, columns] = value
