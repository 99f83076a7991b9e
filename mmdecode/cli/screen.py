"""Text of streams on a terminal, in a file or in a pipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.live import Live
from rich.text import Text

from mmdecode.runs.console import out, print_line

if TYPE_CHECKING:
    from mmdecode.asr.streaming import Update


class Screen:
    """Prints committed words as running text, and on a terminal provisional words, dimmed.

    Text of several inputs has the name of its input before it: a sentence per line on a terminal,
    else the words of an update.

    Args:
        names: Names of the inputs.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._several = len(names) > 1
        self._lines = dict.fromkeys(names, "")
        self._open = dict.fromkeys(names, "")
        self._live = Live(console=out, transient=True, auto_refresh=False)

    def __enter__(self) -> Screen:
        if out.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()
        if out.is_terminal:
            for name in self._lines:
                self._print(name)
        elif not self._several:
            print_line("")

    def _print(self, name: str) -> None:
        """Prints the line of an input, and begins the next one."""
        line, self._lines[name] = self._lines[name], ""
        self._live.update(self._open_lines(), refresh=True)  # drawn again below the line
        if line:
            out.print(self._label(name) + line, markup=False, highlight=False)

    def _label(self, name: str) -> str:
        return f"{name}: " if self._several else ""

    def _open_lines(self) -> Text:
        """Returns the lines that have not ended, with their provisional words."""
        parts: list[Any] = []
        for name, line in self._lines.items():
            if line or self._open[name]:
                parts += ["\n" * bool(parts), self._label(name) + line, (self._open[name], "dim")]
        return Text.assemble(*parts)

    def show(self, name: str, update: Update, ended: bool = False) -> None:
        """Shows an update.

        Args:
            name: Name of its input.
            update: The update.
            ended: Whether it is the last one of its input.
        """
        if not out.is_terminal:
            self._write(name, update.text)
            return
        line = self._lines[name] = (self._lines[name] + update.text).lstrip()
        self._open[name] = (
            "".join(update.provisional) if line else ("".join(update.provisional).lstrip())
        )
        if ended or line.endswith((".", "?", "!")) or len(line) > out.width:
            self._print(name)
        self._live.update(self._open_lines(), refresh=True)

    def _write(self, name: str, text: str) -> None:
        """Writes committed words to a file or pipe; rich prints whole lines only."""
        if self._several:
            if text.strip():
                print_line(f"{name}: {text.strip()}")
        else:
            out.file.write(text if self._lines[name] else text.lstrip())
            self._lines[name] = self._lines[name] or text
        out.file.flush()
