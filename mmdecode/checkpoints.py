"""Names of checkpoints: a folder, a Hub id, or ``zoo:NAME``, the models shipped with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmdecode.errors import InputError, UnknownNameError

ZOO = Path(__file__).parent / "zoo" / "models"


def zoo_names() -> list[str]:
    """Names of the shipped models, without the ``zoo:`` prefix."""
    return sorted(p.parent.name for p in ZOO.glob("*/config.json"))


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


def config_of(path: str) -> Any:
    """The model configuration of a checkpoint."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path)
