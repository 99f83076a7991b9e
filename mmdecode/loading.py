"""`load`: loads a model and its processor by any name that the commands accept."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mmdecode.checkpoints import (
    code_trusted,
    dtype_of,
    loading,
    local_path,
    placed,
    trusting_as_asked,
)
from mmdecode.errors import InputError, UnsupportedModelError
from mmdecode.image_ar.loading import config_of  # registers our own model types
from mmdecode.model_names import full_name
from mmdecode.no_models import kind_of_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_AUTOS = ("ImageTextToText", "SpeechSeq2Seq", "CausalLM", "Seq2SeqLM")
"""Auto classes of transformers in the order in which they are tried, without ``AutoModelFor``."""


PROCESSOR_FILES = (
    *("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"),
    *("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model"),
)
"""Files of processors and tokenizers; a checkpoint with any of these files has a processor."""


@trusting_as_asked
def load(
    name: str | os.PathLike[str],
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    quantize: str | None = None,
    *,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """Loads a model and its processor, ready for ``model.generate`` and `mmdecode.generate`.

    The checkpoint's configuration determines the class: a Whisper (also in the layout of
    Whisper-Medusa), a vision-language model, another speech model, a causal or an encoder-decoder
    language model, or a model of image tokens.

    Args:
        name: A folder, a Hub id, a short name such as ``large-v3``, ``zoo:NAME``, or another name
            that ``mmdecode zoo`` lists, such as ``moonshine:tiny-en``.
        device: Device of the model; ``None``: CUDA if available, else the CPU.
        dtype: ``None``: float32; ``auto``: see `mmdecode.checkpoints.dtype_of`.
        quantize: ``int8`` or ``fp8``, see `mmdecode.quantize`; ``None``: weights as loaded.
        trust_remote_code: Run Python files that come with the model: read them first.

    Returns:
        The model in evaluation mode, and its processor. For a language model the processor is the
        tokenizer. It is ``None`` if the checkpoint has none, and for LlamaGen, VAR and ImageGPT,
        which `mmdecode.image_ar.ImageGenerator` runs.

    Raises:
        InputError: The checkpoint cannot be loaded, or is a drafter.
        MissingExtraError: Its processor needs a library that is not installed.
        OptionError: The device, dtype or format does not exist.
        UnsupportedModelError: The model does not generate, its type is not supported, or it has no
            int8 form.
    """
    full = full_name(str(name))
    path = local_path(full)
    _refuse_drafter(full, path)
    config = config_of(full)
    kind = config.model_type
    if kind == "whisper":
        from mmdecode.asr.transcriber import load as load_whisper

        model, processor = load_whisper(full, device, dtype, quantize)
    elif kind in ("llamagen", "imagegpt"):
        from mmdecode.image_ar.loading import load as load_raster

        model, processor = load_raster(full, device, dtype, quantize).adapter.model, None
    elif kind == "var":
        from mmdecode.image_ar.loading import load_scales

        model, processor = load_scales(full, device, dtype, quantize)[0], None
    else:
        with loading(full):
            model, processor = _of_transformers(full, path, config, dtype_of(dtype, full, device))
        model = placed(model.eval(), device, quantize)
    return model.eval(), processor


def _refuse_drafter(name: str, path: str) -> None:
    """Refuses the checkpoint of a drafter.

    Raises:
        InputError: The checkpoint is a drafter, or its configuration cannot be read.
    """
    from transformers import PreTrainedConfig

    with loading(name):
        config = PreTrainedConfig.get_config_dict(path)[0]
    kind = kind_of_part(config)
    if kind is not None:
        raise InputError(
            f"{name} is a drafter, and cannot decode without its target; use it as "
            f"mmdecode.Decoder(draft='{kind}:path={name}')"
        )


def _holds_any(path: str, names: Sequence[str]) -> bool:
    """Returns whether a checkpoint has any of these files."""
    from transformers.utils import has_file

    return any(has_file(path, name) for name in names)


def _of_transformers(name: str, path: str, config: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """Loads with the first Auto class that supports the configuration, or that it maps to code.

    Raises:
        UnsupportedModelError: No Auto class supports the configuration.
    """
    import transformers

    own = getattr(config, "auto_map", None) or {}
    for family in _AUTOS:
        auto: Any = getattr(transformers, f"AutoModelFor{family}")
        if type(config) in auto._model_mapping or f"AutoModelFor{family}" in own:
            model = auto.from_pretrained(path, dtype=dtype, trust_remote_code=code_trusted())
            if not _holds_any(path, PROCESSOR_FILES):
                return model, None
            processor = transformers.AutoProcessor.from_pretrained(
                path, trust_remote_code=code_trusted()
            )
            return model, processor
    raise UnsupportedModelError(
        f"{name} is a {config.model_type} model; expected a model that generates: one of "
        f"{', '.join(f'AutoModelFor{family}' for family in _AUTOS)}, Whisper, LlamaGen, VAR or "
        "ImageGPT"
    )
