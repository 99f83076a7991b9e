"""What a trace records: each round's draft, what was kept, and what the guide made of it.

The loop asks a `Tracer` for details while it scores, and shows it what was committed; `NoTrace`,
the default, wants none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput, Guide, plain_main
from mmdecode.engine.proposal import Proposal
from mmdecode.engine.target_logits import rows_along

if TYPE_CHECKING:
    from mmdecode.engine.output import Committed


@dataclass(frozen=True)
class Step:
    """What a guide made of one committed token.

    Attributes:
        survivors: Tokens that the guided distribution leaves, before the caller's processors.
        changed: Whether its most likely token is another than the model's own; ``None``: not known,
            since the guide edits or replaces the main branch (see `contracts.plain_main`).
        distances: By branch, the largest difference of a log-probability from the main branch's.
        total: S, the sum of the branch weights: with another than 1, agreeing branches sharpen or
            flatten the distribution. ``None``: the guide has none.
    """

    survivors: int
    changed: bool | None
    distances: Mapping[str, float]
    total: float | None = None


@dataclass(frozen=True)
class Round:
    """One round of one row.

    Attributes:
        drafted: Tokens of the proposal's first-ranked chain.
        accepted: Tokens of the accepted path.
        decided: The token that the target decided after the path.
        bonus: Whether the path ended at a leaf, so that ``decided`` corrects nothing.
        kept: Tokens committed after stop rules.
        steps: What the guide made of each of them; empty without a guide.
        opening: Logits ``(V,)`` at the row's first token by branch, ``"guided"`` among them: the
            guided logits before a plausibility cut. ``None`` in later rounds.
    """

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    decided: int
    bonus: bool
    kept: int
    steps: tuple[Step, ...] = ()
    opening: Mapping[str, Tensor] | None = field(default=None, repr=False, compare=False)


class Details(NamedTuple):
    """What a trace wants of a scoring pass.

    Attributes:
        branches: Logits of all branches, ``(B, N + 1, V)``, and, as ``"guided"``, those of the
            guide before a plausibility cut.
        total: S, ``(B, N + 1)`` where it changes by position; ``None``: the guide has none.
    """

    branches: Mapping[str, Tensor]
    total: float | Tensor | None


class NoTrace:
    """Records nothing: the default."""

    def details(
        self,
        constants: Any,
        call: Call,
        proposal: Proposal,
        outputs: Mapping[str, BranchOutput],
        logits: Tensor,
    ) -> Details | None:
        """What `Tracer.details` keeps of a pass; here nothing."""
        return None


class Tracer(NoTrace):
    """Records each row's rounds.

    Args:
        guide: The call's.
        batch: Rows.

    Attributes:
        rows: The rounds of each row.
    """

    def __init__(self, guide: Guide | None, batch: int) -> None:
        self.guide = guide
        self.rows: list[list[Round]] = [[] for _ in range(batch)]

    def details(
        self,
        constants: Any,
        call: Call,
        proposal: Proposal,
        outputs: Mapping[str, BranchOutput],
        logits: Tensor,
    ) -> Details:
        """Logits by branch, and the guide's own before its cut where it says them."""
        branches = {
            name: score.logits for name, score in outputs.items() if score.candidates is None
        }
        if self.guide is None:
            return Details(branches | {"guided": logits}, None)
        uncut = self.guide.combine(constants, call, proposal, outputs)
        total = self.guide.totals(constants, call, proposal, outputs)
        return Details(branches | {"guided": logits if uncut is None else uncut}, total)

    def add(self, round: Committed) -> None:
        """One round of every row that kept a token in it."""
        proposal, block, scores = round.proposal, round.block, round.scores
        steps = self._steps(round) if self.guide else {}
        parents = proposal.structure()[0].expand(len(block.count), -1)
        for row, kept in enumerate(block.count.tolist()):
            if not kept:
                continue
            chain, node = [], -1
            for child, parent in enumerate(parents[row].tolist()):
                if parent == node and int(proposal.tokens[row, child]) >= 0:
                    chain.append(int(proposal.tokens[row, child]))
                    node = child
            accepted = int(block.num_accepted[row])
            end = int(block.path[row, accepted - 1]) if accepted else -1
            below = (parents[row] == end) & (proposal.tokens[row] >= 0)
            opening = scores.details.branches if round.first else None
            self.rows[row].append(
                Round(
                    drafted=tuple(chain),
                    accepted=tuple(block.tokens[row, :accepted].tolist()),
                    decided=int(block.next_token[row]),
                    bonus=not bool(below.any()),
                    kept=kept,
                    steps=steps.get(row, ()),
                    opening=opening and {name: v[row, 0].cpu() for name, v in opening.items()},
                )
            )

    def _steps(self, round: Committed) -> dict[int, tuple[Step, ...]]:
        """By row, what the guide made of the tokens that it keeps."""
        path, (branches, total) = round.block.path, round.scores.details
        guided = rows_along(round.scores.logits, path)
        main = rows_along(round.scores.main.logits, path)
        survivors = (guided > -float("inf")).sum(-1).tolist()
        changed = (guided.argmax(-1) != main.argmax(-1)).tolist()
        known = plain_main(self.guide)
        totals = (
            rows_along(total[..., None], path)[..., 0].tolist()
            if isinstance(total, Tensor)
            else [[total] * len(row) for row in survivors]
        )
        reference = main.log_softmax(-1)
        distances = {
            name: (rows_along(logits, path).log_softmax(-1) - reference).abs().amax(-1).tolist()
            for name, logits in branches.items()
            if name not in ("main", "guided")
        }
        return {
            row: tuple(
                Step(
                    survivors=survivors[row][i],
                    changed=changed[row][i] if known else None,
                    distances={n: d[row][i] for n, d in distances.items()},
                    total=totals[row][i],
                )
                for i in range(kept)
            )
            for row, kept in enumerate(round.block.count.tolist())
        }
