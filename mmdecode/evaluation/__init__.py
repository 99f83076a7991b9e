"""Evaluation: error counts with intervals, speed, reports, and audits of lossless decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmdecode.evaluation.audit import audit as _audit
from mmdecode.evaluation.audit.audit import AuditReport
from mmdecode.evaluation.audit.plain import Case, Plain
from mmdecode.evaluation.speech.word_report import Comparison, WERReport, wer_report
from mmdecode.evaluation.speed.memory import RowBytes, row_bytes

if TYPE_CHECKING:
    from mmdecode.evaluation.vision.caption_report import CaptionReport
    from mmdecode.evaluation.vision.choice_report import ChoiceReport
    from mmdecode.evaluation.vision.yes_no_report import YesNoReport

audit = _audit.audit  # an assignment: the folder of that name would be taken for it

__all__ = [
    "AuditReport",
    "CaptionReport",
    "Case",
    "ChoiceReport",
    "Comparison",
    "Plain",
    "RowBytes",
    "WERReport",
    "YesNoReport",
    "audit",
    "row_bytes",
    "wer_report",
]

_LAZY = {
    "CaptionReport": "vision.caption_report",
    "ChoiceReport": "vision.choice_report",
    "YesNoReport": "vision.yes_no_report",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
