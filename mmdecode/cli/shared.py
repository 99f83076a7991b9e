"""Options and checks that all commands share.

* ``--options FILE.yaml`` sets any options of the command; the command line overrides them. The
  values become click's defaults, so that recorded settings and their hash include them.
* ``--quiet`` and ``--verbose`` set how much is written to stderr.
* ``--out`` must be a folder.
* ``auto`` as device or dtype is resolved before the command runs.
* ``none`` as drafter or guide means decoding without; in lists it is dropped, since comparisons
  include decoding without drafter and guide anyway.
* A long help is split into the panels that ``PANELS`` of the command's module defines.
* A command group without arguments shows its help and exits with code 0.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mmdecode.checkpoints import device_of, dtype_of
from mmdecode.cli import flags
from mmdecode.cli.models import with_models
from mmdecode.errors import InputError, OptionError, did_you_mean
from mmdecode.model_names import full_name
from mmdecode.runs.console import console, print_line

__all__ = ["Group", "completed", "given_in", "with_devices"]

_eager = functools.partial(typer.Option, is_eager=True, rich_help_panel="Every command")
"""Makes an option of every command, which is read before the command's own."""

NONE = "none"
PARTS = ("draft", "guide", "guides", "correct")
"""Parameters whose value may be `NONE`, alone or in a list."""

COUNTS = ("limit", "batch_size", "steps", "epochs", "heads", "rank")
"""Integer parameters that must be at least 1; all others must be at least 0."""

FILES = frozenset(
    ".csv .gif .gz .htm .html .ipynb .jpeg .jpg .json .jsonl .log .md .npy .npz .pdf .png .pt .pth "
    ".safetensors .srt .svg .tar .trn .tsv .txt .vtt .wav .webp .yaml .yml .zip".split()
)
"""Suffixes by which a value of ``--out`` is taken for a file and refused."""


class Group(TyperGroup):
    """A command group that, without arguments, shows its help and exits with code 0."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses arguments as click does; without arguments, as if ``--help`` were given."""
        return super().parse_args(ctx, args if args or ctx.resilient_parsing else ["--help"])


def completed(command: Any, module: Any = None) -> Any:
    """Adds what all commands share to a command, or to the commands of a group; returns it.

    Args:
        command: Command that typer made.
        module: Its module, which may have ``PANELS``, see `in_panels`, and a function ``refuse``
            that gets the arguments by name before anything is printed.
    """
    with_models(command)
    if hasattr(module, "PANELS"):
        in_panels(command, module.PANELS)
    with_devices(command)
    for one in flags.leaves(command):
        # paragraphs are one line, which the help wraps at the width of the terminal
        one.help = one.help and re.sub(r"(?<=\S)\n *(?=\S)", " ", one.help)
        if hasattr(module, "refuse"):
            flags.before(one, module.refuse)
        for option in one.params:
            if "--out" in option.opts:
                option.callback = _check_out
        names = {option.name: option.opts[-1] for option in one.params}
        flags.before(one, functools.partial(_check_numbers, names))
        one.params += flags.options_of(_every_command)
    return command


def _check_numbers(names: Mapping[str | None, str], given: Mapping[str, Any]) -> None:
    """Refuses numbers that are not finite, and integers below 0, or below 1 if they count."""
    for name, value in given.items():
        flag = names.get(name, name)
        for one in value if isinstance(value, (list, tuple)) else [value]:
            whole = isinstance(one, int) and abs(one) < 2**63
            finite = whole or (isinstance(one, float) and math.isfinite(one))
            if isinstance(one, (int, float)) and not finite:
                raise OptionError(f"{flag} {one}: expected a finite number below 2 ** 63")
            least = 1 if name in COUNTS else 0
            if whole and not isinstance(one, bool) and one < least:
                raise OptionError(f"{flag} {one}: expected {least} or more")


def in_panels(command: Any, panels: Mapping[str, str]) -> None:
    """Sorts a command's options into panels of its help.

    Args:
        command: Command that typer made.
        panels: Parameter names, separated by spaces, by the title of their panel, in order.
    """
    panel_of = {name: title for title, names in panels.items() for name in names.split()}
    for option in command.params:
        if option.name in panel_of:
            option.rich_help_panel = panel_of[option.name]
    order = list(panels)
    command.params.sort(key=lambda option: order.index(panel_of.get(option.name, order[0])))


def with_devices(command: Any) -> Any:
    """Makes a command, or a group's commands, resolve ``auto`` as device or dtype before they run.

    The resolved values are printed, and replace ``auto`` in recorded settings and their hash too.
    """
    for one in flags.leaves(command):
        if any(option.name == "device" for option in one.params):
            flags.before(one, _resolve)
    return command


def _resolve(given: dict[str, Any]) -> None:
    """Resolves device and dtype, drops `NONE`, and prints where the model runs."""
    for part in PARTS:
        if given.get(part) == NONE:
            given[part] = None
        elif isinstance(given.get(part), list):
            given[part] = [one for one in given[part] if one != NONE]
    named = [given.get("model"), *(given.get("corrector") or ())]
    model = next((full_name(name) for name in named if name), "")
    device = device_of(given["device"])
    kind = dtype_of(given.get("dtype"), model, device)
    shown = str(kind).removeprefix("torch.")
    split = given.get("device_map")
    if split is None or given["device"] != "auto":
        given["device"] = str(device)
    where = device if split is None else f"devices by {split}"
    if "dtype" in given:
        given["dtype"] = shown
    rounded = given.get("quantize") or saved_format(model)
    shown = f", {shown}, {rounded} weights" if rounded else f", {shown}"
    if "dtypes" in given:  # it names each where it shows it
        shown = ""
    if model and not given.get("rescore") and os.environ.get("RANK", "0") == "0":
        print_line(f"model {model} on {where}{shown}", console)


def saved_format(name: str) -> str | None:
    """Returns the format of quantised weights in a local folder; ``None``: they are not quantised.

    Args:
        name: The folder; other names of checkpoints give ``None``.
    """
    try:
        config = json.loads((Path(name) / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    method = (config.get("quantization_config") or {}).get("quant_method")
    return None if method is None else str(method).removeprefix("mmdecode_")


def _check_out(context: typer.Context, option: Any, out: Path | None) -> Path | None:
    """Returns a value of ``--out`` unless it names a file.

    Raises:
        OptionError: The name has a suffix in `FILES`, and is no existing folder.
        InputError: The name is an existing file.
    """
    if out is None or context.resilient_parsing or out.is_dir():
        return out
    if out.exists():
        raise InputError(f"--out {out} is a file; choose another --out, a folder or a new name")
    if out.suffix.lower() in FILES:
        raise OptionError(
            f"--out {out} looks like a file, and --out is a folder in every command; give --out "
            f"{out.with_suffix('')}, and the files are written into that folder"
        )
    return out


def _read_options(context: typer.Context, value: Path | None) -> Path | None:
    if value is not None and not context.resilient_parsing:
        context.default_map = given_in(value, context.command)
    return value


def given_in(file: Path, command: Any) -> dict[str, Any]:
    """Reads options from a file; returns values by parameter name, as a command line would give.

    Args:
        file: YAML or JSON that maps option names, with hyphens or underscores, to values.
        command: The command whose options the file may set.

    Raises:
        InputError: The file cannot be read, or is no mapping.
        OptionError: The command has no such option, or the option takes no such value.
    """
    import yaml

    form = "an option on each line, such as 'batch-size: 4'"
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise InputError(
            f"--options {file} cannot be read: {why}; expected YAML with {form}"
        ) from error
    if not isinstance(found, Mapping):
        raise InputError(f"--options {file} holds {type(found).__name__}; expected {form}")
    own = ("options", "help", "quiet", "verbose")
    known = {
        flag.lstrip("-"): option
        for option in command.params
        for flag in option.opts
        if flag.startswith("-") and option.name not in own
    }
    given = {}
    for key, value in found.items():
        name = str(key).lstrip("-").replace("_", "-")
        if name not in known:
            raise OptionError(
                f"--options {file}: no option {str(key)!r}{did_you_mean(name, known)}; known: "
                f"{', '.join(known)}"
            )
        if value is not None:
            given[known[name].name] = _as_given(value, known[name], f"--options {file}: {key}")
    return given


def _as_given(value: Any, option: Any, where: str) -> Any:
    """Converts a value to text, so that it is parsed as if from the command line."""
    if option.is_flag:
        if not isinstance(value, bool):
            raise OptionError(f"{where}: {value!r}; expected true or false")
        return value
    several = isinstance(value, (list, tuple))
    if several and not option.multiple:
        raise OptionError(f"{where}: several values; the option takes one")
    values = value if several else [value]
    for one in values:
        if not isinstance(one, (str, int, float)) or isinstance(one, bool):
            raise OptionError(
                f"{where}: {one!r} is no text and no number; put a text such as no or off, which "
                "YAML reads as another type, in quotes"
            )
    return [str(one) for one in values] if option.multiple else str(value)


def _set_amount(context: typer.Context, option: typer.CallbackParam, value: bool) -> bool:
    """Sets how much is written to stderr; refuses ``--quiet`` with ``--verbose``."""
    if context.resilient_parsing:
        return value
    quiet = option.name == "quiet"
    setattr(console, "errors_only" if quiet else "tells_all", value)
    if value:
        asked = context.meta.setdefault("mmdecode", set())
        asked.add(option.name)
        if len(asked) > 1:
            raise OptionError("--quiet and --verbose contradict each other; give one of them")
        context.with_resource(
            _silenced() if quiet else _environment("TRANSFORMERS_VERBOSITY", "info")
        )
    return value


def _every_command(
    options: Annotated[Path | None, _eager(callback=_read_options, metavar="FILE.yaml")] = None,
    quiet: Annotated[bool, _eager(callback=_set_amount)] = False,
    verbose: Annotated[bool, _eager(callback=_set_amount)] = False,
) -> None:
    """Options of every command.

    Options:
        options: File with options by name; the command line overrides them.
        quiet: Write only errors to stderr.
        verbose: Show warnings of all libraries, and tracebacks of errors.
    """


@contextmanager
def _silenced() -> Iterator[None]:
    """Suppresses warnings, log lines and progress bars of all libraries inside the context."""
    before = logging.root.manager.disable
    with warnings.catch_warnings(), _environment("HF_HUB_DISABLE_PROGRESS_BARS", "1"):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable inside the context; libraries read it when imported."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def warn_of_load(load: float) -> None:
    """Prints a warning if the machine is too busy for times to be reliable.

    Args:
        load: Load average before the measurement.
    """
    if load > 0.7:
        text = f"system load {load}: other programs run, and times are unreliable"
        print_line(text, console, "yellow")
