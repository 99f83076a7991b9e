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


def prefixes(
    past: DynamicCache, ids: Tensor, lengths: Sequence[int], columns: int
) -> list[Found] | None:
    """The tokens of each row of a prompt that a caller's cache holds; ``None``: a row has none.

    Args:
        past: The cache, with a row for each of the first rows of the prompt.
        ids: The prompt, ``(R, P)``, padded on the left.
        lengths: Its tokens per row.
        columns: Columns of the caller's prompt, at most P.
    """
    count, found = past.get_seq_length(), []
    for row in range(past.layers[0].keys.shape[0]):
        held = slice(columns - lengths[row], count)
        tokens = count - held.start
        if tokens <= 0:
            return None
        own = [Slots(part.keys[row, :, held], part.values[row, :, held]) for part in past.layers]
        left = ids.shape[1] - lengths[row]
        read = RowPrompt(ids[row, left : left + tokens].cpu(), 0, b"")
        found.append(Found(Prefix(read, [*own]), tokens))
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
    for layer in past.layers:  # `reset` of transformers 5.17 keeps slots of zeros
        layer.keys = layer.values = None
        layer.is_initialized = False
    if main is None:
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
        if type(mine) is DynamicLayer:
            mine.lazy_initialization(keys, values)
            mine.keys, mine.values = keys, values
        else:  # a window
            mine.cumulative_length = 0
            mine.update(keys, values)
