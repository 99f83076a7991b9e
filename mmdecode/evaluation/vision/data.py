"""Questions of a benchmark with their images, from published files or from this project's zoo.

The zoo is a set of small models and test sets on synthetic images (scenes), which are rendered.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mmdecode.errors import InputError, MissingExtraError, OptionError, UnknownNameError
from mmdecode.evaluation.vision.items import Item, YesNoItem, file_hash, read_bytes, read_json_lines
from mmdecode.evaluation.vision.tasks.amber import read_amber
from mmdecode.evaluation.vision.tasks.chair import (
    Vocabulary,
    coco_vocabulary,
    read_chair,
    read_synonyms,
)
from mmdecode.evaluation.vision.tasks.mme import read_mme
from mmdecode.evaluation.vision.tasks.pope import (
    SPLITS,
    find_pope,
    read_pope,
    structure,
    warnings_of,
)
from mmdecode.evaluation.vision.tasks.spatial import read_choices, read_vsr, read_whats_up, unit_of
from mmdecode.vlm.images import ImageSource, image_source

ZOO = "zoo"
Task = Literal["pope", "chair", "mme", "amber", "spatial"]
TASKS: tuple[Task, ...] = ("pope", "chair", "mme", "amber", "spatial")


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Questions of a benchmark.

    Attributes:
        task: One of `TASKS`, or ``vsr`` if the spatial questions are statements to be judged.
        items: Each distinct question once.
        files: Files of the questions, by name.
        folder: Folder of the images; ``None``: they are scenes of the zoo, rendered when needed.
        synonyms: Words for the objects of captions, see `vocabulary_of`.
        warnings: Peculiarities of the files that change scores, such as an old version.
        left_out: Error messages of the rows that were left out.
    """

    task: str
    items: Sequence[Any]
    files: Mapping[str, Path]
    folder: Path | None
    synonyms: str | None = None
    warnings: Sequence[str] = field(default=())
    left_out: Sequence[str] = field(default=())

    @property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of each file."""
        return {name: file_hash(path) for name, path in self.files.items()}

    @property
    def report_images(self) -> Path | Callable[[str], bytes]:
        """Folder of the images, or a function from a name to PNG data, as a report takes it."""
        return zoo_image if self.folder is None else self.folder

    def image(self, name: str) -> ImageSource:
        """Returns the source of an image; the image is read or rendered only when it is used."""
        if self.folder is not None:
            return image_source(str(self.folder / name), name)
        return ImageSource(name, partial(_scene, name))

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
        ``None`` keeps all questions.
        """
        if limit is None:
            return self
        rank = {name: n for n, name in enumerate(dict.fromkeys(i.image for i in self.items))}
        ordered = sorted(self.items, key=lambda item: rank[item.image])
        unit = {"mme": lambda item: (item.image, item.sets), "spatial": unit_of}.get(
            self.task, lambda item: item.id
        )
        begun = {unit(item) for item in ordered[:limit]}
        return dataclasses.replace(self, items=[item for item in ordered if unit(item) in begun])


def read_questions(
    task: str,
    data: Sequence[str] = (ZOO,),
    *,
    part: Literal["development", "test"] = "test",
    images: Path | None = None,
    splits: Sequence[str] = (),
    prefix: str = "",
    synonyms: str | None = None,
) -> Questions:
    """Reads the questions of a task.

    Args:
        task: One of `TASKS`.
        data: ``("zoo",)``, or paths. POPE: a folder with a file per split, or the files, tables of
            one's own among them; captions (``chair``): JSON lines of images and their objects; MME:
            its folder, or JSON lines; AMBER: its folder; spatial: JSON lines with options, What's
            Up's file, or VSR's file.
        part: Part of the zoo's sets, development or test.
        images: Folder of the images; ``None``: the folder in which the data set keeps them.
        splits: Splits of POPE; empty: all.
        prefix: First characters of the names of POPE's files, if a folder holds several sets.
        synonyms: Words for the objects of captions, see `vocabulary_of`; ``None``: the zoo's words
            for the zoo, otherwise COCO's.

    Raises:
        InputError: A file cannot be read.
        OptionError: The options do not fit the task or the data, or the folder of the images is not
            known.
        UnknownNameError: There is no such task, part or split.
    """
    if task not in TASKS:
        raise UnknownNameError.of("task", task, TASKS)
    unknown = [name for name in splits if name not in SPLITS]
    if unknown:
        raise UnknownNameError.of("split", unknown[0], SPLITS)
    zoo = list(data) == [ZOO]
    if zoo:
        from mmdecode.zoo.scene_sets import FIRST_SEED, FOLDER

        if part not in FIRST_SEED:
            raise UnknownNameError.of("part", part, FIRST_SEED)
        if images is not None:
            raise OptionError("the zoo draws its own images, which are scenes; leave out --images")
        if task == "amber":
            raise OptionError("the zoo has no set for amber; give AMBER's folder with --data")
        folder = FOLDER / part
        paths = [folder if task == "pope" else folder / f"{task}.jsonl.gz"]
        synonyms = synonyms or ZOO
        prefix = "pope_"
    else:
        paths = [Path(one) for one in data]
        missing = [path for path in paths if not path.exists()]
        if missing or not paths:
            raise InputError(
                f"{missing[0] if missing else '--data'} does not exist; expected 'zoo', a folder "
                "or files"
            )
    left_out: list[str] = []
    if task == "pope":
        files = _pope_files(paths, prefix)
        items: Sequence[Item] = _within(read_pope(files, left_out), splits)
        warnings = warnings_of(structure([i for i in items if isinstance(i, YesNoItem)]))
    else:
        if len(paths) > 1:
            raise OptionError(f"{task} reads one path, and --data gives {len(paths)}; give one")
        path, warnings = paths[0], []
        task, read, files = _read(task, path, left_out)
        items = _once(read, path, left_out)
    return Questions(
        task=task,
        items=items,
        files=files,
        folder=None if zoo else images or _own_images(task, paths[0]),
        synonyms=synonyms if task == "chair" else None,
        warnings=warnings,
        left_out=left_out,
    )


def _once(items: Sequence[Item], path: Path, left_out: list[str]) -> list[Item]:
    """Questions without repeated ids; the first of each id is kept."""
    found: dict[str, Item] = {}
    for item in items:
        if item.id in found:
            left_out.append(f"{path} contains the question {item.id!r} again; keep one of each")
        found.setdefault(item.id, item)
    return list(found.values())


def vocabulary_of(synonyms: str | None) -> Vocabulary:
    """Returns the words for the objects that captions may mention.

    Args:
        synonyms: Path of a file in the format of
            `mmdecode.evaluation.vision.tasks.chair.read_synonyms`; `ZOO`: the words of the zoo's
            scenes; ``None``: COCO's.

    Raises:
        InputError: The file cannot be read.
    """
    if synonyms is None:
        return coco_vocabulary()
    if synonyms == ZOO:
        from mmdecode.zoo.scene_sets import FOLDER

        return Vocabulary(read_synonyms(FOLDER / "synonyms.txt"))
    return Vocabulary(read_synonyms(Path(synonyms)))


def zoo_image(name: str) -> bytes:
    """Renders a scene of the zoo to PNG data.

    Raises:
        InputError: There is no scene of that name.
    """
    data = io.BytesIO()
    _scene(name).save(data, "PNG")
    return data.getvalue()


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


def _within(items: Sequence[YesNoItem], splits: Sequence[str]) -> list[YesNoItem]:
    """Questions of the given splits of POPE; all questions if ``splits`` is empty."""
    if not splits:
        return list(items)
    kept = [
        dataclasses.replace(item, sets=tuple(name for name in item.sets if name in splits))
        for item in items
    ]
    found = [item for item in kept if item.sets]
    if not found:
        raise InputError(f"there is no question of the split {' or '.join(splits)}")
    return found


def _read(
    task: str, path: Path, left_out: list[str]
) -> tuple[str, Sequence[Item], dict[str, Path]]:
    """The task (``vsr`` for a file of statements), its questions, and their files."""
    if task == "amber":
        files = sorted(path.glob("*.json*"))
        return task, read_amber(path, left_out), {file.name: file for file in files}
    if task == "mme":
        files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
        named = {file.relative_to(path.parent).as_posix(): file for file in files}
        return task, read_mme(path, left_out), named
    if path.is_dir():
        raise OptionError(f"{path} is a folder; {task} reads one file: give it with --data")
    one = {path.name: path}
    if task == "chair":
        return task, read_chair(path, left_out), one
    if read_bytes(path).lstrip()[:1] == b"[":
        return task, read_whats_up(path, left_out), one
    _, first = next(read_json_lines(path, []), ("", {}))
    if "caption" in first:
        return "vsr", read_vsr(path, left_out=left_out), one
    return task, read_choices(path, left_out=left_out), one


def _own_images(task: str, path: Path) -> Path:
    """Folder in which a data set keeps its images."""
    if task == "mme" and path.is_dir():
        return path
    if task == "amber" and (path / "image").is_dir():
        return path / "image"
    if task == "pope" and path.is_file():
        return path.parent
    if task == "spatial":
        return path.parent
    raise OptionError(f"the folder of the images of {path} is not known; give it with --images")


def _scene(name: str) -> Any:
    """Renders a scene of the zoo.

    Raises:
        InputError: There is no scene of that name.
        MissingExtraError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("drawing scenes needs Pillow", extra="vlm") from error

    from mmdecode.zoo.scene_sets import scene_of
    from mmdecode.zoo.scenes import render

    return Image.fromarray(render(scene_of(name)))
