"""Questions about images, and their model inputs.

The processor's chat template makes the prompt; for a processor without a template, `PLAIN_PROMPTS`
has the usual format of the model family. Images are inserted where the text has ``<image>`` (or the
processor's own placeholder), once per image; without placeholders they come before the text. Some
templates put images first all the same, and a warning says so. A video has one placeholder; it is
passed as several images, its frames.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mmdecode._compat import input_device
from mmdecode.errors import InputError, UnsupportedModelError
from mmdecode.vlm.images import digest
from mmdecode.vlm.messages import PLACEHOLDER, Turn, counted
from mmdecode.vlm.videos import Video

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from mmdecode.vlm.requests import AnswerRequest

PLAIN_PROMPTS = {
    "llava": "USER: {images}{question} ASSISTANT:",
    "llava_next": "USER: {images}{question} ASSISTANT:",
    "paligemma": "{images}{question}",
    "chameleon": "{question}{images}",
}
"""Prompt formats without a chat template, by model type; other types: images, then the text."""

_ONE_IMAGE = ("instructblip",)
"""Model types that read exactly one image, which their processor puts before the text."""

_BY_TOKEN = frozenset(("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"))
"""Names of model inputs with one value per prompt token."""


@dataclass(frozen=True)
class Question:
    """A question and its images, before the processor makes model inputs.

    A contrastive guide whose second branch reads another question or image calls
    ``dataclasses.replace(question, text=..., images=...)``, and then ``build``.

    Attributes:
        text: The question, without the template around it.
        images: RGB images, and videos if the model reads them as such, the ones of earlier messages
            first; empty for a question without an image.
        build: Turns questions into model inputs, one row each: ``input_ids`` and
            ``attention_mask``, padded on the left, ``pixel_values``, and any others that the
            processor makes. They are on the model's device, floats in its dtype.
        tokenizer: The processor's tokenizer.
        history: Earlier messages of the conversation.
    """

    text: str
    images: tuple[Image | Video, ...]
    build: Callable[[Sequence[Question]], Mapping[str, Tensor]] = field(repr=False, compare=False)
    tokenizer: Any = field(default=None, repr=False, compare=False)
    history: tuple[Turn, ...] = ()


class Prompts:
    """Checks questions and turns them into prompts and model inputs.

    Args:
        model: A vision-language model.
        processor: Its processor.

    Raises:
        UnsupportedModelError: The processor reads no images, or no text.
    """

    def __init__(self, model: Any, processor: Any) -> None:
        for part in ("tokenizer", "image_processor"):
            if getattr(processor, part, None) is None:
                raise UnsupportedModelError(
                    f"{type(processor).__name__} has no {part}; give the processor that "
                    "transformers.AutoProcessor loads for a vision-language model"
                )
        self.processor = processor
        self._model, self._kind = model, model.config.model_type
        own = getattr(processor, "image_token", None) or PLACEHOLDER
        self._own = str(getattr(own, "content", own))
        self._marks = re.compile("|".join({re.escape(PLACEHOLDER), re.escape(self._own)}))
        self._video = str(getattr(processor, "video_token", None) or "")
        self._reads_videos = bool(self._video) and self._kind.startswith("qwen")
        self._warned = False
        if processor.tokenizer.pad_token is None:
            processor.tokenizer.pad_token = processor.tokenizer.eos_token

    def question(
        self,
        text: str,
        images: Sequence[Image | Video] = (),
        *,
        text_only: bool = False,
        history: Sequence[Turn] = (),
    ) -> Question:
        """Returns a `Question` after checking its text and the number of its images.

        Args:
            text: Text with one placeholder per image, or without any.
            images: Images, as `mmdecode.vlm.images.read_image` returns them, and videos. A model
                that reads no videos gets their frames as images.
            text_only: Whether a question without an image is allowed.
            history: Earlier messages, whose images come first.

        Raises:
            InputError: The text is empty or has control characters, an image is missing, or the
                number of placeholders is not that of the images.
        """
        refuse_no_text(text)
        if not text.strip():
            raise InputError(f"the question is {text!r}; expected a text")
        if re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text.replace("\r\n", "\n")):
            raise InputError(
                f"the question {text[:60]!r} has control characters; expected plain text: remove "
                "them"
            )
        marks, own = len(self._marks.findall(text)), len(images)
        own -= sum(turn.images for turn in history)
        if not images and (marks or not text_only):
            raise InputError(
                f"the question {text[:60]!r} has no image; give one, or ask text alone with "
                f"text_only=True (--text-only on a command line) and without {PLACEHOLDER}"
            )
        if marks and marks != own:
            more = "images than placeholders" if marks < own else "placeholders than images"
            videos = any(isinstance(image, Video) for image in images)
            note = " (a video counts as one)" if videos else ""
            raise InputError(
                f"the question {text[:60]!r} has {counted(own, 'image')}{note} and "
                f"{counted(marks, 'placeholder')}, more {more}; write {PLACEHOLDER} once per "
                "image, or leave it out, which puts all images before the text"
            )
        if not self._reads_videos:
            text, images, history = self._with_frames(text, images, history)
        own_parts = (self.build, self.processor.tokenizer, tuple(history))
        return Question(text, tuple(images), *own_parts)

    def _with_frames(
        self, text: str, images: Sequence[Image | Video], history: Sequence[Turn]
    ) -> tuple[str, Sequence[Image | Video], Sequence[Turn]]:
        """Replaces videos by their frames, and a placeholder of a video by one for each frame."""
        if not any(isinstance(image, Video) for image in images):
            return text, images, history
        sizes = iter([len(one.frames) if isinstance(one, Video) else 1 for one in images])

        def spread(turn: Turn) -> Turn:
            own = list(itertools.islice(sizes, turn.images))
            each = iter(own)
            marked = self._marks.sub(lambda found: found[0] * next(each, 1), turn.text)
            return Turn(turn.role, marked, sum(own))

        own = len(images) - sum(turn.images for turn in history)
        turns = [spread(turn) for turn in (*history, Turn("user", text, own))]
        frames = [f for one in images for f in (one.frames if isinstance(one, Video) else [one])]
        return turns[-1].text, frames, turns[:-1]

    def prompt(self, question: Question) -> str:
        """Returns the prompt: the filled-in template with one placeholder per image.

        Raises:
            InputError: The chat template drops images, or cannot be filled in.
        """
        text, count = question.text, len(question.images)
        templated = bool(getattr(self.processor, "chat_template", None))
        if question.history and (self._kind in _ONE_IMAGE or not templated):
            raise InputError(
                f"{type(self.processor).__name__} has no chat template, and a conversation needs "
                "one; ask a single question, or give the processor a template"
            )
        if self._kind in _ONE_IMAGE:
            if count != 1:
                raise InputError(
                    f"{type(self._model).__name__} reads exactly one image per question, and this "
                    f"one has {count}; ask about one image at a time"
                )
            return self._marks.sub("", text).strip()
        if templated:
            prompt = self._templated(question)
        else:
            images = self._own + "\n" if self._kind.startswith("llava") else self._own
            marked = self._marks.search(text)
            plain = PLAIN_PROMPTS.get(self._kind, "{images}{question}")
            prompt = plain.format(
                images="" if marked else images * count,
                question=self._marks.sub(lambda _: self._own, text),
            )
        found = prompt.count(self._own)
        if self._reads_videos:
            found += prompt.count(self._video)
        if found != count:
            raise InputError(
                f"the chat template of {type(self.processor).__name__} leaves "
                f"{counted(found, 'placeholder')} {self._own!r} for {counted(count, 'image')}; "
                "give the processor the template of its own model, or ask about one image at a time"
            )
        return prompt

    def _templated(self, question: Question) -> str:
        count = len(question.images)
        history = [turn if count else self._without_images(turn) for turn in question.history]
        own = count - sum(turn.images for turn in history)
        turns = [*history, Turn("user", question.text, own)]
        kinds = iter(["video" if isinstance(one, Video) else "image" for one in question.images])
        messages = [{"role": turn.role, "content": self._content(turn, kinds)} for turn in turns]
        try:
            prompt = self.processor.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # templates may raise anything
            raise InputError(
                f"the chat template of {type(self.processor).__name__} cannot be filled in: "
                f"{error}; expected one that takes a user's message of images and text"
            ) from error
        if not self._warned and any(map(self._has_text_before_image, turns)):
            self._warned = True
            self._warn_of_order()
        return str(prompt)

    def _without_images(self, turn: Turn) -> Turn:
        return Turn(turn.role, self._marks.sub("", turn.text))

    def _content(self, turn: Turn, kinds: Iterator[str]) -> list[dict[str, str]]:
        """A message's parts: images where the text has placeholders, else before it."""
        content: list[dict[str, str]] = []
        parts = self._marks.split(turn.text)
        if len(parts) == 1:
            content += [{"type": next(kinds)} for _ in range(turn.images)]
            return [*content, {"type": "text", "text": turn.text}]
        if len(parts) != turn.images + 1:
            raise InputError(
                f"the message {turn.text[:60]!r} has {counted(turn.images, 'image')} and "
                f"{counted(len(parts) - 1, 'placeholder')}; write {PLACEHOLDER} once per image, or "
                "leave it out"
            )
        for index, part in enumerate(parts):
            content += [{"type": next(kinds)}] if index else []
            content += [{"type": "text", "text": part.strip("\n")}] * bool(part.strip())
        return content

    def _has_text_before_image(self, turn: Turn) -> bool:
        return any(part.strip() for part in self._marks.split(turn.text)[:-1])

    def _warn_of_order(self) -> None:
        """Warns if the chat template puts images before the text, wherever a message has them."""
        before, after = "text before it", "text after it"
        texts = [{"type": "text", "text": text} for text in (before, after)]
        content = [texts[0], {"type": "image"}, texts[1]]
        try:
            found = self.processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
            )
        except Exception:  # a template need not take this message
            return
        if not found.find(before) < found.find(self._own) < found.find(after):
            warnings.warn(
                f"the chat template of {type(self.processor).__name__} puts all images of a "
                f"message before its text: the positions of {PLACEHOLDER} and of images between "
                "texts are not used; write the question so that it does not depend on them",
                stacklevel=2,
            )

    def read(self, requests: Sequence[AnswerRequest]) -> dict[str, Tensor]:
        """Reads the images of requests and returns model inputs, one row per request.

        Raises:
            InputError: An image cannot be read, or the processor refuses one.
        """
        return self.build(
            [
                self.question(
                    one.text,
                    [image.read() for image in one.images],
                    text_only=True,
                    history=one.history,
                )
                for one in requests
            ]
        )

    def build(self, questions: Sequence[Question]) -> dict[str, Tensor]:
        """Returns model inputs, one row per question; see the attribute ``build`` of `Question`.

        Raises:
            InputError: The processor refuses the questions or their images.
        """
        prompts = [self.prompt(question) for question in questions]
        tokenizer = self.processor.tokenizer
        begin = tokenizer.bos_token
        inputs: dict[str, Any] = {}
        images = [[i for i in one.images if not isinstance(i, Video)] for one in questions]
        if any(images):
            inputs["images"] = images
        videos = [i for one in questions for i in one.images if isinstance(i, Video)]
        if videos:
            inputs["videos"] = [list(video.frames) for video in videos]
            inputs["video_metadata"] = [video.metadata() for video in videos]
            inputs["do_sample_frames"] = False
        try:
            built = self.processor(
                text=prompts,
                padding=True,
                padding_side="left",
                # the template may already have added the begin token
                add_special_tokens=not (begin and all(p.startswith(begin) for p in prompts)),
                return_tensors="pt",
                **inputs,
            )
        except Exception as error:  # processors refuse sizes and counts each in their own way
            raise InputError(
                f"{type(self.processor).__name__} refuses the question and its images: "
                f"{' '.join(str(error).split())}; try images of another size, or more or fewer"
            ) from error
        built.pop("labels", None)  # some processors return labels for training
        order = built["attention_mask"].argsort(dim=1, stable=True)
        for name in _BY_TOKEN & built.keys():  # some put image tokens before the padding
            built[name] = built[name].gather(1, order)
        return dict(built.to(input_device(self._model), dtype=self._model.dtype))


def refuse_no_text(text: Any) -> None:
    """Refuses what is no text, or text of bytes that are not UTF-8.

    Raises:
        InputError: It is so.
    """
    if not isinstance(text, str):
        raise InputError(f"the question is {text!r:.80}; expected a text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(
            f"the question {text[:60]!r} is not UTF-8 text; write it as UTF-8"
        ) from None


def noise_of_id(name: str) -> str:
    """Returns the string that seeds the sampling of a request with a given id."""
    return f"id {name}"


def noise_name(request: AnswerRequest, question: Question) -> str:
    """Returns the string that seeds a request's sampling: the user's id, else text and images."""
    if request.named:
        return noise_of_id(request.id)
    earlier = [f"{turn.role}: {turn.text}" for turn in question.history]
    return "\n".join(["asked", *earlier, question.text, *map(digest, question.images)])


def noise_of_images(question: Question) -> str:
    """Returns the string that seeds a question's noise by its images; without any, by its text."""
    return "\n".join(
        ["images", *map(digest, question.images)] if question.images else [question.text]
    )
