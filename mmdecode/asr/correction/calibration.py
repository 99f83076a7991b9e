"""Fits temperatures that calibrate the two models of a fusion.

A fusion combines the next-token distributions of a language model and a recogniser
(`mmdecode.guide.fusion`). To calibrate a model, its logits are divided by a temperature. It is
chosen such that the mean probability of the top token equals the share of top tokens that are
correct, on text that the model was not trained on. The two models are scored with teacher forcing
on reference texts.

Source: the calibration of Chen et al. 2024, arXiv:2402.05457 (UADF). Differs from its release,
which fits one position at a time and may not terminate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mmdecode import registry
from mmdecode.asr.audio.reading import blocks
from mmdecode.asr.correction.fusion import Acoustic
from mmdecode.asr.correction.n_best_lists import lists_of
from mmdecode.asr.output.manifest import opened
from mmdecode.engine.adapter import MAIN
from mmdecode.engine.branches import ModelRunner
from mmdecode.engine.call import Call, Plan
from mmdecode.engine.contracts import BranchOutput
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import InputError
from mmdecode.guide.fusion import ACOUSTIC, Given
from mmdecode.registry import adapter_for

if TYPE_CHECKING:
    from mmdecode.asr.correction.corrector import Corrector
    from mmdecode.asr.correction.n_best_lists import NBestList
    from mmdecode.asr.output.manifest import Entry
    from mmdecode.asr.transcriber import Transcriber

COLDEST, HOTTEST = 0.1, 10.0
_HALVINGS = 30
_ROWS = 64
"""Rows whose probabilities are computed at a time, since a row may have 150,000 values."""


@dataclass(frozen=True, kw_only=True)
class Temperatures:
    """Temperatures of the models of a fusion.

    Attributes:
        main: Temperature of the language model.
        acoustic: Temperature of the recogniser's scores.
        tokens: Number of token positions that they were fitted on.
    """

    main: float
    acoustic: float
    tokens: int


def confidence(scores: Tensor, temperature: float) -> float:
    """Returns the mean probability of the top choice at a temperature, for logits ``(n, K)``."""
    parts = [
        (part.double() - part.amax(-1, keepdim=True).double()).div(temperature).logsumexp(-1)
        for part in scores.split(_ROWS)
    ]
    return float(torch.cat(parts).neg().exp().mean())


def temperature_for(scores: Tensor, accuracy: float) -> float:
    """Finds the temperature at which `confidence` equals ``accuracy``, by bisection.

    Args:
        scores: Logits ``(n, K)``; each row must have a value other than ``-inf``.
        accuracy: Share of correct top choices, 0 to 1.

    Returns:
        The temperature, limited to the range from `COLDEST` to `HOTTEST`.
    """
    low, high = COLDEST, HOTTEST
    if confidence(scores, low) <= accuracy:
        return low
    if confidence(scores, high) >= accuracy:
        return high
    for _ in range(_HALVINGS):  # confidence falls with the temperature
        middle = (low * high) ** 0.5
        low, high = (middle, high) if confidence(scores, middle) > accuracy else (low, middle)
    return (low * high) ** 0.5


def fit_temperature(scores: Tensor, labels: Tensor) -> float:
    """Returns the temperature that calibrates logits, given the correct choices.

    Args:
        scores: Logits ``(n, K)``, see `temperature_for`.
        labels: Index of the correct choice, ``(n,)``; -1 if it is not among the K.
    """
    return temperature_for(scores, float((scores.argmax(-1) == labels).double().mean()))


@torch.no_grad()
def calibrate(
    corrector: Corrector, lists: Sequence[NBestList], audio: Sequence[Any]
) -> Temperatures:
    """Fits the temperatures of the language model and the recogniser in a corrector's fusion.

    Args:
        corrector: Corrector with a guide of `mmdecode.guide.fusion`, whose temperatures are
            ignored.
        lists: N-best lists with references that neither model was trained on; lists without a
            reference are skipped.
        audio: One recording per list, as for a call of the corrector.

    Raises:
        InputError: No list has a reference.
    """
    main: list[Tensor] = []
    right: list[Tensor] = []
    acoustic: list[Tensor] = []
    indices: list[Tensor] = []
    for one, recording in zip(lists, audio, strict=True):
        if not one.reference:
            continue
        distribution, sparse, labels = _forced(corrector, one, recording)
        main.append(distribution)
        right.append(labels)
        scores, own = sparse.logits[0], labels
        if sparse.candidates is not None:
            found = sparse.candidates[0] == labels[:, None]
            own = torch.where(found.any(-1), found.int().argmax(-1), -1)
            scores = scores.masked_fill(sparse.candidates[0] < 0, -torch.inf)
        asked = (scores > -torch.inf).any(-1) & ~_without_text(corrector, labels)
        acoustic.append(scores[asked])
        indices.append(own[asked])
    if not main:
        raise InputError("no N-best list has a reference; calibration needs reference texts")
    return Temperatures(
        main=fit_temperature(torch.cat(main), torch.cat(right)),
        acoustic=fit_temperature(torch.cat(acoustic), torch.cat(indices)),
        tokens=sum(map(len, right)),
    )


def calibrate_on(transcriber: Transcriber, entries: Sequence[Entry], spec: str) -> Temperatures:
    """Fits the temperatures of a fusion on recordings with texts.

    Args:
        transcriber: The recogniser, with the options ``n_best`` and ``timestamps=False``.
        entries: Recordings with texts that neither model was trained on, no longer than a window.
        spec: Specification of the fusion, such as ``uadf:model=MODEL``.

    Raises:
        InputError: A recording cannot be read, or is longer than a window; or no recording has a
            text.
    """
    sources = [opened(one) for one in entries]
    waves = [np.concatenate([*blocks(one, transcriber.sampling_rate)]) for one in sources]
    for one, wave in zip(entries, waves, strict=True):
        if len(wave) > transcriber.window_s * transcriber.sampling_rate:
            raise InputError(
                f"{one.id} is longer than a window; cut it to {transcriber.window_s:g} s"
            )
    kind = transcriber.recognizer
    prompt = tuple(kind.prompt(kind.language_of(sources[0]), ()))
    found = transcriber(waves, on_error="raise")
    lists, audio = [], []
    for entry, transcript, own in zip(entries, found, kind.features(waves), strict=True):
        for window in lists_of(transcript)[:1]:  # a silent recording has none
            lists.append(dataclasses.replace(window, id=entry.id, reference=entry.text))
            audio.append(Given(features=own, prompt=prompt))
    recogniser = Acoustic(model=transcriber.model, tokenizer=transcriber.processor.tokenizer)
    method = registry.create("correct", spec, recogniser=recogniser)
    return calibrate(method.corrector, lists, audio)


def _without_text(corrector: Corrector, labels: Tensor) -> Tensor:
    """Returns where a token is a special one other than the end, such as BART's first."""
    special = set(corrector.prompts.tokenizer.all_special_ids) - {corrector.prompts.eos}
    return torch.isin(labels, torch.tensor(sorted(special), device=labels.device))


def _forced(
    corrector: Corrector, one: NBestList, recording: Any
) -> tuple[Tensor, BranchOutput, Tensor]:
    """Scores a reference by teacher forcing.

    Returns:
        Logits of the language model ``(n, V)``, scores of the recogniser, and token ids ``(n,)``.
    """
    assert one.reference is not None and corrector.decoder.guide is not None
    device = corrector.model.device
    answer = corrector.prompts.answer(one.reference)
    prompt, given = corrector.decoder_inputs(corrector.prompts.prompt(one.hypotheses))
    tokens = torch.tensor([answer], device=device)
    adapter = adapter_for(corrector.model)
    call = Call.of(
        prompt,
        generated=tokens,
        length=0,
        max_new_tokens=len(answer) + 1,
        eos_token_ids=tokens[0, -1:],
        inputs={"audio": [recording]},
        model_kwargs=given,
        plan=Plan(adapter=adapter),
    )
    [spec] = corrector.decoder.guide.branches
    assert spec.build is not None, "fusions build their branch"
    scorers = [ModelRunner(adapter, [MAIN]), spec.build(call)]
    first: dict[str, BranchOutput] = {}
    for scorer in scorers:
        first |= scorer.prefill(call, first)
    # the rest as a drafted chain after the first token
    call.rows.length, call.rows.cur_len = call.rows.length + 1, 1
    chain = Proposal(tokens=tokens[:, 1:-1], kind="deterministic")
    rest: dict[str, BranchOutput] = {}
    for scorer in scorers:
        rest |= scorer.score(call, chain, rest)
    parts = [first, rest] if len(answer) > 1 else [first]

    def joined(name: str, field: str) -> Any:
        values = [getattr(part[name], field) for part in parts]
        return None if values[0] is None else torch.cat(values, 1)

    sparse = BranchOutput(
        logits=joined(ACOUSTIC, "logits"), candidates=joined(ACOUSTIC, "candidates")
    )
    return joined("main", "logits")[0], sparse, tokens[0]
