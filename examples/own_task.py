"""A task of your own for ``mmdecode evaluate``: a function that reads questions, and a name.

    mmdecode evaluate examples/own_task.py --model zoo:llava-scenes --data photos.csv --out run
    mmdecode evaluate examples/own_task.py --rescore run

The table has the columns image, question and answer (yes or no); images lie next to it, or in
``--images``. Resuming, intervals, controls, comparisons, figures and the page are those of POPE.
`ChoiceTask` with `ChoiceItem` takes questions with several options, `CaptionTask` with
`CaptionItem` images to describe. A package offers a task under a name by an entry point in
``mmdecode.tasks``.
"""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from mmdecode.evaluation import YesNoItem, YesNoTask


def read_table(path: Path, left_out: list[str] | None) -> Iterator[YesNoItem]:
    """Reads the questions; a row without an answer is left out, and reported."""
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            answer = (row["answer"] or "").strip().lower()
            if answer not in ("yes", "no") and left_out is not None:
                left_out.append(
                    f"{path}, line {number}: the answer {answer!r} is neither yes nor no"
                )
                continue
            yield YesNoItem(
                id=f"{row['image']}: {row['question']}",
                image=row["image"],
                question=row["question"],
                target="yes" if answer == "yes" else "no",
                sets=("colour" if "colour" in row["question"] else "other",),
            )


def both_right(items: Sequence[YesNoItem], right: Sequence[bool]) -> dict[str, float]:
    """Score of your own: share of images with every question right."""
    images: dict[str, list[bool]] = {}
    for item, correct in zip(items, right, strict=True):
        images.setdefault(item.image, []).append(bool(correct))
    return {"images right": sum(map(all, images.values())) / len(images)}


TASK = YesNoTask(
    name="photos",
    about="Questions about my own photographs.",
    items=read_table,
    scores=both_right,
)
