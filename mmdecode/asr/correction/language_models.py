"""Loads the language models of corrections, peft adapters included."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mmdecode.checkpoints import code_trusted, dtype_of, loading, local_path, placed
from mmdecode.errors import InputError, MissingExtraError


def load(
    model_id: str,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    quantize: str | None = None,
) -> tuple[Any, Any]:
    """Loads model and tokenizer of a checkpoint; a peft adapter is merged into its base model.

    Args:
        model_id: A folder, a Hub id or ``zoo:NAME``.
        device: Device of the model; ``None``: CUDA if available.
        dtype: ``None``: float32; ``auto``: see `mmdecode.checkpoints.dtype_of`.
        quantize: ``int8`` or ``fp8``, see `mmdecode.quantize`; ``None``: weights as loaded.

    Raises:
        InputError: The checkpoint cannot be loaded, or is no causal or seq2seq language model.
        MissingExtraError: The checkpoint is a peft adapter, and peft is not installed.
        OptionError: The device, dtype or format does not exist.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
    from transformers.utils import find_adapter_config_file

    from mmdecode.asr.recognizers import recognises

    kind, path = dtype_of(dtype, model_id, device), local_path(model_id)
    base = path
    with loading(model_id):
        adapter = find_adapter_config_file(path)
        if adapter is not None:
            adapter_config = json.loads(Path(adapter).read_text(encoding="utf-8"))
            base = local_path(adapter_config["base_model_name_or_path"])
        config = AutoConfig.from_pretrained(base, trust_remote_code=code_trusted())
        if recognises(config.model_type):
            raise InputError(
                f"{model_id!r} is a speech recogniser (a {config.model_type} model); a corrector "
                "needs a language model: give one trained by 'mmdecode train corrector', or "
                "another causal or encoder-decoder model of text"
            )
        family: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = family.from_pretrained(base, dtype=kind, trust_remote_code=code_trusted())
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=code_trusted())
    if base != path:
        with imported_peft(f"loading the adapter {model_id!r}") as peft:
            model = peft.PeftModel.from_pretrained(model, path).merge_and_unload()
    return placed(model.eval(), device, quantize), tokenizer


@contextmanager
def imported_peft(what: str) -> Iterator[Any]:
    """Imports peft, and silences the deprecation warning that it causes inside the context.

    Args:
        what: Name of the task that needs peft, for the error.

    Raises:
        MissingExtraError: peft is not installed.
    """
    with MissingExtraError.instead(f"{what} needs peft", extra="train"):
        import peft
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        yield peft
