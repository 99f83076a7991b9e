"""Clock of measurements, and their conditions: machine, versions of libraries, options."""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from mmdecode.asr.transcriber import Transcriber


def now(device: torch.device) -> float:
    """Returns the clock in seconds, after waiting for all work queued on the device."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
    return time.perf_counter()


def device_name(device: torch.device) -> str:
    """Returns type and model of a device, such as ``cpu (x86_64)``."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"{device.type} ({name})"


def load_average() -> str | None:
    """Returns the system's load average of the last minute; ``None`` where there is none."""
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else None


def load_note(before: str | None, after: str | None = None) -> str:
    """Warning that times are not comparable; empty where the machine was free enough.

    Args:
        before: Load average before the measurement, as `load_average` gives it.
        after: The same after it, to which the measurement itself has added.
    """
    cores = os.cpu_count() or 1
    given = [(before, cores), (after, cores + 1)]
    high = [float(load) for load, most in given if load is not None and float(load) > most]
    if not high:
        return ""
    return (
        f"times are not comparable: the load average of {max(high):.1f} exceeds the {cores} cores, "
        "so other programs were at work; run it again on a free machine"
    )


def conditions_of(transcribers: Mapping[str, Transcriber]) -> dict[str, Any]:
    """Returns the conditions of a transcription: model, drafters, options, device, versions.

    Args:
        transcribers: Transcribers of one model by the name of the method they are compared under.
    """
    first = next(iter(transcribers.values()))
    return {
        **surroundings(first.model),
        "drafts": {m: type(one.decoder.draft).__name__ for m, one in transcribers.items()},
        "options": dataclasses.asdict(first.options),
    }


def spoken(model: Any, **runs: str) -> dict[str, str]:
    """Returns the conditions that a demo's page shows, as texts by name.

    Args:
        model: The model.
        **runs: How often and with what the model was run.
    """
    found = surroundings(model)
    busy = load_note(None, found["load_average"])
    versions = (f"{name} {found[name]}" for name in ("mmdecode", "torch", "transformers"))
    return {
        "device": ", ".join(found[n] for n in ("device", "dtype", "quantize") if n in found),
        "threads": f"threads: {found['threads']}",
        "load": f"load average {found['load_average']}{f'; {busy}' if busy else ''}",
        **runs,
        "versions": ", ".join(versions),
    }


def surroundings(model: Any) -> dict[str, Any]:
    """Returns a model's name, device, dtype and threads, the load, and versions of libraries.

    Rounded weights are named by ``quantize``, which is missing otherwise.
    """
    import torch
    import transformers

    import mmdecode
    from mmdecode._compat import input_device
    from mmdecode.quantization.models import format_of

    return {
        "model": os.path.basename(model.config.name_or_path) or type(model).__name__,
        "device": device_name(input_device(model)),
        "dtype": str(model.dtype).removeprefix("torch."),
        **({} if (rounded := format_of(model)) is None else {"quantize": rounded}),
        "threads": torch.get_num_threads(),
        "load_average": load_average(),
        "mmdecode": mmdecode.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def changes_of(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """How settings differ, by name; lists of things with names by these, where they differ."""

    def names(value: Any) -> Any:
        listed = isinstance(value, list) and all(isinstance(one, dict) for one in value)
        return [one.get("name") for one in value] if listed else value

    found = {}
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if before != after:
            if names(before) != names(after):
                before, after = names(before), names(after)
            found[key] = f"{key} was {before!r}, is {after!r}"
    return found
