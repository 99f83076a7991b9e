"""Requests for an `ImageGenerator`, and the images that it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmdecode.errors import InputError, MissingExtraError
from mmdecode.image_ar.completion import Completion

if TYPE_CHECKING:
    from collections.abc import Callable

    from PIL.Image import Image


@dataclass(frozen=True, kw_only=True)
class ImageRequest:
    """One image to generate.

    Attributes:
        index: Index of the request among all requests.
        condition: A class number, or a prompt.
        ordinal: Index among the requests of the same condition; it seeds the sampling noise,
            together with condition and seed.
    """

    index: int
    condition: int | str
    ordinal: int


@dataclass(frozen=True, kw_only=True, eq=False)
class GeneratedImage:
    """One image as tokens, and how it was generated.

    Attributes:
        index: Index of the request among all requests.
        condition: The class number, or the prompt.
        label: Name of the class; ``None``: unknown, or a prompt was given.
        ordinal: Index among the images of the same condition.
        seed: Seed of the sampling noise.
        guarantee: ``exact``: sampled from the model's distribution; ``heuristic``: lossy decoding
            changes the distribution; ``hybrid of two models``: CoDe; ``locally constrained``: the
            decoding is exact, but codes do not depend on given codes after them.
        completion: How a partly given image was completed. ``continued``: the first codes were
            given, and the rest was sampled exactly; ``locally constrained`` and ``laid over``: the
            result does not have the model's conditional distribution, see
            `mmdecode.image_ar.completion`; ``None``: no part was given.
        codes: Codes of the image tokenizer, ``(rows, columns)``; for next-scale models the codes of
            all scales, ``(L,)``.
        tokens: The generated tokens, with forced tokens such as newlines.
        commits: Index of the pass in which each of ``codes`` was decided; 0: prefill, -1: given.
            For next-scale models, the index of the scale.
        passes: Forward passes of the model, without the prefill.
        seconds: Seconds of its batch without decoding pixels, divided by the batch size.
        log_likelihood: Log-likelihood of the sampled codes in nats, by the guided logits divided by
            the temperature, before top-k and top-p; ``None``: not requested.
        error: The problem, the expected input and how to fix it; ``None``: no error.
        kind: Name of the error's class; ``None``: no error.
    """

    index: int
    condition: int | str
    label: str | None = None
    ordinal: int
    seed: int
    guarantee: str
    completion: Completion | None = None
    codes: Tensor = field(default_factory=lambda: torch.empty(0), repr=False)
    tokens: Tensor = field(default_factory=lambda: torch.empty(0), repr=False)
    commits: Tensor = field(default_factory=lambda: torch.empty(0), repr=False)
    passes: int = 0
    seconds: float = 0.0
    log_likelihood: float | None = None
    error: str | None = None
    kind: str | None = None
    _pixels: Callable[[], Tensor] | None = field(default=None, repr=False)

    def pixels(self) -> Tensor:
        """Decodes the codes to pixels, float32 from 0 to 1, ``(3, H, W)``.

        Raises:
            InputError: The image could not be generated.
            IncompatibleError: No decoder of the image tokenizer was loaded.
        """
        if self._pixels is None:
            raise InputError(self.error or "this image was not generated")
        return self._pixels()

    @cached_property
    def image(self) -> Image:
        """The image as a PIL image; see `pixels`.

        Raises:
            MissingExtraError: Pillow is not installed.
        """
        with MissingExtraError.instead("images need Pillow", extra="image"):
            from PIL import Image
        values = (self.pixels() * 255).round().to(torch.uint8)
        return Image.fromarray(values.permute(1, 2, 0).contiguous().cpu().numpy())


def request_name(image: ImageRequest | GeneratedImage) -> str:
    """Returns the name of an image in the file of images in progress: condition and ordinal."""
    return f"{image.condition} {image.ordinal}"
