"""Isolation of errors in a job: an item that raises an error does not stop the other items.

Items are decoded in batches. If decoding a batch raises an error, the batch is halved again and
again until the item that raises the error is alone; only this item fails. If every item fails with
the same error of the configuration, the whole job raises that error (`Watch`).
``KeyboardInterrupt`` and ``SystemExit`` are not caught.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from mmdecode.errors import (
    IncompatibleError,
    MissingExtraError,
    MMDecodeError,
    OptionError,
    UnsupportedModelError,
)
from mmdecode.runs.memory import is_out_of_memory

Item = TypeVar("Item")
Result = TypeVar("Result")
Noted = Callable[[Sequence[str]], contextlib.AbstractContextManager[object]]
"""Function that takes the names of a batch's items; its context is open during their decoding."""

CONFIGURATION = (OptionError, IncompatibleError, UnsupportedModelError, MissingExtraError)
ENOUGH = 16
"""The job fails if its first 16 items all fail with the same error of the configuration."""
OUT_OF_MEMORY = "OutOfMemoryError"
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
        halved: Size of the last batch of each item whose batch was halved since memory ran out.
    """

    def __init__(self, noted: Noted = contextlib.nullcontext) -> None:
        self.noted = noted
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
