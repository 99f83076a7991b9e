"""``mmdecode env``: shows versions and devices, for bug reports."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

from rich.table import Table

import mmdecode
from mmdecode.checkpoints import cached_folder, is_installed, scheme_names
from mmdecode.cli.output import JsonFlag, emit_json
from mmdecode.runs.console import out

EXTRAS = {
    "": "jinja2 torch transformers tokenizers safetensors numpy rich typer",
    "asr": "torchaudio librosa soundfile jiwer",
    "asr, serve": "soxr",
    "serve": "fastapi uvicorn websockets python-multipart prometheus-client",
    "vlm, image": "pillow torchvision timm",
    "train": "accelerate peft",
    "eval": "scipy scikit-learn matplotlib pandas kaldialign",
    "vad": "silero-vad",
    "media": "av",
    "mic": "sounddevice",
    "tables, scale": "pyarrow",
    "scale": "ray",
    "torchao": "torchao",
    "bench": "ctranslate2",
    "moonshine": "moonshine-voice",
}
"""Distributions by the extras that install them; those of no extra are always installed."""
PACKAGES = {name: extra for extra, names in EXTRAS.items() for name in names.split()}


def command(json: JsonFlag = False) -> None:
    """Show versions and devices, for bug reports."""
    import torch

    available = torch.cuda.is_available()
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found: dict[str, Any] = {
        "mmdecode": mmdecode.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.version.cuda if available else None,
        "cuda_devices": devices if available else [],
        "packages": {
            name: {"version": _version(name), "extra": extra} for name, extra in PACKAGES.items()
        },
        "checkpoints": {name: is_installed(name) for name in scheme_names()},
    }
    if json:
        emit_json(found)
        return
    table = Table("item", "value", title=f"mmdecode {found['mmdecode']}", title_justify="left")
    for item in ("python", "platform", "cpus", "torch_threads", "cuda"):
        table.add_row(item, str(found[item]))
    for device in found["cuda_devices"]:
        table.add_row("device", device)
    for name, package in found["packages"].items():
        missing = f"missing (extra: {package['extra']})" if package["extra"] else "missing"
        table.add_row(name, package["version"] or missing)
    for name, installed in found["checkpoints"].items():
        folder = cached_folder(name)
        where = f"not installed here, but converted in the user's cache: {folder}"
        table.add_row(name, where if folder else "installed" if installed else "not installed")
    out.print(table)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
