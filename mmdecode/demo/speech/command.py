"""``mmdecode demo speech``: transcribes the package's recordings without and with a drafter.

If a recogniser for real speech is installed, it first transcribes recordings of people
(`mmdecode.demo.speech.recordings`). The other recordings are synthetic speech.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track
from rich.table import Table

from mmdecode.asr.options import TranscribeOptions
from mmdecode.asr.output.formats import FORMATS
from mmdecode.asr.output.subtitles import DEFAULT
from mmdecode.asr.results import Transcript
from mmdecode.asr.transcriber import Transcriber
from mmdecode.decoder import Decoder
from mmdecode.demo.setting import PAGE, Setting
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
from mmdecode.runs.files import refuse_foreign, write_file, write_files
from mmdecode.runs.tables import rows_text
from mmdecode.zoo.real_clips import all_clips
from mmdecode.zoo.speech import Clip, speech_test

HEADS = f"{SYNTHETIC}-medusa"


def run(model: str | None, setting: Setting, draft: str | None, repeats: int) -> dict[str, Any]:
    """Transcribes, prints the measurements and writes ``report.html``; runs the command.

    Returns:
        Measurements as JSON values, for ``--json``; ``identical``: whether drafting changed no
        token.
    """
    page_file, texts_file, subtitles = (
        setting.out / name for name in (PAGE, "transcripts.jsonl", "subtitles")
    )
    overwrite, limit = setting.overwrite, setting.limit
    refuse_foreign([page_file, texts_file, *subtitles.glob("*.srt")], overwrite)
    people, synthetic, note = _parts(model, draft, *setting.weights)
    load_before = load_average()
    shown_people: demo_recordings.Recordings | None = None
    rows: list[dict[str, Any]] = []
    titles: dict[str, str] = {}
    if people is not None:
        shown_people, rows, titles = _recordings(people, limit, setting.seed)
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
    clips = speech_test()[:limit]
    recordings = speech_test(long=True) if limit is None else []
    items, more_rows, more_titles = _run(synthetic, [*clips, *recordings], repeats)
    write_file(texts_file, rows_text([*rows, *more_rows]), overwrite)
    write_files(subtitles, titles | more_titles, overwrite)
    conditions = _conditions(synthetic, repeats, load_before)
    result = _report(synthetic, items, setting.seed, conditions)
    more = {"recordings of people": note} if note else {}
    write_file(page_file, clips_page.page(result, shown_people, more), overwrite)
    summary = _summary(result) | {"real": shown_people and shown_people.summary()}
    _show(result, summary)
    if shown_people is not None and not shown_people.identical:
        summary["identical"] = False
        summary["different"] = [*shown_people.different, *summary["different"]]
    return setting.end(summary, conditions, texts_file.name, subtitles.name)


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


def _recordings(
    people: Part, limit: int | None, seed: int
) -> tuple[demo_recordings.Recordings, list[dict[str, Any]], dict[str, str]]:
    """Transcribes recordings of people; returns the page's part, rows and subtitles."""
    clips = all_clips()[:limit]
    console.print(
        f"Transcribing {len(clips)} recordings of people with {people.model}.", highlight=False
    )
    found, transcripts = demo_recordings.transcribe(people, clips, seed)
    demo_recordings.show(found)
    rows, titles = [], {}
    for item, transcript in zip(found.items, transcripts, strict=True):
        rows.append(_row(item, "real", transcript, identical=item.identical))
        titles[f"{item.audio.stem}.srt"] = FORMATS["srt"](transcript, DEFAULT)
    return found, rows, titles


def _run(
    part: Part, clips: Sequence[Clip], repeats: int
) -> tuple[list[Item], list[dict[str, Any]], dict[str, str]]:
    """Transcribes all recordings; returns items, rows and subtitles."""
    drafted = part.ways[1]
    timed = Transcriber(
        drafted.transcriber.model,
        drafted.transcriber.processor,
        Decoder(draft=drafted.decoder.draft),
        TranscribeOptions(word_timestamps=True),
    )
    items, rows, titles = [], [], {}
    for clip in track(clips, description="transcribing", console=console, transient=True):
        loud = None if clip.long else drafted(clip.samples("noisy"))[0]
        fields, transcript = part.compare(clip, 1 if clip.long else repeats)
        found = timed(clip.path)
        item = Item(
            **fields,
            about=f"voice {clip.voice}, {_duration(clip.duration_s)}",
            noisy=None if loud is None else loud.text,
            histogram=drafted.decoder.stats.histogram,
            words=[word for segment in found.segments for word in segment.words or ()],
        )
        items.append(item)
        titles[f"{Path(clip.name).stem}.srt"] = FORMATS["srt"](found, DEFAULT)
        if loud is not None:
            rows.append(_row(item, "noisy", loud))
        kind = "recording" if clip.long else "clean"
        rows.append(_row(item, kind, transcript, identical=item.identical))
    return items, rows, titles


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def _row(
    item: clips_page.Decoded, kind: str, transcript: Transcript, **more: Any
) -> dict[str, Any]:
    """Returns a line of ``transcripts.jsonl``."""
    row = {"name": item.name, "set": kind, "reference": item.reference, "text": transcript.text}
    return row | {"tokens": transcript.tokens, **more}


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
    tokenizer = transcriber.processor.tokenizer
    config = transcriber.model.config
    config_ids = transcriber.model.generation_config
    first_time = int(config_ids.no_timestamps_token_id) + 1
    extractor = transcriber.processor.feature_extractor
    step = extractor.chunk_length / config.max_source_positions
    special = set(tokenizer.all_special_ids)

    def label(token: int) -> str:
        if token >= first_time:
            return f"{(token - first_time) * step:.2f} s"
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
    ratios = {
        "ratio": sums["plain_s"] / sums["drafted_s"],
        "ratio_total": sums["plain_total_s"] / sums["drafted_total_s"],
    }
    return {name: round(value, 4) for name, value in (sums | ratios).items()}


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
    if report.identical:
        console.print(f"identical: [bold green]yes[/], all {len(report.items)} recordings")
    else:
        console.print(f"identical: [bold red]no[/], tokens differ in {', '.join(report.different)}")
