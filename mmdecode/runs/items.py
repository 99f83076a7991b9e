"""Items of a job: each ends with a result or a failure of its own, whatever is raised.

Items are decoded in batches. A batch that raises is halved down to the item that raises, and that
item fails alone. An error of the configuration that fails every item is the job's error (`Watch`).
``KeyboardInterrupt`` and ``SystemExit`` pass through.
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
"""Context that takes the names of a batch, open while the batch is decoded."""

CONFIGURATION = (OptionError, IncompatibleError, UnsupportedModelError, MissingExtraError)
ENOUGH = 16
"""After this many items that all failed by one error of the configuration, the job fails."""
OUT_OF_MEMORY = "OutOfMemoryError"
_OF_ONE_FILE = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG)


@dataclass(frozen=True)
class Failed:
    """Why an item has no result.

    Attributes:
        error: The problem, what was expected and what to do.
        kind: Name of the error's class.
        problem: The error, without its traceback and causes.
    """

    error: str
    kind: str
    problem: Exception = field(repr=False, compare=False)

    @classmethod
    def of(cls, problem: Exception, hint: str) -> Failed:
        """Failure of an item, by its error.

        Args:
            problem: The error; its traceback and causes are removed, which frees the tensors of its
                frames.
            hint: Advice where memory ran out, for the message.
        """
        kind, text = type(problem).__name__, " ".join(str(problem).split())
        if is_out_of_memory(problem):
            kind, text = OUT_OF_MEMORY, f"there is not enough memory; {hint}"
        elif not isinstance(problem, MMDecodeError):
            text = f"{kind}: {text}" if text else kind
            text += "; this is an error of the program: MMDECODE_DEBUG=1 shows where"
        else:
            text = str(problem)
        problem.__cause__ = problem.__context__ = None
        return cls(text, kind, problem.with_traceback(None))


def nothing_noted(names: Sequence[str]) -> contextlib.AbstractContextManager[object]:
    """A context that records nothing, for `Watch`."""
    return contextlib.nullcontext()


class Watch:
    """State of a job's items over all its batches.

    Args:
        noted: Records what is decoded, see `mmdecode.runs.crashes.Batches.decoding`.
    """

    def __init__(self, noted: Noted = nothing_noted) -> None:
        self.noted = noted
        self._fits = False  # some item did not fail by the configuration

    def released(self, outcomes: Iterable[tuple[Result, Failed | None]]) -> Iterator[Result]:
        """Results as they come; first failures are held until they turn out not to be the job's.

        Args:
            outcomes: Results, and why an item has none.

        Raises:
            MMDecodeError: All items failed by one error of the configuration, or the first
                `ENOUGH` did.
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
    """Outcomes of the items of a batch, in order.

    Args:
        items: The batch.
        run: Gives a result per item; called again for halves of a batch that raised.
        hint: Advice where an item alone needs more memory than there is.
        name: Names an item in the record of what is decoded.
        watch: Keeps that record.
        attempt: Open while ``run`` runs, as `mmdecode.engine.stats.Stats.attempt`.
    """
    if not items:
        return
    noted = watch.noted if watch is not None else nothing_noted
    failed = None
    try:
        with noted([name(item) for item in items]), attempt():
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
        yield from each(part, run, hint=hint, name=name, watch=watch, attempt=attempt)


def tried(run: Callable[[], Result], hint: str) -> Result | Failed:
    """Outcome of one item."""
    [(_, found)] = each([None], lambda _: [run()], hint=hint)
    return found


def written(write: Callable[[], Result], hint: str) -> Result | Failed:
    """Outcome of writing the files of one item.

    Args:
        write: Makes and writes them.
        hint: Advice where memory ran out, for the message.

    Raises:
        OSError: The folder cannot be written, for example since the disk is full: this is the job's
            error.
    """
    found = tried(write, hint)
    if isinstance(found, Failed) and isinstance(found.problem, OSError):
        number = found.problem.errno
        if number is not None and number not in _OF_ONE_FILE and found.kind != OUT_OF_MEMORY:
            raise found.problem
    return found


def _alike(first: Failed | None, failed: Failed | None) -> bool:
    """Whether an item failed by the configuration, as the first one did."""
    if failed is None or not isinstance(failed.problem, CONFIGURATION):
        return False
    return first is None or (first.error, first.kind) == (failed.error, failed.kind)


def _free() -> None:
    """Frees memory that a failed batch used."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
