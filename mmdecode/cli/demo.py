"""``mmdecode demo``: demonstrations with models and data that ship with the package."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from mmdecode.cli import flags
from mmdecode.cli.output import JsonFlag, emit_json
from mmdecode.demo.setting import Setting
from mmdecode.errors import UnknownNameError

DEMOS = {"speech": "speech", "vlm": "vision", "image": "images"}
"""Rooms of `mmdecode.demo`, by the names of the demonstrations."""
MODELS = {"vlm": "zoo:llava-scenes", "image": "zoo:llamagen-scenes"}
GUIDES = ("vcd", "ritual", "damro", "pai")
FOLDER = Path("outputs/demo")


def command(
    context: typer.Context,
    what: Annotated[
        str | None, typer.Argument(metavar="[speech|vlm|image]", show_default=False)
    ] = None,
    model: str | None = None,
    draft: str | None = None,
    guides: flags.Texts = None,
    output: Path | None = None,
    limit: flags.Limit = None,
    repeats: flags.AtLeast1 = 3,
    overwrite: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    quantize: flags.Rounding = None,
    seed: int = 0,
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

    Options:
        what: Transcribe recordings without and with a drafter; answer questions about images
            without and with guides; or generate images token by token and in parallel. Default:
            all.
        model: Model of the named demo or, if all are run, of the speech demo, for example
            openai/whisper-small: a folder, a Hub id, a short name or zoo:NAME. Default: a shipped
            model, and for recordings of people moonshine:tiny-en if it is installed.
        draft: For speech: Medusa heads for the model (a folder, a Hub id or zoo:NAME), or a drafter
            of 'mmdecode methods draft' as name or name:key=value,... Default: the shipped heads, or
            recycling for a model that does not ship.
        guides (--guide): For vlm: a guide of 'mmdecode methods guide' as name or
            name:key=value,...; repeatable. Default: vcd, ritual, damro, pai.
        output (--out): Output folder; if all demos are run, it gets a subfolder for each. Default:
            outputs/demo/speech, outputs/demo/vlm, outputs/demo/image.
        limit: Maximum number of images, or of clips (the long recording is not counted).
        repeats: For speech: timed runs per clip and decoder; the median counts.
        seed: Seed of images, confidence intervals and guides; text is greedy.
    """
    if what is not None and what not in DEMOS:
        raise UnknownNameError.of("demo", what, DEMOS)
    flags.refuse_without("'mmdecode demo vlm'", ["guides"], context, what in (None, "vlm"))
    of_speech = ["draft", "repeats"]
    flags.refuse_without("'mmdecode demo speech'", of_speech, context, what in (None, "speech"))
    chosen = list(DEMOS) if what is None else [what]
    own = {"speech": (draft, repeats), "vlm": (GUIDES if guides is None else guides,)}
    found: dict[str, dict[str, Any]] = {}
    for name in chosen:
        folder = FOLDER / name if output is None else output if what else output / name
        loaded = (model if name == chosen[0] else None) or MODELS.get(name)
        setting = Setting(folder.resolve(), limit, device, dtype, quantize, seed, overwrite)
        room = importlib.import_module(f"mmdecode.demo.{DEMOS[name]}.command")
        found[name] = room.run(loaded, setting, *own.get(name, ()))
    if json:
        emit_json(found if what is None else found[what])
    if not all(one.get("identical", True) for one in found.values()):
        raise typer.Exit(1)
