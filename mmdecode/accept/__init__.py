"""Acceptance rules: each decides which drafted tokens are kept, and the token after them."""

from mmdecode.accept.cool_sd import CoolSD
from mmdecode.accept.ensemble import Ensemble
from mmdecode.accept.exact import Coupled, GreedyMatch, SampleMatch
from mmdecode.accept.gsd import GSD
from mmdecode.accept.lantern import LANTERN
from mmdecode.accept.rejection import Rejection
from mmdecode.accept.relative_threshold import RelativeThreshold
from mmdecode.accept.typical import Typical

__all__ = [
    "GSD",
    "LANTERN",
    "CoolSD",
    "Coupled",
    "Ensemble",
    "GreedyMatch",
    "Rejection",
    "RelativeThreshold",
    "SampleMatch",
    "Typical",
]
