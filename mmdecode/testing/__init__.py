"""Checks for parts that you write: call one on a factory of your drafter, rule, guide or adapter.

``check_draft(lambda: MyDrafter())`` raises AssertionError with the broken promise and the
difference. `table` holds the exact models that it runs, `drafts` the hostile proposals, `checks`
the assertions. `recognizers` has the check of a family of speech models. `call_of` makes a `Call`,
for tests of one method alone; `decode` calls a decoder on a model that has no ``generate``.
"""

from mmdecode.testing.checks import check_accept, check_adapter, check_draft, check_guide
from mmdecode.testing.recognizers import check_recognizer
from mmdecode.testing.table import call_of, decode

__all__ = [
    "call_of",
    "check_accept",
    "check_adapter",
    "check_draft",
    "check_guide",
    "check_recognizer",
    "decode",
]
