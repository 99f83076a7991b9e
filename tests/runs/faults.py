"""Workers, runs and Ray's own processes are killed at random moments; nothing is lost.

    python -m tests.runs.faults FOLDER --engine ray --kills 30 --runs 10 --items 400 --seed 0

A run with a stand-in for the model is disturbed by kills of its workers; then runs are killed
themselves and continued; with Ray its raylet is killed, too. After each kill no line may be lost or
doubled, and the files at the end must be those of one process that was left alone.

    python -m tests.runs.faults FOLDER --engine ray --kills 10 --runs 3 --model moonshine:tiny-en

With a model, copies of the real clips are transcribed by it. ``--reference`` is a folder of results
of these copies, such as those of an earlier version: in FOLDER, ``mmdecode transcribe clips --model
MODEL --out OUT --batch-size 4 --device cpu``.
"""

import argparse
import functools
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from mmdecode.runs.work import run
from mmdecode.zoo.real_clips import real_clips
from tests.runs.stand_in import decoded, folder_of, load, names
from tests.support.files import contents, json_lines

ROOT = Path(__file__).parents[2]


def copied(folder, count):
    """A folder of copies of the real clips."""
    if not folder.exists():
        folder.mkdir(parents=True)
        for number, clip in zip(range(count), itertools.cycle(real_clips()), strict=False):
            shutil.copy(clip.path, folder / f"{number:04d}{clip.path.suffix}")
    return folder


def process(folder, *words):
    """A process that runs a module, with one thread, in a session of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *map(str, words)]
    return subprocess.Popen(command, cwd=folder, start_new_session=True, env=environment)


def transcribing(out, given, engine):
    """A process that transcribes copies of the real clips."""
    clips = copied(given.folder / "clips", given.items)
    words = ["--model", given.model, "--out", out, "--batch-size", 4, "--device", "cpu"]
    words += ["--resume"] * out.exists() + ["--engine", engine, "--workers", 2] * (
        engine != "local"
    )
    return process(given.folder, "mmdecode", "transcribe", clips.name, *words)


def started(out, count, engine, **how):
    """A process that runs an engine, see `main`."""
    words = [out, count, engine, json.dumps(how)]
    return process(ROOT, "tests.runs.faults", "--run", *words)


def workers_of(process, words=("mmdecode.runs.worker", "RayWorker")):
    """Processes below one whose command line has one of some words."""
    found = []
    for one in psutil.Process(process.pid).children(recursive=True):
        try:
            line = " ".join(one.cmdline())
        except psutil.Error:
            continue
        if any(word in line for word in words):
            found.append(one)
    return found


def has_written(process):
    """Whether a worker has written a line."""
    try:
        files = [file.path for file in process.open_files() if file.path.endswith(".jsonl")]
    except psutil.Error:
        return False
    return any(os.path.getsize(path) for path in files)


def reported(out):
    """Ids of complete lines, in order of the files."""
    paths = [out / "results.jsonl", *sorted((out / "parts").glob("rank-*"))]
    lines = [line for path in paths if path.exists() for line in path.read_bytes().split(b"\n")]
    return [json.loads(line)["id"] for line in lines if line.endswith(b"}")]


def begun(out, given):
    """A process that runs what is to be disturbed."""
    if given.model:
        return transcribing(out, given, given.engine)
    return started(out, given.items, given.engine, seconds=given.seconds)


def of_workers(folder, whole, given):
    """Kills workers of one run that goes on, and returns how often."""
    out, began = folder / "workers", time.monotonic()
    going = begun(out, given)
    killed = 0
    while going.poll() is None:
        time.sleep(random.uniform(0.2, 2 * given.pause))
        workers = workers_of(going) if going.poll() is None else []
        if random.random() < 0.95:  # most have loaded their model
            workers = [one for one in workers if has_written(one)]
        if workers and killed < given.kills:
            random.choice(workers).kill()
            killed += 1
    seconds = round(time.monotonic() - began, 1)
    lines = json_lines(out / "results.jsonl")
    twice = [line["kind"] for line in lines if "error" in line]  # killed twice over one item alone
    assert set(twice) <= {"CrashError"} and len(lines) == given.items, twice
    if twice:
        begun(out, given).wait()
    checked(out, whole, given.items)
    return {"kills of workers": killed, "hit twice alone": len(twice), "seconds": seconds}


def of_runs(folder, whole, given, words=None):
    """Kills runs, or processes below them, and continues them; returns the number of kills."""
    out, before = folder / "runs", set()
    if out.exists():
        shutil.rmtree(out)
    for _ in range(given.runs):
        going = begun(out, given)
        while not set(reported(out)) - before and going.poll() is None:
            time.sleep(0.05)
        time.sleep(random.uniform(0, given.pause))
        if going.poll() is None:
            if words is None:
                going.kill()
            else:
                for one in workers_of(going, words):
                    one.kill()
        code = going.wait(120)
        now = set(reported(out))
        assert before <= now, f"lost: {before - now}"
        assert words is None or code != 0 or len(now) == given.items, "no error"
        before = now
    for _ in range(2):  # the second one finds nothing to do
        assert begun(out, given).wait(300) == 0
        checked(out, whole, given.items)
    return given.runs


def checked(out, whole, count):
    found = [line["id"] for line in json_lines(out / "results.jsonl")]
    assert len(found) == len(set(found)) == count, f"{len(found)} lines, {len(set(found))} ids"
    assert contents(out) == whole


def measured(given):
    """Runs all kinds of kills, and returns their counts."""
    random.seed(given.seed)
    given.folder.mkdir(parents=True, exist_ok=True)
    whole = given.reference or given.folder / "whole"
    if given.model and not given.reference:
        assert transcribing(whole, given, "local").wait() == 0
    elif not given.model:
        run(folder_of(whole, names(given.items)), load)
    whole = contents(whole)
    found = {"engine": given.engine}
    found |= of_workers(given.folder, whole, given)
    found["kills of runs"] = of_runs(given.folder, whole, given)
    if given.engine == "ray":
        given.runs = min(given.runs, 2)
        found["kills of the raylet"] = of_runs(given.folder, whole, given, ["raylet/raylet"])
    return found


def main():
    if sys.argv[1:2] == ["--run"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # else ignored in the background
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # else ignored under nohup
        out, count, engine, how = sys.argv[2:]
        out = Path(out)
        folder = folder_of(out, names(int(count)), resume=out.exists())
        decoded(folder, engine, functools.partial(load, **json.loads(how)))
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="folder for the runs")
    parser.add_argument("--engine", choices=["processes", "ray"], default="processes")
    parser.add_argument("--kills", type=int, default=30, help="kills of workers")
    parser.add_argument("--runs", type=int, default=10, help="kills of runs")
    parser.add_argument("--items", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=0.4, help="time of a batch")
    parser.add_argument("--pause", type=float, default=1.0, help="mean time between kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="a recogniser; default: a stand-in")
    parser.add_argument("--reference", type=Path, help="folder to compare with")
    print(json.dumps(measured(parser.parse_args())))


if __name__ == "__main__":
    main()
