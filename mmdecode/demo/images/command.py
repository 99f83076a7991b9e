"""``mmdecode demo image``: generates images of the same seeds in three decoding modes.

The modes are ``ar`` (token by token), ``exact`` (Jacobi decoding that keeps the distribution) and
``relaxed`` (Jacobi decoding that does not keep it).
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdecode.runs.console import console, only_our_output, print_line, warnings_shown

if TYPE_CHECKING:
    from mmdecode.demo.images.page import PageImage, Way, Ways
    from mmdecode.image_ar.generator import ImageGenerator
    from mmdecode.image_ar.results import GeneratedImage

NUM_IMAGES = 4
WAYS = ("ar", "exact", "relaxed")
PROMPTS = ("a red ring", "a blue star", "a green cup", "a yellow key")
"""Prompts for models that are conditioned on captions."""


def run(
    model: str,
    out: Path,
    limit: int | None,
    device: str | None,
    dtype: str,
    quantize: str | None,
    seed: int,
    overwrite: bool,
) -> dict[str, Any]:
    """Generates images, prints the measurements and writes ``report.html``.

    Args:
        model: Image model: folder, Hub id or ``zoo:NAME``.
        out: Folder of the page.
        limit: Number of images, at most 4; ``None``: 4.
        device: Device of the model; ``None``: chosen automatically.
        dtype: Dtype of the model.
        quantize: See `mmdecode.image_ar.loading.load`.
        seed: Seed of the sampling.
        overwrite: Whether to replace a file that mmdecode did not write.

    Returns:
        The measurements as JSON values, for ``--json``.
    """
    from rich.progress import track

    from mmdecode.demo.images import page as image_page
    from mmdecode.demo.images.page import Way, Ways
    from mmdecode.image_ar.generator import ImageGenerator
    from mmdecode.image_ar.loading import load
    from mmdecode.image_ar.modes import MODES, WINDOW, decoder_of, guarantee_of
    from mmdecode.runs.files import refuse_foreign, write_file

    refuse_foreign([out / "report.html"], overwrite)
    started = time.perf_counter()
    count = min(limit or NUM_IMAGES, NUM_IMAGES)
    console.print(
        f"Drawing {count} pictures in {len(WAYS)} ways: token by token, exactly in parallel, which "
        "leaves them as they are, and relaxed, which does not. This takes about half a "
        "minute on two idle cores.",
        highlight=False,
    )
    only_our_output()
    network = load(model, device, dtype, quantize)
    adapter = network.adapter
    ways: list[Way] = []
    names: list[str] = []
    with warnings_shown("default"):
        for mode in WAYS:
            decoder = decoder_of(mode, None, "auto", adapter=adapter)
            generator = ImageGenerator(network, decoder, seed=seed, batch=1)
            requests = generator.requests(_wanted(generator, count))
            next(generator.images(requests))  # warm-up
            images = list(
                track(
                    generator.images(requests, likelihood=True),
                    description=mode,
                    total=count,
                    console=console,
                    transient=True,
                )
            )
            names = [_called(image) for image in images]
            rule = MODES[mode].rule(adapter.codebook() is not None)
            window = f"Jacobi window of {min(WINDOW, adapter.layout.length)}, {rule}"
            ways.append(
                Way(
                    name=mode,
                    about=window if MODES[mode].drafts else "token by token",
                    guarantee=guarantee_of(decoder),
                    images=_page_images(images, ways[0].images if ways else None),
                )
            )
    report = Ways(
        model=model,
        names=names,
        ways=ways,
        conditions=_conditions(adapter.model, generator.settings, seed),
    )
    write_file(out / "report.html", image_page.page(report), overwrite)
    summary = _summary(report)
    summary["seconds"] = round(time.perf_counter() - started, 1)
    summary["files"] = {"report.html": str(out / "report.html")}
    _show(report, summary)
    return summary


def _wanted(generator: ImageGenerator, count: int) -> list[int | str]:
    """Returns what the images show: classes spread evenly over all classes, or `PROMPTS`."""
    if not generator.classes:
        return list(PROMPTS[:count])
    return [index * generator.classes // count for index in range(count)]


def _called(image: GeneratedImage) -> str:
    if image.label is not None:
        return image.label
    return image.condition if isinstance(image.condition, str) else f"class {image.condition}"


def _page_images(
    images: Sequence[GeneratedImage], plain: Sequence[PageImage] | None
) -> list[PageImage]:
    from mmdecode.demo.images.page import PageImage

    found = []
    for index, image in enumerate(images):
        assert image.log_likelihood is not None, "it was asked for"
        file = io.BytesIO()
        image.image.save(file, "PNG")
        found.append(
            PageImage(
                png=file.getvalue(),
                codes=image.codes.tolist(),
                commits=image.commits.tolist(),
                passes=image.passes,
                tokens=len(image.tokens),
                seconds=image.seconds,
                bits=-image.log_likelihood / image.codes.numel() / math.log(2),
                same=plain is None or image.codes.tolist() == plain[index].codes,
            )
        )
    return found


def _conditions(network: Any, settings: Mapping[str, Any], seed: int) -> dict[str, str]:
    from mmdecode.runs.conditions import spoken

    found = spoken(network)
    sampling = settings["sampling"]
    return {
        "sampling": f"guidance {settings['guidance']:g}, temperature {sampling['temperature']:g}, "
        f"top-k {sampling['top_k'] or 'off'}, top-p {sampling['top_p']:g}",
        **{name: found[name] for name in ("device", "threads", "load")},
        "runs": f"one picture at a time, each timed once, pixels left out; seed {seed}",
        "versions": found["versions"],
    }


def _summary(report: Ways) -> dict[str, Any]:
    exact = [way for way in report.ways if way.name == "exact"]
    return {
        "model": report.model,
        "pictures": list(report.names),
        "identical": all(way.same == len(report.names) for way in exact),
        "ways": {
            way.name: {
                "law": way.guarantee,
                "about": way.about,
                "passes": [one.passes for one in way.images],
                "tokens_per_pass": round(way.rate, 4),
                "seconds": [round(one.seconds, 4) for one in way.images],
                "bits_per_token": round(way.bits, 4),
                "as_plain": way.same,
            }
            for way in report.ways
        },
        "conditions": dict(report.conditions),
    }


def _show(report: Ways, summary: Mapping[str, Any]) -> None:
    from rich.table import Column, Table

    from mmdecode.demo.images.page import numbers

    found = numbers(report)
    about = [name for name in found[report.ways[0].name] if name != "law"]
    table = Table(Column("", no_wrap=True, min_width=len("(heuristic distribution)")), *about)
    for way in report.ways:
        cells = [found[way.name][name] for name in about]
        style = None if way.guarantee == "exact" else "yellow"
        table.add_row(f"{way.name}\n({way.guarantee} distribution)", *cells, style=style)
    console.print(table)
    for text in report.conditions.values():
        console.print(text, style="dim", markup=False, highlight=False)
    for path in summary["files"].values():
        print_line(path, console, "bold")
    console.print(f"done in {summary['seconds']:.0f} s", highlight=False)
