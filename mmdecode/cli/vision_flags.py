"""Options of the commands that evaluate vision-language models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmdecode.cli.flags import model_help

Data = Annotated[
    list[str] | None,
    typer.Option(help="Questions: 'zoo' for shipped ones, or a folder or file; see above."),
]
Model = Annotated[
    str | None,
    typer.Option(help=model_help("A vision-language model", "llava-hf/llava-1.5-7b-hf")),
]
Guides = Annotated[
    list[str] | None,
    typer.Option(
        "--guide",
        help="A guide, as name or name:key=value,...; 'mmdecode methods guide' lists "
        "them. The plain model ('none') is always included. Repeat it for more.",
    ),
]
Images = Annotated[Path | None, typer.Option(help="Folder of the images.")]
Part = Annotated[
    str, typer.Option(help="Part of the zoo's sets: development to tune on, test to report.")
]
Seeds = Annotated[int, typer.Option(min=1, help="Number of seeds of each sampled mode.")]
Sample = Annotated[
    bool | None,
    typer.Option(
        "--sample/--greedy",
        help="Only sample, or only decode greedily; default: both.",
    ),
]
Controls = Annotated[
    bool,
    typer.Option(
        "--controls/--no-controls",
        help="Also run controls, which a good guide has to beat: plain decoding (greedy and, with "
        "sampling, sampled), with sampling a plausibility cut alone and a matched temperature; for "
        "yes/no questions an instruction to answer yes, the flip of answers with a small margin, "
        "and a constant shift of the margin.",
    ),
]
Suffix = Annotated[
    str, typer.Option(help="Appended to each question: none, one-word, short, or any other text.")
]
Parser = Annotated[
    str,
    typer.Option(help="Rule that parses answers: leading, original, vcd, lmms, vlmevalkit or mme."),
]
Redraw = Annotated[
    bool,
    typer.Option(
        "--redraw/--no-redraw",
        help="Sample the yes/no answers of all seeds from the logits of one forward pass, unless "
        "the guide is random; or decode every seed.",
    ),
]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Use only this many questions, for a smoke test.")
]
BatchSize = Annotated[int, typer.Option(min=1, help="Questions decoded at once.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")]
Warmup = Annotated[int, typer.Option(min=0, help="Untimed runs of each guide's first batch.")]
Output = Annotated[
    Path | None,
    typer.Option("--out", help="Folder for answers, tables, figures and HTML page."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue in --out; same settings only.")]
Rescore = Annotated[
    Path | None, typer.Option(help="Folder of an earlier run: score its answers again.")
]
Resamples = Annotated[int, typer.Option(min=1, help="Number of bootstrap samples.")]
Seed = Annotated[
    int, typer.Option(help="First seed of sampling, and seed of guides and of every bootstrap.")
]
