"""All commands, as the command line loads them."""

from typer.main import get_command

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
