"""All commands as the command line loads them, and what they do in this process."""

import json

from typer.main import get_command
from typer.testing import CliRunner

from mmdecode.cli.app import COMMANDS, app


def leaves(command, name):
    """Commands by the words that call them."""
    inner = getattr(command, "commands", None)
    if inner is None:
        return {name: command}
    return {k: v for n, c in inner.items() for k, v in leaves(c, f"{name} {n}").items()}


def all_commands():
    """Every command that does something, by the words that call it."""
    group = get_command(app)
    loaded = {name: group.resolve_command(None, [name])[1] for name in COMMANDS}
    return {k: v for name, command in loaded.items() for k, v in leaves(command, name).items()}


def invoke(*words, **options):
    """Runs a command line, whose words may be paths and numbers.

    ``catch_exceptions=False`` raises what the command raises, but for its exit code.
    """
    return CliRunner().invoke(app, [str(word) for word in words], **options)


def json_of(done):
    """What a command with ``--json`` prints last."""
    return json.loads(done.stdout.splitlines()[-1])
