"""Weight-only int8 and fp8 for models on CUDA, by torchao.

Each linear layer keeps its weights in 8 bits, with a scale for each output; a product turns them
into the layer's own dtype again. Activations stay as they are, and so does attention: a step reads
other weights, by the same kind of kernels as in float.

Float kernels on CUDA sum in another order for other numbers of rows, so that a token's logits in a
drafted block may differ from those alone by a rounding; ties aside, drafted text is undrafted text.
A rounded layer is held to the same: `refuse_dependent` compares a row alone with the row in blocks
of up to 64 rows, one of which is large, at every shape of the model. The row may change by no more
than `SLACK` times what it changes by in the layer before rounding, or, if that is more, `SLACK`
steps of the layer's dtype at its largest output. A scale for all activations of a product, as in
``LLM.int8`` or ``quantize_dynamic``, changes it by far more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from mmdecode.errors import MissingExtraError, OptionError, UnsupportedModelError

METHOD = "mmdecode_weight_only"
KINDS = ("int8", "fp8")
BLOCKS = (2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64)
"""Numbers of rows of which a row's products may not depend."""
SLACK = 2
"""How many times as much as in float a row may change."""
LARGE = 1000
"""Size of one of the other rows."""
FP8_SINCE = (8, 9)
"""Least compute capability of a GPU with fp8."""
DRAFT_HINT = "keep the float model, and let its rounded copy draft for it: draft='quantized'"


class WeightOnlyConfig(QuantizationConfigMixin):
    """The format ``to`` of a model; ``tied``: see `mmdecode.quantization.models.is_tied`."""

    def __init__(self, to: str, tied: bool = False) -> None:
        self.quant_method = METHOD
        self.to, self.tied = to, tied


class HfWeightOnly(HfQuantizer):
    """Marks a model as rounded, so that transformers refuses to train it and to save it."""

    def is_serializable(self) -> bool:
        """Refuses to save.

        Raises:
            UnsupportedModelError: Always; the message says what to save instead.
        """
        raise UnsupportedModelError(
            f"a model with {self.quantization_config.to} weights of torchao is not saved; save the "
            "float model, and round it after loading: mmdecode.quantize(model, "
            f"{self.quantization_config.to!r})"
        )

    @property
    def is_trainable(self) -> bool:
        """Whether the weights can be trained: no."""
        return False


def round_weights(model: Any, to: str, target: bool = True) -> None:
    """Rounds the weights of every ``nn.Linear`` inside a model, in place.

    Args:
        model: The model, which stays as it is if an error is raised.
        to: ``int8`` or ``fp8``.
        target: Whether the model's own tokens are decoded, which asks for products of a row that
            do not depend on other rows.

    Raises:
        MissingExtraError: torchao is missing.
        OptionError: The GPU has no fp8.
        UnsupportedModelError: A row's products depend on other rows.
    """
    round_all = rounding(to)
    refuse_gpu(to, next(model.parameters()).device)
    if target:
        refuse_dependent(model, to, round_all)
    round_all(model)


def rounding(to: str) -> Callable[[nn.Module], None]:
    """Returns torchao's function that rounds the linear layers inside a module to a format.

    Raises:
        MissingExtraError: torchao is missing, or too old.
    """
    try:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

        # otherwise torchao changes settings of the whole process
        make = {"int8": Int8WeightOnlyConfig, "fp8": Float8WeightOnlyConfig}[to]
        config = make(set_inductor_config=False)
    except (ImportError, TypeError) as error:
        raise MissingExtraError(
            f"{to} weights on CUDA need a recent torchao ({error})", extra="torchao"
        ) from error

    def round_all(module: nn.Module) -> None:
        quantize_(module, config, lambda one, name: type(one) is nn.Linear)
        for layer in module.modules():
            if type(layer) is nn.Linear:
                _keep_zeros(layer.weight)

    return round_all


def _keep_zeros(weight: Any) -> None:
    """Sets outputs without weights, such as that of padding, to 0: torchao's fp8 has NaN there."""
    without = weight.scale == 0
    weight.scale.masked_fill_(without, 1)
    weight.qdata.view(torch.uint8).masked_fill_(without, 0)


def refuse_gpu(to: str, device: torch.device) -> None:
    """Refuses fp8 on a GPU without it.

    Raises:
        OptionError: The GPU has no fp8.
    """
    if to != "fp8" or device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < FP8_SINCE:
        raise OptionError(
            f"{torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]}, "
            f"and fp8 needs {FP8_SINCE[0]}.{FP8_SINCE[1]}; use int8"
        )


def refuse_dependent(model: Any, to: str, round_all: Callable[[nn.Module], None]) -> None:
    """Refuses a model if a row's products depend on other rows after rounding.

    One layer of each shape and dtype is tested.

    Raises:
        UnsupportedModelError: Products of a layer depend on other rows.
    """
    layers: dict[Any, tuple[str, nn.Linear]] = {}
    for name, layer in model.named_modules():
        if type(layer) is nn.Linear:
            kind = (*layer.weight.shape, layer.weight.dtype, layer.bias is not None)
            layers.setdefault(kind, (name, layer))
    for name, layer in layers.values():
        rounded = _rounded(layer, round_all)
        found, allowed = change(rounded, layer.weight), _allowed(layer)
        if not found <= allowed:
            raise UnsupportedModelError(
                f"{type(model).__name__}: with {to} weights a row of {name} changes by {found:.2g} "
                f"with the rows next to it, and may by {allowed:.2g}, so that drafted text could "
                f"differ from undrafted text; {DRAFT_HINT}"
            )


def _rounded(layer: nn.Linear, round_all: Callable[[nn.Module], None]) -> nn.Module:
    """A rounded copy of a layer, which stays as it is."""
    copy = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    copy.weight, copy.bias = layer.weight, layer.bias
    parent = nn.Sequential(copy)  # torchao replaces what is inside a module
    round_all(parent)
    return parent[0]


def _allowed(layer: nn.Linear) -> float:
    # sums are in float32 at least, and of many products
    usual = max(torch.finfo(layer.weight.dtype).eps, 4 * torch.finfo(torch.float32).eps)
    return SLACK * max(change(layer, layer.weight), usual)


@torch.no_grad()
def change(layer: nn.Module, weight: Tensor) -> float:
    """Largest change of a row with the rows next to it, relative to its largest output.

    Args:
        layer: A layer.
        weight: Its float weight, whose inputs, device and dtype are those of the test.
    """
    rows = torch.randn(BLOCKS[-1], weight.shape[1], generator=torch.Generator().manual_seed(0))
    rows[1] *= LARGE
    rows = rows.to(weight.device, weight.dtype)
    alone = layer(rows[None, :1])[0, 0].float()
    worst = torch.zeros_like(alone)
    for count in BLOCKS:
        block = rows[None, :count]
        found = layer(block)[0, 0], layer(block.flip(1))[0, -1]
        worst = torch.stack([worst, *((one.float() - alone).abs() for one in found)]).amax(0)
    return float(worst.amax() / alone.abs().amax().clamp_min(1e-30))
