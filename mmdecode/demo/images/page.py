"""HTML page, in one file, of images generated from the same seeds in several decoding modes.

Next to each image, a map of its codes shows in which forward pass each code was accepted. Codes of
the same pass have the same shade and no line between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mmdecode.evaluation.report.templates import rendered


@dataclass(frozen=True, kw_only=True)
class PageImage:
    """Image generated in one mode.

    Attributes:
        png: The image as a PNG file.
        codes: Image codes, by row.
        commits: Pass in which each code was accepted, by row; 0: prefill.
        passes: Number of forward passes after the prefill.
        tokens: Number of tokens of the image.
        seconds: Seconds of generating tokens, without decoding them to pixels.
        bits: Mean negative log2-likelihood of a code under the guided distribution.
        same: Whether the codes are the same as in the first mode, plain decoding.
    """

    png: bytes
    codes: Sequence[Sequence[int]]
    commits: Sequence[Sequence[int]]
    passes: int
    tokens: int
    seconds: float
    bits: float
    same: bool

    @property
    def rate(self) -> float:
        """Tokens per pass, without the first token, which the prefill gives."""
        return (self.tokens - 1) / max(self.passes, 1)

    def cells(self, last: int) -> Iterator[dict[str, str]]:
        """Cells of the map of codes, darker if accepted later; ``last`` is the last pass."""
        for y, row in enumerate(self.commits):
            for x, number in enumerate(row):
                when = (
                    f"pass {number}"
                    if number > 0
                    else "with the prompt"
                    if number == 0
                    else "given"
                )
                yield {
                    "x": str(x),
                    "y": str(y),
                    "light": f"{90 - 70 * number / max(last, 1):.0f}",
                    "title": f"row {y + 1}, column {x + 1}: {when}",
                }

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

    @property
    def passes(self) -> int:
        """Passes over all images."""
        return sum(one.passes for one in self.images)

    @property
    def rate(self) -> float:
        """Tokens per pass over all images."""
        return sum(one.tokens - 1 for one in self.images) / max(self.passes, 1)

    @property
    def seconds(self) -> float:
        """Seconds over all images."""
        return sum(one.seconds for one in self.images)

    @property
    def bits(self) -> float:
        """Mean bits per code."""
        return sum(one.bits for one in self.images) / len(self.images)

    @property
    def same(self) -> int:
        """Number of images with the same codes as in the first mode."""
        return sum(one.same for one in self.images)


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


def numbers(report: Ways) -> dict[str, dict[str, str]]:
    """Returns the measurements of each mode as texts, by mode and name."""
    plain = report.ways[0]
    count = len(report.names)
    return {
        way.name: {
            "passes": f"{way.passes}",
            "tokens per pass": f"{way.rate:.2f}",
            "seconds": f"{way.seconds:.2f}",
            "times plain": f"{plain.seconds / max(way.seconds, 1e-9):.2f}",
            "pictures as plain": f"{way.same} of {count}",
            "bits per token": f"{way.bits:.2f}",
            "law": way.guarantee,
        }
        for way in report.ways
    }


def page(report: Ways) -> str:
    """Renders the page as HTML."""
    exact = [way for way in report.ways[1:] if way.same == len(report.names)]
    images = "picture" if len(report.names) == 1 else f"{len(report.names)} pictures"
    claimed = {way.guarantee for way in report.ways}
    return rendered(
        "images.html",
        report=report,
        numbers=numbers(report),
        what=images,
        best=max(exact, key=lambda way: way.rate, default=None),
        last=max(one.passes for way in report.ways for one in way.images),
        guarantees={name: text for name, text in _GUARANTEES.items() if name in claimed},
        facts={way.name: way.about for way in report.ways} | dict(report.conditions),
    )
