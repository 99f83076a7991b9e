"""Option definitions that several commands share, and where the help of all others is written.

A command documents its own options in its docstring, see `documented`.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_origin

import typer

from mmdecode.checkpoints import default_recogniser
from mmdecode.errors import OptionError
from mmdecode.model_names import REAL, SYNTHETIC

Command = TypeVar("Command", bound=Callable[..., Any])
ENTRY = re.compile(r"^ {4}(\w+)(?: \((.+?)\))?: (.+(?:\n {5,}.+)*)", re.MULTILINE)
"""An option in the docstring of a command: its name, flags if any are written, and help."""


def documented(command: Command) -> Command:
    """Gives the parameters of a command the help that its docstring has for them.

    The last section of the docstring is ``Options:``, with ``name: help`` for each parameter whose
    annotation has no help, or another one; ``name (--flag, -f): help`` also sets its flags. Without
    flags, a switch that is off by default has no ``--no-name``.

    Args:
        command: Function of a command; it is changed, and returned.
    """
    about, _, entries = inspect.cleandoc(command.__doc__ or "").partition("\n\nOptions:\n")
    parameters = dict(inspect.signature(command, eval_str=True).parameters)
    for name, written, text in ENTRY.findall(entries):
        parameter = parameters[name]
        flags = written.split(", ") if written else []
        if not flags and parameter.annotation is bool and parameter.default is not True:
            flags = ["--" + name.replace("_", "-")]
        option = described(parameter.annotation, " ".join(text.split()), *flags)
        parameters[name] = parameter.replace(annotation=option)
    command.__doc__ = about
    return with_parameters(command, parameters.values())


def with_parameters(command: Command, parameters: Iterable[inspect.Parameter]) -> Command:
    """Gives a function the parameters that typer reads from it; returns the function."""
    command.__signature__ = inspect.Signature(list(parameters))  # type: ignore[attr-defined]
    command.__annotations__ = {
        name: one.annotation for name, one in command.__signature__.parameters.items()
    }
    return command


def described(option: Any, text: str, *flags: str) -> Any:
    """Returns the annotation of an option with a help text, and with flags if any are given."""
    kind, how = option, typer.Option()
    if get_origin(option) is Annotated:
        kind, how = option.__origin__, copy.copy(option.__metadata__[0])
    how.help, how.param_decls = text, flags or how.param_decls
    return Annotated[kind, how]


def fields_of(kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a command that are fields of a dataclass, by name."""
    return {one.name: given[one.name] for one in dataclasses.fields(kind) if one.name in given}


def picked(given: Mapping[str, Any], names: str, later: str = "") -> dict[str, Any]:
    """Returns arguments of a command by name.

    Args:
        given: All arguments.
        names: Names, separated by spaces.
        later: More names, of options that older runs did not have: left out if they are ``None``.
    """
    found = {name: given[name] for name in names.split()}
    return found | {name: given[name] for name in later.split() if given[name] is not None}


def model_help(what: str, example: str) -> str:
    """Returns the help of an option that names a model.

    Args:
        what: Kind of model, for example ``A Whisper model``.
        example: Hub id of such a model.
    """
    return f"{what}, such as {example}: a folder, a Hub id, its short name or zoo:NAME."


def model_option(what: str, example: str, **how: Any) -> Any:
    """Returns an option that names a model, see `model_help`."""
    return typer.Option("--model", help=model_help(what, example), **how)


Texts = list[str] | None
AtLeast0 = Annotated[int, typer.Option(min=0)]
AtLeast1 = Annotated[int, typer.Option(min=1)]
Limit = Annotated[int | None, typer.Option(min=1)]
Recogniser = Annotated[
    str,
    model_option(
        "A speech recogniser",
        "openai/whisper-small",
        default_factory=default_recogniser,
        show_default=f"{REAL} if it is installed, else {SYNTHETIC}, which knows 489 words",
    ),
]
Guide = Annotated[
    str | None,
    typer.Option(
        help="Guide, which changes the distribution, as name or name:key=value,...; see 'mmdecode "
        "methods guide'."
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue the run in --out, with the same settings.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace earlier results, and files of other programs.")
]
Language = Annotated[
    str | None, typer.Option(help="Language, such as en. Default: the model's, else detected.")
]
Task = Annotated[str | None, typer.Option(help="transcribe or translate.")]
Timestamps = Annotated[
    bool, typer.Option("--timestamps/--no-timestamps", help="Let the model predict times.")
]
MaxNewTokens = Annotated[int | None, typer.Option(min=1, help="Maximum tokens per window.")]
PromptCacheBytes = Annotated[
    int,
    typer.Option(
        "--prompt-cache",
        min=0,
        metavar="BYTES",
        help="Memory for prompts, so that what questions about one image have in common is read "
        "once; 0: off.",
    ),
]
NoiseBy = Annotated[
    Literal["request", "image"],
    typer.Option(
        help="Seed of a question's random numbers: request, or image, with which vcd and "
        "its kin change an image alike for all questions, and read it once."
    ),
]
Device = Annotated[str, typer.Option(help="auto (cuda if available), cpu, cuda, cuda:N or mps.")]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        help="Split the model over devices, CPU and disk by accelerate: auto, balanced, "
        "sequential, or a JSON file of modules and devices."
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="auto, fp32, fp16 or bf16. On CUDA auto is fp16 for a checkpoint in fp16, else bf16, "
        "or fp16 on GPUs without bf16; on a CPU and for zoo models auto is fp32."
    ),
]
Quantize = Annotated[
    Literal["int8", "fp8"] | None,
    typer.Option(
        help="int8 or, on CUDA, fp8: the model's weights are rounded, which makes it another model."
    ),
]


def refuse_without(needed: str, options: Collection[str], context: typer.Context) -> None:
    """Refuses options that have no effect, because an option that they need was not given.

    Args:
        needed: The missing option, as on the command line.
        options: Parameter names of the options that need it.
        context: Context of the command.

    Raises:
        OptionError: One of ``options`` was given.
    """
    for parameter in context.command.params:
        if parameter.name in options:
            source = context.get_parameter_source(parameter.name)
            if source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP"):
                flag = parameter.opts[0]
                raise OptionError(
                    f"{flag} does nothing without {needed}; give {needed} too, or leave {flag} out"
                )
