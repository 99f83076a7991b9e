"""Decoding without a draft: one token per row and round."""

from __future__ import annotations

from mmdecode.engine.call import Call
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.engine.contracts import BranchOutput, Drafter, DraftSession


class NoDraft(Drafter):
    """A drafter that proposes nothing."""

    capabilities = DrafterCapabilities(graph_safe=True, argmax_only=True)

    def begin(self, call: Call, prefill: BranchOutput) -> DraftSession:
        """Opens a session that proposes nothing."""
        return DraftSession(call)
