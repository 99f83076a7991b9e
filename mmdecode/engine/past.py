"""`past_key_values` of transformers: the part of a prompt that an earlier call has read.

A `DynamicCache` that a caller gives is read like kept prefixes of the prompt, one per row, and
holds the keys and values of the whole text afterwards, as after plain ``generate``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from mmdecode.engine.adapter import MAIN
from mmdecode.engine.cache import Slots
from mmdecode.engine.call import Call
from mmdecode.engine.prompt_cache import Found, Prefix, RowPrompt

if TYPE_CHECKING:
    from mmdecode.engine.branches import ModelRunner


def prefixes(past: DynamicCache, ids: Tensor, lengths: Sequence[int]) -> list[Found] | None:
    """The tokens of each row of a prompt that a caller's cache holds; ``None``: a row has none.

    Args:
        past: The cache.
        ids: The prompt, ``(B, P)``.
        lengths: Its tokens per row.
    """
    count, width = past.get_seq_length(), ids.shape[1]
    found: list[Found] = []
    for row, length in enumerate(lengths):
        left = width - length
        if count <= left:
            return None
        own = [
            Slots(part.keys[row, :, left:count], part.values[row, :, left:count])
            for part in past.layers
        ]
        read = RowPrompt(ids[row, left:count].cpu(), 0, b"")
        found.append(Found(Prefix(read, [*own]), count - left))
    return found


def keep_text(past: DynamicCache, main: ModelRunner | None, call: Call, cur_len: int) -> None:
    """Puts keys and values of prompt and generated tokens into a caller's cache.

    It then holds, as after plain ``generate``, all columns of the longest row but the last; in a
    shorter row those after its end have no meaning. It is emptied if a guide runs the main branch
    itself.

    Args:
        past: The cache; what it holds is replaced.
        main: Runner of the main branch.
        call: The call, which has ended.
        cur_len: Generated tokens of the longest row.
    """
    if main is None:
        past.reset()
        return
    rows = main.rows_of(MAIN.name)
    # a prompt that shares its pass with a wider one was padded there
    lengths = call.request.prompt_mask.sum(1)
    first = int(main.pads[rows.start] - (call.prompt_length - lengths[0]))
    slots = slice(first, first + call.prompt_length + cur_len - 1)
    while len(past.layers) < len(main.cache.layers):
        past.layers.append(DynamicLayer())
    for mine, own in zip(past.layers, main.cache.layers, strict=True):
        if not own.is_initialized:
            continue
        keys, values = own.keys[rows, :, slots].clone(), own.values[rows, :, slots].clone()
        mine.reset()
        if type(mine) is DynamicLayer:
            mine.lazy_initialization(keys, values)
            mine.keys, mine.values = keys, values
        else:  # a window
            mine.update(keys, values)
