"""Task ``silence``: hallucinations on recordings without speech, and word errors on speech."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdecode.errors import OptionError, UnknownNameError
from mmdecode.evaluation.speech.task import DECODING, PLAIN, RecordingTask, Way, refuse_twice
from mmdecode.evaluation.task import Run

if TYPE_CHECKING:
    import numpy as np

    from mmdecode.asr.output.manifest import Entry
    from mmdecode.evaluation.report.report import Report

ZOO, NONE = "zoo", "none"
MODEL = "zoo:whisper-synth"
SEEDS = {"development": 1, "test": 3}  # 2 was the test part of an earlier report


@dataclass(frozen=True, kw_only=True)
class SilenceTask(RecordingTask):
    """Words per minute of recordings without speech, and word errors on speech."""

    def refuse(self, given: Mapping[str, Any]) -> None:
        """Refuses options that do not go together; see `Task.refuse`."""
        if given["part"] not in SEEDS:
            raise UnknownNameError.of("part", given["part"], SEEDS)
        if len(given["draft"] or ()) > 1:
            raise OptionError("every mode has the same drafter; give --draft once")

    def open(self, given: Mapping[str, Any]) -> Run:
        """Reads and synthesises recordings and loads the model; see `Task.open`."""
        from mmdecode.asr.options import FALLBACK
        from mmdecode.evaluation.speech.non_speech import write_flac
        from mmdecode.evaluation.speech.runs import data_hash

        guides = ["whisper_cd"] if given["guide"] is None else given["guide"]
        refuse_twice("--guide", guides)
        [draft] = given["draft"] or [None]
        names = ("language", "max_new_tokens", "batch_size", "padding")
        ways: dict[str, Way] = {
            PLAIN: (draft, None, {"loop_guard": "report"}),
            "thresholds": (draft, None, FALLBACK | {"loop_guard": "report"}),
            "loop guard": (draft, None, {"loop_guard": "cut"}),
            **{spec: (draft, spec, {"loop_guard": "report"}) for spec in guides},
        }
        made: dict[Path, Callable[[], np.ndarray]] = {}
        left_out: list[str] = []
        sets = given["speech"] or [ZOO]

        def write() -> None:
            for path, samples in made.items():
                write_flac(path, samples(), given["overwrite"])

        with contextlib.ExitStack() as stack:
            folder = given["output"] or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            entries = [*_recordings(given, sets, folder / "audio", made, left_out)]
            settings = {
                **{name: given[name] for name in ("model", "part", "clips", "seconds", "seed")},
                "guides": guides,
                "draft": draft,
                "options": {name: given[name] for name in names},
                "speech": sets,
                "recordings": str(given["recordings"]) if given["recordings"] else None,
                "limit": given["limit"] if cut(sets, given) else None,
                "data_hash": data_hash(entries),
            }
            run = self.transcribed(given, ways, entries, settings, left_out, write, warmup=0)
            return replace(run, closing=stack.pop_all())

    def report(
        self, samples: list[Any], conditions: dict[str, Any], given: Mapping[str, Any]
    ) -> Report:
        """Makes a `SilenceReport`; see `RecordingTask.report`."""
        from mmdecode.evaluation.speech.silence import SilenceReport

        scoring = {name: given[name] for name in self.scoring}
        return SilenceReport(samples, conditions=conditions, **scoring)


def cut(sets: Sequence[str], given: Mapping[str, Any]) -> bool:
    """Whether ``--limit`` leaves recordings of some kind out."""
    from mmdecode.asr.output.manifest import holds_more
    from mmdecode.zoo.speech import speech_test

    limit = given["limit"]
    if limit is None or given["clips"] > limit or (ZOO in sets and len(speech_test()) > limit):
        return limit is not None
    own = [Path(one) for one in sets if one not in (ZOO, NONE)]
    return any(holds_more(path, limit) for path in (*own, given["recordings"]) if path)


def _recordings(
    given: Mapping[str, Any],
    sets: Sequence[str],
    folder: Path,
    made: dict[Path, Callable[[], np.ndarray]],
    left_out: list[str],
) -> Iterator[Entry]:
    """The user's recordings, synthetic ones, and shipped speech, clean and noisy.

    Functions that make the samples of synthetic recordings are added to ``made``, by path, and
    error messages of unusable rows to ``left_out``.
    """
    from mmdecode.asr.output.manifest import Entry, read_manifest
    from mmdecode.evaluation.speech.non_speech import sounds
    from mmdecode.evaluation.speech.silence import NON_SPEECH, SPEECH
    from mmdecode.zoo.speech import speech_test

    recordings, limit = given["recordings"], given["limit"]
    for entry in read_manifest(recordings, limit, left_out=left_out) if recordings else ():
        yield replace(entry, id=f"{NON_SPEECH}/recordings/{entry.id}", text="")
    for path in (Path(one) for one in sets if one not in (ZOO, NONE)):
        for entry in read_manifest(path, limit, text=True, left_out=left_out):
            yield replace(entry, id=f"{SPEECH}/{path.stem}/{entry.id}")
    count = min(given["clips"], limit or given["clips"])
    for entry, samples in sounds(folder, count, given["seconds"], SEEDS[given["part"]]):
        made[Path(entry.audio or "")] = samples
        yield replace(entry, id=f"{NON_SPEECH}/{entry.id}")
    clips = speech_test()[:limit] if ZOO in sets else []
    for clip in clips:
        yield Entry(id=f"{SPEECH}/clean/{clip.name}", audio=str(clip.path), text=clip.text)
    for clip in clips:
        path = folder / f"noisy_{clip.name}.flac"
        made[path] = partial(clip.samples, "noisy")
        yield Entry(id=f"{SPEECH}/noisy/{clip.name}", audio=str(path), text=clip.text)


SILENCE = SilenceTask(
    name="silence",
    about="""Hallucinated words per minute of non-speech, repetition, and word errors on speech.

    Modes are plain Whisper decoding; thresholds (Whisper's thresholds and temperature fallback);
    loop guard (repeated text is cut after its first occurrence); and each --guide. Silence, white,
    pink and babble noise and music are synthesised. Texts are appended to samples.jsonl in --out;
    --resume continues an interrupted run. If a recording fails, the exit code is 1.

    For example:

      mmdecode evaluate silence --model openai/whisper-small --out run

      mmdecode evaluate silence --model openai/whisper-tiny --guide whisper_cd:alpha=0.5 --guide
      whisper_cd:alpha=0,gate=0.1 --speech test.jsonl --recordings office.jsonl --out run
    """,
    options=DECODING
    | {
        "model": MODEL,
        "guide": None,
        "draft": None,
        "speech": None,
        "recordings": None,
        "clips": 12,
        "seconds": 20.0,
        "part": "test",
        "padding": "silence",
    },
    helps={
        "guide": "A guide to evaluate, as name or name:key=value,...; default: whisper_cd. Repeat "
        "it for more.",
        "draft": "A drafter for every mode; it does not change the texts.",
        "limit": "Use only this many recordings of each kind, for a smoke test.",
        "part": "Set of synthetic sounds: development to tune on, test to report.",
    },
    failed="",
)
