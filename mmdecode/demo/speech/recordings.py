"""First part of ``mmdecode demo speech``: a published recogniser transcribes people's speech."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from mmdecode.checkpoints import default_recogniser
from mmdecode.model_names import REAL
from mmdecode.runs.console import console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mmdecode.asr.results import Transcript
    from mmdecode.demo.speech.command import Way
    from mmdecode.demo.speech.recordings_page import Recording, Recordings
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
    from mmdecode.checkpoints import scheme_card

    if default_recogniser() == REAL:
        return None
    return (
        f"Recordings of people are left out: {REAL} is not installed. To hear what it makes of "
        f"them: {scheme_card(REAL)['install']} (Linux, x86_64)"
    )


def transcribe(
    model: str, draft: str, ways: tuple[Way, Way], clips: Sequence[RealClip], seed: int = 0
) -> tuple[Recordings, list[Transcript]]:
    """Transcribes clips with plain ``generate``, and with our loop without and with a drafter.

    Args:
        model: Name of the model.
        draft: Name of the drafter.
        ways: Transcribers without and with the drafter.
        clips: Recordings to transcribe, at least one.
        seed: Seed of the bootstrap interval of the word error rate.

    Returns:
        Content of the page's first part, and the transcripts with the drafter.
    """
    from rich.progress import track

    from mmdecode.demo.speech.recordings_page import Recordings
    from mmdecode.evaluation.speech.wer import wer

    plain, drafted = ways
    shortest = min(clips, key=lambda clip: clip.duration_s)
    for warm in (lambda: _generate(plain, shortest), *(lambda w=w: w(shortest.path) for w in ways)):
        warm()
    items, transcripts = [], []
    for clip in track(clips, description="transcribing", console=console, transient=True):
        item, transcript = _compare(plain, drafted, clip)
        items.append(item)
        transcripts.append(transcript)
    recogniser = plain.transcriber.recognizer

    def label(token: int) -> str:
        if token in recogniser.eos_token_ids:
            return "[end]"
        text = recogniser.tokenizer.decode([token], clean_up_tokenization_spaces=False).strip()
        return " " * recogniser.starts_word(token) + text

    found = Recordings(
        model=model,
        draft=draft,
        items=items,
        wer=wer([one.reference for one in items], [one.hypothesis for one in items], seed=seed),
        note=NO_GAIN if model == REAL else "",
        label=label,
    )
    return found, transcripts


def _compare(plain: Way, drafted: Way, clip: RealClip) -> tuple[Recording, Transcript]:
    """Transcribes a clip with plain ``generate`` and with our loop, without and with a drafter."""
    from mmdecode.demo.speech.recordings_page import Recording
    from mmdecode.engine.trace import Round

    ids, generate_s = _generate(plain, clip)
    _, plain_s, plain_total_s = plain(clip.path)
    plain_ids, passes = plain.ids, plain.decoder.stats.passes
    windows: list[list[Round]] = []
    transcript, drafted_s, drafted_total_s = drafted(clip.path, windows)
    stats = drafted.decoder.stats.as_dict()
    return Recording(
        name=clip.name,
        audio=clip.path,
        speaker=clip.speaker or clip.origin,
        origin=f"{clip.origin}; {clip.licence.partition(';')[0]}",
        seconds=clip.duration_s,
        reference=clip.text,
        hypothesis=transcript.text,
        windows=windows,
        tokens=stats["tokens"],
        plain_passes=passes,
        passes=stats["passes"],
        tokens_per_pass=stats["acceptance_length"],
        generate_total_s=generate_s,
        plain_s=plain_s,
        plain_total_s=plain_total_s,
        drafted_s=drafted_s,
        drafted_total_s=drafted_total_s,
        identical=drafted.ids == plain_ids and ids in (None, plain_ids),
    ), transcript


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


def summary(found: Recordings) -> dict[str, Any]:
    """Returns the measurements as JSON values."""
    from mmdecode.demo.speech.clips_page import score

    times = {name: round(seconds, 4) for name, seconds in found.times().items()}
    return {
        "model": found.model,
        "draft": found.draft,
        "clips": len(found.items),
        "audio_s": round(found.audio_s, 2),
        "identical": found.identical,
        "different": [item.name for item in found.items if not item.identical],
        "compared_with_generate": found.with_generate,
        "wer": score(found.wer),
        "tokens": found.total("tokens"),
        "passes": found.total("passes"),
        "plain_passes": found.total("plain_passes"),
        "tokens_per_pass": round(found.tokens_per_pass, 4),
        "times": times,
        "note": found.note,
    }


def row(item: Recording, transcript: Transcript) -> dict[str, Any]:
    """Returns the fields of a recording's line in ``transcripts.jsonl``."""
    texts = {"reference": item.reference, "text": item.hypothesis}
    more = {"tokens": transcript.tokens, "identical": item.identical}
    return {"name": item.name, "set": "real", **texts, **more}


def show(found: Recordings) -> None:
    """Prints the hypotheses with their word errors, then the measurements."""
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    from mmdecode.demo.speech.clips_page import score_text

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
    differing = [item.name for item in found.items if not item.identical]
    same, names = f"yes[/], all {len(found.items)} recordings", ", ".join(differing)
    verdict = f"[bold red]no[/], ids differ in {names}" if differing else f"[bold green]{same}"
    console.print(f"identical: {verdict}, by {escape(found.ways)}", highlight=False)
    console.print(found.speed, highlight=False, markup=False)
    if found.note:
        console.print(found.note, highlight=False, markup=False)
    console.print()


def _marked(item: Recording) -> Any:
    """Returns a hypothesis as terminal text, with the reference's words where they differ."""
    from rich.text import Text

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
