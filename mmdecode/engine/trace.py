"""Traces: for each round the draft, the committed tokens, and the guide's effect on them.

The loop asks a `Tracer` for details while it scores, and calls it with every committed block.
`NoTrace`, the default, records nothing.
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
    """Effect of a guide at one committed token.

    Attributes:
        survivors: Number of tokens with a nonzero guided probability, before the caller's
            processors.
        changed: Whether the most likely token of the guided distribution differs from the model's;
            ``None``: not known, since the guide edits or replaces the main branch (see
            `contracts.plain_main`).
        distances: For each branch, the largest absolute difference of a log-probability from that
            of the main branch.
        total: Sum of the branch weights: if it is not 1, the guide sharpens or flattens the
            distribution even where all branches agree. ``None``: the guide has no weights.
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
        bonus: Whether the path ended at a leaf: ``decided`` is a bonus token, not a correction.
        kept: Number of tokens that were committed, after stopping criteria.
        steps: Effect of the guide at each committed token; empty without a guide.
        opening: Logits ``(V,)`` at the row's first token by branch, with the guided logits before
            the plausibility cut as ``"guided"``. ``None`` in later rounds.
    """

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    decided: int
    bonus: bool
    kept: int
    steps: tuple[Step, ...] = ()
    opening: Mapping[str, Tensor] | None = field(default=None, repr=False, compare=False)


class Details(NamedTuple):
    """Details of a scoring pass that a trace keeps.

    Attributes:
        branches: Logits of all branches, ``(B, N + 1, V)``, with the guided logits before the
            plausibility cut as ``"guided"``.
        total: Sum of the branch weights, ``(B, N + 1)`` if it depends on the position; ``None``:
            the guide has no weights.
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
        """Details of a scoring pass to keep; here none."""
        return None


class Tracer(NoTrace):
    """Records each row's rounds.

    Args:
        guide: Guide of the call; ``None``: there is none.
        batch: Number of rows.

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
        """Logits by branch, and the guided logits before the plausibility cut if there is one."""
        branches = {
            name: score.logits for name, score in outputs.items() if score.candidates is None
        }
        if self.guide is None:
            return Details(branches | {"guided": logits}, None)
        uncut = self.guide.combine(constants, call, proposal, outputs)
        total = self.guide.totals(constants, call, proposal, outputs)
        return Details(branches | {"guided": logits if uncut is None else uncut}, total)

    def add(self, round: Committed) -> None:
        """Records a round of every row that committed a token in it."""
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
        """Effect of the guide at the tokens that each row commits, by row."""
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
