"""Loads vision-language checkpoints."""

from __future__ import annotations

from typing import Any

import torch

from mmdecode.checkpoints import code_trusted, dtype_of, loading, local_path, placed
from mmdecode.errors import MissingExtraError, MMDecodeError, UnsupportedModelError


def load(
    model_id: str, device: str | torch.device | None, dtype: str | torch.dtype | None
) -> tuple[Any, Any]:
    """Loads a vision-language checkpoint; returns the model and its processor.

    Raises:
        InputError: The checkpoint cannot be loaded.
        MissingExtraError: Its processor needs a library that is not installed.
        OptionError: The device or dtype does not exist.
        UnsupportedModelError: The checkpoint is no vision-language model.
    """
    from transformers import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoConfig,
        AutoModelForImageTextToText,
        AutoProcessor,
    )

    kind = dtype_of(dtype, model_id, device)
    path = local_path(model_id)
    try:
        with loading(model_id):
            config = AutoConfig.from_pretrained(path, trust_remote_code=code_trusted())
            if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
                raise UnsupportedModelError(
                    f"{model_id} is a {config.model_type} model; expected a vision-language model, "
                    "one that transformers' AutoModelForImageTextToText loads"
                )
            processor = AutoProcessor.from_pretrained(path, trust_remote_code=code_trusted())
            model = AutoModelForImageTextToText.from_pretrained(
                path, dtype=kind, trust_remote_code=code_trusted()
            )
    except MMDecodeError:
        raise
    except ImportError as error:  # some processors need torchvision
        reason = " ".join(str(error).split())
        raise MissingExtraError(
            f"loading {model_id!r} needs a library ({reason})", extra="vlm"
        ) from error
    return placed(model, device), processor
