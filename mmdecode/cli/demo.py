"""``mmdecode demo``: demonstrations with models and data that ship with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mmdecode.cli.flags import Device, Dtype, Overwrite, Quantize, refuse_without
from mmdecode.cli.output import JsonFlag, emit_json
from mmdecode.demo.setting import Setting
from mmdecode.errors import UnknownNameError

DEMOS = ("speech", "vlm", "image")
MODELS = {
    "vlm": "zoo:llava-scenes",
    "image": "zoo:llamagen-scenes",
}
GUIDES = ("vcd", "ritual", "damro", "pai")
FOLDER = Path("outputs/demo")


def command(
    context: typer.Context,
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[speech|vlm|image]",
            help="Transcribe recordings without and with a drafter; answer questions about images "
            "without and with guides; or generate images token by token and in parallel. Default: "
            "all.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model of the named demo or, if all are run, of the speech demo, for example "
            "openai/whisper-small: a folder, a Hub id, a short name or zoo:NAME. Default: a "
            "shipped model, and for recordings of people moonshine:tiny-en if it is installed.",
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="For speech: Medusa heads for the model (a folder, a Hub id or zoo:NAME), or a "
            "drafter of 'mmdecode methods draft' as name or name:key=value,... Default: "
            "the shipped heads, or recycling for a model that does not ship."
        ),
    ] = None,
    guides: Annotated[
        list[str] | None,
        typer.Option(
            "--guide",
            help="For vlm: a guide of 'mmdecode methods guide' as name or name:key=value,...; "
            f"repeatable. Default: {', '.join(GUIDES)}.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Output folder; if all demos are run, it gets a subfolder for each. Default: "
            f"{', '.join(f'{FOLDER}/{name}' for name in DEMOS)}.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of images, or of clips (the long recording is not counted).",
        ),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option(min=1, help="For speech: timed runs per clip and decoder; the median counts."),
    ] = 3,
    overwrite: Overwrite = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    seed: Annotated[
        int,
        typer.Option(help="Seed of images, confidence intervals and guides; text is greedy."),
    ] = 0,
    json: JsonFlag = False,
) -> None:
    """Transcribe speech, answer questions about images and generate images, with shipped models.

    Recordings of people are transcribed by moonshine:tiny-en, if it is installed. Synthetic speech
    is transcribed without and with a drafter, which must not change the text and should be faster.
    Questions about images are answered without and with guides, whose answers may differ. Captions
    are decoded with a drafter too: the same tokens in fewer passes. Images are generated token by
    token, then in parallel with the same result, then with a relaxed rule, which changes the
    distribution. Each demo writes a page, report.html. The exit code is 1 if drafting changed a
    token.
    """
    if what is not None and what not in DEMOS:
        raise UnknownNameError.of("demo", what, DEMOS)
    if what not in (None, "vlm"):
        refuse_without("'mmdecode demo vlm'", ["guides"], context)
    if what not in (None, "speech"):
        refuse_without("'mmdecode demo speech'", ["draft", "repeats"], context)
    chosen = DEMOS if what is None else (what,)
    found: dict[str, dict[str, Any]] = {}
    for name in chosen:
        folder = FOLDER / name if output is None else output if what else output / name
        asked_for = model if name == chosen[0] else None
        shared = Setting(folder.resolve(), limit, device, dtype, quantize, seed, overwrite)
        if name == "speech":
            from mmdecode.demo.speech import command as demo_speech

            found[name] = demo_speech.run(asked_for, shared, draft, repeats)
        elif name == "vlm":
            from mmdecode.demo.vision import command as demo_vlm

            used = GUIDES if guides is None else guides
            found[name] = demo_vlm.run(asked_for or MODELS[name], shared, used)
        else:
            from mmdecode.demo.images import command as demo_image

            found[name] = demo_image.run(asked_for or MODELS[name], shared)
    if json:
        emit_json(found if what is None else found[what])
    if not all(one.get("identical", True) for one in found.values()):
        raise typer.Exit(1)
