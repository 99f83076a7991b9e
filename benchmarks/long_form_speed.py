"""Whole recordings: our `Transcriber`, transformers' long form, and CTranslate2 in our window loop.

A part of asr_speed.py. Recordings are the short test clips, joined in random orders; all engines
get the same samples and make their own features, and time is everything from samples to tokens.
CTranslate2 has no window loop of its own (faster-whisper has, but assumes windows of 30 seconds):
it encodes and decodes the windows that our loop cuts for it. Identity is the share of recordings
whose tokens are those of transformers, one recording at a time.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import peers
import torch
from peers import Checkpoint
from transformers import WhisperProcessor

from mmdecode.asr import TranscribeOptions, Transcriber
from mmdecode.decoder import Decoder
from mmdecode.evaluation.speed.stopwatch import interleaved
from mmdecode.runs.conditions import now
from mmdecode.zoo.speech import speech_test

RATE = 16_000
Tokens = list[list[int]]
FIRST = "generate"


def recordings(count: int, seconds: float) -> list[tuple[np.ndarray, str]]:
    """Samples and text of ``count`` recordings of at least ``seconds``."""
    order, clips, found = random.Random(0), speech_test(), []
    for _ in range(count):
        chosen, length = [], 0.0
        for clip in order.sample(clips, len(clips)):
            if length >= seconds:
                break
            chosen.append(clip)
            length += clip.duration_s
        waves = [clip.samples() for clip in chosen]
        found.append((np.concatenate(waves), " ".join(clip.text for clip in chosen)))
    return found


def stock(checkpoint: Checkpoint, waves: list[np.ndarray], batch: int) -> Tokens:
    """transformers' long form, ``batch`` recordings at a time."""
    extractor, model = checkpoint.extractor, checkpoint.model
    tokens = []
    for start in range(0, len(waves), batch):
        inputs = extractor(
            waves[start : start + batch],
            sampling_rate=RATE,
            return_tensors="pt",
            truncation=False,
            padding="longest",
            return_attention_mask=True,
        ).to(checkpoint.device, checkpoint.dtype)
        output = model.generate(
            **inputs,
            return_timestamps=True,
            return_segments=True,
            condition_on_prev_tokens=False,
            time_precision=extractor.chunk_length / model.config.max_source_positions,
            time_precision_features=extractor.hop_length / extractor.sampling_rate,
        )
        for segments in output["segments"]:
            tokens.append([t for segment in segments for t in segment["tokens"].tolist()])
    return tokens


def ours(transcriber: Transcriber, waves: list[np.ndarray]) -> Tokens:
    """Our `Transcriber`, with any decoder of its windows."""
    return [found.tokens for found in transcriber(waves, on_error="raise")]


def engines(
    checkpoint: Checkpoint, chosen: list[str], waves: list[np.ndarray], batches: tuple[int, ...]
) -> dict[tuple[str, int], tuple[Callable[[], Tokens], Any]]:
    """Engines and their encoders, by name and batch size."""
    processor = WhisperProcessor.from_pretrained(checkpoint.path, trust_remote_code=False)
    model = checkpoint.model
    parts: dict[str, tuple[Any, Callable[[], Decoder]]] = {
        "undrafted": (model, Decoder),
        "medusa": (model, lambda: Decoder(peers.medusa(checkpoint))),
        "first_of": (model, lambda: Decoder(peers.tail_first(checkpoint))),
    }
    if peers.has_ctranslate2(checkpoint.device):
        for name, kind in peers.CTRANSLATE2.items():
            hybrid, decoder = peers.long_form_parts(checkpoint, kind)
            parts[name] = (hybrid, lambda decoder=decoder: decoder)
    found: dict[tuple[str, int], tuple[Callable[[], Tokens], Any]] = {}
    for batch in batches:
        call = partial(stock, checkpoint, waves, batch)
        found[FIRST, batch] = (call, model.get_encoder())
        for name, (network, decoder) in parts.items():
            if name not in chosen:
                continue
            options = TranscribeOptions(batch_size=batch)
            transcriber = Transcriber(network, processor, decoder(), options)
            found[name, batch] = (partial(ours, transcriber, waves), network.get_encoder())
    return found


@contextmanager
def clock(module: torch.nn.Module) -> Iterator[list[float]]:
    """Seconds of each call of a module."""
    spent: list[float] = []
    begun = 0.0

    def begin(*_: Any) -> None:
        nonlocal begun
        begun = now(next(module.parameters()).device)

    def end(*_: Any) -> None:
        spent.append(now(next(module.parameters()).device) - begun)

    hooks = [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    try:
        yield spent
    finally:
        for hook in hooks:
            hook.remove()


def measure(
    checkpoint: Checkpoint,
    chosen: list[str],
    threads: list[int],
    count: int,
    seconds: float,
    repeats: int,
) -> dict[str, Any]:
    """Every engine on all recordings; a row each, at its best number of threads."""
    pairs = recordings(count, seconds)
    waves, texts = [wave for wave, _ in pairs], [text for _, text in pairs]
    audio_s = sum(map(len, waves)) / RATE
    print(f"\nlong form: {count} recordings, {audio_s:.0f} s", flush=True)
    rows: dict[str, dict[str, Any]] = {}
    for number in threads:
        torch.set_num_threads(number)
        checkpoint.threads = number
        found = engines(checkpoint, chosen, waves, (1, count))
        shares = {}
        for (name, batch), (call, encoder) in found.items():  # a warm-up as well
            with clock(encoder) as spent:
                began = time.perf_counter()
                call()
                shares[name, batch] = sum(spent) / (time.perf_counter() - began)
        calls = {
            str(key): lambda item, repeat, call=call: call() for key, (call, _) in found.items()
        }
        taken, results = interleaved(calls, 1, repeats, checkpoint.device)
        truth = results[str((FIRST, 1))][0]
        for key in found:
            name, batch = key
            tokens = results[str(key)][0]
            same = [mine == theirs for mine, theirs in zip(tokens, truth, strict=True)]
            exact = name not in peers.CTRANSLATE2 and name != FIRST
            whole = statistics.median(repeat[0] for repeat in taken[str(key)])
            timed = all(same) or not exact
            row = {
                "engine": name,
                "batch": batch,
                "threads": number,
                "exact": exact,
                "identical_share": round(sum(same) / len(same), 4),
                "seconds": round(whole, 3) if timed else None,
                "rtfx": round(audio_s / whole, 2) if timed else None,
                "encoder_share": round(shares[key], 3),
                "tokens": sum(map(len, tokens)),
                "wer": peers.word_errors(checkpoint, texts, tokens),
            }
            other = rows.get(str(key))
            if other is None or (timed and (not other["rtfx"] or row["rtfx"] > other["rtfx"])):
                rows[str(key)] = row
    compare([*rows.values()])
    return {"recordings": count, "audio_s": round(audio_s, 1), "rows": [*rows.values()]}


def compare(rows: list[dict[str, Any]]) -> None:
    """Prints all, and writes what each engine gains over those of its batch into its row."""
    speeds = {(row["engine"], row["batch"]): row["rtfx"] for row in rows}
    for row in rows:
        for other in (FIRST, "undrafted"):
            base = speeds.get((other, row["batch"]))
            row[f"over_{other}"] = round(row["rtfx"] / base, 3) if base and row["rtfx"] else None
        shown = f"RTFx {row['rtfx']:7.1f}" if row["rtfx"] else "tokens differ: no time is reported"
        print(
            f"  {row['engine']:24s} batch {row['batch']}  {shown}  {row['threads']} threads  "
            f"{100 * row['identical_share']:.0f} % identical"
        )
