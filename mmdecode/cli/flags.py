"""Option definitions that several commands share."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal

import typer

from mmdecode.checkpoints import default_recogniser
from mmdecode.errors import OptionError
from mmdecode.model_names import REAL, SYNTHETIC


def model_help(what: str, example: str) -> str:
    """Returns the help of an option that names a model.

    Args:
        what: Kind of model, for example ``A Whisper model``.
        example: Hub id of such a model.
    """
    return f"{what}, such as {example}: a folder, a Hub id, its short name or zoo:NAME."


Recogniser = Annotated[
    str,
    typer.Option(
        "--model",
        help=model_help("A speech recogniser", "openai/whisper-small"),
        default_factory=default_recogniser,
        show_default=f"{REAL} if it is installed, else {SYNTHETIC}, which knows 489 words",
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
