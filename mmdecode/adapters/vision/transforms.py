"""Transforms of vision-language prompts, which give a branch of a guide changed inputs.

A guide selects a transform by name and passes options, some of which are functions. The model's
adapter applies the transform to the model's input tensors.

- ``pixels``: ``change(values, draw) -> values`` changes each image's normalised pixels, in the
  shape that the processor returns (such as tiles or flattened patches).
- ``questions``: ``change(question, draw) -> question`` changes the text of the prompt and its PIL
  images, before the processor. The caller passes ``mm_inputs["questions"]``, as
  `mmdecode.vlm.Answerer` does.
- ``pictures``: ``change(image (..., 3, H, W), draw) -> image`` changes each whole image, with
  values in 0..1. These are the images of ``mm_inputs["questions"]`` if given, otherwise images
  reconstructed from pixels, see `mmdecode.adapters.vision.pixels`. Sizes stay the same.
- ``no_image``: leaves out the image tokens; the text around them stays.
- ``only_images``: keeps only the image tokens, the last token of the prompt, and between two images
  the token before the second, which separates them. If given, ``change`` is applied as in
  ``pixels``, with the same random numbers.
- ``features``: ``change(features (n, H), draw) -> (n, H)`` changes the embeddings of all image
  tokens of a row, and the features that some models add in their first layers.
- ``tokens``: ``select(features (n, H), salience (n,)) -> (k,)`` returns the indices of the image
  tokens to keep, in the order in which they are to be read; they get consecutive positions.
  ``salience`` is the attention that the image encoder pays to each image token, see
  `encoding.salience`; ``heads`` is ``"mean"`` to average heads, or ``"joined"`` to treat them as
  one head.
- ``tower``: ``edit(weights (R, heads, Q, K), seen (R or 1, 1, Q, K), layer, draw) -> weights``
  changes attention weights of the image encoder in ``layers``, given as two fractions of its depth;
  ``seen`` is True at keys that are not masked.
- ``patches``: ``change(states (R, n, H), weights (R, heads, Q, K), draw) -> states`` changes the
  encoder's states before the projector; ``weights`` are the attention weights of the layer that
  salience is read from.

``draw`` is a random generator that is seeded by the request and the image's index within its row,
not by the batch, so a row is changed in the same way in every batch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmdecode.adapters.vision.encoding import (
    Encoded,
    Heads,
    Raw,
    encode,
    feature_prompt,
    planned_tower,
    right_aligned,
    salient_plan,
    tower_plan,
)
from mmdecode.adapters.vision.pixels import Change, edit_image, edit_normalised, refuse_parts
from mmdecode.engine.adapter import BranchSpec, Prompt
from mmdecode.engine.attention import layer_range
from mmdecode.engine.call import Call
from mmdecode.errors import IncompatibleError, OptionError

if TYPE_CHECKING:
    from mmdecode.adapters.vision.base import VisionLanguageAdapter

PIXELS = ("pixel_values", "pixel_values_videos")
"""Names of the inputs that hold pixels."""


def prompt(adapter: VisionLanguageAdapter, call: Call, spec: BranchSpec) -> Prompt:
    """Builds the prompt of a branch that names a transform.

    Raises:
        IncompatibleError: The transform is unknown, or an input that it needs was not passed.
        OptionError: The transform's options lack a function that it needs.
    """
    transform = TRANSFORMS.get(str(spec.transform))
    if transform is None:
        raise IncompatibleError.between(
            f"branch {spec.name!r} with transform {spec.transform!r}",
            adapter.name,
            "there is no such transform",
            f"use one of {', '.join(without_function())}, or build the part in Python for one of "
            f"{', '.join(name for name in TRANSFORMS if name not in without_function())}",
        )
    refuse_missing(spec)
    if transform is not questions and not bool(
        adapter.spans("image", call.request.prompt_ids).any()
    ):
        # as in a batch where other rows have images; guides warn that they are inactive
        whole: Literal["last_token", "same"] = "last_token" if transform is only_images else "same"
        return adapter.prompt(call, BranchSpec(name=spec.name, prompt=whole))
    return transform(adapter, call, spec, **spec.transform_options)


def refuse_missing(spec: BranchSpec) -> None:
    """Checks that a branch has the functions that its transform requires.

    Raises:
        OptionError: A function is missing.
    """
    missing = [
        name for name in _functions(str(spec.transform)) if name not in spec.transform_options
    ]
    if missing:
        raise OptionError(
            f"transform {spec.transform!r} of branch {spec.name!r} needs {missing[0]!r}, a "
            f"function, which no string can give; use {' or '.join(without_function())}, or build "
            f"the guide or draft in Python with transform_options={{{missing[0]!r}: ...}}"
        )


def without_function() -> list[str]:
    """Returns the transforms that need no function, so that a string can select them."""
    return [transform for transform in TRANSFORMS if not _functions(transform)]


def _functions(transform: str) -> list[str]:
    """Returns the options that a transform requires."""
    _, _, _, *options = inspect.signature(TRANSFORMS[transform]).parameters.values()
    return [option.name for option in options if option.default is option.empty]


def raw_images(adapter: VisionLanguageAdapter, call: Call) -> list[Raw]:
    """Returns the image inputs of each row, empty for a row without images.

    Raises:
        IncompatibleError: The images were already encoded, so there are no pixels.
    """
    given = {**call.request.model_kwargs, **call.request.inputs}
    found = {name: given.get(name) for name in adapter.raw_names}
    raw = {name: one.to(call.device) for name, one in found.items() if isinstance(one, Tensor)}
    if not any(name in raw for name in PIXELS):
        raise IncompatibleError.between(
            "a guide that changes images",
            adapter.name,
            "generate has already encoded the images",
            "call mmdecode.generate, or generate inside mmdecode.attach(model)",
        )
    # inputs prepared by generate are repeated for num_return_sequences, the caller's are not
    repeats = (
        call.request.num_return_sequences
        if any(name in call.request.inputs for name in PIXELS)
        else 1
    )
    return [
        own
        for own in adapter.split(raw, call.request.prompt_ids[::repeats])
        for _ in range(repeats)
    ]


def join_rows(rows: Sequence[Raw]) -> Raw:
    """Concatenates the image inputs of all rows, by name."""
    names = dict.fromkeys(name for own in rows for name in own)
    return {name: torch.cat([own[name] for own in rows if name in own]) for name in names}


def pixels(
    adapter: VisionLanguageAdapter,
    call: Call,
    spec: BranchSpec,
    change: Callable[[Tensor, torch.Generator], Tensor],
) -> Prompt:
    """Transform ``pixels``: applies ``change`` to each image's normalised pixels."""
    return adapter.with_images(call, join_rows(_changed(adapter, call, change)))


def _changed(
    adapter: VisionLanguageAdapter,
    call: Call,
    change: Callable[[Tensor, torch.Generator], Tensor],
) -> list[Raw]:
    """Returns the image inputs of each row, with each image's pixels changed."""
    rows = []
    for row, own in enumerate(raw_images(adapter, call)):
        new = {name: value.clone() if name in PIXELS else value for name, value in own.items()}
        for ordinal, (name, index) in enumerate(adapter.image_indices(own)):
            draw = call.request.noise.generator(row, "pixels", ordinal)
            new[name][index] = adapter.valid_pixels(change(own[name][index], draw).to(own[name]))
        rows.append(new)
    return rows


def whole_images(
    adapter: VisionLanguageAdapter, call: Call, spec: BranchSpec, change: Change
) -> Prompt:
    """Transform ``pictures``: applies ``change`` to each whole image.

    If the call has no images from before the processor, they are reconstructed from its output.
    """
    if call.request.inputs.get("questions") is not None:
        return questions(adapter, call, spec, functools.partial(_edit_images, change))

    marks = adapter.spans("image", call.request.prompt_ids)
    runs = (marks & ~pad(marks, (1, -1))).sum(1).tolist()
    rows = []
    for row, own in enumerate(raw_images(adapter, call)):
        new = {name: value.clone() if name in PIXELS else value for name, value in own.items()}
        indices = adapter.image_indices(own)
        if adapter.are_parts(len(indices), runs[row]):
            refuse_parts(adapter.name)
        for ordinal, (name, index) in enumerate(indices):
            seed = call.request.noise.generator(row, "pictures", ordinal).initial_seed()
            edit = functools.partial(edit_normalised, change=change, seed=seed)
            values = adapter.edit_image(own, name, index, edit)
            new[name][index] = adapter.valid_pixels(values.to(own[name]))
        rows.append(new)
    return adapter.with_images(call, join_rows(rows))


def _edit_images(change: Change, question: Any, draw: torch.Generator) -> Any:
    images = tuple(_edited(image, change, draw) for image in question.images)
    return replace(question, images=images)


def _edited(image: Any, change: Change, draw: torch.Generator) -> Any:
    """Returns an edited image; all frames of a video get the same edit."""
    if not hasattr(image, "frames"):
        return edit_image(image, change, draw)
    state, frames = draw.get_state(), []
    for frame in image.frames:
        draw.set_state(state)
        frames.append(edit_image(frame, change, draw))
    return replace(image, frames=tuple(frames))


def questions(
    adapter: VisionLanguageAdapter,
    call: Call,
    spec: BranchSpec,
    change: Callable[[Any, torch.Generator], Any],
) -> Prompt:
    """Transform ``questions``: changes each row's question and runs the processor again."""
    asked = call.request.inputs.get("questions")
    if asked is None:
        raise IncompatibleError.between(
            "a guide that rewrites the question or its images",
            "a call with ids and pixels only",
            "it needs the text and the images as they were before the processor",
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
    return adapter.from_processor(call, built, same)


def no_image(adapter: VisionLanguageAdapter, call: Call, spec: BranchSpec) -> Prompt:
    """Transform ``no_image``: leaves out the image tokens."""
    return _kept(
        adapter, call, call.request.prompt_mask & ~adapter.spans("image", call.request.prompt_ids)
    )


def _kept(adapter: VisionLanguageAdapter, call: Call, keep: Tensor) -> Prompt:
    """Returns a prompt of the tokens ``keep (B, P)``, with inputs that have one value per token."""
    order = right_aligned(keep)
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
    """Transform ``only_images``: leaves out the text and most tokens that delimit images."""
    images = adapter.spans("image", call.request.prompt_ids)
    first = images & ~pad(images, (1, -1))
    later = first & (first.cumsum(1) > 1)
    keep = call.request.prompt_mask & (images | pad(later, (-1, 1)))
    keep[:, -1] = True
    left = _kept(adapter, call, keep)
    raw = join_rows(_changed(adapter, call, change) if change else raw_images(adapter, call))
    inputs = {**left.inputs, **raw, "input_ids": left.ids, "attention_mask": left.mask}
    return adapter.from_processor(call, inputs, same=change is None)


def features(
    adapter: VisionLanguageAdapter,
    call: Call,
    spec: BranchSpec,
    change: Callable[[Tensor, torch.Generator], Tensor],
) -> Prompt:
    """Transform ``features``: changes the embeddings of the image tokens of each row.

    Features that some models add in later layers are changed too.
    """
    encoded = encode(adapter, join_rows(raw_images(adapter, call)))
    counts = adapter.spans("image", call.request.prompt_ids).sum(1).tolist()
    levels = [level.split(counts) for level in (encoded.features, *encoded.deeper)]
    rows = []
    for row, own in enumerate(zip(*levels, strict=True)):
        draw = call.request.noise.generator(row, "features")
        rows.append([change(states, draw) if len(states) else states for states in own])
    new, *deeper = [torch.cat(level) for level in zip(*rows, strict=True)]
    return feature_prompt(adapter, call, call.request.prompt_mask, new, deeper)


def tokens(
    adapter: VisionLanguageAdapter,
    call: Call,
    spec: BranchSpec,
    select: Callable[[Tensor, Tensor], Tensor],
    heads: Heads = "mean",
) -> Prompt:
    """Transform ``tokens``: keeps the image tokens that ``select`` chooses in each row."""
    encoded = encode(adapter, join_rows(raw_images(adapter, call)), salient=heads)
    assert encoded.salience is not None, "asked for"
    images = adapter.spans("image", call.request.prompt_ids)
    first = 0
    keep, order = call.request.prompt_mask & ~images, []
    for row, count in enumerate(images.sum(1).tolist()):
        if not count:
            continue
        part = slice(first, first + count)
        chosen = select(encoded.features[part], encoded.salience[part])
        positions = images[row].nonzero()[:, 0]
        keep[row, positions[chosen]] = True
        order.append(first + chosen[_runs(positions)[chosen].argsort(stable=True)])
        first += count
    index = torch.cat(order)
    deeper = [level[index] for level in encoded.deeper]
    return feature_prompt(adapter, call, keep, encoded.features[index], deeper)


def tower(
    adapter: VisionLanguageAdapter,
    call: Call,
    spec: BranchSpec,
    edit: Callable[[Tensor, Tensor, int, torch.Generator], Tensor],
    layers: tuple[float, float] = (0.0, 1.0),
) -> Prompt:
    """Transform ``tower``: encodes the images again, with the encoder's attention edited."""
    chosen = frozenset(layer_range(layers, len(adapter.tower_sites())))

    def editing(context: ExitStack, draw: torch.Generator) -> None:
        def edit_with_draws(weights: Tensor, seen: Tensor, layer: int) -> Tensor:
            return edit(weights, seen, layer, draw)

        plan = tower_plan(adapter, edit=edit_with_draws, layers=chosen)
        context.enter_context(planned_tower(adapter, plan))

    return _encoded_again(adapter, call, "tower", editing)


def patches(
    adapter: VisionLanguageAdapter,
    call: Call,
    spec: BranchSpec,
    change: Callable[[Tensor, Tensor, torch.Generator], Tensor],
) -> Prompt:
    """Transform ``patches``: changes the image encoder's states before the projector.

    Args:
        adapter: The model's adapter.
        call: The generation call.
        spec: The branch.
        change: Function ``(states (R, n, H), weights (R, heads, Q, K), draw) -> states``, see the
            module.
    """

    def editing(context: ExitStack, draw: torch.Generator) -> None:
        plan = context.enter_context(planned_tower(adapter, salient_plan(adapter)))

        def changed(states: Tensor) -> Tensor:
            return change(states, torch.cat(plan.chunks()), draw).to(states.dtype)

        context.enter_context(adapter.patches(changed))

    return _encoded_again(adapter, call, "patches", editing)


def _encoded_again(
    adapter: VisionLanguageAdapter,
    call: Call,
    name: str,
    editing: Callable[[ExitStack, torch.Generator], None],
) -> Prompt:
    """Returns the caller's prompt with images encoded again, row by row.

    Args:
        adapter: The model's adapter.
        call: The generation call.
        name: Name of the transform, which is part of the seed of each row's random generator.
        editing: Function of an exit stack and a row's random generator; it enters the contexts in
            which the row's images are encoded.
    """
    parts: list[Encoded] = []
    for row, own in enumerate(raw_images(adapter, call)):
        if own:
            with ExitStack() as context:
                editing(context, call.request.noise.generator(row, name))
                parts.append(encode(adapter, own))
    merged = torch.cat([part.features for part in parts])
    deeper = [torch.cat(level) for level in zip(*(part.deeper for part in parts), strict=True)]
    return feature_prompt(adapter, call, call.request.prompt_mask, merged, deeper)


def _runs(positions: Tensor) -> Tensor:
    """Returns, for each of the ascending positions, the index of its run of consecutive numbers."""
    return (positions.diff(prepend=positions[:1]) > 1).cumsum(0)


def _gather(values: Tensor, order: Tensor) -> Tensor:
    """Selects the columns ``order (B, P')`` of ``values (B, ..., P)``."""
    index = order.reshape(len(order), *[1] * (values.ndim - 2), -1)
    return values.gather(-1, index.expand(*values.shape[:-1], -1))


TRANSFORMS: Mapping[str, Callable[..., Prompt]] = {
    "pixels": pixels,
    "questions": questions,
    "pictures": whole_images,
    "no_image": no_image,
    "only_images": only_images,
    "features": features,
    "tokens": tokens,
    "tower": tower,
    "patches": patches,
}
