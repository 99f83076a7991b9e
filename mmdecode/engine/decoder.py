"""START HERE: `Decoder`, and the one decoding loop of this library.

A `Decoder` joins three exchangeable parts: a *draft* that proposes tokens, a *guide* that sets the
law the tokens must follow, and an *accept* rule that decides how much of a proposal is kept. It is
a callable for ``model.generate(..., custom_generate=decoder)``: transformers prepares inputs,
processors and stopping criteria, and `Decoder.__call__` is the loop.

Read on: `contracts` (what the parts promise), `proposal` (trees of tokens), `branch` (one forward
pass over root and nodes), `law` (the caller's processors at every node), `stop` (where a block is
cut), `noise` (why a seed gives the same tokens with and without a draft).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from warnings import warn

import torch
from torch import Tensor

from mmdecode import registry
from mmdecode._compat import arguments_of_generate
from mmdecode.engine import attention, capture, checks, setup
from mmdecode.engine.attention import AttentionEdit
from mmdecode.engine.branch import MAIN, ModelBranches, model_name, refuse_closed
from mmdecode.engine.contracts import (
    Accept,
    BranchSpec,
    Context,
    Draft,
    Guide,
    Needs,
    Outcome,
    Scorer,
    Scores,
    needs_of,
    plain_main,
)
from mmdecode.engine.law import Law, Processors, rows_along
from mmdecode.engine.proposal import Kind, Proposal
from mmdecode.engine.stats import Stats
from mmdecode.engine.stop import Stopping
from mmdecode.errors import IncompatibleError, OptionError

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

MODES = ("auto", "fastest")

MAX_NODES = 256
"""Most nodes of a proposal."""


@dataclass(frozen=True)
class Step:
    """What a guide made of one committed token, as a trace records it.

    Attributes:
        survivors: Tokens that the guided law leaves, before the caller's processors.
        changed: Whether its likeliest token is another than the model's own; ``None``: not known,
            since the guide edits or replaces the main branch (see `contracts.plain_main`).
        distances: By branch, the largest difference of a log-probability from the main branch's.
        total: S, the sum of the branch weights: with another than 1, agreeing branches sharpen or
            flatten the law. ``None``: the guide has none.
    """

    survivors: int
    changed: bool | None
    distances: Mapping[str, float]
    total: float | None = None


@dataclass(frozen=True)
class Round:
    """One round of one row, as a trace records it.

    Attributes:
        drafted: Tokens of the proposal's first-ranked chain.
        accepted: Tokens of the accepted path.
        decided: The token that the law decided after the path.
        bonus: Whether the path ended at a leaf, so that ``decided`` corrects nothing.
        kept: Tokens committed after stop rules.
        steps: What the guide made of each of them; empty without a guide.
        opening: Logits ``(V,)`` at the row's first token by branch, ``"guided"`` among them: the
            guided law before a plausibility cut. ``None`` in later rounds.
    """

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    decided: int
    bonus: bool
    kept: int
    steps: tuple[Step, ...] = ()
    opening: Mapping[str, Tensor] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Guided:
    """What a scoring pass says: the main branch's scores and the guided logits.

    ``branches`` are the logits of all branches, and of the guided law before a plausibility cut,
    where a trace wants them, and ``total`` is S, ``(B, N + 1)`` where it changes by position.
    """

    main: Scores
    logits: Tensor
    branches: Mapping[str, Tensor] = field(default_factory=dict)
    total: float | Tensor | None = None


@dataclass(frozen=True)
class Settled:
    """What a round leaves: the next proposal, `Stats` counts ``(B, 4)``, numbers for the host."""

    proposal: Proposal
    counts: Tensor
    numbers: Tensor


@dataclass(frozen=True)
class Status:
    """What the host knows of a round: the one transfer."""

    open: int
    longest: int
    width: int


class Decoder:
    """A draft, a guide and an acceptance rule, as a callable for ``generate``.

    Args:
        draft: A `Draft`, or its name with options (``"lookup:length=8"``); ``None`` drafts nothing.
        guide: A `Guide`, or its name with options (``"cfg:scale=3"``); ``None``: the model's law.
        accept: A rule, its name, ``"auto"`` or ``"fastest"``. ``auto`` resolves per call: greedy
            generation keeps exact matches, sampling uses the coupled rule, whose tokens for one
            seed are the same with any draft and in any batch. ``fastest`` samples with the exact
            rule that accepts most of what the draft proposes.
        seed: Seed of the keyed noise; ``None`` draws one per call from torch's global generator.
        compile: On CUDA, capture rounds in graphs and replay them; elsewhere, compile the forward
            pass, which takes up to a minute per shape. What cannot be captured or compiled is run
            as usual, with a warning that says why. See `mmdecode.engine.capture`.

    Attributes:
        stats: Counters; they accumulate over calls until ``stats.reset()``.
        trace: Set to a list to record what was drafted and kept: each call appends one list of
            `Round` per row. Costs a synchronisation per round.

    Raises:
        UnknownNameError: A name is not registered.
        IncompatibleError: The rule cannot judge what the draft proposes, or the guide looks at what
            no round shows.
    """

    def __init__(
        self,
        draft: Draft | str | None = None,
        guide: Guide | str | None = None,
        accept: Accept | str = "auto",
        seed: int | None = None,
        compile: bool = False,
    ) -> None:
        self.draft: Draft = (
            registry.create("draft", draft)
            if isinstance(draft, str)
            else NoDraft()
            if draft is None
            else draft
        )
        self.guide: Guide | None = (
            registry.create("guide", guide) if isinstance(guide, str) else guide
        )
        self.accept: Accept | str = (
            registry.create("accept", accept)
            if isinstance(accept, str) and accept not in MODES
            else accept
        )
        for part, given in (("draft", self.draft), ("guide", self.guide), ("accept", self.accept)):
            _refuse_no_part(part, given)
        if not isinstance(self.accept, str):
            self._kind(self.accept)
        if seed is not None and (isinstance(seed, bool) or not hasattr(seed, "__index__")):
            raise OptionError(f"seed={seed!r}; expected a whole number, or None to draw one")
        looks = getattr(self.guide, "looks", ())
        if looks:
            raise IncompatibleError.between(
                f"guide {type(self.guide).__name__}",
                "Decoder",
                f"the guide looks {' and '.join(looks)}, a round shows the root and drafted nodes, "
                "each with its own prefix and scores",
                "leave the guide out, or write it as a function of these",
            )
        self.seed = seed
        self.compile = compile
        self.stats = Stats()
        self.trace: list[list[Round]] | None = None

    @torch.no_grad()
    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        mm_inputs: Mapping[str, Any] | None = None,
        mm_request: Any = None,
        mm_streamer: Any = None,
        mm_model: Any = None,
        mm_adapter: Any = None,
        stop_strings: str | list[str] | None = None,
        token_healing: bool | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Decodes; called by ``generate``, see transformers' documentation of custom_generate.

        Args:
            model: The model that ``generate`` was called on.
            input_ids: Prompt, padded on the left, ``(B, P)``.
            logits_processor: The caller's processors and warpers.
            stopping_criteria: The caller's.
            generation_config: The call's.
            mm_inputs: Raw inputs for guides and drafts, by name: one entry per row, or, of pixels,
                per image.
            mm_request: Names of the rows for keyed noise; default: a hash of their content.
            mm_streamer: A streamer for the one row of the batch; the caller ends it. One that was
                given to ``generate`` as ``streamer`` is found, fed and ended here.
            mm_model: The model that ``generate`` was called on, which may be one around ``model``.
            mm_adapter: An adapter that is used in the place of the registered one. It builds
                prompts itself, so ``input_ids`` may be empty, ``(B, 0)``: a model that writes in
                another vocabulary than it reads.
            stop_strings: Texts that end a row, by the ``tokenizer`` that ``generate`` was given.
            token_healing: Refused; see `mmdecode.engine.checks`.
            **model_kwargs: What ``generate`` prepared.

        Returns:
            Ids ``(B, P + new)``, or an output object where ``return_dict_in_generate`` is set.

        Raises:
            IncompatibleError: Beams, or other requests a drafted loop cannot honour: see
                `mmdecode.engine.checks.SETTINGS`.
            OptionError: Stop strings without a tokenizer.
        """
        given = arguments_of_generate(model)
        streamer = given.get("streamer")
        try:
            checks.refuse_arguments({**given, "token_healing": token_healing})
            if stop_strings is not None:
                stopping_criteria = setup.with_stop_strings(
                    stopping_criteria, stop_strings, given.get("tokenizer")
                )
            return self._decode(
                model,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                model_kwargs,
                mm_inputs=mm_inputs,
                mm_request=mm_request,
                mm_model=mm_model,
                mm_adapter=mm_adapter,
                streamer=mm_streamer or streamer,
                greets=mm_streamer is not None,
            )
        finally:
            if streamer is not None:
                streamer.end()  # also after an error: somebody may be waiting for it

    def _decode(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        model_kwargs: Mapping[str, Any],
        *,
        mm_inputs: Mapping[str, Any] | None,
        mm_request: Any,
        mm_model: Any,
        mm_adapter: Any,
        streamer: Any,
        greets: bool,
    ) -> Any:
        """As `__call__`; ``greets``: the prompt is put into the streamer, which nobody has done."""
        checks.refuse_settings(config)
        checks.refuse_inputs(input_ids, model_kwargs, own_prompt=mm_adapter is not None)
        checks.refuse_training(model)
        processors, guide = setup.take_over_guidance(logits_processor, self.guide)
        if guide is not None and guide.neutral:
            guide = None
        rule, kind = self._resolve(bool(config.do_sample))
        seed = self.seed
        if seed is None:
            seed = int(torch.randint(2**62, ())) if config.do_sample else 0
        adapter = mm_adapter or registry.adapter_for(model, mm_model)
        wanted = needs_of(guide, adapter)
        _refuse(guide, wanted, adapter)
        ctx = setup.open_context(
            input_ids,
            config,
            model_kwargs,
            seed=seed,
            mm_inputs=mm_inputs,
            mm_request=mm_request,
            spare=MAX_NODES + 1,
            criteria=criteria,
            named=bool(config.do_sample) or guide is not None,
            adapter=adapter,
        )
        own = needs_of(self.draft, adapter)
        ctx.tail = own.tails.get(kind)
        ctx.draft_free = getattr(rule, "draft_free", False)
        ctx.fixed = self.compile
        needs = own.union(wanted)
        checks.refuse_positions(adapter, ctx.prompt_length, ctx.limit)
        if streamer is not None and ctx.batch > 1:
            raise IncompatibleError(
                f"a streamer shows one row, the batch has {ctx.batch}; decode one row at a time"
            )
        run = Run(
            ctx=ctx,
            draft=self.draft,
            guide=guide,
            rule=rule,
            kind=kind,
            scorers=_scorers(adapter, guide, needs, ctx),
            processors=Processors(processors),
            stopping=Stopping(criteria, ctx.ends, ctx.limit),
            stats=self.stats,
            recorder=setup.Recorder(
                bool(config.output_scores), bool(config.output_logits), ctx.batch
            ),
            streamer=streamer,
        )
        if greets:
            streamer.put(input_ids.cpu())
        if self.trace is not None:
            run.trace = [[] for _ in range(ctx.batch)]
            self.trace.extend(run.trace)
        edited = _looks_inside(guide, needs)
        try:
            with attention.switched(model) if edited else nullcontext():
                longest = run.decode()
        finally:
            self.draft.reset()
        checks.warn_beyond_training(adapter, ctx.prompt_length + longest, ctx.prompt_length)
        encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", 0))
        return setup.output(ctx, config, run.recorder, longest, encoder_decoder)

    def _resolve(self, do_sample: bool) -> tuple[Accept, Kind]:
        """The rule of this call and the kind of proposal it gets."""
        if not isinstance(self.accept, str):
            mode = "sample" if do_sample else "greedy"
            if mode not in self.accept.modes:
                raise IncompatibleError.between(
                    f"accept {type(self.accept).__name__}",
                    f"do_sample={do_sample}",
                    f"the rule works in mode {' and '.join(sorted(self.accept.modes))} only",
                    "use accept='auto', which follows do_sample",
                )
            return self.accept, self._kind(self.accept)
        if not do_sample:
            names = ["greedy"]
        elif self.accept == "auto":
            names = ["coupled"]
        else:
            names = ["rejection", "membership"]
        for name in names:
            rule: Accept = registry.create("accept", name)
            if set(rule.kinds) & set(self.draft.kinds):
                return rule, self._kind(rule)
        raise IncompatibleError.between(
            f"accept={self.accept!r}",
            f"draft {type(self.draft).__name__}",
            f"no exact rule takes proposals of kind {', '.join(self.draft.kinds)}",
            "use accept='auto'",
        )

    def _kind(self, rule: Accept) -> Kind:
        for kind in rule.kinds:  # in the rule's order of preference
            if kind in self.draft.kinds:
                return kind
        raise IncompatibleError.between(
            f"accept {type(rule).__name__}",
            f"draft {type(self.draft).__name__}",
            f"the rule takes proposals of kind {', '.join(rule.kinds)}, the draft makes "
            f"{', '.join(self.draft.kinds)}",
            f"use accept='auto', or {getattr(self.draft, 'advice', 'another draft')}",
        )


_MEMBERS = {
    "draft": ("kinds", "needs", "begin", "propose", "observe"),
    "guide": ("needs", "branches", "begin", "apply"),
    "accept": ("guarantee", "kinds", "modes", "__call__"),
}
"""What a part of a decoder has at least."""


def _refuse_no_part(part: str, given: Any) -> None:
    """Refuses what is no part of a decoder; nothing, and names of rules, are.

    Raises:
        OptionError: It lacks what such a part has.
    """
    if given is None and part == "guide":
        return
    if isinstance(given, str) and part == "accept":
        return
    missing = [name for name in _MEMBERS[part] if not hasattr(given, name)]
    if missing or isinstance(given, type):
        why = "it is a class; make one" if isinstance(given, type) else f"no {missing[0]}"
        raise OptionError(
            f"{part}={given!r} is no {part} ({why}); give a name as 'mmdecode methods {part}' "
            "lists them, with options as name:key=value, or an object"
        )


@dataclass
class Run:
    """One call: the loop and what it moves."""

    ctx: Context
    draft: Draft
    guide: Guide | None
    rule: Accept
    kind: Kind
    scorers: list[Scorer]
    processors: Processors
    stopping: Stopping
    stats: Stats
    recorder: setup.Recorder
    streamer: Any = None
    trace: list[list[Round]] | None = None
    constants: Any = None  # of the guide
    shortest: int = 0  # open row's length at the last transfer

    def decode(self) -> int:
        """Runs to the end of every row; returns the length of the longest."""
        ctx = self.ctx
        scores: dict[str, Scores] = {}
        for scorer in self.scorers:
            scores |= scorer.prefill(ctx, scores)
        self.constants = self.guide.begin(ctx, scores) if self.guide else None
        self.replace(scores)
        ctx.branch = next((s for s in self.scorers if "main" in _branches(s)), None)
        self.draft.begin(ctx, _main(scores), self.kind)
        self.stats.calls += 1

        # round 0: the prompt's last row decides, nothing was drafted
        nothing = Proposal.empty(ctx.batch, ctx.device)
        settled = self.settle(nothing, self.guided(nothing, scores), first=True)
        del scores  # with the states of the whole prompt
        self.stats.prefilled(settled.counts)
        step = self.captured() if ctx.fixed and capture.available(ctx.device) else self.round
        while True:
            status = self.transfer(settled)
            if not status.open:
                return status.longest
            settled = step(settled.proposal.narrow(status.width))
            self.stats.scored(settled.counts)

    def replace(self, scores: dict[str, Scores]) -> None:
        """Lets go of branches that were read with the prompt only; see `BranchSpec.replaces`."""
        for spec in self.guide.branches if self.guide else ():
            if spec.replaces is None:
                continue
            scores[spec.replaces] = scores.pop(spec.name)
            kept: list[Scorer] = []
            for scorer in self.scorers:
                if isinstance(scorer, ModelBranches):
                    names = [other.name for other in scorer.specs]
                    if names == [spec.replaces]:
                        continue
                    scorer.rename(spec.name, spec.replaces)
                kept.append(scorer)
            self.scorers = kept

    def round(self, proposal: Proposal) -> Settled:
        """Root and nodes are scored, then settled."""
        return self.settle(proposal, self.score(proposal))

    def score(self, proposal: Proposal) -> Guided:
        """What the branches say of root and nodes, stage by stage, and the guide makes of it."""
        scores: dict[str, Scores] = {}
        for scorer in self.scorers:
            scores |= scorer.score(self.ctx, proposal, scores)
        return self.guided(proposal, scores)

    def guided(self, proposal: Proposal, scores: dict[str, Scores]) -> Guided:
        """The main branch's scores beside the guided logits."""
        logits = scores["main"].logits
        if self.guide:
            logits = self.guide.apply(self.constants, self.ctx, proposal, scores)
        if self.trace is None:
            return Guided(_main(scores), logits)
        branches = {
            name: score.logits for name, score in scores.items() if score.candidates is None
        }
        combine = getattr(self.guide, "combine", None)
        uncut = combine(self.constants, self.ctx, proposal, scores) if combine else logits
        total = getattr(self.guide, "total", None)
        if callable(total):
            total = total(self.constants, self.ctx, proposal, scores)
        return Guided(_main(scores), logits, branches | {"guided": uncut}, total)

    def settle(self, proposal: Proposal, scored: Guided, first: bool = False) -> Settled:
        """Decides what of a scored proposal is kept, commits it, and proposes again."""
        ctx, main = self.ctx, scored.main
        law = Law(scored.logits, ctx, proposal, self.processors)
        outcome = self.rule(proposal, law, ctx.noise, ctx)
        counts = self.commit(proposal, scored, law, outcome, first)
        self.draft.observe(ctx, proposal, main, outcome)
        # before the transfer, so that one transfer tells the next proposal's width too
        proposal = self.draft.propose(ctx, self.budget)
        if proposal.size:
            self.check(proposal)
            proposal = proposal.masked(self.useful(proposal))
        return Settled(proposal, counts, self.numbers(proposal))

    @property
    def budget(self) -> int:
        """Levels of tokens that could still be committed in some row."""
        ctx = self.ctx
        return MAX_NODES if ctx.fixed else min(ctx.limit - self.shortest - 1, MAX_NODES)

    def commit(
        self, proposal: Proposal, scored: Guided, law: Law, outcome: Outcome, first: bool
    ) -> Tensor:
        """Cuts the block where a row ends, writes it, and moves caches; returns `Stats` counts."""
        ctx = self.ctx
        path, accepted = outcome.path, outcome.num_accepted
        order = torch.arange(path.shape[1] + 1, device=ctx.device)
        tokens = proposal.tokens.gather(1, path.clamp_min(0))
        block = outcome.next_token[:, None]
        if path.shape[1]:
            block = torch.where(
                order < accepted[:, None], torch.nn.functional.pad(tokens, (0, 1)), block
            )
        count = torch.where(ctx.open, accepted + 1, 0)
        count, ended = self.stopping.cut(ctx, block, count)
        kept = order < count[:, None]
        for name in self.recorder.rows:
            along = law.along(path) if name == "scores" else rows_along(scored.main.logits, path)
            self.recorder.add(name, along, count)
        if self.streamer is not None:
            self.streamer.put(block[0, : int(count[0])].cpu())
        if self.trace is not None:
            steps = _steps(scored, path, count, plain_main(self.guide)) if self.guide else {}
            _record(self.trace, proposal, tokens, outcome, count, steps, scored, first)
        columns = ctx.end()[:, None] + order
        ctx.ids.scatter_(1, columns, torch.where(kept, block, ctx.ids.gather(1, columns)))
        if not first:
            for scorer in self.scorers:
                scorer.keep(path, count, proposal.is_chain)
        drafted = (proposal.tokens >= 0).sum(1)
        counts = torch.stack([ctx.open.long(), drafted, accepted, count], 1)
        # in place: a captured round finds its tensors where they were
        ctx.length += count
        ctx.rounds += ctx.open
        ctx.open &= ~ended
        return counts

    def check(self, proposal: Proposal) -> None:
        """Raises where a draft does not keep what it promised."""
        if proposal.kind != self.kind:
            raise IncompatibleError.between(
                f"draft {type(self.draft).__name__}",
                f"accept {type(self.rule).__name__}",
                f"a proposal of kind {self.kind!r} was agreed, this one is {proposal.kind!r}",
                "repair the draft: begin tells it the kind",
            )
        if proposal.size > MAX_NODES:
            raise OptionError(
                f"draft {type(self.draft).__name__} proposes {proposal.size} nodes; at most "
                f"{MAX_NODES} are scored at once: make its tree smaller"
            )

    def useful(self, proposal: Proposal) -> Tensor:
        """Nodes that could still be committed: of open rows, and with room for a token after."""
        _, depths, _ = proposal.structure()
        room = (self.ctx.limit - self.ctx.length)[:, None]
        return (depths < room) & self.ctx.open[:, None] & (proposal.tokens >= 0)

    def numbers(self, proposal: Proposal) -> Tensor:
        """What the host must know of a round: open rows, longest, shortest, width; ``(4,)``."""
        ctx = self.ctx
        order = torch.arange(1, proposal.size + 1, device=ctx.device)
        width = (
            (order * (proposal.tokens >= 0)).amax() if proposal.size else ctx.length.new_zeros(())
        )
        shortest = torch.where(ctx.open, ctx.length, ctx.limit).amin()
        return torch.stack([ctx.open.sum(), ctx.length.amax(), shortest, width])

    def transfer(self, settled: Settled) -> Status:
        """The one synchronisation of a round."""
        is_open, longest, self.shortest, width = settled.numbers.tolist()
        ctx = self.ctx
        ctx.longest = min(capture.coarse(longest), ctx.limit) if ctx.fixed else longest
        return Status(is_open, longest, width_bucket(width, settled.proposal.size))

    def captured(self) -> Callable[[Proposal], Settled]:
        """A round that replays what was captured of an earlier one of its shape.

        All of it, or the scoring alone where the rest has something to do on the host.
        """
        own = [type(s).__name__ for s in self.scorers if not isinstance(s, ModelBranches)]
        if own:
            warn(
                f"no round is captured: {own[0]} scores a branch by rules of its own", stacklevel=2
            )
            return self.round
        reason = self.host_work()
        if reason is None:
            return capture.Replayed(self.round, self.ctx)
        warn(f"of each round the scoring alone is captured: {reason}", stacklevel=2)
        score = capture.Replayed(self.score, self.ctx)
        return lambda proposal: self.settle(proposal, score(proposal))

    def host_work(self) -> str | None:
        """Why a round cannot be replayed as a whole."""
        if not self.processors.vectorised:
            return "a logits processor is of a type that is run on the host"
        if self.stopping.others or self.stopping.per_call:
            return "a stopping criterion is run on the host"
        if self.recorder.rows or self.streamer is not None or self.trace is not None:
            return "scores, a stream or a trace were asked for"
        if not getattr(self.draft, "static", False):
            return f"draft {type(self.draft).__name__} does not say that its rounds are alike"
        return None


class NoDraft:
    """Proposes nothing: one token per row and round."""

    kinds: tuple[Kind, ...] = ("deterministic",)
    needs = Needs()
    static = True

    def begin(self, ctx: Context, prefill: Scores, kind: Kind) -> None:
        """Nothing to prepare."""

    def propose(self, ctx: Context, budget: int) -> Proposal:
        """The empty proposal."""
        return Proposal.empty(ctx.batch, ctx.device)

    def observe(self, ctx: Context, proposal: Proposal, scores: Scores, outcome: Outcome) -> None:
        """Nothing to learn."""

    def reorder(self, rows: Tensor) -> None:
        """Nothing to move."""

    def reset(self) -> None:
        """Nothing to forget."""


def _main(scores: Mapping[str, Scores]) -> Scores:
    """What the main branch says, with the others beside it."""
    others = {name: score for name, score in scores.items() if name != "main"}
    return replace(scores["main"], beside=others) if others else scores["main"]


def _branches(scorer: Scorer) -> list[str]:
    """Names of the model's branches that a scorer holds."""
    return [spec.name for spec in scorer.specs] if isinstance(scorer, ModelBranches) else []


def _looks_inside(guide: Guide | None, needs: Needs) -> bool:
    """Whether attention is edited or read in this call."""
    if needs.attention or needs.text_attention:
        return True
    return any(isinstance(edit, AttentionEdit) for edit in getattr(guide, "edits", ()))


def width_bucket(width: int, size: int) -> int:
    """Nodes to score when the widest row uses ``width`` of ``size``: 0, powers of two, or all."""
    if width == 0:
        return 0
    return min(size, 1 << (width - 1).bit_length())


def _refuse(guide: Guide | None, needs: Needs, adapter: Any) -> None:
    """Raises where a guide's branches clash, or it wants what the adapter does not show."""
    if guide is None:
        return
    name = f"guide {type(guide).__name__}"
    passes = [MAIN, *(s for s in guide.branches if s.build is None and s.model is None)]
    stages = {spec.name: spec.stage for spec in passes}
    for spec in guide.branches:
        beside = [n for n, stage in stages.items() if stage == stages.get(spec.replaces or "")]
        if len(beside) > 1:
            raise IncompatibleError.between(
                name,
                "Decoder",
                f"branch {spec.name!r} answers in the place of {spec.replaces!r}, which shares a "
                f"pass with {', '.join(n for n in beside if n != spec.replaces)}",
                "give the branches beside it a later stage",
            )
    refuse_closed(name, adapter, getattr(guide, "edits", ()), needs)
    if getattr(guide, "images", False) and not getattr(adapter, "shows_images", False):
        raise IncompatibleError.between(
            name,
            model_name(adapter),
            "the guide needs images, and this model reads none itself",
            "use a vision-language model; one that hands its images to an inner language model "
            "needs mmdecode.generate, or generate inside mmdecode.attach(model)",
        )
    if getattr(guide, "audio", False) and not getattr(adapter, "hears_audio", False):
        raise IncompatibleError.between(
            name,
            model_name(adapter),
            "the guide changes what is heard, and this model hears nothing",
            "use a Whisper model",
        )


def _scorers(adapter: Any, guide: Guide | None, needs: Needs, ctx: Context) -> list[Scorer]:
    """By stage; within a stage the main model's branches, other models, then a guide's own."""
    specs = list(guide.branches) if guide else []
    edits = getattr(guide, "edits", ())
    groups: dict[tuple[int, int], list[BranchSpec]] = {(1, 0): [MAIN]}
    built: list[Scorer] = []
    for spec in specs:
        if spec.build is not None:
            built.append(spec.build(ctx))
        else:
            groups.setdefault((spec.stage, id(spec.model) if spec.model else 0), []).append(spec)
    scorers: list[Scorer] = []
    for (_, other), members in groups.items():
        part = registry.adapter_for(members[0].model) if other else adapter
        if other and part.vocab != adapter.vocab:
            raise OptionError(
                f"branch {members[0].name!r} has a vocabulary of {part.vocab}, the main model one "
                f"of {adapter.vocab}; expected the same tokenizer"
            )
        scorers.append(ModelBranches(part, members, Needs() if other else needs, edits))
    return sorted(scorers + built, key=lambda scorer: scorer.stage)


def _steps(scored: Guided, path: Tensor, count: Tensor, plain: bool) -> dict[int, tuple[Step, ...]]:
    """By row, what the guide made of the tokens it keeps; ``plain``: main is the model as it is."""
    guided, main = rows_along(scored.logits, path), rows_along(scored.main.logits, path)
    survivors = (guided > -torch.inf).sum(-1).tolist()
    changed = (guided.argmax(-1) != main.argmax(-1)).tolist()
    total = scored.total
    totals = (
        rows_along(total[..., None], path)[..., 0].tolist()
        if isinstance(total, Tensor)
        else [[total] * len(row) for row in survivors]
    )
    reference = main.log_softmax(-1)
    distances = {
        name: (rows_along(logits, path).log_softmax(-1) - reference).abs().amax(-1).tolist()
        for name, logits in scored.branches.items()
        if name not in ("main", "guided")
    }
    return {
        row: tuple(
            Step(
                survivors=survivors[row][i],
                changed=changed[row][i] if plain else None,
                distances={n: d[row][i] for n, d in distances.items()},
                total=totals[row][i],
            )
            for i in range(kept)
        )
        for row, kept in enumerate(count.tolist())
    }


def _record(
    trace: list[list[Round]],
    proposal: Proposal,
    tokens: Tensor,
    outcome: Outcome,
    count: Tensor,
    steps: Mapping[int, tuple[Step, ...]],
    scored: Guided,
    first: bool,
) -> None:
    parents, _, _ = proposal.structure()
    parents = parents.expand(len(count), -1)
    for row, kept in enumerate(count.tolist()):
        if not kept:
            continue
        chain, node = [], -1
        for child, parent in enumerate(parents[row].tolist()):
            if parent == node and int(proposal.tokens[row, child]) >= 0:
                chain.append(int(proposal.tokens[row, child]))
                node = child
        accepted = int(outcome.num_accepted[row])
        end = int(outcome.path[row, accepted - 1]) if accepted else -1
        below = (parents[row] == end) & (proposal.tokens[row] >= 0)
        trace[row].append(
            Round(
                drafted=tuple(chain),
                accepted=tuple(tokens[row, :accepted].tolist()),
                decided=int(outcome.next_token[row]),
                bonus=not bool(below.any()),
                kept=kept,
                steps=steps.get(row, ()),
                opening={n: v[row, 0].cpu() for n, v in scored.branches.items()} if first else None,
            )
        )
