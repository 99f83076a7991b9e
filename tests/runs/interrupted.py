"""Jobs that are killed at random moments, continued and compared.

    python -m tests.runs.interrupted FOLDER --kills 100 --items 500 --seed 0

The jobs are those of ``mmdecode transcribe``, ``ask`` and ``generate-image``. Each run is a forked
child, or several that share the work, of a process that has loaded everything, so that a run costs
what its work costs. Most runs have a stand-in for the model, which is done at once and yields out
of order: there a kill falls between the writes. The others use small models. Nothing reported may
be lost or doubled after a kill, and the files of a run that was killed and continued, by whatever
number of processes and with whatever batch size, must be those of one that was not. Last, a
recording that crashes its decoder must cost one run, not every run.
"""

import argparse
import functools
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image

from mmdecode.asr import transcriber
from mmdecode.asr.output import jobs, manifest
from mmdecode.asr.results import Failure, Segment, Transcript
from mmdecode.asr.transcriber import Transcriber
from mmdecode.cli.app import app
from mmdecode.image_ar.generator import ImageGenerator
from mmdecode.image_ar.results import GeneratedImage
from mmdecode.runs import ahead
from mmdecode.runs import crashes as notes
from mmdecode.vlm.answerer import Answerer
from mmdecode.vlm.results import Answer
from mmdecode.zoo.speech import speech_test
from tests.support.files import contents, write_json_lines

SIZES = 1, 2, 3, 8  # batch sizes, once the work is cut
RANKS = 2, 1, 3, 1, 2  # processes of one run after the other
MOST_IN_A_ROW = 6


class Instant:
    """A transcriber and answerer that invents a text from the name; every seventh item fails.

    It draws images, too, of one colour each.
    """

    class stats:
        @staticmethod
        def as_dict():
            counters = "calls tokens passes row_passes drafted accepted acceptance_length"
            return dict.fromkeys(counters.split(), 1) | {"accepted_histogram": [1]}

    def answers(self, requests, watch=None, **options):
        for request in random.sample(requests, len(requests)):
            known = {"id": request.id, "index": request.index, "question": request.text}
            known["images"] = tuple(image.name for image in request.images)
            for image in request.images:
                image.read()
            number = int(request.id)
            if number % 7 == 3:
                yield Answer(**known, error="no", kind="InputError")
            else:
                yield Answer(**known, text=f"word{number}", token_ids=[number], margin=0.5)

    def stream(self, sources, progress=None, **options):
        order = list(enumerate(sources))
        random.shuffle(order)
        for index, source in order:
            number = int(Path(source.name).stem)
            if number % 7 == 3:
                yield Failure(source=source.name, index=index, error="no", kind="InputError")
                continue
            text = " ".join(f"word{number * i}" for i in range(number % 40))
            segment = Segment(start_s=0.5, end_s=9.0, text=text, tokens=[number])
            yield Transcript(
                source=source.name,
                index=index,
                text=text,
                segments=[segment],
                language="en",
                duration_s=float(number),
                tokens=[number],
                stats={"windows": 1, "attempts": 1, "looped": 0, "tokens": 1},
            )

    def images(self, requests, **options):
        for request in random.sample(requests, len(requests)):
            number = request.ordinal
            known = {"index": request.index, "condition": request.condition, "ordinal": number}
            known |= {"seed": 0, "guarantee": "exact"}
            if number % 7 == 3:
                yield GeneratedImage(**known, error="no", kind="InputError")
                continue
            codes = torch.full((2, 2), number)
            pixels = functools.partial(torch.full, (3, 4, 4), number / 1000)
            yield GeneratedImage(**known, codes=codes, passes=number, _pixels=pixels)


def start(arguments, ranks, log):
    """Process ids of a run."""
    return [_fork(arguments, rank, ranks, log) for rank in range(ranks)]


def _fork(arguments, rank, ranks, log):
    if pid := os.fork():
        return pid
    try:
        if ranks > 1:
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
            os.environ.update({name: str(value) for name, value in variables.items()})
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        app(list(map(str, arguments)))
    except SystemExit as end:
        os._exit(end.code or 0)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
    os._exit(70)


def finish(pids):
    """Exit codes."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def kill(pids, after_s):
    """Exit codes; processes that were still running were killed."""
    time.sleep(after_s)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)  # one that has ended waits for `finish` and is not hurt
    return finish(pids)


def reported(folder):
    """Ids that have a transcript in some complete line, and how many such lines there are.

    A merge first writes the lines of all parts together, and then removes the parts.
    """
    merged, parts = ids_in(folder / "results.jsonl"), []
    for path in (folder / "parts").glob("*.jsonl"):
        parts += ids_in(path)
    merging = set(parts) <= set(merged) and len(parts) == len(set(parts))
    ids = merged if merging else merged + parts
    return set(ids), len(ids)


def ids_in(path):
    """Ids of the transcripts in complete lines of a file."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return [entry["id"] for entry in found if "error" not in entry]


def series(command, kills, folder, log, exit_code, processes=RANKS):
    """Kills runs until there were enough, and compares each time one gets to its end.

    Args:
        command: Words of the command.
        kills: Number of kills.
        folder: Folder for the results.
        log: File for what the runs print.
        exit_code: Exit code of a run that gets to its end.
        processes: Number of processes of one run after the other.

    Returns:
        How many were killed, and how many folders compared.
    """
    whole, out = folder / "whole", folder / "out"
    started = time.perf_counter()
    assert finish(start([*command, "--out", whole], 1, log)) == [exit_code]
    length = time.perf_counter() - started
    failures = sum("error" in entry for entry in map(json.loads, (whole / "results.jsonl").open()))
    killed = compared = in_a_row = 0
    before = set()
    ranks = itertools.cycle(processes)
    while killed < kills or out.exists():
        arguments = [*command, "--out", out, *(["--resume"] if out.exists() else [])]
        if (out / "run.json").exists():
            arguments += ["--batch-size", random.choice(SIZES)]
        begin = os.path.getsize(log.name)
        pids = start(arguments, next(ranks), log)
        # now and then a run is left to end, the last one in any case
        codes = (
            kill(pids, random.uniform(0, 1.2) * length)
            if killed < kills and in_a_row < MOST_IN_A_ROW
            else finish(pids)
        )
        if -signal.SIGKILL in codes:
            killed, in_a_row = killed + 1, in_a_row + 1
            now, count = reported(out)
            assert before <= now, f"lost: {before - now}"
            assert count == len(now), f"doubled: {count - len(now)}"
            before = now
            continue
        # one that finds all done speaks for all
        assert exit_code in codes and {*codes} <= {0, exit_code}, f"{codes}, see {log.name}"
        assert contents(out) == contents(whole)
        written = Path(log.name).read_text()[begin:]
        assert written.count("failed: ") == failures, written
        assert written.count(" done before") == len(codes), written
        shutil.rmtree(out)
        compared, in_a_row, before = compared + 1, 0, set()
    return killed, compared


def crash(clips, options, folder, log):
    """Each recording at which the decoder ends the process makes one run die, and no other."""
    bad = list(map(str, clips[1:]))

    def dying(path, *names, **options):
        source = recording(path, *names, **options)

        def read():
            if path in bad:
                os.abort()
            yield from source.read()

        return replace(source, read=read)

    recording, manifest.recording = manifest.recording, dying
    code = f"import os, sys\nif sys.argv[1] in {bad!r}: os.abort()"
    jobs.READ = code
    ahead.MOST_THREADS = 1  # several would come to both recordings in the first run
    arguments = ["transcribe", *clips, *options, "--out", folder]
    runs = [arguments, *[[*arguments, "--resume"]] * 3]
    codes = [finish(start(run, 1, log)) for run in runs]
    assert codes == [[-signal.SIGABRT]] * 2 + [[1]] * 2, codes
    entries = [json.loads(line) for line in (folder / "results.jsonl").open()]
    assert ["error" in entry for entry in entries] == [False, True, True], entries
    assert all("crashes the library" in entry["error"] for entry in entries[1:])


def transcriptions(given, kills, log):
    """Series of transcriptions, most of them without a model."""
    with_model = max(1, kills // 5)
    loaded = transcriber.load("zoo:whisper-synth", "cpu", None)
    transcriber.load = lambda *_: loaded
    from_pretrained = Transcriber.from_pretrained
    listing = given.folder / "list.txt"
    names = [str(given.folder / f"{number}.wav") for number in range(given.items)]
    listing.write_text("\n".join(names))
    options = ["--device", "cpu", "--format", "txt,srt,json", "--model", "zoo:whisper-synth"]
    command = ["transcribe", "--files-from", listing, *options]
    Transcriber.from_pretrained = lambda *_, **options: Instant()
    yield series(command, kills - with_model, given.folder / "files", log, 1)
    Transcriber.from_pretrained = from_pretrained
    clips = [str(clip.path) for clip in speech_test()[:6]]
    options += ["--batch-size", 2, "--draft", "lookup"]
    yield series(["transcribe", *clips, *options], with_model, given.folder / "spoken", log, 0)
    crash(clips[:3], options, given.folder / "crash", log)


def answers_of(given, kills, log):
    """Series of answers, without a model and with one."""
    Image.new("RGB", (32, 32), "red").save(given.folder / "red.png")
    rows = [
        {"question_id": number, "image": "red.png", "text": f"What is at {number % 50}?"}
        for number in range(given.items)
    ]
    with_model = max(1, kills // 5)
    from_pretrained = Answerer.from_pretrained
    loaded = from_pretrained("zoo:llava-scenes", device="cpu")
    for name, count, load, code in (
        ("asked", kills - with_model, lambda **_: Instant(), 1),
        ("seen", with_model, lambda **_: loaded, 0),
    ):
        table = given.folder / f"{name}.jsonl"
        write_json_lines(table, rows if code else rows[:24])
        Answerer.from_pretrained = load
        command = ["ask", "--data", table, "--images", given.folder, "--device", "cpu"]
        command += ["--model", "zoo:llava-scenes", "--max-new-tokens", 3, "--batch-size", 2]
        yield series(command, count, given.folder / name, log, code)


def images(given, kills, log):
    """Series of drawn images, without a model and with one."""
    loaded = ImageGenerator.from_pretrained(given.image_model, device="cpu")
    ImageGenerator.from_pretrained = lambda **_: loaded
    with_model = max(1, kills // 5)
    command = ["generate-image", "--class-id", 0, "--model", given.image_model, "--device", "cpu"]
    base = [*command, "--batch-size", 2, "-n"]
    yield series([*base, 24], with_model, given.folder / "drawn", log, 0)
    loaded.images = Instant().images
    yield series([*base, given.items], kills - with_model, given.folder / "many", log, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=100, help="of each kind of job")
    parser.add_argument("--items", type=int, default=500)
    parser.add_argument("--image-model", help="folder of an image model; left out: no images")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    random.seed(given.seed)
    given.folder.mkdir(parents=True, exist_ok=True)
    notes.OFTEN = given.kills + 1  # these processes do not end over what they decode
    found = {}
    with (given.folder / "log.txt").open("w") as log:
        for job in (transcriptions, answers_of, *([images] if given.image_model else [])):
            killed, compared = map(sum, zip(*job(given, given.kills, log), strict=True))
            found[job.__name__] = {"killed": killed, "compared": compared}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
