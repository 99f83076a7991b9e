"""``mmdecode env``: shows versions and devices, for bug reports."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

from rich.table import Table

import mmdecode
from mmdecode.cli.output import JsonFlag, emit_json
from mmdecode.runs.console import out

# extras that install each distribution; empty: always installed
PACKAGES = {
    "jinja2": "",
    "torch": "",
    "transformers": "",
    "tokenizers": "",
    "safetensors": "",
    "numpy": "",
    "rich": "",
    "typer": "",
    "torchaudio": "asr",
    "librosa": "asr",
    "soundfile": "asr",
    "soxr": "asr",
    "jiwer": "asr",
    "pillow": "vlm, image",
    "torchvision": "vlm, image",
    "timm": "vlm, image",
    "accelerate": "train",
    "peft": "train",
    "scipy": "eval",
    "scikit-learn": "eval",
    "matplotlib": "eval",
    "pandas": "eval",
    "kaldialign": "eval",
    "silero-vad": "vad",
    "av": "media",
    "pyarrow": "tables",
    "torchao": "torchao",
    "ctranslate2": "bench",
    "moonshine-voice": "moonshine",
}


def command(json: JsonFlag = False) -> None:
    """Show versions and devices, for bug reports."""
    from mmdecode.checkpoints import cached_folder

    found = _collect()
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


def _collect() -> dict[str, Any]:
    import torch

    from mmdecode.checkpoints import is_installed, scheme_names

    available = torch.cuda.is_available()
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
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


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
