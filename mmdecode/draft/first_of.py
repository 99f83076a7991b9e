"""Two drafters in order: the second proposes in rows where the first proposes nothing.

Typically the first is cheap and often right when it proposes something, such as copying from a
text, and the second always proposes something. Both drafters are given the result of every round,
so the second one is up to date when it is used.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmdecode import registry
from mmdecode.draft.composed import drafter_of
from mmdecode.draft.source import Source
from mmdecode.engine.adapter import Adapter
from mmdecode.engine.call import Call
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.engine.contracts import (
    Block,
    BranchOutput,
    Drafter,
    DraftSession,
    Requirements,
)
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import IncompatibleError, OptionError


class FirstOf(Drafter):
    """Proposes the tokens of ``first``; in rows where it proposes none, the tokens of ``second``.

    Args:
        first: The preferred drafter, or its name with options, such as ``lookup:length=8``. It must
            offer deterministic proposals.
        second: The fallback drafter, in the same form.

    Lossless under every exact acceptance rule.

    Raises:
        IncompatibleError: A drafter has no deterministic proposals, or cannot continue after tokens
            that the other one proposed.
        OptionError: One of the arguments is not a drafter.
    """

    summary = "a given text, such as the last window's; where it has none, another drafter"
    source = "arXiv:2304.04487, Yang et al. 2023, in front of any draft"

    def __init__(self, first: Drafter | str, second: Drafter | str) -> None:
        self.first, self.second = drafter_of(first), drafter_of(second)
        for draft in (self.first, self.second):
            if not draft.capabilities.composable:
                _refuse(draft, "it cannot continue after tokens that another drafter proposed")
            if "deterministic" not in draft.kinds:
                _refuse(
                    draft, f"it proposes {', '.join(draft.kinds)} tokens, not deterministic ones"
                )
        both = [draft.capabilities for draft in (self.first, self.second)]
        self.capabilities = DrafterCapabilities(
            graph_safe=all(one.graph_safe for one in both),
            follows_target=any(one.follows_target for one in both),
            repeatable=all(one.repeatable for one in both),
        )

    @classmethod
    def from_options(
        cls,
        second: str,
        length: int | None = None,
        first: str | None = None,
        model_id: str | None = None,
        target: Any = None,
        tokenizer: Any = None,
    ) -> FirstOf:
        """Builds the drafter from options, as in ``first_of:first=ctc:least=2,second=medusa``.

        Each drafter may have one option: a comma begins the next option of ``first_of``.

        Args:
            second: Name of the second drafter.
            length: Maximum number of tokens that `Source` copies, 16 by default; it copies where
                the last two output tokens (or all, if there are fewer) occur in its source text.
            first: Name of the first drafter; ``None``: `Source`.
            model_id: Passed to both drafters.
            target: Passed to both drafters.
            tokenizer: Passed to both drafters.

        Raises:
            OptionError: ``length`` is given with another first drafter than `Source`.
        """
        if length is not None and first is not None:
            raise OptionError(
                f"length={length} is that of a given text; with first={first!r} write it as an "
                f"option of that drafter, as in first={first.partition(':')[0]}:length={length}"
            )
        known = {"model_id": model_id, "target": target, "tokenizer": tokenizer}
        copied = Source(16 if length is None else length, least=2)
        leading = copied if first is None else registry.create("draft", first, **known)
        return cls(leading, registry.create("draft", second, **known))

    def needs(self, adapter: Adapter) -> Requirements:
        """Returns the model internals that either drafter needs."""
        return self.first.needs(adapter).union(self.second.needs(adapter))

    def begin(self, call: Call, prefill: BranchOutput) -> DraftSession:
        """Opens a session of each drafter."""
        first, second = self.first.begin(call, prefill), self.second.begin(call, prefill)
        return FirstOfSession(call, first, second)


def _refuse(draft: Drafter, because: str) -> NoReturn:
    raise IncompatibleError.between(
        f"draft {type(draft).__name__}",
        "FirstOf",
        because,
        "use lookup, source, recycling or medusa",
    )


class FirstOfSession(DraftSession):
    """Sessions of both drafters; the second proposes in rows where the first does not."""

    def __init__(self, call: Call, first: DraftSession, second: DraftSession) -> None:
        super().__init__(call)
        self.first, self.second = first, second
        self.unguided = first.unguided or second.unguided
        self.paths = Counter(first.paths) + Counter(second.paths)

    def propose(self, budget: int) -> Proposal:
        """Merges both proposals by row; if their trees differ, each row has its own tree."""
        first, second = self.first.propose(budget), self.second.propose(budget)
        if not first.size or not second.size:
            return first if first.size else second
        width = max(first.size, second.size)
        mine = (first.tokens >= 0).any(1, keepdim=True)

        def joined(one: Tensor, other: Tensor) -> Tensor:
            one, other = (
                pad(part.expand(self.call.batch, -1), (0, width - part.shape[1]), value=-1)
                for part in (one, other)
            )
            return torch.where(mine, one, other)

        tokens = joined(first.tokens, second.tokens)
        if first.is_chain and second.is_chain:
            return Proposal(tokens=tokens, kind="deterministic")
        parents = joined(first.structure()[0], second.structure()[0])
        return Proposal(tokens=tokens, kind="deterministic", parents=parents)

    def observe(self, proposal: Proposal, output: BranchOutput, block: Block) -> None:
        """Passes the result of the round to both sessions, also to the one that was not used."""
        self.first.observe(proposal, output, block)
        self.second.observe(proposal, output, block)

    def close(self) -> None:
        """Closes both sessions."""
        try:
            self.first.close()
        finally:
            self.second.close()
