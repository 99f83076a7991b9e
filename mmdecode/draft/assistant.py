"""A smaller model with the same vocabulary drafts a chain, one token after the other.

Its branch lags one token behind on purpose: each round begins by re-reading the last two committed
tokens, which overwrites whatever a rejected draft left in its cache and covers the token that a
fully accepted draft never read. Rows therefore need no case distinction.

Source: Leviathan et al. 2023, arXiv:2211.17192. A Whisper assistant hears the target's encoder
states when both have the same width (distil-Whisper shares the encoder).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmdecode import registry
from mmdecode.engine.branch import MAIN, ModelBranches, chain
from mmdecode.engine.cache import bucket
from mmdecode.engine.contracts import Context, Needs, Outcome, Scores
from mmdecode.engine.noise import Role
from mmdecode.engine.proposal import Kind, Proposal
from mmdecode.errors import IncompatibleError, OptionError


class Assistant:
    """Drafts ``length`` tokens with ``model``.

    Args:
        model: A model with the target's vocabulary.
        length: Tokens per round; 0 is neutral.

    Proposes argmax tokens (``deterministic``), draws (``iid``, with their law), or argmax of
    log q plus the target's own Gumbel noise (``coupled``), as the rule prefers.
    """

    kinds: tuple[Kind, ...] = ("deterministic", "iid", "coupled")
    needs = Needs()
    static = True
    own_tokens_only = True  # its cache lacks what another draft proposed

    def __init__(self, model: Any, length: int = 5) -> None:
        if length < 0:
            raise OptionError(f"length must be >= 0, got {length}")
        self.model, self.length = model, length
        self._branch: ModelBranches | None = None
        self._kind: Kind = "deterministic"
        self._follows = False  # loaded by us: goes where the target is

    @classmethod
    def from_options(cls, model: Any, length: int = 5) -> Assistant:
        """From a string: ``model`` is a folder or Hub name, or an object from the context."""
        if isinstance(model, str):
            from transformers import AutoModelForCausalLM, AutoModelForSpeechSeq2Seq

            from mmdecode.checkpoints import config_of, local_path

            path = local_path(model)
            encoder_decoder = getattr(config_of(path), "is_encoder_decoder", False)
            auto = AutoModelForSpeechSeq2Seq if encoder_decoder else AutoModelForCausalLM
            model = auto.from_pretrained(path)
            draft = cls(model.eval(), length)
            draft._follows = True
            return draft
        return cls(model, length)

    def begin(self, ctx: Context, prefill: Scores, kind: Kind) -> None:
        """Reads the prompt with the drafting model."""
        self._kind = kind
        self._branch = self._opened(ctx, prefill)
        self._branch.prefill(ctx, {})

    def _opened(self, ctx: Context, prefill: Scores) -> ModelBranches:
        """The branch that drafts, before it has read anything."""
        if self._follows:
            self.model.to(device=ctx.device, dtype=ctx.adapter.model.dtype)
        adapter = registry.adapter_for(self.model)
        if adapter.vocab != prefill.logits.shape[-1]:
            raise IncompatibleError.between(
                f"assistant {type(self.model).__name__}",
                "the target model",
                f"its vocabulary has {adapter.vocab} tokens, the target's "
                f"{prefill.logits.shape[-1]}",
                "use an assistant with the same tokenizer",
            )
        return ModelBranches(adapter, [MAIN])

    def propose(self, ctx: Context, budget: int) -> Proposal:
        """A chain per row."""
        length, branch = min(self.length, budget), self._branch
        assert branch is not None, "begin was not called"
        if length <= 0:
            return Proposal.empty(ctx.batch, ctx.device)
        tokens, laws = [], []
        feed, offset = ctx.last(2), 0
        # since the transfer each row grew by one block, at most self.length + 1 tokens
        longest = min(ctx.longest + self.length + 1, ctx.limit)
        visible = bucket(branch.width + longest + length)
        for step in range(length):
            block = chain(feed.shape[1], ctx.device)
            states, _ = branch.run(feed, *block, visible=visible, offset=offset)
            logits = branch.adapter.head(states["last"][:, -1]).float()
            offset += feed.shape[1]
            position = (ctx.length + step)[:, None]
            token = self._draw(ctx, logits, position)
            laws.append(logits)
            tokens.append(token)
            feed = token[:, None]
        log_q = torch.stack(laws, 1) if self._kind == "iid" else None
        return Proposal(tokens=torch.stack(tokens, 1), kind=self._kind, log_q=log_q)

    def _draw(self, ctx: Context, logits: Tensor, position: Tensor) -> Tensor:
        if self._kind == "deterministic":
            return logits.argmax(-1)
        role, trial = (Role.TARGET, None) if self._kind == "coupled" else (Role.DRAFT, ctx.rounds)
        gumbel = ctx.noise.gumbel(position, role, logits.shape[-1], trial=trial)
        return (logits + gumbel[:, 0]).argmax(-1)

    def observe(self, ctx: Context, proposal: Proposal, scores: Scores, outcome: Outcome) -> None:
        """Moves the write position behind the last but one committed token."""
        assert self._branch is not None
        self._branch.cache.set_start(self._branch.width + ctx.length - 2)

    def reorder(self, rows: Tensor) -> None:
        """Keeps the rows ``rows``."""
        if self._branch is not None:
            self._branch.reorder(rows)

    def reset(self) -> None:
        """Forgets the call."""
        self._branch = None
