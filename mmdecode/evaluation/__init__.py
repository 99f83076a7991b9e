"""How a number becomes believable: scorers with names, counts and intervals, and `audit`."""

from mmdecode.evaluation.audit import AuditReport, audit
from mmdecode.evaluation.memory import RowBytes, row_bytes
from mmdecode.evaluation.plain import Case, Plain
from mmdecode.evaluation.word_report import Comparison, WERReport, wer_report

__all__ = [
    "AuditReport",
    "Case",
    "Comparison",
    "Plain",
    "RowBytes",
    "WERReport",
    "audit",
    "row_bytes",
    "wer_report",
]
