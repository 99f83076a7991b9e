"""The error classes.

Every message says what was given, what was expected and how to fix it. Each class is also a
built-in exception, such as ``ValueError``, so that ordinary ``except`` clauses work.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = [
    "IncompatibleError",
    "InputError",
    "MMDecodeError",
    "MissingExtraError",
    "OptionError",
    "OverloadError",
    "ShapeError",
    "UnknownNameError",
    "UnsupportedModelError",
    "did_you_mean",
    "one_line",
    "refuse_unknown",
    "run_script",
]


class MMDecodeError(Exception):
    """Base of all errors raised on purpose by this package."""


class OptionError(MMDecodeError, ValueError):
    """The value of an option, or a combination of options, is not allowed."""


class IncompatibleError(MMDecodeError, ValueError):
    """Two parts, such as a drafter and an acceptance rule, do not fit each other."""

    @classmethod
    def between(cls, left: str, right: str, because: str, hint: str) -> IncompatibleError:
        """Builds the error with the message ``left does not fit right: because; hint``.

        Args:
            left: One part, for example ``accept 'rejection'``.
            right: The other part, for example ``draft 'lookup'``.
            because: Reason why they do not fit, without a full stop.
            hint: How to fix it, in the imperative.
        """
        return cls(f"{left} does not fit {right}: {because}; {hint}")


class ShapeError(MMDecodeError, ValueError):
    """A tensor has the wrong shape; the message shows the given and the expected shape."""


class InputError(MMDecodeError, ValueError):
    """An audio file, an image or a text cannot be read or used."""


class CrashError(InputError):
    """An input ended the process that read or decoded it, again and again."""


class OverloadError(MMDecodeError, RuntimeError):
    """More work waits than is allowed; nothing was taken, and it can be given again later."""


class UnsupportedModelError(MMDecodeError, TypeError):
    """The model has no adapter, or a method cannot work with it."""


class UnknownNameError(MMDecodeError, KeyError):
    """A name is not known; the message suggests the nearest known names."""

    @classmethod
    def of(cls, kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
        """Builds the error, whose message has suggestions.

        Args:
            kind: Kind of name that was looked up, for example ``draft``.
            name: The unknown name.
            known: All names that exist.
        """
        known = sorted(known)
        listing = ", ".join(known) if known else "(none)"
        return cls(f"no {kind} named {name!r}{did_you_mean(name, known)}; known: {listing}")

    def __str__(self) -> str:
        # KeyError prints the repr of its argument, which would quote the whole sentence.
        return str(self.args[0]) if self.args else ""


class MissingExtraError(MMDecodeError, ImportError):
    """An optional dependency is not installed; the message ends with the command that installs it.

    Args:
        message: The missing package and its use, for example
            ``reading audio files needs librosa``.
        extra: Extra of this package that installs it: ``asr``, ``vlm``, ``image``, ``train``,
            ``eval``, ``vad``, ``media``, ``mic``, ``scale``, ``serve`` or ``torchao``.
    """

    def __init__(self, message: str, *, extra: str) -> None:
        super().__init__(f"{message}; install it with: pip install 'mmdecode[{extra}]'")
        self.extra = extra

    @classmethod
    @contextlib.contextmanager
    def instead(cls, message: str, *, extra: str) -> Iterator[None]:
        """Raises this error, of the same arguments, for an `ImportError` inside the context."""
        try:
            yield
        except ImportError as error:
            raise cls(message, extra=extra) from error


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Returns ``; did you mean 'x'?`` for the names nearest to ``name``, or an empty string.

    Args:
        name: The name that was given.
        known: All names that exist.
        cutoff: Least similarity, 0 to 1, of a name that is suggested.
    """
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=cutoff)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def refuse_unknown(options: Iterable[str], known: Sequence[str], what: str = "option") -> None:
    """Raises an error for the first option that is not in ``known``.

    Args:
        options: Names to check.
        known: Names that are allowed.
        what: Kind of the names, for the message.

    Raises:
        OptionError: A name is not in ``known``.
    """
    for name in options:
        if name not in known:
            raise OptionError(
                f"no {what} named {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}"
            )


def one_line(error: Exception) -> str:
    """Returns an error's message on one line; says so if the error was not expected."""
    text = " ".join(str(error).split())
    if isinstance(error, MMDecodeError):
        return text
    if isinstance(error, OSError) and error.filename is not None:
        return f"{str(error.filename)[:200]}: {error.strerror}; check the path, or choose another"
    if isinstance(error, RuntimeError) and "device string" in text:
        return "no such device; expected cpu, cuda, cuda:N or mps"
    return (
        f"unexpected {type(error).__name__}: {text[:300]}; set MMDECODE_DEBUG=1 to see where it "
        "was raised, and report it"
    )


def run_script(main: Callable[[], object]) -> None:
    """Runs the main function of a script; an error becomes one line on stderr and exit code 2."""
    try:
        main()
    except Exception as error:
        if os.environ.get("MMDECODE_DEBUG") == "1":
            raise
        sys.stderr.write(f"error: {one_line(error)}\n")
        sys.exit(2)
