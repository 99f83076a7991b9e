"""Tasks of ``mmdecode evaluate`` on images: POPE, CHAIR, MME, AMBER and spatial relations.

A task of one's own needs a function that reads its items::

    TASK = YesNoTask(name="mine", items=read_mine)

See ``examples/own_task.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdecode.errors import InputError, OptionError, UnknownNameError
from mmdecode.evaluation.task import own_code
from mmdecode.evaluation.vision.items import CaptionItem, ChoiceItem, YesNoItem, one_file
from mmdecode.evaluation.vision.task import ASKING, YES_NO, ZOO, Questions, QuestionTask, zoo_image
from mmdecode.evaluation.vision.tasks.amber import read_amber
from mmdecode.evaluation.vision.tasks.chair import read_chair, vocabulary_of
from mmdecode.evaluation.vision.tasks.mme import read_mme
from mmdecode.evaluation.vision.tasks.pope import SPLITS, find_pope, read_pope, warnings_of
from mmdecode.evaluation.vision.tasks.spatial import read_spatial, unit_of

if TYPE_CHECKING:
    from mmdecode.evaluation.report.item_report import ItemReport
    from mmdecode.evaluation.vision.yes_no_report import ScoreFunction

__all__ = ["ALL", "CaptionTask", "ChoiceTask", "PopeTask", "YesNoTask", "read_questions"]
__all__ += ["vocabulary_of", "zoo_image"]


@dataclass(frozen=True, kw_only=True)
class YesNoTask(QuestionTask):
    """A task of questions that are answered yes or no.

    Attributes:
        scores: Scores of a tool of the benchmark's own, see
            `mmdecode.evaluation.vision.yes_no_report.ScoreFunction`; ``None``: it has none, or
            `mmdecode.evaluation.vision.yes_no_report.TASKS` has them.
    """

    options: Mapping[str, Any] = field(default_factory=lambda: ASKING | YES_NO)
    scoring: Sequence[str] = ("resamples", "seed", "parser")
    scores: ScoreFunction | None = None

    kind = YesNoItem

    def report(self, rows: list[Any], given: Mapping[str, Any], **basis: Any) -> ItemReport[Any]:
        """Makes a `YesNoReport`; see `QuestionTask.report`."""
        from mmdecode.evaluation.vision.yes_no_report import TASKS, YesNoReport

        def scores(items: Sequence[YesNoItem], right: Sequence[bool]) -> dict[str, float]:
            with own_code(f"scores() of task {self.name} fails"):
                return dict(self.scores(items, right)) if self.scores else {}

        own = dataclasses.replace(self, scores=scores) if self.scores else self
        return YesNoReport(
            rows,
            task=self.name if self.name in TASKS else own,
            parser=given["parser"],
            baseline_controls=basis["conditions"]["controls"],
            **basis,
        )


@dataclass(frozen=True, kw_only=True)
class ChoiceTask(QuestionTask):
    """A task of multiple-choice questions."""

    kind = ChoiceItem

    def report(self, rows: list[Any], given: Mapping[str, Any], **basis: Any) -> ItemReport[Any]:
        """Makes a `ChoiceReport`; see `QuestionTask.report`."""
        from mmdecode.evaluation.vision.choice_report import ChoiceReport

        return ChoiceReport(rows, **basis)


@dataclass(frozen=True, kw_only=True)
class PopeTask(YesNoTask):
    """POPE, whose questions are in several files, one per split."""

    def read_paths(
        self, paths: Sequence[Path], left_out: list[str], *, zoo: bool, **given: Any
    ) -> Questions:
        """Reads the questions of some splits; see `QuestionTask.read_paths`."""
        splits = given.get("split") or ()
        unknown = [name for name in splits if name not in SPLITS]
        if unknown:
            raise UnknownNameError.of("split", unknown[0], SPLITS)
        files = _pope_files(paths, "pope_" if zoo else given.get("prefix") or "")
        items = read_pope(files, left_out)
        if splits:
            kept = [tuple(name for name in item.sets if name in splits) for item in items]
            pairs = zip(items, kept, strict=True)
            items = [dataclasses.replace(item, sets=sets) for item, sets in pairs if sets]
        if not items:
            raise InputError(f"there is no question of the split {' or '.join(splits)}")
        return Questions(items=items, files=files, unit=self.unit, warnings=warnings_of(items))


def _pope_files(paths: Sequence[Path], prefix: str) -> dict[str, Path]:
    if len(paths) == 1 and paths[0].is_dir():
        return find_pope(paths[0], prefix)
    found: dict[str, Path] = {}
    for path in paths:
        name = next((split for split in SPLITS if split in path.name), path.name.partition(".")[0])
        if name in found:
            raise OptionError(
                f"{found[name]} and {path} are both files of the split {name!r}; give one per split"
            )
        found[name] = path
    return found


@dataclass(frozen=True, kw_only=True)
class CaptionTask(QuestionTask):
    """A task of images to describe, whose captions are searched for objects."""

    kind = CaptionItem

    def read_paths(
        self, paths: Sequence[Path], left_out: list[str], *, zoo: bool, **given: Any
    ) -> Questions:
        """Reads the images; ``prompt`` takes the place of their questions, if it is given."""
        found = super().read_paths(paths, left_out, zoo=zoo)
        synonyms, prompt = given.get("synonyms"), given.get("prompt")
        items = found.items
        if prompt is not None:
            items = [dataclasses.replace(item, question=prompt) for item in items]
        words = str(synonyms) if synonyms else ZOO if zoo else None
        return dataclasses.replace(found, items=items, synonyms=words)

    def report(self, rows: list[Any], given: Mapping[str, Any], **basis: Any) -> ItemReport[Any]:
        """Makes a `CaptionReport`; see `QuestionTask.report`."""
        from mmdecode.evaluation.vision.caption_report import CaptionReport

        conditions = basis["conditions"]
        return CaptionReport(
            rows,
            vocabulary=vocabulary_of(conditions["synonyms"]),
            baseline_controls=conditions["controls"],
            **basis,
        )


def _files_in(pattern: str, path: Path) -> Mapping[str, Path]:
    files = sorted(path.rglob(pattern)) if path.is_dir() else [path]
    return {file.relative_to(path.parent).as_posix(): file for file in files}


POPE = PopeTask(
    name="pope",
    about="""POPE: is there an object in the image? Accuracy, share of yes, and margins, by split.

    --data is 'zoo', a folder with a file per split, or files (repeat it): JSON lines, csv or tsv
    with the columns image, text and label. Images are next to the files, or in --images. Answers
    go to items.jsonl in --out. A question that fails counts as wrong; the exit code is then 1.

    For example:

      mmdecode evaluate pope --model zoo:llava-scenes --guide vcd --data zoo --out run

      mmdecode evaluate pope --model llava-hf/llava-1.5-7b-hf --guide vcd --guide ritual:alpha=3
      --data coco/ --images val2014/ --suffix one-word --out run

      mmdecode evaluate pope --rescore run --parser vcd
    """,
    items=lambda path, left_out: read_pope({path.name: path}, left_out),
    options=ASKING | YES_NO | {"split": None, "prefix": ""},
    zoo=".",
    images=lambda path: None if path.is_dir() else path.parent,
)
CHAIR = CaptionTask(
    name="chair",
    about="""CHAIR: hallucinated objects in captions, with recall and length, also at equal length.

    --data is 'zoo', or JSON lines with image (or COCO's image_id) and objects, the names of the
    objects in the image. If a caption fails, it counts as empty and the exit code is 1.

    For example:

      mmdecode evaluate chair --model zoo:llava-scenes --guide vcd --greedy --data zoo --out run
    """,
    items=lambda path, left_out: read_chair(one_file(path, "chair"), left_out),
    options=ASKING | {"max_new_tokens": 128, "prompt": None, "synonyms": None},
    zoo="chair.jsonl.gz",
    images=lambda path: None,
)
MME = YesNoTask(
    name="mme",
    about="""MME: a yes- and a no-question about each image; with the scores of MME's own tool.

    --data is 'zoo', MME's folder (which may contain the images), or JSON lines with category,
    image, question and answer.

    For example:

      mmdecode evaluate mme --model zoo:llava-scenes --guide vcd --data zoo --out run
    """,
    items=read_mme,
    options=ASKING | YES_NO | {"parser": "mme"},
    zoo="mme.jsonl.gz",
    images=lambda path: path if path.is_dir() else None,
    files=lambda path: _files_in("*.txt", path),
    unit=lambda item: (item.image, item.sets),
)
AMBER = YesNoTask(
    name="amber",
    about="""AMBER: questions on existence, attributes and relations, with its own tool's scores.

    --data is a folder with query_discriminative.json and annotations.json; the images are in its
    folder image, or in --images.

    For example:

      mmdecode evaluate amber --model llava-hf/llava-1.5-7b-hf --guide vcd --data AMBER/data
      --images AMBER/image --out run
    """,
    items=read_amber,
    images=lambda path: path / "image" if (path / "image").is_dir() else None,
    files=lambda path: {file.name: file for file in sorted(path.glob("*.json*"))},
)
SPATIAL = ChoiceTask(
    name="spatial",
    about="""Spatial relations (What's Up): single questions, pairs and sets.

    --data is 'zoo', What's Up's JSON file, or JSON lines with image, question, options, answer and
    group; images are next to the file, or in --images.

    For example:

      mmdecode evaluate spatial --model zoo:llava-scenes --guide adaptvis --data zoo --out run
    """,
    items=read_spatial,
    zoo="spatial.jsonl.gz",
    unit=unit_of,
)
ALL: dict[str, QuestionTask] = {one.name: one for one in (POPE, CHAIR, MME, AMBER, SPATIAL)}


def read_questions(
    task: str,
    data: Sequence[str] = (ZOO,),
    **options: Any,
) -> Questions:
    """Reads the questions of a built-in task.

    Args:
        task: Name of the task, such as ``pope``.
        data: ``("zoo",)``, or paths. POPE: a folder with a file per split, or the files, tables of
            one's own among them; captions (``chair``): JSON lines of images and their objects; MME:
            its folder, or JSON lines; AMBER: its folder; spatial: JSON lines with options, or
            What's Up's file.
        **options: See `QuestionTask.questions`; further ones are ``split`` and ``prefix`` of POPE,
            ``synonyms`` and ``prompt`` of captions.

    Raises:
        InputError: A file cannot be read.
        OptionError: The options do not fit the task or the data, or the folder of the images is not
            known.
        UnknownNameError: There is no such task of questions, part or split.
    """
    if task not in ALL:
        raise UnknownNameError.of("task", task, ALL)
    return ALL[task].questions(data, **options)
