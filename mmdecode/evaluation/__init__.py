"""How a number becomes believable: scorers with names, counts and intervals, and `audit`."""

from mmdecode.evaluation.audit import AuditReport, audit
from mmdecode.evaluation.plain import Case, Plain

__all__ = ["AuditReport", "Case", "Plain", "audit"]
