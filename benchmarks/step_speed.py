"""Time of a decoding step against its memory-bandwidth floor: large shapes, random weights.

    python benchmarks/step_speed.py                     # CUDA, bfloat16, about 8 minutes
    python benchmarks/step_speed.py --device cpu --dtype float32 --scale small --compile
    python benchmarks/step_speed.py --device cpu --quick    # toys of the same names, on a tape

The floor of a step at batch 1 is the time to read its weights and caches once at the bandwidth of
a large copy. Measured against it: plain ``generate`` (eager, and compiled with a static cache), our
undrafted loop (as it is, and with rounds captured or passes compiled), and drafting with a free
drafter whose acceptance is simulated, so that the speed of the loop is told apart from the quality
of a drafter: each drafted token is right with the stated probability, and the gain that follows
from it, ``(1 - a^(k+1)) / (1 - a)`` tokens per step, is compared with the gain in time. Processor
time per round is measured after short and long prompts, on a CPU.

Two bars at batch 1 are decided in the result: drafting is 8 times as fast as eager ``generate``,
and keeps 85 % of the tokens per pass. Those of single passes are in step_passes.py.

Weights are random: times mean something here, tokens nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from pages import parsed, write_result
from rounding import add_quantize, form_of, weight_count
from toys import toy, toy_device
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.modeling_outputs import BaseModelOutput

import mmdecode as mm
from mmdecode.decoder import Decoder
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.engine.contracts import Drafter, DraftSession
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import run_script
from mmdecode.evaluation.speed.stopwatch import machine, timed
from mmdecode.quantization import is_quantized
from mmdecode.quantization.models import weight_bytes
from mmdecode.testing.table import Table, decode

HERE = Path(__file__).parent
NODES = 8
RATES = (0.6, 0.8, 0.9)
PROMPTS = (64, 256, 1024)
OVER_GENERATE, KEPT = 8.0, 0.85
"""Bars: times as fast as eager ``generate``; gain in time, as a share of the tokens per pass."""


@dataclass(frozen=True)
class Shape:
    """A model's shape and what it decodes."""

    config: Any
    prompt: int
    new: int
    note: str = ""


def shapes(scale: str) -> dict[str, Shape]:
    """By name; small ones are of the size of the shipped models, tiny and quick ones are toys."""

    def llama(width, layers, heads, up, vocab, key_heads=None):
        return LlamaConfig(
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_heads or heads,
            intermediate_size=up,
            vocab_size=vocab,
            max_position_embeddings=2**16,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )

    def whisper(width, layers, heads, vocab, frames):
        return WhisperConfig(
            d_model=width,
            encoder_layers=1,  # the encoder is no part of a step
            decoder_layers=layers,
            encoder_attention_heads=heads,
            decoder_attention_heads=heads,
            encoder_ffn_dim=4 * width,
            decoder_ffn_dim=4 * width,
            vocab_size=vocab,
            max_source_positions=frames,
            num_mel_bins=80,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )

    if scale == "small":
        return {
            "whisper": Shape(whisper(192, 8, 6, 1500, 200), 3, 80),
            "llama": Shape(llama(192, 8, 6, 512, 2000), 12, 100),
        }
    if scale == "tiny":
        return {
            "whisper": Shape(whisper(32, 2, 4, 90, 20), 3, 24),
            "llama": Shape(llama(32, 2, 4, 64, 90), 12, 24),
        }
    if scale == "quick":
        return {
            "whisper-large-v3": Shape(whisper(32, 2, 4, 90, 20), 4, 12),
            "whisper-large-v3-turbo": Shape(whisper(32, 1, 4, 90, 20), 4, 12),
            "llama-7b": Shape(llama(32, 2, 4, 64, 90), 12, 12),
            "llamagen-xl": Shape(llama(32, 2, 4, 64, 70), 1, 12),
        }
    return {
        "whisper-large-v3": Shape(whisper(1280, 32, 20, 51866, 1500), 4, 200),
        "whisper-large-v3-turbo": Shape(whisper(1280, 4, 20, 51866, 1500), 4, 200),
        "llama-7b": Shape(llama(4096, 32, 32, 11008, 32064), 600, 200, "a LLaVA-1.5 prompt"),
        "llamagen-xl": Shape(
            llama(1280, 36, 20, 3456, 16384), 1, 256, "Llama class of LlamaGen-XL's shape"
        ),
    }


class Oracle(Drafter):
    """Proposes a known continuation in which each token is wrong with probability ``1 - rate``.

    Args:
        rows: What the model generates, ``(B, L)``.
        rate: Share of drafted tokens that are right.
        length: Tokens per round.
    """

    capabilities = DrafterCapabilities(graph_safe=True)

    def __init__(self, rows: torch.Tensor, rate: float, length: int, seed: int = 0) -> None:
        draws = torch.rand(rows.shape, generator=torch.Generator().manual_seed(seed))
        self.rows = torch.where(draws.to(rows.device) < rate, rows, rows + 1)
        self.steps = torch.arange(length, device=rows.device)

    def begin(self, call, prefill):
        """Opens a session."""
        return KnownSession(call, self.rows, self.steps)


class KnownSession(DraftSession):
    """Session that proposes the known continuation of each row."""

    def __init__(self, call, rows: torch.Tensor, steps: torch.Tensor) -> None:
        super().__init__(call)
        self.rows, self.steps = rows, steps

    def propose(self, budget):
        """The next tokens of the row."""
        call = self.call
        index = call.rows.length[:, None] + self.steps
        inside = index < self.rows.shape[1]
        tokens = self.rows.gather(1, index.clamp_max(self.rows.shape[1] - 1))
        return Proposal(tokens=tokens.masked_fill(~inside, -1), kind="deterministic")


def step_bytes(model, shape: Shape) -> int:
    """Weights, self-attention cache at half length, cross-attention cache: what a step reads.

    With int8 weights cross-attention reads the encoder's states, packed twice for all layers, and
    has no cache.
    """
    config, size = shape.config, model.dtype.itemsize
    decoder = model.get_decoder()
    weights = weight_bytes(decoder.layers) + weight_bytes(model.get_output_embeddings())
    seen = shape.prompt + shape.new // 2
    if config.is_encoder_decoder:
        cache = 2 * config.decoder_layers * config.d_model * size
        if is_quantized(model):
            return weights + cache * seen + (2 * config.d_model + 1) * config.max_source_positions
        cross = sum(
            p.nbytes
            for layer in decoder.layers
            for name in ("k_proj", "v_proj")
            for p in getattr(layer.encoder_attn, name).parameters()
        )  # used once, at prefill
        return weights - cross + cache * (seen + config.max_source_positions)
    head = config.hidden_size // config.num_attention_heads
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * head * seen
    return weights + size * cache


def build(
    shape: Shape, device: torch.device, dtype: torch.dtype, quantize: str | None = None
) -> tuple[Any, dict[str, Any]]:
    """The model with random weights, rounded where that is asked for, and the inputs of a call."""
    torch.manual_seed(0)
    with torch.device(device):
        if shape.config.is_encoder_decoder:
            model = WhisperForConditionalGeneration._from_config(shape.config, dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_config(shape.config, dtype=dtype)
    model.eval()
    if quantize:
        mm.quantize(model, quantize)
    model.generation_config = transformers.GenerationConfig(
        pad_token_id=0, eos_token_id=None, decoder_start_token_id=1
    )
    ids = torch.randint(2, shape.config.vocab_size, (1, shape.prompt), device=device)
    if not shape.config.is_encoder_decoder:
        return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    frames, width = shape.config.max_source_positions, shape.config.d_model
    audio = torch.randn(1, frames, width, device=device, dtype=dtype)
    outputs = BaseModelOutput(last_hidden_state=audio)
    return model, {"decoder_input_ids": ids, "encoder_outputs": outputs}


def runner(model, inputs, new: int, **options):
    """``GenerationMixin.generate`` itself: Whisper's own wants audio and languages."""

    def run():
        return transformers.GenerationMixin.generate(
            model, **inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False, **options
        )

    return run


def per_token(device, run, new: int, repeats: int) -> tuple[float, Any]:
    """Median milliseconds per token after a warm-up, and the ids."""
    ids = run()
    spent = [timed(device, run)[0] for _ in range(repeats)]
    return 1e3 * statistics.median(spent) / new, ids


def host_time(prompt: int, rounds: int = 256) -> float:
    """Milliseconds of processor time per round after a prompt of ``prompt`` tokens.

    A table stands for the model, so that what is left is the loop's own.
    """
    table, decoder = Table(1000), Decoder()
    ids = torch.randint(1000, (1, prompt), generator=torch.Generator().manual_seed(0))
    spent = []
    for new in (8, 8, 8 + rounds):  # a warm-up; the difference leaves the prompt out
        decoder.stats.reset()
        began = time.process_time()
        decode(table, ids, decoder, max_new_tokens=new)
        spent.append((time.process_time() - began, decoder.stats.passes))
    (short, few), (long, many) = spent[1:]
    return 1e3 * (long - short) / (many - few)


def measure(
    name: str,
    shape: Shape,
    device,
    dtype,
    speed: float,
    repeats: int,
    compiled: bool,
    quantize: str | None = None,
) -> dict[str, Any]:
    """All ways to decode one shape."""
    model, inputs = build(shape, device, dtype, quantize)
    floor = 1e3 * step_bytes(model, shape) / speed
    engines: dict[str, dict[str, Any]] = {
        "generate": {},
        "undrafted": {"custom_generate": Decoder()},
    }
    if compiled:
        engines["undrafted, compiled"] = {"custom_generate": Decoder(compile=True)}
    if device.type == "cuda":
        engines["generate, compiled"] = {"cache_implementation": "static"}
    result: dict[str, Any] = {
        "shape": name,
        "note": shape.note,
        "weights_mb": round(weight_bytes(model) / 1e6, 1),
        "parameters_m": round(weight_count(model) / 1e6),
        "megabytes_per_step": round(step_bytes(model, shape) / 1e6, 1),
        "floor_ms": round(floor, 4),
        "rows": [],
    }
    print(f"\n{name} {shape.note}: {result['megabytes_per_step']} MB a step, floor {floor:.3f} ms")
    found: dict[str, Any] = {}

    def add(label: str, milliseconds: float, **more: Any) -> None:
        row = {"engine": label, "ms_per_token": round(milliseconds, 4), **more}
        row["over_floor"] = round(milliseconds / floor, 2)
        row["over_generate"] = round(found["generate"][0] / milliseconds, 2)
        result["rows"].append(row)
        extra = "".join(f"  {k} {v}" for k, v in more.items())
        print(
            f"  {label:28s} {milliseconds:8.3f} ms/token  {row['over_floor']:6.2f} x floor  "
            f"{row['over_generate']:5.2f} x generate{extra}",
            flush=True,
        )

    for label, options in engines.items():
        try:
            run = runner(model, inputs, shape.new, **options)
            found[label] = per_token(device, run, shape.new, repeats)
        except Exception as error:  # a way of transformers that this shape cannot go
            print(f"  {label}: {type(error).__name__}: {str(error)[:90]}")
            continue
        same = torch.equal(found[label][1], found["generate"][1])
        add(label, found[label][0], same_ids_as_generate=same)
    base = "undrafted, compiled" if compiled else "undrafted"
    rows = found[base][1][:, shape.prompt :]
    for rate in RATES:
        decoder = Decoder(draft=Oracle(rows, rate, NODES), compile=compiled)
        spent, _ = per_token(
            device, runner(model, inputs, shape.new, custom_generate=decoder), shape.new, repeats
        )
        length = decoder.stats.acceptance_length
        gain = found[base][0] / spent
        add(
            f"free drafter, rate {rate}",
            spent,
            tokens_per_pass=round(length, 3),
            promised=round((1 - rate ** (NODES + 1)) / (1 - rate), 3),
            gain_over_undrafted=round(gain, 3),
            kept=round(gain / length, 3),
        )
    return result


def bars(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Whether the bars are met for one shape, by the best rate and by each rate."""
    drafted = [row for row in result["rows"] if row["engine"].startswith("free drafter")]
    over = max(row["over_generate"] for row in drafted)
    kept = min(row["kept"] for row in drafted)
    return [
        {
            "bar": "over generate",
            "value": over,
            "limit": OVER_GENERATE,
            "met": over >= OVER_GENERATE,
        },
        {"bar": "kept", "value": kept, "limit": KEPT, "met": kept >= KEPT},
    ]


def main() -> None:
    """Measures every shape and writes one file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    add_quantize(parser)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", help="one shape by name")
    parser.add_argument("--scale", default="full", choices=("full", "small", "tiny", "quick"))
    parser.add_argument("--quick", action="store_true", help="toys of the same names")
    parser.add_argument(
        "--compile", action="store_true", help="Decoder(compile=True) on a CPU too; minutes a shape"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parsed(parser)
    if arguments.quick:
        vars(arguments).update({"scale": "quick", "repeats": 1})
    if arguments.only and arguments.only not in shapes(arguments.scale):
        parser.error(f"--only {arguments.only}: known are {', '.join(shapes(arguments.scale))}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("not run: there is no CUDA device here; --device cpu --scale tiny tries the script")
        return
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    cuda = device.type == "cuda"
    where = (
        toy_device(device, arguments.dtype) if arguments.quick else machine(device, arguments.dtype)
    )
    where |= {"weights": arguments.quantize or arguments.dtype}
    speed = 1e9 * where["bandwidth_gb_per_s"]
    print(json.dumps(where, indent=2))
    results = []
    compiled = cuda or arguments.compile or arguments.quick
    for name, shape in shapes(arguments.scale).items():
        if arguments.only in (None, name):
            with torch.no_grad(), toy(device, arguments.quick):
                given = (speed, arguments.repeats, compiled, arguments.quantize)
                found = measure(name, shape, device, dtype, *given)
            results.append(found | {"bars": bars(found)})
            if cuda:
                torch.cuda.empty_cache()
    prompts = () if arguments.only or arguments.quick else PROMPTS
    host = {str(p): round(statistics.median(host_time(p) for _ in range(5)), 3) for p in prompts}
    if host:
        print(
            "\nhost time per round, the loop's own: "
            + ", ".join(f"{time} ms behind {prompt} tokens" for prompt, time in host.items())
        )
    name = f"{arguments.only}-" if arguments.only else ""
    form = form_of(device.type, quantize=arguments.quantize)
    path = arguments.out / f"step-{name}{form}-{where['date']}.json"
    write_result(path, {"machine": where, "host_ms": host, "shapes": results})
    print(f"\nwritten: {path}")


if __name__ == "__main__":
    run_script(main)
