"""Options that several commands on speech have, word for word."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from mmdecode.errors import InputError, OptionError

Model = Annotated[str, typer.Option(help="A Whisper model: a folder, a Hub id or zoo:NAME.")]
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
MaxNewTokens = Annotated[int | None, typer.Option(min=1, help="Most tokens per window.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; else cuda if any.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]


FILES = frozenset(
    ".csv .gif .gz .htm .html .ipynb .jpeg .jpg .json .jsonl .log .md .npy .npz .pdf .png .pt .pth "
    ".safetensors .srt .svg .tar .trn .tsv .txt .vtt .wav .webp .yaml .yml .zip".split()
)
"""Endings of names that a file has and a folder has not."""


def refuse_file(out: Path | None) -> Path | None:
    """Refuses a value of ``--out`` that names a file; ``--out`` is a folder in every command.

    Raises:
        OptionError: It ends like one.
        InputError: It is one.
    """
    if out is None or out.is_dir():
        return out
    if out.exists():
        raise InputError(f"--out {out} is a file; choose another --out, a folder or a new name")
    if out.suffix.lower() in FILES:
        raise OptionError(
            f"--out {out} ends like a file, and --out is a folder in every command; give --out "
            f"{out.with_suffix('')}, which the files are written into"
        )
    return out


def with_shared(command: Any) -> Any:
    """A command, or a group with its commands, whose options have what they have everywhere."""
    for inner in getattr(command, "commands", {}).values():
        with_shared(inner)
    for option in command.params:
        if "--out" in option.opts:
            option.callback = lambda context, option, out: refuse_file(out)
    return command


def refuse_without(needed: str, options: Collection[str], context: typer.Context) -> None:
    """Refuses options that would do nothing; for where what they belong to was not given.

    Args:
        needed: What they belong to, as the user would give it.
        options: Names of the command's parameters.
        context: Of the command.

    Raises:
        OptionError: One of them was given.
    """
    for parameter in context.command.params:
        if parameter.name in options:
            source = context.get_parameter_source(parameter.name)
            if source is not None and source.name == "COMMANDLINE":
                flag = parameter.opts[0]
                raise OptionError(
                    f"{flag} does nothing without {needed}; give {needed} too, or leave {flag} out"
                )
