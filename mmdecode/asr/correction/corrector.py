"""Generative correction: a language model reads an N-best list and writes the transcript.

START HERE: `Corrector`. Any causal or seq2seq model of transformers is prompted with a `Template`.
Its answer is drafted from the hypotheses themselves, which makes decoding faster and changes no
token (`mmdecode.draft.source`). The answer replaces the first hypothesis only if an `EditGuard`
accepts it as a transcript of the same recording.

Sources: Chen et al. 2023, arXiv:2309.15701 (HyPoradise: the N-best and the 1-best prompt); La
Quatra et al. 2024 (FlanEC: the numbered list); Sun et al. 2021, arXiv:2106.04970 (drafts from the
input). The prompts have the form of these papers, but other wording: give a published checkpoint
the exact prompt that it was trained with. Differs from these papers in the guard: they use every
answer.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mmdecode import registry
from mmdecode.api import generate
from mmdecode.asr.correction.guard import GUARD, EditGuard, words_of
from mmdecode.asr.correction.language_models import load
from mmdecode.asr.correction.n_best_lists import NBestList
from mmdecode.asr.correction.prompts import (
    NO_LABEL,
    ListPrompts,
    PromptOptions,
)
from mmdecode.decoder import Decoder
from mmdecode.draft.source import Source
from mmdecode.engine.request import token_ids
from mmdecode.errors import (
    IncompatibleError,
    OptionError,
    refuse_unknown,
)
from mmdecode.runs.items import Failed, Watch, each, tried

if TYPE_CHECKING:
    from mmdecode.engine.contracts import Drafter, Guide
    from mmdecode.engine.stats import Stats


HINT = "use a smaller batch_size, or show the model fewer hypotheses"
"""Hint of the error that is raised if a single list does not fit into memory."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Result of correcting one N-best list.

    Attributes:
        id: Id of the list.
        index: Its index in the input.
        text: Final text: the model's answer, or the first hypothesis if the answer was refused.
        best: The first hypothesis.
        raw: The answer as the model wrote it; empty if the model was not run.
        refused: Reason why the answer is not used; ``None``: it is used.
        tokens: Number of tokens of the answer, the end token included.
        preference: Log-probability of the answer, minus the log-probability that the model gives
            the first hypothesis as an answer, in nats; ``None``: not computed.
        error: Message of the error that made the list fail, in which case the final text is the
            first hypothesis; ``None``: it did not fail.
        kind: Class name of the error.
    """

    id: str
    index: int
    text: str
    best: str
    raw: str = ""
    refused: str | None = None
    tokens: int = 0
    preference: float | None = None
    error: str | None = None
    kind: str | None = None

    @property
    def edited(self) -> bool:
        """Whether the words of the final text differ from those of the first hypothesis."""
        return words_of(self.text) != words_of(self.best)

    def as_dict(self) -> dict[str, Any]:
        """Returns the correction as a row of a results file."""
        return {name: value for name, value in asdict(self).items() if name != "index"}


class Corrector:
    """Corrects N-best lists in batches; the result of a list does not depend on the batch.

    Args:
        model: A causal or seq2seq language model of transformers.
        tokenizer: Its tokenizer.
        template: A name of `TEMPLATES`, or a prompt text of your own, see `Template`.
        count: Most hypotheses in the prompt.
        chat: Whether the prompt is a user turn in the tokenizer's chat template.
        guard: Decides which answers are used; ``None``: every answer is used.
        copy_below: Threshold of `Correction.preference`, in nats: answers below it are refused.
            Costs a forward pass over the lists whose answer differs from the first hypothesis.
            ``mmdecode evaluate nbest`` fits it on a development set. ``None``: no threshold; minus
            infinity: preferences are computed, and no answer is refused by them.
        draft: ``"hypotheses"``: answers are drafted from the hypotheses of their list. Or another
            drafter, its name with options, or ``None``; none of these changes the answers.
        guide: A guide, or its name with options.
        beams: Beams of transformers' beam search, which uses no draft; 1: no beam search.
        temperature: Sampling temperature, 0 for greedy decoding. Noise is derived from a list's id.
        batch_size: Number of lists decoded at once.
        max_new_tokens: Most tokens of an answer; fewer if the model has no more positions.
        seed: Seed of the noise that sampling uses.

    Attributes:
        decoder: Decoder, with its ``stats`` and ``trace``; beam search is not counted there.

    Raises:
        IncompatibleError: Beams are combined with a guide, a draft or a temperature.
        OptionError: A value is out of range.
        InputError: The tokenizer cannot end an answer.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        template: str = "n_best",
        count: int = 5,
        chat: bool = False,
        guard: EditGuard | None = GUARD,
        copy_below: float | None = None,
        draft: Drafter | str | None = "hypotheses",
        guide: Guide | str | None = None,
        beams: int = 1,
        temperature: float = 0.0,
        batch_size: int = 8,
        max_new_tokens: int = 256,
        seed: int = 0,
    ) -> None:
        for name, value in (
            ("beams", beams),
            ("batch_size", batch_size),
            ("max_new_tokens", max_new_tokens),
        ):
            if value < 1:
                raise OptionError(f"{name}={value}; expected at least 1")
        if not 0 <= temperature < math.inf:
            raise OptionError(f"temperature={temperature}; expected 0 or more")
        if beams > 1 and (guide is not None or temperature or draft not in ("hypotheses", None)):
            raise IncompatibleError.between(
                f"beams={beams}",
                "a draft, a guide or a temperature",
                "beam search is done by transformers, which supports none of them",
                "use beams=1, or leave them out",
            )
        self.model, self.guard, self.beams = model.eval(), guard, beams
        self.copy_below = copy_below
        self.temperature, self.batch_size = temperature, batch_size
        self.seq2seq = bool(model.config.is_encoder_decoder)
        options = PromptOptions(template=template, count=count, chat=chat)
        self.prompts = ListPrompts(tokenizer, self.seq2seq, options)
        if draft == "hypotheses":
            draft = Source(length=32, ngram=4)
        elif isinstance(draft, str):
            draft = registry.create("draft", draft, target=model)
        if isinstance(guide, str):
            guide = registry.create("guide", guide, **registry.context_of(model, tokenizer))
        self.decoder = Decoder(draft, guide, seed=seed)
        self._ends = sorted({*token_ids(model.generation_config.eos_token_id), self.prompts.eos})
        self._positions = getattr(model.config, "max_position_embeddings", None)
        self.max_new_tokens = max_new_tokens
        if self.seq2seq and self._positions is not None:
            self.max_new_tokens = min(max_new_tokens, self._positions - 1)

    @classmethod
    def from_pretrained(
        cls,
        model_id: str | os.PathLike[str],
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        quantize: str | None = None,
        **options: Any,
    ) -> Corrector:
        """Loads a model, or a peft adapter together with its base model.

        Args:
            model_id: A folder, a Hub id or ``zoo:NAME``. If it is a corrector trained with this
                package, its folder sets the defaults of ``template``, ``count`` and ``chat``.
            device: Device of the model; ``None``: CUDA if available.
            dtype: ``None``: float32; ``auto``: see `mmdecode.checkpoints.dtype_of`.
            quantize: ``int8`` or ``fp8``, see `mmdecode.quantize`; ``None``: weights as loaded.
            **options: Further arguments of `Corrector`.

        Raises:
            InputError: The checkpoint cannot be loaded.
            MissingExtraError: The checkpoint is a peft adapter, and peft is not installed.
            OptionError: A value is out of range, or an option does not exist.
        """
        refuse_unknown(options, [*inspect.signature(cls).parameters][2:])
        model, tokenizer = load(str(model_id), device, dtype, quantize)
        return cls(model, tokenizer, **PromptOptions.kept(str(model_id)) | options)

    @property
    def stats(self) -> Stats:
        """The decoder's counters, over all calls."""
        return self.decoder.stats

    def __call__(
        self, lists: Sequence[NBestList], audio: Sequence[Any] | None = None
    ) -> list[Correction]:
        """Corrects N-best lists.

        Args:
            lists: N-best lists.
            audio: One recording per list, for guides that use the audio; passed to the decoder as
                ``mm_inputs["audio"]``.

        Returns:
            One correction per list, in order; a list that failed has an ``error``.

        Raises:
            OptionError: ``audio`` does not have one recording per list.
            MMDecodeError: A configuration error, which would make every list fail.
        """
        return sorted(self.corrections(lists, audio), key=lambda found: found.index)

    def corrections(
        self,
        lists: Sequence[NBestList],
        audio: Sequence[Any] | None = None,
        *,
        watch: Watch | None = None,
    ) -> Iterator[Correction]:
        """Like a call, but yields each correction when its batch is decoded, short prompts first.

        Args:
            lists: See a call.
            audio: See a call.
            watch: Progress of a job that makes several calls; see `mmdecode.runs.items`.
        """
        watch = Watch() if watch is None else watch
        yield from watch.released(self.outcomes(lists, audio, watch))

    def outcomes(
        self,
        lists: Sequence[NBestList],
        audio: Sequence[Any] | None = None,
        watch: Watch | None = None,
    ) -> Iterator[tuple[Correction, Failed | None]]:
        """Yields each correction when its batch is decoded, with the failure of its list, if any.

        Args:
            lists: See a call.
            audio: See a call.
            watch: See `corrections`.
        """
        if audio is not None and len(audio) != len(lists):
            raise OptionError(
                f"{len(audio)} recordings for {len(lists)} lists; expected one recording per list"
            )
        asked: list[tuple[int, list[int]]] = []
        for index, one in enumerate(lists):
            if not any(words_of(text) for text in one.hypotheses):
                yield Correction(id=one.id, index=index, text=one.best, best=one.best), None
                continue
            ids = tried(partial(self.prompts.prompt, one.hypotheses), HINT)
            if isinstance(ids, Failed):
                yield _failure(one, index, ids), ids
                continue
            room = 0 if self.seq2seq else self.max_new_tokens
            if self._positions is not None and len(ids) + room > self._positions:
                refused = Correction(
                    id=one.id,
                    index=index,
                    text=one.best,
                    best=one.best,
                    refused=f"the prompt has {len(ids)} tokens, which with an answer of up to "
                    f"{self.max_new_tokens} is more than the model's {self._positions} positions",
                )
                yield refused, None
                continue
            asked.append((index, ids))
        asked.sort(key=lambda row: len(row[1]))
        for start in range(0, len(asked), self.batch_size):
            for (index, _), found in each(
                asked[start : start + self.batch_size],
                lambda batch: self._batch(batch, lists, audio),
                hint=HINT,
                name=lambda row: lists[row[0]].id,
                watch=watch,
                attempt=self.stats.attempt,
            ):
                if isinstance(found, Failed):
                    yield _failure(lists[index], index, found), found
                else:
                    yield found, None

    def _batch(
        self,
        batch: Sequence[tuple[int, list[int]]],
        lists: Sequence[NBestList],
        audio: Sequence[Any] | None,
    ) -> list[Correction]:
        """Corrects a batch, given as the index and the prompt ids of each list."""
        chosen = [lists[index] for index, _ in batch]
        recordings = None if audio is None else [audio[index] for index, _ in batch]
        answers = self._answers(chosen, [ids for _, ids in batch], recordings)
        preferences: Sequence[float | None] = [None] * len(batch)
        if self.copy_below is not None:
            preferences = self._preferences(chosen, answers)
        return [
            self._judged(index, one, answer, gain)
            for (index, _), one, answer, gain in zip(
                batch, chosen, answers, preferences, strict=True
            )
        ]

    @torch.no_grad()
    def _answers(
        self, lists: Sequence[NBestList], prompts: Sequence[list[int]], audio: list[Any] | None
    ) -> list[list[int]]:
        """Returns the ids that the model generates for each prompt, end token included."""
        ids, mask = (part.to(self.model.device) for part in self.prompts.padded(prompts))
        given: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": mask,
            "max_new_tokens": self.max_new_tokens,
            "eos_token_id": self._ends,
            "pad_token_id": self.prompts.pad,
            "do_sample": self.temperature > 0,
            "temperature": self.temperature or None,
            "top_p": 1.0 if self.temperature else None,
            "top_k": 0 if self.temperature else None,
        }
        if self.beams > 1:
            rows = self.model.generate(**given, num_beams=self.beams)
        else:
            texts = [
                [self.prompts.answer(text) for text in self.prompts.shown(one.hypotheses)]
                for one in lists
            ]
            rows = generate(
                self.model,
                decoder=self.decoder,
                request=[one.id for one in lists],
                mm_inputs={"source_ids": texts} | ({} if audio is None else {"audio": audio}),
                num_beams=1,
                **given,
            )
        answers = rows[:, 1 if self.seq2seq else ids.shape[1] :].tolist()
        return [self._ended(answer) for answer in answers]

    @torch.no_grad()
    def decoder_inputs(self, prompt: Sequence[int]) -> tuple[Tensor, dict[str, Any]]:
        """Returns the ids that an answer continues, ``(1, P)``, and the model's other inputs.

        The encoder of a seq2seq model reads the prompt, and its answer continues the start token.

        Args:
            prompt: Ids of the prompt.
        """
        ids, mask = (part.to(self.model.device) for part in self.prompts.padded([prompt]))
        if not self.seq2seq:
            return ids, {"attention_mask": mask}
        states = self.model.get_encoder()(input_ids=ids, attention_mask=mask, return_dict=True)
        config = self.model.generation_config
        start = token_ids(config.decoder_start_token_id) or token_ids(config.bos_token_id)
        return ids.new_tensor([start[:1]]), {"encoder_outputs": states, "attention_mask": mask}

    @torch.no_grad()
    def _preferences(self, lists: Sequence[NBestList], answers: Sequence[list[int]]) -> list[float]:
        """Returns `Correction.preference` of each answer, in nats."""
        found = [0.0] * len(lists)
        pairs, indices = [], []
        for index, (one, answer) in enumerate(zip(lists, answers, strict=True)):
            if self.prompts.text(answer) != one.best:
                prompt = self.prompts.prompt(one.hypotheses)
                pairs += [(prompt, answer), (prompt, self.prompts.answer(one.best))]
                indices.append(index)
        if not pairs:
            return found
        inputs = {n: t.to(self.model.device) for n, t in self.prompts.collated(pairs).items()}
        labels, logits = inputs["labels"], self.model(**inputs).logits
        if not self.seq2seq:
            labels, logits = labels[:, 1:], logits[:, :-1]
        losses = cross_entropy(
            logits.float().transpose(1, 2), labels, ignore_index=NO_LABEL, reduction="none"
        )
        totals = losses.double().sum(1)
        for index, gain in zip(indices, (totals[1::2] - totals[::2]).tolist(), strict=True):
            found[index] = gain
        return found

    def _ended(self, answer: list[int]) -> list[int]:
        ends = (count for count, token in enumerate(answer, 1) if token in self._ends)
        return answer[: next(ends, None)]

    def _judged(
        self, index: int, one: NBestList, answer: list[int], preference: float | None
    ) -> Correction:
        raw, refused = self.prompts.text(answer), None
        if self.guard is not None:
            if answer and answer[-1] not in self._ends:
                refused = f"it did not end within {self.max_new_tokens} tokens"
            else:
                refused = self.guard(raw, one.hypotheses, self.prompts.template)
        if refused is None and preference is not None and raw != one.best:
            assert self.copy_below is not None, "preferences are asked for by a threshold"
            if preference < self.copy_below:
                refused = (
                    f"the model prefers it to the first hypothesis by {preference:.2f} nats, less "
                    f"than {self.copy_below:g}"
                )
        return Correction(
            id=one.id,
            index=index,
            text=one.best if refused else raw,
            best=one.best,
            raw=raw,
            refused=refused,
            tokens=len(answer),
            preference=preference,
        )


def _failure(one: NBestList, index: int, failed: Failed) -> Correction:
    return Correction(
        id=one.id, index=index, text=one.best, best=one.best, error=failed.error, kind=failed.kind
    )
