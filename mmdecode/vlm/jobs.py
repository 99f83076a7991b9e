"""A file of answers that is resumed after interruptions.

Each answer is a JSON line, appended and flushed as soon as its batch is decoded; a file next to it,
whose name ends in ``run.json``, holds the settings. A run is resumed only on request, only under
the same settings, and only if the ids still have the same questions; failed questions are tried
again. At the end of a run the lines are sorted in the order of the input, one per question, so that
an interrupted and resumed run leaves the same file. A line repeats ``id``, ``images`` and
``question``, so that the file can itself be used as a table of questions.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from mmdecode.errors import InputError, OptionError
from mmdecode.runs.changes import Inputs
from mmdecode.runs.crashes import Batches, InFlight, ended_over, suspects_in
from mmdecode.runs.files import (
    append_line,
    check_settings,
    complete_lines,
    explained,
    is_own,
    lock,
    note_settings,
    open_append,
    refuse_foreign,
    run_of,
    to_json,
    write_file,
)
from mmdecode.vlm.images import ImageSource
from mmdecode.vlm.messages import as_messages
from mmdecode.vlm.requests import AnswerRequest
from mmdecode.vlm.results import Answer

if TYPE_CHECKING:
    from PIL.Image import Image

    from mmdecode.vlm.videos import Video

RESULTS = "results.jsonl"
"""Name of the file in the folder of a run."""


class AnswerFile:
    """The answers of a run, on disk.

    Args:
        path: Path of the file; created if it does not exist.
        settings: Settings that may change an answer.
        resume: Whether an existing file is continued.
        requests: All requests of the run, in the order of the input.
        overwrite: Whether to replace files that this package did not write and, without
            ``resume``, earlier results, which are deleted when the first answer is written.

    Attributes:
        done: Ids of the requests that have an answer.
        changed: Ids of answered requests whose image files have changed; they are answered again.
        journal: File with the name of the image being read, in case reading it ends the process.
        batches: File with the ids of the questions being decoded, for the same reason.

    Raises:
        OptionError: The file holds answers and ``resume`` is not set; the answers belong to other
            settings or questions; or another run is writing to the file.
        InputError: The file cannot be read or written.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        resume: bool,
        requests: Sequence[AnswerRequest],
        overwrite: bool = False,
    ) -> None:
        self.path, self._requests = path, requests
        self.done: set[str] = set()
        self.changed: set[str] = set()
        self._inputs = Inputs(path.parent)
        self._contents: dict[str, dict[str, dict[str, Any] | None]] = {}
        with explained(path):
            run = run_of(path)
            if not is_own(run):
                refuse_foreign([run, path], overwrite)
            self._settings, self._overwrite, self._file = settings, overwrite, None
            try:
                if resume or not (overwrite and (path.exists() or run.exists())):
                    self._file = self._opened()
                    if path.stat().st_size:
                        check_settings(path, settings, resume)
                    self._check_questions()
                    os.truncate(path, sum(map(len, complete_lines(path))))
                    self._forget_changed()
                    note_settings(path, settings, overwrite)
                reading = path.with_name(f".{path.name}.reading")
                self.journal = InFlight(reading, suspects_in([reading]))
                note = path.with_name(f".{path.name}.decoding")
                todo = {request.id for request in requests} - self.done
                alone = {} if overwrite and not resume else ended_over([note], todo)
                self.batches = Batches(note, alone)
            except BaseException:
                if self._file:
                    self._file.close()
                raise

    def noted(self, request: AnswerRequest) -> AnswerRequest:
        """Returns a copy of a request that hashes each image file before first reading it."""
        contents: dict[str, dict[str, Any] | None] = {}

        def watched(source: ImageSource) -> ImageSource:
            def read(*how: Any) -> Image | Video:
                if source.name not in contents:
                    contents[source.name] = self._inputs.content(source.name)
                self._contents[request.id] = contents
                return source.read(*how)

            return replace(source, read=read)

        return replace(request, images=tuple(map(watched, request.images)))

    def add(self, answer: Answer) -> None:
        """Appends an answer to the file and flushes it.

        Args:
            answer: Answer to a request; if it has images, to the copy that `noted` returned.

        Raises:
            InputError: The file cannot be written.
        """
        with explained(self.path):
            self._file = self._file or self._open_lines()
            line, contents = as_line(answer), self._contents.pop(answer.id, {})
            if not answer.error:
                found = [contents.get(name) for name in answer.images]
                line["sizes"] = [one and one["size"] for one in found]
                line["digests"] = [one and one["digest"] for one in found]
            append_line(self._file, to_json(line).encode() + b"\n")
            self.batches.cleared(answer.id)

    def finish(self) -> None:
        """Sorts the lines and keeps one per question: its answer, else its last error."""
        order = {request.id: index for index, request in enumerate(self._requests)}
        lines: dict[str, tuple[bytes, bool]] = {}
        for line, found in _lines(self.path):
            name, answered = found["id"], "error" not in found
            if answered or not lines.get(name, (b"", False))[1]:
                lines[name] = line, answered
        # answers to an earlier, longer input stay, after the others
        ordered = sorted(lines, key=lambda name: order.get(name, len(order)))
        with explained(self.path):
            write_file(self.path, b"".join(lines[name][0] for name in ordered))

    def close(self) -> None:
        """Closes the file."""
        if self._file:
            self._file.close()
        self.journal.close()
        self.batches.close()

    def _check_questions(self) -> None:
        """Checks that each answer's id has the same question and images in the input."""
        given = {request.id: request for request in self._requests}
        for _, found in _lines(self.path):
            request = given.get(found["id"])
            if request is None or "error" in found:
                continue
            now: dict[str, Any] = {"images": _paths(request.images), "question": request.text}
            now["messages"] = as_messages(request.history, request.text) or None
            differing = [name for name in now if found.get(name) != _as_read(now[name])]
            if differing:
                shown = "; ".join(f"{n} was {found.get(n)!r}, is {now[n]!r}" for n in differing)
                raise OptionError(
                    f"{self.path} holds an answer under the id {request.id!r}, but that id has "
                    f"another question now ({shown}); run in the same folder with the same input "
                    "as before, or choose another --out"
                )
            sizes, digests = found.get("sizes", []), found.get("digests", [])
            if any(
                self._inputs.changed(image.name, {"size": size, "digest": digest})
                for image, size, digest in zip(request.images, sizes, digests, strict=False)
            ):
                self.changed.add(request.id)
            self.done.add(request.id)
        self.done -= self.changed

    def _forget_changed(self) -> None:
        """Removes the answers about images whose files changed."""
        if self.changed:
            kept = [line for line, found in _lines(self.path) if found["id"] not in self.changed]
            write_file(self.path, b"".join(kept))
            if self._file:
                self._file.close()
            self._file = self._opened()

    def _opened(self) -> BinaryIO:
        file = open_append(self.path)
        try:
            lock(file.fileno(), self.path)
        except BaseException:
            file.close()
            raise
        return file

    def _open_lines(self) -> BinaryIO:
        """Opens the file to append, after deleting what it replaces."""
        self.path.unlink(missing_ok=True)
        file = self._opened()
        note_settings(self.path, self._settings, self._overwrite)
        return file


def as_line(answer: Answer) -> dict[str, Any]:
    """Returns the JSON object of a line: the request with its answer or its error."""
    line: dict[str, Any] = {
        "id": answer.id,
        "images": [_named(name) for name in answer.images],
        "question": answer.question,
    }
    if answer.history:
        line["messages"] = as_messages(answer.history, answer.question)
    if answer.error:
        return line | {"error": answer.error, "kind": answer.kind}
    return line | {"text": answer.text, "token_ids": answer.token_ids, "margin": answer.margin}


def _paths(images: Sequence[Any]) -> list[str]:
    return [_named(image.name) for image in images]


def _named(name: str) -> str:
    """The absolute path of an image; an image of a data URL has a name of its content."""
    return name if name.startswith("data:") else os.path.abspath(name)


def _as_read(value: Any) -> Any:
    """Returns a value as it is after writing it to a line and reading it back."""
    return json.loads(to_json(value))


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields each line and its JSON object; skips a last line that a crash cut off."""
    for number, line in enumerate(complete_lines(path), 1):
        try:
            found = json.loads(line)
            _ = found["id"], found["images"], found["question"]
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f"{path}, line {number} is no answer; remove the line, and --resume asks that "
                "question again"
            ) from None
        yield line, found
