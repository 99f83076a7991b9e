"""Options of the command line: one vocabulary over all commands."""

from typing import Any

import pytest
from typer.testing import CliRunner

from mmdecode.cli.app import COMMANDS, _load, app
from mmdecode.errors import InputError, OptionError

GONE = "--manifest --input --output --batch --image-folder --precision --norm --n".split()


def leaves(name: str, command: Any) -> Any:
    """A command's name and itself, or those of its sub-commands."""
    if hasattr(command, "commands"):
        for inner, sub in command.commands.items():
            yield from leaves(f"{name} {inner}", sub)
    else:
        yield name, command


LEAVES = dict(pair for name in COMMANDS for pair in leaves(name, _load(name)))


@pytest.mark.parametrize("name", LEAVES)
def test_no_command_has_a_name_of_its_own_for_a_common_option(name):
    options = [p for p in LEAVES[name].params if p.opts[0].startswith("-")]
    assert not {flag for p in options for flag in p.opts} & set(GONE)
    for option in options:
        long = [flag for flag in option.opts if flag.startswith("--")]
        assert len(long) == 1, f"{option.opts} are several names for one thing"


@pytest.mark.parametrize(
    "name", [n for n, c in LEAVES.items() if any("--out" in p.opts for p in c.params)]
)
def test_out_is_a_folder_in_every_command(name, tmp_path):
    (tmp_path / "file").write_text("")
    given = [*name.split(), "--out"]
    refused = CliRunner().invoke(app, [*given, str(tmp_path / "new/a.JSONL")]).exception
    assert isinstance(refused, OptionError) and "give --out" in str(refused)
    refused = CliRunner().invoke(app, [*given, str(tmp_path / "file")]).exception
    assert isinstance(refused, InputError)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_may_have_a_dot_in_its_name(tmp_path):
    (tmp_path / "odd.json").mkdir()
    for name in ("odd.json", "run-0.1", ".hidden"):
        done = CliRunner().invoke(app, ["ask", "--out", str(tmp_path / name)])
        assert "nothing to ask" in str(done.exception)
