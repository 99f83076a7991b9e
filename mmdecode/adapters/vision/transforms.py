"""Transforms of a vision-language prompt: what a branch may be shown instead of what was asked.

A guide names a transform and its options; which tensors that touches is the family's to know.

- ``pixels``: ``change(values, draw) -> values`` of each image's normalised pixels, in whatever
  shape the processor left them (tiles, flattened patches).
- ``questions``: ``change(question, draw) -> question`` of the text and the images as PIL has them;
  the caller hands over ``mm_inputs["questions"]``, as `mmdecode.vlm.Answerer` does.
- ``pictures``: ``change(picture (..., 3, H, W), draw) -> picture`` of each image with channels of
  0..1 and in one piece: the images of ``mm_inputs["questions"]`` where these are at hand, else what
  the pixels were made of, see `mmdecode.adapters.vision.pixels`. Sizes stay, and so does the
  layout.
- ``no_image``: the placeholders are left out; what stands around them stays.
- ``only_images``: the image tokens and the last token of the prompt, which has to be there for the
  first one to follow; between two images the token before the second, which keeps them apart.
  ``change``, where given, is that of ``pixels``, with the same draws.
- ``features``: ``change(features (n, H), draw) -> (n, H)`` of all image tokens of a row as the text
  model reads them, and of what some models add to them in their first layers.
- ``tokens``: ``select(features (n, H), salience (n,)) -> (k,)`` indices of the image tokens that
  stay, in the order in which they are read, at consecutive positions. ``salience`` is the attention
  that the image encoder pays to each, see `salience`; ``heads`` says how: ``"mean"`` of the heads,
  or ``"joined"``, as if they were one.
- ``tower``: ``edit(weights (R, heads, Q, K), seen (R or 1, 1, Q, K), layer, draw) -> weights`` of
  the image encoder's attention at its ``layers``, a pair of fractions of its depth; ``seen`` are
  the keys that are there.
- ``patches``: ``change(states (R, n, H), weights (R, heads, Q, K), draw) -> states`` of what the
  encoder hands to the projector, where ``weights`` are those of the layer that `salience` reads.

``draw`` is a generator seeded by the request and the image's place among the row's, never by the
batch, so an item is changed alike in every batch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, pad

from mmdecode.adapters.vision import pixels as painting
from mmdecode.engine.adapter import BranchSpec, Prompt
from mmdecode.engine.attention import TowerPlan, layer_range, planned, switched
from mmdecode.engine.call import Call
from mmdecode.errors import IncompatibleError, OptionError

if TYPE_CHECKING:
    from mmdecode.adapters.vision.base import VisionLanguageAdapter

Heads = Literal["mean", "joined"]
"""How the heads of an image encoder say together what they attend to."""

PIXELS = ("pixel_values", "pixel_values_videos")


Raw = dict[str, Tensor]
"""Pixels and what describes them, by the names that the model's forward has for them."""


@dataclass(frozen=True)
class Encoded:
    """Image tokens of a batch, row by row.

    Attributes:
        features: As the text model reads them, ``(n, H)``.
        deeper: What some models add to them in their first layers, each ``(n, H)``.
        salience: Attention the image encoder pays to each, ``(n,)``, where asked for.
    """

    features: Tensor
    deeper: Sequence[Tensor] = ()
    salience: Tensor | None = None


def prompt(adapter: VisionLanguageAdapter, call: Call, spec: BranchSpec) -> Prompt:
    """The prompt of a branch that names a transform.

    Raises:
        IncompatibleError: The transform is unknown, or needs what the call did not hand over.
        OptionError: The transform lacks a function.
    """
    transform = TRANSFORMS.get(str(spec.transform))
    if transform is None:
        raise IncompatibleError.between(
            f"branch {spec.name!r} with transform {spec.transform!r}",
            adapter.name,
            "there is no such transform",
            f"use one of {', '.join(by_name())}, or build the part in Python for one of "
            f"{', '.join(transform for transform in TRANSFORMS if transform not in by_name())}",
        )
    refuse_lacking(spec)
    if transform is not questions and not bool(
        adapter.spans("image", call.request.prompt_ids).any()
    ):
        # as in a batch where other rows have images; guides warn that they are inactive
        whole: Literal["last_token", "same"] = "last_token" if transform is only_images else "same"
        return adapter.prompt(call, BranchSpec(name=spec.name, prompt=whole))
    return transform(adapter, call, spec, **spec.transform_options)


def refuse_lacking(spec: BranchSpec) -> None:
    """Raises where a branch leaves out a function that its transform cannot be without.

    Raises:
        OptionError: A function is missing.
    """
    lacking = [
        name for name in _functions(str(spec.transform)) if name not in spec.transform_options
    ]
    if lacking:
        raise OptionError(
            f"transform {spec.transform!r} of branch {spec.name!r} needs {lacking[0]!r}, a "
            f"function that no string can name; use {' or '.join(by_name())}, or build the guide "
            f"or draft in Python with transform_options={{{lacking[0]!r}: ...}}"
        )


def by_name() -> list[str]:
    """Transforms that need no function, which a string can name."""
    return [transform for transform in TRANSFORMS if not _functions(transform)]


def _functions(transform: str) -> list[str]:
    """Options that a transform cannot be without."""
    _, _, _, *options = inspect.signature(TRANSFORMS[transform]).parameters.values()
    return [option.name for option in options if option.default is option.empty]


def raw_images(adapter: VisionLanguageAdapter, call: Call) -> list[Raw]:
    """Pixels of each row, empty for a row without images.

    Raises:
        IncompatibleError: They were encoded before the call began.
    """
    given = {**call.request.model_kwargs, **call.request.inputs}
    raw = {n: given[n].to(call.device) for n in adapter.raw_names if given.get(n) is not None}
    if not any(name in raw for name in PIXELS):
        name = adapter.name
        raise IncompatibleError.between(
            "a guide that changes images",
            name,
            "generate has encoded them before the decoder began",
            "call mmdecode.generate, or generate inside mmdecode.attach(model)",
        )
    # what generate prepared has the rows of num_return_sequences, what the caller gave has not
    copies = (
        call.request.num_return_sequences
        if any(name in call.request.inputs for name in PIXELS)
        else 1
    )
    return [
        own for own in adapter.split(raw, call.request.prompt_ids[::copies]) for _ in range(copies)
    ]


def joined(rows: Sequence[Raw]) -> Raw:
    """The tensors of all rows, one after the other."""
    names = dict.fromkeys(name for own in rows for name in own)
    return {name: torch.cat([own[name] for own in rows if name in own]) for name in names}


def pixels(
    adapter: VisionLanguageAdapter,
    call: Call,
    spec: BranchSpec,
    change: Callable[[Tensor, torch.Generator], Tensor],
) -> Prompt:
    """Each image's pixels changed; the layout stays."""
    return adapter.whole(call, joined(_changed(adapter, call, change)))


def _changed(
    adapter: VisionLanguageAdapter,
    call: Call,
    change: Callable[[Tensor, torch.Generator], Tensor],
) -> list[Raw]:
    """What each row has, with each image's pixels changed."""
    rows = []
    for row, own in enumerate(raw_images(adapter, call)):
        new = {name: value.clone() if name in PIXELS else value for name, value in own.items()}
        for ordinal, (name, place) in enumerate(adapter.images(own)):
            draw = call.request.noise.generator(row, "pixels", ordinal)
            new[name][place] = adapter.image(change(own[name][place], draw).to(own[name]))
        rows.append(new)
    return rows


def pictures(
    adapter: VisionLanguageAdapter, call: Call, spec: BranchSpec, change: painting.Change
) -> Prompt:
    """Each image changed as a whole, before the processor or as if it had been."""
    if call.request.inputs.get("questions") is not None:
        return questions(adapter, call, spec, functools.partial(_repainted, change))

    marks = adapter.spans("image", call.request.prompt_ids)
    runs = (marks & ~pad(marks, (1, -1))).sum(1).tolist()
    rows = []
    for row, own in enumerate(raw_images(adapter, call)):
        new = {name: value.clone() if name in PIXELS else value for name, value in own.items()}
        places = adapter.images(own)
        if adapter.are_parts(len(places), runs[row]):
            painting.refuse_parts(adapter.model)
        for ordinal, (name, place) in enumerate(places):
            seed = call.request.noise.generator(row, "pictures", ordinal).initial_seed()
            paint = functools.partial(painting.changed, change=change, seed=seed)
            new[name][place] = adapter.image(adapter.repaint(own, name, place, paint).to(own[name]))
        rows.append(new)
    return adapter.whole(call, joined(rows))


def _repainted(change: painting.Change, question: Any, draw: torch.Generator) -> Any:
    images = tuple(painting.changed_image(image, change, draw) for image in question.images)
    return replace(question, images=images)


def questions(
    adapter: VisionLanguageAdapter,
    call: Call,
    spec: BranchSpec,
    change: Callable[[Any, torch.Generator], Any],
) -> Prompt:
    """Each row's question changed, and made into inputs again."""
    asked = call.request.inputs.get("questions")
    if asked is None:
        raise IncompatibleError.between(
            "a guide that rewrites the question or its images",
            "a call of ids and pixels",
            "the text and the images as they were before the processor are not at hand",
            "use mmdecode.vlm.Answerer, or give mmdecode.generate mm_inputs={'questions': [...]}",
        )
    rows = [question for question in asked for _ in range(call.batch // len(asked))]
    changed = [
        change(question, call.request.noise.generator(row, "questions"))
        for row, question in enumerate(rows)
    ]
    built = {
        name: value.to(call.device) if isinstance(value, Tensor) else value
        for name, value in rows[0].build(changed).items()
    }
    same = all(a.images is b.images for a, b in zip(rows, changed, strict=True))
    return adapter.built(call, built, same)


def no_image(adapter: VisionLanguageAdapter, call: Call, spec: BranchSpec) -> Prompt:
    """The prompt without its image tokens."""
    return _kept(
        adapter, call, call.request.prompt_mask & ~adapter.spans("image", call.request.prompt_ids)
    )


def _kept(adapter: VisionLanguageAdapter, call: Call, keep: Tensor) -> Prompt:
    """Columns ``keep (B, P)`` of the prompt, with what is given by token and nothing else."""
    order = _order(keep)
    inputs = {
        name: _gather(value, order)
        for name, value in call.request.model_kwargs.items()
        if name in adapter.by_token and value is not None
    }
    return Prompt(
        ids=call.request.prompt_ids.gather(1, order), mask=keep.gather(1, order), inputs=inputs
    )


def only_images(
    adapter: VisionLanguageAdapter,
    call: Call,
    spec: BranchSpec,
    change: Callable[[Tensor, torch.Generator], Tensor] | None = None,
) -> Prompt:
    """The prompt without its words; most marks around images go too."""
    images = adapter.spans("image", call.request.prompt_ids)
    first = images & ~pad(images, (1, -1))
    later = first & (first.cumsum(1) > 1)
    keep = call.request.prompt_mask & (images | pad(later, (-1, 1)))
    keep[:, -1] = True
    left = _kept(adapter, call, keep)
    raw = joined(_changed(adapter, call, change) if change else raw_images(adapter, call))
    inputs = {**left.inputs, **raw, "input_ids": left.ids, "attention_mask": left.mask}
    return adapter.built(call, inputs, same=change is None)


def features(
    adapter: VisionLanguageAdapter,
    call: Call,
    spec: BranchSpec,
    change: Callable[[Tensor, torch.Generator], Tensor],
) -> Prompt:
    """The image tokens of each row, changed at every depth at which the text model reads them."""
    encoded = encode(adapter, joined(raw_images(adapter, call)))
    counts = adapter.spans("image", call.request.prompt_ids).sum(1).tolist()
    levels = [level.split(counts) for level in (encoded.features, *encoded.deeper)]
    rows = []
    for row, own in enumerate(zip(*levels, strict=True)):
        draw = call.request.noise.generator(row, "features")
        rows.append([change(states, draw) if len(states) else states for states in own])
    new, *deeper = [torch.cat(level) for level in zip(*rows, strict=True)]
    return of_features(adapter, call, call.request.prompt_mask, new, deeper)


def tokens(
    adapter: VisionLanguageAdapter,
    call: Call,
    spec: BranchSpec,
    select: Callable[[Tensor, Tensor], Tensor],
    heads: Heads = "mean",
) -> Prompt:
    """Some image tokens of each row, at consecutive positions."""
    encoded = encode(adapter, joined(raw_images(adapter, call)), salient=heads)
    assert encoded.salience is not None, "asked for"
    images = adapter.spans("image", call.request.prompt_ids)
    first = 0
    keep, order = call.request.prompt_mask & ~images, []
    for row, count in enumerate(images.sum(1).tolist()):
        if not count:
            continue
        part = slice(first, first + count)
        chosen = select(encoded.features[part], encoded.salience[part])
        places = images[row].nonzero()[:, 0]
        keep[row, places[chosen]] = True
        order.append(first + chosen[_runs(places)[chosen].argsort(stable=True)])
        first += count
    index = torch.cat(order)
    deeper = [level[index] for level in encoded.deeper]
    return of_features(adapter, call, keep, encoded.features[index], deeper)


def tower(
    adapter: VisionLanguageAdapter,
    call: Call,
    spec: BranchSpec,
    edit: Callable[[Tensor, Tensor, int, torch.Generator], Tensor],
    layers: tuple[float, float] = (0.0, 1.0),
) -> Prompt:
    """The images encoded again with edited attention."""
    sites = adapter.tower_sites()
    named = frozenset(layer_range(layers, len(sites)))

    def encoded(own: Raw, draw: torch.Generator) -> Encoded:
        change = functools.partial(_drawn, edit, draw)
        with reading(adapter, TowerPlan(sites=_numbered(sites), edit=change, layers=named)):
            return encode(adapter, own)

    return _row_by_row(adapter, call, "tower", encoded)


def patches(
    adapter: VisionLanguageAdapter,
    call: Call,
    spec: BranchSpec,
    change: Callable[[Tensor, Tensor, torch.Generator], Tensor],
) -> Prompt:
    """What the image encoder hands to the projector, changed."""

    def encoded(own: Raw, draw: torch.Generator) -> Encoded:
        plan = salient_plan(adapter)

        def changed(states: Tensor) -> Tensor:
            return change(states, torch.cat(plan.chunks()), draw).to(states.dtype)

        with reading(adapter, plan), adapter.patches(changed):
            return encode(adapter, own)

    return _row_by_row(adapter, call, "patches", encoded)


def _row_by_row(
    adapter: VisionLanguageAdapter,
    call: Call,
    name: str,
    encoded: Callable[[Raw, torch.Generator], Encoded],
) -> Prompt:
    """The caller's prompt with each row's images encoded alone, since draws are the row's."""
    parts = [
        encoded(own, call.request.noise.generator(row, name))
        for row, own in enumerate(raw_images(adapter, call))
        if own
    ]
    merged = torch.cat([part.features for part in parts])
    deeper = [torch.cat(level) for level in zip(*(part.deeper for part in parts), strict=True)]
    return of_features(adapter, call, call.request.prompt_mask, merged, deeper)


def encode(adapter: VisionLanguageAdapter, raw: Raw, salient: Heads | None = None) -> Encoded:
    """Images through the encoder and into the text model's space."""
    plan = salient_plan(adapter, salient) if salient else None
    with reading(adapter, plan) if plan else nullcontext():
        found = adapter.encode(raw)
    parts = [part.reshape(-1, part.shape[-1]) for part in found.pooler_output]
    levels = getattr(found, "deepstack_features", None) or ()
    # in one piece, or by image
    deeper = [t if isinstance(t, Tensor) else torch.cat(list(t)) for t in levels]
    counts = [len(part) for part in parts]
    paid = adapter.salience(plan.chunks(), raw, counts) if plan else None
    return Encoded(torch.cat(parts), deeper, paid)


def salient_plan(adapter: VisionLanguageAdapter, heads: Heads = "mean") -> TowerPlan:
    """Reads the layer of the image encoder that says which patches matter."""
    sites = adapter.tower_sites()
    layer = adapter.salient_layer % len(sites)
    return TowerPlan(sites=_numbered(sites), reads=frozenset([layer]), joined=heads == "joined")


def of_features(
    adapter: VisionLanguageAdapter,
    call: Call,
    keep: Tensor,
    features: Tensor,
    deeper: Sequence[Tensor],
) -> Prompt:
    """A prompt that the text model reads by embeddings, with image features in their places.

    Args:
        adapter: Of the model.
        call: The call.
        keep: Columns of the prompt that stay, ``(B, P)``; as many image tokens as ``features``.
        features: ``(n, H)``.
        deeper: See `Encoded`.
    """
    order = _order(keep)
    ids, mask = call.request.prompt_ids.gather(1, order), keep.gather(1, order)
    images = adapter.spans("image", ids) & mask
    inputs: dict[str, Any] = {"inputs_embeds": embedded(adapter, ids, images, features)}
    if deeper:
        inputs["stack"] = {"visual_pos_masks": images, "deepstack_visual_embeds": list(deeper)}
    kept_all = bool((keep == call.request.prompt_mask).all())
    inputs |= adapter.places(call) if kept_all else {}
    return Prompt(ids=ids, mask=mask, inputs=inputs, prompt_attention=adapter.sees(images, mask))


def embedded(
    adapter: VisionLanguageAdapter, ids: Tensor, images: Tensor, features: Tensor
) -> Tensor:
    """``ids (B, P)`` as the text model reads them, with ``features (n, H)`` at ``images``."""
    words = ids.masked_fill(images, 0)  # a placeholder may lie outside the vocabulary
    embeds = adapter.model.get_input_embeddings()(words)
    return embeds.masked_scatter(images[..., None], features.to(embeds))


@contextmanager
def reading(adapter: VisionLanguageAdapter, plan: TowerPlan) -> Iterator[TowerPlan]:
    """Lets a plan hold for passes through the image encoder."""
    with ExitStack() as stack:
        stack.enter_context(switched(adapter.tower()))
        stack.enter_context(planned(plan))
        yield plan


def salience(weights: Sequence[Tensor], has_cls: bool) -> list[Tensor]:
    """Attention that each patch gets, summed to one: by the class token, or on average by all.

    Args:
        weights: Chunks of one layer's weights, each ``(R, heads, Q, K)``.
        has_cls: Whether the first token is a class token.

    Returns:
        One ``(R, patches)`` per chunk, averaged over heads.
    """
    if has_cls:
        return [chunk.mean(1)[:, 0, 1:] for chunk in weights]
    return [chunk.mean((1, 2)) for chunk in weights]


def pooled(values: Tensor, tokens: int) -> Tensor:
    """``(R, patches)`` of a square grid in raster order, as means over what each token merges."""
    rows, patches = values.shape
    if patches == tokens:
        return values
    side, cells = round(patches**0.5), round(tokens**0.5)
    if side * side != patches or cells * cells != tokens or side % cells:
        raise IncompatibleError(
            f"{patches} patches are merged into {tokens} image tokens, which is no square grid "
            "over another; attention to tokens cannot be told from that to patches"
        )
    grid = values.reshape(rows, 1, side, side)
    return avg_pool2d(grid, side // cells).reshape(rows, tokens)


def _drawn(
    edit: Callable[[Tensor, Tensor, int, torch.Generator], Tensor],
    draw: torch.Generator,
    weights: Tensor,
    seen: Tensor,
    layer: int,
) -> Tensor:
    return edit(weights, seen, layer, draw)


def _numbered(sites: Sequence[torch.nn.Module]) -> dict[int, int]:
    return {id(site): index for index, site in enumerate(sites)}


def _runs(places: Tensor) -> Tensor:
    """Number of the run of neighbours that each place belongs to; places ascend."""
    return (places.diff(prepend=places[:1]) > 1).cumsum(0)


def _order(keep: Tensor) -> Tensor:
    """Columns that bring what is kept to the right, as few as the longest row needs."""
    width = int(keep.sum(1).amax())
    return keep.long().argsort(dim=1, stable=True)[:, keep.shape[1] - width :]


def _gather(values: Tensor, order: Tensor) -> Tensor:
    """``values (B, ..., P)`` at the columns ``order (B, P')``."""
    index = order.reshape(len(order), *[1] * (values.ndim - 2), -1)
    return values.gather(-1, index.expand(*values.shape[:-1], -1))


TRANSFORMS: Mapping[str, Callable[..., Prompt]] = {
    "pixels": pixels,
    "questions": questions,
    "pictures": pictures,
    "no_image": no_image,
    "only_images": only_images,
    "features": features,
    "tokens": tokens,
    "tower": tower,
    "patches": patches,
}
