"""HTML page, in one file, of images generated from the same seeds in several decoding modes.

Next to each image, a map of its codes shows in which forward pass each code was accepted. Codes of
the same pass have the same shade and no line between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from mmdecode.evaluation.report.templates import rendered


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


_GUARANTEES = {
    "exact": "pictures come as often as token by token, whatever is guessed",
    "heuristic": "other pictures: bits per token say where they went, not whether they are good",
}
IN_CARDS = ("passes", "times plain", "pictures as plain", "bits per token")
"""Names of the numbers in the cards; the page's table has all numbers."""


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
