"""A key-value cache whose rows grow independently.

transformers' caches crop the same suffix from every row; here each row has its own write position
(``start``). A pass writes the keys and values of its tokens from ``start`` on, and the next pass
overwrites those that were not committed: ``commit`` moves accepted tree nodes next to each other
and ``start`` behind them. Keys are stored after rotary embedding, so a key's slot need not be its
position.

Storage grows in steps (`bucket`); attention covers the visible slots, not the whole storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

BUCKET = 32


def bucket(length: int) -> int:
    """``length`` rounded up, so that few shapes occur: to 32, for long ones to larger steps."""
    step = BUCKET
    while step * 16 < length:
        step *= 2
    return -(-length // step) * step


class Reserve(NamedTuple):
    """Storage that a cache allocates at once, and that keeps its address, as CUDA graphs need.

    Attributes:
        slots: Number of slots.
        allocate: Function of keys or values of a pass and of a shape; returns the storage.
    """

    slots: int
    allocate: Callable[[Tensor, tuple[int, ...]], Tensor] = Tensor.new_zeros


class Slots(NamedTuple):
    """Keys and values of some slots of one row and layer, each ``(H, n, D)``."""

    keys: Tensor
    values: Tensor

    def clone(self) -> Slots:
        """Copies of both."""
        return Slots(self.keys.clone(), self.values.clone())


class Piece(NamedTuple):
    """Tokens of a prompt that one pass reads: some of its rows, and some of their columns.

    Columns are counted from the first token after the padding, of which all rows have as much.

    Attributes:
        rows: Rows of the prompt, ``(G,)``; ``None``: all.
        left: Columns of padding.
        first: First column to read.
        last: Column after the last one to read.
        seen: First column that the tokens attend to; those before it are out of every window.
    """

    rows: Tensor | None
    left: int
    first: int
    last: int
    seen: int = 0

    def of(self, values: Tensor) -> Tensor:
        """Values of its rows, from ``values (R, ...)``."""
        return values if self.rows is None else values[self.rows]

    @property
    def columns(self) -> slice:
        """Columns to read, counted with the padding."""
        return slice(self.left + self.first, self.left + self.last)


class _Rows:
    """Write positions of all layers of one cache, and the slots that the current pass covers."""

    uncaptured: ClassVar = {  # set for each pass
        *("reserved", "offset", "slots", "visible", "room", "piece", "common", "length")
    }

    def __init__(self, batch: int, device: torch.device, reserved: Reserve | None) -> None:
        self.reserved = reserved
        self.start = torch.zeros(batch, dtype=torch.long, device=device)
        self.offset = 0  # a pass may write ahead of start
        self.slots: Tensor | None = None  # slots that the pass writes, the same for all layers
        self.visible = 0  # slots that attention covers in this pass
        self.room = 0  # slots that the storage must hold
        self.piece: Piece | None = None  # tokens of the prompt that the pass reads and writes
        self.common: int | None = None  # slot at which all rows write, if it is the same one
        self.length = 0  # tokens before the pass, if it has no mask

    def write_to(self, count: int) -> Tensor:
        """Slots in which a pass of ``count`` tokens writes, ``(B, 1, count, 1)``."""
        if self.slots is None:
            order = torch.arange(self.offset, self.offset + count, device=self.start.device)
            self.slots = (self.start[:, None] + order)[:, None, :, None]
        return self.slots


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer, ``(B, H, slots, D)``."""

    is_sliding = False
    is_croppable = True
    keys: Tensor
    values: Tensor

    def __init__(self, rows: _Rows) -> None:
        super().__init__()
        self.rows = rows

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the slots that the first pass covers; later passes grow the storage."""
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, reserved = len(self.rows.start), self.rows.reserved or Reserve(0)
        for name, states in (("keys", key_states), ("values", value_states)):
            slots = bucket(max(self.rows.room, reserved.slots))
            shape = (batch, states.shape[1], slots, states.shape[-1])
            setattr(self, name, reserved.allocate(states, shape))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes keys and values from each row's ``start`` on; returns those of visible slots."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows = self.rows
        if rows.room > self.keys.shape[2]:
            grown = bucket(rows.room) - self.keys.shape[2]
            assert rows.reserved is None, "a captured round would write to the old storage"
            self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, grown))
            self.values = torch.nn.functional.pad(self.values, (0, 0, 0, grown))
        if rows.piece is not None:
            return self._of_piece(rows.piece, key_states, value_states)
        if rows.common is not None:
            written = rows.common, key_states.shape[2]
            self.keys.narrow(2, *written).copy_(key_states)
            self.values.narrow(2, *written).copy_(value_states)
        else:
            index = rows.write_to(key_states.shape[2]).to(key_states.device)
            self.keys.scatter_(2, index.expand_as(key_states), key_states)
            self.values.scatter_(2, index.expand_as(value_states), value_states)
        if rows.visible == self.keys.shape[2]:
            return self.keys, self.values
        seen = rows.visible
        return self.keys.narrow(2, 0, seen), self.values.narrow(2, 0, seen)

    def _of_piece(self, piece: Piece, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes a piece of the prompt; returns what its tokens attend to, without the padding."""
        rows = slice(None) if piece.rows is None else piece.rows
        self.keys[rows, :, piece.columns] = keys
        self.values[rows, :, piece.columns] = values
        if not piece.first:
            return keys, values
        seen = slice(piece.left + piece.seen, piece.left + piece.last)
        return self.keys[rows, :, seen], self.values[rows, :, seen]

    @property
    def is_compileable(self) -> bool:
        """Whether transformers has to mask one token too: not if it may attend to all slots."""
        return self.rows.piece is None and self.rows.common is None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Selects the rows ``beam_idx``, whatever `get_seq_length` returns."""
        if self.is_initialized:
            self.keys, self.values = self.keys[beam_idx], self.values[beam_idx]

    def get_seq_length(self) -> int:
        """Tokens before a pass without a mask; else zero, since callers pass mask and positions.

        The true length would need a device synchronisation.
        """
        return self.rows.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of visible slots, and the index of the first: 0."""
        return self.rows.visible, 0

    def get_max_length(self) -> int:
        """Number of slots in use."""
        return self.rows.visible

    get_max_cache_shape = get_max_length


class RaggedCache(Cache):
    """One `RaggedLayer` per layer, with shared write positions.

    Args:
        layers: Number of layers.
        batch: Number of rows.
        device: Device of the write positions.
        reserved: Storage to allocate at once; ``None``: storage grows.
    """

    def __init__(
        self, layers: int, batch: int, device: torch.device, reserved: Reserve | None = None
    ) -> None:
        self.rows = _Rows(batch, device, reserved)
        super().__init__(layers=[RaggedLayer(self.rows) for _ in range(layers)])

    @classmethod
    def join(cls, caches: Sequence[RaggedCache], reserved: Reserve | None = None) -> RaggedCache:
        """A cache with the rows of several caches, in order; rows keep their write positions."""
        first = caches[0]
        batch = sum(len(cache.start) for cache in caches)
        joined = cls(len(first.layers), batch, first.start.device, reserved)
        joined.set_start(torch.cat([cache.start for cache in caches]))
        joined.rows.visible = joined.rows.room = max(cache.rows.room for cache in caches)
        for index, layer in enumerate(joined.layers):
            parts = [cache.layers[index] for cache in caches]
            if not parts[0].is_initialized:
                continue  # a view of the model skips this layer
            layer.lazy_initialization(parts[0].keys, parts[0].values)
            row = 0
            for part in parts:
                rows, slots = part.keys.shape[0], part.keys.shape[2]
                layer.keys[row : row + rows, :, :slots] = part.keys
                layer.values[row : row + rows, :, :slots] = part.values
                row += rows
        return joined

    @property
    def start(self) -> Tensor:
        """Write position of each row, ``(B,)``: the number of its committed slots."""
        return self.rows.start

    def open(
        self, visible: int, offset: int = 0, common: int | None = None, masked: bool = True
    ) -> None:
        """Sets what the next forward pass reads and writes.

        Args:
            visible: Number of slots that attention covers, from the first slot on.
            offset: Distance from ``start`` to the first slot that the pass writes.
            common: Slot at which all active rows begin to write, known on the host; rows that have
                ended write there too. ``None``: each row writes after its own start.
            masked: Whether the pass has a mask.
        """
        rows = self.rows
        rows.length = 0 if masked else common or 0
        rows.visible = rows.room = visible
        rows.offset, rows.slots, rows.piece, rows.common = offset, None, None, common

    def open_piece(self, piece: Piece, width: int) -> None:
        """Prepares a pass over a piece of a prompt of ``width`` tokens, padding included."""
        # room for the token after the prompt, so that storage need not grow for it
        self.rows.visible, self.rows.room = piece.last - piece.seen, width + 1
        self.rows.piece, self.rows.common, self.rows.length = piece, None, 0

    def slots(self, row: int, columns: slice) -> list[Slots | None]:
        """Views of some slots of a row, by layer; ``None``: a view of the model skips a layer."""
        return [
            Slots(layer.keys[row, :, columns], layer.values[row, :, columns])
            if layer.is_initialized
            else None
            for layer in self.layers
        ]

    def put(self, row: int, first: int, slots: Sequence[Slots | None], count: int) -> None:
        """Writes the first ``count`` of other slots to a row's slots from ``first`` on.

        The cache was opened for as many slots as it must have room for.
        """
        for layer, given in zip(self.layers, slots, strict=True):
            if given is None:
                continue
            if not layer.is_initialized:
                layer.lazy_initialization(given.keys[None], given.values[None])
            layer.keys[row, :, first : first + count] = given.keys[:, :count]
            layer.values[row, :, first : first + count] = given.values[:, :count]

    def commit(self, count: Tensor, path: Tensor | None = None) -> None:
        """Commits the root of the last pass and ``count - 1`` of its nodes.

        Args:
            count: Number of slots to commit per row, root included, ``(B,)``; 0 for inactive rows.
            path: Indices of the accepted nodes in order, ``(B, D)``, padded with -1; ``None``: the
                nodes are a chain.
        """
        if path is not None and path.shape[1]:
            base = self.rows.start[:, None] + 1
            target = torch.arange(path.shape[1], device=path.device)
            source = base + torch.where(path >= 0, path, target)  # padding moves nothing
            target = base + target
            for layer in self.layers:
                if not layer.is_initialized:
                    continue  # a view of the model skips this layer
                for states in (layer.keys, layer.values):
                    moved = source[:, None, :, None].to(states.device)
                    moved = moved.expand(-1, states.shape[1], -1, states.shape[-1])
                    index = target[:, None, :, None].to(states.device).expand_as(moved)
                    states.scatter_(2, index, states.gather(2, moved))
        self.rows.start += count

    def copy(self, source: RaggedCache, rows: slice, slots: Sequence[Tensor], visible: int) -> None:
        """Copies slots of another cache to each row's ``start``, without moving ``start``.

        Args:
            source: A cache of the same model.
            rows: Rows of ``source``, as many as this cache has.
            slots: Slots of ``source`` to copy, by layer, ``(B, H or 1, n)``; an index beyond the
                end copies the last slot.
            visible: Number of visible slots afterwards.
        """
        self.open(visible)
        for layer, other, index in zip(self.layers, source.layers, slots, strict=True):
            if not other.is_initialized:
                continue  # a view of the model skips this layer
            copied = []
            for states in (other.keys[rows], other.values[rows]):
                clamped = index.clamp_max(states.shape[2] - 1)[..., None]
                shape = (-1, states.shape[1], -1, states.shape[3])
                copied.append(states.gather(2, clamped.expand(shape)))
            layer.update(*copied)

    def set_start(self, start: Tensor) -> None:
        """Sets the write positions, ``(B,)``, without changing any slot."""
        self.rows.start.copy_(start)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Selects the rows ``beam_idx``, in that order; a row may occur several times."""
        self.rows.start = self.rows.start[beam_idx]
        for layer in self.layers:
            layer.reorder_cache(beam_idx)
