"""Names of checkpoints: a folder, a Hub id, or ``zoo:NAME``, a model shipped with the package."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mmdecode.errors import InputError, MMDecodeError, OptionError, UnknownNameError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from transformers import PreTrainedModel

    Model = TypeVar("Model", bound=PreTrainedModel)

ZOO = Path(__file__).parent / "zoo" / "models"


def zoo_names() -> list[str]:
    """Names of the shipped models, without the ``zoo:`` prefix."""
    return sorted(p.parent.name for p in ZOO.glob("*/config.json"))


def paired(model_id: str | None, what: str) -> str | None:
    """Name of what is shipped for a shipped model, ``zoo:NAME-WHAT``; ``None``: there is none."""
    name = f"{model_id}-{what}"
    return name if name.startswith("zoo:") and name[4:] in zoo_names() else None


def local_path(name: str | Path) -> str:
    """What ``from_pretrained`` takes.

    Raises:
        UnknownNameError: ``zoo:NAME`` is not shipped.
        InputError: A path that looks like a folder does not exist.
    """
    text = str(name)
    if text.startswith("zoo:"):
        if text[4:] not in zoo_names():
            raise UnknownNameError.of("zoo model", text[4:], zoo_names())
        return str(ZOO / text[4:])
    looks_local = text.startswith((".", "/", "~")) or text.count("/") > 1
    path = Path(text).expanduser()
    if looks_local and not path.exists():
        raise InputError(
            f"model folder {text!r} does not exist; give a folder, a Hub id or zoo:NAME"
        )
    return str(path) if path.exists() else text


def dtype_of(name: str | torch.dtype | None) -> torch.dtype:
    """A floating dtype; ``None``: float32.

    Raises:
        OptionError: There is none of that name.
    """
    import torch

    kind = getattr(torch, name, None) if isinstance(name, str) else name or torch.float32
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise OptionError(f"dtype={name!r}; expected float32, bfloat16 or float16")
    return kind


def placed(model: Any, device: str | torch.device | None) -> Any:
    """The model on a device; ``None``: CUDA where there is one.

    Raises:
        OptionError: The device cannot be used.
    """
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise OptionError(f"device {device!r} cannot be used: {error}") from error


@contextmanager
def loading(model_id: str) -> Iterator[None]:
    """Turns what transformers raises over a checkpoint it cannot read into our error.

    Raises:
        InputError: It cannot be loaded.
    """
    try:
        yield
    except MMDecodeError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(
            f"model {model_id!r} cannot be loaded: {' '.join(str(error).split())[:300]}; give a "
            "folder, a Hub id that can be reached, or zoo:NAME"
        ) from error


def config_of(path: str) -> Any:
    """The model configuration of a checkpoint."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path)


def read_weights(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """``config.json`` and all tensors of a checkpoint; pickles are read as weights only.

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
    config = json.loads(config_file.read_text()) if config_file.exists() else {}
    weights: dict[str, Any] = {}
    files = sorted(folder.glob("*.safetensors"))
    pickles = [f for f in (*folder.glob("*.bin"), *folder.glob("*.pt")) if "args" not in f.name]
    for file in files or sorted(pickles):
        weights |= read_tensors(file)
    if not weights:
        raise InputError(
            f"{path} holds no weights; expected *.safetensors, *.bin or *.pt beside config.json"
        )
    return config, weights


def read_tensors(file: Path) -> dict[str, Any]:
    """What one file of weights holds: tensors by name, in pickles perhaps below a key.

    Raises:
        InputError: It is not there, or neither safetensors nor a pickle of tensors alone.
    """
    import torch
    from safetensors.torch import load_file

    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        return dict(torch.load(file, weights_only=True, map_location="cpu"))
    except Exception as error:  # each reader has errors of its own
        raise InputError(
            f"{file} cannot be read as weights ({type(error).__name__}: {error}); expected "
            "safetensors, or a pickle of tensors alone"
        ) from error


PLACES = ("model", "module", "state_dict")
"""Keys under which training frameworks put weights: DDP, DeepSpeed and others."""


def published_weights(file: str | Path, marker: str) -> dict[str, Any]:
    """Weights of a research checkpoint: under one of `PLACES`, or bare.

    Args:
        file: ``.pt``, ``.pth``, ``.bin`` or ``.safetensors``.
        marker: A parameter that the architecture always has.

    Raises:
        InputError: None of the places holds the parameter, or the file cannot be read.
    """
    found = read_tensors(Path(file))
    for place in PLACES:
        inner = found.get(place)
        if isinstance(inner, dict) and marker in inner:
            return dict(inner)
    if marker in found:
        return found
    shown = ", ".join(sorted(map(str, found))[:6]) or "nothing"
    raise InputError(
        f"{file} holds {shown}; expected {marker!r} at the top or under "
        f"{', '.join(map(repr, PLACES))}: give a checkpoint of this architecture"
    )


def unlike(
    wanted: Mapping[str, Any], given: Mapping[str, Any]
) -> list[tuple[str, str | None, str | None]]:
    """Weights that are missing, unknown or of another shape, by name.

    Returns:
        Of each its name, the shape that is wanted and the one that is given; ``None``: none is.
    """
    here, there = (
        {name: str(tuple(value.shape)) for name, value in weights.items()}
        for weights in (wanted, given)
    )
    names = sorted({*here, *there})
    pairs = [(name, here.get(name), there.get(name)) for name in names]
    return [pair for pair in pairs if pair[1] != pair[2]]


def fill(model: Model, weights: dict[str, Any], source: str | Path) -> Model:
    """The model with these weights, in float32 and evaluation mode.

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
