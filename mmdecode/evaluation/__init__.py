"""Evaluation: tasks and their reports, error counts with intervals, speed, and audits."""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from mmdecode._lazy import lazy

if TYPE_CHECKING:
    from mmdecode.evaluation.audit import audit as _audit
    from mmdecode.evaluation.audit.audit import AuditReport as AuditReport
    from mmdecode.evaluation.audit.plain import Case as Case
    from mmdecode.evaluation.audit.plain import Plain as Plain
    from mmdecode.evaluation.report.report import Report as Report
    from mmdecode.evaluation.runner import evaluate as evaluate
    from mmdecode.evaluation.speech.comparison import Comparison as Comparison
    from mmdecode.evaluation.speech.word_report import WERReport as WERReport
    from mmdecode.evaluation.speech.word_report import wer_report as wer_report
    from mmdecode.evaluation.speed.memory import RowBytes as RowBytes
    from mmdecode.evaluation.speed.memory import row_bytes as row_bytes
    from mmdecode.evaluation.task import Task as Task
    from mmdecode.evaluation.vision.benchmarks import CaptionTask as CaptionTask
    from mmdecode.evaluation.vision.benchmarks import ChoiceTask as ChoiceTask
    from mmdecode.evaluation.vision.benchmarks import YesNoTask as YesNoTask
    from mmdecode.evaluation.vision.caption_report import CaptionReport as CaptionReport
    from mmdecode.evaluation.vision.choice_report import ChoiceReport as ChoiceReport
    from mmdecode.evaluation.vision.items import CaptionItem as CaptionItem
    from mmdecode.evaluation.vision.items import ChoiceItem as ChoiceItem
    from mmdecode.evaluation.vision.items import YesNoItem as YesNoItem
    from mmdecode.evaluation.vision.yes_no_report import YesNoReport as YesNoReport

    audit = _audit.audit  # an assignment: the folder of that name would be taken for it

_MODULES = {
    "audit.audit": ("AuditReport",),
    "audit.plain": ("Case", "Plain"),
    "report.report": ("Report",),
    "runner": ("evaluate",),
    "speech.comparison": ("Comparison",),
    "speech.word_report": ("WERReport", "wer_report"),
    "speed.memory": ("RowBytes", "row_bytes"),
    "task": ("Task",),
    "vision.benchmarks": ("CaptionTask", "ChoiceTask", "YesNoTask"),
    "vision.caption_report": ("CaptionReport",),
    "vision.choice_report": ("ChoiceReport",),
    "vision.items": ("CaptionItem", "ChoiceItem", "YesNoItem"),
    "vision.yes_no_report": ("YesNoReport",),
}

__all__ = ["audit", *(name for names in _MODULES.values() for name in names)]


class _Package(types.ModuleType):
    """This package, whose function `audit` has the name of a folder.

    Importing the folder sets the attribute to the folder's module; here that has no effect.
    """

    @property
    def audit(self) -> Any:
        return importlib.import_module(f"{__name__}.audit.audit").audit

    @audit.setter
    def audit(self, module: types.ModuleType) -> None:
        return


sys.modules[__name__].__class__ = _Package

__getattr__, __dir__ = lazy(__name__, _MODULES)
