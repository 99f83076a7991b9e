"""A folder of generated images that is resumed after interruptions.

Each image is a PNG with its settings as text metadata, and has a JSON line in the file `RESULTS`;
the PNG is written first, so that every line has its image. The file `mmdecode.runs.files.RUN` holds
the settings. A run is resumed only on request and only under the same settings; failed images are
tried again. At the end of a run the lines are sorted in the order of the requests, so that an
interrupted and resumed run leaves the same folder.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

from mmdecode.errors import InputError, MissingExtraError
from mmdecode.image_ar.results import request_name
from mmdecode.runs.crashes import Batches, ended_over
from mmdecode.runs.files import (
    RUN,
    append_line,
    check_settings,
    claimed,
    complete_lines,
    explained,
    is_own,
    note_settings,
    open_append,
    refuse_foreign,
    to_json,
    write_file,
)
from mmdecode.runs.items import Failed, tried, written

if TYPE_CHECKING:
    from PIL.Image import Image

    from mmdecode.image_ar.results import GeneratedImage, ImageRequest

BATCHES = ".decoding"
"""File in the folder with the names of images in progress, and of images that ended a process."""

MEMORY_HINT = "draw smaller images, or on another device"
"""Hint in error messages when an image needs too much memory."""
RESULTS = "results.jsonl"
GRID = "grid.png"
CODES = "codes"
"""Key of the PNG text that holds the codes, as JSON."""
SHOWS = "shows"
"""Key of the PNG text with a checksum of the pixels that the codes decode to."""
_GAP = 2


class ImageFolder:
    """The images of a run, on disk.

    Args:
        folder: The folder; created if it does not exist.
        settings: Settings that may change an image.
        resume: Whether an existing folder is continued.
        overwrite: Whether to replace files that this package did not write and, without
            ``resume``, earlier results, which are deleted when the first image is written.

    Attributes:
        batches: File with the images being generated, in case one ends the process; set by `todo`.

    Raises:
        OptionError: The folder holds images and ``resume`` is not set; the images belong to other
            settings; or another run is writing there.
        InputError: The folder cannot be read or written.
    """

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], resume: bool, overwrite: bool = False
    ) -> None:
        self.folder, self._overwrite = folder, overwrite
        self._labels: Mapping[int, str] = {}
        self._texts: Mapping[str, Any] = {}
        self._results, self._settings = folder / RESULTS, settings
        self._file: BinaryIO | None = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(claimed(folder))
            with explained(folder):
                if not is_own(folder / RUN):
                    refuse_foreign([folder / RUN, self._results], overwrite)
                there = (folder / RUN).exists() or self._results.exists()
                self._done: set[str] = set()
                if resume or not (overwrite and there):
                    self._file = open_append(self._results)
                    stack.callback(self._file.close)
                    if self._results.stat().st_size:
                        check_settings(folder, settings, resume)
                    found = list(self._lines())
                    os.truncate(self._results, sum(len(line) for line, _ in found))
                    note_settings(folder, settings)
                    self._done = {line["id"] for _, line in found if "error" not in line}
            self._closing = stack.pop_all()

    def close(self) -> None:
        """Closes the file of lines."""
        self._closing.close()

    def _open_lines(self) -> BinaryIO:
        """Opens a new file of lines after deleting the old one."""
        self._results.unlink(missing_ok=True)
        note_settings(self.folder, self._settings, self._overwrite)
        file = open_append(self._results)
        self._closing.callback(file.close)
        return file

    def begin(self, labels: Mapping[int, str], texts: Mapping[str, Any]) -> None:
        """Sets the names of classes, and the texts that every PNG gets as metadata."""
        self._labels, self._texts = labels, texts

    def name(self, request: ImageRequest | GeneratedImage) -> str:
        """Returns the name of an image, which is also the stem of its file."""
        condition = request.condition
        if isinstance(condition, int):
            label = self._labels.get(condition, "class").partition(",")[0]
            what = f"{_slug(label)}-{condition}"
        else:
            digest = hashlib.blake2b(condition.encode(), digest_size=3).hexdigest()
            what = f"{_slug(condition)}-{digest}"
        return f"{what}-{request.ordinal:03d}"

    def todo(self, requests: Sequence[ImageRequest], grid: bool = False) -> list[ImageRequest]:
        """Returns the requests whose images do not exist yet.

        Args:
            requests: All requests.
            grid: Whether the file `GRID` will be written too.

        Raises:
            OptionError: Files that this package did not write would be replaced.
        """
        found = [
            request
            for request in requests
            if self.name(request) not in self._done
            or not (self.folder / f"{self.name(request)}.png").exists()
        ]
        files = [self.folder / f"{self.name(request)}.png" for request in found]
        refuse_foreign([*files, *([self.folder / GRID] if grid else [])], self._overwrite)
        note = self.folder / BATCHES
        alone = {} if self._file is None else ended_over([note], set(map(request_name, found)))
        self.batches = Batches(note, alone)
        self._closing.callback(self.batches.close)
        return found

    def add(self, image: GeneratedImage) -> dict[str, Any]:
        """Writes an image and its line, and flushes both.

        Returns:
            The line; it has an ``error`` if generating, decoding or writing the image failed.

        Raises:
            InputError: The folder cannot be written.
        """
        line = self.line(image)
        with explained(self.folder):
            self._file = self._file or self._open_lines()
            if not image.error:
                png = tried(lambda: as_png(image, {**self._texts, **line}), MEMORY_HINT)
                if not isinstance(png, Failed):
                    file = self.folder / line["file"]
                    data = png
                    png = (
                        written(lambda: write_file(file, data, self._overwrite), MEMORY_HINT) or b""
                    )
                if isinstance(png, Failed):
                    failed = replace(image, error=png.error, kind=png.kind)
                    line = self.line(failed)
            append_line(self._file, to_json(line).encode() + b"\n")
            self.batches.cleared(request_name(image))
        return line

    def line(self, image: GeneratedImage) -> dict[str, Any]:
        """Returns the line of an image; it has no timings, so that every run writes the same."""
        name = self.name(image)
        line: dict[str, Any] = {
            "id": name,
            "condition": image.condition,
            "label": image.label,
            "ordinal": image.ordinal,
            "seed": image.seed,
        }
        if image.error:
            return line | {"error": image.error, "kind": image.kind}
        line |= {"file": f"{name}.png", "law": image.guarantee, "passes": image.passes}
        if image.completion is not None:
            line["completion"] = image.completion
        if image.log_likelihood is not None:
            line["log_likelihood"] = image.log_likelihood
        return line

    def finish(self, requests: Sequence[ImageRequest], grid: bool) -> None:
        """Sorts the lines and keeps one per image: its result, else its last error.

        Args:
            requests: All requests, in order.
            grid: Whether to write the file `GRID`, which shows all images, a row per condition.
        """
        order = {self.name(request): index for index, request in enumerate(requests)}
        lines: dict[str, tuple[bytes, bool]] = {}
        for line, found in self._lines():
            generated = "error" not in found
            if generated or not lines.get(found["id"], (b"", False))[1]:
                lines[found["id"]] = line, generated
        # images of an earlier, longer run stay, after the others
        ordered = sorted(lines, key=lambda name: order.get(name, len(order)))
        with explained(self.folder):
            write_file(self._results, b"".join(lines[name][0] for name in ordered))
            if grid:
                rows: dict[int | str, list[Path]] = {}
                for request in requests:
                    file = self.folder / f"{self.name(request)}.png"
                    rows.setdefault(request.condition, []).append(file)
                write_file(
                    self.folder / GRID, _encoded(laid_out(list(rows.values()))), self._overwrite
                )

    def _lines(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Yields each line and its JSON object; skips a last line that a crash cut off."""
        for number, line in enumerate(complete_lines(self._results), 1):
            try:
                found = json.loads(line)
                _ = found["id"], found["condition"]
            except (ValueError, KeyError, TypeError):
                raise InputError(
                    f"{self._results}, line {number} is no result; remove the line, and "
                    "--resume generates that image again"
                ) from None
            yield line, found


def read_prompts(path: Path) -> list[tuple[str, str | InputError]]:
    """Reads a file of prompts; returns ``FILE, line N`` and text (or error) of each filled line.

    Raises:
        InputError: The file cannot be read, or is empty.
    """
    try:
        data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error}); expected a text file in UTF-8, one prompt a line"
        ) from error
    found: list[tuple[str, str | InputError]] = []
    for number, line in enumerate(data.splitlines(), 1):
        where = f"{path}, line {number}"
        try:
            text = line.decode().strip()
        except UnicodeDecodeError:
            found.append((where, InputError(f"{where} is not UTF-8 text; write it as UTF-8")))
            continue
        if text:
            found.append((where, text))
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
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("images need Pillow", extra="image") from error
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
