"""First part of the speech demo's HTML page: transcripts of recordings of people.

The report of `mmdecode.demo.speech.clips_page` on synthetic speech follows it on the same page.
Both parts have audio players, marked word errors, and the origin of each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmdecode.demo.speech.clips_page import TIMES, Decoded, Decodings, normaliser_text, score
from mmdecode.evaluation.speech.wer import WER


@dataclass(frozen=True, kw_only=True)
class Recording(Decoded):
    """Recording of a person that was transcribed without and with a drafter.

    Attributes:
        speaker: Name of the speaker or, if unknown, of the source.
        origin: Recorded work and its licence.
        seconds: Duration in seconds.
        peaks: Loudness over time, 0 to 1.
        generate_total_s: Seconds from file to tokens with plain ``generate``; ``None``: not run.
        identical: Whether all these decoders gave the same token ids.
    """

    speaker: str
    origin: str
    seconds: float
    peaks: Sequence[float]
    generate_total_s: float | None


@dataclass(frozen=True, kw_only=True)
class Recordings(Decodings):
    """Content of the page's first part.

    Attributes:
        wer: Word error rate of all recordings.
        note: Note on drafters of this model; may be empty.
    """

    items: Sequence[Recording]
    wer: WER
    note: str

    def times(self) -> dict[str, float]:
        """Returns the seconds over all recordings by name; ``generate_total_s`` only if known."""
        names = [*["generate_total_s"] * self.with_generate, *TIMES]
        return {name: self.total(name) for name in names}

    @property
    def with_generate(self) -> bool:
        """Whether plain ``generate`` was run on every recording."""
        return all(item.generate_total_s is not None for item in self.items)

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
        times = {name: f"{seconds:.1f} s" for name, seconds in self.times().items()}
        generate = f"plain generate {times['generate_total_s']}, " if self.with_generate else ""
        return (
            f"Seconds for {self.total('seconds'):.0f} s of audio, each way once: {generate}our "
            f"loop {times['plain_total_s']}, drafted {times['drafted_total_s']} "
            f"({self.tokens_per_pass:.2f} tokens per pass)"
        )

    @property
    def same_ids(self) -> str:
        """Clause on whether drafting changed token ids."""
        differing = len(self.different)
        if not differing:
            return "every token id is the same"
        return f"the token ids of {differing} recording{'s' * (differing > 1)} differ"

    def cards(self) -> list[tuple[str, str, str]]:
        """Titles, numbers and notes of the cards at the top of the page."""
        times = self.times()
        wrong = f"{self.wer.errors} of {self.wer.words} words, {normaliser_text(self.wer)}"
        if self.wer.utterances > 1:
            wrong += f"; 95 % interval {100 * self.wer.low:.1f} to {100 * self.wer.high:.1f} %"
        length = f"{self.total('seconds'):.0f} s of audio, from file to text, without a draft"
        if self.with_generate:
            length += f"; plain generate {times['generate_total_s']:.1f} s"
        saved = f"{self.total('passes'):,} passes for {self.total('plain_passes'):,}"
        drafted = f"with {self.draft}: {saved}, in {times['drafted_total_s']:.1f} s"
        return [
            ("word errors", f"{100 * self.wer.value:.1f} %", wrong),
            self.same_card("same token ids"),
            ("heard in", f"{times['plain_total_s']:.1f} s", f"{length}; each once"),
            ("tokens per pass", f"{self.tokens_per_pass:.2f}", drafted),
        ]

    def summary(self) -> dict[str, Any]:
        """Returns the measurements as JSON values."""
        return {
            **super().summary(),
            "clips": len(self.items),
            "audio_s": round(self.total("seconds"), 2),
            "compared_with_generate": self.with_generate,
            "wer": score(self.wer),
            "times": {name: round(seconds, 4) for name, seconds in self.times().items()},
            "note": self.note,
        }
