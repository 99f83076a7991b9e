"""Guides, one law a file: what the tokens must follow, as a pure function of branch scores."""

from mmdecode.guide.cfg import CFG
from mmdecode.guide.linear import Linear

__all__ = ["CFG", "Linear"]
