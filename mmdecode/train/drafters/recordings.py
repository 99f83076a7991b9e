"""Windows of recordings that heads of a recogniser are trained on, and what is computed of them.

`read_windows` leaves damaged recordings out, with a line on stderr. `stored` keeps what is computed
of the windows in files, so that an interrupted training does not compute it again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from rich.progress import track

from mmdecode.asr.output.manifest import Entry, opened
from mmdecode.asr.recognizers import Recognizer
from mmdecode.errors import InputError, OptionError
from mmdecode.runs.console import console, print_line
from mmdecode.runs.files import LISTING, remove_empty
from mmdecode.train.drafters.transcripts import windows_of
from mmdecode.train.loop import write_state

STATE = "state"
"""Subfolder of the result that holds the state of a training until it ends."""
PART = 160
"""Windows in a file of `stored`: a multiple of all batch sizes, and an even number of batches."""

Sample = TypeVar("Sample")


def refuse_finished(out: Path, overwrite: bool) -> None:
    """Raises if a folder holds the result of a training that ended.

    Args:
        out: Folder of the result; it need not exist.
        overwrite: Whether the user allows replacing it.

    Raises:
        OptionError: The folder holds a report, and ``overwrite`` is not set.
    """
    if (out / "report.json").exists() and not overwrite:
        raise OptionError(
            f"{out} holds trained heads; replace them with --overwrite, or choose another --out"
        )


def read_windows(
    recognizer: Recognizer, entries: Sequence[Entry], language: str | None
) -> list[np.ndarray]:
    """Reads recordings and cuts them into windows, shortest first where lengths may differ.

    Args:
        recognizer: Recogniser of the windows.
        entries: The recordings.
        language: Language of all recordings; ``None``: the language of each entry.

    Raises:
        InputError: No recording can be read.
    """
    from mmdecode.asr.audio.reading import blocks

    waves, failed = [], []
    for entry in track(entries, description="reading"):
        try:
            waves.append(np.concatenate(list(blocks(opened(entry, language), recognizer.rate))))
        except InputError as error:
            failed.append(entry.id)
            print_line(f"left out {entry.id}: {error}", console, "yellow")
    if not waves:
        raise InputError(f"none of {len(entries)} recordings can be read; see the lines above")
    if failed:
        print_line(f"{len(failed)} of {len(entries)} recordings are left out", console, "yellow")
    windows = windows_of(recognizer, waves)
    return windows if recognizer.capabilities.fixed_windows else sorted(windows, key=len)


def stored(
    folder: Path,
    kind: type[Sample],
    windows: Sequence[np.ndarray],
    compute: Callable[[Sequence[np.ndarray]], Iterable[Sample]],
    settings: Sequence[Any],
) -> list[Sample]:
    """Computes samples of windows part by part; parts that are stored are read.

    Args:
        folder: Folder of the training state.
        kind: Class of the samples, a dataclass of tensors and numbers.
        windows: Waveforms of the windows.
        compute: Computes the samples of some windows, one per window.
        settings: Settings that the samples depend on, in addition to the windows.
    """
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=8)
    for window in windows:
        digest.update(window.tobytes())
    parts, found = folder / f"transcripts-{digest.hexdigest()}", []
    for start in track(range(0, len(windows), PART), description="transcribing"):
        file = parts / f"{start:06d}.pt"
        if file.exists():
            found += [kind(**row) for row in torch.load(file, weights_only=True)]
            continue
        samples = list(compute(windows[start : start + PART]))
        write_state(file, [vars(sample) for sample in samples])
        found += samples
    return found


def forget(folder: Path) -> None:
    """Deletes the state of a training that ended."""
    parts = [one for one in folder.glob("transcripts-*") if one.is_dir()]
    for part in (*parts, folder):
        for file in (*part.glob("*.pt"), part / LISTING):
            file.unlink(missing_ok=True)
    remove_empty([*parts, folder])
