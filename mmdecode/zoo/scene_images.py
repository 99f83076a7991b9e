"""Training images of the zoo's image generators: rendered scenes with one large object.

The zoo is the set of tiny trained models in this package; the scenes of its vision models are
rendered by `mmdecode.zoo.scenes`. In the scenes of this module one object is large and determines
the class of the image, and noise is low enough for an image tokenizer to reconstruct the objects.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmdecode.zoo.scenes import (
    COMPANIONS,
    HELD_OUT,
    NOUNS,
    SIDE,
    Difficulty,
    Scene,
    Thing,
    draw_thing,
    render,
    visible_shares,
)

CORPUS_SEED, CORPUS_IMAGES = 2**32, 40000
"""First seed and number of the images that image transformers are trained on; image tokenizers are
trained on lower seeds."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Distribution of an image's objects, noise and clutter.

    Attributes:
        main: Ranges of the large object's size and opacity, and of the image's noise and clutter.
        sizes: Minimum and maximum side of the small objects, in pixels.
        counts: Sampling weights of zero, one and two small objects.
        reach: Maximum horizontal and vertical distance of the large object's centre from the
            image's centre, in pixels; ``None``: any position inside the image.
        textured: Whether objects have textures, which image codes for 4 x 4 pixels hardly preserve.
    """

    main: Difficulty
    sizes: tuple[int, int]
    counts: tuple[int, int, int]
    reach: int | None
    textured: bool


_NOISE: Any = {"noise": (0.01, 0.05), "clutter": 2, "opacity": (0.9, 1.0)}
PORTRAIT = Layout(
    main=Difficulty(sizes=(36, 46), **_NOISE),
    sizes=(14, 20),
    counts=(6, 3, 1),
    reach=5,
    textured=False,
)
SCATTERED = Layout(
    main=Difficulty(sizes=(28, 40), **_NOISE),
    sizes=(16, 24),
    counts=(5, 4, 2),
    reach=None,
    textured=True,
)
SEEN = 0.5  # minimum visible share of any object


def image_scene(seed: int, layout: Layout = PORTRAIT) -> Scene:
    """Samples a scene with one large object, which gives its class, and up to two small objects.

    The large object's noun is uniformly distributed; it is painted last. Half of the small objects
    are the noun that `COMPANIONS` pairs with it.

    Args:
        seed: Seed of the scene, a non-negative integer; from `HELD_OUT` on, scenes are never
            trained on.
        layout: `PORTRAIT` has the large object in the middle, to train image generators;
            `SCATTERED` has textures and any positions, to train image tokenizers.
    """
    rng = random.Random(f"picture/{seed}")
    held_out = seed >= HELD_OUT
    main = draw_thing(rng, rng.choice(NOUNS), layout.main, held_out=held_out)
    things = [replace(main, centre=_placed(rng, main, layout.reach))]
    small = replace(layout.main, sizes=layout.sizes)
    for _ in range(rng.choices((0, 1, 2), layout.counts)[0]):
        name = COMPANIONS[main.name] if rng.random() < 0.5 else rng.choice(NOUNS)
        other = draw_thing(rng, name, small, held_out=held_out)
        for _ in range(8):
            tried = [replace(other, centre=_placed(rng, other)), *things]
            if min(visible_shares(tried)) >= SEEN:
                things = tried
                break
    shares = visible_shares(things)
    if not layout.textured:
        things = [replace(thing, texture="plain") for thing in things]
    return Scene(
        seed=seed,
        things=tuple(replace(t, visible=s) for t, s in zip(things, shares, strict=True)),
        noise=round(rng.uniform(*layout.main.noise), 3),
        clutter=rng.randint(0, layout.main.clutter),
    )


def _placed(rng: random.Random, thing: Thing, reach: int | None = None) -> tuple[int, int]:
    """Samples the centre of an object: anywhere, or within ``reach`` pixels of the middle."""
    low, high = thing.size // 2, SIDE - (thing.size + 1) // 2
    if reach is not None:
        low, high = max(low, SIDE // 2 - reach), min(high, SIDE // 2 + reach)
    return rng.randint(low, high), rng.randint(low, high)


def class_of(scene: Scene) -> int:
    """Returns the class of a scene: the index of its large object's noun in `NOUNS`."""
    return NOUNS.index(scene.things[-1].name)


def rendered_images(seeds: Sequence[int], layout: Layout = PORTRAIT) -> np.ndarray:
    """Renders the image of each seed, ``(B, SIDE, SIDE, 3)`` uint8; see `image_scene`."""
    return labelled_images(seeds, layout)[1]


def labelled_images(
    seeds: Sequence[int], layout: Layout = PORTRAIT
) -> tuple[list[int], np.ndarray]:
    """Returns the class and the image of each seed; images are ``(B, SIDE, SIDE, 3)`` uint8."""
    scenes = [image_scene(seed, layout) for seed in seeds]
    return [class_of(scene) for scene in scenes], np.stack([render(scene) for scene in scenes])


def to_pixels(images: np.ndarray) -> Tensor:
    """Converts images ``(B, H, W, 3)`` uint8 to ``(B, 3, H, W)`` float from -1 to 1."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous().float() / 127.5 - 1
