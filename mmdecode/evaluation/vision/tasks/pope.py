"""POPE: questions whether an object is in the image; its splits choose absent objects differently.

The yes-questions are the same in the three splits, and so are some no-questions; each distinct
question is asked once and counts in every split that contains it. Several versions of the files are
in use, which `warnings_of` distinguishes: some have 2,910 instead of 3,000 random questions; others
contain the word "imange", since "a" was replaced by "an" throughout the question.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from mmdecode.errors import InputError
from mmdecode.evaluation.vision.items import (
    ANSWER,
    IMAGE,
    QUESTION,
    LeftOut,
    YesNoItem,
    field_of,
    label_of,
    leaving_out,
    read_table,
    refuse_empty,
)

SPLITS = ("random", "popular", "adversarial")


def read_pope(files: Mapping[str, Path], left_out: LeftOut = None) -> list[YesNoItem]:
    """Reads the distinct questions of several splits, in order of first occurrence.

    Args:
        files: Table of each split, by the split's name: JSON lines, csv or tsv, gzipped or not,
            with one of the columns `IMAGE`, one of `QUESTION` and one of `ANSWER`. A question that
            occurs twice in a file counts twice.
        left_out: See `mmdecode.evaluation.vision.items.leaving_out`.

    Raises:
        InputError: A file cannot be read or is empty, or a question has both labels.
    """
    found: dict[str, YesNoItem] = {}
    for split, path in files.items():
        for where, row in read_table(path, left_out):
            with leaving_out(left_out):
                image, text = field_of(row, IMAGE, where), field_of(row, QUESTION, where)
                label = label_of(field_of(row, ANSWER, where), where)
                name = f"{image}: {text}"
                new = YesNoItem(id=name, image=image, question=text, target=label, sets=())
                item = found.get(name, new)
                if item.target != label:
                    raise InputError(
                        f"{where} gives the answer {label!r} to {text!r}, and before "
                        f"{item.target!r}"
                    )
                found[name] = dataclasses.replace(item, sets=(*item.sets, split))
        added = [item for item in found.values() if split in item.sets]
        refuse_empty(added, left_out, f"{path} holds no line; expected one question a line")
    return list(found.values())


def find_pope(folder: Path, prefix: str = "") -> dict[str, Path]:
    """Finds the files of the splits in a folder; a file's name must contain its split's name.

    Args:
        folder: Folder, for instance with ``coco_pope_random.jsonl.gz``.
        prefix: First characters of the names, if a folder holds several sets.

    Raises:
        InputError: There is no file of any split, or there are several files of one split.
    """
    found: dict[str, Path] = {}
    for split in SPLITS:
        files = [
            path
            for path in sorted(folder.glob(f"{prefix}*{split}*"))
            if re.search(r"\.(jsonl?|csv|tsv)(\.gz)?$", path.name)
        ]
        if len(files) > 1:
            names = ", ".join(path.name for path in files)
            raise InputError(f"{folder} has several files of {split}: {names}; give one of each")
        if files:
            found[split] = files[0]
    if not found:
        raise InputError(f"{folder} has no file named after {' or '.join(SPLITS)}")
    return found


def warnings_of(items: Sequence[YesNoItem]) -> list[str]:
    """Describes peculiarities of the files that change scores, such as those of an old version."""
    names = dict.fromkeys(name for item in items for name in item.sets)
    rows = {name: [i for i in items for one in i.sets if one == name] for name in names}
    yes = {name: Counter(i.id for i in row if i.target == "yes") for name, row in rows.items()}
    misspelt = {name: sum("imange" in i.question for i in row) for name, row in rows.items()}
    notes = []
    for name, row in rows.items():
        if misspelt[name]:
            notes.append(
                f"{misspelt[name]} questions of {name} say 'imange': an old version; recalls of "
                "the splits may differ"
            )
        if len(row) == 2910:
            notes.append(f"{name} has 2,910 questions: an old version, not comparable with 3,000")
        elif 2 * yes[name].total() != len(row):
            notes.append(f"{name} has {yes[name].total()} yes-questions of {len(row)}, not half")
    first, *others = yes.values()
    if any(one != first for one in others) and not any(misspelt.values()):
        notes.append("the splits have different yes-questions, so that their recalls may differ")
    return notes
