"""Option ``--quantize`` of the benchmarks."""

from __future__ import annotations

import argparse
import math
from typing import Any

from mmdecode.quantization.modules import Int8Linear


def add_quantize(parser: argparse.ArgumentParser) -> None:
    """Adds ``--quantize`` to a command line."""
    parser.add_argument("--quantize", choices=["int8"], help="round the weights of the model")


def form_of(device: str, *, compiled: bool = False, quantize: str | None = None) -> str:
    """Part of a result file's name: device, whether passes are compiled, and form of weights."""
    return "-".join([device, *["compiled"] * compiled, *([quantize] if quantize else [])])


def weight_count(module: Any) -> int:
    """Number of a module's weights, packed int8 matrices included."""
    packed = [part.packed.shape for part in module.modules() if isinstance(part, Int8Linear)]
    return sum(weight.numel() for weight in module.parameters()) + sum(map(math.prod, packed))
