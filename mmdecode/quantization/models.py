"""`quantize`: rounds a model's weights to 8 bits, in place.

On CUDA this is done by torchao, see `mmdecode.quantization.weight_only`; the rest of this page is
about CPUs, where a rounded model is also saved and loaded by transformers.

Every ``nn.Linear``, and GPT-2's transposed kind, becomes an `Int8Linear`, encoder and output matrix
included, and the embedding of tokens an `Int8Embedding`; attention is computed query by query, see
`mmdecode.quantization.attention`. The result is another model than before, with about a quarter of
the memory, whose drafted and undrafted tokens are the same.

Importing this module registers the format with transformers, so that ``save_pretrained`` and
``from_pretrained`` work on such models as on any other.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar
from warnings import warn

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from mmdecode._compat import attention_implementation
from mmdecode.errors import OptionError, UnsupportedModelError, refuse_unknown
from mmdecode.quantization import weight_only
from mmdecode.quantization.attention import NAME
from mmdecode.quantization.foreign import foreign_layers, stored
from mmdecode.quantization.modules import LINEAR, Int8Embedding, Int8Linear
from mmdecode.quantization.products import gain

METHOD = "mmdecode_int8"
"""Name of the format in a checkpoint's ``quantization_config``."""
FLOAT = (nn.Embedding, Int8Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers that are no products of rows with a matrix."""
LEFT = 0.1
"""Largest share of the weights that may stay float matrices without a warning."""
Model = TypeVar("Model", bound=Any)
Layers = TypeVar("Layers", bound=nn.Module)
_changing = threading.Lock()


def quantize(model: Model, to: str = "int8", *, embeddings: bool = True) -> Model:
    """Rounds the weights of a model of transformers to int8 or fp8, in place; returns the model.

    Greedy tokens with a draft are those without one, for the rounded model: a row's products and
    attention do not depend on other rows; on CUDA, by at most twice what they do in float or two
    steps of the dtype, on a test input. They are not those of the model before. A model that is
    rounded to this format already stays as it is. A warning tells of matrices that stay in float,
    such as experts in one tensor.

    Args:
        model: A model on the CPU or on CUDA, in evaluation mode.
        to: ``int8``, or on CUDA ``fp8``: weights with a scale per output. On the CPU activations
            are rounded too, with a scale per row.
        embeddings: Whether the embedding of tokens is rounded too; on CUDA it never is.

    Raises:
        OptionError: There is no such format, or not on this device, or the model has another.
        MissingExtraError: The model is on CUDA, and torchao is missing.
        UnsupportedModelError: The model is on another device, has adapters or hooks, is quantised
            otherwise, or has no attention that can be computed query by query, as T5's with its
            bias of distances; or, on CUDA, a row's products depend on other rows. In both cases its
            rounded copy may still draft.
    """
    return _quantize(model, to, embeddings, target=True)


def quantize_drafter(model: Model, to: str = "int8") -> Model:
    """Same as `quantize`, for a copy that only drafts: its products may depend on other rows."""
    return _quantize(model, to, embeddings=False, target=False)


def _quantize(model: Model, to: str, embeddings: bool, target: bool) -> Model:
    if not isinstance(to, str):
        raise OptionError(f"quantize={to!r}; expected one of {', '.join(weight_only.KINDS)}")
    refuse_unknown([to], weight_only.KINDS, "quantize")
    with _changing:
        if is_quantized(model):
            if format_of(model) != to:
                raise OptionError(
                    f"{type(model).__name__} has {format_of(model)} weights, and quantize={to!r} "
                    "asks for others; leave quantize out, or load the float weights"
                )
            return model
        _refuse(model)
        if device_type(model) == "cuda":
            round_on_cuda(model, to, target)
            return model
        if to != "int8":
            raise OptionError(
                f"quantize={to!r} runs on CUDA, and {type(model).__name__} is on the CPU; use "
                "quantize='int8', or load the model with device='cuda'"
            )
        _refuse_attention(model, target)
        config = Int8Config(tied=is_tied(model), embeddings=embeddings)
        embedding = model.get_input_embeddings() if embeddings else None
        _replace(model, embedding, Int8Linear.of, Int8Embedding.of)
        _mark(model, HfInt8(config, pre_quantized=True))
        if target:
            _unmap(model)
            _warn_of_float(model)
    return model


def round_on_cuda(model: Any, to: str, target: bool = True) -> None:
    """Rounds a model by torchao, in place, and notes the format; any device will do.

    Args:
        model: The model.
        to: ``int8`` or ``fp8``.
        target: See `mmdecode.quantization.weight_only.round_weights`.
    """
    tied = is_tied(model)
    weight_only.round_weights(model, to, target)
    _note(model, weight_only.HfWeightOnly(weight_only.WeightOnlyConfig(to, tied)))


def round_linears(module: Layers) -> Layers:
    """Rounds the weights of every ``nn.Linear`` inside a module, in place; returns the module."""
    _replace(module, None, Int8Linear.of, Int8Embedding.of)
    return module


def is_quantized(model: Any) -> bool:
    """Whether `quantize` rounded the model, or a checkpoint of such a model was loaded."""
    return format_of(model) is not None


def format_of(model: Any) -> str | None:
    """The format to which `quantize` rounded a model, ``int8`` or ``fp8``; ``None``: it did not."""
    quantizer = getattr(model, "hf_quantizer", None)
    if isinstance(quantizer, weight_only.HfWeightOnly):
        return quantizer.quantization_config.to
    return "int8" if isinstance(quantizer, HfInt8) else None


def rounds_activations(model: Any) -> bool:
    """Whether `quantize` replaced the model's layers by `Int8Linear`, as it does on the CPU."""
    return isinstance(getattr(model, "hf_quantizer", None), HfInt8)


def is_tied(model: Any) -> bool:
    """Whether the output matrix is the embedding of tokens, or was before both were rounded."""
    if is_quantized(model):
        return bool(model.hf_quantizer.quantization_config.tied)
    output = getattr(model, "get_output_embeddings", lambda: None)()
    return output is not None and output.weight is model.get_input_embeddings().weight


def _replace(
    model: Any,
    embedding: Any,
    linear_of: Callable[[Any, bool], nn.Module],
    embedding_of: Callable[[Any], nn.Module],
) -> None:
    """Replaces every ``nn.Linear`` and the embedding by what a function makes of it.

    The function of linear layers is also told whether they are outside the decoder.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    output = getattr(model, "get_output_embeddings", lambda: None)()
    steps = {*decoder.modules(), *(output.modules() if output is not None else ())}
    made: dict[nn.Module, nn.Module] = {}  # a module may be in several places
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if type(module) in LINEAR:
            made[module] = made.get(module) or linear_of(module, module not in steps)
        elif module is embedding and type(module) is nn.Embedding:
            made[module] = made.get(module) or embedding_of(module)
        else:
            continue
        model.set_submodule(name, made[module])


def _mark(model: Any, quantizer: HfInt8) -> None:
    """Notes the format, as transformers does for what it loads, and sets the attention function.

    Warns where this processor multiplies int8 weights more slowly than float32 ones.
    """
    fast = gain("int8")
    if fast < 1:
        warn(
            f"this processor multiplies a row by int8 weights in {1 / fast:.1f} times the time "
            f"of float32 weights: {type(model).__name__} will need less memory, and be slower; "
            "leave out quantize for speed",
            stacklevel=4,
        )
    _note(model, quantizer)
    model.config.tie_word_embeddings = False  # packed and by rows, they are two
    quantizer.by_rows = not _biased(model)
    if not quantizer.by_rows:
        return  # it only drafts, by torch's attention
    parts = [m.config for m in model.modules() if getattr(m, "config", None) is not None]
    configs = {id(c): c for c in parts if attention_implementation(c) == "sdpa"}
    for config in configs.values():
        config._attn_implementation = NAME


def _unmap(model: nn.Module) -> None:
    """Copies the tensors that are left, any of which would keep a whole checkpoint in memory.

    Loaded weights are parts of a file that is mapped into memory.
    """
    for tensor in {*model.parameters(), *model.buffers()}:
        tensor.data = tensor.data.clone()


def _note(model: Any, quantizer: Any) -> None:
    model.requires_grad_(False)
    model.hf_quantizer, model.is_quantized = quantizer, True
    model.quantization_method = quantizer.quantization_config.quant_method
    model.config.quantization_config = quantizer.quantization_config
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.get_memory_footprint = Footprint(part)


def weight_bytes(module: nn.Module) -> int:
    """Bytes of a module's weights in memory, packed matrices and those of torchao included."""
    found = sum(part.nbytes for weight in module.parameters() for part in stored(weight))
    return found + sum(m.packed_bytes() for m in module.modules() if isinstance(m, Int8Linear))


class Footprint:
    """``get_memory_footprint`` of a rounded model, which it does not keep alive.

    Transformers' own counts no packed matrices, and torchao's weights by the dtype that they had.
    """

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)

    def __call__(self, return_buffers: bool = True) -> int:
        """Returns bytes of weights, and of buffers unless these are left out."""
        model = self._model()
        assert model is not None, "it is an attribute of the model"
        return weight_bytes(model) + sum(one.nbytes for one in model.buffers() if return_buffers)

    def __reduce__(self) -> Any:
        return Footprint, (self._model(),)


def refuse_learning(model: Any) -> None:
    """Refuses to train, or to train with, a model whose weights were rounded.

    Raises:
        UnsupportedModelError: The model was rounded.
    """
    if is_quantized(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} has {format_of(model)} weights, which cannot be trained and "
            "give no gradients: name the float model"
        )


def refuse_device(model: Any, device: torch.device) -> None:
    """Refuses to move a model that was rounded on the CPU to another device.

    Raises:
        UnsupportedModelError: The model was rounded on the CPU, and the device is no CPU.
    """
    if rounds_activations(model) and device.type != "cpu":
        raise UnsupportedModelError(
            f"{type(model).__name__} has int8 weights, whose products run on the CPU, not on "
            f"{device}: load it with device='cpu', or load its float weights"
        )


def _refuse(model: Any) -> None:
    name = type(model).__name__
    if not hasattr(model, "get_input_embeddings"):
        raise UnsupportedModelError(f"{name} is no model of transformers; it stays in float")
    if getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedModelError(
            f"{name} is quantised already ({model.quantization_method}); load its float weights"
        )
    if any(True for _ in foreign_layers(model)):
        raise UnsupportedModelError(
            f"{name} has layers that another library quantised; load its float weights"
        )
    if model.training:
        raise OptionError(f"{name} is in training mode; call model.eval() first")
    for path, module in model.named_modules():
        if hasattr(module, "_hf_hook") or hasattr(module, "lora_A"):
            raise UnsupportedModelError(
                f"{name} has an adapter or a hook at {path or 'its top'}; merge or remove it first"
            )


def device_type(model: Any) -> str:
    """Type of the device of a model's weights, ``cpu`` or ``cuda``."""
    devices = {weight.device.type for weight in model.parameters()}
    if devices in ({"cpu"}, {"cuda"}):
        return devices.pop()
    raise UnsupportedModelError(
        f"{type(model).__name__} is on {', '.join(sorted(devices))}; weights are rounded on the "
        "CPU or on CUDA: load the model with device='cpu' or 'cuda', or leave out quantize"
    )


def _biased(model: nn.Module) -> bool:
    """Whether attention has a learned bias of distances, as T5's."""
    return any(getattr(m, "relative_attention_bias", None) is not None for m in model.modules())


def _warn_of_float(model: nn.Module) -> None:
    """Warns if more than a tenth of the weights are float matrices that are multiplied."""
    left: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, FLOAT):
            continue
        own = [w for w in module.parameters(recurse=False) if w.dim() > 1 and w.is_floating_point()]
        left[type(module).__name__] += sum(weight.nbytes for weight in own)
    share = left.total() / max(weight_bytes(model), 1)
    if share > LEFT:
        warn(
            f"{share:.0%} of the weights of {type(model).__name__} stay in float, those of "
            f"{left.most_common(1)[0][0]}: it needs more memory than one in int8, and drafted "
            "text may differ from undrafted text where two tokens are equally likely",
            stacklevel=4,
        )


def _refuse_attention(model: Any, target: bool) -> None:
    name, used = type(model).__name__, attention_implementation(model.config)
    if target and _biased(model):
        raise UnsupportedModelError(
            f"attention of {name} has a bias of distances, which cannot be computed query by "
            "query; it stays in float: draft='quantized' lets its int8 copy draft"
        )
    if used not in (None, "sdpa", NAME):
        raise UnsupportedModelError(
            f"{name} has attention {used!r}, which cannot be computed query by query; call "
            "model.set_attn_implementation('sdpa') first"
        )


# The format, for save_pretrained and from_pretrained


@register_quantization_config(METHOD)
class Int8Config(QuantizationConfigMixin):
    """``quantization_config`` of a checkpoint.

    Args:
        tied: See `is_tied`.
        embeddings: Whether the embedding of tokens is rounded.
        **kwargs: Further fields of a saved config.
    """

    def __init__(self, tied: bool = False, embeddings: bool = True, **kwargs: Any) -> None:
        self.quant_method, self.tied, self.embeddings = METHOD, tied, embeddings


@register_quantizer(METHOD)
class HfInt8(HfQuantizer):
    """How transformers builds and loads such a checkpoint.

    Attributes:
        by_rows: Whether attention is computed query by query.
    """

    by_rows = True

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuses a device map, before weights are read.

        Raises:
            UnsupportedModelError: The map names more than the CPU.
        """
        named = device_map.values() if isinstance(device_map, dict) else [device_map]
        if any(one is not None and str(one) != "cpu" for one in named):
            raise UnsupportedModelError(
                f"the checkpoint has int8 weights, whose products run on the CPU, and "
                f"device_map={device_map!r}; leave the map out, or load its float weights"
            )

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        if not self.pre_quantized:
            raise OptionError(
                "quantization_config names a format of saved checkpoints; load the float weights, "
                "then call mmdecode.quantize(model)"
            )
        model.config.tie_word_embeddings = False
        rounds = self.quantization_config.embeddings
        embedding = model.get_input_embeddings() if rounds else None
        _replace(model, embedding, Int8Linear.like, Int8Embedding.like)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        for module in model.modules():
            if isinstance(module, Int8Linear):
                module.pack()
        _unmap(model)
        _mark(model, self)

    def is_serializable(self) -> bool:
        """Whether ``save_pretrained`` works."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether the weights can be trained: no."""
        return False
