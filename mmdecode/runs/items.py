"""Failed items, the same for transcripts, answers and images: one does not stop the others.

Items are decoded in batches. If decoding a batch raises an error, the batch is halved again and
again until the item that raises the error is alone; only this item fails. If every item fails with
the same error of the configuration, the whole job raises that error (`Watch`).
``KeyboardInterrupt`` and ``SystemExit`` are not caught.

A call with a single input returns its result, or raises its error. A call with a list of inputs
returns a list in the same order, which has a failure at the index of each input that failed. The
option ``on_error`` overrides this: it raises the first error, or returns failures (`collected`).
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import gc
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from mmdecode import errors
from mmdecode.errors import (
    IncompatibleError,
    MissingExtraError,
    MMDecodeError,
    OptionError,
    UnsupportedModelError,
)
from mmdecode.runs.memory import is_device_lost, is_out_of_memory

Item = TypeVar("Item")
Result = TypeVar("Result")
Noted = Callable[[Sequence[str]], contextlib.AbstractContextManager[object]]
"""Function that takes the names of a batch's items; its context is open during their decoding."""
OnError = Literal["raise", "return"]

CONFIGURATION = (OptionError, IncompatibleError, UnsupportedModelError, MissingExtraError)
ENOUGH = 16
"""The job fails if its first 16 items all fail with the same error of the configuration."""
OUT_OF_MEMORY = "OutOfMemoryError"
LOST = 75
"""Exit code of a worker whose device can no longer be used."""
_OF_ONE_FILE = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG)


@dataclass(frozen=True)
class Failed:
    """Failure of an item, which takes the place of its result.

    Attributes:
        error: Message: the problem, what was expected and what to do.
        kind: Name of the error's class.
        problem: The error itself, without its traceback and causes.
    """

    error: str
    kind: str
    problem: Exception = field(repr=False, compare=False)

    @classmethod
    def of(cls, problem: Exception, hint: str) -> Failed:
        """Builds the failure that describes an error.

        Args:
            problem: The error. Its traceback and causes are removed, which frees the tensors that
                the traceback's frames hold.
            hint: Advice to the user if memory ran out, for the message.
        """
        kind, text = type(problem).__name__, " ".join(str(problem).split())
        if is_out_of_memory(problem):
            kind, text = OUT_OF_MEMORY, f"there is not enough memory; {hint}"
        elif not isinstance(problem, MMDecodeError):
            text = f"{kind}: {text}" if text else kind
            text += "; this is a bug: run with MMDECODE_DEBUG=1 to see the traceback"
        else:
            text = str(problem)
        problem.__cause__ = problem.__context__ = None
        return cls(text, kind, problem.with_traceback(None))


class Watch:
    """State of a job over all its batches; decides whether the job as a whole has failed.

    Args:
        noted: Records the names of the batch being decoded, as
            `mmdecode.runs.crashes.Batches.decoding` does.

    Attributes:
        exits: Whether the process ends at an error after which its device cannot be used, since
            another one takes its place.
        halved: Size of the last batch of each item whose batch was halved since memory ran out.
    """

    def __init__(self, noted: Noted = contextlib.nullcontext) -> None:
        self.noted, self.exits = noted, False
        self.halved: dict[str, int] = {}
        self._fits = False  # some item did not fail by the configuration

    def released(self, outcomes: Iterable[tuple[Result, Failed | None]]) -> Iterator[Result]:
        """Yields results, and raises if the first items all fail with one configuration error.

        First items that fail with the same error of the configuration are held back until an item
        has another outcome; then they are yielded like the others.

        Args:
            outcomes: Pairs of an item's result and its failure, ``None`` if it succeeded.

        Raises:
            MMDecodeError: All items, or the first `ENOUGH`, failed with the same error of the
                configuration.
        """
        held: list[Result] = []
        first: Failed | None = None
        for result, failed in outcomes:
            if self._fits or not _alike(first, failed):
                self._fits = True
                yield from held
                held.clear()
                yield result
                continue
            held.append(result)
            first = failed
            if len(held) == ENOUGH:
                break
        if held and first is not None:
            raise first.problem


def each(
    items: Sequence[Item],
    run: Callable[[Sequence[Item]], Sequence[Result]],
    *,
    hint: str,
    name: Callable[[Item], str] = str,
    watch: Watch | None = None,
    attempt: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> Iterator[tuple[Item, Result | Failed]]:
    """Decodes a batch and yields each item with its result or failure, in order.

    Args:
        items: The batch.
        run: Returns one result for each item; called again with each half of a batch that raised
            an error.
        hint: Advice to the user if memory ran out for an item alone, for the message.
        name: Returns the name of an item, under which ``watch`` records it.
        watch: Records which items are being decoded, and batches halved for lack of memory;
            ``None``: they are not recorded.
        attempt: Returns a context that is open during each call of ``run``, such as
            `mmdecode.engine.stats.Stats.attempt`.
    """
    if not items:
        return
    watch = watch or Watch()
    failed = None
    try:
        with watch.noted([name(item) for item in items]), attempt():
            results = run(items)
    except Exception as problem:
        if watch.exits and is_device_lost(problem):
            with watch.noted([name(item) for item in items]):  # as if the system had ended it
                os._exit(LOST)
        short = is_out_of_memory(problem)
        if len(items) == 1 and os.environ.get("MMDECODE_DEBUG") == "1":
            traceback.print_exception(problem)
        failed = Failed.of(problem, hint)
    if failed is None:
        yield from zip(items, results, strict=True)
        return
    if short:  # what the batch held went with its error
        _free()
    if len(items) == 1:
        yield items[0], failed
        return
    middle = len(items) // 2
    for part in (items[:middle], items[middle:]):
        if short:
            watch.halved |= dict.fromkeys(map(name, part), len(part))
        yield from each(part, run, hint=hint, name=name, watch=watch, attempt=attempt)


def tried(run: Callable[[], Result], hint: str) -> Result | Failed:
    """Runs a function for one item; returns its result, or a failure if it raises.

    Args:
        run: Function that returns the result.
        hint: Advice to the user if memory ran out, for the message.
    """
    [(_, found)] = each([None], lambda _: [run()], hint=hint)
    return found


def written(write: Callable[[], Result], hint: str) -> Result | Failed:
    """Writes the files of one item; returns the result of ``write``, or a failure if it raises.

    Args:
        write: Computes and writes the files.
        hint: Advice to the user if memory ran out, for the message.

    Raises:
        OSError: Writing failed for a reason that concerns all items, such as a full disk.
    """
    found = tried(write, hint)
    if isinstance(found, Failed) and isinstance(found.problem, OSError):
        number = found.problem.errno
        if number is not None and number not in _OF_ONE_FILE and found.kind != OUT_OF_MEMORY:
            raise found.problem
    return found


def collected(outcomes: Iterable[Any], single: bool, on_error: OnError | None = None) -> Any:
    """Collects the outcomes of a call in input order, or raises the first error.

    Args:
        outcomes: Outcomes in any order. Each has the ``index`` of its input, the message of its
            error as ``error`` (``None`` if it succeeded) and the name of the error's class as
            ``kind``. ``on_error`` is checked before the iterable is read.
        single: Whether a single input was given instead of a list.
        on_error: ``raise``: raise the first error; ``return``: return failures in the list;
            ``None``: raise for a single input, return for a list.

    Returns:
        One outcome for a single input, else a list in the order of the input.

    Raises:
        OptionError: ``on_error`` has another value.
        MMDecodeError: The first error, if errors are raised. It has the class that ``kind`` names,
            which may also be a built-in error.
    """
    if on_error not in (None, "raise", "return"):
        raise OptionError(f"on_error={on_error!r}; expected 'raise' or 'return'")
    raises = single if on_error is None else on_error == "raise"
    found = []
    for outcome in outcomes:
        if raises and outcome.error is not None:
            raise error_of(outcome.kind, outcome.error)
        found.append(outcome)
    found.sort(key=lambda outcome: outcome.index)
    return found[0] if single else found


def error_of(kind: str | None, message: str) -> Exception:
    """Rebuilds the error that a recorded failure describes.

    Args:
        kind: Name of the error's class; ``None`` or an unknown name gives `MMDecodeError`.
        message: Text of the error.
    """
    if kind == MissingExtraError.__name__:
        found = re.fullmatch(r"(.*); install it with: pip install 'mmdecode\[(\w+)\]'", message)
        return MissingExtraError(found[1], extra=found[2]) if found else MMDecodeError(message)
    if kind == OUT_OF_MEMORY:  # whichever library's it was
        return MemoryError(message)
    known = getattr(errors, kind or "", None) or getattr(builtins, kind or "", None)
    if isinstance(known, type) and issubclass(known, Exception):
        try:
            return known(message)
        except TypeError:  # as UnicodeDecodeError, which is made of five parts
            pass
    return MMDecodeError(f"{kind}: {message}" if kind else message)


def _alike(first: Failed | None, failed: Failed | None) -> bool:
    """Returns whether an item failed with the same configuration error as the first item."""
    if failed is None or not isinstance(failed.problem, CONFIGURATION):
        return False
    return first is None or (first.error, first.kind) == (failed.error, failed.kind)


def _free() -> None:
    """Frees the GPU memory that a failed batch used."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
