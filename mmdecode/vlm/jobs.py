"""Folder of answers of a job, see `mmdecode.runs.journal`.

Each line has the ``id``, images and question of a request, so ``results.jsonl`` is itself a table
of requests. Answers are computed again if an image file has changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdecode.runs import crashes
from mmdecode.runs.ahead import read_ahead
from mmdecode.runs.crashes import InFlight
from mmdecode.runs.items import Failed
from mmdecode.runs.journal import Journal, Unit
from mmdecode.vlm.images import ImageSource
from mmdecode.vlm.messages import as_messages
from mmdecode.vlm.requests import AnswerRequest
from mmdecode.vlm.results import Answer, failed_answer

if TYPE_CHECKING:
    from mmdecode.vlm.answerer import Answerer

READ = """
import sys
from mmdecode.vlm.images import image_source
image_source(sys.argv[1], "").read()
"""
"""Program that decodes the image file whose path is its argument."""


class AnswerFolder(Journal[AnswerRequest]):
    """Answers in a folder, a line for each.

    Args:
        folder, settings, requests: See `Journal`.
        options: Options of `mmdecode.vlm.Answerer.answers`.
        **how: See `Journal`.
    """

    what, other = "an answer", "another question"
    again = "asks that question again"
    fields, doing = ("images", "question"), "asking"

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        requests: Sequence[AnswerRequest],
        options: Mapping[str, Any] | None = None,
        **how: Any,
    ) -> None:
        super().__init__(folder, settings, requests, **how)
        self.options = options or {}

    def known(self, item: AnswerRequest) -> dict[str, Any]:
        """Images, question and earlier turns of a request."""
        return {
            "images": [_named(image.name) for image in item.images],
            "question": item.text,
            "messages": as_messages(item.history, item.text) or None,
        }

    def inputs(self, item: AnswerRequest) -> list[str]:
        """The image files."""
        return [image.name for image in item.images]

    def decode(
        self, model: Answerer, unit: Unit[AnswerRequest], meter: Callable[[float], None]
    ) -> Iterator[Answer]:
        """Answers the questions of a unit; see `Journal.decode`."""
        asked = [self.noted(request) for request in unit.items]
        images = {one.name: one for request in asked for one in request.images if not one.video}
        ahead = dict(zip(images, read_ahead([*images.values()], unit.batch_size), strict=True))
        asked = [
            replace(request, images=tuple(ahead.get(one.name, one) for one in request.images))
            for request in asked
        ]
        options = {**self.options, "batch_size": unit.batch_size}
        return model.answers(asked, watch=self.watch, **options)

    def crashed(self, item: AnswerRequest, failed: Failed) -> Answer:
        """The failure of a question; see `Journal.crashed`."""
        return replace(failed_answer(item, failed), history=item.history)

    def noted(self, request: AnswerRequest) -> AnswerRequest:
        """Returns a copy of a request that hashes each image file before first reading it.

        Its reading is noted, see `watched`.
        """
        images = (
            self.sources.noting(watched(one, self.reading), [one.name]) for one in request.images
        )
        return replace(request, images=tuple(images))

    def add(self, result: Answer) -> Answer:
        """Appends an answer and flushes it; see `Journal.add`.

        Args:
            result: Answer to a request; if it has images, to the copy that `noted` returned.
        """
        line = as_line(result)
        if not result.error:
            found = [self.sources.as_read(name) for name in result.images]
            line["sizes"] = [one and one["size"] for one in found]
            line["digests"] = [one and one["digest"] for one in found]
        self.append(self.given[result.id], line)
        return result


def watched(source: ImageSource, journal: InFlight) -> ImageSource:
    """Returns a copy of an image's source that crashes no second run, see `crashes.watched`."""
    return crashes.watched(source, journal, source.name, READ, "convert it with another program")


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


def _named(name: str) -> str:
    """The absolute path of an image; an image of a data URL has a name of its content."""
    return name if name.startswith("data:") else os.path.abspath(name)
