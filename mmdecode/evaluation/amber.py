"""AMBER's questions: existence, attributes and relations, scored as published and plainly.

As published, the positive class is *no*, only the exact answers "Yes" and "No" count, every counter
starts at 0.001 and F1 is made of rounded percentages with a little more below the line. `amber`
does the same; accuracy per dimension, which others report under AMBER's name, is another number.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmdecode.errors import InputError
from mmdecode.evaluation.items import YesNoItem, label_of, read_json

KINDS = {
    "discriminative-hallucination": ("existence",),
    "discriminative-attribute-state": ("attribute", "state"),
    "discriminative-attribute-number": ("attribute", "number"),
    "discriminative-attribute-action": ("attribute", "action"),
    "discriminative-relation": ("relation",),
    "relation": ("relation",),
}
"""Dimensions of a question by its type."""
DIMENSIONS = ("existence", "attribute", "state", "number", "action", "relation")
_START = 0.001  # what every counter of the tool begins with


def read_amber(folder: Path) -> list[YesNoItem]:
    """Questions to be answered with yes or no; their sets are AMBER's dimensions.

    Args:
        folder: With ``query_discriminative.json`` and ``annotations.json``, packed or not.

    Raises:
        InputError: A file is missing, or a question has no annotation.
    """
    known = _annotations(folder)
    items = []
    for row in _read(folder, "query_discriminative.json"):
        note = known.get(row["id"])
        if note is None or note.get("type") not in KINDS:
            raise InputError(f"question {row['id']} of {folder} has no annotation of a known type")
        items.append(
            YesNoItem(
                id=str(row["id"]),
                image=str(row["image"]),
                question=str(row["query"]),
                target=label_of(str(note["truth"]), f"question {row['id']} of {folder}"),
                sets=KINDS[str(note["type"])],
            )
        )
    return items


def amber_scores(items: Sequence[YesNoItem]) -> dict[str, dict[str, float]]:
    """Percentages of each dimension and of all questions, as AMBER's tool prints them.

    Args:
        items: Answered once each.

    Returns:
        ``accuracy``, ``precision``, ``recall`` and ``f1`` by dimension, ``all`` last.
    """
    scores = {}
    for name in (*DIMENSIONS, "all"):
        chosen = [item for item in items if name == "all" or name in item.sets]
        if chosen:
            scores[name] = _published(name, chosen)
    return scores


def _published(name: str, items: Sequence[YesNoItem]) -> dict[str, float]:
    no = np.array([item.target == "no" for item in items])
    said_no = np.array([item.output == "No" for item in items])
    said_yes = np.array([item.output == "Yes" for item in items])
    # one counter for each type, and the attributes are three
    start = 3 * _START if name == "attribute" else _START
    right = float((said_no & no).sum())
    accuracy = _percent(right + float((said_yes & ~no).sum()), len(items) + start)
    precision = _percent(right, float(said_no.sum()) + start)
    recall = _percent(right, float(no.sum()) + start)
    below = 0.001 if name == "existence" else 0.0001
    p, r = precision / 100, recall / 100
    f1 = round(2 * p * r / (p + r + below) * 100, 1)
    return {"accuracy": accuracy, "precision": precision, "recall": recall, "f1": f1}


def _percent(part: float, whole: float) -> float:
    return round(part / whole * 100, 1)


def _annotations(folder: Path) -> dict[Any, dict[str, Any]]:
    return {row["id"]: row for row in _read(folder, "annotations.json")}


def _read(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / name
    rows = read_json(path if path.exists() else folder / f"{name}.gz")
    if not isinstance(rows, list) or not all(isinstance(r, dict) and "id" in r for r in rows):
        raise InputError(f"{path} is no list of objects with an 'id'")
    return rows
