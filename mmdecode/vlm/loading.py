"""Loads vision-language checkpoints."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mmdecode.checkpoints import code_trusted, device_of, dtype_of, loading, local_path, placed
from mmdecode.errors import MissingExtraError, MMDecodeError, OptionError, UnsupportedModelError

STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
"""Device maps that transformers makes itself."""


def load(
    model_id: str,
    device: str | torch.device | None,
    dtype: str | torch.dtype | None,
    device_map: str | Mapping[str, Any] | None = None,
    quantize: str | None = None,
) -> tuple[Any, Any]:
    """Loads a vision-language checkpoint; returns the model and its processor.

    Args:
        model_id: See `mmdecode.checkpoints.local_path`.
        device: Device of the model; ``None``: CUDA if available, else the CPU.
        dtype: See `mmdecode.checkpoints.dtype_of`.
        device_map: Splits the model over devices, CPU and disk, as accelerate does it: ``auto``,
            another strategy, the path of a JSON file, or a mapping of modules to devices.
        quantize: ``int8`` or ``fp8``, see `mmdecode.quantize`; ``None``: weights as loaded.

    Raises:
        InputError: The checkpoint cannot be loaded.
        MissingExtraError: Its processor, or ``device_map``, needs a library that is not installed.
        OptionError: The device, dtype, format or strategy does not exist, a map is given next to a
            device or a format, or the map has one of two tied weights on disk.
        UnsupportedModelError: The checkpoint is no vision-language model, or cannot be rounded.
    """
    if device_map is None:
        model, processor = _loaded(model_id, device, dtype)
        return placed(model.eval(), device, quantize), processor
    if quantize is not None:
        raise OptionError(
            f"quantize={quantize!r} and a device_map are given; leave out the map: a model is "
            "rounded on one device"
        )
    if device not in (None, "auto"):
        raise OptionError(
            f"device={device!r} and a device_map are given; leave out either: the map says where "
            "each part goes"
        )
    chosen = map_of(device_map)
    folder = tempfile.TemporaryDirectory(prefix="mmdecode-offload-", ignore_cleanup_errors=True)
    more = {"device_map": chosen, "offload_folder": folder.name}
    try:
        model, processor = _loaded(model_id, device, dtype, **more)
    except BaseException:
        folder.cleanup()
        raise
    weakref.finalize(model, folder.cleanup)  # which keeps the folder until then
    return model.eval(), processor


def _loaded(
    model_id: str,
    device: str | torch.device | None,
    dtype: str | torch.dtype | None,
    **more: Any,
) -> tuple[Any, Any]:
    """The model, wherever transformers puts it, and its processor; see `load`."""
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
            if isinstance(more.get("device_map"), dict):
                kinds = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
                _refuse_split_ties(kinds, config, more["device_map"])
            processor = AutoProcessor.from_pretrained(path, trust_remote_code=code_trusted())
            model = AutoModelForImageTextToText.from_pretrained(
                path, dtype=kind, trust_remote_code=code_trusted(), **more
            )
    except MMDecodeError:
        raise
    except ImportError as error:  # some processors need torchvision
        reason = " ".join(str(error).split())
        raise MissingExtraError(
            f"loading {model_id!r} needs a library ({reason})", extra="vlm"
        ) from error
    return model, processor


_EXPECTED = (
    f"expected {', '.join(STRATEGIES)}, or a JSON file that maps names of modules to devices, such "
    'as {"": "cpu"}'
)


def _refuse_split_ties(kinds: Any, config: Any, devices: Mapping[str, Any]) -> None:
    """Refuses a map that puts one of two tied weights on disk, and the other elsewhere.

    Raises:
        OptionError: The map does so.
    """
    ties = None
    for kind in kinds if isinstance(kinds, tuple) else (kinds,):
        ties = ties or getattr(kind, "_tied_weights_keys", None)
    if not isinstance(ties, dict) or not getattr(config, "tie_word_embeddings", False):
        return

    def device(weight: str) -> Any:
        above = [n for n in devices if not n or f"{weight}.".startswith(f"{n}.")]
        return devices[max(above, key=len)] if above else None

    for pair in ties.items():
        where = [device(weight) for weight in pair]
        if "disk" in where and where[0] != where[1]:
            raise OptionError(
                f"device_map has {pair[0]} on {where[0]} and {pair[1]} on {where[1]}, and they are "
                "one weight (tie_word_embeddings); give both modules one device"
            )


def map_of(given: str | os.PathLike[str] | Mapping[str, Any]) -> str | dict[str, Any]:
    """Returns a device map as transformers takes it.

    Raises:
        MissingExtraError: accelerate is not installed.
        OptionError: It is neither a strategy nor a mapping, nor a JSON file of one; or a device
            does not exist.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise MissingExtraError("device_map needs accelerate", extra="train")
    if isinstance(given, str) and given in STRATEGIES:
        return given
    found: Any = given
    if isinstance(given, (str, os.PathLike)):
        given = os.fspath(given)
        try:
            found = json.loads(Path(given).read_text(encoding="utf-8"))
        except OSError as error:
            raise OptionError(
                f"device_map={given!r} cannot be read: {error.strerror}; {_EXPECTED}"
            ) from error
        except ValueError as error:
            raise OptionError(f"device_map={given!r} is not JSON: {error}; {_EXPECTED}") from error
    if not isinstance(found, Mapping) or not found:
        what = type(found).__name__ if not isinstance(found, Mapping) else "no module"
        raise OptionError(f"device_map={given!r:.80} holds {what}; {_EXPECTED}")
    for module, device in found.items():
        if device == "disk":
            continue
        known = isinstance(device, (str, int, torch.device)) and not isinstance(device, bool)
        if not known or device == "auto":
            raise OptionError(
                f"device_map has {device!r:.80} for {module!r}; expected a device, such as cpu, "
                "disk or cuda:0"
            )
        try:
            device_of(torch.device(device) if isinstance(device, int) else device)
        except OptionError as error:
            raise OptionError(f"device_map for {module!r}: {error}, or disk") from error
    return dict(found)
