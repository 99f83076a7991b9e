"""First part of the speech demo's HTML page: transcripts of recordings of people.

The report of `mmdecode.demo.speech.clips_page` on synthetic speech follows it on the same page.
Both parts have audio players, marked word errors, and the origin of each token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mmdecode.demo.speech.clips_page import normaliser_text
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

    @property
    def same_ids(self) -> str:
        """Clause on whether drafting changed token ids."""
        differing = sum(not item.identical for item in self.items)
        if not differing:
            return "every token id is the same"
        return f"the token ids of {differing} recording{'s' * (differing > 1)} differ"

    def cards(self) -> list[tuple[str, str, str]]:
        """Titles, numbers and notes of the cards at the top of the page."""
        same = sum(item.identical for item in self.items)
        times, passes = self.times(), self.total("passes")
        plain, drafted = times["plain_total_s"], times["drafted_total_s"]
        spread = f"95 % interval {100 * self.wer.low:.1f} to {100 * self.wer.high:.1f} %"
        generate = ""
        if self.with_generate:
            generate = f"; plain generate {times['generate_total_s']:.1f} s"
        length = f"{self.audio_s:.0f} s of audio, from file to text, without a draft"
        saved = f"{passes:,} passes for {self.total('plain_passes'):,}"
        return [
            (
                "word errors",
                f"{100 * self.wer.value:.1f} %",
                f"{self.wer.errors} of {self.wer.words} words, {normaliser_text(self.wer)}"
                + f"; {spread}" * (self.wer.utterances > 1),
            ),
            (
                "same token ids",
                "yes" if self.identical else "no",
                f"{same} of {len(self.items)} recordings",
            ),
            ("heard in", f"{plain:.1f} s", f"{length}{generate}; each once"),
            (
                "tokens per pass",
                f"{self.tokens_per_pass:.2f}",
                f"with {self.draft}: {saved}, in {drafted:.1f} s",
            ),
        ]
