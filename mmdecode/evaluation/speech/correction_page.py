"""Corrected texts with each word coloured by who decided it: a page, or inline in a notebook.

Next to each stands what the recogniser alone says. Where it is known what was said, both are
aligned to it. Colours are those that people with any kind of colour vision tell apart, and each has
a line of its own below the word and the same in words as a title.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdecode.asr.correction.guard import words_of
from mmdecode.asr.correction.windows import places_in
from mmdecode.asr.results import By, DecidedWord
from mmdecode.evaluation.report.layout import html_table, percent
from mmdecode.evaluation.report.pages import LEGEND, asset, card, head, keyed, marked, player
from mmdecode.evaluation.speech.wer import WER, Step, align_as_written, wer
from mmdecode.evaluation.speech.word_page import MARKS, PLAYED

if TYPE_CHECKING:
    from mmdecode.asr.correction.n_best_lists import NBestList
    from mmdecode.asr.correction.transcripts import Corrected
    from mmdecode.asr.results import Transcript

STYLES = "decided.css"
MOST = 100
"""Texts that a page shows."""
_HELD = 64 << 20  # bytes of recordings that a page holds
_CLASSES: dict[By, str] = {"both": "by-both", "audio": "by-audio", "language model": "by-model"}
TELLS: dict[By, str] = {
    "both": "each of the two alone would have written it",
    "audio": "decided by the audio; the language model would not have written it, or was refused",
    "language model": "decided by the language model; the audio alone would not have written it",
}
"""What it means that a word was decided by each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrectedText:
    """A text and who decided its words.

    Attributes:
        name: Of the recording.
        words: Of the corrected text.
        before: What the recogniser alone says.
        said: The reference; ``None``: not known.
        audio: The recording; ``None``: not at hand.
    """

    name: str
    words: Sequence[DecidedWord]
    before: str
    said: str | None = None
    audio: Path | None = None

    @classmethod
    def of_list(cls, found: Corrected, one: NBestList) -> CorrectedText:
        """Of a list that was corrected."""
        return cls(name=one.id, words=found.words, before=found.correction.best, said=one.reference)

    @classmethod
    def of_transcript(
        cls,
        transcript: Transcript | Mapping[str, Any],
        said: str | None = None,
        audio: Path | None = None,
    ) -> CorrectedText:
        """Of a transcript, or its row of ``results.jsonl``; where nothing was corrected, by audio.

        Args:
            transcript: Of a transcriber that corrects.
            said: See the class.
            audio: See the class.
        """
        row = transcript if isinstance(transcript, Mapping) else dataclasses.asdict(transcript)
        words: list[DecidedWord] = []
        for segment in row["segments"]:
            heard = [{"text": word, "by": "audio"} for word in segment["text"].split()]
            decided = heard if segment["decided"] is None else segment["decided"]
            words += (DecidedWord(**word) for word in decided)
        before = row["text"] if row["uncorrected"] is None else row["uncorrected"]
        return cls(name=row["source"], words=words, before=before, said=said, audio=audio)

    @property
    def text(self) -> str:
        """The corrected text."""
        return " ".join(word.text for word in self.words)

    @cached_property
    def changed(self) -> list[bool]:
        """Of each word whether the recogniser alone has another one there, or none."""
        before, after = (
            ["".join(words_of(word)) for word in words]
            for words in (self.before.split(), [word.text for word in self.words])
        )
        found = [True] * len(after)
        for block in SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks():
            found[block.b : block.b + block.size] = [False] * block.size
        return found


class CorrectedTexts:
    """Texts to look at; shows them in a notebook, and writes a page.

    Args:
        texts: In any order; those with the most changed words are shown first.
        normaliser: With which errors are counted, see `mmdecode.evaluation.speech.normalisers`.
    """

    def __init__(self, texts: Iterable[CorrectedText], *, normaliser: str = "whisper") -> None:
        self.texts = list(texts)
        self.normaliser = normaliser

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def aligned(self) -> list[tuple[list[Step], list[int]] | None]:
        """Of each text its alignment and each word's step in it; ``None``: it has no reference."""
        return [None if one.said is None else _aligned(one, self.normaliser) for one in self.texts]

    @cached_property
    def scores(self) -> dict[str, WER]:
        """Word errors before and after, of the texts whose reference is known."""
        known = [one for one in self.texts if one.said is not None]
        if not known:
            return {}
        said = [one.said or "" for one in known]
        sides = {"1-best": [o.before for o in known], "corrected": [o.text for o in known]}
        return {n: wer(said, texts, normaliser=self.normaliser) for n, texts in sides.items()}

    def rows(self) -> list[dict[str, str]]:
        """By who decided them: how many words, how many were changed, and how many are right."""
        rows = []
        total = sum(len(one.words) for one in self.texts)
        for by in _CLASSES:
            own = changed = known = right = 0
            for one, aligned in zip(self.texts, self.aligned, strict=True):
                places = [place for place, word in enumerate(one.words) if word.by == by]
                own += len(places)
                changed += sum(one.changed[place] for place in places)
                if aligned is not None:
                    steps, at = aligned
                    known += len(places)
                    right += sum(steps[at[place]].kind == "equal" for place in places)
            row = {"decided by": by, "words": f"{own:,}", "share, %": percent(own / max(total, 1))}
            row |= {"not so in the 1-best": f"{changed:,}"}
            if self.scores:
                row["right, %"] = percent(right / known if known else None)
            rows.append(row)
        return rows

    def as_html(self) -> str:
        """A legend and the texts, without styles."""
        order = sorted(range(len(self)), key=lambda place: -sum(self.texts[place].changed))
        held, articles = 0, []
        for place in order[:MOST]:
            audio = self.texts[place].audio
            size = audio.stat().st_size if audio is not None and audio.is_file() else None
            plays = size is not None and size <= PLAYED and held + size <= _HELD
            held += size or 0 if plays else 0
            articles.append(self._article(place, plays))
        legend = "".join(
            keyed(f'<span class="{_CLASSES[by]}">word</span>', escape(text))
            for by, text in TELLS.items()
        )
        legend += keyed('<span class="changed">word</span>', "not so in the 1-best")
        legend += LEGEND if self.scores else ""
        return f'<ul class="legend deciders">{legend}</ul>{"".join(articles)}'

    def page(self, conditions: Mapping[str, str]) -> str:
        """One HTML file that holds everything.

        Args:
            conditions: What the words depend on, by name.
        """
        counted = {row["decided by"]: row["words"] for row in self.rows()}
        total = sum(len(one.words) for one in self.texts)
        few = f"The {MOST} of {len(self):,} recordings with the most changes are shown. "
        facts = escape(" \u00b7 ".join(f"{n} {value}" for n, value in conditions.items()))
        return f"""{head("mmdecode: who decided the words", STYLES)}<body>
<header>
<p class="eyebrow">mmdecode transcribe --correct</p>
<h1>Of {total:,} words the audio decided <b>{counted["audio"]}</b>, the language model
<b>{counted["language model"]}</b></h1>
<p class="lead">The 1-best is what the recogniser alone says. Who decides is asked word by word,
given the words before and what the language model holds likely: so a word of both may be none of
the 1-best. {few if len(self) > MOST else ""}Numbers are of all recordings.</p>
<p class="conditions">{facts}</p>
</header>
<main>
<section class="cards">{self._cards()}</section>
<section><h2>Words by who decided them</h2>{html_table(self.rows())}</section>
<section><h2>Recording by recording</h2>
{self.as_html()}</section>
</main>
</body>
</html>
"""

    def _cards(self) -> str:
        edited = sum(words_of(one.text) != words_of(one.before) for one in self.texts)
        cards = [("recordings changed", f"{edited:,}", f"of {len(self):,}")]
        for name, score in self.scores.items():
            spread = f"{percent(score.low, '.1f')} to {percent(score.high, '.1f')} %; "
            about = f"{spread * (score.utterances > 1)}{score.words:,} words, {score.normaliser}"
            cards.append((f"WER, {name}", f"{percent(score.value, '.1f')} %", about))
        return "".join(card(escape(name), value, about) for name, value, about in cards)

    def _article(self, place: int, plays: bool) -> str:
        one, aligned = self.texts[place], self.aligned[place]
        words = [_word(*pair) for pair in zip(one.words, one.changed, strict=True)]
        lines = []
        if one.said is not None:
            lines.append(("said", escape(one.said)))
            before = marked(align_as_written(one.said, one.before, self.normaliser))
        else:
            before = escape(one.before) or "<i>nothing</i>"
        lines.append(("1-best", before))
        if aligned is not None:
            steps, places = aligned
            heard: list[list[str]] = [[] for _ in steps]
            for word, at in zip(words, places, strict=True):
                heard[at].append(word)
            after = marked(steps, [" ".join(own) for own in heard])
        else:
            after = " ".join(words) or "<i>nothing</i>"
        lines.append(("corrected", after))
        shown = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in lines)
        listen = player(one.audio, one.name) if plays and one.audio is not None else ""
        return (
            f'<article class="clip"><h3>{escape(one.name)}</h3>{listen}'
            f'<dl class="decided">{shown}</dl></article>'
        )

    def _repr_html_(self) -> str:
        return f"<style>{MARKS}{asset(STYLES)}</style>{self.as_html()}"

    def __repr__(self) -> str:
        lines = []
        for one in self.texts:
            lines += [one.name, f"  1-best    {one.before}", f"  corrected {one.text}"]
            lines += [f"    {w.text}: {w.by}" for w in one.words if w.by != "both"]
        return "\n".join(lines)


def _word(word: DecidedWord, changed: bool) -> str:
    """A word as HTML; a title says who decided it."""
    names = _CLASSES[word.by] + " changed" * changed
    return f'<span class="{names}" title="{escape(TELLS[word.by])}">{escape(word.text)}</span>'


def _aligned(one: CorrectedText, normaliser: str) -> tuple[list[Step], list[int]]:
    """The steps from what was said to the corrected text, and the step of each of its words.

    Words that a normaliser joins, parts or leaves out are in no step as they are written; they
    stand where what they became stands, else after the word before.
    """
    steps = align_as_written(one.said or "", one.text, normaliser)
    heard = [place for place, step in enumerate(steps) if step.heard]
    if one.words and not heard:  # a normaliser may leave nothing over
        heard = [len(steps)]
        steps = [*steps, Step("equal", "", "")]
    at = places_in([steps[place].heard for place in heard], [word.text for word in one.words])
    return steps, [heard[place] for place in at]
