"""Runs modes of decoding over the same recordings, timed as on the Open ASR leaderboard.

Time includes features, encoder, decoding and text; it excludes reading and resampling of files. A
batch's time is divided evenly among its recordings. Modes take turns batch by batch, A B B A, so
that a machine that slows down affects them alike.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mmdecode.asr.audio.reading import Source, blocks, source_of
from mmdecode.asr.decoding.long_form import HINT
from mmdecode.asr.output.manifest import Entry, opened
from mmdecode.errors import InputError, OptionError
from mmdecode.evaluation.speech.samples import Sample, sample_of
from mmdecode.runs.conditions import now
from mmdecode.runs.files import complete_lines
from mmdecode.runs.items import Failed, Noted, tried

if TYPE_CHECKING:
    from mmdecode.asr.transcriber import Transcriber
    from mmdecode.runs.rows import RowJournal

SAMPLES = "samples.jsonl"


def read_samples(folder: Path) -> list[Sample]:
    """Reads the samples of a run; of several lines for one mode and recording the last counts.

    Raises:
        InputError: The folder holds no samples, or a line is damaged.
    """
    path = folder / SAMPLES
    try:
        lines = [*complete_lines(path)]
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror}; expected the folder of an earlier run"
        ) from error
    found: dict[tuple[str, str], Sample] = {}
    for number, line in enumerate(lines, 1):
        try:
            sample = Sample.from_dict(json.loads(line))
        except (ValueError, TypeError) as error:
            raise InputError(
                f"{path}, line {number} is not the row of a recording; remove the line, and "
                "--resume transcribes the recording again"
            ) from error
        found[sample.mode, sample.id] = sample
    return list(found.values())


def record(
    transcribers: Mapping[str, Transcriber],
    entries: Sequence[Entry],
    journal: RowJournal[Sample] | None = None,
    *,
    group: str | None = None,
    batch_size: int | None = None,
    warmup: int = 1,
    progress: Callable[[Sample], None] | None = None,
    noted: Noted = contextlib.nullcontext,
) -> list[Sample]:
    """Transcribes recordings in each mode, and measures the time.

    Args:
        transcribers: Transcriber of each mode, by the mode's name.
        entries: Recordings with reference texts.
        journal: File that each sample is added to as soon as it is ready. Recordings that have a
            transcript in it are skipped; failed recordings are decoded again. ``None``: nothing is
            written.
        group: See `mmdecode.evaluation.speech.samples.sample_of`.
        batch_size: Number of recordings in a batch; ``None``: the first transcriber's batch size.
        warmup: Untimed runs of the first batch in each mode; the leaderboard makes ten.
        progress: Called with each sample.
        noted: Records which recordings are being decoded, see `mmdecode.runs.items.Watch`.

    Returns:
        One sample per mode and recording; modes in order, recordings in order.

    Raises:
        OptionError: There is no mode.
    """
    if not transcribers:
        raise OptionError("no transcriber to evaluate; expected at least one")
    size = batch_size or next(iter(transcribers.values())).options.batch_size
    rows = journal.rows if journal else {}
    found = {key: sample for key, sample in rows.items() if sample.error is None}
    warm: set[str] = set()
    modes = list(transcribers)
    for number, start in enumerate(range(0, len(entries), size)):
        batch = entries[start : start + size]
        for mode in modes if number % 2 == 0 else modes[::-1]:
            transcriber = transcribers[mode]
            todo = [entry for entry in batch if (mode, entry.id) not in found]
            if journal:
                for entry in todo:
                    journal.note_read(entry.audio)
            loaded, failed = _read(todo, transcriber, mode, group)
            if loaded and mode not in warm:
                for _ in range(warmup):
                    transcriber([source for _, source in loaded])
                warm.add(mode)
            with noted([entry.id for entry in todo]):
                timed = list(_timed(transcriber, loaded, number))
            for sample in (*failed, *timed):
                found[mode, sample.id] = sample
                if journal:
                    journal.add(sample)
                if progress:
                    progress(sample)
    samples = [found[mode, entry.id] for mode in modes for entry in entries]
    if journal:
        journal.finish_with(samples)
    return samples


def data_hash(entries: Sequence[Entry]) -> str:
    """Hash of the entries in order: ids, texts, offsets, durations and languages."""
    asked = [(e.id, e.text, e.offset_s, e.duration_s, e.language) for e in entries]
    return hashlib.blake2b(json.dumps(asked).encode(), digest_size=8).hexdigest()


def _read(
    entries: Sequence[Entry], transcriber: Transcriber, mode: str, group: str | None
) -> tuple[list[tuple[Sample, Source]], list[Sample]]:
    """Reads recordings; returns samples without a text, and those of unreadable recordings."""
    rate = transcriber.sampling_rate
    loaded, failed = [], []
    for entry in entries:
        source = opened(entry, transcriber.options.language)
        wave = tried(partial(_wave, source, rate), HINT)
        if isinstance(wave, Failed):
            failed.append(sample_of(entry, mode, group, error=wave.error))
            continue
        held = replace(source_of((wave, rate), rate), name=entry.id, language=source.language)
        loaded.append((sample_of(entry, mode, group, duration=len(wave) / rate), held))
    return loaded, failed


def _wave(source: Source, rate: int) -> np.ndarray:
    return np.concatenate(list(blocks(source, rate)))


def _timed(
    transcriber: Transcriber, loaded: Sequence[tuple[Sample, Source]], number: int
) -> Iterator[Sample]:
    from mmdecode.asr.results import Failure

    if not loaded:
        return
    before = _scored(transcriber)
    began = now(transcriber.model.device)
    results = transcriber([source for _, source in loaded])
    seconds = now(transcriber.model.device) - began
    row_passes, scored_tokens = np.subtract(_scored(transcriber), before).tolist()
    counters = {
        "number": number,
        "size": len(loaded),
        "seconds": seconds,
        "row_passes": row_passes,
        "scored_tokens": scored_tokens,
    }
    for (sample, _), result in zip(loaded, results, strict=True):
        if isinstance(result, Failure):
            yield replace(sample, error=result.error)
            continue
        yield replace(
            sample,
            pred_text=result.text,
            time=seconds / len(loaded),
            token_ids=list(result.tokens),
            batch=counters,
            windows=result.stats["windows"],
            repetitive_windows=result.stats["looped"],
        )


def _scored(transcriber: Transcriber) -> tuple[int, int]:
    """Number of passes after the prefill, counted per batch row, and tokens that they committed."""
    stats = transcriber.stats
    return stats.rounds, round(stats.acceptance_length * stats.rounds)
