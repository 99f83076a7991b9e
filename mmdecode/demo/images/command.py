"""``mmdecode demo image``: generates images of the same seeds in three decoding modes.

The modes are ``ar`` (token by token), ``exact`` (Jacobi decoding that keeps the distribution) and
``relaxed`` (Jacobi decoding that does not keep it).
"""

from __future__ import annotations

import io
import math
from typing import Any

from rich.progress import track
from rich.table import Column, Table

from mmdecode.demo.images import page as image_page
from mmdecode.demo.images.page import PageImage, Way, Ways, numbers
from mmdecode.demo.setting import Setting, conditions_of
from mmdecode.image_ar.generator import ImageGenerator
from mmdecode.image_ar.loading import load
from mmdecode.image_ar.modes import MODES, WINDOW, decoder_of, guarantee_of
from mmdecode.image_ar.results import GeneratedImage
from mmdecode.runs.console import console, only_our_output, warnings_shown

NUM_IMAGES = 4
WAYS = ("ar", "exact", "relaxed")
PROMPTS = ("a red ring", "a blue star", "a green cup", "a yellow key")
"""Prompts for models that are conditioned on captions."""


def run(model: str, setting: Setting) -> dict[str, Any]:
    """Generates images, prints the measurements and writes ``report.html``.

    Args:
        model: Image model: folder, Hub id or ``zoo:NAME``.
        setting: Options of every demo, with at most 4 images.

    Returns:
        The measurements as JSON values, for ``--json``.
    """
    setting.refuse()
    count = min(setting.limit or NUM_IMAGES, NUM_IMAGES)
    console.print(
        f"Drawing {count} pictures in {len(WAYS)} ways: token by token, exactly in parallel, which "
        "leaves them as they are, and relaxed, which does not. This takes about half a "
        "minute on two idle cores.",
        highlight=False,
    )
    only_our_output()
    network = load(model, *setting.weights)
    adapter = network.adapter
    ways: list[Way] = []
    plain: list[GeneratedImage] = []
    with warnings_shown("default"):
        for mode in WAYS:
            decoder = decoder_of(mode, None, "auto", adapter=adapter)
            generator = ImageGenerator(network, decoder, seed=setting.seed, batch=1)
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
            plain = plain or images
            rule = MODES[mode].rule(adapter.codebook() is not None)
            window = f"Jacobi window of {min(WINDOW, adapter.layout.length)}, {rule}"
            ways.append(
                Way(
                    name=mode,
                    about=window if MODES[mode].drafts else "token by token",
                    guarantee=guarantee_of(decoder),
                    images=[*map(_page_image, images, plain)],
                )
            )
    guidance, sampling = (generator.settings[name] for name in ("guidance", "sampling"))
    sampled = (
        f"guidance {guidance:g}, temperature {sampling['temperature']:g}, "
        f"top-k {sampling['top_k'] or 'off'}, top-p {sampling['top_p']:g}"
    )
    runs = f"one picture at a time, each timed once, pixels left out; seed {setting.seed}"
    report = Ways(
        model=model,
        names=[_called(image) for image in plain],
        ways=ways,
        conditions=conditions_of(adapter.model, {"sampling": sampled}, runs=runs),
    )
    setting.write(image_page.page(report))
    _show(report)
    return setting.end(_summary(report), report.conditions)


def _wanted(generator: ImageGenerator, count: int) -> list[int | str]:
    """Returns what the images show: classes spread evenly over all classes, or `PROMPTS`."""
    if not generator.classes:
        return list(PROMPTS[:count])
    return [index * generator.classes // count for index in range(count)]


def _called(image: GeneratedImage) -> str:
    named = image.condition if isinstance(image.condition, str) else f"class {image.condition}"
    return named if image.label is None else image.label


def _page_image(image: GeneratedImage, plain: GeneratedImage) -> PageImage:
    assert image.log_likelihood is not None, "it was asked for"
    file = io.BytesIO()
    image.image.save(file, "PNG")
    return PageImage(
        png=file.getvalue(),
        commits=image.commits.tolist(),
        passes=image.passes,
        tokens=len(image.tokens),
        seconds=image.seconds,
        bits=-image.log_likelihood / image.codes.numel() / math.log(2),
        same=image.codes.equal(plain.codes),
    )


def _summary(report: Ways) -> dict[str, Any]:
    exact = [way for way in report.ways if way.name == "exact"]
    return {
        "model": report.model,
        "pictures": list(report.names),
        "identical": all(way.total("same") == len(report.names) for way in exact),
        "ways": {
            way.name: {
                "law": way.guarantee,
                "about": way.about,
                "passes": [one.passes for one in way.images],
                "tokens_per_pass": round(way.rate, 4),
                "seconds": [round(one.seconds, 4) for one in way.images],
                "bits_per_token": round(way.bits, 4),
                "as_plain": way.total("same"),
            }
            for way in report.ways
        },
        "conditions": dict(report.conditions),
    }


def _show(report: Ways) -> None:
    found = numbers(report)
    about = [name for name in found[0] if name not in ("way", "law")]
    table = Table(Column("", no_wrap=True, min_width=len("(heuristic distribution)")), *about)
    for way, row in zip(report.ways, found, strict=True):
        cells = [row[name] for name in about]
        style = None if way.guarantee == "exact" else "yellow"
        table.add_row(f"{way.name}\n({way.guarantee} distribution)", *cells, style=style)
    console.print(table)
