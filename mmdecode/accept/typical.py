"""Typical acceptance: keep what is likely enough for the entropy of the law. Heuristic.

Source: Cai et al. 2024 (Medusa), arXiv:2401.10774, section 3.3: keep x while
``p(x) > min(epsilon, delta * exp(-H(p)))``. The longest path wins, then the likelier one. The token
after the path is the law's own (argmax, or the keyed sample). The reference swaps the defaults of
epsilon and delta between two functions; these are the ones its generation uses.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from mmdecode.accept.follow import deepest_path, finish
from mmdecode.engine.contracts import Context, LawView, Outcome
from mmdecode.engine.noise import Noise, Role
from mmdecode.engine.proposal import Kind, Proposal
from mmdecode.errors import OptionError


class Typical:
    """Keeps a drafted token if its probability exceeds ``min(epsilon, delta * exp(-entropy))``.

    Args:
        epsilon: Hard threshold, 0..1. ``1`` with a large ``delta`` is neutral: nothing is kept.
        delta: Scale of the entropy-dependent threshold, >= 0.

    Law: heuristic; no closed form. Do not call its output lossless.
    """

    law: ClassVar[Literal["heuristic"]] = "heuristic"
    kinds: tuple[Kind, ...] = ("deterministic", "coupled", "iid", "without_replacement")
    modes = frozenset({"greedy", "sample"})
    needs_all_nodes = True

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        if not 0 <= epsilon <= 1 or delta < 0:
            raise OptionError(
                f"epsilon={epsilon}, delta={delta}; expected epsilon in 0..1 and delta >= 0"
            )
        self.epsilon, self.delta = epsilon, delta

    def __call__(self, proposal: Proposal, law: LawView, noise: Noise, ctx: Context) -> Outcome:
        """See `mmdecode.engine.contracts.Accept`."""
        parents, depths, ancestors = proposal.structure()
        rows = law.all() if law.vectorised else self._rows(proposal, law, ctx)
        log_p = rows.log_softmax(-1)
        parent_rows = (parents + 1).expand(ctx.batch, -1)
        tokens = proposal.tokens.clamp_min(0)
        bar = threshold(log_p, self.epsilon, self.delta).gather(1, parent_rows)
        index = parent_rows[..., None].expand(-1, -1, log_p.shape[-1])
        gain = log_p.gather(1, index).gather(2, tokens[..., None])[..., 0]  # (B, N)
        passes = (gain.exp() > bar) & (proposal.tokens >= 0)
        above = ancestors[:, 1:, 1:]
        whole = ~(above & ~passes[:, None]).any(-1)
        # among the longest paths, the likelier: keep only the best end of that depth
        total = (above * gain.clamp_min(-1e30)[:, None]).sum(-1)
        deepest = (whole * depths).amax(1, keepdim=True) if proposal.size else depths
        rank = total.masked_fill(~(whole & (depths == deepest)), -torch.inf)
        if proposal.size:
            best = torch.nn.functional.one_hot(rank.argmax(1), proposal.size).bool() & whole
            on_best = (above & best[..., None]).any(1)
        else:
            on_best = passes
        path, count, end = deepest_path(on_best, proposal)
        last = rows.gather(1, end[:, None, None].expand(-1, 1, rows.shape[-1]))
        if ctx.do_sample:
            positions = (ctx.length + count)[:, None]
            gumbel = noise.gumbel(positions, Role.TARGET, last.shape[-1])
            next_token = (last + gumbel)[:, 0].argmax(-1)
        else:
            next_token = last[:, 0].argmax(-1)
        outcome = Outcome(path=path, num_accepted=count, next_token=next_token)
        return finish(outcome, proposal, law, noise, ctx)

    def _rows(self, proposal: Proposal, law: LawView, ctx: Context) -> Tensor:
        """Processors of unknown type: run them row by row, parents before children."""
        _, _, ancestors = proposal.structure()
        used = torch.nn.functional.pad(proposal.tokens >= 0, (1, 0), value=True)
        whole = ~(ancestors & ~used[:, None]).any(-1) & ctx.open[:, None]
        rows = [law.at(torch.where(whole[:, row], row, -1)) for row in range(proposal.size + 1)]
        return torch.stack(rows, 1)


def threshold(log_p: Tensor, epsilon: float, delta: float) -> Tensor:
    """``min(epsilon, delta * exp(-H))`` over the last axis of normalised log-probabilities."""
    entropy = -(log_p.exp() * log_p.clamp_min(-1e4)).sum(-1)
    return (delta * (-entropy).exp()).clamp_max(epsilon)
