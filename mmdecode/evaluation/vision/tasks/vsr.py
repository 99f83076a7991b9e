"""VSR (Visual Spatial Reasoning): statements on the relation of two objects, true or false."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmdecode.errors import InputError
from mmdecode.evaluation.vision.benchmarks import YesNoTask
from mmdecode.evaluation.vision.items import LeftOut, YesNoItem, field_of, items_of


def read_vsr(
    path: Path,
    ask: str = "{} Is this statement about the image true?",
    left_out: LeftOut = None,
) -> list[YesNoItem]:
    """Reads statements of VSR (Visual Spatial Reasoning) as questions whether they are true.

    Args:
        path: JSON lines, gzipped or not.
        ask: The question, with ``{}`` for the statement.
        left_out: See `mmdecode.evaluation.vision.items.leaving_out`.

    Raises:
        InputError: The file cannot be read, or a label is neither 0 nor 1.
    """

    def item(row: dict[str, Any], where: str) -> YesNoItem:
        image, claim = field_of(row, ("image",), where), field_of(row, ("caption",), where)
        if row.get("label") not in (0, 1):
            raise InputError(f"{where} has the label {row.get('label')!r}; expected 0 or 1")
        return YesNoItem(
            id=f"{image}: {claim}",
            image=image,
            question=ask.format(claim),
            target="yes" if row["label"] else "no",
            sets=("vsr",),
        )

    return items_of(path, item, left_out, "statement")


TASK = YesNoTask(
    name="vsr",
    about="""VSR: is a statement on the relation of two objects true of the image?

    --data is VSR's file, JSON lines with image, caption and label, such as random_test.jsonl; the
    images are next to it, or in --images.

    For example:

      mmdecode evaluate vsr --model llava-hf/llava-1.5-7b-hf --guide vcd --data random_test.jsonl
      --images vsr/images --out run
    """,
    items=lambda path, left_out: read_vsr(path, left_out=left_out),
)
