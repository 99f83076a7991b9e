"""Renderer of synthetic scenes, images of 64 x 64 pixels, for the zoo's vision models.

The zoo is the set of tiny trained models in this package. A scene has a few objects (eighteen
shapes, and scanned handwritten digits) in eight colours and four textures on a muted background,
with clutter, overlaps and noise. Co-occurrence is skewed on purpose: some nouns are more frequent,
and nouns of one group occur together, above all a noun and its companion (`COMPANIONS`). This
tempts a model with weak vision to answer from its language prior.

The same seed gives the same scene on every machine: layouts are sampled with ``random.Random``, and
noise from the raw output of numpy's PCG64 generator; the output of both is stable across versions.
Scenes of seeds from `HELD_OUT` on are never trained on, and their digits are from separate scans.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

SIDE = 64
HELD_OUT = 2**40
DIGITS_FILE = Path(__file__).parent / "data" / "digits.npz"

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.88, 0.12, 0.12),
    "green": (0.10, 0.68, 0.18),
    "blue": (0.15, 0.28, 0.92),
    "yellow": (0.96, 0.90, 0.12),
    "orange": (0.97, 0.55, 0.08),
    "purple": (0.58, 0.15, 0.75),
    "white": (0.98, 0.98, 0.98),
    "black": (0.04, 0.04, 0.04),
}
TEXTURES = ("plain", "striped", "dotted", "checkered")
TURNS = (-12, 0, 12)
GROUPS: dict[str, tuple[str, ...]] = {
    "garden": ("house", "tree", "flower", "umbrella"),
    "sea": ("boat", "fish", "moon", "star"),
    "table": ("cup", "key", "heart", "ring"),
    "forms": ("circle", "square", "triangle", "diamond", "cross", "arrow"),
    "numbers": tuple(
        f"digit {name}"
        for name in ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    ),
}
GROUP_WEIGHTS = (4, 3, 2, 3, 3)
NOUNS = tuple(noun for group in GROUPS.values() for noun in group)
COMPANIONS = {
    noun: group[i + 1 - 2 * (i % 2)] for group in GROUPS.values() for i, noun in enumerate(group)
}


@dataclass(frozen=True, kw_only=True)
class Difficulty:
    """Ranges of a scene's visual properties; training and test scenes have the same ranges.

    Attributes:
        sizes: Minimum and maximum side of an object, in pixels.
        opacity: Minimum and maximum opacity of an object over the background.
        noise: Minimum and maximum standard deviation of the pixel noise, for pixels from 0 to 1.
        clutter: Maximum number of strokes behind and in front of the objects.
        seen: Minimum visible share of an object.
    """

    sizes: tuple[int, int] = (14, 26)
    opacity: tuple[float, float] = (0.6, 1.0)
    noise: tuple[float, float] = (0.04, 0.18)
    clutter: int = 6
    seen: float = 0.55


DIFFICULTY = Difficulty()


@dataclass(frozen=True, kw_only=True)
class Thing:
    """An object of a scene.

    Attributes:
        name: One of `NOUNS`.
        colour: One of `COLOURS`.
        texture: One of `TEXTURES`.
        size: Side of its square box, in pixels.
        centre: Column and row of the box's centre.
        turn: Rotation in degrees, one of `TURNS`; digits are not rotated.
        opacity: Opacity over the background.
        scan: Index of the scan for a digit, see `digit_scans`; -1 for shapes.
        visible: Share of the object's pixels that objects painted later leave visible.
    """

    name: str
    colour: str
    texture: str
    size: int
    centre: tuple[int, int]
    turn: int = 0
    opacity: float = 1.0
    scan: int = -1
    visible: float = 1.0

    @property
    def box(self) -> tuple[slice, slice]:
        """Slices of the rows and columns of the object's box in the image."""
        column, row = (c - self.size // 2 for c in self.centre)
        return slice(row, row + self.size), slice(column, column + self.size)

    def mask(self) -> np.ndarray:
        """Returns how much of each pixel of the box is covered, ``(size, size)``, 0 to 1."""
        if self.scan >= 0:
            return _digit_mask(self.scan, self.size)
        return _shape_mask(self.name, self.size, self.turn)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Objects and rendering settings of an image; see `render`.

    Attributes:
        seed: Seed of background, clutter and noise.
        things: Objects in the order in which they are painted.
        noise: Standard deviation of the pixel noise, for pixels from 0 to 1.
        clutter: Number of strokes behind and in front of the objects.
    """

    seed: int
    things: tuple[Thing, ...]
    noise: float
    clutter: int

    @property
    def names(self) -> tuple[str, ...]:
        """The scene's different nouns, in painting order."""
        return tuple(dict.fromkeys(thing.name for thing in self.things))

    def count(self, name: str) -> int:
        """Returns the number of objects with the noun ``name``."""
        return sum(thing.name == name for thing in self.things)


def draw_scene(seed: int, difficulty: Difficulty = DIFFICULTY) -> Scene:
    """Samples a scene of up to five objects, placed so that each stays mostly visible.

    Args:
        seed: Seed of the scene, a non-negative integer; from `HELD_OUT` on, scenes are never
            trained on.
        difficulty: Ranges of sizes, opacity, noise and clutter.
    """
    rng = random.Random(seed)
    things: list[Thing] = []
    for name in _draw_names(rng):
        thing = draw_thing(rng, name, difficulty, held_out=seed >= HELD_OUT)
        for _ in range(12):
            tried = [*things, replace(thing, centre=_draw_centre(rng, thing, things))]
            if min(visible_shares(tried)) >= difficulty.seen:
                things = tried
                break
    shares = visible_shares(things)
    return Scene(
        seed=seed,
        things=tuple(replace(t, visible=s) for t, s in zip(things, shares, strict=True)),
        noise=round(rng.uniform(*difficulty.noise), 3),
        clutter=rng.randint(0, difficulty.clutter),
    )


def _draw_names(rng: random.Random) -> list[str]:
    """Samples 2 to 5 nouns, many of them from one group or companions, some of them repeated."""
    group = rng.choices(tuple(GROUPS.values()), GROUP_WEIGHTS)[0]
    names = [_popular(rng, group)]
    count = rng.choices((2, 3, 4, 5), (3, 5, 5, 3))[0]
    while len(names) < count:
        kind = rng.random()
        if kind < 0.1:
            name, most = rng.choice(names), 3
        elif kind < 0.5:
            name, most = COMPANIONS[rng.choice(names)], 1
        elif kind < 0.75:
            name, most = _popular(rng, group), 1
        else:
            name, most = _popular(rng, GROUPS[rng.choice(tuple(GROUPS))]), 1
        if names.count(name) < most:
            names.append(name)
    return names


def _popular(rng: random.Random, group: Sequence[str]) -> str:
    return rng.choices(group, [1 / (rank + 2) for rank in range(len(group))])[0]


def draw_thing(
    rng: random.Random, name: str, difficulty: Difficulty = DIFFICULTY, *, held_out: bool = False
) -> Thing:
    """Samples an object's appearance and puts it in the middle of the image.

    Args:
        rng: Random generator.
        name: One of `NOUNS`.
        difficulty: Ranges of size and opacity.
        held_out: Whether digits are taken from the held-out scans.
    """
    scan = -1
    if name in GROUPS["numbers"]:
        scan = rng.choice(_scans_of(GROUPS["numbers"].index(name), held_out))
    return Thing(
        name=name,
        colour=rng.choice(tuple(COLOURS)),
        texture="plain" if scan >= 0 else rng.choices(TEXTURES, (4, 2, 1, 1))[0],
        size=rng.randint(*difficulty.sizes),
        centre=(SIDE // 2, SIDE // 2),
        turn=rng.choice(TURNS),
        opacity=round(rng.uniform(*difficulty.opacity), 2),
        scan=scan,
    )


def _draw_centre(rng: random.Random, thing: Thing, things: Sequence[Thing]) -> tuple[int, int]:
    """Samples an object's centre; in one of five cases directly above an earlier object."""
    low, high = thing.size // 2, SIDE - (thing.size + 1) // 2
    if things and rng.random() < 0.2:
        below = rng.choice(things)
        column = min(max(below.centre[0] + rng.randint(-2, 2), low), high)
        row = below.box[0].start - (thing.size - thing.size // 2)
        if row >= low:
            return column, row
    return rng.randint(low, high), rng.randint(low, high)


def visible_shares(things: Sequence[Thing]) -> list[float]:
    """Returns the share of each object's pixels that objects painted later leave visible."""
    owners = owner_map(things)
    counts = np.bincount(owners.ravel() + 1, minlength=len(things) + 1)[1:]
    return [
        round(float(count / (thing.mask() > 0.5).sum()), 3)
        for count, thing in zip(counts, things, strict=True)
    ]


def owner_map(things: Sequence[Thing]) -> np.ndarray:
    """Returns the index of the visible object at each pixel, ``(SIDE, SIDE)``; -1: background."""
    owners = np.full((SIDE, SIDE), -1, dtype=np.int8)
    for index, thing in enumerate(things):
        owners[thing.box][thing.mask() > 0.5] = index
    return owners


Relation = str  # "left", "right", "above", "below", "on" or "under"
OPPOSITE = {"left": "right", "above": "below", "on": "under"}
OPPOSITE |= {b: a for a, b in OPPOSITE.items()}


def relation(thing: Thing, other: Thing) -> Relation | None:
    """Returns the position of ``thing`` relative to ``other``; ``None`` if it is ambiguous.

    It is ambiguous if the centres are too close, or if neither the horizontal nor the vertical
    distance of the centres is at least 1.7 times the other distance. Objects that touch vertically
    are "on" and "under" each other; vertically separated objects are "above" and "below".
    """
    across = thing.centre[0] - other.centre[0]
    down = thing.centre[1] - other.centre[1]
    apart = (thing.size + other.size) / 2
    if max(abs(across), abs(down)) < apart / 2:
        return None
    if abs(across) >= 1.7 * abs(down):
        return "left" if across < 0 else "right"
    if abs(down) >= 1.7 * abs(across):
        touching = abs(across) <= apart / 3 and abs(abs(down) - apart) <= 1.5
        return ("on" if down < 0 else "under") if touching else ("above" if down < 0 else "below")
    return None


def render(scene: Scene) -> np.ndarray:
    """Renders a scene, ``(SIDE, SIDE, 3)`` uint8."""
    rng = random.Random(scene.seed ^ 0x5CE7E)
    pixels = _background(rng)
    for index in range(scene.clutter):
        if index % 3:
            _stroke(pixels, rng)
    for thing in scene.things:
        mask = thing.mask()[..., None] * thing.opacity
        paint = np.array(COLOURS[thing.colour], dtype=np.float32) + rng.uniform(-0.06, 0.06)
        patch = pixels[thing.box]
        patch += mask * (paint * _texture(thing.texture, thing.size)[..., None] - patch)
    for index in range(scene.clutter):
        if not index % 3:
            _stroke(pixels, rng)
    pixels += np.float32(scene.noise) * _noise(scene.seed)
    return (pixels.clip(0, 1) * 255 + 0.5).astype(np.uint8)


def _background(rng: random.Random) -> np.ndarray:
    """Returns a background of a muted colour with a linear gradient, ``(SIDE, SIDE, 3)``."""
    grey = rng.uniform(0.3, 0.7)
    base = np.array([grey + rng.uniform(-0.08, 0.08) for _ in range(3)], dtype=np.float32)
    slope = np.linspace(-0.5, 0.5, SIDE, dtype=np.float32)
    across, down = rng.uniform(-0.2, 0.2), rng.uniform(-0.2, 0.2)
    return base + (across * slope[None, :] + down * slope[:, None])[..., None].astype(np.float32)


def _stroke(pixels: np.ndarray, rng: random.Random) -> None:
    """Paints a short line of a random colour, one pixel wide, in place."""
    length = rng.randint(4, 12)
    angle = rng.uniform(0, math.pi)
    column, row = rng.uniform(0, SIDE - 1), rng.uniform(0, SIDE - 1)
    steps = np.arange(length)
    columns = (column + steps * math.cos(angle)).astype(int).clip(0, SIDE - 1)
    rows = (row + steps * math.sin(angle)).astype(int).clip(0, SIDE - 1)
    paint = np.array(rng.choice(tuple(COLOURS.values())), dtype=np.float32)
    pixels[rows, columns] = 0.4 * pixels[rows, columns] + 0.6 * paint


def _noise(seed: int) -> np.ndarray:
    """Returns nearly normal noise of unit variance (sums of 4 bytes), ``(SIDE, SIDE, 3)``."""
    words = np.random.PCG64(seed).random_raw(SIDE * SIDE * 3 // 2)
    parts = words.astype("<u8", copy=False).view(np.uint8).reshape(4, SIDE, SIDE, 3)
    total = parts.sum(axis=0, dtype=np.int16).astype(np.float32)
    return (total - 510.0) / np.float32(math.sqrt(4 * (256**2 - 1) / 12))


@cache
def _texture(name: str, size: int) -> np.ndarray:
    """Returns a texture as brightness factors 0.5 or 1, ``(size, size)`` float32."""
    rows, columns = np.mgrid[:size, :size]
    dark = {
        "plain": np.zeros((size, size), dtype=bool),
        "striped": (rows + columns) % 6 < 3,
        "dotted": (rows % 5 < 2) & (columns % 5 < 2),
        "checkered": (rows // 4 + columns // 4) % 2 == 0,
    }[name]
    return np.where(dark, np.float32(0.5), np.float32(1.0))


@cache
def _shape_mask(name: str, size: int, turn: int) -> np.ndarray:
    """Renders a shape as the coverage of each pixel of its box, from 4 x 4 samples per pixel."""
    ticks = (np.arange(size * 4) + 0.5) / (size * 2) - 1
    x, y = np.meshgrid(ticks, ticks)
    angle = math.radians(turn)
    along, down = (
        x * math.cos(angle) + y * math.sin(angle),
        y * math.cos(angle) - x * math.sin(angle),
    )
    inside = _SHAPES[name](along, down).astype(np.float32)
    return inside.reshape(size, 4, size, 4).mean(axis=(1, 3))


@cache
def digit_scans() -> tuple[np.ndarray, np.ndarray]:
    """Returns scanned digits, ``(1797, 8, 8)`` uint8, 0 to 16, and their labels, ``(1797,)``."""
    with np.load(DIGITS_FILE) as file:
        return file["scans"], file["labels"]


@cache
def _scans_of(digit: int, held_out: bool) -> tuple[int, ...]:
    """Returns the indices of a digit's training scans, or of its held-out scans, every fifth."""
    found = np.flatnonzero(digit_scans()[1] == digit)
    return tuple(int(i) for i in found if (i % 5 == 0) == held_out)


def _digit_mask(scan: int, size: int) -> np.ndarray:
    """Enlarges a scan to ``(size, size)`` by linear interpolation."""
    spread = _spread(size)
    ink = digit_scans()[0][scan].astype(np.float32) / 16
    return (spread @ ink @ spread.T).clip(0, 1)


@cache
def _spread(size: int) -> np.ndarray:
    """Returns the weights of linear interpolation from 8 to ``size`` pixels, ``(size, 8)``."""
    positions = (np.arange(size) + 0.5) * 8 / size - 0.5
    weights = 1 - np.abs(positions[:, None] - np.arange(8))
    return weights.clip(0, None).astype(np.float32)


Field = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _polygon(*corners: tuple[float, float]) -> Field:
    """Returns a function that tests whether points lie in a polygon, by the even-odd rule."""

    def inside(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        odd = np.zeros(x.shape, dtype=bool)
        for (x0, y0), (x1, y1) in zip(corners, corners[1:] + corners[:1], strict=True):
            if y0 != y1:
                odd ^= ((y0 > y) != (y1 > y)) & (x < (x1 - x0) * (y - y0) / (y1 - y0) + x0)
        return odd

    return inside


def _star_corners() -> list[tuple[float, float]]:
    radii = (0.98, 0.4)
    return [
        (radii[i % 2] * math.sin(i * math.pi / 5), -radii[i % 2] * math.cos(i * math.pi / 5))
        for i in range(10)
    ]


def _disc(x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    return np.asarray(x * x + y * y <= radius * radius)


_ROOF = _polygon((-0.95, -0.1), (0, -0.95), (0.95, -0.1))
_SAIL = _polygon((0.08, -0.95), (0.8, 0.1), (0.08, 0.1))
_HULL = _polygon((-0.98, 0.28), (0.98, 0.28), (0.55, 0.85), (-0.55, 0.85))
_TAIL = _polygon((0.3, 0), (0.97, -0.6), (0.97, 0.6))
_BODY = _polygon((-0.75, -0.75), (0.45, -0.75), (0.3, 0.85), (-0.6, 0.85))
_CROWN = _polygon((0, -0.97), (0.8, 0.45), (-0.8, 0.45))

_SHAPES: dict[str, Field] = {
    "circle": lambda x, y: _disc(x, y, 0.9),
    "square": lambda x, y: np.maximum(abs(x), abs(y)) <= 0.75,
    "triangle": _polygon((0, -0.9), (0.92, 0.75), (-0.92, 0.75)),
    "diamond": lambda x, y: 1.5 * abs(x) + abs(y) <= 0.97,
    "cross": lambda x, y: (
        (np.minimum(abs(x), abs(y)) <= 0.26) & (np.maximum(abs(x), abs(y)) <= 0.9)
    ),
    "arrow": _polygon(
        (-0.95, -0.25),
        (0.1, -0.25),
        (0.1, -0.75),
        (0.95, 0),
        (0.1, 0.75),
        (0.1, 0.25),
        (-0.95, 0.25),
    ),
    "house": lambda x, y: (
        _ROOF(x, y) | ((abs(x) <= 0.68) & (abs(y - 0.4) <= 0.5)) & ~((abs(x) < 0.2) & (y > 0.35))
    ),
    "tree": lambda x, y: _CROWN(x, y) | ((abs(x) <= 0.17) & (y >= 0.4) & (y <= 0.95)),
    "flower": lambda x, y: (
        (np.hypot(x, y) <= 0.62 + 0.33 * np.cos(5 * np.arctan2(y, x))) & ~_disc(x, y, 0.22)
    ),
    "umbrella": lambda x, y: (
        (_disc(x, y + 0.05, 0.92) & (y <= -0.05))
        | ((abs(x) <= 0.1) & (abs(y - 0.4) <= 0.5))
        | ((abs(x - 0.2) <= 0.25) & (abs(y - 0.85) <= 0.1))
    ),
    "boat": lambda x, y: _HULL(x, y) | _SAIL(x, y) | ((abs(x) <= 0.08) & (abs(y + 0.3) <= 0.6)),
    "fish": lambda x, y: _disc((x + 0.25) / 0.7, y / 0.48, 1) | _TAIL(x, y),
    "moon": lambda x, y: _disc(x, y, 0.92) & ~_disc(x - 0.42, y + 0.12, 0.74),
    "star": _polygon(*_star_corners()),
    "cup": lambda x, y: (
        _BODY(x, y) | (_disc(x - 0.5, y + 0.1, 0.42) & ~_disc(x - 0.5, y + 0.1, 0.2) & (x > 0.3))
    ),
    "key": lambda x, y: (
        (_disc(x + 0.52, y, 0.44) & ~_disc(x + 0.52, y, 0.18))
        | ((abs(x - 0.4) <= 0.55) & (abs(y) <= 0.13))
        | ((abs(x - 0.5) <= 0.1) & (abs(y - 0.2) <= 0.25))
        | ((abs(x - 0.82) <= 0.12) & (abs(y - 0.2) <= 0.25))
    ),
    "heart": lambda x, y: (
        (1.44 * x**2 + (0.1 - 1.2 * y) ** 2 - 1) ** 3 <= 1.44 * x**2 * (0.1 - 1.2 * y) ** 3
    ),
    "ring": lambda x, y: _disc(x, y, 0.92) & ~_disc(x, y, 0.55),
}
