"""Corrected texts with each word coloured by which model decided it, as a page or in a notebook.

Each text is shown next to the recogniser's own hypothesis (1-best). If there is a reference, the
hypothesis and the corrected text are aligned to it. The colours can be told apart with any kind of
colour vision. Each colour also has its own style of underline, and a tooltip that explains it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdecode.asr.correction.guard import words_of
from mmdecode.asr.correction.windows import aligned_positions
from mmdecode.asr.results import By, DecidedWord
from mmdecode.evaluation.report.examples import MOST as PLAYED
from mmdecode.evaluation.report.layout import between, percent
from mmdecode.evaluation.report.templates import asset, recording_url, rendered
from mmdecode.evaluation.speech.wer import WER, Step, align_as_written, wer

if TYPE_CHECKING:
    from mmdecode.asr.results import Transcript

STYLES = "decided.css"
MOST = 100
"""Largest number of texts on a page."""
HELD = 64 << 20
"""Largest total size, in bytes, of the recordings that are embedded in a page."""
_CLASSES: dict[By, str] = {"both": "by-both", "audio": "by-audio", "language model": "by-model"}
TELLS: dict[By, str] = {
    "both": "each of the two alone would have written it",
    "audio": "decided by the audio; the language model would not have written it, or was refused",
    "language model": "decided by the language model; the audio alone would not have written it",
}
"""Explanation of each value of ``DecidedWord.by``, the model that decided a word."""


WordsOfStep = tuple[Step, list[tuple[DecidedWord, bool]]]
"""Step of an alignment with its words, and whether each has no equal word in the 1-best."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrectedText:
    """A corrected text and which model decided each of its words.

    Attributes:
        name: Name of the recording.
        words: Words of the corrected text, each with the model that decided it.
        before: Hypothesis of the recogniser alone (1-best).
        reference: Reference text; ``None``: not known.
        audio: Path of the recording; ``None``: not available.
    """

    name: str
    words: Sequence[DecidedWord]
    before: str
    reference: str | None = None
    audio: Path | None = None

    @classmethod
    def of_transcript(
        cls,
        transcript: Transcript | Mapping[str, Any],
        reference: str | None = None,
        audio: Path | None = None,
    ) -> CorrectedText:
        """Makes a corrected text from a transcript, or from its row of ``results.jsonl``.

        Words of a segment that was not corrected count as decided by the audio.

        Args:
            transcript: Result of a transcriber that corrects its texts with a language model.
            reference: Reference text; ``None``: not known.
            audio: Path of the recording; ``None``: not available.
        """
        row = transcript if isinstance(transcript, Mapping) else dataclasses.asdict(transcript)
        words: list[DecidedWord] = []
        for segment in row["segments"]:
            plain = [{"text": word, "by": "audio"} for word in segment["text"].split()]
            decided = plain if segment["decided"] is None else segment["decided"]
            words += (DecidedWord(**word) for word in decided)
        before = row["text"] if row["uncorrected"] is None else row["uncorrected"]
        return cls(name=row["source"], words=words, before=before, reference=reference, audio=audio)

    @property
    def text(self) -> str:
        """The corrected text."""
        return " ".join(word.text for word in self.words)

    @cached_property
    def changed(self) -> list[bool]:
        """Whether each corrected word has no equal word at its position in the 1-best."""
        return [kind != "equal" for kind, *_, start, end in self._edits for _ in range(start, end)]

    @cached_property
    def left_out(self) -> int:
        """Number of words of the 1-best that the corrected text has no word for."""
        return sum(max(0, (e - s) - (end - start)) for _, s, e, start, end in self._edits)

    @cached_property
    def _edits(self) -> Sequence[tuple[str, int, int, int, int]]:
        """Edits from the words of the 1-best to the corrected words, as difflib's opcodes."""
        before, after = (
            ["".join(words_of(word)) for word in words]
            for words in (self.before.split(), [word.text for word in self.words])
        )
        return SequenceMatcher(None, before, after, autojunk=False).get_opcodes()


class CorrectedTexts:
    """Corrected texts, displayed in a notebook or on a page.

    Args:
        texts: Texts in any order; those with the most changed words are shown first.
        normaliser: Normaliser for the error counts, see `mmdecode.evaluation.speech.normalisers`.
    """

    def __init__(self, texts: Iterable[CorrectedText], *, normaliser: str = "whisper") -> None:
        self.texts = list(texts)
        self.normaliser = normaliser

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def steps(self) -> list[list[WordsOfStep]]:
        """Steps of the alignment of each text; without a reference all its words are one step."""
        return [_steps(one, self.normaliser) for one in self.texts]

    @cached_property
    def scores(self) -> dict[str, WER]:
        """Word error rates before and after correction, over the texts with a reference."""
        known = [one for one in self.texts if one.reference is not None]
        if not known:
            return {}
        references = [one.reference or "" for one in known]
        sides = {"1-best": [o.before for o in known], "corrected": [o.text for o in known]}
        return {n: wer(references, texts, normaliser=self.normaliser) for n, texts in sides.items()}

    def rows(self) -> list[dict[str, str]]:
        """One table row per deciding model: its words, how many are changed, how many right."""
        words = [
            (word.by, changed, step.kind == "equal" if one.reference is not None else None)
            for one, steps in zip(self.texts, self.steps, strict=True)
            for step, own in steps
            for word, changed in own
        ]
        rows = []
        for by in _CLASSES:
            own = [(changed, right) for who, changed, right in words if who == by]
            known = [right for _, right in own if right is not None]
            row = {
                "decided by": by,
                "words": f"{len(own):,}",
                "share, %": percent(len(own) / max(len(words), 1)),
                "not in the 1-best": f"{sum(changed for changed, _ in own):,}",
            }
            if self.scores:
                row["right, %"] = percent(sum(known) / len(known) if known else None)
            rows.append(row)
        return rows

    def as_html(self, *, most: int = MOST, held: int = HELD, played: int = PLAYED) -> str:
        """Returns a legend and the texts as HTML, without styles.

        Args:
            most: Largest number of texts; those with the most changed words are shown.
            held: Largest total size of the embedded recordings, in bytes.
            played: Largest size of one embedded recording, in bytes.
        """
        return rendered("decided_texts.html", **self._shown(most, held, played))

    def page(self, conditions: Mapping[str, str], *, most: int = MOST) -> str:
        """Returns one HTML file with scores, legend and texts.

        Args:
            conditions: Settings of the run, by name.
            most: Largest number of texts; those with the most changed words are shown.
        """
        counted = {row["decided by"]: row["words"] for row in self.rows()}
        total = sum(len(one.words) for one in self.texts)
        left_out = sum(one.left_out for one in self.texts)
        few = f"The {most} of {len(self):,} recordings with the most changes are shown. "
        return rendered(
            "decided.html",
            total=f"{total:,}",
            counted=counted,
            left_out=f"{left_out:,}",
            few=few if len(self) > most else "",
            conditions=[f"{name} {value}" for name, value in conditions.items()],
            cards=self._cards(),
            rows=self.rows(),
            **self._shown(most, HELD, PLAYED),
        )

    def _shown(self, most: int, held: int, played: int) -> dict[str, Any]:
        """Values of the template of texts; see `as_html`."""
        order = sorted(range(len(self)), key=lambda index: -sum(self.texts[index].changed))
        taken, shown = 0, []
        for index in order[:most]:
            one, audio = self.texts[index], ""
            if one.audio is not None and one.audio.is_file():
                size = one.audio.stat().st_size
                if size <= played and taken + size <= held:
                    audio = recording_url(one.audio)
                    taken += size
            row: dict[str, Any] = {"name": one.name, "audio": audio, "reference": one.reference}
            before: str | list[Step] = one.before
            if one.reference is not None:
                before = align_as_written(one.reference, one.before, self.normaliser)
            shown.append(row | {"before": before, "steps": self.steps[index]})
        return {"shown": shown, "tells": TELLS, "classes": _CLASSES, "scores": self.scores}

    def _cards(self) -> list[tuple[str, str, str]]:
        """Titles, numbers and notes of the cards."""
        edited = sum(words_of(one.text) != words_of(one.before) for one in self.texts)
        cards = [("recordings changed", f"{edited:,}", f"of {len(self):,}")]
        for name, score in self.scores.items():
            spread = f"{between(score.low, score.high, '.1f')} %; "
            about = f"{spread * (score.utterances > 1)}{score.words:,} words, {score.normaliser}"
            cards.append((f"WER, {name}", f"{percent(score.value, '.1f')} %", about))
        return cards

    def _repr_html_(self) -> str:
        return f"<style>{asset('marks.css')}{asset(STYLES)}</style>{self.as_html()}"

    def __repr__(self) -> str:
        lines = []
        for one in self.texts:
            lines += [one.name, f"  1-best    {one.before}", f"  corrected {one.text}"]
            lines += [f"    {w.text}: {w.by}" for w in one.words if w.by != "both"]
        return "\n".join(lines)


def _steps(one: CorrectedText, normaliser: str) -> list[WordsOfStep]:
    """Aligns the corrected text to its reference, and finds the words of each step.

    A word that the normaliser joins, splits or drops is in no step as it is written. It is assigned
    to the step of its normalised form, or else to the step of the previous word.
    """
    words = [*zip(one.words, one.changed, strict=True)]
    if one.reference is None:
        return [(Step("equal", "", one.text), words)] if words else []
    found: list[WordsOfStep] = [
        (step, []) for step in align_as_written(one.reference, one.text, normaliser)
    ]
    filled = [pair for pair in found if pair[0].hypothesis]
    if words and not filled:  # a normaliser may leave nothing over
        filled = [(Step("equal", "", ""), [])]
        found += filled
    at = aligned_positions([step.hypothesis for step, _ in filled], [w.text for w in one.words])
    for word, position in zip(words, at, strict=True):
        filled[position][1].append(word)
    return found
