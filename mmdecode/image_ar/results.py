"""What is asked of an `ImageGenerator`, and what it returns: requests and images."""

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
    """One image to draw.

    Attributes:
        index: Its place among those asked for.
        condition: A class, or a prompt.
        ordinal: Its place among those of its condition; it names the noise.
    """

    index: int
    condition: int | str
    ordinal: int


@dataclass(frozen=True, kw_only=True, eq=False)
class GeneratedImage:
    """One image as tokens, and how it came about.

    Attributes:
        index: Its place among those asked for.
        condition: The class, or the prompt.
        label: The class's name; ``None``: it has none.
        ordinal: Its place among those of its condition.
        seed: Of the noise.
        law: ``exact``: of the model; ``heuristic``: of a relaxed rule, which changes it; ``hybrid
            of two models``: of CoDe; ``locally constrained``: of an exact rule, where given codes
            ahead, or a part that was laid over, were not told of.
        completion: Of an image of which a part was given: ``continued``, by the model's law behind
            what was given; ``locally constrained`` and ``laid over`` follow no law of the model,
            see `mmdecode.image_ar.completion`.
        codes: Of the image tokenizer, ``(rows, columns)``; of next-scale models those of all
            scales, ``(L,)``.
        tokens: As generated, forced ones included.
        commits: The pass in which each of ``codes`` was decided; 0: with the prompt, -1: given. Of
            next-scale models the scale.
        passes: Scoring passes after the prompt was read.
        seconds: Of its batch without pixels, over the batch's size.
        log_likelihood: Of the drawn codes in nats, under the guided law at the temperature, before
            top-k and top-p; ``None``: not asked for.
        error: What was wrong, what was expected and what to do; ``None``: nothing was.
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
        """Float32 from 0 to 1, ``(3, H, W)``.

        Raises:
            InputError: The image could not be drawn.
            IncompatibleError: What turns codes into pixels is not at hand.
        """
        if self._pixels is None:
            raise InputError(self.error or "this image was not drawn")
        return self._pixels()

    @cached_property
    def image(self) -> Image:
        """As a PIL image; see `pixels`.

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
    """What an image is called in the note of what is being drawn."""
    return f"{image.condition} {image.ordinal}"
