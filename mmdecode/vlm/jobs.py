"""Folder of answers of a job, see `mmdecode.runs.journal`.

Each line has the ``id``, images and question of a request, so ``results.jsonl`` is itself a table
of requests. Answers are computed again if an image file has changed.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from mmdecode.runs.journal import Journal
from mmdecode.vlm.messages import as_messages
from mmdecode.vlm.requests import AnswerRequest
from mmdecode.vlm.results import Answer


class AnswerFolder(Journal[AnswerRequest]):
    """Answers in a folder, a line for each; see `Journal` for the arguments."""

    what, other = "an answer", "another question"
    again = "asks that question again"
    fields = "images", "question"

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

    def noted(self, request: AnswerRequest) -> AnswerRequest:
        """Returns a copy of a request that hashes each image file before first reading it."""
        images = (self.noting(image, [image.name]) for image in request.images)
        return replace(request, images=tuple(images))

    def add(self, answer: Answer) -> None:
        """Appends an answer and flushes it.

        Args:
            answer: Answer to a request; if it has images, to the copy that `noted` returned.

        Raises:
            InputError: The folder cannot be written.
        """
        line = as_line(answer)
        if not answer.error:
            found = [self._inputs.as_read(name) for name in answer.images]
            line["sizes"] = [one and one["size"] for one in found]
            line["digests"] = [one and one["digest"] for one in found]
        self.append(self.given[answer.id], line)


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
