"""`QuestionTask`: base class of tasks on images; `Questions`: what they ask, with the images.

Questions are those of published files or of this project's zoo, a set of small models and test sets
on synthetic images (scenes), which are rendered.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import io
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mmdecode.errors import InputError, MissingExtraError, OptionError, UnknownNameError
from mmdecode.evaluation.task import ENGINE, Run, Task, own_code, settings_in
from mmdecode.evaluation.vision.answers import parser_of
from mmdecode.evaluation.vision.items import (
    ITEMS,
    Item,
    LeftOut,
    YesNoItem,
    file_hash,
    read_items,
    refuse_empty,
)
from mmdecode.evaluation.vision.modes import NONE, Mode, modes_of
from mmdecode.runs.engines import LOCAL

if TYPE_CHECKING:
    from mmdecode.evaluation.report.item_report import ItemReport
    from mmdecode.evaluation.vision.runs import Recorder
    from mmdecode.runs.rows import RowJournal
    from mmdecode.vlm.images import ImageSource

ZOO = "zoo"
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
    **ENGINE,
}
"""Options of every task on images."""
YES_NO: dict[str, Any] = {"suffix": "none", "parser": "leading", "redraw": True}


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Questions of a benchmark.

    Attributes:
        items: Each distinct question once.
        files: Files of the questions, by name.
        unit: Returns what a question belongs to; see `limited`.
        folder: Folder of the images; ``None``: they are scenes of the zoo, rendered when needed.
        synonyms: Words for the objects of captions, see
            `mmdecode.evaluation.vision.tasks.chair.vocabulary_of`.
        warnings: Peculiarities of the files that change scores, such as an old version.
        left_out: Error messages of the rows that were left out.
    """

    items: Sequence[Any]
    files: Mapping[str, Path]
    unit: Callable[[Any], Hashable]
    folder: Path | None = None
    synonyms: str | None = None
    warnings: Sequence[str] = ()
    left_out: Sequence[str] = ()

    def image(self, name: str) -> ImageSource:
        """Returns the source of an image; the image is read or rendered only when it is used."""
        from mmdecode.vlm.images import ImageSource, image_source

        path = self.file(name)
        return image_source(path, name) if path else ImageSource(name, partial(_scene, name))

    def file(self, image: str) -> str | None:
        """Path of an image's file; ``None``: it is a scene, or the name is empty."""
        return str(self.folder / image) if self.folder and image else None

    def check_images(self) -> None:
        """Checks that the folder contains at least one image of the questions.

        Raises:
            InputError: It contains none.
        """
        names = dict.fromkeys(item.image for item in self.items if item.image)
        if self.folder is None or not names:
            return
        if not any((self.folder / name).exists() for name in names):
            raise InputError(
                f"none of the {len(names)} images is in {self.folder}, such as "
                f"{next(iter(names))}; give their folder with --images"
            )

    def limited(self, limit: int | None) -> Questions:
        """Keeps the first ``limit`` questions, image by image, so that POPE's splits stay balanced.

        Pairs of MME and groups of spatial questions are kept whole, so there may be a few more.
        All questions stay, in their order, if the limit is ``None`` or leaves nothing out.
        """
        if limit is None:
            return self
        rank = {name: n for n, name in enumerate(dict.fromkeys(i.image for i in self.items))}
        ordered = sorted(self.items, key=lambda item: rank[item.image])
        begun = {self.unit(item) for item in ordered[:limit]}
        kept = [item for item in ordered if self.unit(item) in begun]
        if len(kept) == len(ordered):
            return self
        return dataclasses.replace(self, items=kept)


def own_files(path: Path) -> dict[str, Path]:
    """Files of the questions by name: the file itself, or the tables in a folder."""
    tables = {".csv", ".tsv", ".txt", ".json", ".jsonl", ".gz", ".parquet"}
    found = sorted(path.iterdir()) if path.is_dir() else [path]
    return {one.name: one for one in found if one == path or one.suffix.lower() in tables}


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
    images: Callable[[Path], Path | None] = lambda path: path if path.is_dir() else path.parent
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
            items = list(self.items(path, left_out))
        found: dict[str, Item] = {}
        for item in items:
            if not isinstance(item, self.kind):
                raise InputError(
                    f"task {self.name} reads {type(item).__name__} from {path}; a "
                    f"{type(self).__name__} takes {self.kind.__name__}"
                )
            if item.id in found:
                left_out.append(f"{path} contains the question {item.id!r} again; keep one of each")
            found.setdefault(item.id, item)
        refuse_empty(items, left_out, f"task {self.name} finds no question in {path}")
        return Questions(items=list(found.values()), files=self.files(path), unit=self.unit)

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
        from mmdecode.evaluation.vision.runs import Recorder
        from mmdecode.runs.conditions import surroundings
        from mmdecode.runs.rows import RowJournal
        from mmdecode.vlm.loading import load

        if not given["data"]:
            raise OptionError("nothing to ask; give --data with 'zoo', a folder or a file")
        own = {name: given[name] for name in given.keys() - ASKING.keys()}
        found = self.questions(given["data"], part=given["part"], images=given["images"], **own)
        questions = found.limited(given["limit"])
        questions.check_images()
        sampled = 0 if given["sample"] is False else given["seeds"]
        modes = modes_of(
            given["guide"] or [],
            greedy=given["sample"] is not True,
            seeds=range(given["seed"], given["seed"] + sampled),
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
            "files": {name: file_hash(path) for name, path in questions.files.items()},
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
            conditions = {**settings, "load_average": load_average}
            if given["engine"] == LOCAL:  # workers' counters are not known
                conditions |= recorder.prompt_tokens
            return self._reported(rows, modes, conditions, given)

        closing = contextlib.ExitStack()
        return Run(
            report=report,
            record=partial(_record, recorder, questions, given["output"], closing),
            journal=lambda folder, resume, overwrite: RowJournal(
                folder / ITEMS,
                lambda path: read_items(path, self.kind),
                self.kind.key,
                settings,
                resume,
                overwrite,
                lambda item: questions.file(item.image),
            ),
            items=questions.items,
            failed=recorder.failed,
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
        return Run(
            report=lambda rows: self._reported(rows, modes, settings, given),
            rows=sorted(rows, key=lambda row: order[row.mode]),
            notes=settings["notes"],
        )

    def _reported(
        self,
        rows: list[Any],
        modes: Sequence[Mode],
        conditions: dict[str, Any],
        given: Mapping[str, Any],
    ) -> ItemReport[Any]:
        return self.report(
            rows,
            given,
            controls=[mode.name for mode in modes if mode.control or mode.guide == NONE],
            conditions=conditions,
            against={mode.name: mode.against for mode in modes},
            images=conditions["images"] or zoo_image,
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


def _record(
    recorder: Recorder[Any],
    questions: Questions,
    output: Path | None,
    closing: contextlib.ExitStack,
    journal: RowJournal[Any] | None,
    progress: Callable[[Any], None],
    **part: Any,
) -> list[Any]:
    """Decodes all modes; notes which image is being read, in case reading it ends the process."""
    from mmdecode.runs.crashes import InFlight, suspects_in
    from mmdecode.vlm.jobs import watched

    if journal and output:
        reading = InFlight(output / READING, suspects_in([output / READING]))
        closing.enter_context(contextlib.closing(reading))

        def image(name: str) -> ImageSource:
            path = questions.file(name)
            return journal.noted.noting(
                watched(questions.image(name), reading), [path] if path else []
            )

        recorder.image = image
    return recorder.run(journal, progress, **part)


def zoo_image(name: str) -> bytes:
    """Renders a scene of the zoo to PNG data.

    Raises:
        InputError: There is no scene of that name.
    """
    data = io.BytesIO()
    _scene(name).save(data, "PNG")
    return data.getvalue()


def _scene(name: str) -> Any:
    """Renders a scene of the zoo.

    Raises:
        InputError: There is no scene of that name.
        MissingExtraError: Pillow is not installed.
    """
    with MissingExtraError.instead("drawing scenes needs Pillow", extra="vlm"):
        from PIL import Image

    from mmdecode.zoo.scene_sets import scene_of
    from mmdecode.zoo.scenes import render

    return Image.fromarray(render(scene_of(name)))
