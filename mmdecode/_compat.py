"""All uses of private names of transformers and torch; checked with transformers 5.17 and 5.23."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from transformers import GenerationMixin


def _codes(function: Any) -> Iterator[CodeType]:
    """Yields the code objects of a function's decorators, the outermost first, then its own."""
    while function is not None:
        yield function.__code__
        function = getattr(function, "__wrapped__", None)


*_AROUND, _GENERATE = _codes(GenerationMixin.generate)


def arguments_of_generate(model: Any) -> dict[str, Any]:
    """Returns arguments of the enclosing ``generate`` that are hidden from ``custom_generate``.

    If ``custom_generate`` is a callable, transformers drops ``streamer``, ``assistant_model``,
    ``synced_gpus`` and the tokenizers; a reader of the streamer would then wait for ever. These
    arguments are read from the stack frames of ``generate`` and its decorator.

    Returns:
        The arguments that were given, by name; empty outside a call of ``model.generate``.
    """
    frame = inspect.currentframe()
    while frame is not None:
        held = frame.f_locals if frame.f_code is _GENERATE else {}
        if held.get("self") is model:
            given = dict(held.get("kwargs", {}))
            given |= {name: held.get(name) for name in _KEPT}
            around = frame.f_back
            if around is not None and around.f_code in _AROUND:
                outer = around.f_locals.get("kwargs", {})
                given |= {name: outer.get(name) for name in _TAKEN_OUT}
            return {name: value for name, value in given.items() if value is not None}
        frame = frame.f_back
    return {}


_KEPT = ("streamer", "assistant_model", "synced_gpus")
_TAKEN_OUT = ("tokenizer", "assistant_tokenizer")


@lru_cache
def caps_logits(model_class: Any) -> bool:
    """Returns whether a model applies its text model's ``final_logit_softcapping``.

    The source of its forward pass is inspected, since this depends on the version of transformers:
    PaliGemma applies it in 5.23, but not in 5.17.
    """
    return "final_logit_softcapping" in inspect.getsource(model_class.forward)


def text_config(model: Any) -> Any:
    """Returns the config of a model's decoder of text; ``None`` if the model has none."""
    choose = getattr(getattr(model, "config", None), "get_text_config", None)
    return None if choose is None else choose(decoder=True)


def attention_implementation(config: Any) -> str | None:
    """Returns the attention implementation that a config names, such as ``sdpa``, or ``None``."""
    return getattr(config, "_attn_implementation", None)


@contextmanager
def attention_configs(model: Any, name: str) -> Iterator[None]:
    """Sets the attention implementation of all parts of a model to ``name``; restores it on exit.

    Contexts may overlap, also across threads: the first one entered records the implementation of
    each config, and the last one left restores it. ``set_attn_implementation`` of transformers
    cannot restore a model whose parts have different implementations.
    """
    parts = [m.config for m in model.modules() if getattr(m, "config", None) is not None]
    configs = [c for c in {id(c): c for c in parts}.values() if attention_implementation(c)]
    with _lock:
        # read all before setting any: setting a config also sets the configs inside it
        for config, original in [(c, attention_implementation(c)) for c in configs]:
            _stock.setdefault(id(config), [original, 0])[1] += 1
        for config in configs:
            config._attn_implementation = name
    try:
        yield
    finally:
        with _lock:
            for config in configs:  # the outer ones first
                original, held = _stock[id(config)]
                _stock[id(config)][1] = held - 1
                config._attn_implementation = name if held > 1 else original
                if held == 1:
                    del _stock[id(config)]


def input_device(model: Any) -> torch.device:
    """Returns the device that a model's inputs go to, also if its weights are on disk.

    Weights on disk are on torch's ``meta`` device until accelerate's hook loads them onto the
    device that the hook names.
    """
    device = torch.device(model.device)
    if device.type != "meta":
        return device
    hook = getattr(model, "_hf_hook", None)
    return torch.device(getattr(hook, "execution_device", None) or "cpu")


def stock_attention(config: Any) -> str:
    """Returns a config's attention implementation outside `attention_configs`, else ``sdpa``."""
    noted = _stock.get(id(config))
    return str(noted[0]) if noted else "sdpa"


_lock = threading.Lock()
_stock: dict[int, list[Any]] = {}
"""Original implementation, and number of open `attention_configs`, by id of the config."""


def detects_timestamps_from_logprob(processor: Any) -> bool:
    """Returns whether Whisper's timestamp processor may force a timestamp by log-probabilities."""
    return bool(getattr(processor, "_detect_timestamp_from_logprob", True))


KINDS_OF_SHAPES = 64
"""Maximum number of recompilations of the forward pass, for all models together."""


def compiled(function: Callable[..., Tensor], backend: str) -> Callable[..., Tensor]:
    """Compiles a whole function with ``torch.compile``, with a higher limit of recompilations.

    torch allows 8 recompilations per function by default, and all models here share one function.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, KINDS_OF_SHAPES)
    made: Callable[..., Tensor] = torch.compile(function, fullgraph=True, backend=backend)
    return made


@lru_cache
def flex_kernel() -> Callable[..., Tensor]:
    """Returns ``flex_attention``, compiled; sizes become symbols where they change.

    A limit of 8 shapes would let later ones run without a kernel.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, KINDS_OF_SHAPES)
    function: Any = flex_attention
    made: Callable[..., Tensor] = torch.compile(function)
    return made


def has_bf16(device: torch.device) -> bool:
    """Returns whether a device multiplies bfloat16 by instructions of its own.

    On a CPU these are AMX or AVX512-BF16; without them products in bfloat16 are emulated, and
    slower than in float32.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    known = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in known)
