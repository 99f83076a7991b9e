"""Image tokens: our loop against a plain loop with a static cache. A part of real_sizes.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import size_models as models
import torch
from size_rows import Clock, Pair, Row, paths_of, row
from torch import Tensor
from transformers import StaticCache

from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.image_ar import raster
from mmdecode.image_ar.loading import load
from mmdecode.image_ar.sampling import Sampling, guided

WINDOW = 16
LENGTHS = (1.5, 2.0, 3.0)
"""Tokens a pass for which it is stated how much of the saved passes is left."""
ZOO = ("zoo:llamagen-digits", "zoo:llamagen-scenes", "zoo:llamagen-scenes-small")
BY_CAPTION = "zoo:llamagen-scenes-text"
"""Its conditions are features of captions, which the plain loop does not read."""


@torch.no_grad()
def plain(adapter: Any, classes: Sequence[int], do_sample: bool) -> Tensor:
    """Codes of one image for each class, ``(B, n)``, by a loop over one token at a time."""
    model, layout = adapter.model, adapter.layout
    sampling, scale = Sampling(**adapter.preset.sampling), adapter.preset.guidance
    wanted = torch.tensor(list(classes))
    hidden = model.embed_condition(torch.cat([wanted, model.unconditional(wanted)]))
    inputs, slots = {"inputs_embeds": hidden}, hidden.shape[1]
    cache = StaticCache(config=model.config, max_cache_len=slots + layout.length)
    position, codes = torch.arange(slots)[None], []
    for _ in range(layout.length):
        logits = model(**inputs, position_ids=position, past_key_values=cache).logits[:, -1]
        scores = guided(*logits.float().chunk(2), scale)
        if do_sample:
            code = torch.multinomial(sampling.warp(scores).softmax(-1), 1)
        else:
            code = scores.argmax(-1, keepdim=True)
        codes.append(code)
        inputs, position = {"input_ids": code.repeat(2, 1)}, position[:, -1:] + 1
    return torch.cat(codes, 1)


def ours(adapter: Any, classes: Sequence[int], do_sample: bool, decoder: Decoder) -> Tensor:
    """The same by our loop."""
    found = raster.generate(
        adapter.model,
        decoder=decoder,
        adapter=adapter,
        do_sample=do_sample,
        seed=0,
        classes=list(classes),
    )
    return found.codes.flatten(1)


def left(cost: float, length: float) -> float:
    """Share of the saved passes that is saved in time.

    Args:
        cost: Cost of a pass over a window, in passes over one token.
        length: Tokens committed a pass.
    """
    return (1 - cost / length) / (1 - 1 / length)


def compared(
    name: str, note: str, adapter: Any, batch: int, do_sample: bool, repeats: int, window: bool
) -> Iterator[Row]:
    """Undrafted against the plain loop, and a pass over a window against one over a token."""
    classes = [row % adapter.model.config.num_classes for row in range(batch)]
    decoders = {"undrafted": Decoder()}
    if window:
        decoders["window"] = Decoder(f"jacobi:window={WINDOW}", accept="rejection")
    calls: dict[str, Callable[[], Tensor]] = {"plain": partial(plain, adapter, classes, do_sample)}
    for way, decoder in decoders.items():
        calls[way] = partial(ours, adapter, classes, do_sample, decoder)
    clock = Clock(adapter.model.model.layers[0])
    pair = Pair(calls, repeats, clock, lambda: [d.stats.reset() for d in decoders.values()])
    how = "sampled" if do_sample else "greedy"
    what = f"{note}, guidance {adapter.preset.guidance:g}, {how}, batch {batch}"
    make: Callable[..., Row] = partial(row, "images", name, what)
    yield make(
        **pair.between("undrafted", "plain"),
        measure=f"undrafted pass, {adapter.layout.length} tokens",
        reference="a plain loop, static cache",
        bar=1.0,
        expects=["step unmasked"],
        paths=paths_of(decoders["undrafted"]),
        same_ids=None if do_sample else pair.same("undrafted", "plain"),
    )
    if not window:
        return
    spent = pair.between("window", "undrafted")
    shares = ", ".join(f"{left(spent['ratio'], n):.0%} at {n:g} tokens a pass" for n in LENGTHS)
    yield make(
        **spent,
        measure=f"pass over a Jacobi window of {WINDOW}",
        reference="a pass over one token",
        paths=paths_of(decoders["window"]),
        note=f"so many tokens a pass cost as much as no window; of the passes saved is left: "
        f"{shares}",
    )


def images(
    tiny: bool,
    repeats: int,
    batches: Sequence[int] = (1, 4),
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    grid: int = 24,
) -> Iterator[Row]:
    """Rows of LlamaGen-B's shape: sampled, and one greedy row for the ids.

    The first batch alone is run in other dtypes than float32.
    """
    for dtype in dtypes:
        model = models.llamagen(tiny, grid, getattr(torch, dtype))
        adapter, config = registry.image_adapter_for(model), model.config
        note = (
            f"LlamaGen, {config.num_hidden_layers} layers of width {config.hidden_size}, "
            f"V = {config.vocab_size:,}, {dtype}"
        )
        for batch in batches if dtype == "float32" else batches[:1]:
            if dtype == "float32" and batch == batches[0]:
                yield from compared(
                    "LlamaGen-B's shape", note, adapter, batch, False, repeats, False
                )
            yield from compared("LlamaGen-B's shape", note, adapter, batch, True, repeats, True)
    yield row(
        "images",
        "LlamaGen-B's shape",
        "int8",
        measure=f"pass over a Jacobi window of {WINDOW}",
        note="not implemented: weights of 8 bits",
    )


def zoo(repeats: int, batches: Sequence[int] = (1, 8), only: str | None = None) -> Iterator[Row]:
    """Undrafted loops of the shipped image models, by name if ``only`` is in it."""
    for name in (*ZOO, BY_CAPTION):
        if only is not None and only.lower() not in name:
            continue
        if name == BY_CAPTION:
            yield row("host", name, "undrafted", note="the plain loop reads classes, no captions")
            continue
        adapter = load(name, "cpu").adapter
        for batch in batches:
            for found in compared(name, name, adapter, batch, False, repeats, False):
                yield found | {"part": "host"}
