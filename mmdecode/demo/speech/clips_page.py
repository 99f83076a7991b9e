"""HTML page, in one file, that shows the effect of drafting on every recording.

Styles, scripts, figures and audio are embedded. Each output token is a coloured box (chip). The
chips of one decoder pass are grouped and followed by the rejected draft tokens, struck through.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mmdecode.evaluation.report.templates import recording_url, rendered
from mmdecode.evaluation.speech.wer import WER, Step, align_as_written

if TYPE_CHECKING:
    from mmdecode.asr.results import Word
    from mmdecode.demo.speech.recordings import Recordings
    from mmdecode.engine.trace import Round

ORIGINS = {
    "accepted": "from the draft: guessed ahead, and the model agrees",
    "other": "from the draft, but not its first guess",
    "corrected": "by the model, where the draft was wrong or had nothing",
    "bonus": "by the model, one more after a draft that was right to its end",
    "first": "by the model while it read the prompt, before any draft",
}

TIMES = ("plain_s", "drafted_s", "plain_total_s", "drafted_total_s")
"""Names of the times of a recording."""

UNCERTAIN = 0.5
"""Confidence of a word, 0 to 1, below which it is marked."""


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """Recording that was transcribed without and with a drafter.

    Attributes:
        name: Name of the recording.
        audio: Path of the audio file that the page embeds.
        reference: Reference text.
        hypothesis: Recognised text.
        windows: Drafted and accepted tokens of each decoder pass, by window of the audio.
        tokens: Number of output tokens.
        plain_passes, passes: Number of decoder passes without and with the drafter.
        tokens_per_pass: Tokens per pass after the prefill.
        plain_s, drafted_s: Seconds of decoding without and with the drafter.
        plain_total_s, drafted_total_s: Seconds from file to text without and with the drafter: of
            decoding, reading, features and encoder.
        identical: Whether the token ids are the same without and with the drafter.
    """

    name: str
    audio: Path
    reference: str
    hypothesis: str
    windows: Sequence[Sequence[Round]]
    tokens: int
    plain_passes: int
    passes: int
    tokens_per_pass: float
    plain_s: float
    drafted_s: float
    plain_total_s: float
    drafted_total_s: float
    identical: bool

    @property
    def steps(self) -> list[Step]:
        """Alignment of reference and hypothesis, word by word."""
        return align_as_written(self.reference, self.hypothesis)

    @property
    def errors(self) -> int:
        """Number of word errors."""
        return sum(step.kind != "equal" for step in self.steps)


@dataclass(frozen=True, kw_only=True)
class Item(Decoded):
    """Recording of the part on speed.

    Attributes:
        about: Voice and duration.
        noisy: Text recognised after noise was added; ``None``: not tried.
        histogram: Number of passes that accepted 0, 1, 2, ... drafted tokens.
        words: Recognised words with times and confidences.
    """

    about: str
    noisy: str | None
    histogram: Sequence[int]
    words: Sequence[Word]

    @property
    def ratio(self) -> float:
        """Seconds of decoding without the drafter, divided by those with it."""
        return self.plain_s / max(self.drafted_s, 1e-9)


@dataclass(frozen=True, kw_only=True)
class Decodings:
    """Recordings that a model transcribed without and with a drafter.

    Attributes:
        model, draft: Names of model and drafter.
        items: The recordings, at least one.
        label: Returns the text of a token id.
    """

    model: str
    draft: str
    items: Sequence[Decoded]
    label: Callable[[int], str]

    def total(self, name: str) -> Any:
        """Returns the sum of an attribute over the recordings."""
        return sum(getattr(item, name) for item in self.items)

    @property
    def different(self) -> list[str]:
        """Names of the recordings whose tokens drafting changed."""
        return [item.name for item in self.items if not item.identical]

    @property
    def identical(self) -> bool:
        """Whether drafting changed no token of any recording."""
        return not self.different

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per pass over all recordings."""
        scored = sum(item.passes * item.tokens_per_pass for item in self.items)
        return scored / max(self.total("passes"), 1)

    def same_card(self, title: str) -> tuple[str, str, str]:
        """The card on whether drafting changed tokens."""
        count = len(self.items)
        same = f"{count - len(self.different)} of {count} recordings"
        return title, "yes" if self.identical else "no", same

    def verdict(self, what: str) -> str:
        """Line for the terminal on whether drafting changed ``what``, with rich's markup."""
        if self.identical:
            return f"identical: [bold green]yes[/], all {len(self.items)} recordings"
        return f"identical: [bold red]no[/], {what} differ in {', '.join(self.different)}"

    def summary(self) -> dict[str, Any]:
        """Returns the measurements of tokens and passes as JSON values."""
        return {
            "model": self.model,
            "draft": self.draft,
            "identical": self.identical,
            "different": self.different,
            **{name: self.total(name) for name in ("tokens", "passes", "plain_passes")},
            "tokens_per_pass": round(self.tokens_per_pass, 4),
        }


@dataclass(frozen=True, kw_only=True)
class Report(Decodings):
    """Content of the page's part on speed.

    Attributes:
        items: The recordings, the clips first.
        clips: Number of clips; those after them are long recordings.
        ratio: Decoding time of the clips without the drafter divided by the time with it, and
            the bounds of its 95 % interval.
        wer: Word error rate by name of the set.
        conditions: Conditions of the measurement, by name.
    """

    items: Sequence[Item]
    clips: int
    ratio: tuple[float, float, float]
    wer: dict[str, WER]
    conditions: dict[str, str]

    @property
    def histogram(self) -> list[int]:
        """Number of passes that accepted 0, 1, 2, ... drafted tokens."""
        columns = itertools.zip_longest(*(item.histogram for item in self.items), fillvalue=0)
        return [sum(column) for column in columns]


class Pass(NamedTuple):
    """Decoder pass, as the page shows it.

    Attributes:
        committed: Output tokens of the pass, each with its origin (a key of `ORIGINS`).
        rejected: Rejected draft tokens; of a draft tree, those on its most likely path.
        tip: Tooltip.
    """

    committed: Sequence[tuple[Any, str]]
    rejected: Sequence[Any]
    tip: str = ""


class Bar(NamedTuple):
    """Bar of a chart: its label, height, the text on top, and its tooltip."""

    label: str
    height: float
    text: str
    tip: str


def passes(rounds: Sequence[Round]) -> list[Pass]:
    """Converts the recorded rounds of one window to passes, with the origin of each token."""
    found = []
    for index, turn in enumerate(rounds):
        pairs = zip(turn.drafted, turn.accepted, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
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


def page(
    report: Report, people: Recordings | None = None, notes: Mapping[str, str] | None = None
) -> str:
    """Renders the page as HTML.

    Args:
        report: Content of the page.
        people: Recordings of people, the page's first part; ``None``: there are none.
        notes: Notes after the conditions, by name.
    """
    conditions = report.conditions | dict(notes or {})
    gain = report.ratio[0]
    differing = f"but {len(report.different)} of {len(report.items)} texts differ"
    first = report.items[0]
    return rendered(
        "clips.html",
        report=report,
        people=people,
        speed=f"{gain:.2f} times as fast" if gain >= 1 else f"{1 / gain:.2f} times slower",
        verdict="and every token is the same" if report.identical else differing,
        speed_cards=_cards(report),
        speed_view={
            "title": f"{first.name}: \u201c{first.hypothesis}\u201d",
            "sides": [(None, runs_of(first.windows, report.draft))],
        },
        histogram=_histogram(report.histogram),
        bars=_per_item(report.items),
        rows=_rows(report.items),
        speed_conditions=conditions.values(),
        facts=_errors(report.wer) | conditions,
        origins=origins_of(rounds for item in report.items for rounds in item.windows),
        origins_of=origins_of,
        strip=strip,
        align=align_as_written,
        audio=recording_url,
        uncertain=UNCERTAIN,
        ms=_milliseconds,
    )


def strips_page(
    name: str, drafted: Mapping[str, Sequence[Sequence[Round]]], label: Callable[[int], str]
) -> str:
    """Renders the output tokens of one recording as a small page of their own.

    Args:
        name: Name of the recording.
        drafted: Recorded rounds of each window, by the name of the drafter.
        label: Returns the text of a token id.
    """
    return rendered(
        "strips.html",
        name=name,
        origins=origins_of(rounds for windows in drafted.values() for rounds in windows),
        shown={n: [strip(rounds, label) for rounds in own] for n, own in drafted.items()},
    )


def origins_of(windows: Iterable[Sequence[Round]]) -> dict[str, str]:
    """Returns the origins of tokens that occur, with their meaning.

    Args:
        windows: Recorded rounds of all windows on the page.
    """
    found = {
        origin for rounds in windows for step in passes(rounds) for _, origin in step.committed
    }
    return {origin: text for origin, text in ORIGINS.items() if origin in found}


def runs_of(windows: Iterable[Sequence[Round]], draft: str) -> dict[str, list[int]]:
    """Returns the number of tokens of each pass after the prompt, by way of decoding.

    Args:
        windows: Recorded rounds of all windows of an input.
        draft: Name of the drafter.
    """
    sizes = [turn.kept for rounds in windows for turn in rounds[1:]]
    return {"token by token": [1] * sum(sizes), f"with {draft}": sizes}


def strip(rounds: Sequence[Round], label: Callable[[int], str]) -> list[Pass]:
    """Returns decoder passes with the texts of their tokens, the prefill first.

    Args:
        rounds: Recorded rounds of one window.
        label: Returns the text of a token id.
    """
    shown = []
    for number, step in enumerate(passes(rounds)):
        committed = [(label(token), origin) for token, origin in step.committed]
        rejected = [label(token) for token in step.rejected]
        words: dict[str, list[str]] = {}
        for text, origin in [*committed, *((text, "in vain") for text in rejected)]:
            words.setdefault(origin, []).append(text.strip() or "space")
        name = f"pass {number}" if number else "prompt"
        tip = f"{name}: " + "; ".join(f"{key} {', '.join(text)}" for key, text in words.items())
        shown.append(Pass(committed, rejected, tip))
    return shown


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms"


def _errors(scores: Mapping[str, WER]) -> dict[str, str]:
    """Word error rates of the sets with their counts."""
    return {
        f"word errors, {name}": f"{score_text(score)}: {score.substitutions} substituted, "
        f"{score.deletions} missing, {score.insertions} too many"
        for name, score in scores.items()
    }


def _cards(report: Report) -> list[tuple[str, str, str]]:
    """Titles, numbers and notes of the cards."""
    before, after = report.total("plain_passes"), report.total("passes")
    gain, low, high = report.ratio
    spread = f"of the clips; 95 % interval {low:.2f} to {high:.2f}"
    saved = f"1 without draft; {after:,} passes for {before:,}"
    cards = [
        ("decoding speed", f"{gain:.2f} \u00d7", spread),
        report.same_card("same tokens"),
        ("tokens per pass", f"{report.tokens_per_pass:.2f}", saved),
    ]
    for name, score in report.wer.items():
        spread = f"{100 * score.low:.1f} to {100 * score.high:.1f} %; "
        note = f"{spread * (score.utterances > 1)}{score.words:,} words"
        cards.append((f"WER, {name}", f"{100 * score.value:.1f} %", f"word errors, {note}"))
    return cards


def _histogram(counts: Sequence[int]) -> list[Bar]:
    total = max(sum(counts), 1)
    bars = []
    for n, count in enumerate(counts):
        tip = f"{n} accepted: {count:,} of {total:,} passes"
        bars.append(Bar(str(n), count / total, f"{100 * count / total:.0f}", tip))
    return bars


def _per_item(items: Sequence[Item]) -> list[Bar]:
    every = max(1, round(len(items) / 8))
    bars = []
    for n, item in enumerate(items):
        label = "" if n % every else item.name.removeprefix("clip_")[:3]
        tip = f"{item.name}: {item.tokens_per_pass:.2f} tokens per pass"
        bars.append(Bar(label, item.tokens_per_pass, "", tip))
    return bars


def _rows(items: Sequence[Item]) -> list[dict[str, str]]:
    """Rows of the table of all numbers."""
    return [
        {
            "recording": item.name,
            "same": "yes" if item.identical else "NO",
            "tokens": f"{item.tokens:,}",
            "passes": f"{item.passes:,}",
            "per pass": f"{item.tokens_per_pass:.2f}",
            "plain": _milliseconds(item.plain_s),
            "drafted": _milliseconds(item.drafted_s),
            "ratio": f"{item.ratio:.2f}",
            "plain, all": _milliseconds(item.plain_total_s),
            "drafted, all": _milliseconds(item.drafted_total_s),
        }
        for item in items
    ]
