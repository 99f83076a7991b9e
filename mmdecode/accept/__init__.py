"""Acceptance rules, one family a file: how much of a proposal is kept, and the token after it."""

from mmdecode.accept.cool import Cool
from mmdecode.accept.ensemble import Ensemble
from mmdecode.accept.exact import Coupled, GreedyMatch, Membership
from mmdecode.accept.grouped import Grouped
from mmdecode.accept.judge import Judge
from mmdecode.accept.lantern import LANTERN
from mmdecode.accept.rejection import Rejection
from mmdecode.accept.typical import Typical

__all__ = [
    "LANTERN",
    "Cool",
    "Coupled",
    "Ensemble",
    "GreedyMatch",
    "Grouped",
    "Judge",
    "Membership",
    "Rejection",
    "Typical",
]
