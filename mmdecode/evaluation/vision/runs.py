"""Runs modes of decoding over the same questions about images.

A mode is a guide with a way to choose tokens: the most likely, or drawn with several seeds. Modes
take turns chunk by chunk, A B B A, so that a machine that slows down slows all of them; a chunk
that was interrupted is decoded again as a whole, in the same batches, so that a resumed run gives
what an uninterrupted one gives.

Answers to a yes/no question that are drawn with several seeds come of one distribution where they
can: the distribution of the first token, with guide, cut and processors, is the same for all seeds
unless the guide itself is random, which is tried out on the first questions. A seed's token is
drawn from it with the very noise that the engine uses for that seed and question, so it is the
first token that decoding with that seed would give. Where it is a yes or a no, the row's answer is
that word alone, without what decoding might put after it; where it is another token, that seed is
decoded in full, as captions, choices and random guides always are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

import torch
from torch import Tensor

from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.engine.contracts import plain_main
from mmdecode.engine.noise import Noise, Role, request_key
from mmdecode.errors import OptionError
from mmdecode.evaluation.vision.items import ITEMS, Some, YesNoItem, read_items, text_hash
from mmdecode.guide.answers import yes_no_ids
from mmdecode.runs.items import Watch
from mmdecode.runs.journal import Journal
from mmdecode.vlm.answerer import Answerer
from mmdecode.vlm.images import ImageSource
from mmdecode.vlm.questions import Prompts, Question, noise_of_id
from mmdecode.vlm.requests import AnswerRequest
from mmdecode.vlm.results import Answer

if TYPE_CHECKING:
    from mmdecode.engine.contracts import Guide

NONE = "none"
"""The guide of the plain model."""
GREEDY, SAMPLED = "greedy", "sampled"
"""Modes of the plain model."""
CONTROLS = ("plausible", "temperature_matched", "prompt_bias", "near_ties", "margin_shift")
"""Guides that are controls themselves."""
INERT = ("plausible", "temperature_matched", "dfd")
"""Guides that leave the most likely token the most likely, and so are for sampling only."""
CHUNK = 8
"""Batches that are decoded before it is another mode's turn."""
_TRIED = 64  # questions on which the distributions of two seeds show whether a guide is random
_FEWEST = 16  # with fewer it is taken for random
_SAME = 1e-3  # difference of logits that rounding makes


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way of decoding.

    Attributes:
        name: In tables and rows.
        guide: As the registry reads it; `NONE`: the plain model.
        seeds: Of the repeats where tokens are drawn; none: the most likely are taken.
        control: Whether it is there for others to be compared with.
        against: Names of the modes that it is compared with.
    """

    name: str
    guide: str = NONE
    seeds: tuple[int, ...] = ()
    control: bool = False
    against: tuple[str, ...] = ()


def modes_of(
    guides: Sequence[str],
    *,
    greedy: bool = True,
    seeds: Sequence[int] = (),
    controls: bool = True,
    yes_no: bool = True,
) -> list[Mode]:
    """The modes of a run: the plain model first, each guide, and the controls a gain has to beat.

    Next to them stand, for yes/no questions, an instruction to say yes and the flip of near ties,
    sampled where nothing is greedy; next to each sampled guide the same plausibility cut alone, and
    the temperature that weights with another sum than 1 amount to. The baseline with a shifted
    margin is computed from its rows (`mmdecode.evaluation.vision.yes_no_report`).

    Args:
        guides: As the registry reads them; `NONE` may be among them.
        greedy: Whether guides decode greedily.
        seeds: Of sampling; none: nothing is sampled.
        controls: Whether to add the controls.
        yes_no: Whether the answers are yes and no.

    Raises:
        OptionError: Nothing is left to run, or a guide changes nothing in greedy decoding.
        UnknownNameError: There is no such guide.
    """
    seeds = tuple(seeds)
    if not greedy and not seeds:
        raise OptionError("neither greedy decoding nor a seed is wanted; give one of them")
    found: dict[str, Mode] = {}

    def add(name: str, guide: str, drawn: bool, control: bool, *against: str) -> None:
        earlier = tuple(dict.fromkeys(one for one in against if one in found))
        mode = Mode(name=name, guide=guide, seeds=seeds * drawn, control=control, against=earlier)
        found.setdefault(name, mode)

    if greedy or controls:
        add(GREEDY, NONE, False, not greedy)
    if seeds:
        add(SAMPLED, NONE, True, bool(found), GREEDY)
    if controls and yes_no:
        for name in ("prompt_bias", "near_ties"):
            if greedy:
                add(name, name, False, True, GREEDY)
            else:
                add(_drawn(name), name, True, True, SAMPLED)
    for spec in dict.fromkeys(guides):
        if spec == NONE:
            continue
        guide = registry.create("guide", spec)
        kind = spec.partition(":")[0]
        control = kind in CONTROLS
        if kind in INERT and not seeds:
            raise OptionError(
                f"guide {spec!r} changes nothing where the most likely token is taken; sample too, "
                "or leave it out"
            )
        if greedy and kind not in INERT:
            add(spec, spec, False, control, GREEDY)
        if seeds:
            beside = [] if control or not controls else controls_beside(guide)
            for other in beside:
                add(_drawn(other), other, True, True, SAMPLED)
            add(_drawn(spec), spec, True, control, SAMPLED, *map(_drawn, beside))
    return list(found.values())


def controls_beside(guide: Guide) -> list[str]:
    """Guides to sample with next to another: its cut alone, and its hidden temperature."""
    beta = getattr(guide, "beta", 0.0) or getattr(guide, "relative_top", 0.0)
    total = guide.total
    found = [f"plausible:beta={beta:g}"] if beta else []
    if total is not None and total > 0 and not math.isclose(total, 1.0):
        found.append(f"temperature_matched:total={total:g},beta={beta:g}")
    return found


def _drawn(spec: str) -> str:
    return f"{spec}, {SAMPLED}"


def comparisons_of(modes: Iterable[Mode]) -> dict[str, tuple[str, ...]]:
    """The modes that each mode is compared with, by name."""
    return {mode.name: mode.against for mode in modes}


def journal_of(
    folder: Path,
    kind: type[Some],
    settings: Mapping[str, Any],
    resume: bool,
    overwrite: bool = False,
    images: Path | None = None,
) -> Journal[Some]:
    """The rows of a run, in a folder; see `Journal`.

    Their images stand in the folder ``images``; ``None``: they are drawn.
    """
    return Journal(
        folder / ITEMS,
        lambda path: read_items(path, kind),
        lambda item: (item.mode, item.seed, item.id),
        settings,
        resume,
        overwrite,
        lambda item: str(images / item.image) if images and item.image else None,
    )


class Recorder(Generic[Some]):
    """Decodes questions in several modes.

    Args:
        model: A vision-language model.
        processor: Its processor.
        items: Questions, each once.
        modes: See `modes_of`.
        image: From the name of an item's image to where it is read.
        suffix: Put after each question.
        max_new_tokens: Most tokens of an answer.
        batch_size: Questions decoded at once.
        seed: Of what guides draw in greedy decoding.
        redraw: Whether seeds share the distribution of the first token, see above.
        warmup: Untimed runs of each guide's first batch.

    Attributes:
        image: See above.

    Raises:
        OptionError: There is no mode.
        MMDecodeError: A guide does not fit the model.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        items: Sequence[Some],
        modes: Sequence[Mode],
        image: Callable[[str], ImageSource],
        *,
        suffix: str = "",
        max_new_tokens: int = 32,
        batch_size: int = 8,
        seed: int = 0,
        redraw: bool = True,
        warmup: int = 1,
    ) -> None:
        if not modes:
            raise OptionError("no mode to run; expected at least one")
        self.items, self.modes, self.seed = list(items), list(modes), seed
        self._model, self._processor, self.image = model, processor, image
        self._suffix, self._warmup = suffix, warmup
        self._yes_no = isinstance(items[0], YesNoItem)
        self._redraw = redraw and self._yes_no
        self._options = {
            "max_new_tokens": max_new_tokens,
            "batch_size": batch_size,
            "margins": self._yes_no,
            "trace": self._yes_no,
        }
        self._guides = {
            spec: None if spec == NONE else registry.create("guide", spec, target=model)
            for spec in dict.fromkeys(mode.guide for mode in modes)
        }
        size = CHUNK * batch_size
        self._chunks = [self.items[i : i + size] for i in range(0, len(self.items), size)]
        self._words = {i for ids in yes_no_ids(processor.tokenizer) for i in ids}
        self._random: dict[str, bool] = {}
        self._watches = {spec: Watch() for spec in self._guides}

    def run(
        self,
        journal: Journal[Some] | None = None,
        progress: Callable[[Some], None] | None = None,
    ) -> list[Some]:
        """Rows of all modes, questions in order.

        Args:
            journal: Where rows go as they come; what has an answer there is left out, what failed
                is tried again.
            progress: Called with each row.
        """
        found: dict[tuple[str, int | None, str], Some] = {}
        if journal:
            found = {key: row for key, row in journal.done.items() if row.error is None}
        for guide in self._guides if self._warmup else ():
            if not all(self._done(guide, chunk, found) for chunk in self._chunks):
                self._warm(guide)
        for number, chunk in enumerate(self._chunks):
            turns = list(self._guides)
            for guide in turns if number % 2 == 0 else turns[::-1]:
                if self._done(guide, chunk, found):
                    continue
                for row in self._rows(guide, chunk):
                    key = (row.mode, row.seed, row.id)
                    if key in found and found[key].error is None:
                        continue
                    found[key] = row
                    if journal:
                        journal.add(row)
                    if progress:
                        progress(row)
        rows = [
            found[mode.name, seed, item.id]
            for mode in self.modes
            for seed in mode.seeds or (None,)
            for item in self.items
        ]
        if journal:
            journal.finish(rows)
        return rows

    @property
    def prompt(self) -> str:
        """The first question as the processor is given it."""
        from PIL import Image

        prompts, first = Prompts(self._model, self._processor), self._requests(self.items[:1])[0]
        blank = tuple(Image.new("RGB", (1, 1)) for _ in first.images)
        return prompts.prompt(Question(first.text, blank, prompts.build))

    @property
    def total(self) -> int:
        """Number of rows."""
        return len(self.items) * sum(max(len(mode.seeds), 1) for mode in self.modes)

    def _done(self, guide: str, chunk: Sequence[Some], found: Mapping[Any, Some]) -> bool:
        return all(
            (mode.name, seed, item.id) in found
            for mode in self._of(guide)
            for seed in mode.seeds or (None,)
            for item in chunk
        )

    def _of(self, guide: str) -> list[Mode]:
        return [mode for mode in self.modes if mode.guide == guide]

    def _warm(self, guide: str) -> None:
        """Untimed runs; a guide that does not fit the model raises here, before anything is run."""
        first = self.items[: int(self._options["batch_size"])]
        drawn = all(mode.seeds for mode in self._of(guide))
        for _ in range(self._warmup):
            answerer = self._answerer(guide, self.seed)
            watch = self._watches[guide]
            list(
                answerer.answers(
                    self._requests(first), watch=watch, do_sample=drawn, **self._options
                )
            )

    def _rows(self, guide: str, chunk: Sequence[Some]) -> Iterator[Some]:
        """Rows of a chunk under all modes of a guide."""
        greedy = [mode for mode in self._of(guide) if not mode.seeds]
        drawn = [mode for mode in self._of(guide) if mode.seeds]
        redrawn = bool(drawn) and self._redraw and not self._is_random(guide)
        again: dict[tuple[str, int], list[Some]] = {
            (mode.name, seed): [] if redrawn else list(chunk)
            for mode in drawn
            for seed in mode.seeds
        }
        if greedy or redrawn:
            known = {item.id: item for item in chunk}
            options: dict[str, Any] = {"first_logits": redrawn}
            if not greedy:
                options |= {"do_sample": True, "max_new_tokens": 1}
            for answer in self._answers(guide, chunk, self.seed, **options):
                item = known[answer.id]
                for mode in greedy:
                    yield self._row(item, mode.name, None, answer)
                for name, seed in again if redrawn else ():
                    token = (
                        None
                        if answer.first_logits is None
                        else draw(answer.first_logits, seed, answer.id)
                    )
                    if token is None or token in self._words:
                        yield self._redrawn(item, name, seed, answer, token)
                    else:
                        again[name, seed].append(item)
        for (name, seed), items in again.items():
            known = {item.id: item for item in items}
            for answer in self._answers(guide, items, seed, do_sample=True):
                yield self._row(known[answer.id], name, seed, answer)

    def _is_random(self, guide: str) -> bool:
        """Whether the guide's distribution of the first token differs between seeds."""
        if guide not in self._random:
            first = self.items[:_TRIED]
            self._random[guide] = guide != NONE and (
                len(first) < _FEWEST or self._differs(guide, first)
            )
        return self._random[guide]

    def _differs(self, guide: str, items: Sequence[Some]) -> bool:
        options: dict[str, Any] = {"first_logits": True, "do_sample": True, "max_new_tokens": 1}
        one, other = (
            {
                answer.id: answer.first_logits
                for answer in self._answers(guide, items, seed, **options)
            }
            for seed in (self.seed, self.seed + 1)
        )
        return any(law is not None and not _alike(law, other[name]) for name, law in one.items())

    def _answers(
        self, guide: str, items: Sequence[Some], seed: int, **options: Any
    ) -> Iterator[Answer]:
        """Answers of a guide."""
        answerer, watch = self._answerer(guide, seed), self._watches[guide]
        yield from answerer.answers(self._requests(items), watch=watch, **self._options | options)

    def _answerer(self, guide: str, seed: int) -> Answerer:
        decoder = Decoder(guide=self._guides[guide], seed=seed)
        return Answerer(self._model, self._processor, decoder)

    def _requests(self, items: Sequence[Some]) -> list[AnswerRequest]:
        return [
            AnswerRequest(
                item.id,
                index,
                item.question + self._suffix,
                (self.image(item.image),) if item.image else (),
                named=True,
            )
            for index, item in enumerate(items)
        ]

    def _row(self, item: Some, mode: str, seed: int | None, answer: Answer) -> Some:
        if answer.error is not None:
            return item.answered(mode=mode, seed=seed, error=answer.error)
        return item.answered(
            mode=mode,
            seed=seed,
            output=answer.text,
            prompt_hash=text_hash(answer.prompt),
            tokens=len(answer.token_ids),
            passes=self._passes(mode, len(answer.token_ids)),
            forwards=self._forwards(mode, len(answer.token_ids)),
            changed=answer.changed(),
            seconds=answer.seconds,
            **self._margins(mode, answer),
        )

    def _redrawn(self, item: Some, mode: str, seed: int, answer: Answer, token: int | None) -> Some:
        """The row of one word; it has no time of its own."""
        if token is None:
            return item.answered(mode=mode, seed=seed, error=answer.error)
        return item.answered(
            mode=mode,
            seed=seed,
            output=self._processor.tokenizer.decode([token]).strip(),
            prompt_hash=text_hash(answer.prompt),
            tokens=1,
            passes=self._passes(mode, 1),
            forwards=self._forwards(mode, 1),
            changed=answer.changed(1),
            **self._margins(mode, answer),
        )

    def _margins(self, mode: str, answer: Answer) -> dict[str, float | None]:
        if not self._yes_no:
            return {}
        known = answer.margins or {}
        main = known.get("main") if plain_main(self._guide(mode)) else None
        values = {"margin": known.get("guided"), "main_margin": main}
        return {
            name: value if value is not None and math.isfinite(value) else None
            for name, value in values.items()
        }

    def _passes(self, mode: str, tokens: int) -> int:
        """Rows sent through the model: one per branch and token, the first read with the prompt."""
        guide = self._guide(mode)
        if guide is None or guide.neutral:
            return tokens
        later = 1 + sum(branch.replaces_after_prefill is None for branch in guide.branches)
        return 1 + len(guide.branches) + (tokens - 1) * later

    def _forwards(self, mode: str, tokens: int) -> int:
        """Forward passes after the prompt: branches of one model and stage share one."""
        guide = self._guide(mode)
        main = (1, id(None))
        shared = {main}
        if guide is not None and not guide.neutral:
            shared = {(spec.stage, id(spec.build or spec.model)) for spec in guide.branches}
            if all(spec.replaces_after_prefill != "main" for spec in guide.branches):
                shared.add(main)
        return (tokens - 1) * len(shared)

    def _guide(self, mode: str) -> Guide | None:
        return self._guides[next(one.guide for one in self.modes if one.name == mode)]


def draw(law: Tensor, seed: int, name: str) -> int:
    """The first token that decoding with a seed draws from a distribution.

    Args:
        law: Logits, ``(V,)``.
        seed: Of the decoder.
        name: Id of the request.
    """
    noise = Noise.of(seed, [request_key(noise_of_id(name), 0)])
    first = torch.zeros((1, 1), dtype=torch.long)
    return int((law + noise.gumbel(first, Role.TARGET, len(law))[0, 0]).argmax())


def _alike(one: Tensor, other: Tensor | None) -> bool:
    """Whether two distributions are the same but for rounding; a missing one is none to tell by."""
    return other is None or torch.allclose(
        one.softmax(-1), other.softmax(-1), rtol=_SAME, atol=1e-6
    )
