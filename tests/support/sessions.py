"""Sessions of drafters that report their proposals, or follow a given distribution."""

from dataclasses import replace

from mmdecode.engine.call import DraftTarget
from mmdecode.engine.contracts import DraftSession


class Wrapped(DraftSession):
    """Does what another session does; subclasses look at it."""

    def __init__(self, inner):
        super().__init__(inner.call)
        self.inner = inner

    def propose(self, budget):
        return self.inner.propose(budget)

    def observe(self, proposal, output, block):
        self.inner.observe(proposal, output, block)

    def close(self):
        self.inner.close()


def noting(draft, opened=lambda session: None, proposed=lambda session, proposal: None):
    """A drafter that reports the sessions it opens, and their proposals."""
    begin = draft.begin

    def noted(call, prefill):
        session = begin(call, prefill)
        propose = session.propose

        def noted_propose(budget):
            proposal = propose(budget)
            proposed(session, proposal)
            return proposal

        session.propose = noted_propose
        opened(session)
        return session

    draft.begin = noted
    return draft


def warped(draft, warp):
    """A drafter that follows given warpers."""
    begin = draft.begin

    def begin_warped(call, prefill):
        plan = replace(call.plan, draft_target=DraftTarget(warp=warp))
        return begin(replace(call, plan=plan), prefill)

    draft.begin = begin_warped
    return draft
