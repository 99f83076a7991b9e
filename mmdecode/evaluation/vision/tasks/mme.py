"""MME: two questions about each image, one to be answered yes and one no.

The score of a category is its accuracy plus the share of images with both questions right, in
points of 100 each. A category of 30 images moves by up to 5 points with one answer.
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
    read_json_lines,
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
    """Score of each category and of the sums that have all their categories.

    Questions are paired by category and image, whatever their order.

    Args:
        items: Answered once each; their sets are categories.
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
    """Questions in MME's form.

    Args:
        path: MME's folder, with a folder for each category that holds a text file for each image,
            with a question and its answer on a line, separated by a tab, and the images next to
            them or in ``images``; or JSON lines, packed or not, with ``category``, ``image``, one
            of `QUESTION` and one of `ANSWER`.
        left_out: See `mmdecode.evaluation.vision.items.leaving_out`; it gets the other question of
            a pair too, of which one cannot be used.

    Raises:
        InputError: It cannot be read, there is no question, or a line is no pair.
    """
    if path.is_file():
        items = [item for item, _ in _rows(path, left_out)]
    else:
        items = _in_folders(path, left_out)
    if left_out:
        items = _in_pairs(items, left_out)
    otherwise = f"{path} has no questions; expected a folder of text files per category"
    refuse_empty(items, left_out, otherwise)
    return items


def _in_pairs(items: Sequence[YesNoItem], left_out: list[str]) -> list[YesNoItem]:
    """Questions of which an image has two in their category."""
    counts = Counter((item.image, item.sets) for item in items)
    for item in items:
        if counts[item.image, item.sets] == 1:
            left_out.append(f"{item.id}: the other question of its pair cannot be used")
    return [item for item in items if counts[item.image, item.sets] != 1]


def _in_folders(folder: Path, left_out: LeftOut) -> list[YesNoItem]:
    items = []
    for category in sorted(path for path in folder.glob("*") if path.is_dir()):
        images = {
            path.stem: path.relative_to(folder).as_posix()
            for path in sorted(category.rglob("*"))
            if path.suffix.lower() in (".jpg", ".jpeg", ".png")
        }
        for path in sorted(category.rglob("*.txt")):
            for where, question, answer in _lines(path, 2, left_out):
                image = images.get(path.stem, f"{category.name}/{path.stem}")
                with leaving_out(left_out):
                    items.append(_item(category.name, image, question, answer, where))
    return items


def read_mme_results(path: Path, mode: str = "") -> list[YesNoItem]:
    """Answers that were written down for MME's own tool.

    Args:
        path: A folder with a text file per category, whose lines are image, question, right answer
            and answer, separated by tabs; or JSON lines as for `read_mme`, with the
            field ``prediction``.
        mode: See `mmdecode.evaluation.vision.items.Item`.

    Raises:
        InputError: It cannot be read.
    """
    items = []
    if path.is_dir():
        for file in sorted(path.glob("*.txt")):
            for where, image, question, answer, said in _lines(file, 4):
                item = _item(file.stem, image, question, answer, where)
                items.append(item.answered(mode=mode, output=said))
    else:
        for item, prediction in _rows(path):
            if not isinstance(prediction, str):
                raise InputError(f"{path} answers {item.id!r} with {prediction!r}; expected text")
            items.append(item.answered(mode=mode, output=prediction))
    if not items:
        raise InputError(f"{path} holds no answers")
    return items


def _rows(path: Path, left_out: LeftOut = None) -> Iterator[tuple[YesNoItem, object]]:
    """Questions of JSON lines, and what stands under ``prediction``."""
    for where, row in read_json_lines(path, left_out):
        item = None
        with leaving_out(left_out):
            fields = (("category",), ("image",), QUESTION, ANSWER)
            category, image, question, answer = (field_of(row, names, where) for names in fields)
            item = _item(category, image, question, answer, where)
        if item is not None:
            yield item, row.get("prediction")


def _item(category: str, image: str, question: str, answer: str, where: str) -> YesNoItem:
    return YesNoItem(
        id=f"{category}: {image}: {question}",
        image=image,
        question=question,
        target=label_of(answer, where),
        sets=(category,),
    )


def _lines(path: Path, columns: int, left_out: LeftOut = None) -> Iterator[tuple[str, ...]]:
    """Where a line stands, and its columns; the last may hold tabs and may be empty."""
    for number, line in enumerate(read_bytes(path).decode(errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        parts = line.split("\t", columns - 1)
        where = f"{path}, line {number}"
        with leaving_out(left_out):
            if len(parts) != columns:
                raise InputError(f"{where} has {len(parts)} columns; expected {columns}")
        if len(parts) == columns:
            yield (where, *parts)
