"""Jacobi windows whose tail is refilled as a test wants it, whatever the kind."""

from mmdecode.draft.jacobi import Jacobi
from mmdecode.engine.contracts import Requirements


def window(nodes, tail, kinds=None, make=Jacobi, **options):
    draft = make(nodes + 1, **options)
    draft.kinds = kinds or draft.kinds
    wanted = Requirements(window_modes=dict.fromkeys(draft.kinds, tail))
    draft.needs = lambda adapter: wanted
    return draft
