"""START HERE for images in raster order: `generate`.

``mmdecode.generate(model, mode="image", ...)`` calls it. It finds the model's adapter, turns the
conditions into model inputs, and runs the same decoder as for text, with the same drafters and
acceptance rules. Logits processors mask tokens that are no image codes and apply the sampling
settings.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.engine.trace import Round
from mmdecode.errors import IncompatibleError, refuse_unknown
from mmdecode.guide.guidance import Guidance
from mmdecode.image_ar.grammar import Grammar, Warp
from mmdecode.image_ar.sampling import Sampling


@dataclass(frozen=True, eq=False)
class ImageTokens:
    """Result of `generate`: whole images as tokens.

    Attributes:
        tokens: Generated tokens, forced ones included, ``(B, layout.length)``.
        codes: Codes of the image tokenizer, ``(B, rows, columns)``.
        adapter: Adapter of the model.
    """

    tokens: Tensor
    codes: Tensor
    adapter: Any

    def pixels(self) -> Tensor:
        """Decodes the codes to pixels, float32 from 0 to 1, ``(B, 3, H, W)``.

        Raises:
            IncompatibleError: The adapter has no decoder from codes to pixels.
        """
        return self.adapter.decode(self.codes)


@torch.no_grad()
def generate(
    model: Any,
    *,
    decoder: Decoder | None = None,
    adapter: Any = None,
    guidance: float | Guidance | None = None,
    sampling: Sampling | None = None,
    do_sample: bool = True,
    seed: int | None = None,
    request: Sequence[Any] | None = None,
    streamer: Any = None,
    trace: list[list[Round]] | None = None,
    **given: Any,
) -> ImageTokens:
    """Generates one image per row.

    Args:
        model: A model that `mmdecode.registry.image_adapter_for` supports.
        decoder: The decoder; ``None``: a decoder without a drafter.
        adapter: Adapter of the model; ``None``: the registered adapter of its type.
        guidance: Classifier-free guidance scale s of ``u + s (c - u)``, or a `Guidance`; ``None``:
            the decoder's guide, else the model family's published scale. 1 is neutral and does not
            run the unconditional branch.
        sampling: Sampling settings; ``None``: the model family's published settings.
        do_sample: Whether to sample; ``False``: greedy decoding.
        seed: Seed of the sampling noise; ``None``: the decoder's.
        request: One key per row, which seeds its noise; ``None``: the row's condition and its
            ordinal among equal conditions, so that an image does not depend on its batch.
        streamer: Streamer of tokens, for a batch of one row.
        trace: A list to which the rounds of every image are appended.
        **given: Conditions of the images, see the adapter's ``condition``; and, without
            ``adapter``, its options, such as ``vq`` or ``grid``.

    Raises:
        OptionError: The model does not support a condition or an option.
        IncompatibleError: Both ``guidance`` and a decoder's guide are given, or the model has no
            unconditional input.
    """
    decoder = decoder or Decoder()
    if adapter is None:
        takes = inspect.signature(registry.image_adapter_class(model)).parameters
        options = {name: given.pop(name) for name in list(given) if name in takes}
        adapter = registry.image_adapter_for(model, **options)
    refuse_unknown(given, list(inspect.signature(adapter.condition).parameters))
    inputs = adapter.condition(**given)
    guide = guide_of(decoder, guidance, adapter.preset.guidance)
    warp = Warp(sampling or Sampling(**adapter.preset.sampling))
    seed = decoder.seed if seed is None else seed
    decoder = replace(decoder, guide=guide, seed=seed)
    names = adapter.row_names(inputs)
    layout = adapter.layout
    processors = LogitsProcessorList()
    if layout.binds(adapter.vocab):
        processors.append(Grammar(layout))
    if do_sample:
        processors.append(warp)
    tokens = decoder(
        model,
        torch.empty((len(names), 0), dtype=torch.long, device=model.device),
        logits_processor=processors,
        stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(layout.length)]),
        generation_config=GenerationConfig(max_length=layout.length, do_sample=do_sample),
        mm_adapter=adapter,
        mm_request=ordinals(names) if request is None else request,
        mm_streamer=streamer,
        mm_trace=trace,
        **inputs,
    )
    return ImageTokens(tokens=tokens, codes=layout.codes(tokens), adapter=adapter)


def guide_of(decoder: Decoder, guidance: float | Guidance | None, published: float) -> Any:
    """Returns the decoder's guide, else classifier-free guidance.

    Args:
        decoder: The decoder.
        guidance: Guidance, or its scale; ``None``: ``published``.
        published: Published scale of the model family.

    Raises:
        IncompatibleError: Both ``guidance`` and a decoder's guide are given.
    """
    if decoder.guide is None:
        scale = published if guidance is None else guidance
        return scale if isinstance(scale, Guidance) else Guidance(scale)
    if guidance is not None:
        raise IncompatibleError.between(
            f"guidance={guidance!r}",
            f"guide {type(decoder.guide).__name__}",
            "each would set the distribution",
            "leave out either",
        )
    return decoder.guide


def ordinals(names: Sequence[bytes]) -> list[bytes]:
    """Appends to each name its ordinal among equal names."""
    seen: Counter[bytes] = Counter()
    found = []
    for name in names:
        found.append(b"%d %s" % (seen[name], name))
        seen[name] += 1
    return found
