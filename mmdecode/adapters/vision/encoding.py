"""Encodes images and builds prompts from their features, for transforms of a prompt's images.

The module also computes the salience of patches: the attention that the image encoder pays to each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from mmdecode.engine.adapter import Prompt
from mmdecode.engine.attention import TowerPlan, planned, switched
from mmdecode.engine.call import Call
from mmdecode.errors import IncompatibleError

if TYPE_CHECKING:
    from mmdecode.adapters.vision.base import VisionLanguageAdapter

ENCODED = "mm_encoder_outputs"
"""Argument in which ``generate`` passes on images that it has encoded."""

Heads = Literal["mean", "joined"]
"""How attention of the encoder's heads is combined: averaged, or as if they were one head."""

Raw = dict[str, Tensor]
"""Image inputs of a model (pixels, sizes and so on), by argument name of its forward pass."""


@dataclass(frozen=True)
class Encoded:
    """Features of all image tokens of a batch, row by row.

    Attributes:
        features: Features in the text model's embedding space, ``(n, H)``.
        deeper: Features that some models add in their first layers (deepstack), each ``(n, H)``.
        salience: Attention that the image encoder pays to each image token, ``(n,)``; ``None``: not
            requested.
    """

    features: Tensor
    deeper: Sequence[Tensor] = ()
    salience: Tensor | None = None


def encode(adapter: VisionLanguageAdapter, raw: Raw, salient: Heads | None = None) -> Encoded:
    """Encodes images and projects them into the text model's embedding space."""
    plan = salient_plan(adapter, salient) if salient else None
    with planned_tower(adapter, plan) if plan else nullcontext():
        found = adapter.encode(raw)
    parts = [part.reshape(-1, part.shape[-1]) for part in found.pooler_output]
    levels = getattr(found, "deepstack_features", None) or ()
    # in one piece, or by image
    deeper = [t if isinstance(t, Tensor) else torch.cat(list(t)) for t in levels]
    counts = [len(part) for part in parts]
    paid = adapter.salience(plan.chunks(), raw, counts) if plan else None
    return Encoded(torch.cat(parts), deeper, paid)


def salient_plan(adapter: VisionLanguageAdapter, heads: Heads = "mean") -> TowerPlan:
    """Returns a plan that records the attention weights of the encoder layer for `salience`."""
    layer = adapter.salient_layer % len(adapter.tower_sites())
    return tower_plan(adapter, reads=frozenset([layer]), joined=heads == "joined")


def tower_plan(adapter: VisionLanguageAdapter, **options: Any) -> TowerPlan:
    """Returns a `TowerPlan`, with ``options``, for the self-attention of the image encoder."""
    sites = {id(site): index for index, site in enumerate(adapter.tower_sites())}
    return TowerPlan(sites=sites, **options)


def feature_prompt(
    adapter: VisionLanguageAdapter,
    call: Call,
    keep: Tensor,
    features: Tensor,
    deeper: Sequence[Tensor],
) -> Prompt:
    """Builds a prompt of embeddings, with image features at the image tokens.

    Args:
        adapter: The model's adapter.
        call: The call whose prompt is used.
        keep: True at prompt tokens to keep, ``(B, P)``; n of them are image tokens.
        features: Features of the kept image tokens, ``(n, H)``.
        deeper: Features added in the first layers, see `Encoded`.
    """
    order = right_aligned(keep)
    ids, mask = call.request.prompt_ids.gather(1, order), keep.gather(1, order)
    images = adapter.spans("image", ids) & mask
    inputs: dict[str, Any] = {"inputs_embeds": merge_features(adapter, ids, images, features)}
    if deeper:
        inputs["stack"] = {"visual_pos_masks": images, "deepstack_visual_embeds": list(deeper)}
    kept_all = bool((keep == call.request.prompt_mask).all())
    inputs |= adapter.position_inputs(call) if kept_all else {}
    return Prompt(
        ids=ids, mask=mask, inputs=inputs, prompt_attention=adapter.prompt_attention(images, mask)
    )


def inputs_of_rows(
    adapter: VisionLanguageAdapter, prompt: Prompt, rows: Sequence[int], columns: slice
) -> dict[str, Any] | None:
    """Inputs of some rows of a prompt; ``None``: they are not known to belong to rows.

    Args:
        adapter: The model's adapter.
        prompt: The prompt, with images encoded or not.
        rows: Rows to keep.
        columns: Columns to keep: all but padding.
    """
    images = adapter.spans("image", prompt.ids) & prompt.mask
    if not bool(images[rows].any()):
        return {}  # words alone
    raw = {name: prompt.inputs[name] for name in adapter.raw_names if name in prompt.inputs}
    found: dict[str, Any] = {}
    for name, value in prompt.inputs.items():
        if name == ENCODED:
            encoded = _encoded_of_rows(value, images.sum(1).tolist(), rows)
            if encoded is None:
                return None
            found[name] = encoded
        elif name in (*adapter.by_token, "offsets"):
            found[name] = value[rows][..., columns]
        elif name not in raw:
            return None
    if raw:
        try:
            own = adapter.split(raw, prompt.ids)
        except IncompatibleError:
            return None
        kept = [own[row] for row in rows if own[row]]
        found |= {name: torch.cat([one[name] for one in kept]) for name in kept[0]}
    return found


def _encoded_of_rows(
    encoded: Mapping[str, Any], counts: Sequence[int], rows: Sequence[int]
) -> dict[str, Any] | None:
    """Image features of some rows; ``counts`` are the image tokens of all rows."""
    output: Any = encoded.get("image")
    features = getattr(output, "pooler_output", None)
    others = [name for name, value in encoded.items() if name != "image" and value is not None]
    if features is None or others:
        return None

    def chosen(values: Any) -> Any:
        flat = torch.cat([part.reshape(-1, part.shape[-1]) for part in values])
        parts = flat.split(list(counts))
        kept = torch.cat([parts[row] for row in rows])
        return kept[None] if isinstance(values, Tensor) else [kept]

    if sum(part.reshape(-1, part.shape[-1]).shape[0] for part in features) != sum(counts):
        return None
    made = {"pooler_output": chosen(features)}
    levels = getattr(output, "deepstack_features", None)
    if levels is not None:
        made["deepstack_features"] = [chosen(level) for level in levels]
    return {"image": type(output)(**made)}


def merge_features(
    adapter: VisionLanguageAdapter, ids: Tensor, images: Tensor, features: Tensor
) -> Tensor:
    """Embeds ``ids (B, P)``, with ``features (n, H)`` where ``images (B, P)`` is True."""
    words = ids.masked_fill(images, 0)  # a placeholder may lie outside the vocabulary
    embeds = adapter.model.get_input_embeddings()(words)
    return embeds.masked_scatter(images[..., None], features.to(embeds))


@contextmanager
def planned_tower(adapter: VisionLanguageAdapter, plan: TowerPlan) -> Iterator[TowerPlan]:
    """Applies a plan to all passes of the image encoder within the context."""
    with ExitStack() as stack:
        stack.enter_context(switched(adapter.tower()))
        stack.enter_context(planned(plan))
        yield plan


def salience(weights: Sequence[Tensor], has_cls: bool) -> list[Tensor]:
    """Returns the attention to each patch, from the class token or averaged over all patches.

    Args:
        weights: Attention weights of one layer, in chunks, each ``(R, heads, Q, K)``.
        has_cls: Whether the first token is a class token.

    Returns:
        One tensor ``(R, patches)`` per chunk, averaged over heads.
    """
    if has_cls:
        return [chunk.mean(1)[:, 0, 1:] for chunk in weights]
    return [chunk.mean((1, 2)) for chunk in weights]


def pooled(values: Tensor, tokens: int) -> Tensor:
    """Returns the mean value of the patches that are merged into each image token.

    Args:
        values: One value per patch of a square grid, in raster order, ``(R, patches)``.
        tokens: Number of image tokens per image, which form a square grid too.

    Raises:
        IncompatibleError: The grids are not square, or the token grid does not divide the patch
            grid.
    """
    rows, patches = values.shape
    if patches == tokens:
        return values
    side, cells = round(patches**0.5), round(tokens**0.5)
    if side * side != patches or cells * cells != tokens or side % cells:
        raise IncompatibleError(
            f"{patches} patches are merged into {tokens} image tokens; expected square grids, one "
            "dividing the other, to compute attention to image tokens from attention to patches"
        )
    grid = values.reshape(rows, 1, side, side)
    return avg_pool2d(grid, side // cells).reshape(rows, tokens)


def right_aligned(keep: Tensor) -> Tensor:
    """Returns column indices that move kept tokens to the right, as many as the longest row."""
    width = int(keep.sum(1).amax())
    return keep.long().argsort(dim=1, stable=True)[:, keep.shape[1] - width :]
