"""Questions of a benchmark with their images, from published files or from this project's zoo.

The zoo is a set of small models and test sets on synthetic images (scenes), which are rendered.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdecode.errors import InputError, MissingExtraError
from mmdecode.evaluation.vision.items import Some, file_hash

if TYPE_CHECKING:
    from mmdecode.vlm.images import ImageSource

ZOO = "zoo"


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Questions of a benchmark.

    Attributes:
        task: Name of the task.
        items: Each distinct question once.
        files: Files of the questions, by name.
        unit: Returns what a question belongs to; see `limited`.
        folder: Folder of the images; ``None``: they are scenes of the zoo, rendered when needed.
        synonyms: Words for the objects of captions, see
            `mmdecode.evaluation.vision.tasks.chair.vocabulary_of`.
        warnings: Peculiarities of the files that change scores, such as an old version.
        left_out: Error messages of the rows that were left out.
    """

    task: str
    items: Sequence[Any]
    files: Mapping[str, Path]
    unit: Callable[[Any], Hashable]
    folder: Path | None = None
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
        from mmdecode.vlm.images import ImageSource, image_source

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


def refuse_repeats(items: Iterable[Some], path: Path, left_out: list[str]) -> list[Some]:
    """Questions without repeated ids; the first of each id is kept."""
    found: dict[str, Some] = {}
    for item in items:
        if item.id in found:
            left_out.append(f"{path} contains the question {item.id!r} again; keep one of each")
        found.setdefault(item.id, item)
    return list(found.values())


def own_folder(path: Path) -> Path:
    """Folder of the images of a data set that keeps them next to its file."""
    return path if path.is_dir() else path.parent


def own_files(path: Path) -> dict[str, Path]:
    """Files of the questions by name: the file itself, or the tables in a folder."""
    tables = {".csv", ".tsv", ".txt", ".json", ".jsonl", ".gz", ".parquet"}
    found = sorted(path.iterdir()) if path.is_dir() else [path]
    return {one.name: one for one in found if one == path or one.suffix.lower() in tables}


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
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("drawing scenes needs Pillow", extra="vlm") from error

    from mmdecode.zoo.scene_sets import scene_of
    from mmdecode.zoo.scenes import render

    return Image.fromarray(render(scene_of(name)))
