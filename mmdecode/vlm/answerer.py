"""`Answerer`: answers questions about images with a vision-language model."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmdecode import registry
from mmdecode.api import generate
from mmdecode.checkpoints import trusting_as_asked
from mmdecode.decoder import Decoder
from mmdecode.engine.checks import length_made_for
from mmdecode.engine.prompt_cache import PromptCache, refuse_no_cache
from mmdecode.engine.request import token_ids
from mmdecode.engine.trace import Round
from mmdecode.errors import InputError, UnsupportedModelError
from mmdecode.guide.answers import yes_no_ids, yes_no_margin
from mmdecode.model_names import full_name
from mmdecode.runs.items import Failed, OnError, Watch, collected, each, tried
from mmdecode.vlm.batching import batches, by_image, by_length
from mmdecode.vlm.chat import Chat
from mmdecode.vlm.loading import load
from mmdecode.vlm.options import AnswerOptions, make_options
from mmdecode.vlm.questions import Prompts, Question, noise_name, noise_of_images, refuse_no_text
from mmdecode.vlm.requests import AnswerRequest, is_list, requests_of
from mmdecode.vlm.results import Answer, failed_answer

if TYPE_CHECKING:
    from mmdecode.engine.contracts import AcceptanceRule, Drafter, Guide
    from mmdecode.engine.stats import Stats

MEMORY_HINT = (
    "give smaller images or a shorter question, lower max_new_tokens, or load the model in half "
    "precision"
)

_MOST_TIMES = 100
"""Maximum length of a prompt, as a multiple of the length that a model was made for."""


class Answerer:
    """Answers questions about images in batches.

    Args:
        model: A vision-language model of transformers.
        processor: Its processor.
        decoder: Decoder of the answers; ``None``: a decoder without a drafter or a guide.
        prompt_cache: Prompts of earlier questions; ``None``: a new one.

    Attributes:
        max_positions: Maximum total tokens of a prompt and its answer; ``None``: no known limit.
        prompt_cache: Prompts that questions about one image continue.
        made_for: The model's ``max_position_embeddings``, in tokens; ``None``: not in its config.

    Raises:
        UnsupportedModelError: The processor reads no images.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        decoder: Decoder | None = None,
        prompt_cache: PromptCache | None = None,
    ) -> None:
        self.model, self.processor = model.eval(), processor
        self.decoder = decoder or Decoder(seed=0)
        self.prompts = Prompts(model, processor)
        refuse_no_cache(prompt_cache)
        self.prompt_cache = PromptCache() if prompt_cache is None else prompt_cache
        self._ends = set(token_ids(model.generation_config.eos_token_id))
        self.max_positions: int | None = None
        self.made_for: int | None = None
        # some models pass their inner model to the decoder, which sets its own limit
        with contextlib.suppress(UnsupportedModelError):
            adapter = registry.adapter_for(model)
            self.max_positions, self.made_for = adapter.max_positions, length_made_for(adapter)

    @classmethod
    @trusting_as_asked
    def from_pretrained(
        cls,
        model_id: str | os.PathLike[str],
        draft: Drafter | str | None = None,
        guide: Guide | str | None = None,
        accept: AcceptanceRule | str = "auto",
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        quantize: str | None = None,
        seed: int = 0,
        *,
        device_map: str | Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> Answerer:
        """Loads a model and builds its decoder.

        Args:
            model_id: A folder, a Hub id, a short name such as ``llava-1.5-7b``, or ``zoo:NAME``.
            draft: A drafter, or the name of a drafter with its options (``name:key=value``).
            guide: A guide, or the name of a guide with its options.
            accept: The acceptance rule, or its name; see `mmdecode.Decoder`.
            device: Device of the model; ``None``: CUDA if available, else the CPU.
            dtype: ``None``: float32; ``auto``: see `mmdecode.checkpoints.dtype_of`.
            quantize: ``int8`` or ``fp8``, see `mmdecode.quantize`; ``None``: weights as loaded.
            seed: Seed of the random numbers that sampling uses.
            device_map: Splits the model over devices, CPU and disk; see `mmdecode.vlm.loading`.
            trust_remote_code: Run Python files that come with the model; read them first.

        Raises:
            InputError: The checkpoint cannot be loaded.
            OptionError: The device, dtype or format does not exist.
            UnsupportedModelError: The checkpoint is no vision-language model, or cannot be rounded.
        """
        name = full_name(str(model_id))
        model, processor = load(name, device, dtype, device_map, quantize)
        at_hand = registry.context_of(model, processor, name)
        if isinstance(draft, str):
            draft = registry.create("draft", draft, **at_hand)
        if isinstance(guide, str):
            guide = registry.create("guide", guide, **at_hand)
        return cls(model, processor, Decoder(draft, guide, accept, seed))

    @property
    def stats(self) -> Stats:
        """The decoder's counters, over all calls."""
        return self.decoder.stats

    def with_decoder(self, decoder: Decoder) -> Answerer:
        """Returns an answerer with the same model and prompt cache and another decoder."""
        other = copy.copy(self)
        other.decoder = decoder
        return other

    def __call__(
        self,
        images: Any,
        questions: str | Sequence[str],
        *,
        ids: Sequence[str] | None = None,
        on_error: OnError | None = None,
        **options: Any,
    ) -> Any:
        """Answers one question or many; an answer does not depend on the others of its batch.

        Args:
            images: One image, or a list with an entry per question: an image, a list of images
                that are asked about together (the frames of a video, for example), or ``None``.
                See `mmdecode.vlm.images`.
            questions: One question, or a list. A single question is asked about every entry of
                ``images``; a single image is used for every question.
            ids: One id per request. When sampling, a request's id seeds its random numbers; without
                ids, its question and images do, so that equal requests get equal answers.
            on_error: ``raise`` the first error, or ``return`` an answer that holds its error;
                ``None``: ``raise`` if ``questions`` and ``images`` are single, else ``return``.
            **options: Fields of `AnswerOptions`.

        Returns:
            An `Answer` if ``questions`` and ``images`` are single; otherwise a list of answers in
            the order of the input. A question that failed has an empty text and an ``error``.

        Raises:
            OptionError: The numbers of images, questions and ids differ, or an option is wrong.
            InputError: A single question cannot be answered.
        """
        asked = requests_of(images, questions, ids)
        single = isinstance(questions, str) and not is_list(images)
        return collected(self.answers(asked, **options), single, on_error)

    def answers(
        self,
        requests: Sequence[AnswerRequest],
        watch: Watch | None = None,
        wanted: Callable[[], bool] | None = None,
        **options: Any,
    ) -> Iterator[Answer]:
        """Yields answers as their batches are decoded; a batch has questions of similar length.

        If one question fails, its answer holds the error, and the others are answered.

        Args:
            requests: Requests as `requests_of` returns them.
            watch: Error state that several calls of one job share; see `mmdecode.runs.items`.
            wanted: Whether to go on with the answers at hand; asked after each round.
            **options: Fields of `AnswerOptions`.

        Raises:
            MMDecodeError: The configuration is wrong, so that all questions fail.
        """
        watch = Watch() if watch is None else watch
        yield from watch.released(self._outcomes(requests, make_options(options), watch, wanted))

    def _outcomes(
        self,
        requests: Sequence[AnswerRequest],
        settings: AnswerOptions,
        watch: Watch,
        wanted: Callable[[], bool] | None,
    ) -> Iterator[tuple[Answer, Failed | None]]:
        lengths = [tried(partial(self._length, request), MEMORY_HINT) for request in requests]
        asked = [*zip(requests, lengths, strict=True)]
        ordered = by_length(asked) if settings.prompt_cache == 0 else by_image(asked)
        for batch in batches(ordered, settings.batch_size):
            readable: list[tuple[AnswerRequest, Question]] = []
            for request, length in batch:
                question = (
                    length
                    if isinstance(length, Failed)
                    else tried(partial(self._question, request, length[1], settings), MEMORY_HINT)
                )
                if isinstance(question, Failed):
                    yield failed_answer(request, question), question
                else:
                    readable.append((request, question))
            for (request, _), found in each(
                readable,
                partial(self._batch, settings=settings, wanted=wanted),
                hint=MEMORY_HINT,
                name=lambda one: one[0].id,
                watch=watch,
                attempt=self.stats.attempt,
            ):
                if isinstance(found, Failed):
                    yield failed_answer(request, found), found
                else:
                    yield found, None

    def _length(self, request: AnswerRequest) -> tuple[int, int]:
        """Returns the number of images and the number of text tokens of a question."""
        if request.problem is not None:
            raise InputError(request.problem)
        texts = [*(turn.text for turn in request.history), request.text]
        with _located(request):
            for text in texts:
                refuse_no_text(text)
        return len(request.images), sum(len(self.processor.tokenizer.tokenize(t)) for t in texts)

    def _question(self, request: AnswerRequest, tokens: int, settings: AnswerOptions) -> Question:
        """Reads the images of a request.

        Raises:
            InputError: An image cannot be read, or the question cannot be asked.
        """
        images = [
            source.read(settings.frames, settings.fps) if source.video else source.read()
            for source in request.images
        ]
        with _located(request):
            question = self.prompts.question(
                request.text, images, text_only=settings.text_only, history=request.history
            )
        self._refuse_beyond(tokens, settings)  # before a batch is built from it
        return question

    def chat(self, system: str | None = None, **options: Any) -> Chat:
        """Begins a conversation; see `mmdecode.vlm.Chat`.

        Args:
            system: A message of the system before the first turn; ``None``: none.
            **options: Fields of `AnswerOptions` of all turns.
        """
        return Chat(self, system, **options)

    def stream(
        self, image: Any, question: str, *, id: str | None = None, **options: Any
    ) -> Iterator[str]:
        """Yields an answer in pieces, each as soon as it is final.

        Args:
            image: One image, a list of images that are asked about together, or ``None``.
            question: The question.
            id: Id of the request; it seeds the random numbers when sampling. ``None``: the question
                and its images do.
            **options: Fields of `AnswerOptions`.

        Raises:
            InputError: An image cannot be read, or the question has another number of placeholders
                than images.
        """
        [request] = requests_of([image], question, None if id is None else [id])
        yield from self.pieces(request, **options)

    def pieces(
        self, request: AnswerRequest, wanted: Callable[[], bool] = lambda: True, **options: Any
    ) -> Generator[str, None, Answer]:
        """Yields the answer to a request in pieces, see `stream`; returns it without margins.

        Args:
            request: The request.
            wanted: Whether to go on; asked after each round.
            **options: Fields of `AnswerOptions`.

        Raises:
            InputError: The request cannot be answered.
        """
        from transformers import TextIteratorStreamer

        settings = make_options(options)
        asked = self._question(request, self._length(request)[1], settings)
        inputs = self._inputs([asked], settings)
        streamer = TextIteratorStreamer(
            self.processor.tokenizer,
            skip_prompt=True,
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        left = threading.Event()  # set when the caller stops reading
        answers: list[Answer] = []
        problems: list[BaseException] = []

        def run() -> None:
            try:
                answers[:] = self._answers(
                    [request],
                    [asked],
                    inputs,
                    replace(settings, margins=False),
                    streamer=streamer,
                    stopping_criteria=_while(lambda: wanted() and not left.is_set()),
                )
            except BaseException as problem:  # raised in the thread that reads the pieces
                problems.append(problem)
                streamer.end()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield from (piece for piece in streamer if piece)
        finally:
            left.set()
            thread.join()
        if problems:
            raise problems[0]
        return answers[0]

    def _batch(
        self,
        asked: Sequence[tuple[AnswerRequest, Question]],
        settings: AnswerOptions,
        wanted: Callable[[], bool] | None = None,
    ) -> list[Answer]:
        """Answers a batch of questions."""
        requests, questions = zip(*asked, strict=True)
        inputs = self._inputs(questions, settings)
        more = {} if wanted is None else {"stopping_criteria": _while(wanted)}
        return self._answers(requests, questions, inputs, settings, **more)

    def _answers(
        self,
        requests: Sequence[AnswerRequest],
        questions: Sequence[Question],
        inputs: Mapping[str, Tensor],
        settings: AnswerOptions,
        **options: Any,
    ) -> list[Answer]:
        """Decodes a batch; see `_generate` for the arguments."""
        began, passes = time.perf_counter(), self.stats.passes
        rows = self._generate(requests, questions, inputs, settings, **options)
        seconds = (time.perf_counter() - began) / len(requests)
        lengths = inputs["attention_mask"].sum(1).tolist()
        return [
            Answer(
                id=request.id,
                index=request.index,
                images=tuple(source.name for source in request.images),
                question=request.text,
                history=request.history,
                text=self._text(row["token_ids"]),
                ended=not self._ends.isdisjoint(row["token_ids"][-1:]),
                prompt=self.prompts.prompt(question),
                prompt_tokens=length,
                seconds=seconds,
                passes=self.stats.passes - passes,
                **row,
            )
            for request, question, row, length in zip(
                requests, questions, rows, lengths, strict=True
            )
        ]

    def _inputs(self, questions: Sequence[Question], settings: AnswerOptions) -> dict[str, Tensor]:
        """Returns the model inputs of questions, after checking that an answer fits.

        Raises:
            InputError: The processor refuses the questions, or a prompt is too long.
        """
        inputs = self.prompts.build(questions)
        self._refuse_beyond(int(inputs["attention_mask"].sum(1).max()), settings)
        return inputs

    def _refuse_beyond(self, tokens: int, settings: AnswerOptions) -> None:
        """Refuses a prompt that leaves no room for an answer or is far too long for the model.

        Raises:
            InputError: The prompt exceeds ``max_positions`` or a multiple of ``made_for``.
        """
        if self.made_for is not None and tokens > _MOST_TIMES * self.made_for:
            raise InputError(
                f"the question and its images make a prompt of {tokens} tokens; "
                f"{type(self.model).__name__} was made for {self.made_for} "
                f"(max_position_embeddings), and a prompt may have at most {_MOST_TIMES} times as "
                "many: shorten the question"
            )
        if self.max_positions is not None and tokens + settings.max_new_tokens > self.max_positions:
            raise InputError(
                f"the question and its images make a prompt of {tokens} tokens, an answer may "
                f"have {settings.max_new_tokens}, and {type(self.model).__name__} has "
                f"{self.max_positions} positions; shorten the question, give fewer or smaller "
                "images, or lower max_new_tokens"
            )

    def _generate(
        self,
        requests: Sequence[AnswerRequest],
        questions: Sequence[Question],
        inputs: Mapping[str, Tensor],
        settings: AnswerOptions,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Decodes a batch; returns each row's tokens, margins, logits and trace as requested."""
        asked = settings.margins and all(yes_no_ids(self.processor.tokenizer))
        names = None
        if settings.noise_by == "image":
            names = [noise_of_images(question) for question in questions]
        elif settings.do_sample:
            names = [noise_name(*pair) for pair in zip(requests, questions, strict=True)]
        given: dict[str, Any] = {**inputs, **settings.generation(), **options}
        if settings.prompt_cache:
            self.prompt_cache.max_bytes = settings.prompt_cache
        rounds: list[list[Round]] = []
        output = generate(
            self.model,
            decoder=self.decoder,
            request=names,
            prompt_cache=None if settings.prompt_cache == 0 else self.prompt_cache,
            mm_inputs={"questions": list(questions)},
            return_dict_in_generate=True,
            output_logits=asked,
            output_scores=settings.first_logits,
            trace=rounds if settings.trace else None,
            **given,
        )
        rows: list[dict[str, Any]] = []
        for row in output.sequences[:, inputs["input_ids"].shape[1] :].tolist():
            end = next((index for index, t in enumerate(row) if t in self._ends), len(row) - 1)
            rows.append({"token_ids": row[: end + 1]})
        own = self._margins(output.logits[0]) if asked else [None] * len(rows)
        for index, known in enumerate(rows):
            known["margin"] = own[index]
            if settings.first_logits:
                known["first_logits"] = output.scores[0][index].cpu()
            if settings.trace:
                known["trace"] = rounds[index]
                opening = rounds[index][0].opening
                if asked and opening:
                    margins = self._margins(torch.stack([*opening.values()]))
                    known["margins"] = dict(zip(opening, margins, strict=True))
        return rows

    def _margins(self, logits: Tensor) -> list[float]:
        return yes_no_margin(logits, *yes_no_ids(self.processor.tokenizer)).tolist()

    def _text(self, tokens: list[int]) -> str:
        decode = self.processor.tokenizer.decode
        return decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False).strip()


def _while(wanted: Callable[[], bool]) -> Any:
    """Stopping criteria of ``generate`` that end all rows once they are not wanted."""
    from transformers import StoppingCriteriaList

    return StoppingCriteriaList([lambda ids, scores: not wanted()])


@contextlib.contextmanager
def _located(request: AnswerRequest) -> Iterator[None]:
    """Adds the table and line of a request to errors about it."""
    try:
        yield
    except InputError as error:
        if request.where is None:
            raise
        raise InputError(f"{request.where}: {error}") from error
