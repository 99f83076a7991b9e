"""No draft: one token per row and round, the loop's own floor."""

from __future__ import annotations

from mmdecode.engine.call import Call
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.engine.contracts import BranchOutput, Drafter, DraftSession


class NoDraft(Drafter):
    """Proposes nothing."""

    capabilities = DrafterCapabilities(graph_safe=True)

    def begin(self, call: Call, prefill: BranchOutput) -> DraftSession:
        """A session that drafts nothing."""
        return DraftSession(call)
