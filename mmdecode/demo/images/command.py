"""``mmdecode demo image``: generates images of the same seeds in three decoding modes, as a page.

The modes are ``ar`` (token by token), ``exact`` (Jacobi decoding that keeps the distribution) and
``relaxed`` (Jacobi decoding that does not keep it). Next to each image, a map of its codes shows in
which forward pass each code was accepted. Codes of the same pass have the same shade and no line
between them.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from rich.progress import track
from rich.table import Column, Table

from mmdecode.demo.setting import Setting
from mmdecode.evaluation.report.templates import rendered
from mmdecode.image_ar.generator import ImageGenerator
from mmdecode.image_ar.loading import load
from mmdecode.image_ar.modes import MODES, WINDOW, decoder_of, guarantee_of
from mmdecode.image_ar.results import GeneratedImage
from mmdecode.runs.conditions import spoken
from mmdecode.runs.console import console, only_our_output, warnings_shown

NUM_IMAGES = 4
WAYS = ("ar", "exact", "relaxed")
PROMPTS = ("a red ring", "a blue star", "a green cup", "a yellow key")
"""Prompts for models that are conditioned on captions."""
_GUARANTEES = {
    "exact": "pictures come as often as token by token, whatever is guessed",
    "heuristic": "other pictures: bits per token say where they went, not whether they are good",
}
IN_CARDS = ("passes", "times plain", "pictures as plain", "bits per token")
"""Names of the numbers in the cards; the page's table has all numbers."""


@dataclass(frozen=True, kw_only=True)
class PageImage:
    """Image generated in one mode.

    Attributes:
        png: The image as a PNG file.
        commits: Pass in which each code was accepted, by row; 0: prefill; negative: given.
        passes: Number of forward passes after the prefill.
        tokens: Number of tokens of the image.
        seconds: Seconds of generating tokens, without decoding them to pixels.
        bits: Mean negative log2-likelihood of a code under the guided distribution.
        same: Whether the codes are the same as in the first mode, plain decoding.
    """

    png: bytes
    commits: Sequence[Sequence[int]]
    passes: int
    tokens: int
    seconds: float
    bits: float
    same: bool

    @property
    def sizes(self) -> list[int]:
        """Number of codes of each pass after the prompt."""
        found = Counter(number for row in self.commits for number in row if number > 0)
        return [found[number] for number in sorted(found)]

    @property
    def seams(self) -> str:
        """Lines between codes of different passes, as the path of an SVG."""
        found = []
        for y, row in enumerate(self.commits):
            for x, number in enumerate(row):
                if x and row[x - 1] != number:
                    found.append(f"M{x} {y}v1")
                if y and self.commits[y - 1][x] != number:
                    found.append(f"M{x} {y}h1")
        return "".join(found)


@dataclass(frozen=True, kw_only=True)
class Way:
    """A decoding mode and its images.

    Attributes:
        name: Name of the mode.
        about: Drafter and acceptance rule.
        guarantee: ``exact`` or ``heuristic``.
        images: The images, in the order of the report's ``names``.
    """

    name: str
    about: str
    guarantee: str
    images: Sequence[PageImage]

    def total(self, name: str) -> Any:
        """Returns the sum of an attribute over all images."""
        return sum(getattr(one, name) for one in self.images)

    @property
    def rate(self) -> float:
        """Tokens per pass over all images."""
        return (self.total("tokens") - len(self.images)) / max(self.total("passes"), 1)

    @property
    def bits(self) -> float:
        """Mean bits per code."""
        return self.total("bits") / len(self.images)


@dataclass(frozen=True, kw_only=True)
class Ways:
    """Content of the page.

    Attributes:
        model: Name of the model.
        names: Class or prompt of each image.
        ways: The modes, plain decoding first.
        conditions: Conditions of the measurement, by name.
    """

    model: str
    names: Sequence[str]
    ways: Sequence[Way]
    conditions: Mapping[str, str]


def tag(guarantee: str) -> Markup:
    """A guarantee as a coloured phrase."""
    mood = "" if guarantee == "exact" else " bad"
    return Markup('<span class="tag{}">{} distribution</span>').format(mood, guarantee)


def numbers(report: Ways) -> list[dict[str, str]]:
    """Returns the measurements of each mode as texts, by name."""
    plain = report.ways[0].total("seconds")
    return [
        {
            "way": way.name,
            "passes": f"{way.total('passes')}",
            "tokens per pass": f"{way.rate:.2f}",
            "seconds": f"{way.total('seconds'):.2f}",
            "times plain": f"{plain / max(way.total('seconds'), 1e-9):.2f}",
            "pictures as plain": f"{way.total('same')} of {len(report.names)}",
            "bits per token": f"{way.bits:.2f}",
            "law": way.guarantee,
        }
        for way in report.ways
    ]


def page(report: Ways) -> str:
    """Renders the page as HTML."""
    exact = [way for way in report.ways[1:] if way.total("same") == len(report.names)]
    best = max(exact, key=lambda way: way.rate, default=None)
    rows, claimed = numbers(report), {way.guarantee for way in report.ways}
    cards = [
        (
            Markup("{} {}").format(way.name, tag(way.guarantee)),
            row["tokens per pass"],
            "tokens per pass",
            *(f"{row[name]} {name}" for name in IN_CARDS),
        )
        for way, row in zip(report.ways, rows, strict=True)
    ]
    firsts = {way.name: way.images[0] for way in (report.ways[0], best or report.ways[-1])}
    return rendered(
        "images.html",
        report=report,
        rows=rows,
        cards=cards,
        conditions=report.conditions.values(),
        view={
            "title": report.names[0],
            "sides": [(one.png, {name: one.sizes}) for name, one in firsts.items()],
        },
        what="picture" if len(report.names) == 1 else f"{len(report.names)} pictures",
        best=best,
        tag=tag,
        last=max(1, *(one.passes for way in report.ways for one in way.images)),
        guarantees={name: text for name, text in _GUARANTEES.items() if name in claimed},
        facts={way.name: way.about for way in report.ways} | dict(report.conditions),
    )


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
        conditions={"sampling": sampled} | spoken(adapter.model, runs=runs),
    )
    _show(report)
    return setting.end(page(report), _summary(report), report.conditions)


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
