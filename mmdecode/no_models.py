"""Folders that hold no model, and the errors that say what they hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmdecode.errors import InputError


def kind_of_part(config: Mapping[str, Any]) -> str | None:
    """Returns the kind of part for a model that a checkpoint holds; ``None``: it is a model.

    Args:
        config: The checkpoint's ``config.json``.
    """
    heads = "medusa" if config.get("model_type") == "mmdecode_medusa" else None
    return config.get("drafter", heads)


def refuse_unfinished(path: str) -> None:
    """Refuses the folder of an unfinished training, which has a state but no final weights.

    Raises:
        InputError: ``path`` is such a folder.
    """
    if (Path(path) / "state").is_dir() and not (Path(path) / "config.json").exists():
        raise InputError(
            f"{path} holds the state of a training that is not finished, and no weights yet; run "
            "the same 'mmdecode train' command again, which continues the training or says why not"
        )


def refuse_part(name: str, folder: Path) -> None:
    """Refuses the folder of something that works with a model, such as Medusa heads.

    Args:
        name: Name that was given.
        folder: Its folder, if there is one.

    Raises:
        InputError: It is such a folder.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    kind = kind_of_part(config) if isinstance(config, dict) else None
    if kind is not None:
        raise InputError(
            f"{name} holds no model, but a part for one (its config.json says {kind!r}); give the "
            "model, and the part by an option such as --draft, --vad-method or --punctuate"
        )
