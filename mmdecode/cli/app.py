"""The ``mmdecode`` command: a table of sub-commands, each imported only when it runs.

A sub-command lives in ``mmdecode/cli/<module>.py`` and offers one of two things:

* ``def command(...)`` with typer annotations, or
* ``app = typer.Typer(...)``, for a command that has sub-commands of its own.

Its line in ``COMMANDS`` gives the help shown by ``mmdecode --help``, so that this needs no import
of torch; a command whose file does not exist is not listed. Every command takes ``--json``
(``output.JsonFlag``) and ends with ``output.emit_json`` when it is set; options and checks that
commands share are added by ``shared`` and, for those that load models, ``models``. Errors are
raised as classes of ``mmdecode.errors``; ``main`` prints them and exits with code 2. Code 1 is for
a command that finished with failures among its items (``raise typer.Exit(1)``).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import mmdecode
from mmdecode.cli.models import with_models
from mmdecode.cli.shared import Group, in_panels, with_devices, with_shared
from mmdecode.errors import one_line
from mmdecode.runs.console import console, print_line

__all__ = ["COMMANDS", "app", "main"]

COMMANDS = {
    "demo": "Transcribe shipped speech, ask about shipped images, and draw, with shipped models.",
    "transcribe": "Transcribe audio files.",
    "ask": "Ask questions about images.",
    "generate-image": "Draw images of classes or prompts.",
    "stream": "Transcribe while the audio still comes.",
    "evaluate": "Score models on speech or on images, or transcripts made elsewhere.",
    "train": "Train heads, correctors or zoo models.",
    "audit": "Prove that drafting leaves the output of your model as it is.",
    "bench": "Measure speed against plain decoding.",
    "zoo": "List the tiny models that ship with the package.",
    "methods": "List drafters, acceptance rules, guides and adapters.",
    "env": "Show versions and devices, for bug reports.",
}


class LazyGroup(Group):
    """A group that knows its commands' names and help, and imports one when it is chosen."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name, text in COMMANDS.items():
            if importlib.util.find_spec(_module(name)) is not None:
                self.commands[name] = TyperCommand(name, help=text)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds the command as usual, then puts the real one in the place of the stub."""
        name, command, rest = super().resolve_command(ctx, args)
        if name in COMMANDS:
            command = _load(name)
        return name, command, rest


def _module(name: str) -> str:
    return f"mmdecode.cli.{name.replace('-', '_')}"


@functools.cache
def _load(name: str) -> Any:
    module = importlib.import_module(_module(name))
    if hasattr(module, "app"):
        loaded = typer.main.get_command(module.app)
    else:
        single = typer.Typer(add_completion=False)
        single.command(name)(module.command)
        loaded = typer.main.get_command(single)
    loaded.name = name
    loaded = with_models(loaded)
    if hasattr(module, "PANELS"):
        loaded = in_panels(loaded, module.PANELS)
    return with_shared(with_devices(loaded))


def _show_version(asked: bool) -> None:
    if asked:
        print(f"mmdecode {mmdecode.__version__}")
        raise typer.Exit


app = typer.Typer(
    name="mmdecode",
    cls=LazyGroup,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Faster and truer decoding for speech and vision-language models."""


def main() -> None:
    """Runs the command line; an error becomes one line on stderr and exit code 2."""
    try:
        app(prog_name="mmdecode")
    except Exception as error:
        if os.environ.get("MMDECODE_DEBUG") == "1":
            raise
        if console.tells_all:
            traceback.print_exc()
        print_line(f"error: {one_line(error)}", console, "red")
        sys.exit(2)


if __name__ == "__main__":
    main()
