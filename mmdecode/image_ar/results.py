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
        index: Its index among the requests.
        condition: A class, or a prompt.
        ordinal: Its index among the requests of its condition; it keys the noise.
    """

    index: int
    condition: int | str
    ordinal: int


@dataclass(frozen=True, kw_only=True, eq=False)
class GeneratedImage:
    """One image as tokens, and how it was generated.

    Attributes:
        index: Its index among the requests.
        condition: The class, or the prompt.
        label: The class's name; ``None``: it has none.
        ordinal: Its index among the images of its condition.
        seed: Seed of the noise.
        guarantee: ``exact``: sampled from the target distribution; ``heuristic``: a relaxed rule
            changes the distribution; ``hybrid of two models``: CoDe; ``locally constrained``: an
            exact rule, but codes do not depend on given ones after them.
        completion: How an image with a given part was completed. ``continued``: exactly, after the
            given codes; ``locally constrained`` and ``laid over`` are no samples of the model, see
            `mmdecode.image_ar.completion`; ``None``: nothing was given.
        codes: Codes of the image tokenizer, ``(rows, columns)``; for next-scale models those of all
            scales, ``(L,)``.
        tokens: The generated tokens, forced ones included.
        commits: The pass in which each of ``codes`` was decided; 0: prefill, -1: given. For
            next-scale models, the scale.
        passes: Scoring passes after prefill.
        seconds: Seconds of its batch without decoding pixels, divided by the batch size.
        log_likelihood: Log-likelihood of the sampled codes in nats, under the guided distribution
            at the temperature, before top-k and top-p; ``None``: not requested.
        error: The problem, what was expected and what to do; ``None``: no error.
        kind: Name of the error's class.
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
        """Pixels, float32 from 0 to 1, ``(3, H, W)``.

        Raises:
            InputError: The image could not be generated.
            IncompatibleError: The decoder of the image tokenizer was not given.
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
        try:
            from PIL import Image
        except ImportError as error:
            raise MissingExtraError("images need Pillow", extra="image") from error
        values = (self.pixels() * 255).round().to(torch.uint8)
        return Image.fromarray(values.permute(1, 2, 0).contiguous().cpu().numpy())


def request_name(image: ImageRequest | GeneratedImage) -> str:
    """Name of an image in the record of images in progress."""
    return f"{image.condition} {image.ordinal}"
