"""Option definitions that several commands share."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

import typer

from mmdecode.checkpoints import default_recogniser
from mmdecode.errors import OptionError
from mmdecode.model_names import REAL, SYNTHETIC


def model_help(what: str, example: str) -> str:
    """Help of an option that names a model.

    Args:
        what: Kind of model, for example ``A Whisper model``.
        example: Hub id of an example.
    """
    return f"{what}, as {example}: a folder, a Hub id, its short name or zoo:NAME."


Recogniser = Annotated[
    str,
    typer.Option(
        "--model",
        help=model_help("A speech recogniser", "openai/whisper-small"),
        default_factory=default_recogniser,
        show_default=f"{REAL} where it is installed, else {SYNTHETIC}, which knows 489 words",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue in --out; same settings only.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace files that mmdecode did not write, or results.")
]
Language = Annotated[
    str | None, typer.Option(help="For example en; else the model's own, else detected.")
]
Task = Annotated[str | None, typer.Option(help="transcribe or translate.")]
Timestamps = Annotated[
    bool, typer.Option("--timestamps/--no-timestamps", help="Let the model predict times.")
]
MaxNewTokens = Annotated[int | None, typer.Option(min=1, help="Maximum tokens per window.")]
Device = Annotated[str, typer.Option(help="auto (cuda if there is one), cpu, cuda, cuda:N or mps.")]
Dtype = Annotated[
    str,
    typer.Option(
        help="auto, fp32, fp16 or bf16. On CUDA auto is the checkpoint's if that is half, else "
        "bf16, or fp16 on cards without it; on a CPU and for zoo models it is fp32."
    ),
]


def refuse_without(needed: str, options: Collection[str], context: typer.Context) -> None:
    """Refuses options that have no effect without another one, which was not given.

    Args:
        needed: The other option, as on the command line.
        options: Names of the parameters that need it.
        context: Context of the command.

    Raises:
        OptionError: One of them was given.
    """
    for parameter in context.command.params:
        if parameter.name in options:
            source = context.get_parameter_source(parameter.name)
            if source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP"):
                flag = parameter.opts[0]
                raise OptionError(
                    f"{flag} does nothing without {needed}; give {needed} too, or leave {flag} out"
                )
