"""HallusionBench: several questions on each figure, and each question on several figures.

aAcc is the share of right answers, fAcc the share of figures with all their questions right, and
qAcc the share of questions that are right on all their figures (Guan et al., 2024).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from mmdecode.errors import InputError
from mmdecode.evaluation.vision.items import YesNoItem, field_of, read_json_list

_KEYS = ("category", "subcategory", "set_id", "figure_id", "question_id")


def read_hallusion(path: Path) -> list[YesNoItem]:
    """Reads the questions of HallusionBench.

    The id of a question joins category, subcategory, set, figure and question. Questions without a
    figure have no image.

    Args:
        path: ``HallusionBench.json``, gzipped or not.

    Raises:
        InputError: The file cannot be read, or a field is missing.
    """
    items = []
    for where, row in read_json_list(path, "questions"):
        key = [field_of(row, (name,), where) for name in _KEYS]
        answer = field_of(row, ("gt_answer",), where)
        if answer not in ("0", "1"):
            raise InputError(f"{where} has the answer {answer!r}; expected '0' or '1'")
        items.append(
            YesNoItem(
                id="/".join(key),
                image=str(row.get("filename") or ""),
                question=field_of(row, ("question",), where),
                target="yes" if answer == "1" else "no",
                sets=(key[0],),
            )
        )
    return items


def hallusion_scores(items: Sequence[YesNoItem], right: Sequence[bool]) -> dict[str, float]:
    """Computes ``aacc``, ``facc`` and ``qacc`` as shares, see the module.

    Args:
        items: Items of `read_hallusion`, each answered once.
        right: Whether each answer is right.
    """
    figures: dict[str, list[bool]] = defaultdict(list)
    questions: dict[str, list[bool]] = defaultdict(list)
    for item, correct in zip(items, right, strict=True):
        part, kind, bundle, figure, question = item.id.split("/")
        figures[f"{part}/{kind}/{bundle}/{figure}"].append(correct)
        questions[f"{part}/{kind}/{bundle}/{question}"].append(correct)
    return {
        "aacc": sum(right) / len(items),
        "facc": sum(map(all, figures.values())) / len(figures),
        "qacc": sum(map(all, questions.values())) / len(questions),
    }
