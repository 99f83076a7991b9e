"""Real speech with a published recogniser: time, identity, memory and word errors of every way.

    python benchmarks/real_speech.py --page docs/real_speech.md     # CPU, about an hour
    python benchmarks/real_speech.py --quick                        # every part once, minutes
    python benchmarks/real_speech.py --parts short --threads 1

The model is ``moonshine:tiny-en`` (`pip install --no-deps moonshine-voice==0.1.0`); onnxruntime,
where it is installed, runs the graphs that its publisher ships. Recordings are `zoo:real-clips`,
with those that lie next to a checkout.

Single clips, batch 1 and 8: all ways decode the same states, one process, interleaved item by item,
medians over repeats. ``generate`` runs twice, and no ratio is known better than that control. Ids
are compared with those that plain ``generate`` gives of each recording alone; int8 ways read states
of their own encoder, and those with a draft are compared with the one without as well. A draft that
remembers begins again with each clip, or its name says that it does not.

Recordings of 1, 5 and 30 minutes, made of the clips (`recordings`): all from samples to tokens or
text. ``generate`` and onnxruntime have no loop over windows: they are given the windows that our
`Transcriber` cut, one after another. The pipeline cuts pieces of 30 s itself and is greedy; by
itself it would search with five beams.

Memory: each way in a process of its own. The load of the machine is printed at the start and at the
end; close everything else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peak_memory
import torch
from pages import SECTION, parsed, warn_if_busy, with_section, write_page, write_result
from real_speech_tables import PIPELINE, bar_sentences, errors, tables
from real_ways import (
    RATE,
    UNDRAFTED,
    UNDRAFTED_INT8,
    Decoders,
    Drafted,
    Graphs,
    Pipeline,
    Rows,
    Subject,
    alone,
    clocked,
    drafts,
    encode,
    generate,
    has_graphs,
    ours,
    padded,
    version,
)
from recordings import joined

from mmdecode.asr import Transcriber
from mmdecode.asr.transcriber import make_options
from mmdecode.errors import IncompatibleError, MissingExtraError, OptionError, run_script
from mmdecode.evaluation.speed.stopwatch import Cost, interleaved, load, machine
from mmdecode.models.moonshine.wheel import assets
from mmdecode.runs.console import only_our_output
from mmdecode.zoo.real_clips import RealClip, all_clips

HERE = Path(__file__).parent
CPU = torch.device("cpu")
PARTS = ("short", "long", "memory")
GENERATE, AGAIN, PADDED = "generate", "generate again", "generate, padded batch"
ONNX = "onnxruntime, the publisher's int8"
INT8 = "torch int8"
"""Name of the encoder of our int8 ways."""
MOST = {UNDRAFTED_INT8: 1.0}
"""Bars: how many times as long as with the publisher's int8 graphs a token may take."""
ALL_DRAFTS_S = 300.0
"""Longest recording that every draft decodes, and the pipeline one by one."""
FEW = (UNDRAFTED, "lookup", UNDRAFTED_INT8, "lookup int8")


class Clips:
    """Single clips with their references: texts, and ids of plain ``generate``.

    Args:
        subject: The model.
        clips: The recordings.
    """

    def __init__(self, subject: Subject, clips: Sequence[RealClip]) -> None:
        self.subject = subject
        self.waves = [clip.samples() for clip in clips]
        self.texts = [clip.text for clip in clips]
        self.seconds = sum(map(len, self.waves)) / RATE

    @cached_property
    def truth(self) -> Rows:
        """Ids that plain ``generate`` gives for each clip alone."""
        return [alone(self.subject, wave)[0] for wave in self.waves]

    def word_errors(self, hypotheses: list[str]) -> dict[str, Any]:
        """Word errors of transcripts, in the order of the clips; ``None``: the extra is missing."""
        from mmdecode.evaluation.speech.wer import wer

        try:
            found = wer(self.texts, hypotheses, resamples=1)
        except MissingExtraError:
            return {"word_errors": None, "words": None}
        return {"word_errors": found.errors, "words": found.words}


def usable(
    subject: Subject, clips: Clips, chosen: list[str] | None
) -> tuple[dict[str, Decoders], dict[str, str]]:
    """Our ways that the model takes, tried on a clip, and why it does not take the others."""
    found, refused = {}, {}
    for name, way in chosen_of(drafts(subject), chosen).items():
        decoders = Decoders(subject, way)
        states = encode(decoders.subject, clips.waves[:1])
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                ours(decoders.subject, states, decoders.at(0, 0))
        except (IncompatibleError, OptionError) as error:
            refused[name] = str(error)
        else:
            messages = [str(one.message) for one in caught]
            failed = [one for one in messages if "could not be compiled" in one]
            if failed and way.compiled:
                refused[name] = textwrap.shorten(failed[0], 160, placeholder=" ...")
            else:
                found[name] = decoders
    return found, refused


def chosen_of(ways: dict[str, Drafted], chosen: list[str] | None) -> dict[str, Drafted]:
    """The selected ways, and what they are compared with; all by default."""
    if not chosen:
        return ways
    found = {n: way for n, way in ways.items() if any(n.startswith(wish) for wish in chosen)}
    bases = {UNDRAFTED} | ({UNDRAFTED_INT8} if any(way.int8 for way in found.values()) else set())
    return {name: way for name, way in ways.items() if name in found or name in bases}


def short_form(
    subject: Subject, clips: Clips, batch: int, repeats: int, mine: dict[str, Decoders]
) -> list[dict[str, Any]]:
    """Every way on single clips, so many at once; a row each."""
    waves = [clips.waves[at : at + batch] for at in range(0, len(clips.waves), batch)]
    subjects = {"torch": subject}
    if any(decoders.way.int8 for decoders in mine.values()):
        subjects[INT8] = subject.rounded
    encoders: dict[str, Callable[..., Any]] = {n: partial(encode, s) for n, s in subjects.items()}
    states = {name: [run(group) for group in waves] for name, run in encoders.items()}
    calls: dict[str, Callable[[int, int], Any]] = {}
    for name in (GENERATE, AGAIN):
        calls[name] = lambda item, repeat: generate(subject, states["torch"][item])
    for name, decoders in mine.items():
        decoders.begin_again()
        decoders.prepare(len(waves), repeats)

        def decode(item: int, repeat: int, of: Decoders = decoders) -> Rows:
            return ours(of.subject, states[encoder_of(of)][item], of.at(item, repeat))

        calls[name] = decode
    if has_graphs(subject.name):
        graphs = Graphs(assets() or Path(), subject.threads, subject.model)
        encoders[ONNX] = graphs.encode
        encoded = [graphs.encode(group) for group in waves]
        calls[ONNX] = lambda item, repeat: graphs.decode(encoded[item])
    if batch > 1:
        calls[PADDED] = lambda item, repeat: padded(subject, waves[item])
    pipe = Pipeline(subject)
    calls[PIPELINE] = lambda item, repeat: pipe(waves[item], batch)
    for name, call in calls.items():  # what is made at first use
        for item in range(len(waves) if name in mine and mine[name].way.compiled else 1):
            call(item, 0)
    for decoders in mine.values():
        decoders.begin_again()
        decoders.prepare(len(waves), repeats)
    timed = calls | {
        f"encoder {name}": lambda item, repeat, run=run: run(waves[item])
        for name, run in encoders.items()
    }
    spent, results = interleaved(timed, len(waves), repeats, CPU)
    median = {name: np.median(np.array(times), axis=0) for name, times in spent.items()}
    costs, rows = {}, []
    for name in calls:
        whole_only = name in (PADDED, PIPELINE)
        encoder = encoder_of(mine[name]) if name in mine else name
        encoder_s = float(median[f"encoder {encoder if encoder in encoders else 'torch'}"].sum())
        first = results[name][: len(waves)]
        row: dict[str, Any] = {
            "way": name,
            "batch": batch,
            "threads": subject.threads,
            "clips": len(clips.waves),
            "audio_s": round(clips.seconds, 2),
            "encoder_ms_per_audio_s": None,
            "ms_per_token": None,
            "over_generate": None,
            "tokens_per_pass": None,
        }
        if name == PIPELINE:
            texts = [text for group in first for text in group]
            row["identical"] = count_same(texts, [subject.text(ids) for ids in clips.truth])
            whole_s = float(median[name].sum())
        else:
            lines = [line for group in results[name] for line in group]  # of all repeats
            count = len(clips.truth)
            repeated = [lines[at : at + count] for at in range(0, len(lines), count)]
            row["identical"] = min(count_same(one, clips.truth) for one in repeated)
            texts = [subject.text(line) for line in repeated[0]]
            whole_s = float(median[name].sum()) + (0.0 if whole_only else encoder_s)
        if not whole_only:
            tokens = np.array([sum(len(line) + 1 for line in group) for group in first])
            costs[name] = Cost(median[name], tokens)
            row["encoder_ms_per_audio_s"] = round(1e3 * encoder_s / clips.seconds, 3)
            row["ms_per_token"] = round(1e3 * float(median[name].sum()) / int(tokens.sum()), 3)
            row["tokens"] = int(tokens.sum())
            row["over_generate"] = costs[name].over(costs[GENERATE])
        if name in mine:
            row["tokens_per_pass"] = round(mine[name].tokens_per_pass, 3)
            row["memory"] = mine[name].way.memory
            if mine[name].way.int8:
                lines, base = ([*chain(*results[n])] for n in (name, UNDRAFTED_INT8))
                row["as_undrafted"] = count_same(lines, base) // repeats
        row |= {"rtf": round(whole_s / clips.seconds, 5)} | clips.word_errors(texts)
        rows.append(row)
    for row in rows:
        if row["way"] in mine and ONNX in costs:
            row["times_onnxruntime"] = costs[ONNX].over(costs[row["way"]])
    return rows


def encoder_of(decoders: Decoders) -> str:
    """Name of the encoder whose states a way of ours reads."""
    return INT8 if decoders.way.int8 else "torch"


def count_same(found: Sequence[Any], truth: Sequence[Any]) -> int:
    """Number of rows that are equal to the expected ones."""
    return sum(mine == theirs for mine, theirs in zip(found, truth, strict=True))


def long_ways(
    subject: Subject, wave: np.ndarray, windows: list[np.ndarray], mine: dict[str, Decoders]
) -> dict[tuple[str, int], Callable[[int], Any]]:
    """Ways to transcribe a whole recording, by name and batch; each is given the repeat.

    Each gives ``result``, ids of all windows or a text, and ``encoder_s``.
    """
    found: dict[tuple[str, int], Callable[[int], Any]] = {}

    def by_windows(repeat: int) -> Any:
        return clocked(subject, lambda: [alone(subject, window)[0] for window in windows])

    found[GENERATE, 1] = by_windows
    for name, decoders in mine.items():
        for batch in (1, 8) if name in (UNDRAFTED, UNDRAFTED_INT8) else (1,):

            def transcribed(repeat: int, of: Decoders = decoders, batch: int = batch) -> Any:
                transcriber = transcriber_of(of.subject, of.at(0, repeat), batch)
                return clocked(of.subject, lambda: window_ids(transcriber(wave)))

            found[name, batch] = transcribed
    if has_graphs(subject.name):
        graphs = Graphs(assets() or Path(), subject.threads, subject.model)

        def int8(repeat: int) -> Any:
            return by_graphs(graphs, windows)

        found[ONNX, 1] = int8
    pipe = Pipeline(subject)
    for batch in (1, 8) if len(wave) <= ALL_DRAFTS_S * RATE else (8,):

        def piped(repeat: int, batch: int = batch) -> Any:
            return clocked(subject, lambda: pipe([wave], batch, cut=True))

        found[PIPELINE, batch] = piped
    return found


def by_graphs(graphs: Graphs, windows: list[np.ndarray]) -> Any:
    """Ids of windows by onnxruntime, and the seconds of its encoder."""
    encoder_s, ids = 0.0, []
    for window in windows:
        began = time.perf_counter()
        encoded = graphs.encode([window])
        encoder_s += time.perf_counter() - began
        ids += graphs.decode(encoded)
    return SimpleNamespace(result=ids, encoder_s=encoder_s)


def transcriber_of(subject: Subject, decoder: Any, batch: int) -> Transcriber:
    """Our `Transcriber` with a batch size."""
    options = make_options({"batch_size": batch})
    return Transcriber(subject.model, subject.processor, decoder, options)


def window_ids(transcript: Any) -> Rows:
    """Token ids of each window."""
    return [list(segment.tokens) for segment in transcript.segments]


def windows_of(subject: Subject, wave: np.ndarray) -> list[np.ndarray]:
    """The windows that our `Transcriber` cuts, as samples."""
    from mmdecode import Decoder

    found = transcriber_of(subject, Decoder(seed=0), 1)(wave)
    cut = [(round(one.start_s * RATE), round(one.end_s * RATE)) for one in found.segments]
    return [wave[start:end] for start, end in cut]


def long_form(
    subject: Subject, seconds: float, repeats: int, mine: dict[str, Decoders]
) -> dict[str, Any]:
    """Every way on one recording; a row each. Windows have too many lengths for compiled passes."""
    recording = joined(seconds)
    wave = recording.samples
    windows = windows_of(subject, wave)
    mine = {name: way for name, way in mine.items() if not way.way.compiled}
    if seconds > ALL_DRAFTS_S:
        mine = {name: way for name, way in mine.items() if name in FEW}
    ways = long_ways(subject, wave, windows, mine)
    calls = {
        f"{name}/{batch}": lambda item, repeat, run=run: run(repeat)
        for (name, batch), run in ways.items()
    }
    for decoders in mine.values():
        decoders.begin_again()
        decoders.prepare(1, repeats)
    spent, results = interleaved(calls, 1, repeats, CPU)
    truth = results[f"{GENERATE}/1"][0].result
    rows = []
    for name, batch in ways:
        key = f"{name}/{batch}"
        whole = statistics.median(repeat[0] for repeat in spent[key])
        encoder = statistics.median(one.encoder_s for one in results[key])
        row: dict[str, Any] = {
            "way": name,
            "batch": batch,
            "threads": subject.threads,
            "seconds": round(whole, 3),
            "rtf": round(whole / recording.seconds, 5),
            "encoder_ms_per_audio_s": round(1e3 * encoder / recording.seconds, 3),
            "identical": None,
            "ms_per_token": None,
            "tokens_per_pass": None,
        }
        if name != PIPELINE:
            found = [one.result for one in results[key]]
            tokens = sum(len(line) + 1 for line in found[0])
            row["ms_per_token"] = round(1e3 * (whole - encoder) / tokens, 3)
            row["tokens"] = tokens
            same = [count_same(one, truth) if len(one) == len(truth) else 0 for one in found]
            row["identical"] = min(same)
        if name in mine:
            row["tokens_per_pass"] = round(mine[name].tokens_per_pass, 3)
            row["memory"] = mine[name].way.memory
        rows.append(row)
    piped = [row["rtf"] for row in rows if row["way"] == PIPELINE]
    for row in rows:
        row["over_pipeline"] = round(row["rtf"] / min(piped), 3)
    return {
        "audio_s": round(recording.seconds, 1),
        "clips": len(recording.parts),
        "windows": len(truth),
        "rows": rows,
    }


# Memory


def child(subject: Subject, name: str, batches: list[int], seconds: float) -> dict[str, Any]:
    """Megabytes of one way: loaded, and the most above that over clips and over a recording."""
    waves = [clip.samples() for clip in all_clips()][: max(batches)]
    wave = joined(seconds).samples
    before = peak_memory.now(CPU)
    run, whole = memory_calls(subject, name)
    run(waves[:1])
    loaded = peak_memory.now(CPU)
    row: dict[str, Any] = {"way": name, "loaded_mb": round(loaded - before, 1), "peak_mb": {}}
    for batch in batches:
        peak_memory.reset(CPU)
        run(waves[:batch])
        row["peak_mb"][str(batch)] = round(peak_memory.peak(CPU) - loaded, 1)
    peak_memory.reset(CPU)
    whole(wave)
    row["recording_mb"] = round(peak_memory.peak(CPU) - loaded, 1)
    return row


def memory_calls(subject: Subject, name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What decodes clips at once, and what decodes a recording."""
    if name == ONNX:
        config = subject.settings
        graphs = Graphs(assets() or Path(), subject.threads, config)
        return (
            lambda waves: graphs.decode(graphs.encode(waves)),
            lambda wave: by_graphs(graphs, pieces_of(wave)),
        )
    if name == PIPELINE:
        pipe = Pipeline(subject)
        return lambda waves: pipe(waves, len(waves)), lambda wave: pipe([wave], 8, cut=True)
    if name == GENERATE:
        return (
            lambda waves: generate(subject, encode(subject, waves)),
            lambda wave: [alone(subject, piece) for piece in pieces_of(wave)],
        )
    decoders = Decoders(subject, drafts(subject)[name])
    own, decoder = decoders.subject, decoders.new()
    return (
        lambda waves: ours(own, encode(own, waves), decoder),
        lambda wave: transcriber_of(own, decoder, 8)(wave),
    )


def pieces_of(wave: np.ndarray) -> list[np.ndarray]:
    """Pieces of 30 s, for ways that have no loop over windows."""
    step = round(Pipeline.PIECE_S * RATE)
    return [wave[at : at + step] for at in range(0, len(wave), step)]


def memory(subject: Subject, batches: list[int], seconds: float) -> list[dict[str, Any]]:
    """Ways one after another, each in a process of its own; empty where it cannot be read."""
    if not peak_memory.STATUS.exists():
        print("\nmemory is left out: it is read from Linux's /proc")
        return []
    names = [GENERATE, UNDRAFTED, "lookup", "quantized", UNDRAFTED_INT8, "lookup int8", PIPELINE]
    names += [ONNX] * has_graphs(subject.name)
    rows = []
    print("\nmemory, each way in a process of its own", flush=True)
    for name in names:
        words = ["--child", name, "--model", subject.name, "--minutes", str(seconds / 60)]
        words += ["--batch-size", ",".join(map(str, batches)), "--threads", str(subject.threads)]
        command = [sys.executable, __file__, *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"  {rows[-1]}", flush=True)
    return rows


# All of it


def bars(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Targets of the benchmark, and whether they were met; for `real_speech_tables`."""
    found: list[dict[str, Any]] = []
    single = [row for row in result.get("short", []) if row["batch"] == 1]
    for row in single:
        if row["way"] == UNDRAFTED:
            value, low, high = row["over_generate"]
            found.append(
                {"bar": "undrafted over generate", "threads": row["threads"], "least": 1.3}
                | {"value": value, "low": low, "high": high, "held": value >= 1.3}
            )
    theirs = {row["threads"]: row for row in single if row["way"] == ONNX}
    for row in single:
        if row["way"] in MOST:
            most, peer = MOST[row["way"]], theirs.get(row["threads"])
            value, low, high = row.get("times_onnxruntime") or [None] * 3
            found.append(
                {"bar": "int8 over the publisher's", "way": row["way"], "threads": row["threads"]}
                | {"most": most, "value": value, "low": low, "high": high}
                | {"held": None if value is None else value <= most, "wrong": errors(row)}
                | {"their_wrong": errors(peer) if peer else ""}
            )
    for recording in result.get("long", []):
        if recording["minutes"] != 30:
            continue
        own = [row for row in recording["rows"] if row["way"] == UNDRAFTED]
        best = min(own, key=lambda row: row["rtf"])
        found.append(
            {"bar": "real-time factor over the pipeline's", "threads": best["threads"]}
            | {"most": 1.0, "value": best["over_pipeline"], "batch": best["batch"]}
            | {"held": best["over_pipeline"] <= 1.0}
        )
    return found


def shown(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    ms, over, length = row["ms_per_token"], row.get("over_generate"), row["tokens_per_pass"]
    return (
        f"  {row['way']:36s} batch {row['batch']}  "
        + (f"{ms:7.2f} ms/token  " if ms is not None else " " * 18)
        + (f"x{over[0]:.2f} [{over[1]:.2f}, {over[2]:.2f}]  " if over else "")
        + f"RTF {row['rtf']:.4f}  identical {row['identical']}"
        + (f"  {length:.2f} tokens/pass" if length else "")
    )


def run(arguments: argparse.Namespace) -> Path:
    """Measures everything and writes one file."""
    threads = [int(n) for n in arguments.threads.split(",")]
    batches = [int(n) for n in arguments.batch_size.split(",")]
    subject = Subject(arguments.model, max(threads), heads=arguments.heads)
    torch.set_num_threads(max(threads))
    kept = all_clips()[: arguments.limit]
    clips = Clips(subject, kept)
    parameters = sum(p.numel() for p in subject.model.parameters())
    facts = machine(CPU, "float32") | {
        "command": "python benchmarks/real_speech.py",
        "model": arguments.model,
        "parameters": parameters,
        "threads": threads,
        "repeats": arguments.repeats,
        "clips": len(kept),
        "audio_s": round(clips.seconds, 1),
        "reference_words": sum(len(text.split()) for text in clips.texts),
        "onnxruntime": version("onnxruntime") if has_graphs(arguments.model) else None,
        "limited": arguments.limit is not None or arguments.quick,
    }
    print(json.dumps(facts, indent=2))
    warn_if_busy(facts)
    if not has_graphs(arguments.model):
        print(f"{ONNX}: left out; it needs onnxruntime and the installed wheel moonshine-voice")
    mine, refused = usable(subject, clips, arguments.ways)
    for name, why in refused.items():
        print(f"{name}: left out; {why}")
    result: dict[str, Any] = {"machine": facts, "refused": refused}
    if "short" in arguments.parts:
        result["short"] = []
        for count in threads:
            subject.threads = count
            torch.set_num_threads(count)
            for batch in batches:
                print(f"\nsingle clips, {count} threads, batch {batch}", flush=True)
                rows = short_form(subject, clips, batch, arguments.repeats, mine)
                print("\n".join(map(shown, rows)), flush=True)
                result["short"] += rows
    subject.threads = max(threads)
    torch.set_num_threads(subject.threads)
    if "long" in arguments.parts:
        result["long"] = []
        for minutes in arguments.minutes:
            print(f"\n{minutes:g} minutes, {subject.threads} threads", flush=True)
            repeats = max(1, arguments.repeats - (minutes >= 5))
            found = long_form(subject, 60 * minutes, repeats, mine)
            print("\n".join(map(shown, found["rows"])), flush=True)
            result["long"].append({"minutes": minutes, "repeats": repeats} | found)
    if "memory" in arguments.parts:
        seconds = 60 * min(5.0, max(arguments.minutes))
        result["memory"] = {"seconds": seconds, "rows": memory(subject, batches, seconds)}
    result["bars"] = bars(result)
    facts["load_at_end"] = load()
    name = f"{with_section('real-speech', arguments.section)}-cpu"
    path = arguments.out / f"{name}-torch{facts['torch'].split('+')[0]}-{facts['date']}.json"
    write_result(path, result)
    return path


def main() -> None:
    """Command line: measures and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="moonshine:tiny-en")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is measured")
    parser.add_argument("--ways", nargs="+", help="drafts whose names begin so; the peers always")
    parser.add_argument("--heads", type=Path, nargs="+", default=[], help="Medusa or CTC heads")
    parser.add_argument("--batch-size", default="1,8")
    parser.add_argument("--threads", default="1,2", help="of single clips; recordings: the most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=int, help="only the first clips")
    parser.add_argument("--minutes", type=float, nargs="+", default=[1, 5, 30])
    parser.add_argument("--quick", action="store_true", help="a smoke test of all parts")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--page", type=Path, help="write the tables into this page")
    parser.add_argument("--section", default=SECTION, help="between these marks of the page")
    parser.add_argument("--result", type=Path, help="show this earlier result, measure nothing")
    arguments = parsed(parser)
    only_our_output()
    if arguments.child:
        threads = int(arguments.threads)
        torch.set_num_threads(threads)
        batches = [int(n) for n in arguments.batch_size.split(",")]
        seconds = 60 * arguments.minutes[0]
        print(
            json.dumps(child(Subject(arguments.model, threads), arguments.child, batches, seconds))
        )
        return
    if arguments.quick:
        small = {"threads": "1", "batch_size": "1,2", "repeats": 1, "minutes": [0.2]}
        vars(arguments).update(small | {"limit": arguments.limit or 2})
        arguments.ways = arguments.ways or ["lookup", "recycling, 8 nodes, table kept"]
    path = arguments.result or run(arguments)
    result = json.loads(path.read_text())
    print("\n" + "\n".join(bar_sentences(result["bars"])))
    print(f"\n{tables(result, path.name)}\n\nwritten: {path}")
    if arguments.page:
        write_page(arguments.page, tables(result, path.name), arguments.section)


if __name__ == "__main__":
    run_script(main)
