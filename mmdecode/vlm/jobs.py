"""A file of answers that survives being interrupted.

Each answer is a line, appended and flushed as its batch ends; the file next to it, whose name ends
in ``run.json``, says under which settings. A run that was stopped is continued only on request,
only under the same settings, and only where an id still asks what was answered; what failed is
tried again. Where a run ends, the lines are put in the order of the input, one per question:
nothing in them depends on when a run was interrupted. A line has the ``id``, ``images`` and
``question`` again, so the file can itself be asked.
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
from mmdecode.vlm.requests import AnswerRequest
from mmdecode.vlm.results import Answer

if TYPE_CHECKING:
    from PIL.Image import Image

RESULTS = "results.jsonl"
"""Name of the file in the folder of a run."""


class AnswerFile:
    """Where the answers of a run go.

    Args:
        path: Path of the file; created where it does not exist.
        settings: Settings that may change an answer.
        resume: Continue what is there.
        requests: Requests in order.
        overwrite: Replace files that are not ours, and without ``resume`` results; those go as
            the first answer comes.

    Attributes:
        done: Ids of the requests that have an answer.
        changed: Ids of those whose images are others now under the same paths: asked again.
        journal: Records the image that is being read.
        batches: Batches of the questions that are being decoded.

    Raises:
        OptionError: The file holds answers and ``resume`` is not set, or holds answers of other
            settings or to other questions, or another run is writing to it.
        InputError: It cannot be read or written.
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
        """A request, the content of whose images is noted before they are first read."""
        contents: dict[str, dict[str, Any] | None] = {}

        def watched(source: ImageSource) -> ImageSource:
            def read() -> Image:
                if source.name not in contents:
                    contents[source.name] = self._inputs.content(source.name)
                self._contents[request.id] = contents
                return source.read()

            return replace(source, read=read)

        return replace(request, images=tuple(map(watched, request.images)))

    def add(self, answer: Answer) -> None:
        """Writes an answer where a crash cannot lose it.

        Args:
            answer: To one of the requests; those that have images were `noted`.

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
        """Puts the lines in order; of several for one question an answer counts, else the last."""
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
        """No more answers."""
        if self._file:
            self._file.close()
        self.journal.close()
        self.batches.close()

    def _check_questions(self) -> None:
        """Whether the answers are to the questions that have their ids now."""
        given = {request.id: request for request in self._requests}
        for _, found in _lines(self.path):
            request = given.get(found["id"])
            if request is None or "error" in found:
                continue
            now = {"images": _paths(request.images), "question": request.text}
            differing = [name for name in now if found[name] != _as_read(now[name])]
            if differing:
                shown = "; ".join(f"{n} was {found[n]!r}, is {now[n]!r}" for n in differing)
                raise OptionError(
                    f"{self.path} holds an answer under the id {request.id!r}, and that is another "
                    f"question now ({shown}); start where the run was begun, with the same input, "
                    "or choose another --out"
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
        """Takes out the answers about images that are others now."""
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
        """The file after what it replaces went."""
        self.path.unlink(missing_ok=True)
        file = self._opened()
        note_settings(self.path, self._settings, self._overwrite)
        return file


def as_line(answer: Answer) -> dict[str, Any]:
    """Content of a line: the request, and the answer or the error."""
    line: dict[str, Any] = {
        "id": answer.id,
        "images": [os.path.abspath(name) for name in answer.images],
        "question": answer.question,
    }
    if answer.error:
        return line | {"error": answer.error, "kind": answer.kind}
    return line | {"text": answer.text, "token_ids": answer.token_ids, "margin": answer.margin}


def _paths(images: Sequence[Any]) -> list[str]:
    return [os.path.abspath(image.name) for image in images]


def _as_read(value: Any) -> Any:
    """Restores text read from a line, where names that are not UTF-8 are escaped."""
    return json.loads(to_json(value))


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Complete lines and what they hold; one that was cut off by a crash is not complete."""
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
