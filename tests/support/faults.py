"""Errors of every kind, and a draft that raises one when a bad item is among those of its batch."""

import errno

import torch

from mmdecode import errors
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.testing.drafts import TestDrafter


class Odd(Exception):
    """An error that nobody knows."""


ERRORS = {
    "ValueError": lambda: ValueError("no such value"),
    "TypeError": lambda: TypeError("no such type"),
    "RuntimeError": lambda: RuntimeError("something ran wrong"),
    "KeyError": lambda: KeyError("key"),
    "IndexError": lambda: IndexError("list index out of range"),
    "AttributeError": lambda: AttributeError("no attribute"),
    "ZeroDivisionError": lambda: ZeroDivisionError("division by zero"),
    "OverflowError": lambda: OverflowError("too large"),
    "OSError": lambda: OSError(errno.EIO, "Input/output error"),
    "TimeoutError": lambda: TimeoutError("too late"),
    "EOFError": lambda: EOFError(),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    "MemoryError": lambda: MemoryError(),
    "torch.OutOfMemoryError": lambda: torch.OutOfMemoryError("CUDA out of memory"),
    "allocator": lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    "RecursionError": lambda: RecursionError("maximum recursion depth exceeded"),
    "AssertionError": lambda: AssertionError(),
    "StopIteration": lambda: StopIteration("stop"),
    "NotImplementedError": lambda: NotImplementedError("not yet"),
    "ImportError": lambda: ImportError("no module"),
    "Odd": lambda: Odd("odd"),
    "InputError": lambda: errors.InputError("x: cannot be read; mend it"),
    "OptionError": lambda: errors.OptionError("value=1; expected 2"),
    "ShapeError": lambda: errors.ShapeError("(1,) for (2,)"),
    "UnknownNameError": lambda: errors.UnknownNameError("no thing named 'x'"),
    "UnsupportedModelError": lambda: errors.UnsupportedModelError("a model"),
    "IncompatibleError": lambda: errors.IncompatibleError("this does not fit that"),
    "MissingExtraError": lambda: errors.MissingExtraError("reading needs it", extra="vad"),
}
FEW = ("RuntimeError", "StopIteration", "torch.OutOfMemoryError", "OptionError")


def failure_of(name):
    """What a failure says of an error, and its kind."""
    problem = ERRORS[name]()
    if name in ("MemoryError", "torch.OutOfMemoryError", "allocator"):
        return "there is not enough memory", "OutOfMemoryError"
    if isinstance(problem, errors.MMDecodeError):
        return str(problem), type(problem).__name__
    return type(problem).__name__, type(problem).__name__


class Faulty(TestDrafter):
    """Drafts nothing, and raises at a bad item.

    Args:
        bad: Whether a call's context holds it.
        error: Makes what is raised.
        stage: ``begin``, ``propose`` or ``observe``.
    """

    capabilities = DrafterCapabilities()

    def __init__(self, bad, error, stage="begin"):
        self.bad, self.error, self.stage = bad, error, stage

    def _raise(self, call, stage):
        if stage == self.stage and self.bad(call):
            raise self.error()

    def begin(self, call, prefill):
        self._raise(call, "begin")
        return super().begin(call, prefill)

    def draft(self, call, budget):
        self._raise(call, "propose")
        return super().draft(call, budget)

    def learn(self, call, proposal, output, block):
        self._raise(call, "observe")
