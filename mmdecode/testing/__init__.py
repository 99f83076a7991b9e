"""Law tests for parts of your own: call a check on a factory of your draft, rule, guide or adapter.

``check_draft(lambda: MyDraft())`` raises AssertionError with what differs. `table` holds the exact
models behind it, `drafts` the hostile proposals, `checks` the assertions.
"""

from mmdecode.testing.checks import check_accept, check_adapter, check_draft, check_guide

__all__ = ["check_accept", "check_adapter", "check_draft", "check_guide"]
