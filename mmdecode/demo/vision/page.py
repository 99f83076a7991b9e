"""HTML page, in one file, that shows the effects of guides on answers about images.

For each image and question it shows the answer of every method (plain decoding or a guide), the
yes-no margins of the guide's branches as bars, the tokens that a guide changed, attention maps, and
which tokens of a caption were drafted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from mmdecode.demo.speech.clips_page import legend, strip
from mmdecode.evaluation.report.pages import asset, card, data_url, head, keyed

if TYPE_CHECKING:
    from mmdecode.demo.vision.attention_map import AttentionMap
    from mmdecode.engine.trace import Round

PLAIN = "plain"
"""Name of the method without a guide."""
IN_CARDS = ("made up in captions", "answers changed", "times plain")
"""Names of the scores in the summary cards; the page's table has all scores."""
END = "(end)"
"""Label of a token without text."""


@dataclass(frozen=True, kw_only=True)
class Token:
    """Token of an answer.

    Attributes:
        text: Text of the token, with the space before it.
        instead: Token that the plain model would choose after the same prefix; ``None``: the same.
        survivors: Number of tokens that pass the guide's plausibility constraint; ``None``: no
            guide.
        distances: Largest difference of a log-probability from the main branch, by branch.
        total: Sum of the branch weights, shown as S; ``None``: the guide has no weights.
    """

    text: str
    instead: str | None = None
    survivors: int | None = None
    distances: Mapping[str, float] = field(default_factory=dict)
    total: float | None = None


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """Answer that was generated again with a drafter.

    Attributes:
        rounds: Drafted and accepted tokens of each pass, the prefill first.
        passes: Number of passes after the prefill.
        undrafted: Number of passes without the drafter.
        same: Whether all tokens are the same as without the drafter.
        label: Returns the text of a token id.
    """

    rounds: Sequence[Round]
    passes: int
    undrafted: int
    same: bool
    label: Callable[[int], str]


@dataclass(frozen=True, kw_only=True)
class Given:
    """Answer of one method to one question.

    Attributes:
        method: Name of the method; `PLAIN`: no guide.
        tokens: Tokens of the answer.
        right: Whether the answer is right; for a caption, whether it hallucinates no object.
        note: Verdict in words.
        hallucinated: Number of hallucinated objects in a caption; ``None``: no caption.
        margins: Log-odds of yes against no, by branch and for ``guided``; empty for other
            questions.
        seconds: Seconds of decoding.
        attention: Attention map; ``None``: the guide does not edit attention.
        drafted: The same answer generated with a drafter; ``None``: it was not.
    """

    method: str
    tokens: Sequence[Token]
    right: bool
    note: str = ""
    hallucinated: int | None = None
    margins: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    attention: AttentionMap | None = None
    drafted: Drafted | None = None

    @property
    def text(self) -> str:
        """Text of the answer."""
        return "".join(token.text for token in self.tokens).strip()

    @property
    def changed(self) -> int:
        """Number of tokens that the plain model would not have chosen."""
        return sum(token.instead is not None for token in self.tokens)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Question and its answers.

    Attributes:
        text: The question.
        truth: The true answer.
        answers: Answer of each method, the plain one first.
    """

    text: str
    truth: str
    answers: Sequence[Given]


@dataclass(frozen=True, kw_only=True)
class Pictured:
    """Image and the questions about it.

    Attributes:
        name: Name of the image.
        about: Description of the image.
        png: The image as a PNG file.
        asked: The questions.
    """

    name: str
    about: str
    png: bytes
    asked: Sequence[Asked]


@dataclass(frozen=True, kw_only=True)
class ImageSet:
    """Images that were chosen in the same way.

    Attributes:
        title: Title of the set's section.
        about: Explanation of how the images were chosen.
        images: The images.
    """

    title: str
    about: str
    images: Sequence[Pictured]


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Content of the page.

    Attributes:
        model: Name of the model.
        methods: Names of the methods: `PLAIN`, then the guides.
        sets: Sets of images; a method's summary card has its result on the first set.
        scores: Scores as texts, by method and name.
        conditions: Conditions of the measurement, by name.
        draft: Name of the drafter; empty: none.
    """

    model: str
    methods: Sequence[str]
    sets: Sequence[ImageSet]
    scores: Mapping[str, Mapping[str, str]]
    conditions: Mapping[str, str]
    draft: str = ""

    @property
    def images(self) -> list[Pictured]:
        """Images of all sets."""
        return [one for part in self.sets for one in part.images]


def page(report: Answers) -> str:
    """Renders the page as HTML."""
    count = sum(len(one.asked) for one in report.images)
    widest = max(
        [abs(m) for a in _all(report) for m in a.margins.values() if math.isfinite(m)] + [1e-9]
    )
    looks = any(answer.attention is not None for answer in _all(report))
    conditions = escape(" \u00b7 ".join(report.conditions.values()))
    return f"""{head("mmdecode demo: questions about images", "answers.css")}<body>
<header>
<p class="eyebrow">mmdecode demo</p>
<h1>{headline(report)}</h1>
<p class="lead">{escape(report.model)} was asked {count} questions about
{len(report.images)} images, plainly and under each guide, with the same decoding loop.
{escape(outcome(report))} So few questions show how guides work, not which one is better:
<code>mmdecode evaluate pope</code> measures that, beside controls.</p>
<p class="conditions">{conditions}</p>
</header>
<main>
<section class="cards">{_cards(report)}</section>
<section>
<h2>What the marks mean</h2>
<ul class="legend">{_KEYS}{_LOOKS if looks else ""}</ul>
{_drafting(report)}
</section>
{"".join(_set(part, widest) for part in report.sets)}
<section>
<h2>All numbers</h2>
{_table(report)}
</section>
</main>
<div id="tip" role="tooltip" hidden></div>
<script>{asset("tip.js")}{asset("rove.js")}</script>
</body>
</html>
"""


_KEYS = "".join(
    keyed(sign, text)
    for sign, text in (
        (
            '<span class="changed">word</span>',
            "the plain model would say something else: point at it, or go there with tab and "
            "arrow keys",
        ),
        (
            '<span class="sample positive"></span> <span class="sample negative"></span>',
            "by how much (log-odds of the first word) a branch leans to yes or to no",
        ),
        ("<i>guided</i>", "what is decided from, after the branches of the guide"),
        ("<i>main</i>", "the model itself; edited already where a guide edits attention"),
    )
)
_LOOKS = keyed(
    '<span class="sample look"></span>',
    "where the last word of the prompt looks: the mean over heads and edited layers",
)


def drafting(report: Answers) -> dict[str, Any]:
    """Returns totals over drafted answers: ``passes``, ``undrafted``, and if all are ``same``."""
    every = [given.drafted for given in _all(report) if given.drafted is not None]
    return {
        "passes": sum(one.passes for one in every),
        "undrafted": sum(one.undrafted for one in every),
        "same": all(one.same for one in every),
    }


def _drafting(report: Answers) -> str:
    """Renders the savings of drafting and the legend of its colours; empty without drafting."""
    windows = [given.drafted.rounds for given in _all(report) if given.drafted is not None]
    if not windows:
        return ""
    found = drafting(report)
    verdict = "every token the same" if found["same"] else "but tokens differ"
    return f"""<p>Each caption was written once more with
<code>{escape(report.draft)}</code> guessing ahead:
<b>{found["passes"]:,}</b> passes of the model in place of {found["undrafted"]:,},
<b class="{"good" if found["same"] else "bad"}">{verdict}</b>. A box is one pass.</p>
<ul class="legend">{legend(windows)}</ul>"""


def headline(report: Answers) -> str:
    """Returns the headline, as HTML: savings of drafting, and answers changed by guides."""
    found, (changed, asked) = drafting(report), _changed(report)
    guides = f"guides change <b>{changed} of {asked}</b> answers" if asked else "no guide"
    if not found["passes"]:
        return guides[0].upper() + guides[1:]
    mood, verdict = (
        ("good", "every token the same") if found["same"] else ("bad", "but tokens differ")
    )
    return (
        f"Captions in <b>1/{found['undrafted'] / found['passes']:.1f}</b> of the passes, "
        f'<b class="{mood}">{verdict}</b>; {guides}'
    )


def outcome(report: Answers) -> str:
    """Returns a sentence for each set on how many short questions are answered right."""
    parts = []
    for part in report.sets:
        first, *others = (right_of(part, method) for method in report.methods)
        spread = " to ".join(str(n) for n in sorted({*others})[:: max(len({*others}) - 1, 1)])
        guided = f", {spread} under the guides" if others else ""
        short = short_of(part, report.methods[0])
        parts.append(f"{part.title}: {first} of {len(short)} short questions right{guided}.")
    return " ".join(parts)


def short_of(part: ImageSet, method: str) -> list[Given]:
    """Returns a method's answers to the short questions of a set: those that ask for no caption."""
    answers = [given for one in part.images for asked in one.asked for given in asked.answers]
    return [one for one in answers if one.method == method and one.hallucinated is None]


def right_of(part: ImageSet, method: str) -> int:
    """Returns the number of short questions of a set that a method answers right."""
    return sum(one.right for one in short_of(part, method))


def _changed(report: Answers) -> tuple[int, int]:
    """Returns the number of guided answers that differ from the plain answer, and of all."""
    asked = [one for pictured in report.images for one in pictured.asked]
    others = [other.text != one.answers[0].text for one in asked for other in one.answers[1:]]
    return sum(others), len(others)


def _all(report: Answers) -> list[Given]:
    return [given for one in report.images for asked in one.asked for given in asked.answers]


def _cards(report: Answers) -> str:
    cards = []
    for method in report.methods:
        rights = [f"{right_of(s, method)} of {len(short_of(s, method))}" for s in report.sets]
        first, *others = [
            f"short questions right: {part.title[0].lower()}{part.title[1:]}"
            for part in report.sets
        ]
        notes = [f"{right} {about}" for right, about in zip(rights[1:], others, strict=True)]
        known = report.scores[method]
        notes += [f"{known[name]} {name}" for name in IN_CARDS if name in known]
        cards.append(card(_breakable(method), rights[0], first, *notes))
    return "".join(cards)


def _set(part: ImageSet, widest: float) -> str:
    return (
        f"<section><h2>{escape(part.title)}</h2><p>{escape(part.about)}</p>"
        f"{''.join(_image(one, widest) for one in part.images)}</section>\n"
    )


def _image(one: Pictured, widest: float) -> str:
    asked = "".join(_asked(question, one, widest) for question in one.asked)
    asked = asked.replace('tabindex="-1"', 'tabindex="0"', 1)  # one stop of the tab key
    return f"""<article class="clip scene" id="{escape(one.name.replace(" ", "-"))}">
<header><h3>{escape(one.name)}</h3><span>{escape(one.about)}</span></header>
<div class="beside"><img class="pixels" width="256" height="256"
alt="{escape(one.name)}: {escape(one.about)}" src="{data_url(one.png)}">
<div class="asked" data-rove>{asked}</div></div>
</article>
"""


def _asked(asked: Asked, one: Pictured, widest: float) -> str:
    rows = "".join(_row(given, widest) for given in asked.answers)
    maps = "".join(
        _attention(given.method, given.attention, one)
        for given in asked.answers
        if given.attention is not None and given.attention.side
    )
    drafts = "".join(
        _drafted(given.method, given.drafted, shown=not index)
        for index, given in enumerate(asked.answers)
        if given.drafted is not None
    )
    return f"""<section class="question"><h4>{escape(asked.text)}
<small>true: {escape(asked.truth)}</small></h4>
<table class="answers"><tbody>{rows}</tbody></table>
{drafts}
{f'<div class="maps">{maps}</div>' if maps else ""}</section>"""


def _row(given: Given, widest: float) -> str:
    mood, mark, label = ("good", "\u2713", "right") if given.right else ("bad", "\u2717", "wrong")
    text = "".join(map(_token, given.tokens)) or "<i>nothing</i>"
    note = f'<small class="{mood}">{escape(given.note)}</small>' if given.note else ""
    cells = f'<td colspan="2">{text} {note}</td>'
    if given.margins:
        cells = f'<td>{text} {note}</td><td class="bars">{_margins(given.margins, widest)}</td>'
    return (
        f'<tr><th scope="row">{_breakable(given.method)}</th>'
        f'<td class="mark {mood}"><span role="img" aria-label="{label}">{mark}</span></td>'
        f"{cells}</tr>"
    )


def _drafted(method: str, found: Drafted, shown: bool) -> str:
    """Renders the passes of a drafted answer, collapsed unless ``shown``."""
    same = "" if found.same else ' <b class="bad">tokens differ</b>'
    return (
        f"<details{' open' * shown}><summary>{escape(method)}, drafted: {found.passes} passes in "
        f"place of {found.undrafted}{same}</summary>{strip(found.rounds, found.label)}</details>"
    )


def _breakable(name: str) -> str:
    """Escapes a name and allows line breaks within it."""
    return re.sub(r"([:,_])", r"\1<wbr>", escape(name))


def _token(token: Token) -> str:
    text = escape(token.text)
    if token.instead is None:
        return text
    start = " " if token.text.startswith(" ") else ""
    shown = token.text.strip() or END
    return (
        f'{start}<span class="changed token" tabindex="-1" role="note" '
        f'aria-label="{escape(f"{shown}: {effect_of(token)}")}">{escape(shown)}</span>'
    )


def effect_of(token: Token) -> str:
    """Describes the effect of a guide on a token, in words."""
    parts = [f"plain would say {(token.instead or '').strip() or END!r}"]
    if token.survivors is not None:
        parts.append(f"{token.survivors:,} tokens left by the guide")
    parts += [
        f"{name} differs by up to {distance:.2f} nats"
        for name, distance in token.distances.items()
        if math.isfinite(distance)
    ]
    parts += [f"S = {token.total:.2f}"] if token.total is not None else []
    return "; ".join(parts)


def _margins(margins: Mapping[str, float], widest: float) -> str:
    """Renders the margins of the branches as SVG bars, to the right for yes, left for no."""
    parts, high = [], 17
    for number, (name, margin) in enumerate(margins.items()):
        length = 60 * min(abs(margin) / widest, 1.0)
        start = 175 if margin >= 0 else 175 - length
        kind = "positive" if margin >= 0 else "negative"
        middle = number * high + high / 2
        parts.append(
            f'<text class="branch" x="100" y="{middle + 4:.1f}">{escape(name)}</text>'
            f'<rect class="{kind}" x="{start:.1f}" y="{middle - 5:.1f}" width="{length:.1f}" '
            f'height="10"/><text class="margin" x="290" y="{middle + 4:.1f}">{_signed(margin)}'
            f"</text>"
        )
    tall = high * len(margins)
    label = "yes-no margin: " + ", ".join(f"{n} {_signed(m)}" for n, m in margins.items())
    return (
        f'<svg class="margins" viewBox="0 0 292 {tall}" role="img" aria-label="{escape(label)}">'
        f'<path class="axis" d="M175 0V{tall}"/>{"".join(parts)}</svg>'
    )


def _signed(margin: float) -> str:
    if math.isinf(margin):
        return "+\u221e" if margin > 0 else "\u2212\u221e"
    return f"{margin:+.2f}".replace("-", "\u2212")


def _attention(method: str, found: AttentionMap, one: Pictured) -> str:
    """Renders the image twice, with the attention without and with the guide's edits."""
    top = max(float(found.plain.max()), float(found.edited.max()), 1e-9)
    layers = f"layers {found.layers[0] + 1} to {found.layers[-1] + 1}"
    branch = "" if found.branch == "main" else f", branch {found.branch}"
    both = "".join(
        _overlay(name, shares.tolist(), top, f"{layers}{branch}", found.side or 1, one)
        for name, shares in ((PLAIN, found.plain), (method, found.edited))
    )
    return f'<div class="pair">{both}</div>'


def _overlay(
    name: str, shares: Sequence[float], top: float, about: str, side: int, one: Pictured
) -> str:
    most = max(range(len(shares)), key=shares.__getitem__)
    label = (
        f"Attention of {name} over {one.name}: {100 * sum(shares):.0f} % on the image, most at row "
        f"{most // side + 1}, column {most % side + 1} of {side}; {about}"
    )
    cells = "".join(
        f'<rect class="look" x="{index % side}" y="{index // side}" width="1" height="1" '
        f'fill-opacity="{0.9 * share / top:.2f}"><title>{100 * share:.1f} %</title></rect>'
        for index, share in enumerate(shares)
    )
    return (
        f'<figure class="map"><svg viewBox="0 0 {side} {side}" role="img" '
        f'aria-label="{escape(label)}"><image class="pixels grey" href="{data_url(one.png)}" '
        f'width="{side}" height="{side}" preserveAspectRatio="none"/>{cells}</svg>'
        f"<figcaption>{_breakable(name)}: {100 * sum(shares):.1f} % on the image"
        f"<small>{escape(about)}</small></figcaption></figure>"
    )


def _table(report: Answers) -> str:
    about = list(report.scores[report.methods[0]])
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ("method", *about))
    body = "".join(
        f'<tr><th scope="row">{escape(method)}</th>'
        + "".join(f"<td>{escape(report.scores[method][name])}</td>" for name in about)
        + "</tr>"
        for method in report.methods
    )
    facts = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(text)}</td></tr>'
        for name, text in report.conditions.items()
    )
    return (
        f'<div class="wide"><table class="numbers"><thead><tr>{head}</tr></thead>'
        f'<tbody>{body}</tbody></table></div><div class="wide"><table>{facts}</table></div>'
    )
