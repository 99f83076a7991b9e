"""Drafters that read the prompt: rows that begin with the same prefix share its keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmdecode.engine.cache import Piece, RaggedCache, bucket
from mmdecode.engine.contracts import BranchOutput
from mmdecode.engine.masks import block_mask, chain
from mmdecode.engine.prompt_cache import Found, KeptDraft, ModelState, PromptCache
from mmdecode.models.feature_drafter import FeatureDrafter, Rows


def prefixes_of(outputs: Sequence[BranchOutput]) -> list[Found | None]:
    """Returns the prefix of each row of several branches; empty if no row has one."""
    found: list[Found | None] = []
    for output in outputs:
        found += output.prefixes or [None] * len(output.logits)
    return found if any(found) else []


def rows_of_prefixes(
    rows: Rows, lengths: Tensor, found: Sequence[Found | None], reads_first: bool
) -> list[int]:
    """Returns how many of the drafter's rows belong to the prefix of each prompt.

    A row needs a token and the state of the token before it.

    Args:
        rows: The drafter's inputs, padded on the left, with their mask.
        lengths: Rows of each prompt, also those that are left out, ``(B,)``.
        found: Prefix of each prompt.
        reads_first: Whether the first token has a row.
    """
    kept, counts = rows.kept, []
    assert kept is not None
    for row, one in enumerate(found):
        own = 0 if one is None else max(one.tokens - (not reads_first), 0)
        first = kept.shape[1] - int(lengths[row])
        counts.append(int(kept[row, first : first + own].sum()))
    return counts


def read_shared(
    drafter: FeatureDrafter,
    cache: RaggedCache,
    pads: Tensor,
    rows: Rows,
    found: Sequence[Found | None],
    counts: Sequence[int],
    images: str,
    kept_in: PromptCache | None,
) -> None:
    """Reads the prompt into a drafter's empty cache.

    Args:
        drafter: The drafter's model.
        cache: Its cache.
        pads: Slots of padding, ``(B,)``.
        rows: Its inputs, padded on the left.
        found: Prefix of each prompt.
        counts: Rows of the drafter that belong to it.
        images: Option of `mmdecode.draft.features.FeatureDraft`.
        kept_in: The prompt cache that holds the prefixes; ``None``: none does.
    """
    name = (type(drafter).__name__, images)
    state, width, device = ModelState(drafter), rows.embeds.shape[1], pads.device
    lefts = pads.tolist()
    for row, (one, count) in enumerate(zip(found, counts, strict=True)):
        if one is None or not count:
            continue
        kept = one.prefix.drafts.get(name)
        if kept is not None and kept.state == state and kept.length >= count:
            cache.open(width + 1)
            cache.put(row, lefts[row], kept.slots, count)
            continue
        index = torch.tensor([row], device=device)
        piece = Piece(index, lefts[row], 0, count)
        cache.open_piece(piece, width)
        drafter(rows.part(index, piece.columns), None, cache)
        own = [part and part.clone() for part in cache.slots(row, piece.columns)]
        one.prefix.keep_draft(name, KeptDraft(state, count, own))
    if kept_in is not None:
        kept_in.trim()
    starts = [left + count for left, count in zip(lefts, counts, strict=True)]
    longest = width - min(starts)
    if not longest:
        return
    begin = torch.tensor(starts, device=device)
    cache.set_start(begin)
    columns = begin[:, None] + torch.arange(longest, device=device)
    rest = rows.gathered(columns.clamp_max(width - 1))
    visible = bucket(max(starts) + longest)
    mask = block_mask(begin, pads, *chain(longest, device), visible, rest.embeds.dtype)
    cache.open(visible)
    drafter(rest, mask, cache)
