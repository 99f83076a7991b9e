"""The steps of `make gpu` and `make gpu-bench`: each is done once, bounded, and noted when done.

    python benchmarks/on_gpu.py gpu                        # make gpu
    python benchmarks/on_gpu.py gpu-bench --part passes    # make gpu-bench PART=passes
    python benchmarks/on_gpu.py gpu --device cpu --quick   # make gpu DEVICE=cpu QUICK=1

`gpu` runs the tests of tests/gpu, then every benchmark at toy size on the device. `gpu-bench`
measures. A call ends within its budget of minutes; the next one goes on with what is left, so that
both can be spread over machines that are lent for a short time: notes, logs and results are in the
folder ``--out``, which may be copied. A step is done again if its command or the library has
changed since (``--keep``: not then), or if it failed. Nothing is measured after a test failed
(``--anyway``: it is).

``--quick`` takes toys; with ``--device cpu`` rounds are captured on a tape.

The exit code is 0 if all steps are done, 1 if one failed, 3 if the budget was over.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pages import write_result

from mmdecode.errors import run_script

HERE = Path(__file__).parent
ROOT = HERE.parent
BUDGET = 7.5
"""Minutes of a call."""
TESTS = "tests"
FEW = {
    "test_cuda": "captured_rounds and lookup or noise",
    "test_drafters": "captured_rounds and lookup and greedy or trained and medusa-llama-fp32",
    "test_guides": "as_in_the_batch and tiny and vcd and greedy",
    "test_images": "captured_rounds and coupled and llamagen",
    "test_quantized": "a_draft or drafts_for and llama",
}
"""Tests that stand for their file with ``--quick``; all of them are among the slow ones."""
SHAPES = ("whisper-large-v3", "whisper-large-v3-turbo", "llamagen-xl", "llama-7b")


@dataclass(frozen=True)
class Step:
    """One program.

    Attributes:
        name: Its name, and that of its note and log.
        part: Steps that are asked for together.
        words: Words after ``python``; the first one may be a benchmark.
        seconds: It is ended after so many.
    """

    name: str
    part: str
    words: tuple[str, ...]
    seconds: int = 240

    @property
    def script(self) -> Path | None:
        """The benchmark that it runs."""
        first = Path(self.words[0])
        return ROOT / first if first.suffix == ".py" else None


def tests(device: str, quick: bool) -> Iterator[Step]:
    """A step for each file of tests/gpu; a few tests of all of them with ``quick``."""
    mark = "gpu" if device == "cuda" else "slow"
    # a machine with a GPU may lack pytest-timeout, whose option is then unknown to pytest
    words = ("-m", "pytest", "-q", "-m", mark, "-W", "ignore::pytest.PytestConfigWarning")
    words = (*words, "-p", "no:cacheprovider")
    if quick:
        few = " or ".join(f"({file} and ({names}))" for file, names in FEW.items())
        yield Step("test_few", TESTS, (*words, "-k", few, "tests/gpu"), 120)
        return
    for file in FEW:
        yield Step(file, TESTS, (*words, f"tests/gpu/{file}.py"), 200)


def measurements() -> Iterator[Step]:
    """Steps that measure, by part."""
    for part in ("passes", "long", "batch"):
        yield Step(part, "passes", ("benchmarks/step_passes.py", "--part", part))
    for name in SHAPES:
        yield Step(f"steps-{name}", "steps", ("benchmarks/step_speed.py", "--only", name))
    speech = ("benchmarks/asr_speed.py", "--parts", "short", "--dtype", "float32")
    yield Step("widened", "widened", speech)
    yield Step("speech", "speech", speech)
    images = ("--compile", "--no-peaks", "--batch-size", "1", "--window", "16", "--window", "32")
    few = ("-n", "4", "--repeats", "1", "--identical", "8")
    yield Step("images", "images", ("benchmarks/image_speed.py", *images, *few), 400)
    vlm = ("--compile", "--scenes", "4", "--tokens", "96")
    yield Step("vlm", "vlm", ("benchmarks/vlm_speed.py", *vlm), 400)


def steps_of(target: str, device: str, quick: bool, out: Path) -> list[Step]:
    """Steps of a target, correctness first; a benchmark that is not here is left out."""
    found = [*tests(device, quick)] if target == "gpu" else []
    small = ("--quick",) if quick or target == "gpu" else ()
    for step in measurements():
        assert step.script is not None
        if not step.script.exists():
            print(f"left out: {step.name}: {step.words[0]} is not here")
            continue
        folder = out / ("toys" if small else "results")
        spoken = step.name in ("speech", "widened")
        some = ("--engines", "undrafted", "medusa") if small and spoken else ()
        if step.name == "widened":
            some = (*some, "--width", "tiny" if small else "small")
        words = (*step.words, "--device", device, *small, *some, "--out", str(folder))
        part = "toys" if target == "gpu" else step.part
        name = f"toy-{step.name}" if small else step.name
        most = 120 if step.name == "widened" else 60  # its encoder reads half a minute
        found.append(Step(name, part, words, most if small else step.seconds))
    return found


def digest(step: Step) -> str:
    """Of the library's files, and of those that a step runs."""
    files = sorted((ROOT / "mmdecode").rglob("*.py"))
    own = [] if step.script is None else [step.script]
    tested = sorted((ROOT / "tests" / "gpu").glob("*.py")) if step.part == TESTS else []
    hashed = hashlib.sha256()
    for file in (*files, *own, *tested):
        hashed.update(file.read_bytes())
    return hashed.hexdigest()[:16]


def is_done(step: Step, note: Path, keep: bool) -> bool:
    """Whether a note says that this step went well."""
    try:
        earlier = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    same = earlier.get("command") == list(step.words)
    return same and earlier.get("code") == 0 and (keep or earlier.get("digest") == digest(step))


def run(step: Step, log: Path, seconds: float) -> tuple[int, float]:
    """Runs a step in a group of processes of its own; its exit code, 124 after its time."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    began = time.monotonic()
    with log.open("wb") as file:
        command = [sys.executable, *step.words]
        streams = {"stdout": file, "stderr": subprocess.STDOUT}
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, start_new_session=True, **streams
        )
        try:
            code = child.wait(seconds)
        except BaseException as error:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            code = 124
    return code, time.monotonic() - began


def last_lines(log: Path, count: int) -> str:
    """The end of a log."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]
    return "\n".join(f"    {line}" for line in lines)


def work(steps: Sequence[Step], folder: Path, budget: float, keep: bool, anyway: bool) -> int:
    """Does what is left to do, in order; the exit code."""
    end, failed, left = time.monotonic() + budget, list[str](), list[str]()
    for index, step in enumerate(steps):
        note, log = folder / f"{step.name}.json", folder / f"{step.name}.log"
        if is_done(step, note, keep):
            print(f"{step.name}: done before")
            continue
        remaining = end - time.monotonic()
        tested = any(one.name in failed for one in steps if one.part == TESTS)
        if remaining <= 0 or (tested and step.part != TESTS and not anyway):
            left = [one.name for one in steps[index:]]
            break
        code, spent = run(step, log, min(step.seconds, remaining))
        noted = {"command": list(step.words), "code": code, "seconds": round(spent, 1)}
        noted |= {"digest": digest(step), "torch": torch.__version__}
        write_result(note, noted)
        ending = {0: "done", 124: "stopped after"}.get(code, f"failed with code {code},")
        print(f"{step.name}: {ending} {spent:.1f} s", flush=True)
        if code:
            failed.append(step.name)
            print(last_lines(log, 30), flush=True)
        else:
            print(last_lines(log, 3), flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}; logs are in {folder}")
    if left:
        print(f"not begun: {', '.join(left)}; the same command goes on with them")
    return 1 if failed else 3 if left else 0


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", choices=("gpu", "gpu-bench"))
    parser.add_argument("--part", help="steps of one part only")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="toys")
    parser.add_argument("--minutes", type=float, default=BUDGET, help="budget of this call")
    parser.add_argument("--keep", action="store_true", help="what is done stays, whatever changed")
    parser.add_argument("--anyway", action="store_true", help="measure after a failed test too")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    arguments = parser.parse_args()
    device, out = arguments.device, arguments.out.absolute()
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu --quick tries every step on toys")
    if device == "cpu" and not arguments.quick:
        parser.error("--device cpu is for toys: give --quick too")
    steps = steps_of(arguments.target, device, arguments.quick, out)
    parts = list(dict.fromkeys(step.part for step in steps))
    if arguments.part:
        if arguments.part not in parts:
            parser.error(f"--part {arguments.part}: known are {', '.join(parts)}")
        steps = [step for step in steps if step.part == arguments.part]
    folder = out / f"steps-{device}"
    folder.mkdir(parents=True, exist_ok=True)
    sys.exit(work(steps, folder, 60 * arguments.minutes, arguments.keep, arguments.anyway))


if __name__ == "__main__":
    run_script(main)
