"""Questions about images, and their model inputs.

The processor's chat template makes the prompt; for a processor without a template, `PLAIN_PROMPTS`
has the usual format of the model family. Images are inserted where the text has ``<image>`` (or the
processor's own placeholder), once per image; without placeholders they come before the text. A
video is passed as several images, its frames.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mmdecode.errors import InputError, UnsupportedModelError
from mmdecode.vlm.images import digest

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from mmdecode.vlm.requests import AnswerRequest

PLACEHOLDER = "<image>"
"""Placeholder of an image in a question, whatever the model's own placeholder is."""

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
        images: RGB images; empty for a question without an image.
        build: Turns questions into model inputs, one row each: ``input_ids`` and
            ``attention_mask``, padded on the left, ``pixel_values``, and any others that the
            processor makes. They are on the model's device, floats in its dtype.
        tokenizer: The processor's tokenizer.
    """

    text: str
    images: tuple[Image, ...]
    build: Callable[[Sequence[Question]], Mapping[str, Tensor]] = field(repr=False, compare=False)
    tokenizer: Any = field(default=None, repr=False, compare=False)


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
        if processor.tokenizer.pad_token is None:
            processor.tokenizer.pad_token = processor.tokenizer.eos_token

    def question(
        self, text: str, images: Sequence[Image] = (), *, text_only: bool = False
    ) -> Question:
        """Returns a `Question` after checking its text and the number of its images.

        Args:
            text: Text with one placeholder per image, or without any.
            images: Images, as `mmdecode.vlm.images.read_image` returns them.
            text_only: Whether a question without an image is allowed.

        Raises:
            InputError: The text is empty or has control characters, an image is missing, or the
                number of placeholders is not that of the images.
        """
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"the question is {text!r}; expected a text")
        if re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text.replace("\r\n", "\n")):
            raise InputError(
                f"the question {text[:60]!r} has control characters; expected plain text: remove "
                "them"
            )
        marks = len(self._marks.findall(text))
        if not images and (marks or not text_only):
            raise InputError(
                f"the question {text[:60]!r} has no image; give one, or ask text alone with "
                f"text_only=True and without {PLACEHOLDER}"
            )
        if marks and marks != len(images):
            more = "images than placeholders" if marks < len(images) else "placeholders than images"
            raise InputError(
                f"the question {text[:60]!r} has {len(images)} images and {marks} placeholders, "
                f"more {more}; write {PLACEHOLDER} once per image, or leave it out, which puts all "
                "images before the text"
            )
        return Question(text, tuple(images), self.build, self.processor.tokenizer)

    def prompt(self, question: Question) -> str:
        """Returns the prompt: the filled-in template with one placeholder per image.

        Raises:
            InputError: The chat template drops images, or cannot be filled in.
        """
        text, count = question.text, len(question.images)
        if self._kind in _ONE_IMAGE:
            if count != 1:
                raise InputError(
                    f"{type(self._model).__name__} reads exactly one image per question, and this "
                    f"one has {count}; ask about one image at a time"
                )
            return self._marks.sub("", text).strip()
        if getattr(self.processor, "chat_template", None):
            prompt = self._templated(text, count)
        else:
            images = self._own + "\n" if self._kind.startswith("llava") else self._own
            marked = self._marks.search(text)
            plain = PLAIN_PROMPTS.get(self._kind, "{images}{question}")
            prompt = plain.format(
                images="" if marked else images * count,
                question=self._marks.sub(lambda _: self._own, text),
            )
        found = prompt.count(self._own)
        if found != count:
            raise InputError(
                f"the chat template of {type(self.processor).__name__} leaves {found} placeholders "
                f"{self._own!r} for {count} images; give the processor the template of its own "
                "model, or ask about one image at a time"
            )
        return prompt

    def _templated(self, text: str, count: int) -> str:
        image = {"type": "image"}
        parts = self._marks.split(text)
        if len(parts) == 1:
            content = [image] * count + [{"type": "text", "text": text}]
        else:
            content = []
            for index, part in enumerate(parts):
                content += [image] * (index > 0)
                content += [{"type": "text", "text": part.strip("\n")}] * bool(part.strip())
        try:
            return self.processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # templates may raise anything
            raise InputError(
                f"the chat template of {type(self.processor).__name__} cannot be filled in: "
                f"{error}; expected one that takes a user's message of images and text"
            ) from error

    def read(self, requests: Sequence[AnswerRequest]) -> dict[str, Tensor]:
        """Reads the images of requests and returns model inputs, one row per request.

        Raises:
            InputError: An image cannot be read, or the processor refuses one.
        """
        return self.build(
            [
                self.question(one.text, [image.read() for image in one.images], text_only=True)
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
        if any(question.images for question in questions):
            inputs["images"] = [list(question.images) for question in questions]
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
        return dict(built.to(self._model.device, dtype=self._model.dtype))


def noise_of_id(name: str) -> str:
    """Returns the string that seeds the sampling of a request with a given id."""
    return f"id {name}"


def noise_name(request: AnswerRequest, question: Question) -> str:
    """Returns the string that seeds a request's sampling: the user's id, else text and images."""
    if request.named:
        return noise_of_id(request.id)
    return "\n".join(["asked", question.text, *map(digest, question.images)])
