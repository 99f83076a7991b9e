"""START HERE for `audit`: tests whether drafted output follows the model's own distribution.

Whether two sequences are equal depends on hardware: a block of tokens is scored with other matrix
shapes than one token, and in half precision this rounding can change the choice between two nearly
equal tokens. The audit therefore does not only compare tokens. It feeds the drafted sequence, token
by token, to transformers' own ``generate`` (the plain model), and computes the gap of each token:
the best plain logit minus the token's. A gap within the noise, the rounding error of scoring
in blocks on the same model without our engine, is rounding; a larger gap is a fault. A token also
passes if the logits of the drafted block choose it, and differ from the plain logits by at most the
noise. Tokens from elsewhere have no such logits: for them twice the noise is tolerated, since
rounding may have raised the token and lowered the plain choice. If the tolerance exceeds the 10 %
quantile of the plain gaps between the best two tokens, the audit is inconclusive.

The reference depends on the kind of call:

* Greedy decoding: plain ``generate``, and our own loop without a draft.
* Sampling by the coupled rule: our own loop without a draft, with the same seed; gaps include the
  Gumbel noise of this seed.
* Sampling by another rule, or elsewhere: no single sequence can be certified. A statistical test of
  all tokens under the plain distributions can reject, but never prove
  (`mmdecode.evaluation.stats.draws`).
* Decoding with a guide, or by a Whisper with int8 weights: our own loop, token by token.

Plain decoding is in `mmdecode.evaluation.audit.plain`. Rows are audited one at a time: faults that
need a batch of several rows are not found.

Source: the teacher-forced margin test is this project's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from mmdecode._compat import input_device
from mmdecode.accept.exact import Coupled
from mmdecode.decoder import Decoder
from mmdecode.draft.source import Source
from mmdecode.engine.noise import Noise, Role, request_key
from mmdecode.engine.stats import Stats
from mmdecode.errors import InputError, OptionError
from mmdecode.evaluation.audit.plain import Case, Enough, Plain, Play, Replay, Tap, away, furthest
from mmdecode.evaluation.stats.draws import FEWEST, LEVEL, on_the_edge, p_of_draws, surprise
from mmdecode.quantization.models import rounds_activations

Verdict = Literal["passes", "fails", "inconclusive"]
BLOCK = 5
"""Number of tokens per block when the rounding noise of a guided distribution is measured."""
QUANTILE = 0.1
"""Quantile of the plain gaps between the best two tokens; the noise must not exceed it."""
SUSPECT = 4.0
"""Multiple of the noise beyond which the logits of a drafted pass are reported as suspect."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A position at which a sequence differs from the plain sequence.

    Attributes:
        case: Name of the input.
        position: Position of the first differing token, from 0.
        token: Generated token; ``None``: the sequence had already ended.
        plain: Choice of the plain model; ``None``: the plain sequence had already ended.
        gap: Logit of the plain choice minus logit of the token; infinite if the plain distribution
            forbids the token.
        explained: Whether rounding explains the difference.
    """

    case: str
    position: int
    token: int | None
    plain: int | None
    gap: float
    explained: bool


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Result for one sequence.

    Attributes:
        case: Name of the input.
        tokens: Number of generated tokens.
        same_as_generate: Whether plain ``generate`` gives the same tokens; ``None``: not compared.
        same_as_undrafted: Whether our loop without a draft does; ``None``: not compared.
        flips: Number of tokens that are not the plain choice, but are explained by rounding.
        worst_gap: The largest gap of a token.
        block_difference: Largest difference between logits of drafted blocks and plain logits.
        first: First token that is not the plain choice.
        fault: First token that rounding does not explain.
        cut: Whether tokens from elsewhere end where the model would go on, as at a length limit.
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
    cut: bool = False


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """Verdict of an audit, with the numbers behind it.

    Attributes:
        verdict: ``passes``, ``fails`` or ``inconclusive``.
        words: The verdict in a sentence.
        model, draft, guide, rule, dtype, device: The audited parts.
        reference: Decoding that the sequences were compared with.
        identical: Whether every sequence equals all sequences that it was compared with.
        noise: Largest difference of a logit between scoring in blocks and token by token.
        gap_quantile: The 10 % quantile of the plain gaps between the best two tokens.
        p_value: P-value of the statistical test; ``None``: no such test was made.
        judged: Result of each sequence.
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
        """Number of tokens of all sequences."""
        return sum(item.tokens for item in self.judged)


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
    most_guided: float = 100.0,
    **options: Any,
) -> AuditReport:
    """Tests whether a decoder's tokens, or given ones, follow the model's own distribution.

    Args:
        model: A model of transformers, on its device and in its dtype.
        cases: Inputs, one row each.
        decoder: Decoder to audit. Its seed, counters and trace are not changed; a draft that learns
            from call to call also learns from the audit. A lossy acceptance rule fails the audit.
        tokens: Instead of a decoder: generated ids by the name of their case, without the prompt. A
            missing end-of-sequence token is accepted if the model would generate it next, or if
            ``max_new_tokens`` ends the sequence there.
        sample: Sample instead of greedy decoding; ``temperature`` and so on are ``options``.
        draws: Number of sequences per case for a statistical test of sampling.
        plain: Plain decoding of the model, shared by several audits; ``None``: it is made here.
        progress: Called with the name of each case when it is done.
        most_guided: Largest factor by which a guide may magnify the model's rounding noise.
        **options: Options of ``generate``, if ``plain`` is not given.

    Raises:
        OptionError: Neither or both of ``decoder`` and ``tokens``, or options next to ``plain``.
        InputError: No case, names that occur twice, tokens of unknown cases or vocabularies, a case
            of several rows, or a ``generate`` that does not return its logits.
    """
    if (decoder is None) == (tokens is None):
        raise OptionError("expected either a decoder or tokens to audit; give one of the two")
    if plain is not None and options:
        raise OptionError(f"{', '.join(options)} next to plain=...; give them to Plain instead")
    names = [case.name for case in cases]
    if not names or len(set(names)) < len(names):
        raise InputError(f"{len(names)} cases have {len(set(names))} names; expected unique names")
    unknown = sorted(set(tokens or ()) - set(names))
    if unknown:
        raise InputError(
            f"tokens are given for {', '.join(unknown[:3])}, but there is no such case; cases are "
            f"called {', '.join(names[:3])}, ..."
        )
    chosen = [case for case in cases if tokens is None or case.name in tokens]
    if not chosen:
        raise InputError("tokens is empty; expected generated ids of at least one case")
    plain = plain or Plain(model, **options)
    subject: _Subject
    if decoder is None:
        subject = _Foreign(plain, tokens or {}, sample)
    else:
        subject = _Drafted(plain, decoder, sample, draws)
    rows: list[_Row] = []
    noise = 0.0
    for case in chosen:
        own, rounding = subject.rows(case, most_guided)
        rows += own
        noise = max(noise, rounding)
        if progress is not None:
            progress(case.name)
    return _report(plain, subject, rows, noise)


@dataclass(frozen=True, kw_only=True)
class _Row:
    """Numbers per token of one sequence from which it is judged.

    Attributes:
        case: Name of the input.
        tokens: The sequence.
        best: Plain choice at each position; longer or shorter than ``tokens`` as in `Replay`.
        gaps: Logit of the plain choice minus logit of the token.
        lead: Plain logit of the best token minus that of the second best.
        end: Gap of the best end-of-sequence token after the last token.
        away: Largest difference between the block's logits and the plain logits at each token.
        chosen: Whether the block's logits choose the token, or in a statistical test allow it;
            computed only for tokens that the plain logits do not choose or allow.
        excuses: For each sampled token that the plain distribution forbids: function that tells
            whether a given noise explains it.
        same: Whether the sequence equals plain output, and undrafted output.
        surprise: A part for `p_of_draws`, from `surprise`; ``None``: no statistical test.
    """

    case: str
    tokens: list[int]
    best: list[int]
    gaps: Tensor
    lead: Tensor
    end: float
    away: Tensor | None
    chosen: Tensor
    excuses: Mapping[int, Callable[[float], bool]]
    same: tuple[bool | None, bool | None]
    surprise: tuple[Tensor, float, float] | None


class _Subject(ABC):
    """Subject of an audit: the source of sequences, and the plain distribution along them."""

    rule, draft, guide, reference = "", "-", "-", "plain generate"
    statistical, foreign, guided = False, False, False

    def __init__(self, plain: Plain, sample: bool) -> None:
        self.plain, self.sample = plain, sample

    @abstractmethod
    def rows(self, case: Case, most_guided: float) -> tuple[list[_Row], float]:
        """Numbers of the sequences of one input, and the noise of scoring it in blocks."""

    def target_logits(self, case: Case, tokens: list[int], **options: Any) -> Replay:
        """The plain distribution at each position of ``tokens``."""
        if not self.sample and self.plain.own(case).tokens == tokens:
            return self.plain.own(case)
        replay = self.plain.replay(case, tokens, **options)
        if not self.sample:
            return replay
        tap = Tap(None)  # to be handed the processors of a sampling call
        self.plain.run(case, tap, sample=True, **options)
        rows = [tap.target_logits(tokens[:i], raw) for i, raw in enumerate(replay.logits)]
        return Replay(tokens, replay.logits, torch.stack(rows), tap.target_logits)

    def weigh(
        self,
        case: Case,
        replay: Replay,
        same: tuple[bool | None, bool | None] = (None, None),
        gumbel: Tensor | None = None,
        tap: Tap | None = None,
    ) -> _Row:
        """Computes the numbers from which one sequence is judged.

        Args:
            case: Input of the sequence.
            replay: Plain distribution at each token of the sequence.
            same: Whether the sequence equals plain output, and undrafted output.
            gumbel: Gumbel noise of each position, ``(T, V)``; ``None``: greedy, or a statistical
                test.
            tap: Recorder of the drafted call.
        """
        distribution = replay.scores if gumbel is None else replay.scores + gumbel
        size = min(len(distribution), len(replay.tokens))
        tokens = torch.tensor(replay.tokens[:size], device=distribution.device)
        lead = distribution.topk(2, -1).values
        gaps = (lead[:size, 0] - distribution[:size].gather(1, tokens[:, None])[:, 0]).cpu()
        off, chosen = None, torch.zeros(size, dtype=torch.bool)
        if tap is not None and tap.record:
            # of a guided distribution the scores can be compared; the logits belong to one branch
            # alone
            block = tap.scores if self.guided else tap.logits
            off = away(block[:size], replay.logits[:size]).cpu()
            suspect = gaps.isinf() if self.statistical else distribution[:size].argmax(-1) != tokens
            for position in suspect.nonzero()[:, 0].tolist():
                seen = block[position]
                if not self.guided:  # not the scores that the rule saw: they may be what is wrong
                    seen = tap.target_logits(replay.tokens[:position], seen)
                seen = seen if gumbel is None else seen + gumbel[position]
                candidates = seen.isfinite() if self.statistical else seen == seen.max()
                chosen[position] = candidates[replay.tokens[position]]
        excuses: dict[int, Callable[[float], bool]] = {}
        if self.statistical and replay.process is not None:
            forbidden = gaps.isinf().nonzero()[:, 0].tolist()
            excuses = {position: partial(on_the_edge, replay, position) for position in forbidden}
        ends = (float(lead[-1, 0] - distribution[-1, end]) for end in self.plain.ends)
        return _Row(
            case=case.name,
            tokens=replay.tokens,
            best=distribution.argmax(-1).tolist(),
            gaps=gaps,
            lead=(lead[:, 0] - lead[:, 1]).cpu(),
            end=min(ends, default=torch.inf),
            away=off,
            chosen=chosen,
            excuses=excuses,
            same=same,
            surprise=surprise(replay.scores[:size], tokens) if self.statistical else None,
        )


class _Foreign(_Subject):
    """Tokens from elsewhere."""

    rule, foreign = "unknown", True

    def __init__(self, plain: Plain, given: Mapping[str, Sequence[int]], sample: bool) -> None:
        super().__init__(plain, sample)
        self.given, self.statistical = given, sample

    def rows(self, case: Case, most_guided: float) -> tuple[list[_Row], float]:
        row = [int(token) for token in self.given[case.name]]
        own = self.plain.own(case)
        vocab = own.logits.shape[-1]
        if not row or min(row) < 0 or max(row) >= vocab:
            raise InputError(
                f"tokens of {case.name}: expected one or more ids from 0 to {vocab - 1}, got "
                f"{len(row)} from {min(row, default=0)} to {max(row, default=0)}; give generated "
                "ids of this model, without padding"
            )
        replay = self.target_logits(case, row)
        if len(replay.logits) < len(row):  # beyond ``max_new_tokens`` of the call
            replay = self.target_logits(case, row, max_new_tokens=len(row) + 1)
        same = None if self.sample else own.tokens == row
        return [self.weigh(case, replay, (same, None))], self.plain.noise(case)


class _Drafted(_Subject):
    """Tokens that a decoder generates."""

    def __init__(self, plain: Plain, decoder: Decoder, sample: bool, draws: int) -> None:
        super().__init__(plain, sample)
        if draws < 1:
            raise OptionError(f"draws={draws}; expected at least 1")
        self.decoder = replace(decoder, stats=Stats())
        self.seed = decoder.seed or 0
        rule = decoder.accept
        if isinstance(rule, str):
            rule = "greedy" if not sample else "coupled" if rule == "auto" else rule
        self.rule = rule if isinstance(rule, str) else type(rule).__name__
        self.draft = type(decoder.draft).__name__
        guide = None if decoder.guide is None or decoder.guide.neutral else decoder.guide
        # our loop is the reference; generate reads a rounded Whisper's encoder states in float
        apart = rounds_activations(plain.model) and plain.model.config.is_encoder_decoder
        self.guided = guide is not None or bool(apart)
        self.guide = "-" if guide is None else type(guide).__name__
        self.statistical = sample and not (rule == "coupled" or isinstance(rule, Coupled))
        self.draws = draws if self.statistical else 1
        self.undrafted = Decoder(None, guide, seed=self.seed)
        if self.guided or (sample and not self.statistical):
            self.reference = "our loop without a draft"

    def rows(self, case: Case, most_guided: float) -> tuple[list[_Row], float]:
        rows: list[_Row] = []
        noise = self.plain.noise(case)
        for seed in range(self.seed, self.seed + self.draws):
            decoder = replace(self.decoder, seed=seed)
            recorded = self._tapped(case, decoder)
            bare = self._tapped(case, decoder, record=False)
            for tap in [recorded] if bare.tokens == recorded.tokens else [recorded, bare]:
                play = self._played if self.guided else self.target_logits
                replay = play(case, tap.tokens)
                if self.guided and not rows:
                    blocks = self._played(case, tap.tokens, Source(BLOCK, ids=[tap.tokens]))
                    noise = min(furthest(blocks.scores, replay.scores), most_guided * noise)
                rows.append(self._row(case, seed, replay, tap))
        return rows, noise

    def _row(self, case: Case, seed: int, replay: Replay, tap: Tap) -> _Row:
        """Compares one sequence with plain and undrafted output, if the same are expected."""
        if self.statistical:
            return self.weigh(case, replay, tap=tap)
        plain, gumbel = None, None
        if not self.sample and not self.guided:
            plain = self.plain.own(case).tokens == tap.tokens
        same = plain, self._tapped(case, self.undrafted).tokens == tap.tokens
        if self.sample:
            scores = replay.scores
            keyed = Noise.of(seed, [request_key(case.name, 0)], scores.device)
            positions = torch.arange(len(scores), device=scores.device)[None]
            gumbel = keyed.gumbel(positions, Role.TARGET, scores.shape[-1])[0]
        return self.weigh(case, replay, same, gumbel, tap)

    def _played(self, case: Case, tokens: list[int], draft: Any = None) -> Replay:
        """Guided scores along ``tokens`` in our own loop, token by token or with a ``draft``."""
        rule: Any = Play(tokens)
        decoder = Decoder(draft, self.undrafted.guide, rule, self.seed)
        tap = self._tapped(case, decoder, criteria=[Enough(len(tokens) + 1)])
        return Replay(tokens, tap.scores, tap.scores)

    def _tapped(
        self, case: Case, decoder: Decoder, record: bool = True, criteria: Sequence[Any] = ()
    ) -> Tap:
        tap = Tap(decoder, case.name, record)
        self.plain.run(case, tap, sample=self.sample, criteria=criteria)
        return tap


def _forgiven(row: _Row, noise: float, subject: _Subject) -> float:
    """Largest gap that rounding explains, whatever the logits of the drafted block are."""
    if subject.statistical:  # only what the distribution forbids was not drawn from it
        return torch.finfo(torch.float32).max
    return 2 * noise if row.away is None else noise  # up to once in the token and in the choice


def _judge(row: _Row, noise: float, subject: _Subject) -> Judged:
    """Judges one sequence, given the noise."""
    size = len(row.gaps)
    differs = torch.tensor(row.best[:size]) != torch.tensor(row.tokens[:size])
    bound = _forgiven(row, noise, subject)
    passes = row.gaps <= bound
    if row.away is not None:
        passes |= row.chosen & (row.away <= noise)
    for position, excuse in row.excuses.items():
        passes[position] |= excuse(noise)

    def at(position: int, gap: float, explained: bool) -> Finding:
        return Finding(
            case=row.case,
            position=position,
            token=row.tokens[position] if position < len(row.tokens) else None,
            plain=row.best[position] if position < len(row.best) else None,
            gap=gap,
            explained=explained,
        )

    first, fault, cut = None, None, False
    if bool(differs.any()) and not subject.statistical:
        position = int(differs.long().argmax())
        first = at(position, float(row.gaps[position]), bool(passes[position]))
    if not bool(passes.all()):
        position = int((~passes).long().argmax())
        fault = at(position, float(row.gaps[position]), False)
    elif len(row.tokens) > size:  # the plain loop had ended
        fault = at(size, torch.inf, False)
    elif len(row.best) > size:  # it would have gone on
        cut = subject.foreign and row.end > bound and not subject.statistical
        fault = None if subject.foreign else at(size, row.end, False)
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
        cut=cut,
    )


def _report(plain: Plain, subject: _Subject, rows: Sequence[_Row], noise: float) -> AuditReport:
    model = plain.model
    judged = [_judge(row, noise, subject) for row in rows]
    lead = torch.cat([row.lead for row in rows])
    quantile = float(lead.quantile(QUANTILE, interpolation="lower"))
    compared = [same for row in rows for same in row.same if same is not None]
    identical = bool(compared) and all(compared)
    hidden = max(_forgiven(row, noise, subject) for row in rows) > quantile and not (
        identical and torch.finfo(model.dtype).bits >= 32
    )
    sampled = [row.surprise for row in rows if row.surprise]
    p_value, few = None, False
    if subject.statistical:
        p_value = p_of_draws(sampled)
        few = sum(len(ranks) for ranks, _, _ in sampled) < FEWEST
    report = AuditReport(
        verdict="passes",
        model=type(model).__name__,
        draft=subject.draft,
        guide=subject.guide,
        rule=subject.rule,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(input_device(model)),
        reference=subject.reference,
        identical=identical,
        noise=noise,
        gap_quantile=quantile,
        p_value=p_value,
        judged=judged,
    )
    verdict, reason = _verdict(report, few, hidden)
    return replace(report, verdict=verdict, words=f"{verdict}: {reason}")


def _verdict(report: AuditReport, few: bool, hidden: bool) -> tuple[Verdict, str]:
    """The verdict, and its reason in a sentence.

    Args:
        report: The numbers.
        few: Whether there are too few tokens for a statistical test.
        hidden: Whether rounding could hide a wrong token.
    """
    judged = report.judged
    where = f"{report.tokens} tokens of {len(judged)} sequences, {report.dtype} on {report.device}"
    basis = (
        f"({where}; noise of block scoring {report.noise:.2g}, 10 % quantile of the plain gaps "
        f"{report.gap_quantile:.2g})"
    )
    faults = [item.fault for item in judged if item.fault is not None]
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
        return "fails", (
            f"{len(faults)} of {len(judged)} sequences leave the distribution; "
            f"{first.case} at position {first.position} {what} {basis}"
        )
    if report.p_value is not None:
        chance = f"p = {report.p_value:.2g}, {where}"
        if report.p_value < LEVEL:
            return "fails", f"the tokens were not drawn from the model's distribution ({chance})"
        if few:
            reason = f"{FEWEST} tokens are needed to judge a distribution ({chance})"
            return "inconclusive", reason
        reason = f"no difference from the model's distribution was found, no proof ({chance})"
        return "passes", reason
    ended = [item for item in judged if item.cut]
    if ended:
        return "inconclusive", (
            f"{len(ended)} of {len(judged)} sequences end where the model goes on, "
            f"{ended[0].case} after {ended[0].tokens} tokens; if a limit cut them there, give it "
            f"as max_new_tokens {basis}"
        )
    if hidden:
        return "inconclusive", (
            "rounding is as large as the gaps between the best two tokens, so a wrong token could "
            f"pass for it {basis}; audit in float32"
        )
    worst_block = max(item.block_difference or 0.0 for item in judged)
    remark = ""
    if worst_block > SUSPECT * report.noise:
        remark = (
            f"; yet the drafted passes' logits are off by {worst_block:.2g}, which is more than "
            "rounding and points to a fault that has not shown in a token"
        )
    if report.identical:
        return "passes", f"token for token the same as {report.reference} {basis}{remark}"
    flips = sum(item.flips for item in judged)
    found = "every token is the plain distribution's own choice"
    if flips:
        worst = max(item.worst_gap for item in judged)
        found = f"{flips} tokens are not the model's own choice, each within rounding, the "
        found += f"largest gap being {worst:.2g}"
    return "passes", f"{found} {basis}{remark}"
