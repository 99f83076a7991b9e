"""Folder of generated images of a job, see `mmdecode.runs.journal`; PNGs; lists of prompts."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmdecode.errors import InputError, MissingExtraError
from mmdecode.image_ar.results import request_name
from mmdecode.runs.files import explained, to_json, write_file
from mmdecode.runs.items import Failed, tried, written
from mmdecode.runs.journal import Journal, Unit
from mmdecode.runs.tables import lines_of

if TYPE_CHECKING:
    from PIL.Image import Image

    from mmdecode.image_ar.generator import ImageGenerator
    from mmdecode.image_ar.results import GeneratedImage, ImageRequest

MEMORY_HINT = "draw smaller images, or on another device"
"""Hint in error messages when an image needs too much memory."""
GRID = "grid.png"
CODES = "codes"
"""Key of the PNG text that holds the codes, as JSON."""
SHOWS = "shows"
"""Key of the PNG text with a checksum of the pixels that the codes decode to."""
_GAP = 2


class ImageFolder(Journal["ImageRequest"]):
    """The images of a run, on disk: a PNG for each, with its settings as text, and a line.

    The names of images depend on the model's labels, see `name_by`, and so do the items; see
    ``items_of`` of `mmdecode.runs.work.run`.

    Args:
        folder: The folder; created if it does not exist.
        settings: Settings that may change an image.
        options: Options of `mmdecode.image_ar.ImageGenerator.images`.
        grid: Whether all images are also written as one, the file `GRID`.
        **how: See `Journal`.
    """

    again = "generates that image again"
    fields = ("condition",)
    needs_files = True
    doing, measure = "drawing", "tokens"

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        options: dict[str, Any] | None = None,
        grid: bool = False,
        **how: Any,
    ) -> None:
        super().__init__(folder, settings, **how)
        self.options = options or {}
        self.besides = [folder / GRID] if grid else []
        self._labels: Mapping[int, str] = {}
        self._texts: Mapping[str, Any] = {}
        self._repeatable = True

    def name_by(
        self, labels: Mapping[int, str], texts: Mapping[str, Any], repeatable: bool = True
    ) -> None:
        """Sets the names of classes, and the texts that every PNG gets as metadata.

        Args:
            labels: Names of classes by number.
            texts: Texts of every PNG.
            repeatable: Whether an image always takes the same number of passes, see
                `mmdecode.engine.capabilities.DrafterCapabilities`; if not, lines do not have it.
        """
        self._labels, self._texts, self._repeatable = labels, texts, repeatable

    def id_of(self, item: ImageRequest | GeneratedImage) -> str:
        """Returns the name of an image, which is also the stem of its file."""
        condition = item.condition
        if isinstance(condition, int):
            label = self._labels.get(condition, "class").partition(",")[0]
            what = f"{_slug(label)}-{condition}"
        else:
            digest = hashlib.blake2b(condition.encode(), digest_size=3).hexdigest()
            what = f"{_slug(condition)}-{digest}"
        return f"{what}-{item.ordinal:03d}"

    def noted_as(self, item: ImageRequest) -> str:
        """Condition and ordinal, as the generator notes an image."""
        return request_name(item)

    def files(self, item: ImageRequest) -> list[Path]:
        """The PNG."""
        return [self.folder / f"{self.id_of(item)}.png"]

    def decode(
        self, model: ImageGenerator, unit: Unit[ImageRequest], meter: Callable[[float], None]
    ) -> Iterator[GeneratedImage]:
        """Generates the images of a unit; see `Journal.decode`."""
        model.batch = unit.batch_size
        return model.images(unit.items, on_tokens=meter, watch=self.watch, **self.options)

    def crashed(self, item: ImageRequest, failed: Failed) -> GeneratedImage:
        """The failure of an image; see `Journal.crashed`."""
        from mmdecode.image_ar.results import GeneratedImage

        label = self._labels.get(item.condition) if isinstance(item.condition, int) else None
        known = {"label": label, "seed": self._settings["seed"], "guarantee": ""}
        return GeneratedImage(**vars(item), **known, error=failed.error, kind=failed.kind)

    def id_of_result(self, result: GeneratedImage) -> str:
        """The name of the image."""
        return self.id_of(result)

    def add(self, result: GeneratedImage) -> dict[str, Any]:
        """Writes an image and its line, and flushes both; see `Journal.add`.

        Returns:
            The line; it has an ``error`` if generating, decoding or writing the image failed.
        """
        line = self.line(result)
        item = self.given[line["id"]]
        if line["id"] in self.done:
            return line
        with explained(self.folder):
            self.begin_writing()
            if not result.error:
                texts = {**self._texts, **line}
                found: bytes | Failed | None = tried(lambda: as_png(result, texts), MEMORY_HINT)
                if isinstance(found, bytes):
                    write = partial(write_file, self.folder / line["file"], found, self._overwrite)
                    found = written(write, MEMORY_HINT)
                if isinstance(found, Failed):
                    line = self.line(replace(result, error=found.error, kind=found.kind))
        self.append(item, line)
        return line

    def line(self, image: GeneratedImage) -> dict[str, Any]:
        """Returns the line of an image; it has no timings, so that every run writes the same."""
        name, shared = self.id_of(image), ("condition", "label", "ordinal", "seed")
        line = {"id": name} | {field: getattr(image, field) for field in shared}
        if image.error:
            return line | {"error": image.error, "kind": image.kind}
        line |= {"file": f"{name}.png", "law": image.guarantee}
        more = {
            "passes": image.passes if self._repeatable else None,
            "completion": image.completion,
            "log_likelihood": image.log_likelihood,
        }
        return line | {name: value for name, value in more.items() if value is not None}

    def finish(self) -> None:
        """Merges the lines; writes the file `GRID`, which shows all images, a row per condition."""
        super().finish()
        if not self.besides:
            return
        rows: dict[int | str, list[Path]] = {}
        for request in self.items:
            rows.setdefault(request.condition, []).extend(self.files(request))
        with explained(self.folder):
            write_file(self.folder / GRID, _encoded(laid_out(list(rows.values()))), self._overwrite)


def read_prompts(path: Path) -> list[tuple[str, str | InputError]]:
    """Reads a file of prompts; returns ``FILE, line N`` and text (or error) of each filled line.

    Raises:
        InputError: The file cannot be read, or is empty.
    """
    try:
        text = path.read_text("utf-8-sig", "surrogateescape")
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error}); expected a text file in UTF-8, one prompt a line"
        ) from error
    lines = lines_of(text, path, lambda line, where: line.strip())
    found = [(f"{path}, line {number}", line) for number, line in lines]
    if not found:
        raise InputError(f"{path} is empty; expected one prompt or class on each line")
    return found


def as_png(image: GeneratedImage, texts: Mapping[str, Any]) -> bytes:
    """Encodes an image as PNG; its metadata hold ``texts`` and the image's codes."""
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    for name, value in texts.items():
        if value is not None:
            info.add_text(name, value if isinstance(value, str) else to_json(value))
    info.add_text(CODES, json.dumps(image.codes.tolist()), zip=True)
    info.add_text(SHOWS, _digest(image.image))
    return _encoded(image.image, pnginfo=info)


def codes_in(path: Path, model: str) -> Tensor | None:
    """Reads the codes from the metadata of a PNG, ``(rows, columns)``.

    Args:
        path: The file.
        model: Name of the model that the codes must come from, as the PNG has it.

    Returns:
        The codes; ``None`` if the file has none, if another model generated them, or if the pixels
        have been changed.
    """
    with MissingExtraError.instead("images need Pillow", extra="image"):
        from PIL import Image
    try:
        with Image.open(path) as image:
            texts = getattr(image, "text", {})
            if CODES not in texts or texts.get("model") != model:
                return None
            if texts.get(SHOWS) != _digest(image):
                return None
        codes = torch.tensor(json.loads(texts[CODES]))
    except (OSError, ValueError):
        return None  # the error is raised when the pixels are read
    return codes if codes.ndim == 2 else None


def laid_out(rows: Sequence[Sequence[Path]]) -> Image:
    """Pastes image files into one image, row by row; missing files stay white."""
    from PIL import Image

    sizes = []
    for file in (file for row in rows for file in row if file.exists()):
        with Image.open(file) as image:
            sizes.append(image.size)
    wide, tall = map(max, zip(*sizes, strict=True)) if sizes else (1, 1)
    columns = max(map(len, rows))
    page = Image.new(
        "RGB", (columns * (wide + _GAP) - _GAP, len(rows) * (tall + _GAP) - _GAP), "white"
    )
    for y, row in enumerate(rows):
        for x, file in enumerate(row):
            if file.exists():
                with Image.open(file) as image:
                    page.paste(image, (x * (wide + _GAP), y * (tall + _GAP)))
    return page


def _digest(image: Image) -> str:
    """Checksum of the pixels."""
    rgb = image.convert("RGB")
    data = b"%d %d " % rgb.size + rgb.tobytes()
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _encoded(image: Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:40].strip("-") or "image"
