"""MME: two questions about each image, one with the answer yes and one with the answer no.

The score of a category is its accuracy plus the share of images with both questions right, 100
points each. In a category of 30 images, one answer changes the score by up to 5 points.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from mmdecode.errors import InputError
from mmdecode.evaluation.vision.items import (
    ANSWER,
    QUESTION,
    LeftOut,
    YesNoItem,
    field_of,
    label_of,
    leaving_out,
    read_bytes,
    read_table,
    refuse_empty,
)

PERCEPTION = (
    *("existence", "count", "position", "color", "posters"),
    *("celebrity", "scene", "landmark", "artwork", "OCR"),
)
COGNITION = ("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning")
HALLUCINATION = ("existence", "count", "position", "color")
SUBTOTALS = {"perception": PERCEPTION, "cognition": COGNITION, "hallucination": HALLUCINATION}


def mme_scores(items: Sequence[YesNoItem], right: Sequence[bool]) -> dict[str, float]:
    """Computes the score of each category, and each sum of `SUBTOTALS` that has all categories.

    Questions are paired by category and image; their order does not matter.

    Args:
        items: Items, each answered once; their sets are MME's categories.
        right: Whether each answer is right.

    Raises:
        InputError: An image does not have two questions in a category.
    """
    pairs: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for item, correct in zip(items, right, strict=True):
        for category in item.sets:
            pairs[category][item.image].append(bool(correct))
    scores = {}
    for category, images in pairs.items():
        odd = [image for image, answers in images.items() if len(answers) != 2]
        if odd:
            raise InputError(
                f"{odd[0]} has {len(images[odd[0]])} questions in {category}; expected two for "
                "each image"
            )
        table = np.array(list(images.values()))
        scores[category] = 100 * float(table.mean() + table.all(1).mean())
    return scores | {
        name: sum(scores[one] for one in parts)
        for name, parts in SUBTOTALS.items()
        if all(one in scores for one in parts)
    }


def read_mme(path: Path, left_out: LeftOut = None) -> list[YesNoItem]:
    """Reads questions in MME's format.

    Args:
        path: MME's folder, which has a folder for each category. A category has a text file for
            each image, with question, tab and answer on a line, and the images next to them or in
            ``images``. Or JSON lines, packed or not, with ``category``, ``image``, one of
            `QUESTION` and one of `ANSWER`.
        left_out: See `mmdecode.evaluation.vision.items.leaving_out`. If one question of a pair
            cannot be used, the other is left out too.

    Raises:
        InputError: A file cannot be read, there is no question, or a line has no answer.
    """
    rows = read_table(path, left_out) if path.is_file() else _in_folders(path, left_out)
    items: list[YesNoItem] = []
    for where, row in rows:
        with leaving_out(left_out):
            fields = (("category",), ("image",), QUESTION, ANSWER)
            category, image, question, answer = (field_of(row, names, where) for names in fields)
            items.append(
                YesNoItem(
                    id=f"{category}: {image}: {question}",
                    image=image,
                    question=question,
                    target=label_of(answer, where),
                    sets=(category,),
                )
            )
    if left_out:
        items = _in_pairs(items, left_out)
    otherwise = f"{path} has no questions; expected a folder of text files per category"
    refuse_empty(items, left_out, otherwise)
    return items


def _in_pairs(items: Sequence[YesNoItem], left_out: list[str]) -> list[YesNoItem]:
    """Keeps the questions whose image has two questions in the category."""
    counts = Counter((item.image, item.sets) for item in items)
    for item in items:
        if counts[item.image, item.sets] == 1:
            left_out.append(f"{item.id}: left out, since the other question of the pair is missing")
    return [item for item in items if counts[item.image, item.sets] != 1]


def _in_folders(folder: Path, left_out: LeftOut) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields location (file and line) and fields of each line of the text files."""
    for category in sorted(path for path in folder.glob("*") if path.is_dir()):
        images = {
            path.stem: path.relative_to(folder).as_posix()
            for path in sorted(category.rglob("*"))
            if path.suffix.lower() in (".jpg", ".jpeg", ".png")
        }
        for path in sorted(category.rglob("*.txt")):
            row = {"category": category.name}
            row["image"] = images.get(path.stem, f"{category.name}/{path.stem}")
            lines = read_bytes(path).decode(errors="replace").splitlines()
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                question, tab, answer = line.partition("\t")
                with leaving_out(left_out):
                    if not tab:
                        raise InputError(
                            f"{where} has 1 column; expected a question, a tab and an answer"
                        )
                    yield where, row | {"question": question, "answer": answer}
