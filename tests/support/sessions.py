"""Sessions of drafters that are listened to."""

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
