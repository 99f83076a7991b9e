"""Correction methods for transcripts: a language model alone, or fused with the recogniser.

These are the methods that ``correct=`` and ``--correct`` name: ``llm``, and the fusions ``uadf``,
``static`` and ``shallow``, in which the recogniser scores each token too (`mmdecode.guide.uadf`,
`mmdecode.guide.fusion`, `mmdecode.asr.correction.fusion`). Each method wraps a
`mmdecode.asr.correction.corrector.Corrector`, and also tells for each word which model decided it.
`mmdecode.asr.correction.windows.WindowCorrector` applies a method to transcripts.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from mmdecode.asr.correction.corrector import Correction, Corrector
from mmdecode.asr.correction.fusion import Acoustic
from mmdecode.asr.correction.n_best_lists import NBestList
from mmdecode.asr.correction.spelling import Route
from mmdecode.asr.results import By, DecidedWord
from mmdecode.checkpoints import local_path
from mmdecode.errors import OptionError
from mmdecode.guide.bias import Bias
from mmdecode.guide.fusion import Fusion, Given, Shallow, Static
from mmdecode.guide.uadf import UADF
from mmdecode.weights import read_json

if TYPE_CHECKING:
    from mmdecode.engine.adapter import BranchSpec
    from mmdecode.engine.call import Call
    from mmdecode.engine.contracts import Guide

CARD = "card.json"


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """A corrected N-best list.

    Attributes:
        correction: Result of correcting the list.
        words: Words of its final text, each with the model that decided it.
    """

    correction: Correction
    words: list[DecidedWord]


class ListCorrection(ABC):
    """Corrects N-best lists, and tells for each word which model decided it; the base class.

    Args:
        corrector: Corrector with the language model.
    """

    def __init__(self, corrector: Corrector) -> None:
        self.corrector = corrector

    @property
    def count(self) -> int:
        """Most hypotheses in the language model's prompt."""
        return self.corrector.prompts.options.count

    @property
    def batch_size(self) -> int:
        """Number of lists that are corrected at once."""
        return self.corrector.batch_size

    @abstractmethod
    def __call__(
        self, lists: Sequence[NBestList], audio: Sequence[Given] | None = None
    ) -> list[Corrected]:
        """Corrects N-best lists, in order.

        Args:
            lists: N-best lists.
            audio: Encoded audio, one entry per list.
        """

    def follow(self, guide: Guide | None) -> None:
        """Favours the words that the recogniser's guide favours, after this method's own guide.

        Args:
            guide: Guide of the recogniser; only a `mmdecode.guide.bias.Bias` has an effect. A word
                that it decides counts as decided by the audio.
        """
        if isinstance(guide, Bias):
            decoder = self.corrector.decoder
            own = guide.after(decoder.guide, self.corrector.prompts.tokenizer)
            self.corrector.decoder = replace(decoder, guide=own)


class LanguageModelCorrection(ListCorrection):
    """Corrects by a language model alone, without the audio.

    A word that is aligned with an equal word of the first hypothesis counts as decided by ``both``
    models, any other word as decided by the language model.
    """

    summary = "a language model corrects, without the audio"
    source = "Chen et al. 2023 (HyPoradise)"

    @classmethod
    def from_options(
        cls,
        model: str,
        recogniser: Acoustic | None = None,
        count: int | None = None,
        batch_size: int = 8,
        max_new_tokens: int = 256,
        draft: str | None = "hypotheses",
        guard: bool = True,
        dtype: str | None = None,
        quantize: str | None = None,
    ) -> LanguageModelCorrection:
        """Makes the method from options in a string, such as ``llm:model=NAME``.

        Args:
            model: Language model of the corrector: a folder, a Hub id or ``zoo:NAME``.
            recogniser: Recogniser whose device is used; the transcriber passes it.
            count: Most hypotheses in the prompt; ``None``: as the corrector was trained.
            batch_size: Number of lists corrected at once.
            max_new_tokens: Most tokens of an answer.
            draft: See `mmdecode.asr.correction.corrector.Corrector`.
            guard: Whether answers that change too much are refused, see
                `mmdecode.asr.correction.guard.EditGuard`.
            dtype: Dtype of the language model; ``None``: float32.
            quantize: ``int8`` or ``fp8``, see `mmdecode.quantize`; ``None``: weights as loaded.
        """
        given = (batch_size, max_new_tokens, draft, guard, dtype, quantize)
        return cls(load_corrector(model, recogniser, count, *given))

    def __call__(
        self, lists: Sequence[NBestList], audio: Sequence[Given] | None = None
    ) -> list[Corrected]:
        """Corrects N-best lists, in order; ``audio`` is not used."""
        return [
            Corrected(correction=found, words=_words_of_text(found))
            for found in sorted(_all(self.corrector, lists), key=lambda found: found.index)
        ]


class FusedCorrection(ListCorrection):
    """Corrects by a language model that is fused with the recogniser's scores at every token.

    Args:
        corrector: Corrector with the language model; its guide is set here.
        recogniser: The recogniser.
        join: Function that makes the guide, which fuses the two models, from the branch with the
            recogniser's scores.
        candidates: Number of the language model's most likely tokens that the recogniser scores.
        route: Way of scoring them, see `mmdecode.asr.correction.fusion.Acoustic.branch`.
    """

    def __init__(
        self,
        corrector: Corrector,
        recogniser: Acoustic,
        join: Callable[[BranchSpec], Fusion],
        candidates: int = 8,
        route: Route = "auto",
    ) -> None:
        super().__init__(corrector)
        spec = recogniser.branch(
            corrector.prompts.tokenizer, corrector.model.config.vocab_size, candidates, route
        )
        self._built: list[Any] = []
        self._scored = 0
        self._fusion = join(replace(spec, build=partial(self._build, spec)))
        corrector.decoder = replace(corrector.decoder, guide=self._fusion)

    def _build(self, spec: BranchSpec, call: Call) -> Any:
        assert spec.build is not None, "the branch is scored by rules of its own"
        self._scored = self.positions
        self._built = [spec.build(call)]
        return self._built[0]

    @property
    def positions(self) -> int:
        """Number of positions that the recogniser's decoder has scored for candidates' texts."""
        return self._scored + sum(getattr(one, "positions", 0) for one in self._built)

    def __call__(
        self, lists: Sequence[NBestList], audio: Sequence[Given] | None = None
    ) -> list[Corrected]:
        """Corrects N-best lists, in order.

        Args:
            lists: N-best lists.
            audio: Encoded audio, one entry per list; required.
        """
        if audio is None:
            raise OptionError(f"{type(self).__name__} needs the audio; pass one entry per list")
        found: list[Corrected] = []
        scorer, row = None, 0
        for one in _all(self.corrector, lists, audio):
            words = [DecidedWord(text=word, by="audio") for word in one.text.split()]
            if one.tokens and not self._fusion.neutral:
                # corrections come batch by batch, in the order of the batch's rows
                scorer, row = self._built[0], row + 1 if scorer is self._built[0] else 0
                if one.refused is None:
                    words = self._words_of_tokens(scorer, row, one.tokens)
            elif one.tokens and one.refused is None:
                words = _words_of_text(one)
            found.append(Corrected(correction=one, words=words))
        self._scored, self._built = self.positions, []  # the scorer holds caches
        return sorted(found, key=lambda one: one.correction.index)

    def _words_of_tokens(self, scorer: Any, row: int, count: int) -> list[DecidedWord]:
        """Returns the words of an answer, each with the model that decided its tokens."""
        tokens = scorer.choices.tokens(row)[:count]
        kept = scorer.choices.kept[row][:count]
        marks: list[set[By]] = []
        texts = [""]
        for end, (token, (main, acoustic)) in enumerate(zip(tokens, kept, strict=True), 1):
            text = self.corrector.prompts.tokenizer.decode(
                tokens[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            texts.append(text)
            before, now = texts[-2].split(), text.split()
            joins = bool(before) and not texts[-2][-1].isspace() and not _begins_word(texts)
            mark: By = "both" if token in acoustic else "language model"
            if token != main:
                mark = "audio"
            for index in range(len(before) - joins, len(now)):
                while index >= len(marks):
                    marks.append(set())
                marks[index].add(mark)
        return [
            DecidedWord(text=word, by=next(by for by in _RANKED if by in mark))
            for word, mark in zip(texts[-1].split(), marks, strict=True)
        ]


_RANKED: tuple[By, ...] = ("audio", "language model", "both")


def _begins_word(texts: Sequence[str]) -> bool:
    """Whether the text that the last entry adds to the entry before begins with white space."""
    added = texts[-1][len(texts[-2]) :]
    return added[:1].isspace() or not added


def _all(
    corrector: Corrector, lists: Sequence[NBestList], audio: Sequence[Given] | None = None
) -> Iterator[Correction]:
    """Yields corrections; raises the first failure, since a recording is corrected as a whole."""
    for found, failed in corrector.outcomes(lists, audio):
        if failed is not None:
            raise failed.problem
        yield found


def _words_of_text(one: Correction) -> list[DecidedWord]:
    """Returns a text's words, as decided by both models if they are in the first hypothesis."""
    words, best = one.text.split(), one.best.split()
    by: list[By] = ["language model"] * len(words)
    for block in SequenceMatcher(None, best, words, autojunk=False).get_matching_blocks():
        by[block.b : block.b + block.size] = ["both"] * block.size
    if one.refused is not None or not one.tokens:
        by = ["audio"] * len(words)
    return [DecidedWord(text=word, by=who) for word, who in zip(words, by, strict=True)]


class UADFCorrection(FusedCorrection):
    """Corrects by uncertainty-aware dynamic fusion, see `mmdecode.guide.uadf`."""

    summary = "a language model corrects, fused with the recogniser where it is uncertain"
    source = "Chen et al. 2024; the fusion of different vocabularies by text is ours"

    @classmethod
    def from_options(
        cls,
        model: str,
        recogniser: Acoustic,
        beta: float = 0.5,
        scale: float = 1.0,
        main_temperature: float | None = None,
        acoustic_temperature: float | None = None,
        candidates: int = 8,
        route: Route = "auto",
        count: int | None = None,
        batch_size: int = 8,
        max_new_tokens: int = 256,
        draft: str | None = None,
        guard: bool = True,
        dtype: str | None = None,
        quantize: str | None = None,
    ) -> UADFCorrection:
        """Makes the method from options in a string, such as ``uadf:model=NAME``.

        Args:
            model: See `LanguageModelCorrection.from_options`.
            recogniser: The recogniser; the transcriber passes it.
            beta: See `mmdecode.guide.uadf.UADF`.
            scale: See `mmdecode.guide.uadf.UADF`.
            main_temperature: Temperature of the language model; ``None``: that of its model card,
                else 1.
            acoustic_temperature: Temperature of the recogniser's scores; ``None``: the same rule.
            candidates: See `FusedCorrection`.
            route: See `FusedCorrection`.
            count: See `LanguageModelCorrection.from_options`.
            batch_size: See `LanguageModelCorrection.from_options`.
            max_new_tokens: See `LanguageModelCorrection.from_options`.
            draft: Drafter for the language model; it changes no token. The recogniser also has to
                score every drafted token, so a drafter saves time only if a pass of the language
                model costs much more than a pass of the recogniser.
            guard: See `LanguageModelCorrection.from_options`. Without it a fusion corrects more,
                and harms more where the language model does not know what is said.
            dtype: See `LanguageModelCorrection.from_options`.
            quantize: See `LanguageModelCorrection.from_options`.
        """
        given = (batch_size, max_new_tokens, draft, guard, dtype, quantize)
        corrector = load_corrector(model, recogniser, count, *given)
        heat = temperatures_of(model, main_temperature, acoustic_temperature, recogniser)

        def join(branch: BranchSpec) -> UADF:
            return UADF(branch, beta, scale, *heat)

        return cls(corrector, recogniser, join, candidates, route)


class _Weighted(FusedCorrection):
    """Corrects by a fusion that has one fixed weight."""

    fusion: ClassVar[type[Static] | type[Shallow]]

    @classmethod
    def from_options(
        cls,
        model: str,
        recogniser: Acoustic,
        weight: float = 0.5,
        main_temperature: float | None = None,
        acoustic_temperature: float | None = None,
        candidates: int = 8,
        route: Route = "auto",
        count: int | None = None,
        batch_size: int = 8,
        max_new_tokens: int = 256,
        draft: str | None = None,
        guard: bool = True,
        dtype: str | None = None,
        quantize: str | None = None,
    ) -> Self:
        """Makes the method from options in a string, such as ``static:model=NAME``.

        Args:
            model: See `LanguageModelCorrection.from_options`.
            recogniser: See `UADFCorrection.from_options`.
            weight: See `mmdecode.guide.fusion.Static` and `mmdecode.guide.fusion.Shallow`.
            main_temperature: See `UADFCorrection.from_options`.
            acoustic_temperature: See `UADFCorrection.from_options`.
            candidates: See `FusedCorrection`.
            route: See `FusedCorrection`.
            count: See `LanguageModelCorrection.from_options`.
            batch_size: See `LanguageModelCorrection.from_options`.
            max_new_tokens: See `LanguageModelCorrection.from_options`.
            draft: Drafter for the language model; it changes no token. The recogniser also has to
                score every drafted token, so a drafter saves time only if a pass of the language
                model costs much more than a pass of the recogniser.
            guard: See `LanguageModelCorrection.from_options`. Without it a fusion corrects more,
                and harms more where the language model does not know what is said.
            dtype: See `LanguageModelCorrection.from_options`.
            quantize: See `LanguageModelCorrection.from_options`.
        """
        given = (batch_size, max_new_tokens, draft, guard, dtype, quantize)
        corrector = load_corrector(model, recogniser, count, *given)
        heat = temperatures_of(model, main_temperature, acoustic_temperature, recogniser)

        def join(branch: BranchSpec) -> Fusion:
            return cls.fusion(branch, weight, *heat)

        return cls(corrector, recogniser, join, candidates, route)


class StaticCorrection(_Weighted):
    """Corrects by late fusion with a fixed weight, see `mmdecode.guide.fusion.Static`."""

    summary = "a language model corrects, fused with the recogniser by a fixed weight"
    source = "late fusion, the baseline of Chen et al. 2024"
    fusion = Static


class ShallowCorrection(_Weighted):
    """Corrects by shallow fusion, see `mmdecode.guide.fusion.Shallow`."""

    summary = "a language model corrects, log-probabilities of the recogniser are added"
    source = "shallow fusion, Gulcehre et al. 2015, with the roles exchanged"
    fusion = Shallow


def load_corrector(
    model: str,
    recogniser: Acoustic | None,
    count: int | None,
    batch_size: int,
    max_new_tokens: int,
    draft: str | None,
    guard: bool,
    dtype: str | None,
    quantize: str | None,
) -> Corrector:
    """Loads a corrector onto the recogniser's device."""
    device = None if recogniser is None else recogniser.model.device
    given: dict[str, Any] = {} if count is None else {"count": count}
    if not guard:
        given["guard"] = None
    return Corrector.from_pretrained(
        model,
        device,
        dtype,
        quantize,
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        draft=draft,
        **given,
    )


def temperatures_of(
    model: str,
    main: float | None = None,
    acoustic: float | None = None,
    recogniser: Acoustic | None = None,
) -> tuple[float, float]:
    """Returns the temperatures of a fusion's language model and recogniser.

    Each is the given value, else that of the language model's card, else 1. The recogniser's is
    read from the card only if it was fitted for this recogniser; else there is a warning. Without a
    recogniser the card's is returned.
    """
    fitted = read_json(model, CARD).get("temperatures", {})
    if main is None:
        main = fitted.get("main", 1.0)
    if acoustic is None and "acoustic" in fitted:
        acoustic, of = fitted["acoustic"], fitted.get("recogniser")
        at_hand = None if recogniser is None else recogniser.model.config.name_or_path
        if of is not None and at_hand not in (None, local_path(of)):
            acoustic = None
            warnings.warn(
                f"{model} has temperatures for {of}, not for the recogniser at hand: the "
                "recogniser's scores are taken as they are; give acoustic_temperature=..., "
                "which asr/fuse_with_llm.py fits",
                stacklevel=2,
            )
    return main, 1.0 if acoustic is None else acoustic
