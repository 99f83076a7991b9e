"""First part of the speech demo's HTML page: transcripts of recordings of people.

The report of `mmdecode.demo.speech.clips_page` on synthetic speech follows it on the same page.
Both parts have audio players, marked word errors, and the origin of each token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from mmdecode.demo.speech.clips_page import Opening, legend, normaliser_text, strip
from mmdecode.evaluation.report.pages import LEGEND, card, marked, player
from mmdecode.evaluation.speech.wer import WER, Step, align_as_written

if TYPE_CHECKING:
    from mmdecode.engine.trace import Round


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Recording of a person that was transcribed without and with a drafter.

    Attributes:
        name: Name of the recording.
        audio: Path of the audio file that the page embeds.
        speaker: Name of the speaker or, if unknown, of the source.
        origin: Recorded work and its licence.
        seconds: Duration in seconds.
        reference: Reference text.
        hypothesis: Recognised text.
        windows: Drafted and accepted tokens of each decoder pass, by window of the audio.
        tokens: Number of output tokens.
        plain_passes, passes: Number of decoder passes without and with the drafter.
        tokens_per_pass: Tokens per pass after the prefill.
        generate_total_s: Seconds from file to tokens with plain ``generate``; ``None``: not run.
        plain_s, drafted_s: Seconds of decoding without and with the drafter.
        plain_total_s, drafted_total_s: Seconds from file to text without and with the drafter.
        identical: Whether all these decoders gave the same token ids.
    """

    name: str
    audio: Path
    speaker: str
    origin: str
    seconds: float
    reference: str
    hypothesis: str
    windows: Sequence[Sequence[Round]]
    tokens: int
    plain_passes: int
    passes: int
    tokens_per_pass: float
    generate_total_s: float | None
    plain_s: float
    plain_total_s: float
    drafted_s: float
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
class Recordings:
    """Content of the page's first part.

    Attributes:
        model, draft: Names of model and drafter.
        items: The recordings, at least one.
        wer: Word error rate of all recordings.
        note: Note on drafters of this model; may be empty.
        label: Returns the text of a token id.
    """

    model: str
    draft: str
    items: Sequence[Recording]
    wer: WER
    note: str
    label: Callable[[int], str]

    def total(self, name: str) -> int:
        """Returns the sum of an attribute over the recordings."""
        return sum(getattr(item, name) for item in self.items)

    def times(self) -> dict[str, float]:
        """Returns the seconds over all recordings by name; ``generate_total_s`` only if known."""
        names = ["plain_s", "drafted_s", "plain_total_s", "drafted_total_s"]
        if self.with_generate:
            names.insert(0, "generate_total_s")
        return {name: sum(getattr(item, name) for item in self.items) for name in names}

    @property
    def identical(self) -> bool:
        """Whether drafting changed no token of any recording."""
        return all(item.identical for item in self.items)

    @property
    def with_generate(self) -> bool:
        """Whether plain ``generate`` was run on every recording."""
        return all(item.generate_total_s is not None for item in self.items)

    @property
    def audio_s(self) -> float:
        """Duration of all recordings in seconds."""
        return sum(item.seconds for item in self.items)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per pass over all recordings."""
        scored = sum(item.passes * item.tokens_per_pass for item in self.items)
        return scored / max(self.total("passes"), 1)

    @property
    def word_errors(self) -> str:
        """Phrase on the number of word errors."""
        return f"{self.wer.errors} of {self.wer.words} words wrong"

    @property
    def caution(self) -> str:
        """Sentence on why the word error rate is uncertain."""
        known = any("LibriSpeech" in item.origin for item in self.items)
        seen = ", and LibriSpeech, which some of it is from, may be in the training data"
        return f"{self.wer.words} words are little data{seen * known}"

    @property
    def ways(self) -> str:
        """Phrase that names the decoders whose token ids were compared."""
        generate = "plain generate, " * self.with_generate
        return f"{generate}our loop without a draft, and our loop with the drafter {self.draft}"

    @property
    def speed(self) -> str:
        """Sentence on the decoding times."""
        times = self.times()
        plain, drafted = times["plain_total_s"], times["drafted_total_s"]
        generate = ""
        if self.with_generate:
            generate = f"plain generate {times['generate_total_s']:.1f} s, "
        return (
            f"Seconds for {self.audio_s:.0f} s of audio, each way once: {generate}our loop "
            f"{plain:.1f} s, drafted {drafted:.1f} s ({self.tokens_per_pass:.2f} tokens per pass)"
        )


def opening(found: Recordings) -> Opening:
    """Renders the first part of the page: its title, and its header and content as HTML."""
    first, count = found.items[0], len(found.items)
    others = f", one of {count} recordings of people" * (count > 1)
    differing = sum(not item.identical for item in found.items)
    mood, same = "good", "every token id is the same"
    if differing:
        mood, same = "bad", f"the token ids of {differing} recording{'s' * (differing > 1)} differ"
    header = f"""<header>
<p class="eyebrow">mmdecode demo</p>
<h1>\u201c{escape(first.hypothesis) or "nothing"}\u201d</h1>
<p class="lead">This is what {escape(found.model)} heard in a recording of
{escape(first.speaker)}{others}: <b>{found.word_errors}</b>, and <b class="{mood}">{same}</b> by
{escape(found.ways)}. {escape(found.caution)}.</p>
</header>"""
    note = f"<p>{escape(found.note)}</p>" if found.note else ""
    body = f"""<section class="cards">{_cards(found)}</section>
<section>
{note}
<ul class="legend words">{LEGEND}</ul>
{"".join(_item(item, found.label) for item in found.items)}
</section>"""
    return Opening(f"real recordings, {found.word_errors}", header, body)


def _cards(found: Recordings) -> str:
    same = sum(item.identical for item in found.items)
    times, passes = found.times(), found.total("passes")
    plain, drafted = times["plain_total_s"], times["drafted_total_s"]
    spread = f"95 % interval {100 * found.wer.low:.1f} to {100 * found.wer.high:.1f} %"
    generate = ""
    if found.with_generate:
        generate = f"; plain generate {times['generate_total_s']:.1f} s"
    length = f"{found.audio_s:.0f} s of audio, from file to text, without a draft"
    saved = f"{passes:,} passes for {found.total('plain_passes'):,}"
    return "".join(
        (
            card(
                "word errors",
                f"{100 * found.wer.value:.1f} %",
                f"{found.wer.errors} of {found.wer.words} words, {normaliser_text(found.wer)}"
                + f"; {spread}" * (found.wer.utterances > 1),
            ),
            card(
                "same token ids",
                "yes" if found.identical else "no",
                f"{same} of {len(found.items)} recordings",
            ),
            card("heard in", f"{plain:.1f} s", f"{length}{generate}; each once"),
            card(
                "tokens per pass",
                f"{found.tokens_per_pass:.2f}",
                f"with {found.draft}: {saved}, in {drafted:.1f} s",
            ),
        )
    )


def _item(item: Recording, label: Callable[[int], str]) -> str:
    wrong = item.errors
    errors = f"{wrong} word error{'s' * (wrong != 1)}" if wrong else "no word errors"
    lines = [("heard", escape(item.hypothesis) or "<i>nothing</i>")]
    lines.append(("said", escape(item.reference)))
    if wrong:
        lines.append(("errors", marked(item.steps)))
    rows = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in lines)
    same = "" if item.identical else '<span class="bad">token ids differ</span>'
    strips = "".join(strip(rounds, label) for rounds in item.windows)
    return f"""<article class="clip{" wrong" * bool(wrong)}" id="{escape(item.name)}">
<header><h2>{escape(item.speaker)}</h2><span>{item.seconds:.1f} s</span>
<span class="{"bad" if wrong else "good"}">{errors}</span>{same}
<span>{escape(item.origin)}</span></header>
{player(item.audio, item.name)}
<dl>{rows}</dl>
<details><summary>who proposed which token: {item.tokens} tokens in {item.passes} passes of the
decoder, {item.plain_passes} without a draft</summary>
<ul class="legend">{legend(item.windows)}</ul>{strips}</details>
</article>
"""
