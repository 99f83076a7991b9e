"""Runs modes of decoding over the same questions about images.

A mode is a guide with greedy decoding, or with sampling under several seeds. Modes take turns chunk
by chunk, A B B A, so that a machine that slows down affects them alike. A chunk that was
interrupted is decoded again as a whole, in the same batches, so that a resumed run has the same
results as an uninterrupted run.

Sampled answers to a yes/no question share one forward pass if the guide is not random: all seeds
then have the same distribution of the first token. Whether it is random is tested on the first
questions. The first token of each seed is sampled from this distribution with the noise that the
engine uses for that seed and question, so decoding with the seed would give the same token. If the
token is yes or no, the answer is that word, without further text. Otherwise the answer is decoded
in full. Captions, multiple-choice answers and random guides are always decoded in full.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Generic

import torch
from torch import Tensor

from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.engine.contracts import plain_main
from mmdecode.engine.noise import Noise, Role, request_key
from mmdecode.engine.prompt_cache import BYTES, PromptCache
from mmdecode.engine.stats import Stats
from mmdecode.errors import OptionError
from mmdecode.evaluation.vision.items import Some, YesNoItem, text_hash
from mmdecode.evaluation.vision.modes import NONE, Mode
from mmdecode.guide.answers import yes_no_ids
from mmdecode.runs.items import Noted, Watch
from mmdecode.runs.rows import RowJournal
from mmdecode.vlm.answerer import Answerer
from mmdecode.vlm.images import ImageSource
from mmdecode.vlm.questions import Prompts, Question, noise_of_id
from mmdecode.vlm.requests import AnswerRequest
from mmdecode.vlm.results import Answer

if TYPE_CHECKING:
    from mmdecode.engine.contracts import Guide

_TRIED = 64  # questions on which two seeds are compared to find out whether a guide is random
_SAME = 1e-3  # difference of logits by rounding


@dataclass(eq=False)
class Recorder(Generic[Some]):
    """Decodes questions in several modes.

    Attributes:
        model: A vision-language model of transformers.
        processor: Processor of the model.
        items: Questions, each once.
        modes: Modes to decode in, see `modes_of`.
        image: Function from the name of an item's image to its source.
        suffix: Text appended to each question.
        max_new_tokens: Largest number of tokens of an answer.
        batch_size: Number of questions in a batch.
        prompt_cache: Bytes of prompts to keep, see `mmdecode.vlm.AnswerOptions`; each guide has
            its share.
        noise_by: Seed of a question's random numbers, see `mmdecode.vlm.AnswerOptions`.
        seed: Seed of random guides in greedy decoding.
        redraw: Whether seeds share the distribution of the first token, see the module.
        warmup: Number of untimed runs of each guide's first batch.
        chunk: Number of batches that one mode decodes before the next mode takes its turn.
        fewest: With fewer questions, a guide is assumed to be random.

    Raises:
        OptionError: There is no mode.
        MMDecodeError: A guide does not work with the model.
    """

    model: Any
    processor: Any
    items: Sequence[Some]
    modes: Sequence[Mode]
    image: Callable[[str], ImageSource]
    _: KW_ONLY
    suffix: str = ""
    max_new_tokens: int = 32
    batch_size: int = 8
    prompt_cache: int = BYTES
    noise_by: str = "request"
    seed: int = 0
    redraw: bool = True
    warmup: int = 1
    chunk: int = 8
    fewest: int = 16

    def __post_init__(self) -> None:
        if not self.modes:
            raise OptionError("no mode to run; expected at least one")
        context = registry.context_of(self.model, self.processor)
        self._guides = {
            spec: None if spec == NONE else registry.create("guide", spec, **context)
            for spec in dict.fromkeys(mode.guide for mode in self.modes)
        }
        # each guide reads its prompts itself, so that times are comparable
        self._prompts = {spec: PromptCache() for spec in self._guides}
        self._watches = {spec: Watch() for spec in self._guides}
        self._yes_no = isinstance(self.items[0], YesNoItem)
        self._options: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "batch_size": self.batch_size,
            "prompt_cache": self.prompt_cache // len(self._guides),
            "noise_by": self.noise_by,
            "margins": self._yes_no,
            "trace": self._yes_no,
        }
        self._words = {i for ids in yes_no_ids(self.processor.tokenizer) for i in ids}
        self._random: dict[str, bool] = {}
        self._stats = Stats()

    def run(
        self,
        journal: RowJournal[Some] | None = None,
        progress: Callable[[Some], None] | None = None,
        *,
        items: Sequence[Some] | None = None,
        noted: Noted = contextlib.nullcontext,
    ) -> list[Some]:
        """Decodes all modes; returns their rows, mode by mode and seed by seed.

        Args:
            journal: File that each row is added to as soon as it is ready; questions with an answer
                in it are skipped, failed questions are decoded again. ``None``: no file.
            progress: Called with each new row.
            items: Questions to decode; ``None``: all.
            noted: Records which questions are being decoded, see `mmdecode.runs.items.Watch`.
        """
        asked = self.items if items is None else items
        for watch in self._watches.values():
            watch.noted = noted
        earlier = journal.rows.items() if journal else ()
        found = {key: row for key, row in earlier if row.error is None}
        for guide in self._guides if self.warmup else ():
            if not self._done(guide, asked, found):
                self._warm(guide)
        size = self.chunk * self.batch_size
        chunks = [asked[i : i + size] for i in range(0, len(asked), size)]
        for number, chunk in enumerate(chunks):
            turns = list(self._guides)
            for guide in turns if number % 2 == 0 else turns[::-1]:
                if self._done(guide, chunk, found):
                    continue
                for row in self._rows(guide, chunk):
                    if row.key() in found:
                        continue
                    found[row.key()] = row
                    if journal:
                        journal.add(row)
                    if progress:
                        progress(row)
        rows = [found[key] for key in _keys(self.modes, asked)]
        if journal:
            journal.finish_with(rows)
        return rows

    def failed(self, item: Some, error: str) -> list[Some]:
        """Rows of a question that cannot be decoded, mode by mode and seed by seed."""
        return [
            item.answered(mode=mode.name, seed=seed, error=error)
            for mode in self.modes
            for seed in mode.seeds or (None,)
        ]

    @property
    def prompt(self) -> str:
        """The prompt of the first question, after the chat template."""
        from PIL import Image

        prompts, first = Prompts(self.model, self.processor), self._requests(self.items[:1])[0]
        blank = tuple(Image.new("RGB", (1, 1)) for _ in first.images)
        return prompts.prompt(Question(first.text, blank, prompts.build))

    @property
    def prompt_tokens(self) -> dict[str, int]:
        """Number of tokens of prompts that were read, and that were reused."""
        counts = self._stats.prompt_tokens
        return {f"prompt_tokens_{name}": counts[name] for name in ("read", "reused")}

    @property
    def total(self) -> int:
        """Number of rows of all modes and seeds."""
        return len(self.items) * sum(max(len(mode.seeds), 1) for mode in self.modes)

    def _done(self, guide: str, chunk: Sequence[Some], found: Mapping[Any, Some]) -> bool:
        return all(key in found for key in _keys(self._of(guide), chunk))

    def _of(self, guide: str) -> list[Mode]:
        return [mode for mode in self.modes if mode.guide == guide]

    def _warm(self, guide: str) -> None:
        """Makes untimed runs; a guide that does not work with the model raises its error here."""
        first = self.items[: self.batch_size]
        sampled = all(mode.seeds for mode in self._of(guide))
        for _ in range(self.warmup):
            list(self._answers(guide, first, self.seed, do_sample=sampled))

    def _rows(self, guide: str, chunk: Sequence[Some]) -> Iterator[Some]:
        """Rows of a chunk under all modes of a guide."""
        greedy = [mode for mode in self._of(guide) if not mode.seeds]
        sampled = [mode for mode in self._of(guide) if mode.seeds]
        # drawn again by questions' own noise
        own_noise = self.redraw and self._yes_no and self.noise_by == "request"
        if sampled and own_noise and guide not in self._random:
            self._random[guide] = self._is_random(guide)
        shares = bool(sampled) and own_noise and not self._random[guide]
        again: dict[tuple[str, int], list[Some]] = {
            (mode.name, seed): [] if shares else list(chunk)
            for mode in sampled
            for seed in mode.seeds
        }
        if greedy or shares:
            known = {item.id: item for item in chunk}
            options: dict[str, Any] = {"first_logits": shares}
            if not greedy:
                options |= {"do_sample": True, "max_new_tokens": 1}
            for answer in self._answers(guide, chunk, self.seed, **options):
                item = known[answer.id]
                for mode in greedy:
                    yield self._row(item, mode.name, None, answer)
                for name, seed in again if shares else ():
                    first = answer.first_logits
                    token = None if first is None else sampled_token(first, seed, answer.id)
                    if token is None or token in self._words:
                        yield self._row(item, name, seed, answer, token)
                    else:
                        again[name, seed].append(item)
        for (name, seed), items in again.items():
            known = {item.id: item for item in items}
            for answer in self._answers(guide, items, seed, do_sample=True):
                yield self._row(known[answer.id], name, seed, answer)

    def _is_random(self, guide: str) -> bool:
        """Whether the guide's first token differs between seeds by more than rounding."""
        first = self.items[:_TRIED]
        if guide == NONE or len(first) < self.fewest:
            return guide != NONE
        options: dict[str, Any] = {"first_logits": True, "do_sample": True, "max_new_tokens": 1}
        one, other = (
            {
                answer.id: answer.first_logits.softmax(-1)
                for answer in self._answers(guide, first, seed, **options)
                if answer.first_logits is not None
            }
            for seed in (self.seed, self.seed + 1)
        )
        return not all(
            torch.allclose(one[name], other[name], rtol=_SAME, atol=1e-6)
            for name in one.keys() & other.keys()
        )

    def _answers(
        self, guide: str, items: Sequence[Some], seed: int, **options: Any
    ) -> Iterator[Answer]:
        """Answers under a guide."""
        decoder = Decoder(guide=self._guides[guide], seed=seed, stats=self._stats)
        answerer = Answerer(self.model, self.processor, decoder, self._prompts[guide])
        watch = self._watches[guide]
        yield from answerer.answers(self._requests(items), watch=watch, **self._options | options)

    def _requests(self, items: Sequence[Some]) -> list[AnswerRequest]:
        return [
            AnswerRequest(
                item.id,
                index,
                item.question + self.suffix,
                (self.image(item.image),) if item.image else (),
                named=True,
            )
            for index, item in enumerate(items)
        ]

    def _row(
        self, item: Some, mode: str, seed: int | None, answer: Answer, token: int | None = None
    ) -> Some:
        """Row of an answer, or of its sampled first token alone, whose time is not known."""
        if answer.error is not None:
            return item.answered(mode=mode, seed=seed, error=answer.error)
        guide = self._guides[next(one.guide for one in self.modes if one.name == mode)]
        text, tokens = answer.text, len(answer.token_ids)
        if token is not None:
            text, tokens = self.processor.tokenizer.decode([token]).strip(), 1
        return item.answered(
            mode=mode,
            seed=seed,
            output=text,
            prompt_hash=text_hash(answer.prompt),
            tokens=tokens,
            passes=_passes(guide, tokens),
            forwards=_forwards(guide, tokens),
            changed=answer.changed(None if token is None else 1),
            seconds=answer.seconds if token is None else None,
            **(_margins(guide, answer) if self._yes_no else {}),
        )


def sampled_token(logits: Tensor, seed: int, name: str) -> int:
    """Samples the first token as the decoder does with a seed.

    Args:
        logits: Logits of the first token, ``(V,)``.
        seed: Seed of the decoder.
        name: Id of the request; the noise depends on seed and id.
    """
    noise = Noise.of(seed, [request_key(noise_of_id(name), 0)])
    first = torch.zeros((1, 1), dtype=torch.long)
    return int(noise.sample(logits[None, None], first, Role.TARGET))


def _keys(modes: Iterable[Mode], items: Sequence[Some]) -> Iterator[tuple[str, int | None, str]]:
    """Mode, seed and id of each row, mode by mode and seed by seed."""
    for mode in modes:
        for seed in mode.seeds or (None,):
            yield from ((mode.name, seed, item.id) for item in items)


def _margins(guide: Guide | None, answer: Answer) -> dict[str, float | None]:
    known = answer.margins or {}
    main = known.get("main") if plain_main(guide) else None
    values = {"margin": known.get("guided"), "main_margin": main}
    return {
        name: value if value is not None and math.isfinite(value) else None
        for name, value in values.items()
    }


def _passes(guide: Guide | None, tokens: int) -> int:
    """Number of passes, one per branch and token; the first pass of a branch is the prefill."""
    if guide is None or guide.neutral:
        return tokens
    later = 1 + sum(branch.replaces_after_prefill is None for branch in guide.branches)
    return 1 + len(guide.branches) + (tokens - 1) * later


def _forwards(guide: Guide | None, tokens: int) -> int:
    """Forward passes after the prefill; branches of one model and stage share a pass."""
    main = (1, id(None))
    shared = {main}
    if guide is not None and not guide.neutral:
        shared = {(spec.stage, id(spec.build or spec.model)) for spec in guide.branches}
        if all(spec.replaces_after_prefill != "main" for spec in guide.branches):
            shared.add(main)
    return (tokens - 1) * len(shared)
