"""The CTC head that ships: its own words, its text as a draft, its score as a guide, its pauses.

    python benchmarks/ctc.py --page docs/ctc.md       # CPU, needs espeak-ng, about 30 minutes

*Head*: word errors of its greedy text. *Draft*: passes and time of drafters, interleaved. *Guide*:
word errors by weight, on development clips, on the test clips, clean and noisy, and on recordings
of twelve sentences, and time per pass. *Cuts*: an hour of held-out sentences with pauses and
generated music between them, as one recording, turn by turn and sentence by sentence; memory while
it is transcribed.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pages import add_parts, measure_parts, publish, table, warn_if_busy
from peak_memory import now, peak, reset
from streaming import MODEL, RATE, Speech, held_out
from streaming_tables import percent

from mmdecode.asr import Transcriber
from mmdecode.decoder import Decoder
from mmdecode.draft.ctc import CTC
from mmdecode.draft.first_of import FirstOf
from mmdecode.draft.medusa import Medusa
from mmdecode.errors import run_script
from mmdecode.evaluation.speech.wer import wer
from mmdecode.evaluation.speed.stopwatch import machine
from mmdecode.guide.ctc import CTCScore
from mmdecode.models.ctc_head import CTCHead
from mmdecode.zoo import grammar, synthesis
from mmdecode.zoo.real_clips import real_clips
from mmdecode.zoo.speech import speech_test

HEAD = f"{MODEL}-ctc"
PARTS = ["head", "draft", "guide", "cuts"]
WEIGHTS = [0.0, 0.1, 0.2, 0.3, 0.5]


def score(speech: list[Speech], texts: Iterable[str]) -> dict[str, Any]:
    """Word error rate with its interval."""
    found = wer([one.text for one in speech], list(texts))
    return {"wer": found.value, "low": found.low, "high": found.high}


def sets() -> dict[str, list[Speech]]:
    """Test clips, clean and noisy, and clips of real speech."""
    return {
        "test clips": [Speech(clip.samples(), clip.text) for clip in speech_test()],
        "noisy test clips": [Speech(clip.samples("noisy"), clip.text) for clip in speech_test()],
        "real clips": [Speech(clip.samples(), clip.text) for clip in real_clips()],
    }


@torch.no_grad()
def head_texts(transcriber: Transcriber, head: CTCHead, speech: list[Speech]) -> list[str]:
    """Greedy texts of the head, window by window."""
    ours, found = transcriber.recognizer, []
    size = round(ours.window_s * RATE)
    for one in speech:
        waves = [one.wave[at : at + size] for at in range(0, len(one.wave), size)]
        states = ours.encode(ours.features(waves), [len(wave) / RATE for wave in waves]).states
        rows = head.greedy(*head.arguments(states, None, ours.model.get_input_embeddings()))
        found.append(" ".join(ours.tokenizer.decode(row) for row in rows))
    return found


def clocked(
    ways: Mapping[str, Transcriber], speech: list[Speech], rounds: int, batch: int
) -> Iterable[dict[str, Any]]:
    """Rows of drafters: passes, and the median of interleaved times."""
    waves = [one.wave for one in speech]
    times: dict[str, list[float]] = {name: [] for name in ways}
    texts, passes = {}, {}
    for number in range(rounds + 1):
        for name, way in ways.items():
            way.stats.reset()
            began = time.perf_counter()
            texts[name] = [found.text for found in way.stream(waves, batch_size=batch)]
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - began)
            passes[name] = way.stats.as_dict()["passes"]
    plain = texts["none"]
    for name in ways:
        ratios = [own / base for own, base in zip(times[name], times["none"], strict=True)]
        yield {
            "draft": name, "batch": batch, "passes": passes[name],
            "equal": texts[name] == plain, "seconds": float(np.median(times[name])),
            "ratio": float(np.median(ratios)), "least": min(ratios), "most": max(ratios),
        }  # fmt: skip


def an_hour(seconds: float, seed: int) -> tuple[np.ndarray, list[Speech], list[Speech]]:
    """A recording with pauses of 0.3 to 60 s and generated music; its turns, and its sentences.

    A turn has one to four sentences of a voice, and a quarter of a second before and after them.
    """
    rng, engine, parts, spoken = random.Random(seed), synthesis.Espeak(), [], []
    turns: list[tuple[int, int, str]] = []
    texts = iter(grammar.sentences(round(seconds), seed, "test"))
    length = 0
    while length < seconds * RATE:
        voice = synthesis.Voice.draw(rng, synthesis.TEST_VARIANTS)
        begin, first = sum(map(len, parts)), len(spoken)
        for _ in range(rng.randint(1, 4)):
            text = next(texts)
            wave = engine.speak(text, voice)
            spoken.append(Speech(np.pad(wave, RATE // 4), text))
            parts += [wave, np.zeros(round(rng.uniform(0.3, 0.8) * RATE), np.float32)]
        text = " ".join(one.text for one in spoken[first:])
        turns.append((begin, sum(map(len, parts)), text))
        gap_s = rng.choice((1.0, 3.0, 10.0, 10.0, 60.0))
        kind = rng.random()
        gap = np.zeros(round(gap_s * RATE), np.float32)
        if kind < 0.5:
            gap = 0.5 * synthesis.music(gap_s, rng)
        elif kind < 0.75:
            noise = np.random.default_rng(rng.randrange(2**31))
            gap = (0.01 * noise.standard_normal(len(gap))).astype(np.float32)
        parts.append(gap)
        length = sum(map(len, parts))
    wave, pad = np.concatenate(parts), RATE // 4
    cut = [Speech(wave[max(0, begin - pad) : end + pad], text) for begin, end, text in turns]
    return wave, cut, spoken


def joined(seconds: float, seed: int, sentences: int = 12) -> list[Speech]:
    """Recordings of several windows: sentences with half a second between them."""
    spoken, found = an_hour(seconds, seed)[2], []
    for first in range(0, len(spoken) - sentences + 1, sentences):
        group = spoken[first : first + sentences]
        wave = np.concatenate([one.wave for one in group])
        found.append(Speech(wave, " ".join(one.text for one in group)))
    return found


def long_recording(seconds: float, seed: int, head: str) -> Iterable[dict[str, Any]]:
    """Rows of ways to transcribe a long recording."""
    wave, turns, spoken = an_hour(seconds, seed)
    reference = [Speech(wave, " ".join(one.text for one in spoken))]
    plain = Transcriber.from_pretrained(MODEL, draft="medusa", device="cpu")
    for name, speech in {"sentence by sentence": spoken, "turn by turn": turns}.items():
        began = time.perf_counter()
        texts = [found.text for found in plain([one.wave for one in speech])]
        audio_s = sum(len(one.wave) for one in speech) / RATE
        yield {"way": name, "audio_s": audio_s, **score(speech, texts),
               "seconds": time.perf_counter() - began, "memory_mb": None}  # fmt: skip
    ways: dict[str, dict[str, Any]] = {
        "one recording, uncut": {},
        "cut at blanks": {"vad": f"ctc:head={head}"},
        "without pauses, by silero": {"vad": True},
    }
    for name, options in ways.items():
        way = plain.with_options(**options)
        reset(way.model.device)
        before, began = now(way.model.device), time.perf_counter()
        text = way(wave).text
        yield {
            "way": name, "audio_s": len(wave) / RATE, **score(reference, [text]),
            "seconds": time.perf_counter() - began, "memory_mb": peak(way.model.device) - before,
        }  # fmt: skip


def run(arguments: argparse.Namespace) -> Path:
    """Measures, and writes after each part."""
    torch.set_num_threads(1)
    facts = machine(torch.device("cpu"), "float32")
    facts |= {"command": "python benchmarks/ctc.py", "model": MODEL, "head": arguments.head}
    warn_if_busy(facts)
    head = CTCHead.from_pretrained(arguments.head)
    plain = Transcriber.from_pretrained(MODEL, device="cpu")
    untimed = plain.with_options(timestamps=False)
    result: dict[str, Any] = {"machine": facts}
    path = arguments.out / f"ctc-cpu-torch{torch.__version__.split('+')[0]}-{facts['date']}.json"

    def head_rows() -> Iterable[dict[str, Any]]:
        for name, speech in sets().items():
            yield {"set": name, "of": "head", **score(speech, head_texts(plain, head, speech))}
            texts = [found.text for found in plain([one.wave for one in speech])]
            yield {"set": name, "of": "decoder", **score(speech, texts)}

    def draft_rows() -> Iterable[dict[str, Any]]:
        tokenizer = plain.recognizer.tokenizer
        medusa: Callable[[], Any] = lambda: Medusa.from_pretrained(f"{MODEL}-medusa")  # noqa: E731
        drafts = {
            "none": None,
            "medusa": medusa(),
            "ctc": CTC(head, tokenizer, rows=32),
            "ctc, then medusa": FirstOf(CTC(head, tokenizer, least=2, rows=32), medusa()),
        }
        ways = {
            name: untimed.with_options(Decoder(draft), timestamps=False)
            for name, draft in drafts.items()
        }
        for batch in (1, 4, 32):
            yield from clocked(ways, sets()["test clips"], arguments.rounds, batch)

    def guide_rows() -> Iterable[dict[str, Any]]:
        known = len(speech_test())
        test = sets()
        del test["real clips"]
        development = held_out(known + arguments.limit)[known:]
        noise = torch.Generator().manual_seed(3)
        noisy = [
            Speech(synthesis.add_noise(torch.from_numpy(one.wave), 3.0, noise).numpy(), one.text)
            for one in development
        ]
        recordings = joined(2400, 33)
        for weight in WEIGHTS:
            guide = CTCScore(head, weight) if weight else None
            way = plain.with_options(Decoder(guide=guide))
            named = {"development, noisy": noisy, **test, "twelve sentences": recordings}
            for name, speech in named.items():
                way.stats.reset()
                began = time.perf_counter()
                texts = [found.text for found in way([one.wave for one in speech])]
                spent = time.perf_counter() - began
                passes = way.stats.as_dict()["passes"]
                yield {"set": name, "weight": weight, **score(speech, texts),
                       "ms_per_pass": 1000 * spent / passes}  # fmt: skip

    parts: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {
        "head": head_rows,
        "draft": draft_rows,
        "guide": guide_rows,
        "cuts": lambda: long_recording(arguments.seconds, 32, arguments.head),
    }
    return measure_parts(arguments, path, result, parts)


def with_interval(row: Mapping[str, Any]) -> str:
    """A word error rate with its interval, which a single recording has none of."""
    if row["low"] == row["high"]:
        return percent(row["wer"])
    return f"{percent(row['wer'])} [{percent(row['low'])}, {percent(row['high'])}]"


def megabytes(value: float | None) -> str:
    """A size in megabytes."""
    return "" if value is None else f"{value:.0f} MB"


def tables(result: Mapping[str, Any], name: str) -> str:
    """Tables of the page, from the result file called ``name``."""
    facts = result["machine"]
    parts = [
        f"Written by `{facts['command']}` from `benchmarks/results/{name}`: {facts['model']} with "
        f"{facts['head']}, {facts['device']}, 1 thread, torch {facts['torch']}, transformers "
        f"{facts['transformers']}, {facts['date']}; load {facts['load_at_start']} at the start, "
        f"{facts['load_at_end']} at the end. WER with intervals of 95 %."
    ]
    if "head" in result:
        rows = [[row["set"], row["of"], with_interval(row)] for row in result["head"]]
        parts += [
            "**Text of the head and of the decoder**",
            table(["clips", "text of", "WER"], rows),
        ]
    if "draft" in result:
        rows = [
            [
                row["draft"], str(row["batch"]), str(row["passes"]), f"{row['seconds']:.2f} s",
                f"{row['ratio']:.2f} ({row['least']:.2f} to {row['most']:.2f})",
                "yes" if row["equal"] else "no",
            ]
            for row in result["draft"]
        ]  # fmt: skip
        header = ["draft", "batch", "passes", "time", "of undrafted", "same texts"]
        title = "**As a draft**, test clips without timestamps, without a limit of rows"
        parts += [title, table(header, rows)]
    if "guide" in result:
        rows = [
            [row["set"], f"{row['weight']:g}", with_interval(row), f"{row['ms_per_pass']:.2f} ms"]
            for row in result["guide"]
        ]
        header = ["clips", "weight", "WER", "per pass"]
        parts += ["**As a guide**", table(header, rows)]
    if "cuts" in result:
        rows = [
            [
                row["way"],
                f"{row['audio_s']:.0f} s",
                with_interval(row),
                f"{row['seconds']:.0f} s",
                megabytes(row["memory_mb"]),
            ]
            for row in result["cuts"]
        ]  # fmt: skip
        header = ["", "audio", "WER", "time", "more memory"]
        parts += ["**A long recording with pauses and music**", table(header, rows)]
    return "\n\n".join(parts)


def main() -> None:
    """Measures, and shows the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--head", default=HEAD, help="folder or name of the head")
    parser.add_argument("--limit", type=int, default=60, help="development clips of the guide")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds of the drafts")
    parser.add_argument("--seconds", type=float, default=3600.0, help="length of the recording")
    add_parts(parser, PARTS)
    publish(parser, run, tables)


if __name__ == "__main__":
    run_script(main)
