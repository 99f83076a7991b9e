"""Weights of checkpoints: files to tensors by name, and tensors into a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mmdecode.checkpoints import local_path
from mmdecode.errors import InputError
from mmdecode.no_models import refuse_unfinished

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    Model = TypeVar("Model", bound=PreTrainedModel)


def read_weights(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads ``config.json`` and all tensors of a checkpoint; pickles with ``weights_only=True``.

    Args:
        path: A folder, or a Hub id whose files are in the local cache or can be downloaded.

    Raises:
        InputError: No weights are found.
    """
    import json

    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(
            snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.bin", "*.pt"])
        )
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.exists() else {}
    weights: dict[str, Any] = {}
    files = sorted(folder.glob("*.safetensors"))
    pickles = [f for f in (*folder.glob("*.bin"), *folder.glob("*.pt")) if "args" not in f.name]
    for file in files or sorted(pickles):
        weights |= read_tensors(file)
    if not weights:
        refuse_unfinished(path)
        raise InputError(
            f"{path} holds no weights; expected *.safetensors, *.bin or *.pt next to config.json"
        )
    return config, weights


def read_json(name: str, file: str) -> dict[str, Any]:
    """Reads a JSON file of a checkpoint; empty if the checkpoint has no such file.

    Args:
        name: A folder, a Hub id or another name of `mmdecode.checkpoints.local_path`.
        file: Name of the file.
    """
    import json

    from transformers.utils import cached_file

    found = cached_file(
        local_path(name),
        file,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return {} if found is None else json.loads(Path(found).read_text(encoding="utf-8"))


def read_tensors(file: Path) -> dict[str, Any]:
    """Reads a file of weights; returns tensors by name (a pickle may nest them under a key).

    Raises:
        InputError: The file is missing, or neither safetensors nor a pickle of tensors only.
    """
    import torch
    from safetensors.torch import load_file

    if not file.is_file():
        found = "is a folder" if file.is_dir() else "does not exist"
        raise InputError(f"{file} {found}; expected a file of weights, .safetensors or .pt")
    if not file.stat().st_size:
        raise InputError(f"{file} is empty; expected a file of weights: copy it again")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        return dict(torch.load(file, weights_only=True, map_location="cpu"))
    except Exception as error:  # each reader has errors of its own
        raise InputError(
            f"{file} cannot be read as weights ({type(error).__name__}: {_reason(error)}); "
            "expected safetensors, or a pickle of tensors only"
        ) from error


def _reason(error: Exception) -> str:
    """Returns what went wrong, without torch's advice to load untrusted code."""
    _, known, reason = f"{error}".partition("WeightsUnpickler error: ")
    return (reason if known else f"{error}").strip().partition("\n")[0].partition(". ")[0]


WRAPPER_KEYS = ("model", "module", "state_dict")
"""Keys under which training code puts the weights in a checkpoint."""


def published_weights(file: str | Path, marker: str) -> dict[str, Any]:
    """Reads the weights of a published checkpoint, under one of `WRAPPER_KEYS` or at the top.

    Args:
        file: Checkpoint, ``.pt``, ``.pth``, ``.bin`` or ``.safetensors``.
        marker: Name of a parameter that the architecture always has, to recognise the weights.

    Raises:
        InputError: The parameter is not found, or the file cannot be read.
    """
    found = read_tensors(Path(file))
    for key in WRAPPER_KEYS:
        inner = found.get(key)
        if isinstance(inner, dict) and marker in inner:
            return dict(inner)
    if marker in found:
        return found
    shown = ", ".join(sorted(map(str, found))[:6]) or "nothing"
    raise InputError(
        f"{file} holds {shown}; expected {marker!r} at the top or under "
        f"{', '.join(map(repr, WRAPPER_KEYS))}: give a checkpoint of this architecture"
    )


def unlike(
    wanted: Mapping[str, Any], given: Mapping[str, Any]
) -> list[tuple[str, str | None, str | None]]:
    """Lists the weights that are missing, unknown or of another shape, sorted by name.

    Returns:
        Name, wanted shape and given shape of each weight; ``None``: the weight does not exist.
    """
    here, there = (
        {name: str(tuple(value.shape)) for name, value in weights.items()}
        for weights in (wanted, given)
    )
    names = sorted({*here, *there})
    pairs = [(name, here.get(name), there.get(name)) for name in names]
    return [pair for pair in pairs if pair[1] != pair[2]]


def fill(model: Model, weights: dict[str, Any], source: str | Path) -> Model:
    """Loads weights into a model; returns it in float32 and evaluation mode.

    Raises:
        InputError: A weight is missing, unknown or of another shape.
    """
    wrong = unlike(model.state_dict(), weights)
    if wrong:
        shown = "; ".join(
            f"{name}: {given or 'missing'}, expected {wanted or 'nothing'}"
            for name, wanted, given in wrong[:4]
        )
        raise InputError(
            f"{source} does not fit {type(model).__name__} in {len(wrong)} weights ({shown}); give "
            "the configuration it was trained with, or another checkpoint"
        )
    model.load_state_dict(weights)
    return model.float().eval()
