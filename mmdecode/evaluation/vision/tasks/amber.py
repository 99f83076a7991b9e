"""AMBER's questions: existence, attributes and relations, with the scores of AMBER's own tool.

The published tool takes *no* as the positive class, counts only the exact answers "Yes" and "No",
starts every counter at 0.001, and computes F1 from rounded percentages with a small constant in the
denominator. `amber_scores` does the same. Some papers report the plain accuracy of each dimension
as AMBER's score; it is not the same number.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmdecode.errors import InputError
from mmdecode.evaluation.vision.items import (
    LeftOut,
    YesNoItem,
    field_of,
    label_of,
    leaving_out,
    read_json_list,
    refuse_empty,
)

KINDS = {
    "discriminative-hallucination": ("existence",),
    "discriminative-attribute-state": ("attribute", "state"),
    "discriminative-attribute-number": ("attribute", "number"),
    "discriminative-attribute-action": ("attribute", "action"),
    "discriminative-relation": ("relation",),
    "relation": ("relation",),
}
"""Dimensions (sets that are scored) to which a question belongs, by its type."""
DIMENSIONS = ("existence", "attribute", "state", "number", "action", "relation")
_START = 0.001  # initial value of every counter of the tool


def read_amber(folder: Path, left_out: LeftOut = None) -> list[YesNoItem]:
    """Reads AMBER's yes/no questions; the sets of the items are AMBER's dimensions.

    Args:
        folder: Folder with ``query_discriminative.json`` and ``annotations.json``, gzipped or not.
        left_out: See `mmdecode.evaluation.vision.items.leaving_out`.

    Raises:
        InputError: A file is missing, or a question has no annotation.
    """
    known = {row["id"]: row for row in _read(folder, "annotations.json", left_out)}
    items: list[YesNoItem] = []
    for row in _read(folder, "query_discriminative.json", left_out):
        where = f"question {row['id']} of {folder}"
        with leaving_out(left_out):
            note = known.get(row["id"])
            if note is None or note.get("type") not in KINDS:
                raise InputError(f"{where} has no annotation of a known type")
            items.append(
                YesNoItem(
                    id=str(row["id"]),
                    image=field_of(row, ("image",), where),
                    question=field_of(row, ("query",), where),
                    target=label_of(field_of(note, ("truth",), where), where),
                    sets=KINDS[str(note["type"])],
                )
            )
    refuse_empty(items, left_out, f"{folder} has no questions")
    return items


def amber_scores(items: Sequence[YesNoItem]) -> dict[str, dict[str, float]]:
    """Computes the percentages of each dimension and of all questions as AMBER's tool does.

    Args:
        items: Items, each answered once.

    Returns:
        ``accuracy``, ``precision``, ``recall`` and ``f1`` by dimension, ``all`` last.
    """
    dimensions = {name: [item for item in items if name in item.sets] for name in DIMENSIONS}
    chosen = {**dimensions, "all": items}
    return {name: _published(name, some) for name, some in chosen.items() if some}


def _published(name: str, items: Sequence[YesNoItem]) -> dict[str, float]:
    no = np.array([item.target == "no" for item in items])
    answered_no = np.array([item.output == "No" for item in items])
    answered_yes = np.array([item.output == "Yes" for item in items])
    # the tool has a counter for each type, and attributes have three
    start = 3 * _START if name == "attribute" else _START
    right = float((answered_no & no).sum())
    accuracy = _percent(right + float((answered_yes & ~no).sum()), len(items) + start)
    precision = _percent(right, float(answered_no.sum()) + start)
    recall = _percent(right, float(no.sum()) + start)
    below = 0.001 if name == "existence" else 0.0001
    p, r = precision / 100, recall / 100
    f1 = round(2 * p * r / (p + r + below) * 100, 1)
    return {"accuracy": accuracy, "precision": precision, "recall": recall, "f1": f1}


def _percent(part: float, whole: float) -> float:
    return round(part / whole * 100, 1)


def _read(folder: Path, name: str, left_out: LeftOut) -> list[dict[str, Any]]:
    path = folder / name
    rows = read_json_list(path if path.exists() else folder / f"{name}.gz", "objects with an 'id'")
    found = []
    for where, row in rows:
        with leaving_out(left_out):
            if not isinstance(row.get("id"), (int, str)):
                raise InputError(f"{where} is no object with an 'id'")
            found.append(row)
    return found
