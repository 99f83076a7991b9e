"""A smaller model with the same vocabulary drafts a chain, one token after the other.

Its branch lags one token behind on purpose: each round begins by re-reading the last two committed
tokens, which overwrites whatever a rejected draft left in its cache and covers the token that a
fully accepted draft never read. Rows therefore need no case distinction.

Source: Leviathan et al. 2023, arXiv:2211.17192. A Whisper assistant hears the target's encoder
states when both have the same width (distil-Whisper shares the encoder).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from mmdecode import registry
from mmdecode.checkpoints import config_of, loading, local_path
from mmdecode.engine.branch import MAIN, ModelBranches, chain
from mmdecode.engine.cache import bucket
from mmdecode.engine.contracts import Context, Guide, Needs, Outcome, Scores
from mmdecode.engine.noise import Role
from mmdecode.engine.proposal import Kind, Proposal
from mmdecode.errors import IncompatibleError, InputError, OptionError


class Assistant:
    """Drafts ``length`` tokens with ``model``.

    Args:
        model: A model with the target's vocabulary.
        length: Tokens per round; 0 is neutral.
        guide: What drafts are guided by, with branches of the drafting model: drafts then follow a
            target that is guided alike. It must not look inside the model.
        warp: What is made of the logits before a token is drawn, likewise.

    Proposes argmax tokens (``deterministic``), draws (``iid``, with their law), or argmax of
    log q plus the target's own Gumbel noise (``coupled``), as the rule prefers.
    """

    kinds: tuple[Kind, ...] = ("deterministic", "iid", "coupled")
    needs = Needs()
    static = True
    own_tokens_only = True  # its cache lacks what another draft proposed

    def __init__(
        self,
        model: Any,
        length: int = 5,
        guide: Guide | None = None,
        warp: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if length < 0:
            raise OptionError(f"length must be >= 0, got {length}")
        self.model, self.length, self.guide, self.warp = model, length, guide, warp
        self._constants: Any = None  # of the guide
        self._branch: ModelBranches | None = None
        self._kind: Kind = "deterministic"
        self._loaded: dict[type, Any] = {}  # by the target's class, also for copies of this

    @classmethod
    def from_options(cls, model: Any, length: int = 5) -> Assistant:
        """From a string: ``model`` is a folder or Hub name, or an object from the context.

        What is named is loaded when decoding begins, since the target decides its class and where
        it goes.

        Raises:
            InputError: There is no checkpoint of that name.
        """
        if isinstance(model, str):
            model = local_path(model)
            _type_of(model)  # refuse before anything is decoded
        return cls(model, length)

    def under(self, guide: Guide | None, warp: Callable[[Tensor], Tensor] | None) -> Assistant:
        """This assistant with the law of a target, where it has none of its own."""
        alike = copy.copy(self)
        alike.guide, alike.warp = self.guide or guide, self.warp or warp
        return alike

    def begin(self, ctx: Context, prefill: Scores, kind: Kind) -> None:
        """Reads the prompt with the drafting model."""
        self._kind = kind
        self._branch = self._opened(ctx, prefill)
        scores = self._branch.prefill(ctx, {})
        if self.guide is not None:
            self._constants = self.guide.begin(ctx, scores)

    def _opened(self, ctx: Context, prefill: Scores) -> ModelBranches:
        """The branch that drafts, before it has read anything."""
        model = self.model
        if isinstance(model, str):
            target = ctx.adapter.model
            if type(target) not in self._loaded:
                self._loaded[type(target)] = _loaded(model, target)
            model = self._loaded[type(target)].to(device=ctx.device, dtype=target.dtype)
        # a model of image tokens knows what it takes to write the same images
        adapter = getattr(ctx.adapter, "beside", registry.adapter_for)(model)
        if adapter.vocab != prefill.logits.shape[-1]:
            raise IncompatibleError.between(
                f"assistant {type(model).__name__}",
                "the target model",
                f"its vocabulary has {adapter.vocab} tokens, the target's "
                f"{prefill.logits.shape[-1]}",
                "use an assistant with the same tokenizer",
            )
        return ModelBranches(adapter, [MAIN, *(self.guide.branches if self.guide else ())])

    def propose(self, ctx: Context, budget: int) -> Proposal:
        """A chain per row."""
        length, branch = min(self.length, budget), self._branch
        assert branch is not None, "begin was not called"
        if length <= 0:
            return Proposal.empty(ctx.batch, ctx.device)
        tokens, laws = [], []
        feed, offset = ctx.last(self._lag(ctx)), 0
        # since the transfer each row grew by one block, at most self.length + 1 tokens
        longest = min(ctx.longest + self.length + 1, ctx.limit)
        visible = bucket(branch.width + longest + length)
        for step in range(length):
            block = chain(feed.shape[1], ctx.device)
            feed = feed.repeat(len(branch.specs), 1)
            states, _ = branch.run(feed, *block, visible=visible, offset=offset)
            offset += feed.shape[1]
            position = (ctx.length + step)[:, None]
            logits = self._law(ctx, branch, states["last"][:, -1:], position)
            token = self._draw(ctx, logits, position)
            laws.append(logits)
            tokens.append(token)
            feed = token[:, None]
        log_q = torch.stack(laws, 1) if self._kind == "iid" else None
        return Proposal(tokens=torch.stack(tokens, 1), kind=self._kind, log_q=log_q)

    def _law(self, ctx: Context, branch: ModelBranches, last: Tensor, position: Tensor) -> Tensor:
        """Logits ``(B, V)`` at ``position (B, 1)`` of states ``(R, 1, H)``."""
        logits = branch.adapter.head(last).float()
        if self.guide is not None:
            parts = zip(branch.specs, logits.split(ctx.batch), strict=True)
            scores = {spec.name: Scores(logits=part) for spec, part in parts}
            ahead = replace(ctx, length=position[:, 0])
            nothing = Proposal.empty(ctx.batch, ctx.device)
            logits = self.guide.apply(self._constants, ahead, nothing, scores)
        layout = getattr(ctx.adapter, "layout", None)
        if layout is not None and layout.binds(logits.shape[-1]):
            logits = logits.masked_fill(~layout.allowed(position, logits.shape[-1]), -torch.inf)
        return logits[:, 0] if self.warp is None else self.warp(logits[:, 0])

    def _lag(self, ctx: Context) -> int:
        """Tokens to read again, of those there are: without a prompt of ids, one at first."""
        return min(2, ctx.prompt_length + ctx.longest + 1)

    def _draw(self, ctx: Context, logits: Tensor, position: Tensor) -> Tensor:
        if self._kind == "deterministic":
            return logits.argmax(-1)
        role, trial = (Role.TARGET, None) if self._kind == "coupled" else (Role.DRAFT, ctx.rounds)
        gumbel = ctx.noise.gumbel(position, role, logits.shape[-1], trial=trial)
        return (logits + gumbel[:, 0]).argmax(-1)

    def observe(self, ctx: Context, proposal: Proposal, scores: Scores, outcome: Outcome) -> None:
        """Moves the write position behind the last but one committed token."""
        assert self._branch is not None
        start = self._branch.width + ctx.length - self._lag(ctx)
        self._branch.cache.set_start(start.repeat(len(self._branch.specs)))

    def reorder(self, rows: Tensor) -> None:
        """Keeps the rows ``rows``."""
        if self._branch is not None:
            self._branch.reorder(rows)

    def reset(self) -> None:
        """Forgets the call."""
        self._branch = None


def _loaded(path: str, target: Any) -> Any:
    """The model in a folder: one like the target where it says so, else one of text or speech.

    Raises:
        IncompatibleError: It is neither.
        InputError: It cannot be loaded.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSpeechSeq2Seq

    found = _type_of(path)
    with loading(path):
        # the class for text may be another: Emu3's lacks what its whole model's weights are named
        if isinstance(target, PreTrainedModel) and found == target.config.model_type:
            return type(target).from_pretrained(path).eval()
        try:
            encoder_decoder = getattr(config_of(path), "is_encoder_decoder", False)
            auto = AutoModelForSpeechSeq2Seq if encoder_decoder else AutoModelForCausalLM
            return auto.from_pretrained(path).eval()
        except ValueError as error:
            raise IncompatibleError.between(
                f"assistant {path!r}",
                type(target).__name__,
                f"its type is {found!r}, which transformers does not load as a model of text",
                "use one of the target's type, or give a loaded model",
            ) from error


def _type_of(path: str) -> str:
    """What kind of model a checkpoint's configuration says it is.

    Raises:
        InputError: There is none, or it does not say.
    """
    with loading(path):
        found = PreTrainedConfig.get_config_dict(path)[0].get("model_type")
    if found is None:
        raise InputError(
            f"{path} has no config.json that names a model_type; give the folder of a checkpoint, "
            "a Hub id or zoo:NAME"
        )
    return str(found)
