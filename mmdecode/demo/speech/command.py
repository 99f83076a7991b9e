"""``mmdecode demo speech``: transcribes the package's recordings without and with a drafter.

If a recogniser for real speech is installed, it first transcribes recordings of people
(`mmdecode.demo.speech.recordings`). The other recordings are synthetic speech.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.progress import track
from rich.table import Table

from mmdecode.asr.options import TranscribeOptions
from mmdecode.asr.output.formats import FORMATS
from mmdecode.asr.output.subtitles import DEFAULT
from mmdecode.asr.results import Transcript
from mmdecode.asr.transcriber import Transcriber
from mmdecode.decoder import Decoder
from mmdecode.demo.setting import Setting
from mmdecode.demo.speech import clips_page
from mmdecode.demo.speech import recordings as demo_recordings
from mmdecode.demo.speech.clips_page import TIMES, Item, Report, score, score_text
from mmdecode.demo.speech.ways import Part
from mmdecode.errors import MMDecodeError
from mmdecode.evaluation.speech.wer import wer
from mmdecode.evaluation.stats.intervals import interval, resampled_sums
from mmdecode.model_names import REAL, SYNTHETIC
from mmdecode.runs.conditions import load_average, load_note, surroundings
from mmdecode.runs.console import console, print_line
from mmdecode.runs.files import write_file, write_files
from mmdecode.runs.tables import rows_text
from mmdecode.zoo.real_clips import all_clips
from mmdecode.zoo.speech import Clip, speech_test

HEADS = f"{SYNTHETIC}-medusa"


class Line(NamedTuple):
    """Text of a recording for ``transcripts.jsonl`` and, if its words are timed, for subtitles."""

    item: clips_page.Decoded
    kind: str
    text: Transcript
    timed: Transcript | None = None

    def row(self) -> dict[str, Any]:
        """Returns the line's fields."""
        item, text = self.item, self.text
        row = {"name": item.name, "set": self.kind, "reference": item.reference, "text": text.text}
        identical = {} if self.kind == "noisy" else {"identical": item.identical}
        return {**row, "tokens": text.tokens, **identical}


def run(model: str | None, setting: Setting, draft: str | None, repeats: int) -> dict[str, Any]:
    """Transcribes, prints the measurements and writes ``report.html``; runs the command.

    Returns:
        Measurements as JSON values, for ``--json``; ``identical``: whether drafting changed no
        token.
    """
    texts_file, subtitles = setting.out / "transcripts.jsonl", setting.out / "subtitles"
    setting.refuse(texts_file, *subtitles.glob("*.srt"))
    limit = setting.limit
    people, synthetic, note = _parts(model, draft, *setting.weights)
    load_before = load_average()
    found: demo_recordings.Recordings | None = None
    lines: list[Line] = []
    if people is not None:
        recordings = all_clips()[:limit]
        console.print(
            f"Transcribing {len(recordings)} recordings of people with {people.model}.",
            highlight=False,
        )
        found, texts = demo_recordings.transcribe(people, recordings, setting.seed)
        demo_recordings.show(found)
        lines = [
            Line(item, "real", text, text) for item, text in zip(found.items, texts, strict=True)
        ]
    elif note:
        print_line(note, console)
    what = "synthetic recordings" if limit is None else f"{limit} of the synthetic recordings"
    console.print(
        f"Transcribing {what} twice with {synthetic.model}: token by token, and with "
        f"{synthetic.draft} guessing several tokens ahead. The text must not change; the time "
        "should. This takes two or three minutes on two idle "
        "cores.",
        highlight=False,
        markup=False,
    )
    long = speech_test(long=True) if limit is None else []
    items, more = _run(synthetic, [*speech_test()[:limit], *long], repeats)
    lines += more
    titles = {f"{one.item.audio.stem}.srt": one.timed for one in lines if one.timed is not None}
    write_file(texts_file, rows_text([one.row() for one in lines]), setting.overwrite)
    srt = {name: FORMATS["srt"](timed, DEFAULT) for name, timed in titles.items()}
    write_files(subtitles, srt, setting.overwrite)
    conditions = _conditions(synthetic, repeats, load_before)
    result = _report(synthetic, items, setting.seed, conditions)
    notes = {"recordings of people": note} if note else {}
    shown = clips_page.page(result, found, notes)
    summary = _summary(result) | {"real": found and found.summary()}
    _show(result, summary)
    if found is not None and not found.identical:
        summary["identical"] = False
        summary["different"] = [*found.different, *summary["different"]]
    return setting.end(shown, summary, conditions, texts_file.name, subtitles.name)


def _parts(model: str | None, draft: str | None, *placing: Any) -> tuple[Part | None, Part, str]:
    """Loads models for real and synthetic speech; returns a note if real speech is left out."""
    if model is None:
        synthetic = Part.load(SYNTHETIC, draft or HEADS, *placing)
        note = demo_recordings.missing()
        if note:
            return None, synthetic, note
        try:
            return Part.load(REAL, demo_recordings.DRAFT, *placing), synthetic, ""
        except MMDecodeError as error:
            return None, synthetic, f"Recordings of people are left out: {error}"
    if model.startswith("zoo:"):  # trained on synthetic speech alone
        return None, Part.load(model, draft or HEADS, *placing), ""
    named = Part.load(model, draft or demo_recordings.DRAFT, *placing)
    times_words = named.ways[0].transcriber.recognizer.capabilities.word_times
    return named, named if times_words else Part.load(SYNTHETIC, HEADS, *placing), ""


def _run(part: Part, clips: Sequence[Clip], repeats: int) -> tuple[list[Item], list[Line]]:
    """Transcribes all recordings of synthetic speech; returns items and lines."""
    drafted = part.ways[1]
    timed = Transcriber(
        drafted.transcriber.model,
        drafted.transcriber.processor,
        Decoder(draft=drafted.transcriber.decoder.draft),
        TranscribeOptions(word_timestamps=True),
    )
    items, lines = [], []
    for clip in track(clips, description="transcribing", console=console, transient=True):
        loud = None if clip.long else drafted(clip.samples("noisy"))[0]
        fields, transcript = part.compare(clip, 1 if clip.long else repeats)
        found = timed(clip.path)
        item = Item(
            **fields,
            about=f"voice {clip.voice}, {_duration(clip.duration_s)}",
            noisy=None if loud is None else loud.text,
            histogram=drafted.transcriber.decoder.stats.histogram,
            words=[word for segment in found.segments for word in segment.words or ()],
        )
        items.append(item)
        if loud is not None:
            lines.append(Line(item, "noisy", loud))
        lines.append(Line(item, "recording" if clip.long else "clean", transcript, found))
    return items, lines


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def _report(part: Part, items: Sequence[Item], seed: int, conditions: dict[str, str]) -> Report:
    clips = [item for item in items if item.noisy is not None]
    references = [item.reference for item in clips]
    scores = {
        "clean": wer(references, [item.hypothesis for item in clips], seed=seed),
        "noisy": wer(references, [item.noisy or "" for item in clips], seed=seed),
    }
    for item in items[len(clips) :]:
        scores["recording"] = wer([item.reference], [item.hypothesis], seed=seed)
    times = np.array([(item.plain_s, item.drafted_s) for item in clips])
    sums = resampled_sums(times, 1000, seed)
    return Report(
        model=part.model,
        draft=part.draft,
        items=items,
        clips=len(clips),
        ratio=(float(times[:, 0].sum() / times[:, 1].sum()), *interval(sums[:, 0] / sums[:, 1])),
        wer=scores,
        conditions=conditions,
        label=_labels(part.ways[0].transcriber),
    )


def _labels(transcriber: Transcriber) -> Callable[[int], str]:
    """Returns a function that labels a token id: its text, time in seconds, or special name."""
    recognizer: Any = transcriber.recognizer
    tokenizer = transcriber.processor.tokenizer
    first_time, special = recognizer.prompts.timestamp_begin, {*tokenizer.all_special_ids}

    def label(token: int) -> str:
        if token >= first_time:
            return f"{(token - first_time) * recognizer.stamp_s:.2f} s"
        if token in special:
            name = tokenizer.convert_ids_to_tokens(token).strip("<|>")
            return "[end]" if name == "endoftext" else f"[{name}]"
        return tokenizer.decode([token], clean_up_tokenization_spaces=False)

    return label


def _conditions(part: Part, repeats: int, load: str | None) -> dict[str, str]:
    found = surroundings(part.ways[0].transcriber.model)
    after = found["load_average"]
    busy = load_note(load, after)
    versions = [f"{name} {found[name]}" for name in ("mmdecode", "torch", "transformers")]
    return {
        "device": ", ".join(found[n] for n in ("device", "dtype", "quantize") if n in found),
        "threads": f"threads: {found['threads']}, CPUs: {os.cpu_count()}",
        "load": f"load average {load or 'unknown'} before, {after or 'unknown'} after",
        **({"busy": busy} if busy else {}),
        "runs": f"median of {repeats} (recording: 1), batch 1, greedy",
        "versions": ", ".join([*versions, f"Python {found['python']}"]),
    }


def _times(items: Sequence[Item]) -> dict[str, float]:
    sums = {name: sum(getattr(item, name) for item in items) for name in TIMES}
    sums["ratio"] = sums["plain_s"] / sums["drafted_s"]
    sums["ratio_total"] = sums["plain_total_s"] / sums["drafted_total_s"]
    return {name: round(value, 4) for name, value in sums.items()}


def _summary(report: Report) -> dict[str, Any]:
    parts = {"clips": report.items[: report.clips], "recording": report.items[report.clips :]}
    return {
        **report.summary(),
        "clips": report.clips,
        "wer": {name: score(found) for name, found in report.wer.items()},
        "accepted_histogram": report.histogram,
        "ratio_interval": [round(value, 4) for value in report.ratio[1:]],
        "times": {name: _times(items) for name, items in parts.items() if items},
        "conditions": report.conditions,
    }


def _show(report: Report, summary: dict[str, Any]) -> None:
    table = Table("", "plain", "drafted", "ratio")
    before, after = summary["plain_passes"], summary["passes"]
    table.add_row("decoder passes", f"{before:,}", f"{after:,}", f"{before / max(after, 1):.2f}")
    table.add_row("tokens per pass", "1.00", f"{report.tokens_per_pass:.2f}", "")
    for name, times in summary["times"].items():
        for what, suffix in (("decoding", ""), ("all", "_total")):
            plain, drafted = (times[f"{way}{suffix}_s"] for way in ("plain", "drafted"))
            ratio = times[f"ratio{suffix}"]
            table.add_row(f"{name}, {what}", f"{plain:.2f} s", f"{drafted:.2f} s", f"{ratio:.2f}")
    low, high = summary["ratio_interval"]
    table.caption = f"95 % interval of the clips' decoding ratio: {low:.2f} to {high:.2f}"
    if "busy" in report.conditions:
        table.caption += f"; {report.conditions['busy']}"
    console.print(table)
    for name, found in report.wer.items():
        console.print(f"word errors, {name}: {score_text(found)}", highlight=False)
    console.print(report.verdict("tokens"))
