"""HTML page, in one file, of images generated from the same seeds in several decoding modes.

Next to each image, a map of its codes shows in which forward pass each code was accepted. Codes of
the same pass have the same shade and no line between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from mmdecode.evaluation.report.pages import asset, card, data_url, head, keyed


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


_SEAMS = (
    '<svg class="seams" viewBox="0 0 6 1" role="img" aria-label="a seam">'
    '<rect width="6" height="1"/>'
    '<path class="seam" d="M2 0v1"/></svg>'
)
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
    best = max(exact, key=lambda way: way.rate, default=None)
    images = "picture" if len(report.names) == 1 else f"{len(report.names)} pictures"
    title = (
        f"The same {images} in <b>1/{best.rate:.1f}</b> of the passes"
        if best
        else f"{images.capitalize()}, drawn in {len(report.ways)} ways"
    )
    last = max(one.passes for way in report.ways for one in way.images)
    conditions = escape(" \u00b7 ".join(report.conditions.values()))
    return f"""{head("mmdecode demo: image tokens", "images.css")}<body>
<header>
<p class="eyebrow">mmdecode demo</p>
<h1>{title}</h1>
<p class="lead">{escape(report.model)} drew from the same seeds token by token, and with a window of
guesses that are scored together. An exact rule keeps the distribution; a heuristic one does not,
and bits per token show where it went, not whether pictures are good.</p>
<p class="conditions">{conditions}</p>
</header>
<main>
<section class="cards">{_cards(report)}</section>
<section>
<h2>Picture by picture</h2>
<ul class="legend">{_legend(report, last)}</ul>
<p>Each picture stands beside the map of its codes, in the order in which they are read: row by row.
Tokens per pass leave out the first token, which comes with the prompt.</p>
{"".join(_image(report, index, last) for index in range(len(report.names)))}
</section>
<section>
<h2>All numbers</h2>
{_table(report)}
</section>
</main>
<div id="tip" role="tooltip" hidden></div>
<script>{asset("tip.js")}</script>
</body>
</html>
"""


def _legend(report: Ways, last: int) -> str:
    """Renders the legend of the maps and of the modes' guarantees."""
    scale = f'prompt <span class="scale"></span> pass {last}'
    found = [
        keyed(scale, "when a code was decided: the darker, the later"),
        keyed(_SEAMS, "a seam: another pass; codes without one between them are of one pass"),
    ]
    guarantees = {way.guarantee for way in report.ways}
    found += [
        keyed(_tag(guarantee), text)
        for guarantee, text in _GUARANTEES.items()
        if guarantee in guarantees
    ]
    return "".join(found)


def _cards(report: Ways) -> str:
    names = ("passes", "times plain", "pictures as plain", "bits per token")
    return "".join(
        card(
            f"{escape(way.name)} {_tag(way.guarantee)}",
            f"{way.rate:.2f}",
            "tokens per pass",
            *(f"{found[name]} {name}" for name in names),
        )
        for way, found in zip(report.ways, numbers(report).values(), strict=True)
    )


def _tag(guarantee: str) -> str:
    mood = "" if guarantee == "exact" else " bad"
    return f'<span class="tag{mood}">{escape(guarantee)} distribution</span>'


def _image(report: Ways, index: int, last: int) -> str:
    ways = "".join(_way(way, way.images[index], last) for way in report.ways)
    return f"""<article class="clip"><header><h3>{escape(report.names[index])}</h3></header>
<div class="ways">{ways}</div></article>
"""


def _way(way: Way, one: PageImage, last: int) -> str:
    as_plain = "" if one.same else " \u00b7 another picture"
    return f"""<figure class="way"><figcaption>{escape(way.name)} {_tag(way.guarantee)}</figcaption>
<div class="two"><img alt="drawn by {escape(way.name)}" src="{data_url(one.png)}">
{_map(one, last)}</div>
<p>{one.passes} passes \u00b7 {one.rate:.2f} tokens per pass \u00b7
{one.seconds:.2f} s{as_plain}</p>
</figure>
"""


def _map(one: PageImage, last: int) -> str:
    """Renders the map of codes as SVG: later passes are darker, lines separate passes."""
    rows, columns = len(one.commits), len(one.commits[0])
    cells, seams = [], []
    for y, row in enumerate(one.commits):
        for x, number in enumerate(row):
            light = 90 - 70 * number / max(last, 1)
            tooltip = f"row {y + 1}, column {x + 1}: {_when(number)}"
            cells.append(
                f'<rect class="cell" style="--light:{light:.0f}%" x="{x}" y="{y}" width="1" '
                f'height="1"><title>{tooltip}</title></rect>'
            )
            if x and row[x - 1] != number:
                seams.append(f"M{x} {y}v1")
            if y and one.commits[y - 1][x] != number:
                seams.append(f"M{x} {y}h1")
    label = f"{one.passes} passes over {rows} x {columns} codes"
    return (
        f'<svg viewBox="0 0 {columns} {rows}" role="img" aria-label="{label}">{"".join(cells)}'
        f'<path class="seam" d="{"".join(seams)}"/></svg>'
    )


def _when(number: int) -> str:
    if number < 0:
        return "given"
    return f"pass {number}" if number else "with the prompt"


def _table(report: Ways) -> str:
    found = numbers(report)
    about = next(iter(found.values()))
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in ("way", *about))
    body = "".join(
        f'<tr><th scope="row">{escape(way.name)}</th>'
        + "".join(f"<td>{escape(text)}</td>" for text in found[way.name].values())
        + "</tr>"
        for way in report.ways
    )
    facts = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(text)}</td></tr>'
        for name, text in {
            **{way.name: way.about for way in report.ways},
            **report.conditions,
        }.items()
    )
    return (
        f'<div class="wide"><table class="numbers"><thead><tr>{top}</tr></thead>'
        f'<tbody>{body}</tbody></table></div><div class="wide"><table>{facts}</table></div>'
    )
