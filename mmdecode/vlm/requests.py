"""Makes the requests of an `Answerer` from a call, from paths or from a table; reads no images.

A table is JSON lines, a JSON list, csv or tsv (`mmdecode.runs.tables`). `QUESTION`, `IMAGE`,
`IMAGES` and `ID` are the accepted names of the columns with the question, one image, a list of
images and the id. Instead of a question, a row of JSON may have ``messages``, a conversation as
`mmdecode.vlm.messages` describes it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmdecode.errors import InputError, OptionError
from mmdecode.runs.inputs import path_in
from mmdecode.runs.tables import any_of, first_of, own_id, refuse_all, rows_of, text_of
from mmdecode.vlm.images import ImageSource, image_source
from mmdecode.vlm.messages import Turn, counted, source_of, turns_of

QUESTION = ("question", "prompt", "text")
IMAGE = ("image", "image_path", "path", "file")
IMAGES = ("images", "frames")
ID = ("id", "question_id")


@dataclass(frozen=True)
class AnswerRequest:
    """A question before its images are read.

    Attributes:
        id: Id of the request; if the user gave it, it seeds the sampling of the answer.
        index: Index in the input.
        text: The question.
        images: Images, not read yet.
        named: Whether the user gave the id.
        history: Earlier messages of its conversation; ``images`` begin with theirs.
        problem: Why the question cannot be asked; ``None``: no problem is known.
        where: File and line of a table that it is from, for messages; else ``None``.
    """

    id: str
    index: int
    text: str
    images: tuple[ImageSource, ...]
    named: bool = False
    history: tuple[Turn, ...] = ()
    problem: str | None = None
    where: str | None = None


def requests_of(
    images: Any, questions: str | Sequence[str], ids: Sequence[str] | None = None
) -> list[AnswerRequest]:
    """Pairs images and questions; the arguments are those of `Answerer.__call__`.

    Raises:
        InputError: The questions are neither a text nor a list.
        OptionError: The numbers of images and questions, or of questions and different ids, do not
            match.
    """
    if not isinstance(questions, (str, Iterable)):
        raise InputError(
            f"questions are of type {type(questions).__name__}; expected a text or a list of texts"
        )
    entries = list(images) if is_list(images) else [images]
    texts = [questions] if isinstance(questions, str) else list(questions)
    if len(entries) == 1:
        entries *= len(texts)
    if isinstance(questions, str):
        texts *= len(entries)
    if len(entries) != len(texts):
        raise OptionError(
            f"{counted(len(entries), 'image')} for {counted(len(texts), 'question')}; give one "
            "image per question, a single question for all images, or a single image for all "
            "questions (a list inside the list holds several images of one question)"
        )
    if ids is not None and (len(ids) != len(texts) or len(set(ids)) != len(ids)):
        raise OptionError(
            f"{len(set(ids))} different ids for {len(texts)} questions; give each an id of its own"
        )
    requests = []
    for index, (entry, text) in enumerate(zip(entries, texts, strict=True)):
        several = list(entry) if is_list(entry) else [] if entry is None else [entry]
        names = [
            f"image {index}" if len(several) == 1 else f"image {index}.{rank}"
            for rank in range(len(several))
        ]
        sources = tuple(image_source(*pair) for pair in zip(several, names, strict=True))
        name = str(index if ids is None else ids[index])
        requests.append(AnswerRequest(name, index, text, sources, named=ids is not None))
    return requests


def read_requests(
    path: str | os.PathLike[str],
    limit: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    failing: bool = False,
) -> list[AnswerRequest]:
    """Reads a table of questions; images are not read yet.

    Args:
        path: File of the table.
        limit: Maximum number of questions; ``None``: all.
        folder: Folder that relative image paths start at; ``None``: the table's folder.
        failing: Whether an invalid line becomes a request with a ``problem`` instead of an error.
            If several lines have the same id, the first keeps it; the ids of the others get ``#``
            and the line number appended.

    Raises:
        InputError: The file cannot be read, a line has no question, or two lines have the same id;
            with ``failing``: the file cannot be read, or no line is valid.
    """
    path = Path(path)
    base = path.parent if folder is None else Path(folder)
    requests: list[AnswerRequest] = []
    lines: dict[str, int] = {}
    for line, found in itertools.islice(rows_of(path), limit):
        where = f"{path}, line {line}"
        row = {} if isinstance(found, InputError) else found
        try:
            if isinstance(found, InputError):
                raise found
            request = _request(row, where, base, len(requests))
            if request.id in lines:
                raise InputError(
                    f"{where} has the id {request.id!r} of line {lines[request.id]}; give each "
                    "line an 'id' of its own"
                )
        except InputError as error:
            if not failing:
                raise
            request = _unasked(row, line, len(requests), str(error), lines)
        lines[request.id] = line
        requests.append(request)
    if not requests:
        raise InputError(f"{path} holds no line; expected one question a line")
    refuse_all(request.problem for request in requests)
    return requests


def _request(row: Mapping[str, Any], where: str, base: Path, index: int) -> AnswerRequest:
    if row.get("messages") is not None:
        return _conversation(row, where, base, index)
    text = text_of(row, QUESTION, where)
    if text is None:
        raise InputError(f"{where} asks nothing; expected {any_of(QUESTION)}, or messages")
    names = _images(row, where)
    given = text_of(row, ID, where) or None  # an empty id counts as none
    sources = tuple(source_of(name, where, lambda one: path_in(base, one)) for name in names)
    if given is None:  # a data URL goes by its content
        pairs = zip(names, sources, strict=True)
        names = [one.name if name.startswith("data:") else name for name, one in pairs]
    name = described(names, text) if given is None else given
    return AnswerRequest(name, index, text, sources, named=given is not None, where=where)


def _conversation(row: Mapping[str, Any], where: str, base: Path, index: int) -> AnswerRequest:
    names = [path_in(base, name) for name in _images(row, where)]
    found = turns_of(row["messages"], lambda name: path_in(base, name), names, f"{where}: ")
    turns, sources = found
    given, text = text_of(row, ID, where) or None, turns[-1].text
    asked = text_of(row, ("question",), where)  # results have both, of one text
    if asked is not None and asked != text:
        raise InputError(f"{where} has a question and messages; leave out either")
    name = described([one.name for one in sources], text) if given is None else given
    history = tuple(turns[:-1])
    return AnswerRequest(name, index, text, tuple(sources), given is not None, history, where=where)


def _unasked(
    row: Mapping[str, Any], line: int, index: int, problem: str, taken: Container[str]
) -> AnswerRequest:
    """Returns the request of an invalid line, with the problem."""
    text, name = first_of(row, QUESTION), first_of(row, ID)
    asked = text if isinstance(text, str) else ""
    given = str(name) if isinstance(name, (str, int)) else asked
    return AnswerRequest(own_id(given, line, taken), index, asked, (), named=True, problem=problem)


def asked_of(
    paths: Sequence[str], questions: Sequence[str], together: bool = False
) -> list[AnswerRequest]:
    """Makes requests that ask each question about each image, or about all images together.

    Args:
        paths: Paths of images; empty: questions without an image.
        questions: The questions.
        together: Whether all images belong to each question.

    Raises:
        InputError: An image or a question is given twice.
    """
    groups = [list(paths)] if together or not paths else [[path] for path in paths]
    requests = []
    for number, (names, text) in enumerate(itertools.product(groups, questions)):
        sources = tuple(image_source(name, "") for name in names)
        requests.append(AnswerRequest(described(names, text), number, text, sources))
    if len({request.id for request in requests}) != len(requests):
        raise InputError("an image or a question is given twice; give each of them once")
    return requests


def described(images: Sequence[str], text: str) -> str:
    """Returns the default id of a request, ``image: image: question``."""
    return ": ".join([*images, text])


def _images(row: Mapping[str, Any], where: str) -> list[str]:
    several = first_of(row, IMAGES)
    if several is None:
        one = text_of(row, IMAGE, where)
        names = [] if one is None else [one]
    elif not isinstance(several, list):
        raise InputError(
            f"{where} has {several!r} under {any_of(IMAGES)}; expected a list of paths"
        )
    else:
        names = [text_of({"image": name}, IMAGE, where) or "" for name in several]
    for name in names:
        if not name.strip() or "\0" in name:
            raise InputError(f"{where} has the path {name!r}; expected the path of an image")
    return names


def is_list(value: Any) -> bool:
    """Returns whether a value holds several images: a list, a tuple, or an array of four axes."""
    return isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) == 4
