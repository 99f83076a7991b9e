"""Backend of `ImageGenerator` for next-scale models: VAR or CoDe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmdecode.engine.noise import request_key
from mmdecode.errors import IncompatibleError, OptionError, ShapeError
from mmdecode.image_ar import next_scale
from mmdecode.image_ar.backends import OnTokens, RoundCounts, SampledImage, Start
from mmdecode.image_ar.completion import Completion, kept_cells
from mmdecode.image_ar.next_scale import Collaborative, Drawing, Known, NextScale
from mmdecode.image_ar.sampling import Sampling


class NextScaleBackend:
    """Samples batches of images with a next-scale model.

    Args:
        model: The model with its tokenizer.
        drawing: Guidance and sampling.
        labels: Class names by number; ``None``: no names.
    """

    def __init__(
        self, model: NextScale, drawing: Drawing, labels: Mapping[int, str] | None = None
    ) -> None:
        self.model, self.drawing, self.labels = model, drawing, labels or {}
        self.guidance, self.sampling = 1 + drawing.guidance, drawing.sampling
        self.classes = model.stages[0].model.config.num_classes
        self.starts = model.tokenizer.starts
        self.tokens = self.starts[-1]
        self.grid = (model.tokenizer.config.patch_nums[-1],) * 2
        self.guarantee = "hybrid of two models" if isinstance(model, Collaborative) else "exact"
        self.stats = RoundCounts()

    def check(self, condition: Any) -> None:
        """Checks that the model has a class.

        Raises:
            OptionError: The class does not exist.
        """
        if not 0 <= condition < self.classes:
            raise OptionError(f"class {condition} does not exist; expected 0 to {self.classes - 1}")

    def started(self, start: Start) -> tuple[Known, Completion]:
        """Encodes the part of an image to keep, for every scale.

        Raises:
            ShapeError: The image is given as codes instead of pixels.
        """
        if not start.image.is_floating_point():
            raise ShapeError(
                f"the image to start from has shape {tuple(start.image.shape)} and holds integers; "
                "a next-scale model takes pixels as floats from 0 to 1, (3, H, W)"
            )
        side = self.model.tokenizer.config.patch_nums[-1]
        keep = kept_cells(start.known, side, side)
        known = Known.of(self.model.tokenizer, start.image[None], keep[None])
        return known, "laid over"

    def sample(
        self,
        conditions: Sequence[int],
        ordinals: Sequence[int],
        seed: int,
        start: tuple[Known, Completion] | None,
        on_tokens: OnTokens | None,
    ) -> list[SampledImage]:
        """Samples a batch; see `RasterBackend.sample`."""
        sizes = [
            after - before for before, after in zip(self.starts, self.starts[1:], strict=False)
        ]
        scale_of = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))

        def on_scale(scale: int, f_hat: Tensor) -> None:
            self.stats.passes += 1
            if on_tokens is not None:
                on_tokens(sizes[scale] * len(conditions))

        output = self.model.generate(
            conditions,
            drawing=self.drawing,
            seed=seed,
            requests=[
                request_key("class", label, ordinal)
                for label, ordinal in zip(conditions, ordinals, strict=True)
            ],
            known=None if start is None else start[0],
            on_scale=on_scale,
        )
        self.stats.calls += 1
        return [
            SampledImage(
                codes=codes,
                tokens=codes,
                commits=scale_of,
                passes=output.passes,
                pixels=partial(self._pixels, latents),
            )
            for codes, latents in zip(output.codes.cpu(), output.f_hat.cpu(), strict=True)
        ]

    @torch.no_grad()
    def _pixels(self, latents: Tensor) -> Tensor:
        """Decodes one image, ``(3, H, W)`` on the CPU, so that it does not depend on its batch."""
        tokenizer = self.model.tokenizer
        return tokenizer.image(latents[None].to(tokenizer.device))[0].cpu()

    def log_likelihood(
        self,
        conditions: Sequence[int],
        tokens: Tensor,
        start: tuple[Known, Completion] | None,
    ) -> list[float]:
        """Returns log-likelihoods of images ``(B, L)``; see `GeneratedImage`.

        Raises:
            IncompatibleError: A part of the image was given.
        """
        if start is not None:
            raise IncompatibleError.between(
                "likelihood",
                "an image to complete",
                "the given part replaces codes that a next-scale model sampled",
                "leave out either",
            )
        codes = tokens.to(self.model.tokenizer.device)
        logits = self.model.score(conditions, codes, drawing=self.drawing)
        heat = [
            self.drawing.sampling_of(scale).temperature
            for scale in range(len(self.starts) - 1)
            for _ in range(self.starts[scale + 1] - self.starts[scale])
        ]
        log_probs = (logits / logits.new_tensor(heat)[:, None]).log_softmax(-1)
        return log_probs.gather(2, codes[..., None])[..., 0].sum(1).tolist()


def drawing_of(
    model: NextScale,
    guidance: float | None,
    sampling: Sampling | None,
    changed: dict[str, Any],
) -> Drawing:
    """Returns the guidance and sampling of a next-scale model; by default the published settings.

    Args:
        model: The model.
        guidance: Guidance scale at the last scale; ``None``: the published one.
        sampling: Sampling settings of all scales; ``None``: the published ones.
        changed: Fields of `Sampling` to replace.

    Raises:
        OptionError: ``guidance`` is below 1.
    """
    base = published_drawing(model)
    if not all(stage.model.config.unconditional for stage in model.stages):
        base = replace(base, guidance=0.0)
    if guidance is not None:
        if not guidance >= 1:
            raise OptionError(
                f"guidance={guidance}; expected 1 (off) or more: next-scale models are guided from "
                "1 at the first scale up to this at the last"
            )
        base = replace(base, guidance=guidance - 1)
    used = base.sampling if sampling is None else sampling
    if isinstance(used, Sampling):
        return replace(base, sampling=replace(used, **changed))
    return replace(base, sampling=tuple(replace(one, **changed) for one in used))


def published_drawing(model: NextScale) -> Drawing:
    """Returns CoDe's published settings for a CoDe model of ten scales, else VAR's."""
    code = next_scale.CODE
    samplings = code.sampling
    assert not isinstance(samplings, Sampling), "one for each scale"
    published = isinstance(model, Collaborative) and model.scales == len(samplings)
    return code if published else next_scale.VAR
