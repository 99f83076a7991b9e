"""``mmdecode generate-image``: generates images from classes or prompts."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import mmdecode
from mmdecode.cli import flags
from mmdecode.cli.output import JsonFlag, emit_json
from mmdecode.errors import InputError, MMDecodeError, OptionError
from mmdecode.runs.console import console, print_line, warnings_shown
from mmdecode.runs.distributed import local_device
from mmdecode.runs.engines import TIME_LIMIT_S
from mmdecode.runs.work import Tally, run

if TYPE_CHECKING:
    from mmdecode.image_ar.generator import ImageGenerator
    from mmdecode.image_ar.results import ImageRequest

FOLDER = Path("outputs/images")
LOADED = (
    "model_id draft accept mode guidance temperature top_k top_p seed dtype refiner drafted grid "
    "negative_prompt template"
)
"""Arguments of `ImageGenerator.from_pretrained` that may change an image."""


def command(
    context: typer.Context,
    model: Annotated[
        str, flags.model_option("An image model", "deepseek-community/Janus-Pro-1B")
    ] = "zoo:llamagen-scenes",
    names: flags.Texts = None,
    numbers: list[int] | None = None,
    prompts: flags.Texts = None,
    file: Path | None = None,
    negative_prompt: str | None = None,
    raw_prompt: bool = False,
    n: flags.AtLeast1 = 1,
    mode: str | None = None,
    draft: str | None = None,
    accept: str = "auto",
    guidance: float | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    batch_size: flags.AtLeast1 = 8,
    start: Path | None = None,
    mask: Path | None = None,
    keep_rows: int | None = None,
    refiner: str | None = None,
    drafted: int | None = None,
    codes: str | None = None,
    grid: bool = False,
    likelihood: bool = False,
    output: Path = FOLDER,
    resume: bool = False,
    overwrite: bool = False,
    engine: flags.EngineName = "local",
    workers: flags.Workers = None,
    shard: flags.Share = None,
    time_limit_s: flags.Seconds = TIME_LIMIT_S,
    gpus: flags.GPUs = None,
    cpus: flags.CPUs = 1,
    device: str = "auto",
    dtype: str = "auto",
    quantize: flags.Rounding = None,
    json: JsonFlag = False,
) -> None:
    """Generate images from classes or prompts.

    Each image is a PNG with its settings as metadata, written as soon as it is generated, with a
    line in results.jsonl. Images that fail are listed at the end, and the exit code is then 1. An
    interrupted run is continued with --resume.

    For example:

      mmdecode generate-image --class ring --class star -n 4 --mode exact --grid

      mmdecode generate-image --class ring -n 8 --draft jacobi:window=32 --accept cool_sd:delta=1.5

      mmdecode generate-image --model deepseek-community/Janus-Pro-1B --prompts prompts.txt --resume

      accelerate launch -m mmdecode generate-image --class ring -n 1000 --out rings

      mmdecode generate-image --class star --start ring.png --keep-rows 8

    Options:
        names (--class): A class by its name; repeatable.
        numbers (--class-id): A class by its number, from 0; repeatable.
        prompts (--prompt): A prompt; repeatable.
        file (--prompts): A text file with a prompt or a class on each line.
        negative_prompt: Prompt that guidance leads away from; for models that take prompts.
        raw_prompt: Pass prompts to the model unchanged; by default Janus gets them in its chat
            template.
        n (--count, -n): Images per class or prompt.
        mode: ar: token by token; exact: the same images in fewer passes; fast: other images of the
            same distribution, by speculative sampling; relaxed: fewer passes, but another
            distribution; zipar:window=8: several rows in parallel, but another distribution.
        draft: Drafter, as name or name:key=value,...: jacobi:window=32, or assistant:model=... for
            a small image model; see 'mmdecode methods draft'.
        accept: Acceptance rule. With auto a drafter does not change images; lantern:lambda_=2 and
            others change the distribution; see 'mmdecode methods accept'.
        guidance: Guidance scale s of u + s (c - u); 1: off. Default: the model's own.
        temperature: Sampling temperature. Default: the model's own.
        top_k: Tokens to sample from; 0: all. Default: the model's own.
        top_p: Total probability of the tokens to sample from. Default: the model's own.
        seed: The same seed gives the same images.
        batch_size: Images generated at once; it does not change them.
        start: An image to complete, of the model's size; for an image that mmdecode generated, the
            codes in its metadata are used.
        mask: With --start: a mask image, white where the image is generated again. In raster order,
            codes do not depend on kept codes after them (locally constrained).
        keep_rows: With --start: rows of codes to keep; the rest is sampled exactly.
        refiner: For next-scale models: a smaller model for the last scales (CoDe).
        drafted: With --refiner: number of scales that --model generates.
        codes: ROWSxCOLUMNS of codes, for models whose image size is free (Emu3).
        grid: Also write all images as one, grid.png.
        likelihood: Compute the log-likelihood of each image in another pass.
        output (--out): Folder for images and results.jsonl.
    """
    given = dict(locals())

    from mmdecode.image_ar.generator import ImageGenerator
    from mmdecode.image_ar.jobs import ImageFolder, read_prompts
    from mmdecode.image_ar.modes import check_mode

    flags.refuse_without("--start", ["mask", "keep_rows"], context, start)
    if start is not None and (mask is None) == (keep_rows is None):
        raise OptionError("--start completes an image; give --mask or --keep-rows, and not both")
    flags.refuse_without("--refiner", ["drafted"], context, refiner is not None)
    check_mode(mode, draft, accept)
    lines = [] if file is None else read_prompts(file)
    if not any((names, numbers, prompts, lines)):
        raise OptionError("nothing to draw; give --class, --class-id, --prompt or --prompts")
    given |= {"model_id": model, "grid": _grid_of(codes), "template": not raw_prompt}
    given |= {"start": start and _digest(start), "mask": mask and _digest(mask)}
    load = flags.picked(given, LOADED, later="quantize")
    # what may change an image; the batch does not
    settings = load | flags.picked(given, "start mask keep_rows likelihood")
    folder = ImageFolder(
        *(output, settings, {"likelihood": likelihood}, grid),
        **flags.picked(given, "batch_size resume overwrite"),
        command=sys.argv[1:],
    )
    wrong: list[dict[str, Any]] = []
    guarantee = ""

    def requests(generator: ImageGenerator) -> list[ImageRequest]:
        nonlocal guarantee
        guarantee = generator.guarantee
        folder.name_by(generator.labels, _metadata(generator, load), generator.repeatable)
        if start is not None:
            folder.options |= _started(generator, model, start, mask, keep_rows)
        asked = _conditions(generator, names, numbers, prompts) + _drawable(generator, lines, wrong)
        if not asked:
            raise InputError(f"{wrong[0]['error']}; no line of the file is valid")
        return generator.requests(asked, n)

    work = flags.work_of(given)
    loaded = partial(
        ImageGenerator.from_pretrained, **load, batch=batch_size, device=local_device(device)
    )
    with warnings_shown("always"):
        tally = run(folder, loaded, items_of=requests, keep=True, **work)
    tally.failures = dict(enumerate([*wrong, *tally.failures.values()]))
    # all images of a call have one start
    guarantee = next((line["law"] for line in tally.results.values()), guarantee)
    _report(tally, guarantee, output, json)
    if not tally.fine:
        raise typer.Exit(1)


def _metadata(generator: ImageGenerator, load: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that are written into every PNG, the model's defaults included."""
    names = "model_id mode draft accept refiner drafted dtype negative_prompt template quantize"
    return {
        "Software": f"mmdecode {mmdecode.__version__}",
        **{name.removesuffix("_id"): load[name] for name in names.split() if name in load},
        **generator.settings,
    }


def _conditions(
    generator: ImageGenerator,
    names: list[str] | None,
    numbers: list[int] | None,
    prompts: list[str] | None,
) -> list[int | str]:
    """Returns the classes or prompts on the command line, whichever the model takes.

    Raises:
        OptionError: Prompts are given to a model of classes, or classes to a model of prompts.
    """
    if generator.classes and prompts:
        raise OptionError("this model takes classes; give --class or --class-id, no --prompt")
    if not generator.classes and (names or numbers):
        raise OptionError("this model takes prompts; give --prompt, no --class or --class-id")
    return [*(names or ()), *(numbers or ()), *(prompts or ())]


def _drawable(
    generator: ImageGenerator,
    lines: Sequence[tuple[str, str | InputError]],
    wrong: list[dict[str, Any]],
) -> list[int | str]:
    """Returns the conditions in the valid lines of a file; ``wrong`` gets those that are not."""
    found: list[int | str] = []
    for where, line in lines:
        try:
            if isinstance(line, InputError):
                raise line
            number = generator.classes and re.fullmatch(r"\d+", line)
            condition = int(line) if number else line
            generator.requests([condition])
        except (MMDecodeError, ValueError) as error:  # a number may have too many digits
            text = str(error) if isinstance(line, InputError) else f"{where}: {error}"
            wrong.append({"id": where, "error": text, "kind": type(error).__name__})
        else:
            found.append(condition)
    return found


def _grid_of(codes: str | None) -> tuple[int, int] | None:
    """Parses the value of ``--codes`` to rows and columns."""
    if codes is None:
        return None
    found = re.fullmatch(r"(\d+)x(\d+)", codes)
    if not found:
        raise OptionError(f"--codes {codes!r}; expected ROWSxCOLUMNS, such as 90x90")
    return int(found[1]), int(found[2])


def _digest(path: Path) -> str:
    """Returns a checksum of a file's content."""
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; give an image") from error


def _started(
    generator: ImageGenerator,
    model: str,
    start: Path,
    mask: Path | None,
    keep_rows: int | None,
) -> dict[str, Any]:
    """Reads the image to complete and the part to keep, as arguments of the generator.

    Raises:
        InputError: ``start`` or ``mask`` is no image.
        OptionError: ``keep_rows`` is out of range.
    """
    import numpy as np
    import torch

    from mmdecode.image_ar.jobs import codes_in
    from mmdecode.vlm.images import read_image

    rows, columns = generator.grid
    image = codes_in(start, model)
    if image is None or tuple(image.shape) != (rows, columns):
        image = torch.tensor(np.asarray(read_image(start))).permute(2, 0, 1) / 255
    if mask is None:
        assert keep_rows is not None, "the command asks for one of them"
        if not 0 < keep_rows < rows:
            raise OptionError(f"--keep-rows {keep_rows}; expected 1 to {rows - 1} rows of codes")
        known = torch.arange(rows)[:, None].expand(rows, columns) < keep_rows
    else:
        known = torch.tensor(np.asarray(read_image(mask).convert("L"))) < 128
    return {"start": image, "known": known}


def _report(tally: Tally, guarantee: str, output: Path, as_json: bool) -> None:
    results, failures = list(tally.results.values()), list(tally.failures.values())
    if as_json:
        emit_json(
            {
                "drawn": tally.done,
                "resumed": tally.done_before,
                "failed": len(failures),
                "law": guarantee,
                "wall_s": round(tally.wall_s, 3),
                "stats": tally.stats,
                "output": output,
                "images": results,
                "failures": failures,
            }
        )
    line = tally.counted("drawn") + tally.speed()
    if guarantee != "exact":
        line += f"; {guarantee}: not the model's own distribution"
    for how in sorted({image["completion"] for image in results if "completion" in image}):
        line += f"; {how}"
    print_line(line, console)
    for failure in failures:
        named = failure["error"].startswith(failure["id"])
        what = failure["error"] if named else f"{failure['id']}: {failure['error']}"
        print_line(f"failed: {what}", console, "red")
    print_line(str(output), console, "bold")
