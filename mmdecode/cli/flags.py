"""Options that several commands on speech have, word for word."""

from __future__ import annotations

from typing import Annotated

import typer

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
