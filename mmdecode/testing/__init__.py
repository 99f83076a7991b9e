"""Checks for drafters, acceptance rules, guides, adapters and recognisers that you write.

A check takes a function that makes your object: ``check_draft(lambda: MyDrafter())`` raises
AssertionError with the property that does not hold and the difference that was found. Checks decode
with tiny exact models (`table`) and with drafters that propose useless or odd drafts (`drafts`).
`checks` has the assertions; `recognizers` has the check of a family of speech models. `call_of`
makes a `Call`, the state of a call to ``generate``, for tests of a single method; `decode` calls a
decoder on a model that has no ``generate``.
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
