"""Wrappers of parts under test, which assert what a part promises in every call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mmdecode.engine.call import Call
from mmdecode.engine.capabilities import Part
from mmdecode.engine.checks import refuse_no_part
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import OptionError


@contextmanager
def checking(what: str) -> Iterator[None]:
    """Adds the property that is being checked to errors raised inside the context."""
    try:
        yield
    except CallWritten:
        raise
    except AssertionError as error:
        raise AssertionError(f"property violated, {what}: {error}") from error
    except Exception as error:
        error.add_note(f"raised while this property was checked: {what}")
        raise


class CallWritten(AssertionError):
    """A part wrote to its `Call`; the message names the property itself."""


@contextmanager
def unwritten(part: str, call: Call, method: str) -> Iterator[None]:
    """Asserts that a method of a part leaves its call as it was.

    Args:
        part: Kind of part, for the message.
        call: The call it was given.
        method: Name of the method.
    """

    def fields() -> dict[str, Tensor]:
        rows, asked = call.rows, call.request
        return {
            **{f"rows.{name}": getattr(rows, name) for name in ("ids", "length", "active")},
            **{f"request.{name}": getattr(asked, name) for name in ("prompt_ids", "prompt_mask")},
        }

    before = {name: value.clone() for name, value in fields().items()}
    yield
    for name, value in fields().items():
        if not torch.equal(value, before[name]):
            raise CallWritten(
                f"property violated, a {part} never changes its Call: {name} was written in "
                f"{method}; work on a copy, as call.rows.ids.clone()"
            )


def made(part: str, make: Callable[[], Any]) -> Any:
    """Calls the function that makes the object under test.

    Raises:
        OptionError: ``make`` is no such function, or makes an object of another kind.
    """
    if isinstance(make, Part) or not callable(make):
        name = type(make).__name__
        raise OptionError(f"{make!r} is no function; pass a function: lambda: {name}(...)")
    found = make()
    refuse_no_part(part, found)
    return found


def watched_draft(draft: Any) -> Any:
    """Wraps a drafter: checks that proposals are valid and that the call is only read."""
    begin = draft.begin

    def opened(call: Call, prefill: Any) -> Any:
        with unwritten("drafter", call, "begin"):
            session = begin(call, prefill)
        propose, observe, vocab = session.propose, session.observe, prefill.logits.shape[-1]

        def proposed(budget: int) -> Proposal:
            with unwritten("drafter", call, "propose"):
                proposal = propose(budget)
            assert isinstance(proposal, Proposal), (
                f"propose returned {proposal!r}; expected a Proposal"
            )
            tokens = proposal.tokens
            assert bool(((tokens >= -1) & (tokens < vocab)).all()), (
                f"propose returned the tokens {tokens.tolist()}; expected ids below {vocab}, or -1"
            )
            return proposal

        def observed(*given: Any) -> None:
            with unwritten("drafter", call, "observe"):
                observe(*given)

        session.propose, session.observe = proposed, observed
        return session

    draft.begin = opened
    return draft


def watched_guide(guide: Any) -> Any:
    """Wraps a guide: checks the shape of its output, and that the call is only read."""
    begin, apply = guide.begin, guide.apply

    def begun(call: Call, prefill: Any) -> Any:
        with unwritten("guide", call, "begin"):
            return begin(call, prefill)

    def applied(constants: Any, call: Call, proposal: Proposal, outputs: Any) -> Any:
        with unwritten("guide", call, "apply"):
            made, main = apply(constants, call, proposal, outputs), outputs["main"].logits
        assert isinstance(made, Tensor) and made.shape[:2] == main.shape[:2], (
            f"apply returned {tuple(made.shape) if isinstance(made, Tensor) else made!r}; expected "
            f"logits after the last token and each drafted token, {tuple(main.shape)}"
        )
        return made

    guide.begin, guide.apply = begun, applied
    return guide


def watched_rule(rule: Any) -> Any:
    """Wraps a rule: checks that the call is only read. A subclass of the same name does it."""
    kind = type(rule)

    def called(self: Any, proposal: Proposal, target: Any, call: Call) -> Any:
        with unwritten("rule", call, "__call__"):
            return kind.__call__(self, proposal, target, call)

    members = {"__slots__": (), "__call__": called, "__module__": kind.__module__}
    object.__setattr__(rule, "__class__", type(kind.__name__, (kind,), members))
    return rule
