"""Looking on while a drafter's sessions work, and telling them what to follow."""

from dataclasses import replace

from mmdecode.engine.call import DraftTarget


def noting(draft, opened=lambda session: None, proposed=lambda session, proposal: None):
    """A drafter that tells of the sessions it opens, and of what they propose."""
    begin = draft.begin

    def noted(call, prefill):
        session = begin(call, prefill)
        propose = session.propose

        def told(budget):
            proposal = propose(budget)
            proposed(session, proposal)
            return proposal

        session.propose = told
        opened(session)
        return session

    draft.begin = noted
    return draft


def following(draft, guide, warp=None):
    """A drafter that is told to follow a guide."""
    begin = draft.begin

    def told(call, prefill):
        plan = replace(call.plan, draft_target=DraftTarget(guide=guide, warp=warp))
        return begin(replace(call, plan=plan), prefill)

    draft.begin = told
    return draft
