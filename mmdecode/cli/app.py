"""The ``mmdecode`` command, which imports a sub-command only when it runs.

The module ``mmdecode/cli/<name>.py`` of a sub-command defines one of:

* ``def command(...)`` with typer annotations;
* ``app = typer.Typer(...)``, if the command has sub-commands.

``COMMANDS`` has the one-line help of each command, so that ``mmdecode --help`` does not import
torch. A function ``refuse`` of the module gets the arguments before anything is printed. Every
command takes ``--json`` (``output.JsonFlag``), and then ends with ``output.emit_json``.
`mmdecode.cli.flags` says where the help of options is written, `mmdecode.cli.shared` adds the
options and checks of all commands, `mmdecode.cli.models` those of commands that load a model.
Errors are raised as classes of ``mmdecode.errors``; ``main`` prints them and exits with code 2. A
command exits with code 1 if it finished but some of its items failed (``raise typer.Exit(1)``).
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import mmdecode
from mmdecode.cli import flags
from mmdecode.cli.shared import Group, completed
from mmdecode.errors import one_line
from mmdecode.runs.console import console, print_line

__all__ = ["COMMANDS", "app", "main"]

COMMANDS = {
    "demo": "Transcribe speech, answer questions about images, generate images: shipped examples.",
    "transcribe": "Transcribe audio files.",
    "ask": "Ask questions about images.",
    "generate-image": "Generate images from classes or prompts.",
    "results": "Show how far a job got, and why items failed; go on with it.",
    "stream": "Transcribe audio while it is being recorded.",
    "serve": "Serve models to clients of OpenAI's interface.",
    "evaluate": "Score models on speech or images, or transcripts made elsewhere.",
    "train": "Train drafters, transcript correctors or the shipped tiny models.",
    "audit": "Check that drafters do not change the output of your model.",
    "bench": "Measure the speed of drafters against decoding without a drafter.",
    "zoo": "List the tiny models that ship with the package.",
    "methods": "List drafters, acceptance rules, guides and adapters.",
    "env": "Show versions and devices, for bug reports.",
}


class LazyGroup(Group):
    """A command group that lists names and help, and imports a command only to run it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name, text in COMMANDS.items():
            self.commands[name] = TyperCommand(name, help=text)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds a command by name, and returns the imported command instead of its stub."""
        name, command, rest = super().resolve_command(ctx, args)
        if name in COMMANDS:
            command = _load(name)
        return name, command, rest


@functools.cache
def _load(name: str) -> Any:
    module = importlib.import_module(f"mmdecode.cli.{name.replace('-', '_')}")
    if hasattr(module, "app"):
        loaded = typer.main.get_command(module.app)
    else:
        loaded = flags.as_command(module.command)
    loaded.name = name
    return completed(loaded, module)


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
