"""``zoo:scenes-test``: questions about held-out scenes, built like POPE, CHAIR, MME and What's Up.

Questions and labels are in the package, as JSON lines in ``data/scenes-test``, with one folder for
development and one for testing; `build_scene_sets` generated them. Images are not in the package:
`write_images` renders them, since an image's file name determines its scene (`scene_of`). Noise is
as strong as in training.
"""

from __future__ import annotations

import gzip
import io
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mmdecode.errors import InputError, MissingExtraError
from mmdecode.runs.files import write_file
from mmdecode.zoo.scene_text import (
    DESCRIBE,
    count_question,
    existence_question,
    related,
    relation_question,
    single,
    thing_question,
    where_question,
    yes_no,
)
from mmdecode.zoo.scenes import (
    COLOURS,
    DIFFICULTY,
    HELD_OUT,
    NOUNS,
    OPPOSITE,
    SIDE,
    Relation,
    Scene,
    draw_scene,
    draw_thing,
    relation,
    render,
    visible_shares,
)

if TYPE_CHECKING:
    from mmdecode.vlm.requests import AnswerRequest

FOLDER = Path(__file__).parent / "data" / "scenes-test"
Part = Literal["development", "test"]
FIRST_SEED: dict[Part, int] = {"development": HELD_OUT, "test": 2 * HELD_OUT}
Split = Literal["random", "popular", "adversarial"]
SPLITS: tuple[Split, ...] = ("random", "popular", "adversarial")
STACKED: tuple[Relation, ...] = ("left", "right", "on", "under")
APART: tuple[Relation, ...] = ("left", "right", "above", "below")
RELATIONS = tuple(OPPOSITE)
SETS = (*(f"pope_{split}" for split in SPLITS), "chair", "mme", "spatial")
SYNONYMS: dict[str, tuple[str, ...]] = {
    "house": ("home", "hut", "building"),
    "tree": ("fir", "pine"),
    "flower": ("blossom", "daisy"),
    "umbrella": ("parasol",),
    "boat": ("ship", "sailboat"),
    "moon": ("crescent",),
    "cup": ("mug",),
    "ring": ("hoop",),
    "circle": ("disc", "disk", "ball"),
    "square": ("box",),
    "diamond": ("rhombus",),
    "cross": ("plus",),
} | {f"digit {n[6:]}": (f"number {n[6:]}", f"numeral {n[6:]}") for n in NOUNS if n[:5] == "digit"}
"""Synonyms of the nouns, which CHAIR counts as mentions of the noun."""
Row = dict[str, Any]


@lru_cache(maxsize=1)
def co_occurrence() -> tuple[Counter[str], dict[str, Counter[str]]]:
    """Counts nouns, and pairs of nouns in the same scene, over 2,000 training scenes.

    Returns:
        The number of scenes of each noun; and for each noun, how many of its scenes have each other
        noun.
    """
    popular: Counter[str] = Counter()
    companions: dict[str, Counter[str]] = {noun: Counter() for noun in NOUNS}
    for seed in range(2000):
        names = draw_scene(seed).names
        popular.update(names)
        for name in names:
            companions[name].update(other for other in names if other != name)
    return popular, companions


def scenes_from(seed: int, count: int, wanted: Callable[[Scene], Any] | None = None) -> list[Scene]:
    """Returns the first scenes, in order of seeds, that satisfy a condition.

    Args:
        seed: First seed to try.
        count: Number of scenes.
        wanted: Condition on a scene; ``None``: the scene has at least three different nouns.
    """
    fits = wanted or (lambda scene: len(scene.names) >= 3)
    found: list[Scene] = []
    while len(found) < count:
        scene = draw_scene(seed)
        if fits(scene):
            found.append(scene)
        seed += 1
    return found


def pope(scenes: Sequence[Scene], seed: int = 0) -> dict[Split, list[Row]]:
    """Builds POPE's yes-no questions (Li et al. 2023): three of each answer for an image.

    Each question about a noun of the scene is followed by a question about an absent noun. Split
    ``random`` samples the absent noun uniformly, ``popular`` takes the noun that is most frequent
    in training, and ``adversarial`` the noun that co-occurs most in training with the present noun.
    The three absent nouns of an image differ. The yes-questions are the same in all splits.

    Args:
        scenes: Scenes with at least three different nouns each.
        seed: Seed of the random split.

    Returns:
        Rows with ``question_id``, ``image``, ``text`` and ``label``, by split.
    """
    popular, companions = co_occurrence()
    rng = random.Random(f"pope/{seed}")

    def absent(split: Split, noun: str, free: list[str]) -> str:
        if split == "random":
            return rng.choice(free)
        counts = popular if split == "popular" else companions[noun]
        return max(free, key=lambda name: counts[name])

    rows: dict[Split, list[Row]] = {}
    for split in SPLITS:
        rows[split] = []
        for scene in scenes:
            free = [noun for noun in NOUNS if noun not in scene.names]
            for noun in scene.names[:3]:
                other = absent(split, noun, free)
                free.remove(other)
                for name, truth in ((noun, True), (other, False)):
                    rows[split].append(
                        {
                            "question_id": len(rows[split]) + 1,
                            "image": image_name(scene),
                            "text": existence_question(name),
                            "label": yes_no(truth).lower(),
                        }
                    )
    return rows


def captions(scenes: Iterable[Scene]) -> list[Row]:
    """Builds CHAIR's rows: a request for a description, and the nouns that the image shows."""
    return [
        {"image": image_name(s), "question": DESCRIBE["detailed"], "objects": list(s.names)}
        for s in scenes
    ]


def mme(first_seed: int, count: int) -> list[Row]:
    """Builds questions of four categories of MME (Fu et al. 2023), such as count and position.

    Each image has two questions; the answer to the first is yes, to the second no.

    Args:
        first_seed: First seed of the scenes.
        count: Number of images in each category.
    """
    rng = random.Random(f"mme/{first_seed}")

    def existence(scene: Scene) -> tuple[str, str]:
        other = rng.choice([noun for noun in NOUNS if noun not in scene.names])
        return existence_question(rng.choice(scene.names)), existence_question(other)

    def counted(scene: Scene) -> tuple[str, str]:
        noun = max(scene.names, key=scene.count)
        number = scene.count(noun)
        other = rng.choice([n for n in (1, 2, 3) if n != number])
        return count_question(noun, number), count_question(noun, other)

    def position(scene: Scene) -> tuple[str, str]:
        thing, other, how = rng.choice(related(scene))
        names = thing.name, other.name
        return relation_question(*names, how), relation_question(*names, OPPOSITE[how])

    def colour(scene: Scene) -> tuple[str, str]:
        thing = rng.choice(single(scene))
        wrong = rng.choice([c for c in COLOURS if c != thing.colour])
        return thing_question(thing.name, thing.colour), thing_question(thing.name, wrong)

    makers: dict[str, tuple[Callable[[Scene], tuple[str, str]], Callable[[Scene], Any]]] = {
        "existence": (existence, lambda scene: len(scene.names) >= 3),
        "count": (counted, lambda scene: len(scene.things) >= 3),
        "position": (position, related),
        "color": (colour, single),
    }
    rows = []
    for index, (category, (questions, wanted)) in enumerate(makers.items()):
        for scene in scenes_from(first_seed + index * 10_000, count, wanted):
            for text, label in zip(questions(scene), ("yes", "no"), strict=True):
                rows.append(
                    {
                        "category": category,
                        "image": image_name(scene),
                        "text": f"{text} Please answer yes or no.",
                        "label": label,
                    }
                )
    return rows


def spatial(part: Part, count: int) -> list[Row]:
    """Builds questions about the position of an object, as in What's Up (Kamath et al. 2023).

    A group has four images, which show the same two objects in four relations: left, right, on and
    under in the first half of the groups; left, right, above and below in the others.

    Args:
        part: ``development`` or ``test``.
        count: Number of groups.
    """
    rows = []
    for number in range(count):
        options = STACKED if number < count / 2 else APART
        for how in options:
            scene = spatial_scene(part, number, how)
            thing, other = scene.things
            rows.append(
                {
                    "image": f"spatial_{part}_{number}_{how}.png",
                    "text": where_question(thing.name, other.name, stacked=options is STACKED),
                    "options": list(options),
                    "target": how,
                    "group": f"{part} {number}: {thing.name}, {other.name}",
                }
            )
    return rows


def spatial_scene(part: Part, number: int, how: Relation) -> Scene:
    """Samples a scene in which the first of two objects has a given relation to the second.

    Args:
        part: ``development`` or ``test``.
        number: Number of the group; its four scenes have the same two objects, which differ in
            position, and other noise.
        how: The relation, such as ``left``.
    """
    rng = random.Random(f"spatial/{part}/{number}")
    names = rng.sample(NOUNS, 2)
    one, two = (draw_thing(rng, name, held_out=True) for name in names)
    noise = round(rng.uniform(*DIFFICULTY.noise), 3)
    clutter = rng.randint(0, DIFFICULTY.clutter)
    rng = random.Random(f"spatial/{part}/{number}/{how}")

    def anywhere(size: int) -> tuple[int, int]:
        low, high = size // 2, SIDE - (size + 1) // 2
        return rng.randint(low, high), rng.randint(low, high)

    while True:
        pair = (
            replace(one, centre=anywhere(one.size)),
            replace(two, centre=anywhere(two.size)),
        )
        if relation(*pair) == how and min(visible_shares(pair)) >= DIFFICULTY.seen:
            seed = FIRST_SEED[part] + 10**6 + 10 * number + RELATIONS.index(how)
            return Scene(seed=seed, things=pair, noise=noise, clutter=clutter)


def image_name(scene: Scene) -> str:
    """Returns the file name of a scene's image."""
    return f"scene_{scene.seed}.png"


def scene_of(image: str) -> Scene:
    """Returns the scene that an image shows, from the image's file name.

    Raises:
        InputError: The name is neither ``scene_SEED.png`` nor ``spatial_PART_NUMBER_RELATION.png``.
    """
    kind, *fields = image.removesuffix(".png").split("_")
    try:
        if kind == "scene" and len(fields) == 1:
            return draw_scene(int(fields[0]))
        part, number, how = fields
        if kind == "spatial" and part in FIRST_SEED and how in RELATIONS:
            return spatial_scene(part, int(number), how)
    except ValueError:
        pass
    raise InputError(
        f"{image!r} is not the file name of a scene; expected scene_SEED.png or "
        "spatial_PART_NUMBER_RELATION.png, such as scene_7.png or spatial_test_0_left.png"
    )


def write_images(folder: Path, images: Iterable[str] | None = None) -> None:
    """Renders images of scenes and writes them as PNG files.

    Args:
        folder: Folder of the files.
        images: File names of the images, see `scene_of`; ``None``: all images of the package's
            test sets.

    Raises:
        MissingExtraError: Pillow is not installed.
    """
    with MissingExtraError.instead("writing images needs Pillow", extra="vlm"):
        from PIL import Image
    if images is None:
        images = [row["image"] for part in FIRST_SEED for s in SETS for row in scene_rows(part, s)]
    for name in dict.fromkeys(images):
        data = io.BytesIO()
        Image.fromarray(render(scene_of(name))).save(data, "PNG")
        write_file(folder / name, data.getvalue())


def build_scene_sets(folder: Path = FOLDER) -> None:
    """Generates the question sets for development and testing, and CHAIR's list of synonyms."""
    for part, seed in FIRST_SEED.items():
        scenes = scenes_from(seed, 300)
        sets: dict[str, list[Row]] = {f"pope_{name}": rows for name, rows in pope(scenes).items()}
        sets["chair"] = captions(scenes[:200])
        sets["mme"] = mme(seed + 100_000, 60)
        sets["spatial"] = spatial(part, 100)
        for name, rows in sets.items():
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            packed = gzip.compress(lines.encode(), mtime=0)
            write_file(folder / part / f"{name}.jsonl.gz", packed)
    lines = "".join(", ".join((noun, *SYNONYMS.get(noun, ()))) + "\n" for noun in NOUNS)
    write_file(folder / "synonyms.txt", lines)


def scene_rows(part: Part, name: str) -> list[Row]:
    """Reads the rows of a question set of the package.

    Args:
        part: ``development`` or ``test``.
        name: ``pope_random``, ``pope_popular``, ``pope_adversarial``, ``chair``, ``mme`` or
            ``spatial``.

    Raises:
        InputError: There is no such set.
    """
    path = FOLDER / part / f"{name}.jsonl.gz"
    if not path.exists():
        raise InputError(f"no question set {name!r} in {part}; expected one of {', '.join(SETS)}")
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def descriptions(count: int) -> list[AnswerRequest]:
    """Returns requests for detailed descriptions of the first ``count`` test images of CHAIR."""
    from PIL import Image

    from mmdecode.vlm.requests import requests_of

    rows = scene_rows("test", "chair")[:count]
    images = [Image.fromarray(render(scene_of(row["image"]))) for row in rows]
    return requests_of(images, DESCRIBE["detailed"])
