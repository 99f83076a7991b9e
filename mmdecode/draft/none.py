"""No draft: one token per row and round, the loop's own floor."""

from __future__ import annotations

from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.engine.contracts import Context, Drafter
from mmdecode.engine.proposal import Proposal


class NoDraft(Drafter):
    """Proposes nothing."""

    capabilities = DrafterCapabilities(graph_safe=True)

    def propose(self, ctx: Context, budget: int) -> Proposal:
        """The empty proposal."""
        return Proposal.empty(ctx.batch, ctx.device)
