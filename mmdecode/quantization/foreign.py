"""Checks models that other libraries quantised: whether a row's products depend on other rows.

With one scale for all activations of a product (``quantize_dynamic``) or outliers found per batch
(``LLM.int8``), a token has other logits in a drafted block than alone, and drafted text may differ
from undrafted text. A warning says so, and the model runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mmdecode.quantization.modules import Int8Linear
from mmdecode.quantization.weight_only import HfWeightOnly

ROWS, TOLERANCE = 8, 1e-3
"""Rows of the test, and the largest difference relative to a row's largest output."""


def foreign_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields linear layers, with their names, that are neither float nor `Int8Linear`."""
    for name, module in model.named_modules():
        if isinstance(module, Int8Linear) or not hasattr(module, "in_features"):
            continue
        weight = getattr(module, "weight", None)
        is_float = isinstance(weight, Tensor) and weight.is_floating_point()
        if not is_float or is_foreign(weight):
            yield name, module


def is_foreign(weight: Any) -> bool:
    """Whether a weight is a tensor of another library, such as torchao's."""
    return isinstance(weight, Tensor) and type(weight.data) is not Tensor


def stored(tensor: Tensor) -> Iterator[Tensor]:
    """Yields a tensor, or those that one of another library consists of."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        yield from stored(getattr(tensor, name))


def warn_of_rows(model: Any) -> None:
    """Warns if products of a foreign layer depend on the other rows."""
    if isinstance(getattr(model, "hf_quantizer", None), HfWeightOnly):
        return  # a target was tested when it was rounded, and a drafter need not be
    kind = getattr(model, "dtype", torch.float32)
    allowed = max(TOLERANCE, 4 * torch.finfo(kind).eps)
    for name, layer in foreign_layers(model):
        change = _neighbours_change(layer, kind)
        if change > allowed:
            warnings.warn(
                f"{type(model).__name__}: a row of {name} ({type(layer).__name__}) changes by "
                f"{change:.1%} with the rows next to it, so drafted text may differ from undrafted "
                "text in this quantisation; mmdecode.quantize(model) of the float weights has no "
                "such limit",
                stacklevel=2,
            )
            return


@torch.no_grad()
def _neighbours_change(layer: Any, kind: torch.dtype) -> float:
    """Largest change of a row next to others, one of which is large, relative to its largest.

    Inputs have the dtype ``kind``.
    """
    bias = getattr(layer, "bias", None)
    device = bias.device if isinstance(bias, Tensor) else getattr(layer, "weight", None)
    device = device.device if isinstance(device, Tensor) else device
    if not isinstance(device, torch.device):
        device = torch.device("cpu")
    x = torch.randn(ROWS, layer.in_features, generator=torch.Generator().manual_seed(0))
    x[-1] *= 20
    try:
        x = x.to(device, kind)
        whole, alone = layer(x)[:1].float(), layer(x[:1]).float()
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return 0.0  # of another dtype, or no layer of rows
    return float((whole - alone).abs().amax() / alone.abs().amax().clamp_min(1e-30))
