"""Law tests for parts of your own: call a check on a factory of your draft, rule, guide or adapter.

``check_draft(lambda: MyDraft())`` raises AssertionError with what differs. `table` holds the exact
models behind it, `drafts` the hostile proposals, `checks` the assertions. `recognizers` has the
check of a family of speech models. `call_of` makes the call that parts are handed, for tests of one
method alone.
"""

from mmdecode.testing.checks import check_accept, check_adapter, check_draft, check_guide
from mmdecode.testing.recognizers import check_recognizer
from mmdecode.testing.table import call_of

__all__ = [
    "call_of",
    "check_accept",
    "check_adapter",
    "check_draft",
    "check_guide",
    "check_recognizer",
]
