"""Streaming: word errors against latency of commit policies, their cost, and how many streams fit.

    python benchmarks/streaming.py --page docs/streaming.md   # CPU, needs espeak-ng, about an hour

*Curves*: the shipped clips and more clips of held-out sentences in held-out voices, each a stream
of a pool. *Costs*: some of the clips, one stream at a time. *Capacity*: streams whose audio comes
by a clock, from random moments on; half of them by Moonshine, where it is installed. The clock is
simulated: it goes on by the time that each round really takes, and skips what nobody computes.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pages import parsed, warn_if_busy, write_page, write_result
from rounding import add_quantize, form_of
from streaming_tables import draw, tables

from mmdecode.asr import Transcriber
from mmdecode.asr.streaming import PooledStream, Stream, StreamPool
from mmdecode.asr.streaming.commits import bare
from mmdecode.errors import MMDecodeError, run_script
from mmdecode.evaluation.speech.wer import wer
from mmdecode.evaluation.speed.latency import StreamMeter, StreamReport, percentile
from mmdecode.evaluation.speed.stopwatch import load, machine
from mmdecode.runs.console import only_our_output
from mmdecode.zoo import grammar, synthesis
from mmdecode.zoo.real_clips import real_clips
from mmdecode.zoo.speech import speech_test

HERE = Path(__file__).parent
MODEL, REAL, RATE = "zoo:whisper-synth", "moonshine:tiny-en", 16_000
CURVES = {
    0.25: ["alignatt:s=0.8", "alignatt:s=1.2"],
    0.5: [
        *(f"agreement:n={n}" for n in (2, 3, 4)),
        *(f"hold:n={n}" for n in (3, 6)),
        *(f"delay:s={s}" for s in (0.8, 1.2, 1.6)),
        *(f"alignatt:s={s}" for s in (0.5, 0.8, 1.0, 1.2, 1.6)),
        *(f"ending:p={p}" for p in (0.9, 0.99)),
        *(f"adaptive-wait:most={most}" for most in (4, 6)),
        "wait:k=4",
    ],
    1.0: ["agreement:n=2", "agreement:n=3", "alignatt:s=0.8"],
    2.0: ["agreement:n=2"],
}
"""Policies by the seconds of a step."""
REAL_CURVES = ["agreement:n=2", "agreement:n=3", "hold:n=3", "alignatt:s=0.5", "ending:p=0.9"]
COSTS = [
    ("agreement", None, False),
    ("agreement", None, True),
    ("agreement", "medusa", False),
    ("agreement", "medusa", True),
    ("alignatt:s=1.2", "medusa", True),
    ("delay:s=1.2", "medusa", True),
]
"""Policy, drafter, and whether the last hypothesis drafts; steps of half a second."""
PARTS = ["curves", "costs", "capacity"]
"""Times count in the last two only."""
LONG = [("agreement", 1.0), ("agreement:n=3", 0.5), ("alignatt:s=1.2", 0.5), ("hold:n=6", 1.0)]
"""Policy and step on the recording of three minutes."""


@dataclass(frozen=True)
class Speech:
    """A recording with its reference text."""

    wave: np.ndarray
    text: str


def held_out(count: int, seed: int = 29) -> list[Speech]:
    """The shipped clips, and more that are made in the same way, up to a number."""
    found = [Speech(clip.samples(), clip.text) for clip in speech_test()][:count]
    if len(found) == count:
        return found  # without espeak-ng
    known = {text for one in found for text in one.text.split(". ")}
    rng, engine = random.Random(seed), synthesis.Espeak()
    texts = iter(text for text in grammar.sentences(40 * count, seed, "test") if text not in known)

    def pause(low: float, high: float) -> np.ndarray:
        return np.zeros(round(rng.uniform(low, high) * RATE), np.float32)

    while len(found) < count:
        variant = synthesis.TEST_VARIANTS[len(found) % len(synthesis.TEST_VARIANTS)]
        voice = synthesis.Voice.draw(rng, (variant,))
        own = [next(texts) for _ in range(rng.choice((1, 1, 2, 1, 3)))]
        parts = [pause(0.1, 0.4)]
        for text in own:
            parts += [engine.speak(text, voice), pause(0.3, 0.7)]
        found.append(Speech(np.concatenate(parts), " ".join(own)))
    return found


def mean(values: list[float | None]) -> float | None:
    """Mean of the known values; ``None``: there are none."""
    known = [value for value in values if value is not None]
    return round(float(np.mean(known)), 3) if known else None


def row_of(
    speech: list[Speech],
    texts: list[str],
    reports: list[StreamReport],
    lags: list[float],
    **known: Any,
) -> dict[str, Any]:
    """A row of a table: word errors, means over recordings, and lags of all their words."""
    score = wer([one.text for one in speech], texts)
    found: dict[str, Any] = known | {"wer": round(score.value, 6)}
    for name in ("al", "laal", "dal", "ap"):
        found[name] = mean([getattr(report.received, name) for report in reports])
    found |= {"lag_s": mean(lags), "lag_p95_s": percentile(lags, 0.95)}
    found["changed"] = mean([report.provisional_change_rate for report in reports])
    return found | {"texts": texts}


Times = list[tuple[str, float]]
"""Words without case and punctuation, each with a time in seconds."""


def delays(committed: Times, ends: Times) -> list[float]:
    """Seconds from the end of each word to its commit, where the word is recognised."""
    mine, theirs = [word for word, _ in committed], [word for word, _ in ends]
    matched = difflib.SequenceMatcher(None, mine, theirs, autojunk=False).get_matching_blocks()
    return [
        committed[block.a + at][1] - ends[block.b + at][1]
        for block in matched
        for at in range(block.size)
    ]


def pooled(
    transcriber: Transcriber,
    policy: str,
    step: float,
    speech: list[Speech],
    ends: list[Times] | None = None,
) -> dict[str, Any]:
    """Row of a policy: all recordings at once, as fast as they can be decoded."""
    pool = StreamPool(transcriber, most_waiting_s=1e9)
    streams = [pool.open(policy, step) for _ in speech]
    meters, texts = {one: StreamMeter() for one in streams}, dict.fromkeys(streams, "")
    committed: dict[PooledStream, Times] = {one: [] for one in streams}
    for stream, one in zip(streams, speech, strict=True):
        stream.feed(one.wave)
        stream.finish()
    for stream, update in pool.drain():
        if update.error is not None:
            raise MMDecodeError(update.error)
        meters[stream].add(update)
        texts[stream] += update.text
        committed[stream] += [(bare(word), update.audio_s) for word in update.committed]
    reports = [
        meters[stream].report(len(one.text.split()))
        for stream, one in zip(streams, speech, strict=True)
    ]
    found = [texts[stream].strip() for stream in streams]
    pairs = zip(streams, ends or [[]] * len(streams), strict=True)
    lags = [lag for stream, own in pairs for lag in delays(committed[stream], own)]
    return row_of(speech, found, reports, lags, policy=policy, step_s=step)


def alone(stream: Stream, one: Speech) -> tuple[str, StreamReport]:
    """Text and latency of one recording that comes in blocks of a tenth of a second."""
    meter, text, size = StreamMeter(), "", RATE // 10
    for at in range(0, len(one.wave), size):
        for update in stream.feed(one.wave[at : at + size]):
            meter.add(update)
            text += update.text
    update = stream.finish()
    meter.add(update)
    return (text + update.text).strip(), meter.report(len(one.text.split()))


def cost(
    transcriber: Transcriber, policy: str, step: float, redraft: bool, speech: list[Speech]
) -> dict[str, Any]:
    """Row of a way of streaming, with its passes and its time."""
    streams = [Stream(transcriber, policy, step, redraft=redraft) for _ in speech]
    before = transcriber.stats.as_dict()["passes"]
    began = time.perf_counter()
    found = [alone(stream, one) for stream, one in zip(streams, speech, strict=True)]
    spent = time.perf_counter() - began
    row = row_of(
        speech, [text for text, _ in found], [report for _, report in found], [],
        policy=policy, step_s=step, redraft=redraft,
    )  # fmt: skip
    seconds = sum(len(one.wave) for one in speech) / RATE
    passes = transcriber.stats.as_dict()["passes"] - before
    return row | {"passes": passes, "seconds_per_second": round(spent / seconds, 3)}


# ---- capacity


@dataclass
class Speaker:
    """A stream's audio, which comes by a clock.

    Attributes:
        wave: Its samples.
        ends: Words without case and punctuation, and when each ends, in seconds.
        start_s: Time at which it begins.
        fed: Samples that have come.
        words: Committed words, and when they were committed, in seconds from its beginning.
    """

    wave: np.ndarray
    ends: Times
    start_s: float
    fed: int = 0
    words: Times = field(default_factory=list)


def speaker(speech: list[Speech], ends_of: list[Times], seconds: float, seed: int) -> Speaker:
    """A speaker who says recordings one after the other, from a random moment on."""
    rng = random.Random(seed)
    parts: list[np.ndarray] = []
    ends: Times = []
    while sum(map(len, parts)) < seconds * RATE:
        number = rng.randrange(len(speech))
        begin_s = sum(map(len, parts)) / RATE
        ends += [(word, begin_s + end_s) for word, end_s in ends_of[number]]
        parts.append(speech[number].wave)
    wave = np.concatenate(parts)[: round(seconds * RATE)]
    return Speaker(wave, [one for one in ends if one[1] < seconds], rng.uniform(0, 1))


def timed(timer: Transcriber, one: Speech) -> Times:
    """Words of a recording, transcribed as a whole, and when each ends."""
    words = [word for segment in timer(one.wave).segments for word in segment.words or ()]
    return [(bare(word.text), word.end_s) for word in words]


def capacity(
    transcribers: list[Transcriber], speakers: list[Speaker], policy: str, step: float
) -> dict[str, Any]:
    """Delays of streams that are fed by a clock, in turn by each of some models."""
    now = 0.0
    pools = [StreamPool(one, most_waiting_s=1e9, clock=lambda: now) for one in transcribers]
    streams: dict[PooledStream, Speaker] = {}
    for number, one in enumerate(speakers):
        streams[pools[number % len(pools)].open(policy, step)] = one
    waiting, spent, rounds = 0.0, 0.0, 0
    while any(map(len, pools)):
        for stream, one in streams.items():
            if stream.ended or one.fed == len(one.wave):
                continue
            arrived = min(len(one.wave), max(0, int((now - one.start_s) * RATE)))
            stream.feed(one.wave[one.fed : arrived])
            one.fed = arrived
            if arrived == len(one.wave):
                stream.finish()
        waiting = max(waiting, *(pool.delay_s for pool in pools))
        updates = []
        for pool in pools:
            began = time.perf_counter()
            taken = pool.round()
            seconds = time.perf_counter() - began
            if taken:
                rounds, spent, now = rounds + 1, spent + seconds, now + seconds
            updates += [(stream, update, now) for stream, update in taken]
        for stream, update, then in updates:
            one = streams[stream]
            one.words += [(bare(word), then - one.start_s) for word in update.committed]
        if not updates:
            now += 0.01
    found = [delay for one in streams.values() for delay in delays(one.words, one.ends)]
    words = sum(len(one.ends) for one in streams.values())
    audio_s = sum(len(one.wave) for one in speakers) / RATE
    return {
        "streams": len(speakers), "policy": policy, "step_s": step, "words": words,
        "matched": len(found), "delay_s": mean(found),
        "delay_p95_s": percentile(found, 0.95), "waiting_s": round(waiting, 2),
        "rounds": rounds, "seconds_per_second": round(spent / audio_s, 4),
        "audio_s": round(audio_s, 1), "wall_s": round(now, 1),
    }  # fmt: skip


# ---- all of it


def moonshine(arguments: argparse.Namespace) -> Transcriber | None:
    """The published recogniser, if it is installed."""
    try:
        return Transcriber.from_pretrained(REAL, device="cpu", quantize=arguments.quantize)
    except MMDecodeError as error:
        print(f"going on without {REAL}: {error}")
        return None


def run(arguments: argparse.Namespace) -> Path:
    """Measures everything and writes one file."""
    torch.set_num_threads(arguments.threads)
    facts = machine(torch.device("cpu"), arguments.quantize or "float32")
    facts |= {
        "command": "python benchmarks/streaming.py",
        "model": MODEL,
        "threads": arguments.threads,
    }
    print(json.dumps(facts, indent=2))
    warn_if_busy(facts)
    ways = {
        draft: Transcriber.from_pretrained(
            MODEL, draft=draft, device="cpu", quantize=arguments.quantize
        )
        for draft in (None, "medusa")
    }
    clips, real = held_out(arguments.limit), moonshine(arguments)
    timer = ways[None].with_options(word_timestamps="ctc")
    ends = [timed(timer, one) for one in clips]
    result: dict[str, Any] = {}
    if arguments.onto:
        result |= json.loads(arguments.onto.read_text())
    result |= {"machine": facts, "real_model": REAL if real else None}

    def note(kind: str, row: dict[str, Any]) -> None:
        print(kind, {key: value for key, value in row.items() if key != "texts"}, flush=True)
        result[kind].append(row)

    if "curves" in arguments.parts:
        result |= {"curves": [], "real": [], "clips": len(clips)}
        result["seconds"] = round(sum(len(one.wave) for one in clips) / RATE, 1)
        result["offline_wer"] = offline(ways[None], clips)
        for step, policies in CURVES.items():
            for policy in policies:
                note("curves", pooled(ways["medusa"], policy, step, clips, ends))
        spoken = [Speech(clip.samples(), clip.text) for clip in real_clips()]
        if real is not None:
            result["real_offline_wer"] = offline(real, spoken)
            for policy in REAL_CURVES:
                note("real", pooled(real, policy, 0.5, spoken))
    if "costs" in arguments.parts:
        few = clips[: arguments.few]
        [recording] = [Speech(one.samples(), one.text) for one in speech_test(long=True)]
        result |= {"costs": [], "long": [], "few": len(few)}
        result["long_offline_wer"] = offline(ways[None], [recording])
        for policy, draft, redraft in COSTS:
            note("costs", {"draft": draft} | cost(ways[draft], policy, 0.5, redraft, few))
        for policy, step in LONG:
            row = cost(ways["medusa"], policy, step, True, [recording])
            note("long", {"draft": "medusa"} | row)
    if "capacity" in arguments.parts:
        models = [ways["medusa"], *([real] if real else [])]
        result["capacity"] = []
        make = functools.partial(speaker, clips, ends, arguments.seconds)
        for count in arguments.streams:
            speakers = [make(seed) for seed in range(count)]
            note("capacity", capacity(models[:count], speakers, "agreement", 1.0))
    facts["load_at_end"] = load()
    form = form_of("cpu", quantize=arguments.quantize)
    name = f"streaming-{form}-torch{torch.__version__.split('+')[0]}-{facts['date']}.json"
    write_result(arguments.out / name, result, indent=None)
    return arguments.out / name


def offline(transcriber: Transcriber, speech: list[Speech]) -> float:
    """Word error rate of the recordings, each transcribed as a whole."""
    found = [transcript.text for transcript in transcriber([one.wave for one in speech])]
    return round(wer([one.text for one in speech], found).value, 6)


def main() -> None:
    """Measures, and shows the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit", type=int, default=100, help="clips of the curves")
    parser.add_argument("--few", type=int, default=14, help="clips of the costs")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=30.0, help="audio of each of the streams")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--onto", type=Path, help="earlier result, whose other parts stay")
    add_quantize(parser)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--page", type=Path, help="write tables and figure into this page")
    parser.add_argument("--result", type=Path, help="show this earlier result, measure nothing")
    arguments = parsed(parser)
    only_our_output()
    path = arguments.result or run(arguments)
    result = json.loads(path.read_text())
    shown = tables(result, path.name)
    print(f"\n{shown}\n\nwritten: {path}")
    if arguments.page:
        write_page(arguments.page, shown)
        if "curves" in result:
            draw(result, arguments.page.with_suffix(".svg"))


if __name__ == "__main__":
    run_script(main)
