"""Plain decoding of one model and its distribution along given tokens: reference of the audit.

`distance` compares a model with int8 weights with the float model that it was made of;
`mmdecode.evaluation.audit.audit` compares other sequences with this reference.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria

from mmdecode.decoder import Decoder
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import AcceptanceRule, Outcome
from mmdecode.engine.proposal import Kind, Proposal
from mmdecode.engine.request import token_ids
from mmdecode.engine.target_logits import TargetLogits
from mmdecode.errors import InputError, OptionError

UNCUT: Mapping[str, Any] = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": None,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
"""Sampling options that allow every token, whatever the checkpoint's generation config sets."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One input of an audit.

    Attributes:
        name: Unique name; the sampling noise depends on it and on the seed.
        inputs: Inputs of ``generate`` for one row.
    """

    name: str
    inputs: Mapping[str, Any]


@dataclass(frozen=True)
class Replay:
    """The plain distribution along one sequence.

    Attributes:
        tokens: The sequence.
        logits: Logits before logits processors, ``(T, V)`` float32: one row more than tokens if the
            plain loop would go on after them, fewer rows if it would have stopped earlier.
        scores: Logits after the processors, ``(T, V)``.
        process: Logits processors of a sampling call, as a function from the tokens so far and the
            next logits ``(V,)``; ``None``: greedy, or a guide.
    """

    tokens: list[int]
    logits: Tensor
    scores: Tensor
    process: Callable[[Sequence[int], Tensor], Tensor] | None = None


class Plain:
    """Plain decoding of one model, and its distribution along given tokens.

    Sampling options (temperature and so on) are left out of greedy calls.

    Args:
        model: A model of transformers.
        generate: Function to call instead of ``model.generate``; ``None``: ``model.generate``.
        keep: Whether to cache the plain output of all cases, for several audits of one model.
        **options: Options of every call of ``generate``.
    """

    def __init__(
        self,
        model: Any,
        generate: Callable[..., Any] | None = None,
        keep: bool = False,
        **options: Any,
    ) -> None:
        if options.get("guidance_scale") is not None:
            raise OptionError(
                "guidance_scale cannot be audited; give a guide: Decoder(guide='cfg:scale=...')"
            )
        self.model, self.keep, self.options = model, keep, options
        self._generate = generate or model.generate
        config = model.generation_config
        self.ends = token_ids(options.get("eos_token_id", config.eos_token_id))
        self._own: dict[str, Replay] = {}
        self._noise: dict[str, float] = {}

    def run(
        self,
        case: Case,
        custom: Any = None,
        *,
        sample: bool = False,
        processors: Sequence[Any] = (),
        criteria: Sequence[Any] = (),
        **more: Any,
    ) -> Any:
        """Calls ``generate`` for one case.

        Args:
            case: The input.
            custom: Loop for ``custom_generate``; ``None``: transformers' own loop.
            sample: Whether to sample.
            processors: Logits processors, in addition to those of the case.
            criteria: Stopping criteria, in addition to those of the case.
            **more: Further options, which replace options of the same name.
        """
        given: dict[str, Any] = {**case.inputs, **self.options, **more}
        if not sample:
            given = {k: v for k, v in given.items() if k not in UNCUT and k != "temperature"}
        for name, extra in (("logits_processor", processors), ("stopping_criteria", criteria)):
            if extra:
                given[name] = [*(given.get(name) or ()), *extra]
        if custom is not None:
            given["custom_generate"] = custom
        return self._generate(**given, do_sample=sample, num_beams=1)

    @torch.no_grad()
    def own(self, case: Case) -> Replay:
        """Output of plain greedy ``generate`` for a case, cached."""
        if case.name not in self._own:
            if not self.keep:
                self._own.clear()
            self._own[case.name] = self.replay(case, None)
        return self._own[case.name]

    @torch.no_grad()
    def replay(self, case: Case, tokens: Sequence[int] | None, **options: Any) -> Replay:
        """Runs plain ``generate``, forced to choose ``tokens``; ``None``: it chooses itself."""
        script = _Script(tokens)
        output = self.run(
            case,
            processors=[script],
            criteria=[] if tokens is None else [Enough(len(tokens) + 1)],
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
        logits = getattr(output, "logits", None)
        if not logits or len(logits) != len(script.scores):
            raise InputError(
                f"{case.name}: generate returned {type(output).__name__} with "
                f"{len(logits or ())} logits and called the processors {len(script.scores)} times; "
                "expected one of each per token: give the function that chooses the tokens as "
                "Plain(model, generate=...)"
            )
        one_row(logits[0])
        scores = torch.stack(script.scores)
        played = scores.argmax(-1).tolist() if tokens is None else list(tokens)
        return Replay(played, torch.stack(logits)[:, 0].float(), scores)

    @torch.no_grad()
    def noise(self, case: Case) -> float:
        """Largest difference in logits between scoring `own` in one block and token by token."""
        if case.name not in self._noise:
            own = self.own(case)
            whole = _Whole(own.tokens)
            self.run(case, whole)
            self._noise[case.name] = furthest(whole.logits, own.logits)
        return self._noise[case.name]


class Tap:
    """Custom loop for ``generate`` that records the inputs and outputs of a decoder.

    Args:
        decoder: The decoder; ``None``: only the inputs are recorded.
        request: Name of the row, on which its sampling noise depends.
        record: Whether to record logits and scores. CUDA graphs do not capture such calls, so only
            calls without recording run exactly as users' calls do.
    """

    def __init__(self, decoder: Decoder | None, request: str = "", record: bool = True) -> None:
        self.decoder, self.request, self.record = decoder, request, record
        self.tokens: list[int] = []

    def __call__(
        self, model: Any, input_ids: Tensor, *, generation_config: Any, **inputs: Any
    ) -> Tensor:
        """Decodes; called by ``generate`` as ``custom_generate``."""
        one_row(input_ids)
        self.prompt = input_ids
        self.processors: LogitsProcessorList = inputs["logits_processor"]
        if self.decoder is None:
            return input_ids
        config = copy.deepcopy(generation_config)
        config.return_dict_in_generate = config.output_logits = config.output_scores = self.record
        with warnings.catch_warnings():
            if self.record:
                warnings.filterwarnings("ignore", "of each round the scoring alone is captured")
            output = self.decoder(
                model, input_ids, generation_config=config, mm_request=[self.request], **inputs
            )
        sequences: Tensor = output.sequences if self.record else output
        self.tokens = sequences[0, input_ids.shape[1] :].tolist()
        if self.record:
            self.logits: Tensor = torch.stack(output.logits)[:, 0]
            self.scores: Tensor = torch.stack(output.scores)[:, 0]
        return sequences

    def target_logits(self, tokens: Sequence[int], raw: Tensor) -> Tensor:
        """Applies the call's logits processors to logits ``raw (V,)`` that follow ``tokens``."""
        prefix = torch.cat([self.prompt, self.prompt.new_tensor([list(tokens)])], 1)
        return self.processors(prefix, raw[None].clone())[0]


class _Script(LogitsProcessor):
    """Last processor of plain ``generate``: records its logits and forces given tokens."""

    def __init__(self, tokens: Sequence[int] | None) -> None:
        self.tokens = tokens
        self.scores: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        position = len(self.scores)
        self.scores.append(scores[0].float().clone())
        if self.tokens is None or position >= len(self.tokens):
            return scores
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, self.tokens[position]] = 0.0
        return chosen


class Enough(StoppingCriteria):
    """Stops after ``limit`` new tokens; unlike ``max_new_tokens``, no logits processor sees it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.first: int | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """True for each row once there are ``limit`` new tokens, ``(B,)``."""
        if self.first is None:
            self.first = input_ids.shape[1]  # the prompt and one token
        done = input_ids.shape[1] - self.first + 1 >= self.limit
        return torch.full((len(input_ids),), done, dtype=torch.bool, device=input_ids.device)


class Play(AcceptanceRule):
    """Acceptance rule that replays given tokens, whatever the target distribution is."""

    guarantee = "lossy"
    kinds: tuple[Kind, ...] = ("deterministic",)
    modes = frozenset({"greedy", "sample"})

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens

    def __call__(self, proposal: Proposal, target: TargetLogits, call: Call) -> Outcome:
        """Accepts all drafted tokens, and returns the given token that follows them."""
        count = (proposal.tokens >= 0).sum(1)
        order = torch.arange(proposal.size, device=call.device)
        position = int(call.rows.length[0] + count[0])
        token = target.at(count).argmax(-1)
        if position < len(self.tokens):
            token = torch.full_like(token, self.tokens[position])
        path = torch.where(order < count[:, None], order, -1)
        return Outcome(path=path, num_accepted=count, next_token=token)


class _Whole:
    """Scores prompt and tokens in one forward pass of the model, without a cache."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.logits: Tensor

    def __call__(self, model: Any, input_ids: Tensor, **inputs: Any) -> Tensor:
        tail = input_ids.new_tensor([self.tokens[:-1]])
        known = inspect.signature(model.forward).parameters
        given = {name: value for name, value in inputs.items() if name in known}
        for name in ("past_key_values", "cache_position", "position_ids", "logits_to_keep"):
            given.pop(name, None)
        for name, value in given.items():
            if isinstance(value, Tensor) and value.shape == input_ids.shape:  # masks, token types
                given[name] = torch.cat([value, value[:, -1:].expand(-1, tail.shape[1])], 1)
        decoder = bool(getattr(model.config, "is_encoder_decoder", 0))
        given["decoder_input_ids" if decoder else "input_ids"] = torch.cat([input_ids, tail], 1)
        output = model(**given | {"use_cache": False})
        self.logits = output.logits[0, input_ids.shape[1] - 1 :].float()
        return input_ids


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Differences along the rounded model's own output, at every token over the whole vocabulary.

    Attributes:
        tokens: Number of compared tokens.
        largest: Largest absolute difference of a log-probability.
        mean: Mean absolute difference of the log-probabilities.
        same_choice: Share of the tokens at which both models prefer the same token.
    """

    tokens: int
    largest: float
    mean: float
    same_choice: float

    @property
    def words(self) -> str:
        """The numbers in a sentence."""
        return (
            f"rounded against float, along the rounded model's output: {self.same_choice:.1%} of "
            f"{self.tokens} choices are the same; log-probabilities differ by {self.mean:.2g} on "
            f"average, by {self.largest:.2g} at most"
        )


@torch.no_grad()
def distance(
    rounded: Plain, original: Plain, cases: Sequence[Case], others: Sequence[Case]
) -> Distance:
    """Compares log-probabilities before logits processors; the float model is teacher-forced.

    Args:
        rounded: Decoding of the model with int8 weights; its tokens come from our own loop.
        original: Plain decoding of the float model.
        cases: Inputs of the rounded model, whose prompts both models read.
        others: The same inputs for the float model, with encoder states of its own if it has an
            encoder.

    Raises:
        InputError: There is no case.
    """
    tokens, same, total, count, largest = 0, 0, 0.0, 0, 0.0
    for own, theirs in zip(cases, others, strict=True):
        tap = Tap(Decoder(None), own.name)
        rounded.run(own, tap)
        states = {k: v for k, v in theirs.inputs.items() if k == "encoder_outputs"}
        other = replace(own, inputs={**own.inputs, **states})
        logits = original.replay(other, tap.tokens).logits
        size = min(len(logits), len(tap.logits))
        pair = [one[:size].float().log_softmax(-1).double() for one in (tap.logits, logits)]
        apart = (pair[0] - pair[1]).abs()
        tokens, count, total = tokens + size, count + apart.numel(), total + float(apart.sum())
        same += int((pair[0].argmax(-1) == pair[1].argmax(-1)).sum())
        largest = max(largest, float(apart.max()))
    if not tokens:
        raise InputError("no case; expected at least one input to compare the models on")
    return Distance(tokens=tokens, largest=largest, mean=total / count, same_choice=same / tokens)


def one_row(rows: Tensor) -> None:
    """Raises an `InputError` if a batch has more than one row."""
    if len(rows) != 1:
        raise InputError(f"a case has {len(rows)} rows; expected one: split it into several cases")


def furthest(left: Tensor, right: Tensor) -> float:
    """Largest absolute difference over the entries that are finite in both."""
    rows = min(len(left), len(right))
    return float(away(left[:rows], right[:rows]).max()) if rows else 0.0


def away(left: Tensor, right: Tensor) -> Tensor:
    """Like `furthest`, but for each row: from ``(T, V)`` to ``(T,)``."""
    both = left.isfinite() & right.isfinite()
    return torch.where(both, (left - right).abs(), 0.0).amax(-1)
