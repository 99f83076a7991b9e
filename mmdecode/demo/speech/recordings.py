"""First part of ``mmdecode demo speech``: a published recogniser transcribes people's speech."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from rich.text import Text

from mmdecode.asr.results import Transcript
from mmdecode.checkpoints import default_recogniser, scheme_card
from mmdecode.demo.speech.clips_page import score_text
from mmdecode.demo.speech.recordings_page import Recording, Recordings
from mmdecode.demo.speech.ways import Part, Way
from mmdecode.evaluation.speech.wer import wer
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
    scores = f"word errors, real: {score_text(found.wer)}; {found.caution}"
    console.print(scores, highlight=False, markup=False)
    verdict = f"[bold green]yes[/], all {len(found.items)} recordings"
    if found.different:
        verdict = f"[bold red]no[/], ids differ in {', '.join(found.different)}"
    console.print(f"identical: {verdict}, by {escape(found.ways)}", highlight=False)
    console.print(found.speed, highlight=False, markup=False)
    if found.note:
        console.print(found.note, highlight=False, markup=False)
    console.print()


def _marked(item: Recording) -> Text:
    """Returns a hypothesis as terminal text, with the reference's words where they differ."""
    shown = {
        "substitute": lambda step: f"{step.hypothesis}({step.reference})",
        "insert": lambda step: f"+{step.hypothesis}",
        "delete": lambda step: f"-({step.reference})",
    }
    parts = [
        Text(step.hypothesis) if step.kind == "equal" else Text(shown[step.kind](step), "bold red")
        for step in item.steps
    ]
    return Text(" ").join(parts) if item.errors else Text(item.hypothesis)
