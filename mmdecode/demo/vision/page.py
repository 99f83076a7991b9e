"""HTML page, in one file, that shows the effects of guides on answers about images.

For each image and question it shows the answer of every method (plain decoding or a guide), the
yes-no margins of the guide's branches as bars, the tokens that a guide changed, attention maps, and
which tokens of a caption were drafted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from mmdecode.demo.speech.clips_page import origins_of, runs_of, strip
from mmdecode.evaluation.report.templates import rendered

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

    @property
    def label(self) -> str:
        """The text without spaces around it; that of a token without text is `END`."""
        return self.text.strip() or END


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


@dataclass(frozen=True)
class Asked:
    """Question and its answers.

    Attributes:
        text: The question.
        truth: The true answer.
        choices: Possible answers; none: a caption.
        answers: Answer of each method, the plain one first.
    """

    text: str
    truth: str
    choices: tuple[str, ...] = ()
    answers: Sequence[Given] = ()


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

    def short(self, method: str) -> tuple[int, int]:
        """Returns how many short questions (no captions) a method answers right, of how many."""
        answers = [given for one in self.images for asked in one.asked for given in asked.answers]
        own = [one for one in answers if one.method == method and one.hallucinated is None]
        return sum(one.right for one in own), len(own)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Content of the page.

    Attributes:
        model: Name of the model.
        methods: Names of the methods: `PLAIN`, then the guides.
        sets: Sets of images; a method's summary card has its result on the first set.
        conditions: Conditions of the measurement, by name.
        draft: Name of the drafter; empty: none.
    """

    model: str
    methods: Sequence[str]
    sets: Sequence[ImageSet]
    conditions: Mapping[str, str]
    draft: str = ""

    @property
    def images(self) -> list[Pictured]:
        """Images of all sets."""
        return [one for part in self.sets for one in part.images]

    @property
    def asked(self) -> list[Asked]:
        """Questions about all images."""
        return [asked for one in self.images for asked in one.asked]

    @property
    def given(self) -> list[Given]:
        """Answers to all questions."""
        return [given for asked in self.asked for given in asked.answers]

    @property
    def scores(self) -> dict[str, dict[str, str]]:
        """Scores as texts, by method and name."""
        plain = [asked.answers[0] for asked in self.asked]
        found = {}
        for method in self.methods:
            given = [one for one in self.given if one.method == method]
            short = [one.right for one in given if one.hallucinated is None]
            other = [one.text != first.text for one, first in zip(given, plain, strict=True)]
            drafted = drafting(given)
            seconds = sum(one.seconds for one in given)
            found[method] = {
                "short questions right in all": f"{sum(short)} of {len(short)}",
                "made up in captions": f"{sum(one.hallucinated or 0 for one in given)}",
                "answers changed": f"{sum(other)} of {len(other)}",
                "tokens changed": f"{sum(one.changed for one in given)}",
                "caption passes, drafted": f"{drafted['passes']} for {drafted['undrafted']}",
                "seconds in all": f"{seconds:.2f}",
                "times plain": f"{seconds / max(sum(one.seconds for one in plain), 1e-9):.2f}",
            }
        return found


def page(report: Answers) -> str:
    """Renders the page as HTML."""
    answers, scores = report.given, report.scores
    margins = [abs(m) for a in answers for m in a.margins.values() if math.isfinite(m)]
    return rendered(
        "answers.html",
        report=report,
        headline=headline(report),
        outcome=outcome(report),
        count=len(report.asked),
        cards=[_card(report, method, known) for method, known in scores.items()],
        conditions=report.conditions.values(),
        facts=report.conditions,
        rows=[{"method": method} | found for method, found in scores.items()],
        view=_view(report),
        drafting=drafting(answers),
        looks=any(answer.attention is not None for answer in answers),
        widest=max([*margins, 1e-9]),
        breakable=_breakable,
        effect_of=effect_of,
        signed=_signed,
        verdict_of=_verdict,
        origins=origins_of(found.rounds for found in drafts(answers)),
        strip=strip,
    )


def drafts(answers: Iterable[Given]) -> list[Drafted]:
    """Returns what was generated again with a drafter."""
    return [given.drafted for given in answers if given.drafted is not None]


def drafting(answers: Iterable[Given]) -> dict[str, Any]:
    """Returns totals over drafted answers: ``passes``, ``undrafted``, and if all are ``same``."""
    every = drafts(answers)
    return {
        "passes": sum(one.passes for one in every),
        "undrafted": sum(one.undrafted for one in every),
        "same": all(one.same for one in every),
    }


def headline(report: Answers) -> Markup:
    """Returns the headline: savings of drafting, and answers changed by guides."""
    found = drafting(report.given)
    others = [
        other.text != one.answers[0].text for one in report.asked for other in one.answers[1:]
    ]
    changed = Markup("guides change <b>{} of {}</b> answers").format(sum(others), len(others))
    guides = changed if others else Markup("no guide")
    if not found["passes"]:
        return Markup(guides[0].upper()) + guides[1:]
    return Markup('Captions in <b>1/{:.1f}</b> of the passes, <b class="{}">{}</b>; {}').format(
        found["undrafted"] / found["passes"],
        "good" if found["same"] else "bad",
        _verdict(found["same"]),
        guides,
    )


def _verdict(same: bool) -> str:
    return "every token the same" if same else "but tokens differ"


def outcome(report: Answers) -> str:
    """Returns a sentence for each set on how many short questions are answered right."""
    parts = []
    for part in report.sets:
        (first, count), *guided = (part.short(method) for method in report.methods)
        others = sorted({right for right, _ in guided})
        spread = " to ".join(str(right) for right in others[:: max(len(others) - 1, 1)])
        under = f", {spread} under the guides" if others else ""
        parts.append(f"{part.title}: {first} of {count} short questions right{under}.")
    return " ".join(parts)


def _view(report: Answers) -> dict[str, Any]:
    """The first image, and the passes of its plain caption without and with the drafter."""
    image = report.images[0]
    answers = [given for asked in image.asked for given in asked.answers if given.drafted]
    runs = runs_of([found.rounds for found in drafts(answers[:1])], report.draft) if answers else {}
    about = f"\u201c{answers[0].text}\u201d" if answers else image.about
    return {"title": f"{image.name}: {about}", "sides": [(image.png, runs)]}


def _card(report: Answers, method: str, known: Mapping[str, str]) -> tuple[str, ...]:
    """Title, number and notes of a method's card; the result on the first set is its number."""
    right = ["{} of {}".format(*part.short(method)) for part in report.sets]
    about = [f"short questions right: {s.title[0].lower()}{s.title[1:]}" for s in report.sets]
    others = [f"{number} {text}" for number, text in zip(right[1:], about[1:], strict=True)]
    notes = [f"{known[name]} {name}" for name in IN_CARDS]
    return _breakable(method), right[0], about[0], *others, *notes


def _breakable(name: str) -> Markup:
    """Escapes a name and allows line breaks within it."""
    return Markup(re.sub(r"([:,_])", r"\1<wbr>", escape(name)))


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


def _signed(margin: float) -> str:
    if math.isinf(margin):
        return "+\u221e" if margin > 0 else "\u2212\u221e"
    return f"{margin:+.2f}".replace("-", "\u2212")
