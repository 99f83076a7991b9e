"""Acceptance rules, one family a file: how much of a proposal is kept, and the token after it."""

from mmdecode.accept.exact import Coupled, GreedyMatch, Membership, Rejection
from mmdecode.accept.typical import Typical

__all__ = ["Coupled", "GreedyMatch", "Membership", "Rejection", "Typical"]
