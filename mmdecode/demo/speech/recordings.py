"""First part of ``mmdecode demo speech``: a published recogniser transcribes people's speech.

On the page, the report of `mmdecode.demo.speech.clips_page` on synthetic speech follows it. Both
parts have audio players, marked word errors, and the origin of each token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from rich.text import Text

from mmdecode.asr.results import Transcript
from mmdecode.checkpoints import default_recogniser, scheme_card
from mmdecode.demo.speech import clips_page
from mmdecode.demo.speech.ways import Part, Way
from mmdecode.evaluation.speech.wer import WER, wer
from mmdecode.model_names import REAL
from mmdecode.runs.console import console
from mmdecode.zoo.real_clips import RealClip

DRAFT = "recycling"

NO_GAIN = (
    "No draft without training gains time on this model, since people hardly repeat themselves. "
    "Heads trained for it do not ship yet: what heads gain is shown below, by a Whisper of "
    "synthetic speech."
)
"""Note of the page on drafters for the published recogniser."""


@dataclass(frozen=True, kw_only=True)
class Recording(clips_page.Decoded):
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
class Recordings(clips_page.Decodings):
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
        names = [*["generate_total_s"] * self.with_generate, *clips_page.TIMES]
        return {name: self.total(name) for name in names}

    @property
    def with_generate(self) -> bool:
        """Whether plain ``generate`` was run on every recording."""
        return all(item.generate_total_s is not None for item in self.items)

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

    def cards(self) -> list[tuple[str, str, str]]:
        """Titles, numbers and notes of the cards at the top of the page."""
        times = self.times()
        by = clips_page.normaliser_text(self.wer)
        wrong = f"{self.wer.errors} of {self.wer.words} words, {by}"
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
            "wer": clips_page.score(self.wer),
            "times": {name: round(seconds, 4) for name, seconds in self.times().items()},
            "note": self.note,
        }


def missing() -> str | None:
    """Returns a line on how to install the published recogniser; ``None`` if it is installed."""
    if default_recogniser() == REAL:
        return None
    return (
        f"Recordings of people are left out: {REAL} is not installed. To hear what it makes of "
        f"them: {scheme_card(REAL)['install']} (Linux, x86_64)"
    )


def transcribe(
    part: Part, clips: Sequence[RealClip], seed: int = 0
) -> tuple[Recordings, list[Transcript]]:
    """Transcribes clips with plain ``generate``, and with our loop without and with a drafter.

    Args:
        part: Model and drafter.
        clips: Recordings to transcribe, at least one.
        seed: Seed of the bootstrap interval of the word error rate.

    Returns:
        Content of the page's first part, and the transcripts with the drafter.
    """
    plain, drafted = part.ways
    shortest = min(clips, key=lambda clip: clip.duration_s)
    _generate(plain, shortest)  # warm-up
    part.compare(shortest)
    items, transcripts = [], []
    for clip in track(clips, description="transcribing", console=console, transient=True):
        ids, generate_s = _generate(plain, clip)
        fields, transcript = part.compare(clip)
        fields["identical"] &= ids in (None, drafted.ids)
        item = Recording(
            **fields,
            speaker=clip.speaker or clip.origin,
            origin=f"{clip.origin}; {clip.licence.partition(';')[0]}",
            seconds=clip.duration_s,
            peaks=_peaks(clip.samples()),
            generate_total_s=generate_s,
        )
        items.append(item)
        transcripts.append(transcript)
    recogniser = plain.transcriber.recognizer

    def label(token: int) -> str:
        if token in recogniser.eos_token_ids:
            return "[end]"
        text = recogniser.tokenizer.decode([token], clean_up_tokenization_spaces=False).strip()
        return " " * recogniser.starts_word(token) + text

    found = Recordings(
        model=part.model,
        draft=part.draft,
        items=items,
        wer=wer([one.reference for one in items], [one.hypothesis for one in items], seed=seed),
        note=NO_GAIN if part.model == REAL else "",
        label=label,
    )
    return found, transcripts


def _peaks(samples: np.ndarray) -> list[float]:
    """Returns the largest magnitude in each of 120 equal parts, as shares of the largest of all."""
    peaks = np.array([part.max(initial=0) for part in np.array_split(np.abs(samples), 120)])
    return (peaks / max(peaks.max(), 1e-9)).tolist()


def _generate(way: Way, clip: RealClip) -> tuple[list[list[list[int]]] | None, float | None]:
    """Runs plain ``generate`` on a clip; returns token ids, as ``Way.ids``, and seconds.

    Returns:
        ``None`` and ``None`` for clips longer than a window, and for models with timestamps, whose
        transcription in windows is not comparable.
    """
    recogniser = way.transcriber.recognizer
    if recogniser.capabilities.timestamps or clip.duration_s > way.transcriber.window_s:
        return None, None
    began = time.perf_counter()
    [inputs] = recogniser.features([clip.samples(recogniser.rate)])
    most = recogniser.most_tokens(clip.duration_s)
    ids = way.transcriber.model.generate(
        **inputs, max_new_tokens=most, do_sample=False, num_beams=1, return_dict_in_generate=False
    )
    return [ids.tolist()], time.perf_counter() - began


def show(found: Recordings) -> None:
    """Prints the hypotheses with their word errors, then the measurements."""
    table = Table("recording", "heard", box=None, padding=(0, 2, 0, 0))
    for item in found.items:
        table.add_row(Text(item.name, "dim"), _marked(item))
    console.print(table)
    console.print(
        Text.assemble(
            ("heard(said)", "red"),
            ": another word; ",
            ("+heard", "red"),
            ": a word too many; ",
            ("-(said)", "red"),
            ": a word missing",
            style="dim",
        )
    )
    scores = f"word errors, real: {clips_page.score_text(found.wer)}; {found.caution}"
    console.print(scores, highlight=False, markup=False)
    console.print(f"{found.verdict('ids')}, by {escape(found.ways)}", highlight=False)
    times = {name: f"{seconds:.1f} s" for name, seconds in found.times().items()}
    generate = f"plain generate {times['generate_total_s']}, " if found.with_generate else ""
    speed = (
        f"Seconds for {found.total('seconds'):.0f} s of audio, each way once: {generate}our loop "
        f"{times['plain_total_s']}, drafted {times['drafted_total_s']} "
        f"({found.tokens_per_pass:.2f} tokens per pass)"
    )
    console.print(speed, highlight=False, markup=False)
    if found.note:
        console.print(found.note, highlight=False, markup=False)
    console.print()


def _marked(item: Recording) -> Text:
    """Returns a hypothesis as terminal text, with the reference's words where they differ."""
    shown = {
        "equal": "{hypothesis}",
        "substitute": "{hypothesis}({reference})",
        "insert": "+{hypothesis}",
        "delete": "-({reference})",
    }
    parts = []
    for step in item.steps:
        text = shown[step.kind].format(**asdict(step))
        parts.append(Text(text, "" if step.kind == "equal" else "bold red"))
    return Text(" ").join(parts) if item.errors else Text(item.hypothesis)
