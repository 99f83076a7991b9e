"""Transcripts by another package, for ``mmdecode evaluate wer --hypotheses``.

    python benchmarks/real/run_peer.py faster-whisper --model large-v3 \
        --data data/librispeech-clean/manifest.jsonl --report faster-whisper.jsonl

One line per recording, when it is done: its id, text and length, and the seconds it took. A
batch's seconds are divided among its recordings, as the Open ASR leaderboard does; files are read
and resampled beforehand, as by ``mmdecode evaluate wer``. The first recordings are transcribed once
before the clock runs. All packages decode greedily unless ``--beam-size`` is given, and without
thresholds and temperature fallback unless ``--fallback`` is; English, with timestamps, no
conditioning on previous text. Voice activity is detected only by faster-whisper's
batches of windows (``--batch-size`` above 1), which are cut by it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mmdecode.asr.audio.reading import blocks
from mmdecode.asr.output.manifest import Entry, opened, read_manifest
from mmdecode.errors import run_script
from mmdecode.runs.files import append_line, open_append, refuse_foreign, write_file

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
RATE = 16_000
Transcribe = Callable[[list[np.ndarray]], list[str]]
"""Samples of one batch, at `RATE`, to their texts."""


def gates(fallback: bool, logprob: str) -> dict[str, Any]:
    """Temperatures and thresholds; without fallback no window is redone or skipped.

    Args:
        fallback: Whether the package's own thresholds hold.
        logprob: The package's name of the log-probability threshold.
    """
    if fallback:
        return {"temperature": TEMPERATURES}
    off = dict.fromkeys(("compression_ratio_threshold", "no_speech_threshold", logprob))
    return {"temperature": 0.0, **off}


def faster_whisper(arguments: argparse.Namespace) -> Transcribe:
    """SYSTRAN/faster-whisper; a batch size above 1 batches the windows of one recording."""
    from faster_whisper import BatchedInferencePipeline, WhisperModel

    model = WhisperModel(
        arguments.model,
        device=arguments.device,
        compute_type=arguments.compute_type or arguments.dtype,
    )
    options: dict[str, Any] = {
        "language": "en",
        "beam_size": arguments.beam_size,
        "condition_on_previous_text": False,
        **gates(arguments.fallback, "log_prob_threshold"),
    }
    if arguments.batch_size > 1:
        model = BatchedInferencePipeline(model=model)
        options |= {"batch_size": arguments.batch_size, "without_timestamps": False}

    def transcribe(waves: list[np.ndarray]) -> list[str]:
        (wave,) = waves
        segments, _ = model.transcribe(wave, **options)
        return ["".join(segment.text for segment in segments)]

    return transcribe


def openai_whisper(arguments: argparse.Namespace) -> Transcribe:
    """openai/whisper, one recording at a time."""
    import whisper

    model = whisper.load_model(arguments.model, device=arguments.device)
    options: dict[str, Any] = {
        "language": "en",
        "beam_size": arguments.beam_size if arguments.beam_size > 1 else None,
        "condition_on_previous_text": False,
        **gates(arguments.fallback, "logprob_threshold"),
        "fp16": arguments.dtype == "float16",
    }
    return lambda waves: [model.transcribe(wave, **options)["text"] for wave in waves]


def transformers(arguments: argparse.Namespace) -> Transcribe:
    """transformers' long form; with an assistant one recording at a time."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        WhisperForConditionalGeneration,
        WhisperProcessor,
    )
    from transformers.utils import logging

    from mmdecode.checkpoints import local_path

    logging.set_verbosity_error()
    path, dtype = local_path(arguments.model), getattr(torch, arguments.dtype)
    processor = WhisperProcessor.from_pretrained(path, trust_remote_code=False)
    model = WhisperForConditionalGeneration.from_pretrained(
        path, dtype=dtype, trust_remote_code=False
    )
    model = model.to(arguments.device).eval()
    extractor = processor.feature_extractor
    options: dict[str, Any] = {
        "return_timestamps": True,
        "num_beams": arguments.beam_size,
        "condition_on_prev_tokens": False,
        "time_precision": extractor.chunk_length / model.config.max_source_positions,
        "time_precision_features": extractor.hop_length / extractor.sampling_rate,
    }
    if getattr(model.generation_config, "is_multilingual", False):
        options |= {"language": "en", "task": "transcribe"}
    if arguments.fallback:
        options |= {
            "temperature": TEMPERATURES,
            "compression_ratio_threshold": 1.35,
            "logprob_threshold": -1.0,
            "no_speech_threshold": 0.6,
        }
    if arguments.assistant:
        # distilled Whispers share the encoder, so that their decoder alone is loaded
        assistant = AutoModelForCausalLM.from_pretrained(
            arguments.assistant, dtype=dtype, trust_remote_code=False
        )
        options["assistant_model"] = assistant.to(arguments.device).eval()

    def transcribe(waves: list[np.ndarray]) -> list[str]:
        long = max(map(len, waves)) > extractor.n_samples
        whole = {"truncation": False, "padding": "longest", "return_attention_mask": True}
        inputs = extractor(
            waves, sampling_rate=RATE, return_tensors="pt", **(whole if long else {})
        ).to(arguments.device, dtype)
        ids = model.generate(**inputs, **options)
        return processor.batch_decode(ids, skip_special_tokens=True)

    return transcribe


def read(entries: list[Entry]) -> list[np.ndarray]:
    """Samples of recordings, or of the given parts of them, each ``(N,)``."""
    return [np.concatenate([*blocks(opened(entry), RATE)]) for entry in entries]


PACKAGES: dict[str, Callable[[argparse.Namespace], Transcribe]] = {
    "faster-whisper": faster_whisper,
    "openai-whisper": openai_whisper,
    "transformers": transformers,
}


def batches(entries: list[Entry], size: int) -> list[list[Entry]]:
    """Recordings of like length together, longest first, as the leaderboard sorts them."""
    ordered = sorted(entries, key=lambda entry: -(entry.duration_s or 0.0))
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def main() -> None:
    """Transcribes a manifest."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("package", choices=PACKAGES)
    parser.add_argument("--model", required=True, help="as the package calls it")
    parser.add_argument("--assistant", help="drafts; transformers only, batch size 1")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--report", type=Path, required=True, help="file for the results, JSON lines"
    )
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--beam-size", type=int, default=1)
    parser.add_argument("--fallback", action="store_true", help="redo doubtful windows")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float16", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--compute-type", help="faster-whisper's own, such as int8_float16")
    parser.add_argument("--limit", type=int, help="only the first so many; a smoke test")
    parser.add_argument("--overwrite", action="store_true", help="also what mmdecode did not write")
    arguments = parser.parse_args()
    if arguments.assistant and (arguments.package != "transformers" or arguments.batch_size > 1):
        parser.error("--assistant is for transformers, with --batch-size 1")
    if arguments.package == "openai-whisper" and arguments.batch_size > 1:
        parser.error("openai-whisper takes one recording at a time; leave --batch-size out")
    refuse_foreign([arguments.report], arguments.overwrite)
    entries = read_manifest(arguments.data, arguments.limit)
    size = arguments.batch_size if arguments.package == "transformers" else 1
    groups = batches(entries, size)
    try:
        transcribe = PACKAGES[arguments.package](arguments)
    except ModuleNotFoundError as error:
        raise SystemExit(f"{arguments.package} is not installed ({error})") from error
    transcribe(read(groups[0]))
    write_file(arguments.report, "", arguments.overwrite)
    with open_append(arguments.report) as out:
        for group in groups:
            waves = read(group)
            began = time.perf_counter()
            texts = transcribe(waves)
            seconds = (time.perf_counter() - began) / len(group)
            for entry, text in zip(group, texts, strict=True):
                line = {"id": entry.id, "pred_text": text.strip(), "time": round(seconds, 4)}
                if entry.duration_s is not None:
                    line["duration"] = entry.duration_s
                append_line(out, json.dumps(line, ensure_ascii=False).encode() + b"\n")
    print(f"{len(entries)} recordings: {arguments.report}")


if __name__ == "__main__":
    run_script(main)
