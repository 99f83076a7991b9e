"""START HERE for `audit`: does drafted output follow the plain law, on *your* model and device?

Rounding makes equality a claim about hardware: a block of tokens is scored with other matrix shapes
than one token, and in half precision near-ties flip. So the audit does not only compare tokens. It
feeds the drafted sequence, token by token, to transformers' own ``generate``, and measures by how
much each token falls short of what the plain law would choose there (its gap). A gap within the
noise of block scoring, measured on the same model without our engine, is rounding; a larger one
is a fault. A token also passes if it follows from the block's own logits, under the processors of
the call with the right prefix, and these differ from the plain ones by no more than the noise.
Where the noise exceeds the 10 % quantile of the plain gaps between the best two tokens, a wrong
token could hide in it: the audit is inconclusive.

What is compared with what:

* Greedy: plain ``generate``, and our own loop without a draft.
* Sampling by the coupled rule: our own loop without a draft and with the same seed; gaps include
  the keyed noise.
* Sampling by another rule, and sequences drawn elsewhere: no single sequence can be certified. The
  ranks of all tokens in their plain laws must be uniform, and their surprise that of the laws; such
  a test can reject, but never prove.
* A guide has no plain ``generate``: its reference is our own loop, token by token.

Source: the teacher-forced margin test is this project's; the uniform ranks are those of Rosenblatt
1952 (probability integral transform).
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria

from mmdecode.accept.exact import Coupled
from mmdecode.accept.follow import finish
from mmdecode.engine.contracts import Context, LawView, Outcome
from mmdecode.engine.decoder import Decoder, NoDraft
from mmdecode.engine.noise import Noise, Role, request_key
from mmdecode.engine.proposal import Kind, Proposal
from mmdecode.engine.setup import token_ids
from mmdecode.engine.stats import Stats
from mmdecode.errors import InputError, OptionError

Verdict = Literal["passes", "fails", "inconclusive"]
QUANTILE = 0.1
"""Of the plain gaps between the best two tokens; noise above it decides nothing."""
LEVEL = 1e-4
"""A sampled law is rejected below this p-value."""
SUSPECT = 4.0
"""A drafted pass whose logits are off by so many times the noise is remarked upon."""
FEWEST = 200
"""Tokens that a statistical verdict needs."""
GUIDED = 100.0
"""A guide magnifies rounding; what exceeds the model's own so many times is none."""
BLOCK = 5
"""Tokens per block where the noise of a guided law is measured."""
_BINS = 20
_SAMPLING = {"temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One input.

    Attributes:
        name: Unique; also names the row for keyed noise.
        inputs: What ``generate`` takes for this one row.
    """

    name: str
    inputs: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Where a sequence leaves the plain one.

    Attributes:
        case: Name of the input.
        position: Of the first differing token, from 0.
        token: What was generated; ``None``: it had already ended.
        plain: What the plain law chooses there; ``None``: it had already ended.
        gap: By how much the plain law prefers its choice; infinite where it forbids the token.
        explained: Whether rounding explains it.
    """

    case: str
    position: int
    token: int | None
    plain: int | None
    gap: float
    explained: bool


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What was found about one sequence.

    Attributes:
        case: Name of the input.
        tokens: Generated tokens.
        same_as_generate: Whether plain ``generate`` gives the same; ``None``: not comparable.
        same_as_undrafted: Whether our loop without a draft does; ``None``: not compared.
        flips: Tokens other than the plain choice, each explained by rounding.
        worst_gap: The largest gap of a token.
        block_difference: Largest difference of the drafted pass's logits from the plain ones.
        first: The first token that the plain law would not choose.
        fault: The first one that rounding does not explain.
    """

    case: str
    tokens: int
    same_as_generate: bool | None = None
    same_as_undrafted: bool | None = None
    flips: int = 0
    worst_gap: float = 0.0
    block_difference: float | None = None
    first: Finding | None = None
    fault: Finding | None = None


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """The verdict and what it rests on.

    Attributes:
        verdict: ``passes``, ``fails`` or ``inconclusive``.
        words: The same in a sentence.
        model, draft, guide, rule, dtype, device: What was audited.
        reference: What it was held to.
        identical: Whether every sequence equals every one it was compared with.
        noise: Largest difference of a logit between scoring in blocks and token by token.
        gap_quantile: The 10 % quantile of the plain gaps between the best two tokens.
        p_value: Of the statistical test, where one was made.
        judged: One entry per sequence.
    """

    verdict: Verdict
    words: str = ""
    model: str
    draft: str
    guide: str
    rule: str
    dtype: str
    device: str
    reference: str
    identical: bool
    noise: float
    gap_quantile: float
    p_value: float | None = None
    judged: Sequence[Judged] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(item.tokens for item in self.judged)


@dataclass(frozen=True)
class Replay:
    """The plain law along one sequence.

    Attributes:
        tokens: The sequence.
        logits: Before processors, ``(T, V)`` float32; one row more than tokens where the plain
            loop would not have stopped behind them, fewer where it would have stopped before.
        scores: Behind the processors, of the same shape.
    """

    tokens: list[int]
    logits: Tensor
    scores: Tensor


class Plain:
    """Plain decoding of one model, and what it thinks of given tokens.

    Sampling options (temperature and so on) are left out of greedy calls.

    Args:
        model: A model of transformers.
        generate: What is called instead of ``model.generate``.
        keep: Whether the plain output of all cases is remembered, for several audits of one model.
        **options: Of every call of ``generate``.
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
                "guidance_scale is audited as a guide: Decoder(guide='cfg:scale=...')"
            )
        self.model, self.keep, self.options = model, keep, options
        self._generate = generate or model.generate
        config = model.generation_config
        self.ends = token_ids(options.get("eos_token_id", config.eos_token_id))
        self._own: dict[str, Replay] = {}
        self._noise: dict[str, float] = {}

    def run(self, case: Case, custom: Any = None, *, sample: bool = False, **more: Any) -> Any:
        """``generate`` for one case, through a custom loop where one is given."""
        given: dict[str, Any] = {**case.inputs, **self.options}
        if not sample:
            given = {name: value for name, value in given.items() if name not in _SAMPLING}
        for name, extra in more.items():  # processors and criteria come on top of the case's
            given[name] = [*given.get(name, ()), *extra]
        if custom is not None:
            given["custom_generate"] = custom
        return self._generate(**given, do_sample=sample, num_beams=1)

    @torch.no_grad()
    def own(self, case: Case) -> Replay:
        """What plain greedy ``generate`` gives."""
        if case.name not in self._own:
            if not self.keep:
                self._own.clear()
            self._own[case.name] = self.replay(case, None)
        return self._own[case.name]

    @torch.no_grad()
    def replay(self, case: Case, tokens: Sequence[int] | None) -> Replay:
        """Plain ``generate`` made to choose ``tokens``; ``None``: its own choice."""
        script = _Script(tokens)
        enough = [] if tokens is None else [_Enough(len(tokens) + 1)]
        seen: list[Tensor] = []
        hook = self.model.register_forward_hook(
            lambda module, args, output: seen.append(output.logits[0, -1].float())
        )
        try:
            self.run(case, logits_processor=[script], stopping_criteria=enough)
        finally:
            hook.remove()
        scores = torch.stack(script.scores)
        played = scores.argmax(-1).tolist() if tokens is None else list(tokens)
        return Replay(played, torch.stack(seen[-len(scores) :]), scores)

    @torch.no_grad()
    def noise(self, case: Case) -> float:
        """Largest difference between scoring `own` in one block and token by token."""
        if case.name not in self._noise:
            own = self.own(case)
            whole = _Whole(own.tokens)
            self.run(case, whole)
            self._noise[case.name] = _furthest(whole.logits, own.logits)
        return self._noise[case.name]


def audit(
    model: Any,
    cases: Sequence[Case],
    decoder: Decoder | None = None,
    *,
    tokens: Mapping[str, Sequence[int]] | None = None,
    sample: bool = False,
    draws: int = 1,
    plain: Plain | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> AuditReport:
    """Judges what a decoder generates, or tokens from elsewhere, by the model's plain law.

    Args:
        model: A model of transformers, on its device and in its dtype.
        cases: Inputs, one row each.
        decoder: What is audited; left as it was. With a heuristic rule expect a failure.
        tokens: Instead: generated ids by the name of their case, without the prompt; a missing
            end-of-sequence token is forgiven where the model would set it next.
        sample: Sample instead of greedy decoding; ``temperature`` and so on are ``options``.
        draws: Sequences per case, where sampling is judged by statistics.
        plain: Used instead of a new one; for several audits of one model.
        progress: Called with the name of each case that is done.
        **options: Of ``generate``, where ``plain`` is left out.

    Raises:
        OptionError: Neither or both of ``decoder`` and ``tokens``, or options beside ``plain``.
        InputError: No case, names that occur twice, tokens of unknown cases or vocabularies.
    """
    if (decoder is None) == (tokens is None):
        raise OptionError("give a decoder to audit or tokens to judge, one of the two")
    if plain is not None and options:
        raise OptionError(f"{', '.join(options)} beside plain=...; give Plain the options")
    names = [case.name for case in cases]
    if not names or len(set(names)) < len(names):
        raise InputError(f"{len(names)} cases with {len(set(names))} names; expected one name each")
    unknown = sorted(set(tokens or ()) - set(names))
    if unknown:
        raise InputError(
            f"tokens for {', '.join(unknown[:3])}, which is no input; inputs are called "
            f"{', '.join(names[:3])}, ..."
        )
    plain = plain or Plain(model, **options)
    subject: _Subject
    if tokens is not None:
        subject = _Foreign(plain, tokens, sample)
    else:
        assert decoder is not None
        subject = _Drafted(plain, decoder, sample, draws)
    rows: list[_Row] = []
    noise = 0.0
    for case in cases:
        if tokens is not None and case.name not in tokens:
            continue
        sheets = subject.sheets(case)
        rows += [_weigh(sheet, subject) for sheet in sheets]
        noise = max(noise, subject.noise(case, sheets[0]))
        if progress is not None:
            progress(case.name)
    if not rows:
        raise InputError("no tokens were given; expected generated ids of at least one case")
    return _report(plain, subject, rows, noise)


@dataclass
class _Sheet:
    """One sequence with the plain law along it, and what the drafted pass thought of it.

    Attributes:
        case: Its input.
        replay: The plain law.
        same: Whether it equals plain and undrafted output.
        gumbel: Keyed noise of the positions, ``(T, V)``.
        block: Logits of the passes that scored blocks, ``(T, V)``; of a guide, its law.
        tap: Of the drafted call.
    """

    case: Case
    replay: Replay
    same: tuple[bool | None, bool | None] = (None, None)
    gumbel: Tensor | None = None
    block: Tensor | None = None
    tap: _Tap | None = None


class _Subject:
    """What is audited: where sequences come from and which law judges them."""

    rule, draft, guide, reference = "", "-", "-", "plain generate"
    statistical, foreign, guided = False, False, False

    def __init__(self, plain: Plain, sample: bool) -> None:
        self.plain, self.sample = plain, sample

    def sheets(self, case: Case) -> list[_Sheet]:
        raise NotImplementedError

    def noise(self, case: Case, sheet: _Sheet) -> float:
        return self.plain.noise(case)

    def law(self, case: Case, tokens: list[int]) -> Replay:
        """The plain law along ``tokens``."""
        if not self.sample and self.plain.own(case).tokens == tokens:
            return self.plain.own(case)
        replay = self.plain.replay(case, tokens)
        if not self.sample:
            return replay
        tap = _Tap(None, "")  # to be handed the processors of a sampling call
        self.plain.run(case, tap, sample=True)
        rows = [tap.law(tokens[:place], raw) for place, raw in enumerate(replay.logits)]
        return Replay(tokens, replay.logits, torch.stack(rows))


class _Foreign(_Subject):
    """Tokens from elsewhere."""

    rule, foreign = "unknown", True

    def __init__(self, plain: Plain, rows: Mapping[str, Sequence[int]], sample: bool) -> None:
        super().__init__(plain, sample)
        self.rows, self.statistical = rows, sample

    def sheets(self, case: Case) -> list[_Sheet]:
        row = [int(token) for token in self.rows[case.name]]
        own = self.plain.own(case)
        vocab = own.logits.shape[-1]
        if not row or min(row) < 0 or max(row) >= vocab:
            raise InputError(
                f"tokens of {case.name}: expected one or more ids from 0 to {vocab - 1}, got "
                f"{len(row)} from {min(row, default=0)} to {max(row, default=0)}; give generated "
                "ids of this model, without padding"
            )
        same = None if self.sample else own.tokens == row
        return [_Sheet(case, self.law(case, row), (same, None))]


class _Drafted(_Subject):
    """What a decoder generates."""

    def __init__(self, plain: Plain, decoder: Decoder, sample: bool, draws: int) -> None:
        super().__init__(plain, sample)
        if draws < 1:
            raise OptionError(f"draws={draws}; expected at least 1")
        self.decoder = copy.copy(decoder)
        self.decoder.stats, self.decoder.trace = Stats(), None
        self.seed = decoder.seed or 0
        rule = decoder.accept
        if isinstance(rule, str):
            rule = "greedy" if not sample else "coupled" if rule == "auto" else rule
        self.rule = rule if isinstance(rule, str) else type(rule).__name__
        self.draft = type(decoder.draft).__name__
        guide = None if decoder.guide is None or decoder.guide.neutral else decoder.guide
        self.guided = guide is not None
        self.guide = "-" if guide is None else type(guide).__name__
        self.statistical = sample and not (rule == "coupled" or isinstance(rule, Coupled))
        self.draws = draws if self.statistical else 1
        self.undrafted = Decoder(None, guide, seed=self.seed)
        if self.guided or (sample and not self.statistical):
            self.reference = "our loop without a draft"

    def sheets(self, case: Case) -> list[_Sheet]:
        return [self._sheet(case, self.seed + draw) for draw in range(self.draws)]

    def noise(self, case: Case, sheet: _Sheet) -> float:
        if not self.guided:
            return super().noise(case, sheet)
        tokens = sheet.replay.tokens
        blocks = self._played(case, tokens, _Blocks(tokens))
        own = self.plain.noise(case)
        return min(_furthest(blocks.scores, sheet.replay.scores), GUIDED * own)

    def _sheet(self, case: Case, seed: int) -> _Sheet:
        self.decoder.seed = seed
        tap = self._tapped(case, self.decoder)
        # of a guided law the scores can be compared; the logits belong to one branch alone
        replay = self._played(case, tap.tokens) if self.guided else self.law(case, tap.tokens)
        block = tap.scores if self.guided else tap.logits
        sheet = _Sheet(case, replay, block=block, tap=tap)
        if self.statistical:
            return sheet
        plain = None
        if not self.sample and not self.guided:
            plain = self.plain.own(case).tokens == tap.tokens
        sheet.same = plain, self._tapped(case, self.undrafted).tokens == tap.tokens
        if self.sample:
            keyed = Noise.of(seed, [request_key(case.name, 0)], replay.scores.device)
            places = torch.arange(len(replay.scores), device=replay.scores.device)[None]
            sheet.gumbel = keyed.gumbel(places, Role.TARGET, replay.scores.shape[-1])[0]
        return sheet

    def _played(self, case: Case, tokens: list[int], draft: Any = None) -> Replay:
        """The guided law along ``tokens`` in our own loop: one by one, or in drafted blocks."""
        rule: Any = _Play(tokens)
        decoder = Decoder(draft, self.undrafted.guide, rule, self.seed)
        tap = self._tapped(case, decoder, stopping_criteria=[_Enough(len(tokens) + 1)])
        return Replay(tokens, tap.scores, tap.scores)

    def _tapped(self, case: Case, decoder: Decoder, **more: Any) -> _Tap:
        tap = _Tap(decoder, case.name)
        self.plain.run(case, tap, sample=self.sample, **more)
        return tap


class _Tap:
    """Stands before a decoder and notes what goes in and out; without one, only what goes in."""

    def __init__(self, decoder: Decoder | None, request: str) -> None:
        self.decoder, self.request = decoder, request
        self.tokens: list[int] = []

    def __call__(
        self, model: Any, input_ids: Tensor, *, generation_config: Any, **inputs: Any
    ) -> Tensor:
        if len(input_ids) != 1:
            raise InputError(f"a case holds one row, this one has {len(input_ids)}; split it")
        self.prompt = input_ids
        self.processors: LogitsProcessorList = inputs["logits_processor"]
        if self.decoder is None:
            return input_ids
        config = copy.deepcopy(generation_config)
        config.return_dict_in_generate = config.output_logits = config.output_scores = True
        output = self.decoder(
            model, input_ids, generation_config=config, mm_request=[self.request], **inputs
        )
        self.tokens = output.sequences[0, input_ids.shape[1] :].tolist()
        self.logits: Tensor = torch.stack(output.logits)[:, 0]
        self.scores: Tensor = torch.stack(output.scores)[:, 0]
        return output.sequences

    def law(self, tokens: Sequence[int], raw: Tensor) -> Tensor:
        """``raw (V,)`` under the processors of the call, behind ``tokens``."""
        prefix = torch.cat([self.prompt, self.prompt.new_tensor([list(tokens)])], 1)
        return self.processors(prefix, raw[None].clone())[0]


class _Script(LogitsProcessor):
    """The last processor of plain ``generate``: notes its law, and makes it choose given tokens."""

    def __init__(self, tokens: Sequence[int] | None) -> None:
        self.tokens = tokens
        self.scores: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place = len(self.scores)
        self.scores.append(scores[0].float().clone())
        if self.tokens is None or place >= len(self.tokens):
            return scores
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, self.tokens[place]] = 0.0
        return chosen


class _Enough(StoppingCriteria):
    """Ends a loop behind so many new tokens, without being an option that processors read."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.first: int | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if self.first is None:
            self.first = input_ids.shape[1]  # the prompt and one token
        done = input_ids.shape[1] - self.first + 1 >= self.limit
        return torch.full((len(input_ids),), done, dtype=torch.bool, device=input_ids.device)


class _Play:
    """A rule that keeps the given tokens, whatever the law says."""

    law: ClassVar[Literal["heuristic"]] = "heuristic"
    kinds: tuple[Kind, ...] = ("deterministic",)
    modes = frozenset({"greedy", "sample"})

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens

    def __call__(self, proposal: Proposal, law: LawView, noise: Noise, ctx: Context) -> Outcome:
        count = (proposal.tokens >= 0).sum(1)
        order = torch.arange(proposal.size, device=ctx.device)
        place = int(ctx.length[0] + count[0])
        token = law.at(count).argmax(-1)
        if place < len(self.tokens):
            token = torch.full_like(token, self.tokens[place])
        path = torch.where(order < count[:, None], order, -1)
        outcome = Outcome(path=path, num_accepted=count, next_token=token)
        return finish(outcome, proposal, law, noise, ctx)


class _Blocks(NoDraft):
    """Drafts the given tokens, `BLOCK` at a time."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens

    def propose(self, ctx: Context, budget: int) -> Proposal:
        """What comes next in them."""
        place = int(ctx.length[0])
        block = list(self.tokens[place : place + min(BLOCK, budget)])
        if not block:
            return Proposal.empty(ctx.batch, ctx.device)
        return Proposal(tokens=torch.tensor([block], device=ctx.device), kind="deterministic")


class _Whole:
    """Scores prompt and tokens in one pass without a cache, by the model's own forward."""

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


def _furthest(left: Tensor, right: Tensor) -> float:
    """Largest difference of entries that both allow."""
    rows = min(len(left), len(right))
    return float(_away(left[:rows], right[:rows]).max()) if rows else 0.0


def _away(left: Tensor, right: Tensor) -> Tensor:
    """The same, row by row: ``(T, V)`` to ``(T,)``."""
    both = left.isfinite() & right.isfinite()
    return torch.where(both, (left - right).abs(), 0.0).amax(-1)


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A sequence by the numbers that its verdict needs; per token and on the host.

    Attributes:
        case: Name of its input.
        tokens: The sequence.
        best: What the plain law chooses; longer or shorter than ``tokens`` as in `Replay`.
        gaps: By how much it prefers that to the token.
        lead: Its own gap between the best two.
        end: Gap of the best end-of-sequence token behind the last token.
        away: Largest difference of the drafted pass's logits from the plain ones.
        chosen: Whether the token follows from those logits; asked only where it is not ``best``.
        same: Whether the sequence equals plain and undrafted output.
        ranks, excess, variance: See `p_of_draws`.
    """

    case: str
    tokens: list[int]
    best: list[int]
    gaps: Tensor
    lead: Tensor
    end: float
    away: Tensor | None
    chosen: Tensor
    same: tuple[bool | None, bool | None]
    ranks: Tensor
    excess: float
    variance: float


def _weigh(sheet: _Sheet, subject: _Subject) -> _Row:
    replay = sheet.replay
    law = replay.scores if sheet.gumbel is None else replay.scores + sheet.gumbel
    size = min(len(law), len(replay.tokens))
    tokens = torch.tensor(replay.tokens[:size], device=law.device)
    lead = law.topk(2, -1).values
    away, chosen = None, torch.zeros(size, dtype=torch.bool)
    if sheet.block is not None and sheet.tap is not None:
        away = _away(sheet.block[:size], replay.logits[:size]).cpu()
        for place in (law[:size].argmax(-1) != tokens).nonzero()[:, 0].tolist():
            seen = sheet.block[place]
            if not subject.guided:  # not the scores that the rule saw: they may be what is wrong
                seen = sheet.tap.law(replay.tokens[:place], seen)
            seen = seen if sheet.gumbel is None else seen + sheet.gumbel[place]
            chosen[place] = int(seen.argmax()) == replay.tokens[place]
    ends = subject.plain.ends
    ranks, excess, variance = torch.empty(0), 0.0, 0.0
    if subject.statistical:
        ranks, excess, variance = _surprise(replay.scores[:size], tokens)
    return _Row(
        case=sheet.case.name,
        tokens=replay.tokens,
        best=law.argmax(-1).tolist(),
        gaps=(lead[:size, 0] - law[:size].gather(1, tokens[:, None])[:, 0]).cpu(),
        lead=(lead[:, 0] - lead[:, 1]).cpu(),
        end=min((float(lead[-1, 0] - law[-1, end]) for end in ends), default=torch.inf),
        away=away,
        chosen=chosen,
        same=sheet.same,
        ranks=ranks,
        excess=excess,
        variance=variance,
    )


def _surprise(law: Tensor, tokens: Tensor) -> tuple[Tensor, float, float]:
    """Ranks ``(T,)``, surprise beyond the entropy, and the variance of that."""
    log_p = law.double().log_softmax(-1)
    p, order = log_p.exp(), torch.arange(law.shape[1], device=law.device)
    chosen = p.gather(1, tokens[:, None])
    above = (p > chosen) | ((p == chosen) & (order < tokens[:, None]))
    key = Noise.of(0, [request_key(*tokens.tolist())], law.device)
    spread = key.uniform(torch.arange(len(tokens), device=law.device)[None], Role.ACCEPT)[0]
    ranks = (p * above).sum(-1) + spread * chosen[:, 0]
    surprise = torch.where(p > 0, -log_p, 0.0)
    entropy = (p * surprise).sum(-1)
    excess = surprise.gather(1, tokens[:, None])[:, 0] - entropy
    variance = (p * surprise**2).sum(-1) - entropy**2
    return ranks.cpu(), float(excess.sum()), float(variance.sum())


def p_of_draws(ranks: Tensor, excess: float, variance: float) -> float:
    """How likely tokens this unusual are under the laws they should have been drawn from.

    Two statistics, with Bonferroni's correction: the ranks in 20 bins (chi-square), and the total
    surprise beyond the entropy (normal, by the central limit theorem for martingales).

    Args:
        ranks: Each token's place in its law ordered by falling probability, as the mass before it
            and a uniform share of its own, 0..1, ``(T,)``.
        excess: Sum over tokens of ``-log p`` minus the entropy of the law.
        variance: Of that sum.
    """
    cells = (ranks * _BINS).long().clamp(0, _BINS - 1)
    counts = torch.bincount(cells, minlength=_BINS).double()
    expected = len(ranks) / _BINS
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((_BINS - 1) / 2, dtype=torch.float64)
    by_rank = float(torch.special.gammaincc(freedom, statistic / 2))
    by_surprise = math.erfc(abs(excess) / math.sqrt(2 * max(variance, 1e-12)))
    return min(1.0, 2 * min(by_rank, by_surprise))


def _judge(row: _Row, noise: float, subject: _Subject) -> Judged:
    """One sequence, once the noise is known."""
    size = len(row.gaps)
    differs = torch.tensor(row.best[:size]) != torch.tensor(row.tokens[:size])
    passes = row.gaps <= noise
    if row.away is not None:
        passes |= row.chosen & (row.away <= noise)
    if subject.statistical:
        passes = row.gaps.isfinite()  # a token that the law forbids was not drawn from it

    def at(place: int, gap: float, explained: bool) -> Finding:
        return Finding(
            case=row.case,
            position=place,
            token=row.tokens[place] if place < len(row.tokens) else None,
            plain=row.best[place] if place < len(row.best) else None,
            gap=gap,
            explained=explained,
        )

    first = fault = None
    if bool(differs.any()) and not subject.statistical:
        place = int(differs.long().argmax())
        first = at(place, float(row.gaps[place]), bool(passes[place]))
    if not bool(passes.all()):
        place = int((~passes).long().argmax())
        fault = at(place, float(row.gaps[place]), False)
    elif len(row.tokens) > size:  # the plain loop had ended
        fault = at(size, torch.inf, False)
    elif len(row.best) > size and not (subject.foreign and row.end <= noise):
        fault = at(size, row.end, False)  # it would have gone on
    return Judged(
        case=row.case,
        tokens=len(row.tokens),
        same_as_generate=row.same[0],
        same_as_undrafted=row.same[1],
        flips=int((differs & passes).sum()),
        worst_gap=float(row.gaps.max()),
        block_difference=None if row.away is None else float(row.away.max()),
        first=first or fault,
        fault=fault,
    )


def _report(plain: Plain, subject: _Subject, rows: Sequence[_Row], noise: float) -> AuditReport:
    model = plain.model
    judged = [_judge(row, noise, subject) for row in rows]
    lead = torch.cat([row.lead for row in rows])
    quantile = float(lead.quantile(QUANTILE, interpolation="lower"))
    compared = [same for row in rows for same in row.same if same is not None]
    identical = bool(compared) and all(compared)
    p_value = None
    if subject.statistical:
        ranks = torch.cat([row.ranks for row in rows])
        p_value = p_of_draws(
            ranks, sum(row.excess for row in rows), sum(row.variance for row in rows)
        )
    verdict: Verdict = "passes"
    if any(item.fault for item in judged) or (p_value is not None and p_value < LEVEL):
        verdict = "fails"
    elif p_value is not None:
        verdict = "passes" if len(ranks) >= FEWEST else "inconclusive"
    elif noise > quantile and not (identical and torch.finfo(model.dtype).bits >= 32):
        verdict = "inconclusive"
    report = AuditReport(
        verdict=verdict,
        model=type(model).__name__,
        draft=subject.draft,
        guide=subject.guide,
        rule=subject.rule,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        reference=subject.reference,
        identical=identical,
        noise=noise,
        gap_quantile=quantile,
        p_value=p_value,
        judged=judged,
    )
    return replace(report, words=_words(report))


def _words(report: AuditReport) -> str:
    """The verdict in a sentence."""
    where = (
        f"{report.tokens} tokens of {len(report.judged)} sequences, {report.dtype} on "
        f"{report.device}"
    )
    noise = (
        f"noise of block scoring {report.noise:.2g}, 10 % quantile of the plain gaps "
        f"{report.gap_quantile:.2g}"
    )
    faults = [item.fault for item in report.judged if item.fault is not None]
    if faults:
        first = faults[0]
        if first.token is None:
            what = f"has ended, where the model goes on with token {first.plain}"
        elif first.plain is None:
            what = f"goes on with token {first.token}, where the model has ended"
        else:
            what = (
                f"has token {first.token}, where the model chooses {first.plain} by a gap of "
                f"{first.gap:.2g}"
            )
        return (
            f"fails: {len(faults)} of {len(report.judged)} sequences leave the model's law; "
            f"{first.case} at position {first.position} {what} ({where}; {noise})"
        )
    if report.p_value is not None:
        chance = f"p = {report.p_value:.2g}, {where}"
        if report.verdict == "fails":
            return f"fails: the tokens were not drawn from the model's law ({chance})"
        if report.verdict == "inconclusive":
            return f"inconclusive: {FEWEST} tokens are needed to judge a sampled law ({chance})"
        return f"passes: no other law than the model's was found, which is no proof ({chance})"
    if report.verdict == "inconclusive":
        return (
            "inconclusive: rounding is as large as the gaps between the best two tokens, so a "
            f"wrong token could pass for it ({where}; {noise}); audit in float32"
        )
    worst_block = max(item.block_difference or 0.0 for item in report.judged)
    remark = ""
    if worst_block > SUSPECT * report.noise:
        remark = (
            f"; yet the drafted passes' logits are off by {worst_block:.2g}, which is more than "
            "rounding and points to a fault that has not shown in a token"
        )
    if report.identical:
        return f"passes: token for token the same as {report.reference} ({where}; {noise}){remark}"
    flips = sum(item.flips for item in report.judged)
    if not flips:
        return f"passes: every token is the plain law's own choice ({where}; {noise}){remark}"
    worst = max(item.worst_gap for item in report.judged)
    return (
        f"passes: {flips} tokens are not the plain law's own choice, each within rounding, the "
        f"largest gap being {worst:.2g} ({where}; {noise}){remark}"
    )
