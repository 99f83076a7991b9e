"""`Answerer`: images and questions in, answers out."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmdecode import registry
from mmdecode.api import generate
from mmdecode.checkpoints import (
    code_trusted,
    dtype_of,
    loading,
    local_path,
    placed,
    trusting_as_asked,
)
from mmdecode.decoder import Decoder
from mmdecode.engine.checks import length_made_for
from mmdecode.engine.request import token_ids
from mmdecode.engine.trace import Round
from mmdecode.errors import (
    InputError,
    MissingExtraError,
    MMDecodeError,
    OptionError,
    UnsupportedModelError,
    refuse_unknown,
)
from mmdecode.guide.answers import yes_no_ids, yes_no_margin
from mmdecode.model_names import full_name
from mmdecode.runs.failures import OnError, collected
from mmdecode.runs.items import Failed, Watch, each, tried
from mmdecode.vlm.images import digest
from mmdecode.vlm.questions import Prompts, Question
from mmdecode.vlm.requests import Request, is_list, requests_of

if TYPE_CHECKING:
    from mmdecode.engine.contracts import AcceptanceRule, Drafter, Guide
    from mmdecode.engine.stats import Stats


ADVICE = (
    "give smaller images or a shorter question, lower max_new_tokens, or load the model in half "
    "precision"
)

_MOST_TIMES = 100
"""How many times the length that a model was made for a prompt may have."""
_LONGER = 32  # times: rows are padded to the longest of their batch

WARPERS = ("min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Settings of ``generate`` that warp the law when sampling, beside those of `AnswerOptions`."""


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """Settings of an answer.

    Attributes:
        max_new_tokens: Most tokens of an answer.
        do_sample: Draw tokens; else the most likely one is taken.
        temperature: Of the law that is drawn from; 1 is neutral.
        top_p: Draw from the most likely tokens that together have this probability; 1 is neutral.
        top_k: Draw from so many tokens; 0 is neutral, and the default whatever the checkpoint says.
        batch_size: Questions decoded at once.
        text_only: Whether questions without an image are meant so.
        margins: Whether answers get a margin; it costs the memory of each token's logits.
        trace: Whether answers get a trace, and with margins those of each branch; it costs a
            synchronisation per round.
        law: Whether answers get the law of their first token; it costs as margins do.

    Raises:
        OptionError: A value is out of range.
    """

    max_new_tokens: int = 128
    do_sample: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    batch_size: int = 8
    text_only: bool = False
    margins: bool = True
    trace: bool = False
    law: bool = False

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)}; expected at least 1")
        if not 0 < self.temperature < math.inf:
            raise OptionError(
                f"temperature={self.temperature}; expected more than 0: leave do_sample out for "
                "the most likely tokens"
            )
        if not 0 < self.top_p <= 1:
            raise OptionError(f"top_p={self.top_p}; expected more than 0 and at most 1")
        if self.top_k < 0:
            raise OptionError(f"top_k={self.top_k}; expected a number of tokens, or 0 for all")
        if not self.do_sample and (self.temperature, self.top_p, self.top_k) != (1.0, 1.0, 0):
            raise OptionError(
                "temperature, top_p and top_k are for sampling; set do_sample=True too, or leave "
                "them out"
            )

    def generation(self) -> dict[str, Any]:
        """As arguments of ``generate``; what a checkpoint says of sampling does not count.

        Its penalties do, such as ``repetition_penalty``: they are part of its greedy answers too.
        """
        given: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "num_beams": 1}
        given |= dict.fromkeys(WARPERS)
        if not self.do_sample:
            return given | {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        drawn = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return given | {"do_sample": True, **drawn}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model says to one question.

    Attributes:
        id: Of the request: the given one, else its place in the input.
        index: Its place in the input.
        images: Names of its images: paths, or ``image 2``.
        question: As it was asked.
        text: The answer; empty where there is an error.
        token_ids: It as ids; the one that ends it is among them.
        margin: How much rather the model begins with yes than with no, see `yes_no_margin`, by the
            logits of its main branch: no processor, and no guide but one that edits or replaces
            that branch. ``None``: its tokenizer has no such words, or margins were not asked for.
        margins: The same by branch, ``main`` as in ``margin``, and under ``guided`` with the
            guide, before a plausibility cut; infinite where the guide leaves one of the words
            alone. ``None``: as for ``margin``, or a trace was not asked for.
        law: What the first token was decided from, with guide and processors: logits ``(V,)``;
            ``None``: not asked for.
        prompt: The question as the processor was given it; empty where there is an error.
        seconds: Of its batch, over the batch's size; reading images is not counted.
        passes: Scoring passes of its batch after the prompts were read.
        trace: Its rounds, see `mmdecode.engine.trace.Round`; ``None``: not asked for.
        error: What was wrong, what was expected and what to do; ``None``: nothing was.
        kind: Name of the error's class.
    """

    id: str
    index: int
    images: tuple[str, ...]
    question: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list, repr=False)
    margin: float | None = None
    margins: dict[str, float] | None = None
    law: Tensor | None = field(default=None, repr=False)
    prompt: str = field(default="", repr=False)
    seconds: float = 0.0
    passes: int = 0
    trace: list[Round] | None = field(default=None, repr=False)
    error: str | None = None
    kind: str | None = None

    def changed(self, tokens: int | None = None) -> int | None:
        """How many tokens a guide decided otherwise than the model alone would have.

        Args:
            tokens: Only so many, the first ones; ``None``: all.

        Returns:
            Their number; ``None``: no trace was asked for, no guide was on, or it is one whose
            trace cannot know (see `mmdecode.engine.trace.Step`).
        """
        steps = [step for one in self.trace or () for step in one.steps]
        known = [step.changed for step in steps[:tokens] if step.changed is not None]
        return sum(known) if known else None


class Answerer:
    """Answers questions about images in batches.

    Args:
        model: A vision-language model of transformers.
        processor: Its processor.
        decoder: How answers are decoded; ``None``: without a draft or a guide.

    Raises:
        UnsupportedModelError: The processor reads no images.
    """

    def __init__(self, model: Any, processor: Any, decoder: Decoder | None = None) -> None:
        self.model, self.processor = model.eval(), processor
        self.decoder = decoder or Decoder(seed=0)
        self.prompts = Prompts(model, processor)
        self._ends = set(token_ids(model.generation_config.eos_token_id))
        self._places: int | None = None
        self._made_for: int | None = None
        # some hand their decoder a model inside of them, which sets its own limit
        with contextlib.suppress(UnsupportedModelError):
            adapter = registry.adapter_for(model)
            self._places, self._made_for = adapter.max_positions, length_made_for(adapter)

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
        seed: int = 0,
        *,
        trust_remote_code: bool = False,
    ) -> Answerer:
        """Loads a model and builds its decoder.

        Args:
            model_id: A folder, a Hub id, a short name as ``llava-1.5-7b``, or ``zoo:NAME``.
            draft: A draft, or its name with options.
            guide: A guide, or its name with options.
            accept: See `mmdecode.Decoder`.
            device: ``None``: CUDA where there is one.
            dtype: ``None``: float32; ``auto``: see `mmdecode.checkpoints.dtype_of`.
            seed: Of the noise that sampling uses.
            trust_remote_code: Run Python files that come with the model: read them first.

        Raises:
            InputError: The checkpoint cannot be loaded.
            OptionError: The device or dtype does not exist.
            UnsupportedModelError: It is no vision-language model.
        """
        name = full_name(str(model_id))
        model, processor = load(name, device, dtype)
        at_hand = {"target": model, "model_id": name}
        if isinstance(draft, str):
            draft = registry.create("draft", draft, **at_hand)
        if isinstance(guide, str):
            guide = registry.create("guide", guide, **at_hand)
        return cls(model, processor, Decoder(draft, guide, accept, seed))

    @property
    def stats(self) -> Stats:
        """The decoder's counters, over all calls."""
        return self.decoder.stats

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
            questions: One question, or a list. One is asked about each entry of ``images``, and
                one image is asked about in each question.
            ids: Names of the requests; they also name their noise when sampling. Without them
                what is asked and shown does, so that equal requests get equal answers.
            on_error: ``raise`` the first error, or ``return`` an answer that has it for each;
                ``None``: raise for a single question about a single entry, return for lists.
            **options: Fields of `AnswerOptions`.

        Returns:
            An `Answer` for one question about one entry; where either is a list, a list in its
            order, with empty answers that have an ``error`` where one could not be given.

        Raises:
            OptionError: Images, questions and ids do not pair up, or an option is wrong.
            InputError: A single question cannot be answered.
        """
        asked = requests_of(images, questions, ids)
        single = isinstance(questions, str) and not is_list(images)
        return collected(self.answers(asked, **options), single, on_error)

    def answers(
        self, requests: Sequence[Request], watch: Watch | None = None, **options: Any
    ) -> Iterator[Answer]:
        """Like a call, but yields answers as their batches end; questions of a length go together.

        Whatever an error of one question is, that question fails, and the others are answered.

        Args:
            requests: See `requests_of`.
            watch: Of the job, where it asks several times; see `mmdecode.runs.items`.
            **options: Fields of `AnswerOptions`.

        Raises:
            MMDecodeError: An error of the configuration: all questions fail by it.
        """
        watch = Watch() if watch is None else watch
        yield from watch.released(self._outcomes(requests, make_options(options), watch))

    def _outcomes(
        self, requests: Sequence[Request], settings: AnswerOptions, watch: Watch
    ) -> Iterator[tuple[Answer, Failed | None]]:
        lengths = [tried(partial(self._length, request), ADVICE) for request in requests]
        ordered = sorted(zip(requests, lengths, strict=True), key=lambda one: _size(one[1]))
        for batch in _batches(ordered, settings.batch_size):
            asked: list[tuple[Request, Question]] = []
            for request, length in batch:
                question = (
                    length
                    if isinstance(length, Failed)
                    else tried(partial(self._question, request, length[1], settings), ADVICE)
                )
                if isinstance(question, Failed):
                    yield _failed(request, question), question
                else:
                    asked.append((request, question))
            for (request, _), found in each(
                asked,
                partial(self._batch, settings=settings),
                advice=ADVICE,
                name=lambda one: one[0].id,
                watch=watch,
                attempt=self.stats.attempt,
            ):
                if isinstance(found, Failed):
                    yield _failed(request, found), found
                else:
                    yield found, None

    def _length(self, request: Request) -> tuple[int, int]:
        """Images and tokens of a question."""
        if request.problem is not None:
            raise InputError(request.problem)
        return len(request.images), len(self.processor.tokenizer.tokenize(request.text))

    def _question(self, request: Request, tokens: int, settings: AnswerOptions) -> Question:
        """A request whose images were read.

        Raises:
            InputError: One cannot be, or the question cannot be asked.
        """
        pictures = [source.read() for source in request.images]
        question = self.prompts.question(request.text, pictures, text_only=settings.text_only)
        self._refuse_beyond(tokens, settings)  # no batch need be built of it
        return question

    def stream(
        self, image: Any, question: str, *, id: str | None = None, **options: Any
    ) -> Iterator[str]:
        """Yields an answer in pieces, as soon as they cannot change any more.

        Args:
            image: One image, a list of images that are asked about together, or ``None``.
            question: What is asked.
            id: Names the request and its noise when sampling; see a call's ``ids``.
            **options: Fields of `AnswerOptions`.

        Raises:
            InputError: The image cannot be read, or does not go with the question.
        """
        from transformers import StoppingCriteriaList, TextIteratorStreamer

        settings = make_options(options)
        [request] = requests_of([image], question, None if id is None else [id])
        pictures = [source.read() for source in request.images]
        asked = self.prompts.question(question, pictures, text_only=settings.text_only)
        inputs = self._inputs([asked], settings)
        streamer = TextIteratorStreamer(
            self.processor.tokenizer,
            skip_prompt=True,
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        left = threading.Event()  # nobody listens any more
        problems: list[BaseException] = []

        def run() -> None:
            try:
                self._generate(
                    [request],
                    [asked],
                    inputs,
                    replace(settings, margins=False),
                    streamer=streamer,
                    stopping_criteria=StoppingCriteriaList([lambda ids, scores: left.is_set()]),
                )
            except BaseException as problem:  # raised where the pieces are asked for
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

    def _batch(
        self, asked: Sequence[tuple[Request, Question]], settings: AnswerOptions
    ) -> list[Answer]:
        """Answers of a batch."""
        requests, questions = zip(*asked, strict=True)
        began, passes = time.perf_counter(), self.stats.passes
        inputs = self._inputs(questions, settings)
        rows = self._generate(requests, questions, inputs, settings)
        seconds = (time.perf_counter() - began) / len(asked)
        return [
            Answer(
                id=request.id,
                index=request.index,
                images=tuple(source.name for source in request.images),
                question=request.text,
                text=self._text(row["token_ids"]),
                prompt=self.prompts.prompt(question),
                seconds=seconds,
                passes=self.stats.passes - passes,
                **row,
            )
            for (request, question), row in zip(asked, rows, strict=True)
        ]

    def _inputs(self, questions: Sequence[Question], settings: AnswerOptions) -> dict[str, Tensor]:
        """Model inputs with room for an answer.

        Raises:
            InputError: The processor refuses them, or a prompt fills the model's positions.
        """
        inputs = self.prompts.build(questions)
        self._refuse_beyond(int(inputs["attention_mask"].sum(1).max()), settings)
        return inputs

    def _refuse_beyond(self, tokens: int, settings: AnswerOptions) -> None:
        """Refuses a prompt that leaves no room for an answer, or would take hours for none.

        Raises:
            InputError: It fills the model's positions, or is far beyond what it was made for.
        """
        if self._made_for is not None and tokens > _MOST_TIMES * self._made_for:
            raise InputError(
                f"the question and its images make a prompt of {tokens} tokens; "
                f"{type(self.model).__name__} was made for {self._made_for} "
                f"(max_position_embeddings), and more than {_MOST_TIMES} times that is no text for "
                "it: shorten the question"
            )
        if self._places is not None and tokens + settings.max_new_tokens > self._places:
            raise InputError(
                f"the question and its images make a prompt of {tokens} tokens, an answer may "
                f"have {settings.max_new_tokens}, and {type(self.model).__name__} has "
                f"{self._places} positions; shorten the question, give fewer or smaller images, or "
                "lower max_new_tokens"
            )

    def _generate(
        self,
        requests: Sequence[Request],
        questions: Sequence[Question],
        inputs: Mapping[str, Tensor],
        settings: AnswerOptions,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Per row what an `Answer` has of it: new tokens up to the end, and what was asked for."""
        asked = settings.margins and all(yes_no_ids(self.processor.tokenizer))
        names = None
        if settings.do_sample:
            names = [_noise_name(*pair) for pair in zip(requests, questions, strict=True)]
        given: dict[str, Any] = {**inputs, **settings.generation(), **options}
        rounds: list[list[Round]] = []
        output = generate(
            self.model,
            decoder=self.decoder,
            request=names,
            mm_inputs={"questions": list(questions)},
            return_dict_in_generate=True,
            output_logits=asked,
            output_scores=settings.law,
            trace=rounds if settings.trace else None,
            **given,
        )
        rows: list[dict[str, Any]] = []
        for row in output.sequences[:, inputs["input_ids"].shape[1] :].tolist():
            end = next((place for place, t in enumerate(row) if t in self._ends), len(row) - 1)
            rows.append({"token_ids": row[: end + 1]})
        own = self._margins(output.logits[0]) if asked else [None] * len(rows)
        for place, known in enumerate(rows):
            known["margin"] = own[place]
            if settings.law:
                known["law"] = output.scores[0][place].cpu()
            if settings.trace:
                known["trace"] = rounds[place]
                opening = rounds[place][0].opening
                if asked and opening:
                    margins = self._margins(torch.stack([*opening.values()]))
                    known["margins"] = dict(zip(opening, margins, strict=True))
        return rows

    def _margins(self, logits: Tensor) -> list[float]:
        return yes_no_margin(logits, *yes_no_ids(self.processor.tokenizer)).tolist()

    def _text(self, tokens: list[int]) -> str:
        decode = self.processor.tokenizer.decode
        return decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False).strip()


def make_options(options: Mapping[str, Any]) -> AnswerOptions:
    """`AnswerOptions` from keyword arguments, with our error for an unknown name."""
    refuse_unknown(options, list(AnswerOptions.__dataclass_fields__))
    return AnswerOptions(**options)


def load(
    model_id: str, device: str | torch.device | None, dtype: str | torch.dtype | None
) -> tuple[Any, Any]:
    """Model and processor of a checkpoint.

    Raises:
        InputError: It cannot be loaded.
        MissingExtraError: Its processor needs a library that is not installed.
        OptionError: The device or dtype does not exist.
        UnsupportedModelError: It is no vision-language model.
    """
    from transformers import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoConfig,
        AutoModelForImageTextToText,
        AutoProcessor,
    )

    kind = dtype_of(dtype, model_id, device)
    path = local_path(model_id)
    try:
        with loading(model_id):
            config = AutoConfig.from_pretrained(path, trust_remote_code=code_trusted())
            if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
                raise UnsupportedModelError(
                    f"{model_id} is a {config.model_type} model; an Answerer runs vision-language "
                    "models, those of transformers' AutoModelForImageTextToText"
                )
            processor = AutoProcessor.from_pretrained(path, trust_remote_code=code_trusted())
            model = AutoModelForImageTextToText.from_pretrained(
                path, dtype=kind, trust_remote_code=code_trusted()
            )
    except MMDecodeError:
        raise
    except ImportError as error:  # some processors exist for torchvision alone
        reason = " ".join(str(error).split())
        raise MissingExtraError(
            f"loading {model_id!r} needs more ({reason})", extra="vlm"
        ) from error
    return placed(model, device), processor


def _size(length: tuple[int, int] | Failed) -> tuple[int, int]:
    return (0, 0) if isinstance(length, Failed) else length


def _batches(
    ordered: Sequence[tuple[Request, tuple[int, int] | Failed]], size: int
) -> Iterator[list[tuple[Request, tuple[int, int] | Failed]]]:
    """Questions by length; one that is much longer than the others before it begins a batch."""
    batch: list[tuple[Request, tuple[int, int] | Failed]] = []
    for one in ordered:
        longest = _LONGER * (_size(batch[0][1])[1] + _LONGER) if batch else math.inf
        if len(batch) == size or _size(one[1])[1] > longest:
            yield batch
            batch = []
        batch.append(one)
    if batch:
        yield batch


def _failed(request: Request, failed: Failed) -> Answer:
    return Answer(
        id=request.id,
        index=request.index,
        images=tuple(source.name for source in request.images),
        question=request.text,
        error=failed.error,
        kind=failed.kind,
    )


def noise_of_id(name: str) -> str:
    """Names the noise of a request that was given an id; the engine's request of `Decoder`."""
    return f"id {name}"


def _noise_name(request: Request, question: Question) -> str:
    """The id that the user gave, else what is asked and shown."""
    if request.named:
        return noise_of_id(request.id)
    return "\n".join(["asked", question.text, *map(digest, question.images)])
