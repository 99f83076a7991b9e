"""Acceptance rules, one family a file: how much of a proposal is kept, and the token after it."""

from mmdecode.accept.ensemble import Ensemble
from mmdecode.accept.exact import Coupled, GreedyMatch, Membership
from mmdecode.accept.judge import Judge
from mmdecode.accept.rejection import Rejection
from mmdecode.accept.typical import Typical

__all__ = ["Coupled", "Ensemble", "GreedyMatch", "Judge", "Membership", "Rejection", "Typical"]
