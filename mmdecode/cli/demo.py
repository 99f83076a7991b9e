"""``mmdecode demo``: what the library does, shown with the models that ship with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mmdecode.cli.flags import Device, Dtype, Overwrite, refuse_without
from mmdecode.cli.output import JsonFlag, emit_json
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
            help="Recordings, transcribed plainly and drafted; questions about images, answered "
            "plainly and with guides; or pictures, drawn plainly and in parallel. Else one after "
            "the other.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Of the demo that is named, else of speech, as openai/whisper-small: a folder, a "
            "Hub id, its short name or zoo:NAME; a shipped one by default, and of recordings of "
            "people moonshine:tiny-en where it is installed.",
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="Speech: Medusa heads for the model (a folder, a Hub id or zoo:NAME), or any "
            "draft of 'mmdecode methods draft' as name or name:key=value,...; by default "
            "the shipped heads, and recycling for a model that does not ship."
        ),
    ] = None,
    guides: Annotated[
        list[str] | None,
        typer.Option(
            "--guide",
            help="Questions: a guide of 'mmdecode methods guide' as name or name:key=value,...; "
            f"repeat it for more; {', '.join(GUIDES)} by default.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder for the results; of all demos, a folder with one for each. Default: "
            f"{', '.join(f'{FOLDER}/{name}' for name in DEMOS)}.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Only the first so many clips, without the long recording; only so many images "
            "or pictures.",
        ),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option(min=1, help="Speech: timed runs of each clip each way; the median counts."),
    ] = 3,
    overwrite: Overwrite = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: Annotated[
        int,
        typer.Option(help="Of pictures, of intervals, and of guides that draw; text is greedy."),
    ] = 0,
    json: JsonFlag = False,
) -> None:
    """Transcribe shipped speech, ask about shipped images, and draw, with shipped models.

    Recordings of people come first, by moonshine:tiny-en where it is installed. Synthetic
    speech is transcribed plainly and drafted: the text must not change, the time should. Questions
    about images are answered plainly and under guides, side by side: the answers may change. Their
    captions are written once more with a draft: in fewer passes, the tokens the same.
    Pictures are drawn plainly, exactly in parallel, and relaxed, which changes the distribution.
    Each writes a page to look at (report.html). The exit code is 1 if drafting changed a single
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
        shared = (folder.resolve(), limit, device, dtype, seed, overwrite)
        if name == "speech":
            from mmdecode.demo.speech import command as demo_speech

            found[name] = demo_speech.run(asked_for, draft, repeats, *shared)
        elif name == "vlm":
            from mmdecode.demo.vision import command as demo_vlm

            loaded = asked_for or MODELS[name]
            found[name] = demo_vlm.run(loaded, GUIDES if guides is None else guides, *shared)
        else:
            from mmdecode.demo.images import command as demo_image

            found[name] = demo_image.run(asked_for or MODELS[name], *shared)
    if json:
        emit_json(found if what is None else found[what])
    if not all(one.get("identical", True) for one in found.values()):
        raise typer.Exit(1)
