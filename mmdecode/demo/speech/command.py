"""``mmdecode demo speech``: transcribes the package's recordings without and with a drafter.

If a recogniser for real speech is installed, it first transcribes recordings of people
(`mmdecode.demo.speech.recordings`). The other recordings are synthetic speech.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdecode.model_names import REAL, SYNTHETIC
from mmdecode.runs.console import console, only_our_output, print_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mmdecode.asr.results import Transcript
    from mmdecode.asr.transcriber import Transcriber
    from mmdecode.decoder import Decoder
    from mmdecode.demo.speech.clips_page import Item, Report
    from mmdecode.demo.speech.recordings_page import Recordings
    from mmdecode.engine.trace import Round
    from mmdecode.zoo.speech import Clip

HEADS = f"{SYNTHETIC}-medusa"


def run(
    model: str | None,
    draft: str | None,
    repeats: int,
    out: Path,
    limit: int | None,
    device: str | None,
    dtype: str,
    quantize: str | None,
    seed: int,
    overwrite: bool,
) -> dict[str, Any]:
    """Transcribes, prints the measurements and writes ``report.html``; runs the command.

    Returns:
        Measurements as JSON values, for ``--json``; ``identical``: whether drafting changed no
        token.
    """
    from mmdecode.runs.files import refuse_foreign, write_file, write_files
    from mmdecode.runs.tables import rows_text

    page_file, texts_file, subtitles = (
        out / name for name in ("report.html", "transcripts.jsonl", "subtitles")
    )
    refuse_foreign([page_file, texts_file, *subtitles.glob("*.srt")], overwrite)
    started = time.perf_counter()
    from mmdecode.demo.speech import clips_page as page
    from mmdecode.runs.conditions import load_average
    from mmdecode.zoo.speech import speech_test

    people, synthetic, note = _parts(model, draft, device, dtype, quantize)
    load_before = load_average()
    real: dict[str, Any] | None = None
    shown_people: Recordings | None = None
    rows: list[dict[str, Any]] = []
    titles: dict[str, str] = {}
    if people is not None:
        real, shown_people, rows, titles = _recordings(people, limit, seed)
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
    ways = synthetic.ways
    items, noisy, more_rows, more_titles = _run(ways, clips, recordings, repeats)
    write_file(texts_file, rows_text([*rows, *more_rows]), overwrite)
    write_files(subtitles, titles | more_titles, overwrite)
    result = _report(synthetic, items, clips, noisy, recordings, seed)
    weights = ", ".join(filter(None, (dtype, quantize)))
    result.conditions.update(_conditions(ways, weights, repeats, load_before))
    more = {"recordings of people": note} if note else {}
    shown = dataclasses.replace(result, conditions=result.conditions | more)
    write_file(page_file, page.page(shown, shown_people), overwrite)
    summary = _summary(result, items, len(clips))
    summary["real"] = real
    summary["seconds"] = round(time.perf_counter() - started, 1)
    summary["files"] = {
        name: str(out / name) for name in ("report.html", "transcripts.jsonl", "subtitles")
    }
    _show(result, summary, items, len(clips))
    if real is not None and not real["identical"]:
        summary["identical"] = False
        summary["different"] = [*real["different"], *summary["different"]]
    return summary


@dataclass
class Part:
    """Model with a drafter, for one part of the demo.

    Attributes:
        model, draft: Names of model and drafter.
        ways: Transcribers without and with the drafter.
    """

    model: str
    draft: str
    ways: tuple[Way, Way]


def _parts(model: str | None, draft: str | None, *placing: Any) -> tuple[Part | None, Part, str]:
    """Loads models for real and synthetic speech; returns a note if real speech is left out."""
    from mmdecode.demo.speech import recordings as demo_recordings
    from mmdecode.errors import MMDecodeError

    def loaded(model: str, draft: str) -> Part:
        return Part(model, draft, _load(model, draft, *placing))

    if model is None:
        synthetic = loaded(SYNTHETIC, draft or HEADS)
        note = demo_recordings.missing()
        if note:
            return None, synthetic, note
        try:
            return loaded(REAL, demo_recordings.DRAFT), synthetic, ""
        except MMDecodeError as error:
            return None, synthetic, f"Recordings of people are left out: {error}"
    if model.startswith("zoo:"):  # trained on synthetic speech alone
        return None, loaded(model, draft or HEADS), ""
    named = loaded(model, draft or demo_recordings.DRAFT)
    times_words = named.ways[0].transcriber.recognizer.capabilities.word_times
    return named, named if times_words else loaded(SYNTHETIC, HEADS), ""


def _recordings(
    people: Part, limit: int | None, seed: int
) -> tuple[dict[str, Any], Recordings, list[dict[str, Any]], dict[str, str]]:
    """Transcribes recordings of people; returns numbers, the page's part, rows and subtitles."""
    from mmdecode.asr.output.formats import FORMATS
    from mmdecode.asr.output.subtitles import DEFAULT
    from mmdecode.demo.speech import recordings as demo_recordings
    from mmdecode.zoo.real_clips import all_clips

    clips = all_clips()[:limit]
    console.print(
        f"Transcribing {len(clips)} recordings of people with {people.model}.", highlight=False
    )
    found, transcripts = demo_recordings.transcribe(
        people.model, people.draft, people.ways, clips, seed
    )
    demo_recordings.show(found)
    pairs = [*zip(found.items, transcripts, strict=True)]
    rows = [demo_recordings.row(item, transcript) for item, transcript in pairs]
    titles = {f"{item.audio.stem}.srt": FORMATS["srt"](text, DEFAULT) for item, text in pairs}
    return demo_recordings.summary(found), found, rows, titles


@dataclass
class Way:
    """Transcriber whose decoder is timed.

    Attributes:
        transcriber: The transcriber.
        seconds: Seconds spent in the decoder during the last transcription.
        ids: Token ids that the decoder returned during the last transcription, by call.
    """

    transcriber: Transcriber
    seconds: float = 0.0
    ids: list[list[list[int]]] = field(default_factory=list)

    @property
    def decoder(self) -> Decoder:
        """Decoder of the transcriber."""
        return self.transcriber.decoder

    def __call__(
        self, audio: Any, trace: list[list[Round]] | None = None
    ) -> tuple[Transcript, float, float]:
        """Transcribes a recording.

        Args:
            audio: Recording in any form that the transcriber accepts.
            trace: List to which the rounds of each window are appended; ``None``: not recorded.

        Returns:
            Transcript, seconds in the decoder, seconds in total.
        """
        self.seconds, self.ids = 0.0, []
        self.decoder.stats.reset()
        began = time.perf_counter()
        transcript = self.transcriber(audio, trace=trace)
        return transcript, self.seconds, time.perf_counter() - began


def _load(model: str, draft: str, *placing: Any) -> tuple[Way, Way]:
    """Loads a model; returns a transcriber without and another with a drafter."""
    from mmdecode import registry
    from mmdecode.asr.transcriber import Transcriber, load
    from mmdecode.decoder import Decoder
    from mmdecode.draft.medusa import Medusa
    from mmdecode.runs.conditions import now

    only_our_output()
    network, processor = load(model, *placing)
    if draft.partition(":")[0] in registry.names("draft"):
        drafter = registry.create("draft", draft, **registry.context_of(network, processor, model))
    else:
        drafter = Medusa.from_pretrained(draft)

    class Watched(Decoder):
        """Decoder that records the time and the token ids of each call."""

        way: Way

        # generate inspects the signature
        @functools.wraps(Decoder.__call__)
        def __call__(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            began = now(network.device)
            ids = super().__call__(*args, **kwargs)
            self.way.seconds += now(network.device) - began
            self.way.ids.append(ids.tolist())
            return ids

    ways = []
    for decoder in (Watched(), Watched(draft=drafter)):
        decoder.way = Way(Transcriber(network, processor, decoder))
        ways.append(decoder.way)
    return ways[0], ways[1]


def _run(
    ways: tuple[Way, Way],
    clips: Sequence[Clip],
    recordings: Sequence[Clip],
    repeats: int,
) -> tuple[list[Item], list[str], list[dict[str, Any]], dict[str, str]]:
    """Transcribes all recordings; returns items, texts of noisy clips, rows and subtitles."""
    from rich.progress import track

    from mmdecode.asr.output.formats import FORMATS
    from mmdecode.asr.output.subtitles import DEFAULT

    drafted = ways[1]
    timed = _with_words(drafted)
    items, noisy, rows, titles = [], [], [], {}
    for clip in track(
        [*clips, *recordings], description="transcribing", console=console, transient=True
    ):
        loud = None if clip.long else drafted(clip.samples("noisy"))[0]
        if loud is not None:
            noisy.append(loud.text)
            rows.append(_row(clip, "noisy", loud))
        turns = 1 if clip.long else repeats
        item, transcript = _compare(ways, clip, turns, loud.text if loud else None)
        found = timed(clip.path)
        words = [word for segment in found.segments for word in segment.words or ()]
        items.append(dataclasses.replace(item, words=words))
        titles[f"{Path(clip.name).stem}.srt"] = FORMATS["srt"](found, DEFAULT)
        kind = "recording" if clip.long else "clean"
        rows.append(_row(clip, kind, transcript, identical=item.identical))
    return items, noisy, rows, titles


def _compare(
    ways: tuple[Way, Way], clip: Clip, repeats: int, noisy: str | None
) -> tuple[Item, Transcript]:
    """Transcribes a recording without and with the drafter, ``repeats`` times in alternation."""
    import numpy as np

    from mmdecode.demo.speech.clips_page import Item

    plain, drafted = ways
    plain(clip.path)
    plain_ids, plain_stats = plain.ids, plain.decoder.stats.as_dict()
    windows: list[list[Round]] = []
    transcript = drafted(clip.path, windows)[0]
    stats, histogram = drafted.decoder.stats.as_dict(), drafted.decoder.stats.histogram
    identical = drafted.ids == plain_ids
    times = np.zeros((2, repeats, 2))  # way, repeat, (decoding, everything)
    for turn in range(repeats):
        for way in (0, 1) if turn % 2 == 0 else (1, 0):
            times[way, turn] = ways[way](clip.path)[1:]
            identical &= ways[way].ids == plain_ids
    (plain_s, plain_total), (drafted_s, drafted_total) = np.median(times, axis=1)
    return Item(
        name=clip.name,
        audio=clip.path,
        about=f"voice {clip.voice}, {_duration(clip.duration_s)}",
        reference=clip.text,
        hypothesis=transcript.text,
        noisy=noisy,
        windows=windows,
        histogram=histogram,
        tokens=stats["tokens"],
        plain_passes=plain_stats["passes"],
        passes=stats["passes"],
        tokens_per_pass=stats["acceptance_length"],
        plain_s=float(plain_s),
        drafted_s=float(drafted_s),
        plain_total_s=float(plain_total),
        drafted_total_s=float(drafted_total),
        identical=bool(identical),
        words=(),
    ), transcript


def _with_words(way: Way) -> Transcriber:
    """Returns a transcriber with the same model and drafter that gives word timestamps."""
    from mmdecode.asr.options import TranscribeOptions
    from mmdecode.asr.transcriber import Transcriber
    from mmdecode.decoder import Decoder

    transcriber = way.transcriber
    return Transcriber(
        transcriber.model,
        transcriber.processor,
        Decoder(draft=way.decoder.draft),
        TranscribeOptions(word_timestamps=True),
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def _row(clip: Clip, kind: str, transcript: Transcript, **more: Any) -> dict[str, Any]:
    row = {"name": clip.name, "set": kind, "reference": clip.text, "text": transcript.text}
    return row | {"tokens": transcript.tokens, **more}


def _report(
    part: Part,
    items: list[Item],
    clips: Sequence[Clip],
    noisy: list[str],
    recordings: Sequence[Clip],
    seed: int,
) -> Report:
    import itertools

    import numpy as np

    from mmdecode.demo.speech.clips_page import Report
    from mmdecode.evaluation.speech.wer import wer

    short = items[: len(clips)]
    references, hypotheses = [clip.text for clip in clips], [item.hypothesis for item in short]
    scores = {
        "clean": wer(references, hypotheses, seed=seed),
        "noisy": wer(references, noisy, seed=seed),
    }
    for clip, item in zip(recordings, items[len(clips) :], strict=True):
        scores["recording"] = wer([clip.text], [item.hypothesis], seed=seed)
    times = np.array([(item.plain_s, item.drafted_s) for item in short])
    draws = np.random.default_rng(seed).integers(len(times), size=(1000, len(times)))
    sums = times[draws].sum(1)
    low, high = np.quantile(sums[:, 0] / sums[:, 1], [0.025, 0.975])
    columns = itertools.zip_longest(*(item.histogram for item in items), fillvalue=0)
    scored = sum(item.passes * item.tokens_per_pass for item in items)
    return Report(
        model=part.model,
        draft=part.draft,
        items=items,
        ratio=(float(times[:, 0].sum() / times[:, 1].sum()), float(low), float(high)),
        tokens_per_pass=scored / max(sum(item.passes for item in items), 1),
        histogram=[sum(column) for column in columns],
        wer=scores,
        conditions={},
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


def _conditions(
    ways: tuple[Way, Way], dtype: str, repeats: int, load: str | None
) -> dict[str, str]:
    import os
    import platform

    import torch
    import transformers

    import mmdecode
    from mmdecode.runs.conditions import device_name, load_average, load_note

    after = load_average()
    busy = load_note(load, after)
    return {
        "device": f"{device_name(ways[0].transcriber.model.device)}, {dtype}",
        "threads": f"threads: {torch.get_num_threads()}, CPUs: {os.cpu_count()}",
        "load": f"load average {load or 'unknown'} before, {after or 'unknown'} after",
        **({"busy": busy} if busy else {}),
        "runs": f"median of {repeats} (recording: 1), batch 1, greedy",
        "versions": f"mmdecode {mmdecode.__version__}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, Python {platform.python_version()}",
    }


def _times(items: Sequence[Item]) -> dict[str, float]:
    names = ("plain_s", "drafted_s", "plain_total_s", "drafted_total_s")
    sums = {name: sum(getattr(item, name) for item in items) for name in names}
    ratios = {
        "ratio": sums["plain_s"] / sums["drafted_s"],
        "ratio_total": sums["plain_total_s"] / sums["drafted_total_s"],
    }
    return {name: round(value, 4) for name, value in (sums | ratios).items()}


def _summary(report: Report, items: Sequence[Item], short: int) -> dict[str, Any]:
    from mmdecode.demo.speech.clips_page import score

    found: dict[str, Any] = {
        "model": report.model,
        "draft": report.draft,
        "clips": short,
        "identical": report.identical,
        "different": [item.name for item in items if not item.identical],
        "wer": {name: score(found) for name, found in report.wer.items()},
        "tokens": sum(item.tokens for item in items),
        "passes": sum(item.passes for item in items),
        "plain_passes": sum(item.plain_passes for item in items),
        "tokens_per_pass": round(report.tokens_per_pass, 4),
        "accepted_histogram": list(report.histogram),
        "ratio_interval": [round(value, 4) for value in report.ratio[1:]],
        "times": {"clips": _times(items[:short])},
        "conditions": report.conditions,
    }
    if items[short:]:
        found["times"]["recording"] = _times(items[short:])
    return found


def _show(report: Report, summary: dict[str, Any], items: Sequence[Item], short: int) -> None:
    from rich.table import Table

    from mmdecode.demo.speech.clips_page import score_text

    table = Table("", "plain", "drafted", "ratio")
    before, after = summary["plain_passes"], summary["passes"]
    table.add_row("decoder passes", f"{before:,}", f"{after:,}", f"{before / max(after, 1):.2f}")
    table.add_row("tokens per pass", "1.00", f"{report.tokens_per_pass:.2f}", "")
    for name, times in summary["times"].items():
        for what, suffix, ratio in (
            ("decoding", "_s", "ratio"),
            ("all", "_total_s", "ratio_total"),
        ):
            table.add_row(
                f"{name}, {what}",
                f"{times['plain' + suffix]:.2f} s",
                f"{times['drafted' + suffix]:.2f} s",
                f"{times[ratio]:.2f}",
            )
    low, high = summary["ratio_interval"]
    table.caption = f"95 % interval of the clips' decoding ratio: {low:.2f} to {high:.2f}"
    if "busy" in report.conditions:
        table.caption += f"; {report.conditions['busy']}"
    console.print(table)
    for name, score in report.wer.items():
        console.print(f"word errors, {name}: {score_text(score)}", highlight=False)
    if report.identical:
        console.print(f"identical: [bold green]yes[/], all {len(items)} recordings")
    else:
        names = ", ".join(summary["different"])
        console.print(f"identical: [bold red]no[/], tokens differ in {names}")
    for text in report.conditions.values():
        console.print(text, style="dim", markup=False, highlight=False)
    for path in summary["files"].values():
        console.print(path, style="bold", markup=False, highlight=False, soft_wrap=True)
    console.print(f"done in {summary['seconds']:.0f} s", highlight=False)
