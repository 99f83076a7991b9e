"""`Chat`: a conversation about images, in which each turn goes on from what was read before."""

from __future__ import annotations

import copy
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from mmdecode.engine.prompt_cache import PromptCache
from mmdecode.errors import InputError, OptionError
from mmdecode.runs.inputs import content_of
from mmdecode.runs.items import collected
from mmdecode.vlm.images import ImageSource
from mmdecode.vlm.messages import PLACEHOLDER, counted, turns_of
from mmdecode.vlm.options import make_options
from mmdecode.vlm.requests import AnswerRequest, is_list
from mmdecode.vlm.results import Answer

if TYPE_CHECKING:
    from mmdecode.vlm.answerer import Answerer


class Chat:
    """A conversation.

    The keys and values of earlier turns are kept, so that a turn reads only what is new. Messages
    may be edited between turns: what still agrees with the earlier conversation is reused.

    Args:
        answerer: Answers the turns.
        system: A message of the system before the first turn; ``None``: none.
        **options: Fields of `mmdecode.vlm.AnswerOptions` of all turns.

    Attributes:
        messages: The conversation so far; see `mmdecode.vlm.messages`. Its images are those given;
            an open file's content is kept.

    Raises:
        OptionError: An option is wrong.
    """

    def __init__(self, answerer: Answerer, system: str | None = None, **options: Any) -> None:
        make_options(options)
        self._answerer = copy.copy(answerer)
        self._answerer.prompt_cache = PromptCache(whole=True)
        self._options = options | {"text_only": True}
        self.messages: list[dict[str, Any]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})

    def ask(self, question: str, images: Any = None) -> Answer:
        """Asks a question, and adds it and its answer to the messages.

        Args:
            question: The question.
            images: An image or a list of images that the question adds; ``None``: none.

        Raises:
            InputError: The question or an image cannot be read; the messages stay as they were.
            OptionError: ``messages`` are no list.
        """
        messages = self._with(question, images)
        request = request_of(messages, len(self.messages))
        answer: Answer = collected(
            self._answerer.answers([request], **self._options), True, "raise"
        )
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer

    def stream(self, question: str, images: Any = None) -> Generator[str, None, None]:
        """Same as `ask`, but yields the answer in pieces; an answer that is left off is not added.

        Raises:
            InputError: The question or an image cannot be read; the messages stay as they were.
            OptionError: ``messages`` are no list.
        """
        messages = self._with(question, images)
        pieces: list[str] = []
        request = request_of(messages, len(self.messages))
        for piece in self._answerer.pieces(request, **self._options):
            pieces.append(piece)
            yield piece
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces).strip()}]

    def _with(self, question: str, images: Any) -> list[dict[str, Any]]:
        """The messages and a new one."""
        if not isinstance(self.messages, (list, tuple)):
            raise OptionError(
                f"chat.messages is {self.messages!r:.80}; expected a list of messages: [] begins "
                "again"
            )
        return [*self.messages, _user(question, images)]


def request_of(messages: Any, index: int = 0) -> AnswerRequest:
    """Makes the request of a conversation whose last message is a user's.

    Raises:
        InputError: A message cannot be read.
    """
    turns, sources = turns_of(messages)
    return AnswerRequest(
        str(index), index, turns[-1].text, tuple(sources), history=tuple(turns[:-1])
    )


def _user(question: str, images: Any) -> dict[str, Any]:
    several = list(images) if is_list(images) else [] if images is None else [images]
    # every turn reads all images again: a file is read to its end now
    several = [content_of(one) if _is_file(one) else one for one in several]
    given: list[Any] = [{"type": "image", "image": one} for one in several]
    texts = str(question).split(PLACEHOLDER)
    if len(texts) == 1:
        return {"role": "user", "content": [*given, {"type": "text", "text": question}]}
    if len(texts) != len(given) + 1:
        raise InputError(
            f"the question {question[:60]!r} has {counted(len(given), 'image')} and "
            f"{counted(len(texts) - 1, 'placeholder')}; write {PLACEHOLDER} once per image, or "
            "leave it out"
        )
    parts: list[Any] = [{"type": "text", "text": texts[0]}]
    for image, text in zip(given, texts[1:], strict=True):
        parts += [image, {"type": "text", "text": text}]
    return {"role": "user", "content": parts}


def _is_file(image: Any) -> bool:
    return hasattr(image, "read") and not isinstance(image, ImageSource)
