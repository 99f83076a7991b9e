"""`QuestionTask`: base class of tasks on images; tasks of yes/no and of choice questions.

A task of one's own needs a function that reads its items::

    TASK = YesNoTask(name="mine", items=read_mine)

See ``examples/own_task.py``.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mmdecode.errors import InputError, OptionError, UnknownNameError
from mmdecode.evaluation.task import Run, Task, own_code, settings_in
from mmdecode.evaluation.vision.answers import parser_of
from mmdecode.evaluation.vision.data import (
    ZOO,
    Questions,
    own_files,
    own_folder,
    refuse_repeats,
    zoo_image,
)
from mmdecode.evaluation.vision.items import (
    ITEMS,
    ChoiceItem,
    Item,
    LeftOut,
    YesNoItem,
    read_items,
    refuse_empty,
)
from mmdecode.evaluation.vision.modes import NONE, Mode, comparisons_of, modes_of
from mmdecode.evaluation.vision.yes_no import ScoreFunction

if TYPE_CHECKING:
    from mmdecode.evaluation.report.item_report import ItemReport
    from mmdecode.evaluation.vision.runs import Recorder
    from mmdecode.runs.rows import RowJournal
    from mmdecode.vlm.images import ImageSource

READING = ".reading"  # the image that is being read, see mmdecode.runs.crashes
SUFFIXES = {
    "none": "",
    "one-word": " Please answer this question with one word.",
    "short": "\nAnswer the question using a single word or phrase.",
}
"""Text appended to a question: ``none`` as POPE and RITUAL do, ``one-word`` as VCD does, ``short``
as LLaVA and lmms-eval do."""
ASKING: dict[str, Any] = {
    "data": None,
    "model": None,
    "guide": None,
    "images": None,
    "part": "test",
    "sample": None,
    "seeds": 5,
    "controls": True,
    "limit": None,
    "batch_size": 8,
    "prompt_cache": 2**30,
    "noise_by": "request",
    "max_new_tokens": 32,
    "warmup": 1,
    "output": None,
    "resume": False,
    "overwrite": False,
    "rescore": None,
    "resamples": 10_000,
    "device": "auto",
    "device_map": None,
    "dtype": "auto",
    "quantize": None,
    "seed": 0,
}
"""Options of every task on images."""
YES_NO: dict[str, Any] = {"suffix": "none", "parser": "leading", "redraw": True}


@dataclass(frozen=True, kw_only=True)
class QuestionTask(Task):
    """Base class of tasks on images.

    Attributes:
        items: Reads the items of a file or folder; takes its path, and a list for the messages of
            rows that cannot be used.
        zoo: Name of the task's file in the zoo's test sets; empty: the zoo has none.
        images: Returns the folder in which the data set keeps its images, from the path of the
            data; ``None``: it is not known.
        files: Returns the files of the questions by name, from the path of the data; a run is not
            resumed after one of them has changed.
        unit: Returns what a question belongs to; ``--limit`` keeps the questions of a unit
            together.
    """

    items: Callable[[Path, LeftOut], Iterable[Item]]
    about: str = ""
    options: Mapping[str, Any] = field(default_factory=lambda: ASKING)
    rows: str = ITEMS
    zoo: str = ""
    images: Callable[[Path], Path | None] = own_folder
    files: Callable[[Path], Mapping[str, Path]] = own_files
    unit: Callable[[Any], Hashable] = lambda item: item.id

    kind: ClassVar[type[Item]]
    """Class of the items."""

    def refuse(self, given: Mapping[str, Any]) -> None:
        """Refuses options that do not go together; see `Task.refuse`."""
        if not given["model"] and not given["rescore"]:
            raise OptionError(
                "no model; give --model, as llava-hf/llava-1.5-7b-hf, or --rescore for an earlier "
                "run"
            )
        super().refuse(given)
        if given.get("parser") is not None:
            parser_of(given["parser"])

    def questions(
        self,
        data: Sequence[str] = (ZOO,),
        *,
        part: str = "test",
        images: Path | None = None,
        **given: Any,
    ) -> Questions:
        """Reads the questions.

        Args:
            data: ``("zoo",)``, or paths.
            part: Part of the zoo's sets, ``development`` or ``test``.
            images: Folder of the images; ``None``: the folder in which the data set keeps them.
            **given: Options of the task's own.

        Raises:
            InputError: A file cannot be read.
            OptionError: The options do not fit the task or the data, or the folder of the images is
                not known.
            UnknownNameError: There is no such part.
        """
        zoo = list(data) == [ZOO]
        paths = self._in_zoo(part, images) if zoo else [Path(one) for one in data]
        missing = [path for path in paths if not path.exists()]
        if missing or not paths:
            raise InputError(
                f"{missing[0] if missing else '--data'} does not exist; expected 'zoo', a folder "
                "or files"
            )
        left_out: list[str] = []
        found = self.read_paths(paths, left_out, zoo=zoo, **given)
        folder = None
        if not zoo:
            folder = images or self.images(paths[0])
            if folder is None:
                raise OptionError(
                    f"the folder of the images of {paths[0]} is not known; give it with --images"
                )
        return dataclasses.replace(found, folder=folder, left_out=left_out)

    def read_paths(
        self, paths: Sequence[Path], left_out: list[str], *, zoo: bool, **given: Any
    ) -> Questions:
        """Reads the questions of paths, without the folder of the images; see `questions`."""
        if len(paths) > 1:
            raise OptionError(
                f"{self.name} reads one path, and --data gives {len(paths)}; give one"
            )
        [path] = paths
        with own_code(f"task {self.name} cannot read {path}"):
            found = list(self.items(path, left_out))
        for item in found:
            if not isinstance(item, self.kind):
                raise InputError(
                    f"task {self.name} reads {type(item).__name__} from {path}; a "
                    f"{type(self).__name__} takes {self.kind.__name__}"
                )
        refuse_empty(found, left_out, f"task {self.name} finds no question in {path}")
        items = refuse_repeats(found, path, left_out)
        return Questions(task=self.name, items=items, files=self.files(path), unit=self.unit)

    def _in_zoo(self, part: str, images: Path | None) -> list[Path]:
        from mmdecode.zoo.scene_sets import FIRST_SEED, FOLDER

        if part not in FIRST_SEED:
            raise UnknownNameError.of("part", part, FIRST_SEED)
        if images is not None:
            raise OptionError("the zoo draws its own images, which are scenes; leave out --images")
        if not self.zoo:
            raise OptionError(
                f"the zoo has no set for {self.name}; give the folder or file of its data with "
                "--data"
            )
        return [FOLDER / part / self.zoo.removesuffix(".")]

    def open(self, given: Mapping[str, Any]) -> Run:
        """Reads the questions and loads the model; see `Task.open`."""
        from mmdecode.evaluation.vision.runs import Recorder, journal_of
        from mmdecode.runs.conditions import surroundings
        from mmdecode.vlm.loading import load

        if not given["data"]:
            raise OptionError("nothing to ask; give --data with 'zoo', a folder or a file")
        own = {name: given[name] for name in given.keys() - ASKING.keys()}
        found = self.questions(given["data"], part=given["part"], images=given["images"], **own)
        questions = found.limited(given["limit"])
        questions.check_images()
        modes = modes_of(
            given["guide"] or [],
            greedy=given["sample"] is not True,
            seeds=[]
            if given["sample"] is False
            else range(given["seed"], given["seed"] + given["seeds"]),
            controls=given["controls"],
            yes_no=self.kind is YesNoItem,
        )
        suffix = given.get("suffix", "none")
        if suffix not in SUFFIXES and not suffix[:1].isspace():
            suffix = f" {suffix}"
        options: dict[str, Any] = {
            "suffix": SUFFIXES.get(suffix, suffix),
            **{name: given[name] for name in ("max_new_tokens", "batch_size", "seed")},
            "redraw": given.get("redraw", True),
            "warmup": given["warmup"],
        }
        if given["noise_by"] != "request":  # as before there was a choice
            options["noise_by"] = given["noise_by"]
        network, processor = load(
            given["model"], given["device"], given["dtype"], given["device_map"], given["quantize"]
        )
        recorder = Recorder(
            network,
            processor,
            questions.items,
            modes,
            questions.image,
            **options,
            prompt_cache=given["prompt_cache"],
        )
        settings = {
            "task": self.name,
            **surroundings(network),
            **{name: given[name] for name in ("model", "data")},
            "part": given["part"] if questions.folder is None else None,
            "split": given.get("split") or None,
            "files": questions.hashes,
            "images": None if questions.folder is None else str(questions.folder),
            "synonyms": questions.synonyms,
            "controls": given["controls"],
            "prompt": recorder.prompt,
            **options,
            "limit": None if questions is found else given["limit"],
            "modes": [dataclasses.asdict(mode) for mode in modes],
            "notes": list(questions.warnings),
        }
        if questions.left_out:
            settings["rows_left_out"] = len(questions.left_out)
            settings["notes"].append(
                f"{len(questions.left_out)} row{'s' * (len(questions.left_out) > 1)} of the data "
                "cannot be used and left out"
            )
        load_average = settings.pop("load_average")

        def report(rows: list[Any]) -> ItemReport[Any]:
            conditions = {**settings, "load_average": load_average} | recorder.prompt_tokens
            return self._reported(rows, modes, conditions, questions.report_images, given)

        closing = contextlib.ExitStack()
        return Run(
            report=report,
            record=lambda journal, progress: _record(
                recorder, questions, journal, given["output"], progress, closing
            ),
            journal=lambda folder, resume, overwrite: journal_of(
                folder, self.kind, settings, resume, overwrite, questions.folder
            ),
            total=recorder.total,
            doing="asking",
            notes=settings["notes"],
            left_out=questions.left_out,
            closing=closing,
        )

    def read(self, folder: Path, given: Mapping[str, Any]) -> Run:
        """Reads an earlier run; see `Task.read`."""
        settings = settings_in(folder)
        try:
            modes = [
                Mode(**known | {name: tuple(known[name]) for name in ("seeds", "against")})
                for known in settings["modes"]
            ]
            own = settings["task"]
        except (KeyError, TypeError) as error:
            raise InputError(f"{folder} is no run of questions: {error!r} is missing") from error
        if own != self.name:
            raise OptionError(
                f"{folder} holds a run of {own}, not of {self.name}; rescore it with 'evaluate "
                f"{own}', or with the file of that task"
            )
        order = {mode.name: number for number, mode in enumerate(modes)}
        rows = [row for row in read_items(folder, self.kind) if row.mode in order]
        images = settings["images"] or zoo_image
        return Run(
            report=lambda rows: self._reported(rows, modes, settings, images, given),
            rows=sorted(rows, key=lambda row: order[row.mode]),
            notes=settings["notes"],
        )

    def _reported(
        self,
        rows: list[Any],
        modes: Sequence[Mode],
        conditions: dict[str, Any],
        images: Any,
        given: Mapping[str, Any],
    ) -> ItemReport[Any]:
        return self.report(
            rows,
            given,
            controls=[mode.name for mode in modes if mode.control or mode.guide == NONE],
            conditions=conditions,
            against=comparisons_of(modes),
            images=images,
            resamples=given["resamples"],
            seed=given["seed"],
        )

    @abc.abstractmethod
    def report(self, rows: list[Any], given: Mapping[str, Any], **basis: Any) -> ItemReport[Any]:
        """Makes the report of rows.

        Args:
            rows: Answered items of all modes.
            given: All options of the command, by name.
            **basis: Arguments of `mmdecode.evaluation.report.item_report.ItemReport`.
        """


@dataclass(frozen=True, kw_only=True)
class YesNoTask(QuestionTask):
    """A task of questions that are answered yes or no.

    Attributes:
        scores: Scores of a tool of the benchmark's own, see
            `mmdecode.evaluation.vision.yes_no.ScoreFunction`; ``None``: it has none, or
            `mmdecode.evaluation.vision.yes_no_report.SCORERS` has them.
    """

    options: Mapping[str, Any] = field(default_factory=lambda: ASKING | YES_NO)
    scoring: Sequence[str] = ("resamples", "seed", "parser")
    scores: ScoreFunction | None = None

    kind = YesNoItem

    def report(self, rows: list[Any], given: Mapping[str, Any], **basis: Any) -> ItemReport[Any]:
        """Makes a `YesNoReport`; see `QuestionTask.report`."""
        from mmdecode.evaluation.vision.yes_no_report import TASKS, YesNoReport

        def scores(items: Sequence[YesNoItem], right: Sequence[bool]) -> Mapping[str, float]:
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


def _record(
    recorder: Recorder[Any],
    questions: Questions,
    journal: RowJournal[Any] | None,
    output: Path | None,
    progress: Callable[[Any], None],
    closing: contextlib.ExitStack,
) -> list[Any]:
    """Decodes all modes; notes which image is being read, in case reading it ends the process."""
    from mmdecode.runs.crashes import InFlight, suspects_in
    from mmdecode.vlm.crashes import watched

    def noted(name: str, source: ImageSource) -> ImageSource:
        def read() -> Any:
            if journal and questions.folder is not None:
                journal.note_read(str(questions.folder / name))
            return source.read()

        return dataclasses.replace(source, read=read)

    if journal and output:
        reading = InFlight(output / READING, suspects_in([output / READING]))
        closing.enter_context(contextlib.closing(reading))
        recorder.image = lambda name: noted(name, watched(questions.image(name), reading))
    return recorder.run(journal, progress)
