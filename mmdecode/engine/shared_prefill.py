"""Reads prompts whose rows begin alike: each prefix once, then the rest of all rows in one pass.

A prefix that the prompt cache does not hold is read into the first row that begins with it, and
copied to the others. The rests of all rows, of different lengths, are read like nodes: each row
writes after its own prefix, and what a shorter row writes beyond its end is overwritten later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from mmdecode.engine import prefill
from mmdecode.engine.adapter import Adapter, BranchSpec, Prompt
from mmdecode.engine.cache import Piece, Reserve, bucket
from mmdecode.engine.encoding import grouped
from mmdecode.engine.masks import chain
from mmdecode.engine.past import prefixes
from mmdecode.engine.prefill import Cost, Pass, Read, Reader, States, put
from mmdecode.engine.prompt_cache import Found, ModelState, Prefix, PromptCache, RowPrompt, rows_of

if TYPE_CHECKING:
    from mmdecode.engine.branches import ModelRunner

WORTH = 0.75
"""Share of a prompt's tokens that may at most be read for its rows to share prefixes."""


def reader_of(
    adapter: Adapter,
    prompt: Prompt,
    lengths: Sequence[int],
    cache: PromptCache | None,
    layers: frozenset[int | str],
    past: DynamicCache | None,
    columns: int,
) -> SharedReader | None:
    """The reader of a prompt whose rows may share prefixes; ``None``: no row has one.

    Args:
        adapter: Adapter of the model.
        prompt: The prompt.
        lengths: Its tokens per row.
        cache: Prefixes that were read before; ``None``: none.
        layers: Layers whose hidden states of the whole prompt are needed.
        past: Cache of transformers that holds the beginning of the first rows; ``None``: none.
        columns: Columns of the caller's prompt.
    """
    cache = PromptCache(0) if cache is None else cache
    earlier = None if past is None or layers else prefixes(past, prompt.ids, lengths, columns)
    state = ModelState(adapter.model)
    if not (prompt.inputs or cache.whole or earlier) and not cache.holds(state):
        return None
    rows = rows_of(adapter, prompt)
    if rows is None:
        return None
    width = prompt.ids.shape[1]
    found = [cache.find(state, row, layers) for row in rows]
    given = earlier or []
    if any(one.tokens < row.images for one, row in zip(given, rows, strict=False)):
        given = []  # images come after it
    found[: len(given)] = given
    counts = [
        row.images if one is None else one.tokens for row, one in zip(rows, found, strict=True)
    ]
    if not any(counts) and not cache.whole:
        return None
    first: dict[tuple[bytes, bytes], int] = {}
    source = list(range(len(rows)))
    for index, row in enumerate(rows):
        if found[index] is None and row.images:
            begin = row.ids[: row.images].numpy().tobytes()
            source[index] = first.setdefault((row.content, begin), index)
    passes: list[Pass] = []
    reads = [*first.values()]
    for group in grouped([*zip(lengths, counts, strict=True)], reads):
        left, count = width - lengths[group[0]], counts[group[0]]
        piece = Piece(torch.tensor(group, device=prompt.ids.device), left, 0, count)
        own = adapter.prefix(prompt, group, piece.columns)
        if own is None:
            return None
        passes.append(Pass(own, piece, False, "prefill of prefixes"))
    longest = max(length - count for length, count in zip(lengths, counts, strict=True))
    rest = prompt.narrowed(None, slice(width - longest, width))
    passes.append(Pass(rest, None, True, "prefill continued"))
    where = (rows, found, counts, source, reads)
    return SharedReader(prompt, lengths, passes, cache, state, *where, given=bool(given))


@dataclass
class SharedReader(Reader):
    """Reads the prefixes that are missing, then the rest of all rows.

    Attributes:
        cache: Prefixes that were read before, to which new ones are added.
        state: State of the model.
        rows: Prompt of each row.
        found: Prefix that each row was found to begin with.
        counts: Tokens that each row takes from a prefix, found or read now.
        source: Row that reads the prefix of each row.
        reads: Rows that read a prefix.
        given: Whether the caller gave prefixes, which are used whatever they save.
    """

    cache: PromptCache
    state: ModelState
    rows: Sequence[RowPrompt]
    found: Sequence[Found | None]
    counts: Sequence[int]
    source: Sequence[int]
    reads: Sequence[int]
    given: bool = False

    @property
    def starts(self) -> list[int]:
        """Slot after each row's prefix."""
        width = self.prompt.ids.shape[1]
        return [width - n + count for n, count in zip(self.lengths, self.counts, strict=True)]

    def pays(self, reserved: Reserve | None) -> bool:
        """Whether few enough tokens are read, in slots that there are."""
        rest = self.passes[-1].prompt.ids.shape[1]
        read = sum(self.counts[row] for row in self.reads) + rest * len(self.rows)
        fits = reserved is None or max(self.starts) + rest <= reserved.slots
        saves = any(self.counts) and read <= WORTH * sum(self.lengths)
        return fits and (self.given or saves)

    def keeping(self, passes: Sequence[Pass]) -> KeepingReader:
        """The reader that reads rows whole, by these passes, and keeps their prefixes."""
        return KeepingReader(self.prompt, self.lengths, passes, self)

    def read(self, runner: ModelRunner, specs: Sequence[BranchSpec]) -> Read:
        """Runs the passes, and copies prefixes in between."""
        shape, keep = (len(self.rows), self.prompt.ids.shape[1]), runner.needs.prompt_hidden
        last: States = {}
        whole: States = {}
        for one in self.passes[:-1]:
            assert one.piece is not None
            states, _ = prefill.run(runner, one, specs, shape[1])
            if keep:
                put(whole, states, one.piece.rows, one.piece.columns, shape)
        prefixes = self.prefixes(runner, whole)
        runner.cache.open(shape[1] + 1)  # room for prefixes that are copied into an empty cache
        for row, found in enumerate(prefixes):
            if found is None or row in self.reads:
                continue
            prefix, count, left = found.prefix, found.tokens, shape[1] - self.lengths[row]
            runner.cache.put(row, left, prefix.slots, count)
            if keep:
                states = {layer: own[None, :count] for layer, own in prefix.states.items()}
                index = torch.tensor([row], device=self.prompt.ids.device)
                put(whole, states, index, slice(left, left + count), shape)
        self._read_rest(runner, specs, last, whole)
        self.keep(runner, whole)
        read = sum(self.lengths) - sum(self.counts) + sum(self.counts[row] for row in self.reads)
        runner.prompt_tokens.update(read=read, reused=sum(self.lengths) - read)
        return Read(last, whole, {}, prefixes)

    def prefixes(self, runner: ModelRunner, whole: States) -> list[Found | None]:
        """The prefix of each row; those that were read now are added to the cache."""
        made: dict[int, Prefix] = {}
        for row in self.reads:
            own = self.rows[row]
            left = self.prompt.ids.shape[1] - self.lengths[row]
            columns = slice(left, left + own.images)
            states = {layer: value[row, columns] for layer, value in whole.items()}
            prefix = Prefix(
                own._replace(ids=own.ids[: own.images]), runner.cache.slots(row, columns), states
            )
            made[row] = self.cache.add(self.state, prefix)
        return [
            Found(made[source], count) if found is None and source in made else found
            for found, source, count in zip(self.found, self.source, self.counts, strict=True)
        ]

    def keep(self, runner: ModelRunner, whole: States) -> None:
        """Adds whole prompts to the cache, if it keeps them."""
        if not self.cache.whole:
            return
        for row, own in enumerate(self.rows):
            columns = slice(self.prompt.ids.shape[1] - self.lengths[row], None)
            slots = runner.cache.slots(row, slice(columns.start, self.prompt.ids.shape[1]))
            states = {layer: value[row, columns] for layer, value in whole.items()}
            self.cache.add(self.state, Prefix(own, slots, states))

    def _read_rest(
        self, runner: ModelRunner, specs: Sequence[BranchSpec], last: States, whole: States
    ) -> None:
        """Reads what comes after the prefixes, in as many chunks as memory asks for."""
        ids, keep = self.prompt.ids, runner.needs.prompt_hidden
        (rows, width), device = ids.shape, ids.device
        starts, longest = self.starts, self.passes[-1].prompt.ids.shape[1]
        begin = torch.tensor(starts, device=device)
        runner.cache.set_start(begin)
        size = Cost.of(runner.adapter).part(rows, longest, max(starts) + longest)
        for first in range(0, longest, size):
            count = min(size, longest - first)
            columns = begin[:, None] + torch.arange(first, first + count, device=device)
            inside = columns < width
            tokens = ids.gather(1, columns.clamp_max(width - 1)).masked_fill(~inside, -1)
            runner.paths["prefill continued"] += 1
            states, _ = runner.run(
                tokens,
                *chain(count, device),
                visible=bucket(max(starts) + first + count),
                offset=first,
                specs=specs,
            )
            if keep:
                row, column = inside.nonzero(as_tuple=True)
                _scatter(whole, states, (row, column), columns[row, column], (rows, width))
            row, column = (columns == width - 1).nonzero(as_tuple=True)
            _scatter(last, states, (row, column), torch.zeros_like(row), (rows, 1))


@dataclass
class KeepingReader(Reader):
    """Reads a prompt as usual, and keeps the prefixes of its rows.

    Attributes:
        shared: The reader that knows the prefixes.
    """

    shared: SharedReader

    def read(self, runner: ModelRunner, specs: Sequence[BranchSpec]) -> Read:
        """Runs the passes, and adds prefixes to the cache."""
        read, shared = super().read(runner, specs), self.shared
        found = shared.prefixes(runner, read.whole)
        shared.keep(runner, read.whole)
        return read._replace(prefixes=found)


def _scatter(
    into: States,
    states: States,
    source: tuple[Tensor, Tensor],
    columns: Tensor,
    shape: tuple[int, int],
) -> None:
    """Writes states at rows and columns ``source`` to ``columns`` of the same rows."""
    for key, value in states.items():
        if key not in into:
            into[key] = value.new_zeros(*shape, value.shape[2])
        into[key][source[0], columns] = value[source]
