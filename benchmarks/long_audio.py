"""Resident memory of ``mmdecode transcribe`` over hours of audio, sampled while it works.

    python benchmarks/long_audio.py                 # ten hours: a quarter of an hour, or more
    python benchmarks/long_audio.py --hours 1

The recording is made of the shipped clips in shuffled order, as one FLAC file; the command runs in
a process of its own, whose memory the system reports (Linux only). Transcripts grow with the audio:
a hundred bytes of text, tokens and times per second of speech. Whatever else grew would be a leak.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import soundfile
import torch

from mmdecode.errors import run_script
from mmdecode.evaluation.speed.stopwatch import machine
from mmdecode.runs.files import marked_json, refuse_foreign, write_file, write_folder
from mmdecode.zoo.speech import speech_test

RATE = 16_000
HERE = Path(__file__).parent


def write_recording(path: Path, seconds: float) -> float:
    """Writes at least that many seconds of shipped clips; returns how many."""
    waves = [clip.samples() for clip in speech_test()]
    order, chosen, written = random.Random(0), [], 0
    while written < seconds * RATE:
        chosen.append(order.choice(waves))
        written += len(chosen[-1])

    def fill(into: Path) -> None:
        whole = into / path.name
        with soundfile.SoundFile(whole, "w", RATE, 1, format="FLAC", subtype="PCM_16") as file:
            for wave in chosen:
                file.write(wave)

    write_folder(path.parent, fill)
    return written / RATE


def resident_megabytes(process: subprocess.Popen) -> float | None:
    """Of a process; ``None``: it has ended."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return None
    found = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(found[0].split()[1]) / 1024 if found else None


def watch(command: list[str], every_s: float) -> list[tuple[float, float]]:
    """Seconds since the start and resident megabytes, until the command ends."""
    began, samples = time.perf_counter(), []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            size = resident_megabytes(process)
            if size is not None:
                samples.append((time.perf_counter() - began, size))
            time.sleep(every_s)
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    return samples


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="zoo:whisper-synth")
    parser.add_argument("--hours", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--overwrite", action="store_true", help="also what mmdecode did not write")
    arguments, more = parser.parse_known_args()  # the rest goes to mmdecode transcribe
    refuse_foreign(sorted(arguments.out.glob("long-audio-*.json")), arguments.overwrite)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds = write_recording(folder / "long.flac", 3600 * arguments.hours)
        command = [sys.executable, "-m", "mmdecode", "transcribe", str(folder / "long.flac")]
        command += ["--model", arguments.model, "--out", str(folder / "out"), *more]
        samples = watch(command, every_s=1.0)
        (result,) = (folder / "out" / "results.jsonl").read_text().splitlines()
        text = json.loads(result)
    end = samples[-1][0]
    size_at = {
        share: next(size for at, size in samples if at >= share * end)
        for share in (0.02, 0.1, 0.25, 0.5, 0.75, 0.95)
    }
    peak = max(size for _, size in samples)
    for share, size in size_at.items():
        print(f"{100 * share:4.0f} % of the run: {size:7.1f} MB")
    words, audio_s = len(text["text"].split()), text["duration_s"]
    print(f"peak {peak:.1f} MB; {audio_s / 3600:.2f} hours, {words} words, {end / 60:.1f} minutes")
    assert abs(audio_s - seconds) < 0.1, "all of it was heard"
    facts = machine(torch.device("cpu"), "float32")
    row = {
        "machine": facts,
        "options": more,
        "audio_s": round(audio_s, 1),
        "words": words,
        "wall_s": round(end, 1),
        "resident_mb_at_share_of_run": {str(k): round(v, 1) for k, v in size_at.items()},
        "peak_mb": round(peak, 1),
    }
    path = arguments.out / f"long-audio-{facts['date']}.json"
    write_file(path, marked_json(row), arguments.overwrite)
    print(f"written: {path}")


if __name__ == "__main__":
    run_script(main)
