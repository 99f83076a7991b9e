"""HTML page, in one file, that shows the effect of drafting on every recording.

Styles, scripts, figures and audio are embedded. Each output token is a coloured box (chip). The
chips of one decoder pass are grouped and followed by the rejected draft tokens, struck through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mmdecode.evaluation.report.pages import (
    LEGEND,
    asset,
    card,
    head,
    keyed,
    marked,
    player,
)
from mmdecode.evaluation.speech.wer import WER, align_as_written

if TYPE_CHECKING:
    from mmdecode.asr.results import Word
    from mmdecode.engine.trace import Round

ORIGINS = {
    "accepted": "from the draft: guessed ahead, and the model agrees",
    "other": "from the draft, but not its first guess",
    "corrected": "by the model, where the draft was wrong or had nothing",
    "bonus": "by the model, one more after a draft that was right to its end",
    "first": "by the model while it read the prompt, before any draft",
}


UNCERTAIN = 0.5
"""Confidence of a word, 0 to 1, below which it is marked."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """Recording that was decoded without and with a drafter.

    Attributes:
        name: Name of the recording.
        audio: Path of the audio file that the page embeds.
        about: Voice and duration.
        reference: Reference text.
        hypothesis: Recognised text.
        noisy: Text recognised after noise was added; ``None``: not tried.
        windows: Drafted and accepted tokens of each decoder pass, by window of the audio.
        histogram: Number of passes that accepted 0, 1, 2, ... drafted tokens.
        tokens: Number of output tokens.
        plain_passes, passes: Number of decoder passes without and with the drafter.
        tokens_per_pass: Tokens per pass after the prefill.
        plain_s, drafted_s: Seconds of decoding without and with the drafter.
        plain_total_s, drafted_total_s: Seconds of decoding, reading, features and encoder.
        identical: Whether the token ids are the same without and with the drafter.
        words: Recognised words with times and confidences.
    """

    name: str
    audio: Path
    about: str
    reference: str
    hypothesis: str
    noisy: str | None
    windows: Sequence[Sequence[Round]]
    histogram: Sequence[int]
    tokens: int
    plain_passes: int
    passes: int
    tokens_per_pass: float
    plain_s: float
    drafted_s: float
    plain_total_s: float
    drafted_total_s: float
    identical: bool
    words: Sequence[Word]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Content of the page.

    Attributes:
        model, draft: Names of model and drafter.
        items: The recordings.
        ratio: Decoding time of the short clips without the drafter divided by the time with it, and
            the bounds of its 95 % interval.
        tokens_per_pass: Tokens per pass over all items.
        histogram: Number of passes that accepted 0, 1, 2, ... drafted tokens.
        wer: Word error rate by name of the set.
        conditions: Conditions of the measurement, by name.
        label: Returns the text of a token id.
    """

    model: str
    draft: str
    items: Sequence[Item]
    ratio: tuple[float, float, float]
    tokens_per_pass: float
    histogram: Sequence[int]
    wer: dict[str, WER]
    conditions: dict[str, str]
    label: Callable[[int], str]

    @property
    def identical(self) -> bool:
        """Whether drafting changed no token of any item."""
        return all(item.identical for item in self.items)


@dataclass(frozen=True)
class Pass:
    """Decoder pass, as the page shows it.

    Attributes:
        committed: Output tokens of the pass, each with its origin (a key of `ORIGINS`).
        rejected: Rejected draft tokens; of a draft tree, those on its most likely path.
    """

    committed: tuple[tuple[int, str], ...]
    rejected: tuple[int, ...]


class Opening(NamedTuple):
    """First part of the page, on recordings of people, as HTML.

    Attributes:
        title: Title of the page.
        header: Header with the heading.
        body: Content after the header.
    """

    title: str
    header: str
    body: str


def passes(rounds: Sequence[Round]) -> list[Pass]:
    """Converts the recorded rounds of one window to passes, with the origin of each token."""
    found = []
    for index, turn in enumerate(rounds):
        same = 0
        for guess, token in zip(turn.drafted, turn.accepted, strict=False):
            if guess != token:
                break
            same += 1
        origins = ["accepted"] * same + ["other"] * (len(turn.accepted) - same)
        own = "first" if index == 0 else "bonus" if turn.bonus and turn.accepted else "corrected"
        block = list(zip((*turn.accepted, turn.decided), (*origins, own), strict=True))
        ended_inside = turn.kept < len(block)
        rejected = () if ended_inside else turn.drafted[same:]
        found.append(Pass(tuple(block[: turn.kept]), rejected))
    return found


def score(score: WER) -> dict[str, Any]:
    """Converts a word error rate to JSON values; without an interval for a single recording."""
    names = ("value", "low", "high", "words", "substitutions", "deletions", "insertions")
    found = {name: getattr(score, name) for name in (*names, "utterances", "normaliser")}
    return found | ({"low": None, "high": None} if score.utterances == 1 else {})


def score_text(score: WER) -> str:
    """Formats a word error rate; without an interval for a single recording."""
    value, by = f"{100 * score.value:.2f} %", normaliser_text(score)
    if score.utterances > 1:
        interval = f"[{100 * score.low:.2f}, {100 * score.high:.2f}]"
        return f"{value} {interval} ({score.words} words, {by})"
    return f"{value} ({score.words} words of 1 recording, {by})"


def normaliser_text(score: WER) -> str:
    """The normaliser of a score, as a reader knows it."""
    names = {"whisper": "Whisper's text normaliser"}
    return names.get(score.normaliser, f"normaliser {score.normaliser}")


def page(report: Report, opening: Opening | None = None) -> str:
    """Renders the page as HTML.

    Args:
        report: Content of the page.
        opening: Part of the page before the report; ``None``: there is none.
    """
    gain, low, high = report.ratio
    speed = f"{gain:.2f} times as fast" if gain >= 1 else f"{1 / gain:.2f} times slower"
    differing = sum(not item.identical for item in report.items)
    pace = "" if gain >= 1 else ' class="bad"'
    mood = "good" if report.identical else "bad"
    verdict = (
        "and every token is the same"
        if report.identical
        else f"but {differing} of {len(report.items)} texts differ"
    )
    conditions = escape(" \u00b7 ".join(report.conditions.values()))
    clips = "".join(_item(item, report.label) for item in report.items)
    title, eyebrow, level = f"mmdecode demo: {speed}", "mmdecode demo", 1
    if opening:
        title, eyebrow, level = f"mmdecode demo: {opening.title}", "speed, on synthetic speech", 2
    header = f"""<header>
<p class="eyebrow">{eyebrow}</p>
<h{level} class="headline">Decoding is <b{pace}>{speed}</b>,
<b class="{mood}">{verdict}</b></h{level}>
<p class="lead">{escape(report.model)} wrote down {len(report.items)} recordings twice: token by
token, and with {escape(report.draft)} guessing ahead. Compared is the same decoding loop without
and with the draft, in turns, clip by clip.</p>
<p class="conditions">{conditions}</p>
</header>"""
    top = f"{header}\n<main>"
    if opening:
        top = f"{opening.header}\n<main>\n{opening.body}\n{header}"
    return f"""{head(title)}<body>
{top}
<section class="cards">{_cards(report, low, high)}</section>
<section class="figures">
{_histogram(report.histogram)}
{_per_item(report.items)}
</section>
<section>
<h2>Clip by clip</h2>
<p>A box is one pass of the decoder. Without a draft every token takes a box of its own.</p>
<ul class="legend">{legend(rounds for item in report.items for rounds in item.windows)}</ul>
<ul class="legend words">{LEGEND}
{keyed('<span class="word">word</span>', "click to hear it; the arrow keys move between words")}
{keyed('<span class="word doubt">word</span>', f"less likely than {100 * UNCERTAIN:.0f} %")}</ul>
<p class="switches"><label><input type="checkbox" id="wrong"> only clips with word errors</label>
<label><input type="checkbox" id="bare"> hide what was guessed in vain</label></p>
{clips}
</section>
<section>
<h2>All numbers</h2>
{_table(report)}
</section>
</main>
<div id="tip" role="tooltip" hidden></div>
<script>{asset("tip.js")}{asset("rove.js")}{asset("report.js")}</script>
</body>
</html>
"""


def legend(windows: Iterable[Sequence[Round]]) -> str:
    """Renders the legend of the chips as HTML list items, with the origins that occur.

    Args:
        windows: Recorded rounds of all windows on the page.
    """
    found = {
        origin for rounds in windows for step in passes(rounds) for _, origin in step.committed
    }
    used = "".join(
        keyed(f'<span class="chip {origin}">token</span>', text)
        for origin, text in ORIGINS.items()
        if origin in found
    )
    vain = "guessed in vain: the model wanted something else"
    return used + keyed('<del class="chip">token</del>', vain)


def _cards(report: Report, low: float, high: float) -> str:
    same = sum(item.identical for item in report.items)
    before, after = (sum(getattr(i, n) for i in report.items) for n in ("plain_passes", "passes"))
    cards = [
        (
            "decoding speed",
            f"{report.ratio[0]:.2f} \u00d7",
            f"of the clips; 95 % interval {low:.2f} to {high:.2f}",
        ),
        (
            "same tokens",
            "yes" if report.identical else "no",
            f"{same} of {len(report.items)} recordings",
        ),
        (
            "tokens per pass",
            f"{report.tokens_per_pass:.2f}",
            f"1 without draft; {after:,} passes for {before:,}",
        ),
    ]
    for name, score in report.wer.items():
        spread = f"{100 * score.low:.1f} to {100 * score.high:.1f} %; "
        note = f"{spread * (score.utterances > 1)}{score.words:,} words"
        cards.append((f"WER, {name}", f"{100 * score.value:.1f} %", f"word errors, {note}"))
    return "".join(card(escape(name), value, note) for name, value, note in cards)


def _histogram(counts: Sequence[int]) -> str:
    total = max(sum(counts), 1)
    bars = [(str(n), count / total, f"{100 * count / total:.0f}") for n, count in enumerate(counts)]
    tips = [f"{n} accepted: {count:,} of {total:,} passes" for n, count in enumerate(counts)]
    return _figure(
        "How much of a draft is right",
        bars,
        tips,
        "drafted tokens accepted in a pass",
        "% of passes",
    )


def _per_item(items: Sequence[Item]) -> str:
    every = max(1, round(len(items) / 8))
    shown = [
        (_short(item.name) if n % every == 0 or len(items) < 9 else "", item.tokens_per_pass, "")
        for n, item in enumerate(items)
    ]
    tips = [f"{item.name}: {item.tokens_per_pass:.2f} tokens per pass" for item in items]
    return _figure("Tokens per pass, clip by clip", shown, tips, "clip", "tokens per pass", line=1)


def _short(name: str) -> str:
    return name.removeprefix("clip_")[:3]


def _figure(
    title: str,
    bars: Sequence[tuple[str, float, str]],
    tips: Sequence[str],
    x_label: str,
    y_label: str,
    line: float | None = None,
) -> str:
    """Renders a bar chart as SVG.

    Args:
        title: Title of the chart.
        bars: Label, height and text on top of each bar.
        tips: Tooltip of each bar.
        x_label: Label of the horizontal axis.
        y_label: Label of the vertical axis.
        line: Height of a horizontal line, the value without a draft; ``None``: no line.
    """
    top = max([height for _, height, _ in bars] + [line or 0, 1e-9]) * 1.12
    left, right, base, tall = 34, 470, 200, 170
    step = (right - left) / max(len(bars), 1)
    parts = []
    for n, ((label, height, text), tip) in enumerate(zip(bars, tips, strict=True)):
        x, y = left + n * step, base - tall * height / top
        middle = x + step / 2
        parts.append(
            f'<rect x="{x + step * 0.12:.1f}" y="{y:.1f}" width="{step * 0.76:.1f}" '
            f'height="{base - y:.1f}" rx="2"><title>{escape(tip)}</title></rect>'
            f'<text x="{middle:.1f}" y="{base + 18}">{escape(label)}</text>'
            f'<text class="value" x="{middle:.1f}" y="{y - 5:.1f}">{escape(text)}</text>'
        )
    if line is not None:
        y = base - tall * line / top
        parts.append(
            f'<path d="M{left} {y:.1f}H{right}"/>'
            f'<path d="M{right - 142} 15h24"/><text class="note" x="{right}" y="20">'
            f"without a draft</text>"
        )
        parts.append(f'<text class="tick" x="{left - 6}" y="{y + 4:.1f}">{line:g}</text>')
        peak = max(height for _, height, _ in bars)
        y = base - tall * peak / top
        parts.append(f'<text class="tick" x="{left - 6}" y="{y + 4:.1f}">{peak:.1f}</text>')
    return f"""<figure><figcaption>{escape(title)}</figcaption>
<svg viewBox="0 0 480 245" role="img" aria-label="{escape(title)}: {escape("; ".join(tips))}">
<path class="axis" d="M{left} {base}H{right}"/>{"".join(parts)}
<text x="{(left + right) / 2}" y="240">{escape(x_label)}</text>
<text transform="translate(12 {base - tall / 2}) rotate(-90)">{escape(y_label)}</text>
</svg></figure>"""


def _item(item: Item, label: Callable[[int], str]) -> str:
    steps = align_as_written(item.reference, item.hypothesis)
    wrong = sum(step.kind != "equal" for step in steps)
    ratio = f"{item.plain_s / max(item.drafted_s, 1e-9):.2f} \u00d7"
    strips = [strip(rounds, label) for rounds in item.windows]
    if len(strips) > 3:
        strips = [f"<li>{one}</li>" for one in strips]
        shown = (
            f"<details><summary>{len(strips)} windows, token by token</summary>"
            f"<ol>{''.join(strips)}</ol></details>"
        )
    else:
        shown = "".join(strips)
    lines = [("said", escape(item.reference)), ("heard", marked(steps))]
    if item.noisy is not None:
        lines.append(("in noise", marked(align_as_written(item.reference, item.noisy))))
    if item.words:
        lines.append(("listen", spoken(item.words, item.name)))
    rows = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in lines)
    errors = f"{wrong} word error{'s' * (wrong != 1)}" if wrong else "no word errors"
    same = "" if item.identical else '<span class="bad">tokens differ from plain decoding</span>'
    return f"""<article class="clip{" wrong" * bool(wrong)}" id="{escape(item.name)}">
<header><h3>{escape(item.name)}</h3><span>{escape(item.about)}</span>
<span class="{"bad" if wrong else "good"}">{errors}</span>{same}
<span><b>{item.tokens_per_pass:.2f}</b> tokens per pass</span>
<span>plain {1000 * item.plain_s:,.0f} ms, drafted {1000 * item.drafted_s:,.0f} ms,
<b>{ratio}</b></span>
</header>
{player(item.audio, item.name)}
<dl>{rows}</dl>
{shown}
</article>
"""


def spoken(words: Sequence[Word], name: str) -> str:
    """Renders words as HTML buttons that play them; words of low confidence are marked.

    The tab key reaches the group of buttons; arrow keys move within it (``rove.js``).

    Args:
        words: The words with times and confidences.
        name: Name of the recording.
    """
    buttons = "".join(
        f'<button class="word{" doubt" * (word.confidence < UNCERTAIN)}" '
        f'tabindex="{-bool(index)}" '
        f'data-start="{word.start_s:.2f}" data-end="{word.end_s:.2f}" '
        f'title="{word.start_s:.2f} s, {100 * word.confidence:.0f} %">'
        f"{escape(word.text.strip())}</button> "
        for index, word in enumerate(words)
    )
    return f'<span role="group" data-rove aria-label="words of {escape(name)}">{buttons}</span>'


def strip(rounds: Sequence[Round], label: Callable[[int], str]) -> str:
    """Renders decoder passes as groups of chips, the prefill first.

    Args:
        rounds: Recorded rounds of one window.
        label: Returns the text of a token id.
    """
    groups = []
    for number, step in enumerate(passes(rounds)):
        words: dict[str, list[str]] = {}
        for token, origin in step.committed:
            words.setdefault(origin, []).append(label(token).strip() or "space")
        if step.rejected:
            words["in vain"] = [label(token).strip() or "space" for token in step.rejected]
        name = f"pass {number}" if number else "prompt"
        tip = f"{name}: " + "; ".join(f"{key} {', '.join(text)}" for key, text in words.items())
        chips = "".join(
            f'<span class="chip {origin}">{_token(label(token))}</span>'
            for token, origin in step.committed
        )
        vain = "".join(f'<del class="chip">{_token(label(t))}</del>' for t in step.rejected)
        groups.append(
            f'<span class="pass" role="group" aria-label="{escape(tip)}">{chips}'
            f"{'<span class=vain>' + vain + '</span>' if vain else ''}</span>"
        )
    return f'<div class="strip">{"".join(groups)}</div>'


def _token(text: str) -> str:
    """Escapes a token's text; a leading space is shown as a faint mark."""
    start = "<i>·</i>" if text.startswith(" ") else ""
    return start + escape(text.strip() or "space")


def _table(report: Report) -> str:
    names = ["recording", "same", "tokens", "passes", "per pass", "plain", "drafted", "ratio"]
    names += ["plain, all", "drafted, all"]
    rows = []
    for item in report.items:
        times = item.plain_s, item.drafted_s, item.plain_total_s, item.drafted_total_s
        first, second, third, fourth = (f"{1000 * time:,.0f} ms" for time in times)
        ratio = f"{item.plain_s / max(item.drafted_s, 1e-9):.2f}"
        cells = [item.name, "yes" if item.identical else "NO", f"{item.tokens:,}"]
        cells += [f"{item.passes:,}", f"{item.tokens_per_pass:.2f}", first, second, ratio]
        cells += [third, fourth]
        rows.append("".join(f"<td>{escape(cell)}</td>" for cell in cells))
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    scores = "".join(
        f"<tr><th>word errors, {escape(name)}</th><td>{escape(score_text(score))}: "
        f"{score.substitutions} substituted, {score.deletions} missing, {score.insertions} too "
        f"many</td></tr>"
        for name, score in report.wer.items()
    )
    facts = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>"
        for name, text in report.conditions.items()
    )
    return f"""<div class="wide"><table class="numbers"><thead><tr>{head}</tr></thead>
<tbody>{body}</tbody></table></div>
<p>"plain" and "drafted" are the times of decoding; "all" adds reading, features and encoder.</p>
<div class="wide"><table>{scores}{facts}</table></div>"""
