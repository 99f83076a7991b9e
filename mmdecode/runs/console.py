"""Terminal output of the commands: results on stdout, everything else on stderr.

Results are printed with ``out``; progress, warnings and errors are printed with ``console``.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)


class Stderr(Console):
    """The console of stderr.

    Attributes:
        errors_only: Set by ``--quiet``: only lines in red, errors and failures, are printed.
        tells_all: Set by ``--verbose``: output of other libraries and tracebacks are shown too.
    """

    errors_only = False
    tells_all = False

    def print(self, *objects: Any, style: Any = None, **how: Any) -> None:
        """Prints as rich does, but under ``--quiet`` only what has the style ``red``."""
        if style == "red" or not self.errors_only:
            super().print(*objects, style=style, **how)

    @property
    def is_terminal(self) -> bool:
        """Whether progress bars are shown: on a terminal, without ``--quiet``."""
        return super().is_terminal and not self.errors_only


console = Stderr(stderr=True)
out = Console()


def print_line(text: str, where: Console = out, style: str | None = None) -> None:
    """Prints one line verbatim: without rich's markup, highlighting and wrapping."""
    where.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def progress_bar(*more: ProgressColumn) -> Progress:
    """Returns a bar on stderr that is removed when done; ``more`` columns come before the time."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        *more,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,  # otherwise it would leave an empty line in a file
    )


@contextlib.contextmanager
def warnings_shown(how: Literal["always", "default"]) -> Iterator[None]:
    """Prints this library's warnings as plain yellow lines on stderr inside the context.

    Args:
        how: ``always`` prints a warning each time it occurs; ``default`` prints equal texts once.
    """

    def shown(message: Any, *_: Any) -> None:
        print_line(f"{message}", console, "yellow")

    with warnings.catch_warnings():
        warnings.filterwarnings(how, module=r"mmdecode\.")
        warnings.showwarning = shown  # type: ignore[assignment]
        yield


def without_other_bars() -> None:
    """Hides transformers' progress bars in a command's output; warnings are still shown."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def only_our_output() -> None:
    """Hides transformers' progress bars, and without ``--verbose`` its warnings too."""
    from transformers.utils import logging

    without_other_bars()
    if not console.tells_all:
        logging.set_verbosity_error()
