"""Questions on spatial relations: What's Up's photographs of two objects.

In What's Up (Kamath et al., 2023) the same two objects are shown in four relations, so that a model
that ignores the image gets one of the four right. Besides single questions, pairs of opposite
relations (left and right, on and under, in front and behind) and whole sets of four are counted.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmdecode.errors import InputError, OptionError
from mmdecode.evaluation.vision.answers import choice
from mmdecode.evaluation.vision.items import (
    ANSWER,
    QUESTION,
    ChoiceItem,
    LeftOut,
    field_of,
    items_of,
    leaving_out,
    one_file,
    read_bytes,
    read_json_list,
    read_table,
    refuse_empty,
)

OPPOSITES = (
    ("left", "right"),
    ("on", "under"),
    ("in front", "behind"),
    ("above", "below"),
    ("top", "bottom"),
)
"""Opposite relations; two questions of a group with opposite right answers make a pair."""
WHATS_UP = {"left": "left", "right": "right", "on": "on", "under": "under", "behind": "behind"} | {
    "in-front": "in front"
}
"""Relations by the word that stands for each in file names of What's Up."""
COLUMNS = ("right", "questions", "right_pairs", "pairs", "right_sets", "sets", "unparsed")
"""Columns of `count_choices`, in order."""


def count_choices(items: Sequence[ChoiceItem]) -> dict[str, np.ndarray]:
    """Counts right answers of each group of questions, or of each image without a group.

    A pair is two questions of one group with opposite right answers; a set is all questions of a
    group that has more than two.

    Args:
        items: Items, each answered once.

    Returns:
        Counts of each group or image, ``(7,)``; the columns are `COLUMNS`.

    Raises:
        OptionError: A group has two questions with the same right answer.
    """
    groups: dict[str, dict[str, bool]] = defaultdict(dict)
    table: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(len(COLUMNS), dtype=np.int64))
    for item in items:
        chosen = None if item.error else choice(item.output, item.options)
        unit = unit_of(item)
        if item.group and item.target in groups[unit]:
            raise OptionError(
                f"the group {item.group!r} has two questions with the answer {item.target!r}; "
                "expected one question for each answer"
            )
        if item.group:
            groups[unit][item.target] = chosen == item.target
        table[unit][[1, 0, 6]] += [1, chosen == item.target, chosen is None]
    for unit, group in groups.items():
        pairs = [group[a] and group[b] for a, b in OPPOSITES if a in group and b in group]
        whole = [all(group.values())] if len(group) > 2 else []
        table[unit][2:6] += [sum(pairs), len(pairs), sum(whole), len(whole)]
    return dict(table)


def unit_of(item: ChoiceItem) -> str:
    """Unit of the bootstrap: the group of a question or, without a group, its image."""
    return item.group or item.image or item.id


def rates(counts: np.ndarray) -> dict[str, np.ndarray]:
    """Computes shares from summed counts; NaN where there is no pair or set.

    Args:
        counts: ``(..., 7)``, see `COLUMNS`.

    Returns:
        Each share, of shape ``(...)``, by name: of questions, pairs and sets that are answered
        right, and of answers that name no option or several, which count as wrong.
    """
    right, questions, right_pairs, pairs, right_sets, sets, unparsed = np.moveaxis(counts, -1, 0)
    with np.errstate(invalid="ignore"):
        return {
            "individual": right / questions,
            "pair": right_pairs / pairs,
            "set": right_sets / sets,
            "unparsed": unparsed / questions,
        }


def read_spatial(path: Path, left_out: LeftOut = None) -> list[ChoiceItem]:
    """Reads What's Up's images or multiple-choice questions; the arguments are their readers'.

    Raises:
        InputError: The file cannot be read, or a field is missing.
        OptionError: The path is a folder, or the file holds statements of VSR.
    """
    one_file(path, "spatial")
    if read_bytes(path).lstrip()[:1] == b"[":
        return read_whats_up(path, left_out)
    _, first = next(read_table(path, []), ("", {}))
    if "caption" in first:
        raise OptionError(f"{path} holds statements of VSR; run 'mmdecode evaluate vsr'")
    return read_choices(path, left_out)


def read_choices(path: Path, left_out: LeftOut = None) -> list[ChoiceItem]:
    """Reads multiple-choice questions.

    Args:
        path: JSON lines, gzipped or not, with the keys ``image``, one of `QUESTION`, ``options``,
            one of `ANSWER`, and optionally ``group``.
        left_out: See `mmdecode.evaluation.vision.items.leaving_out`.

    Raises:
        InputError: The file cannot be read, or a field is missing.
    """

    def item(row: dict[str, Any], where: str) -> ChoiceItem:
        options = row.get("options")
        if not isinstance(options, list) or not all(isinstance(one, str) for one in options):
            raise InputError(f"{where} has {options!r} under 'options'; expected a list of texts")
        image, question, answer = (
            field_of(row, names, where) for names in (("image",), QUESTION, ANSWER)
        )
        return ChoiceItem(
            id=f"{image}: {question}",
            image=image,
            question=question,
            options=tuple(options),
            target=answer,
            group=str(row.get("group") or ""),
        )

    return items_of(path, item, left_out, "question")


def read_whats_up(path: Path, left_out: LeftOut = None) -> list[ChoiceItem]:
    """Reads What's Up's controlled images as questions on the relation of two objects.

    Objects and relation are taken from the image's file name, such as ``mug_left_of_table.jpeg``;
    the options are the relations that occur in the data set.

    Args:
        path: ``controlled_images_dataset.json`` or ``controlled_clevr_dataset.json``.
        left_out: See `mmdecode.evaluation.vision.items.leaving_out`.

    Raises:
        InputError: The file cannot be read, or an image's name does not have this form.
    """
    found = []
    for where, row in read_json_list(path, "images"):
        with leaving_out(left_out):
            image = field_of(row, ("image_path",), where)
            named = re.fullmatch(r"([^_]+)_([^_]+)(?:_of)?_([^_]+)\.\w+", image.rpartition("/")[2])
            if named is None or named[2] not in WHATS_UP:
                raise InputError(
                    f"{where} has the image {image!r}; expected a name like mug_left_of_table.jpeg"
                )
            found.append((image, named[1], WHATS_UP[named[2]], named[3]))
    refuse_empty(found, left_out, f"{path} is no list of images")
    present = {relation for _, _, relation, _ in found}
    options = tuple(relation for relation in WHATS_UP.values() if relation in present)
    return [
        ChoiceItem(
            id=image,
            image=image,
            question=(
                f"Where is the {one.replace('-', ' ')} in relation to the "
                f"{other.replace('-', ' ')}? Answer with {', '.join(options[:-1])} or "
                f"{options[-1]}."
            ),
            options=options,
            target=relation,
            group=f"{one}, {other}",
        )
        for image, one, relation, other in found
    ]
