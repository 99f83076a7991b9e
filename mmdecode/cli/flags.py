"""Help and types of options: one vocabulary over all commands.

A command documents its own options in its docstring, see `documented`; those that several commands
have are in `VOCABULARY`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_origin

import typer

from mmdecode.checkpoints import default_recogniser
from mmdecode.errors import MMDecodeError, OptionError
from mmdecode.model_names import REAL, SYNTHETIC
from mmdecode.runs.distributed import shard_of
from mmdecode.runs.engines import LOCAL, engine_of

Command = TypeVar("Command", bound=Callable[..., Any])
ENTRY = re.compile(r"^ {4}(\w+)(?: \((.+?)\))?: (.+(?:\n {5,}.+)*)", re.MULTILINE)
"""An option in a docstring: its name, its flags if they are written, and its help."""


def entries(text: str) -> dict[str, tuple[list[str], str]]:
    """Returns flags and help of the options that are described in a text, by name."""
    return {
        name: (written.split(", ") if written else [], " ".join(about.split()))
        for name, written, about in ENTRY.findall(text)
    }


VOCABULARY = entries("""
    device: auto (cuda if available), cpu, cuda, cuda:N or mps.
    device_map: Split the model over devices, CPU and disk by accelerate: auto, balanced,
        sequential, or a JSON file of modules and devices.
    dtype: auto, fp32, fp16 or bf16. On CUDA auto is fp16 for a checkpoint in fp16, else bf16,
        or fp16 on GPUs without bf16; on a CPU and for zoo models auto is fp32.
    cpus (--cpus-per-worker): With --engine ray: CPUs of a worker.
    engine: local: this process decodes; processes: --workers processes of this machine do; ray:
        workers of a Ray cluster do, or of this machine if RAY_ADDRESS names none (extra scale).
        A worker that ends is replaced. Results are the same.
    gpus (--gpus-per-worker): With --engine ray: GPUs of a worker; a fraction lets workers share
        one and its memory. [default: 1 if the cluster has GPUs]
    epochs: Passes over the samples.
    guide: Guide, which changes the distribution, as name or name:key=value,...; see 'mmdecode
        methods guide'.
    language: Language, such as en. Default: the model's, else detected.
    limit: Maximum number of recordings, questions or other items.
    max_new_tokens: Maximum tokens per window.
    noise_by: Seed of a question's random numbers: request, or image, with which vcd and its kin
        change an image alike for all questions, and read it once.
    out: Folder for the result and the training state.
    overwrite (--overwrite): Replace earlier results, and files of other programs.
    prompt_cache: Memory for prompts, so that what questions about one image have in common is
        read once; 0: off.
    quantize: int8 or, on CUDA, fp8: the model's weights are rounded, which makes it another
        model.
    rate: Highest learning rate.
    resume: Continue the run in --out, with the same settings.
    shard: INDEX/COUNT: decode only this share of the work, such as 2/8; the process that ends last
        merges the results. [default: what accelerate, torchrun or a SLURM array says, or 1/1]
    seed: Seed of all random choices.
    steps: Maximum number of steps.
    task: transcribe or translate.
    time_limit_s (--time-limit): Seconds without progress after which a worker is ended, and what
        it was decoding is tried again, item by item.
    timestamps (--timestamps/--no-timestamps): Let the model predict times.
    vad: Skip audio without speech; needs the extra vad, or --vad-method ctc.
    vad_method: Detector of speech: silero; ctc, where the model's CTC head finds no text; or
        ctc:head=FOLDER; implies --vad.
    vad_min_silence_s: Keep shorter silences, in seconds; 2, of a CTC head 0.7.
    vad_min_speech_s: Ignore speech that is shorter, in seconds; 0.25, of a CTC head 0.
    vad_pad_s: Audio kept around speech, in seconds; 0.4, of a CTC head 0.15.
    vad_threshold: Probability from which a frame of audio counts as speech; 0.5, of a CTC head 0.3.
    workers: Number of workers; with --engine ray also MIN:MAX. [default: one per GPU of this
        machine, or two]
""")
"""Flags and help of options that several commands have."""
VAD = "--vad or --vad-method"
VAD_SETTINGS = ("vad_threshold", "vad_min_speech_s", "vad_min_silence_s", "vad_pad_s")
"""Options that need one of `VAD`."""


def documented(command: Command) -> Command:
    """Gives the options of a command the help that is written in its docstring or `VOCABULARY`.

    The last section of the docstring is ``Options:``, with ``name: help`` for each parameter that
    has no other help, or should have another one; ``name (--flag, -f): help`` also sets its flags.
    Without flags, a switch that is off by default has no ``--no-name``.

    Args:
        command: Function of a command; it is changed, and returned.

    Raises:
        MMDecodeError: There is no docstring.
    """
    if command.__doc__ is None:
        raise MMDecodeError("python -OO removes the help of options; run mmdecode without -OO")
    about, _, text = inspect.cleandoc(command.__doc__).partition("\n\nOptions:\n")
    own, parameters = entries(text), []
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        kind, how = parameter.annotation, typer.Option()
        if get_origin(kind) is Annotated:
            kind, how = kind.__origin__, copy.copy(kind.__metadata__[0])
        if name in own or (name in VOCABULARY and not how.help):
            flags, how.help = own.get(name) or VOCABULARY[name]
            if not flags and kind is bool and parameter.default is not True:
                flags = ["--" + name.replace("_", "-")]
            if flags:  # typer takes the first one of an annotation for the default
                how.default, how.param_decls = ..., flags
            parameter = parameter.replace(annotation=Annotated[kind, how])
        parameters.append(parameter)
    command.__doc__ = about
    return with_parameters(command, parameters)


def with_parameters(command: Command, parameters: Iterable[inspect.Parameter]) -> Command:
    """Gives a function the parameters that typer reads from it; returns the function."""
    signature = inspect.Signature(list(parameters))
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in signature.parameters.values()}
    return command


def as_command(run: Callable[..., Any], name: str | None = None) -> Any:
    """Returns the command that typer makes of a function, see `documented`."""
    app = typer.Typer(add_completion=False)
    app.command(name)(documented(run))
    return typer.main.get_command(app)


def options_of(run: Callable[..., Any]) -> list[Any]:
    """Returns the options of a function, whose callbacks alone get the values."""
    options = as_command(run).params
    for option in options:
        option.expose_value = False
    return options


def before(command: Any, step: Callable[[dict[str, Any]], None]) -> None:
    """Makes a command hand its arguments, by name, to a function that checks or changes them."""
    run = command.callback

    @functools.wraps(run)
    def stepped(**given: Any) -> Any:
        step(given)
        return run(**given)

    command.callback = stepped


def leaves(command: Any) -> Iterator[Any]:
    """Yields a command, or the commands of a group."""
    if not hasattr(command, "commands"):
        yield command
    for inner in getattr(command, "commands", {}).values():
        yield from leaves(inner)


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


def work_of(given: Mapping[str, Any], stdin: bool = False) -> dict[str, Any]:
    """Returns how the work is distributed, for `mmdecode.runs.work.run`.

    Args:
        given: All arguments of a command.
        stdin: Whether standard input is read.

    Raises:
        OptionError: An option is not valid, or several processes would read standard input.
    """
    engine = engine_of(given)
    shard = shard_of(given["shard"])
    if stdin and (shard or engine.name != LOCAL):
        raise OptionError("several processes cannot read standard input; give a file for '-'")
    return {"engine": engine, "shard": shard}


def model_option(what: str, example: str, **how: Any) -> Any:
    """Returns an option that names a model.

    Args:
        what: Kind of model, for example ``A Whisper model``.
        example: Hub id of such a model.
        **how: More about the option, as for ``typer.Option``.
    """
    text = f"{what}, such as {example}: a folder, a Hub id, its short name or zoo:NAME."
    return typer.Option("--model", help=text, **how)


Texts = list[str] | None
AtLeast0 = Annotated[int, typer.Option(min=0)]
AtLeast1 = Annotated[int, typer.Option(min=1)]
Seconds = Annotated[float, typer.Option(min=1, metavar="SECONDS")]
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
EngineName = Literal["local", "processes", "ray"]
Workers = Annotated[str | None, typer.Option(metavar="N")]
Share = Annotated[str | None, typer.Option(metavar="INDEX/COUNT")]
GPUs = Annotated[float | None, typer.Option(min=0)]
CPUs = Annotated[float, typer.Option(min=0.1)]
NoiseBy = Literal["request", "image"]
Bytes = Annotated[int, typer.Option(min=0, metavar="BYTES")]
Rounding = Literal["int8", "fp8"] | None


def refuse_without(
    needed: str, options: Collection[str], context: typer.Context, given: Any = None
) -> None:
    """Refuses options that have no effect, because an option that they need was not given.

    Args:
        needed: The missing option, as on the command line.
        options: Parameter names of the options that need it.
        context: Context of the command.
        given: Value of the needed option; nothing is refused if there is one.

    Raises:
        OptionError: One of ``options`` was given.
    """
    for parameter in context.command.params:
        if parameter.name in options and not given:
            source = context.get_parameter_source(parameter.name)
            if source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP"):
                flag = parameter.opts[0]
                raise OptionError(
                    f"{flag} does nothing without {needed}; give {needed} too, or leave {flag} out"
                )
