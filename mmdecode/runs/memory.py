"""Memory: how much is free, how much a prompt needs, and which errors mean that it ran out.

On a CPU an allocation rarely fails: the system overcommits memory and kills the process later.
Therefore a prompt is refused in advance if the estimate of its memory exceeds the free memory. This
module does not import torch.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmdecode.errors import InputError

_OUT = re.compile(
    r"can't allocate memory|cannot allocate memory|not enough memory|out of memory|bad_alloc"
    r"|CUBLAS_STATUS_ALLOC_FAILED|storage size calculation overflowed",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Returns whether an error, or an error that caused it, means that memory ran out.

    Recognised are CUDA's out-of-memory error, `MemoryError` of Python and numpy, the system error
    ENOMEM, and the ``RuntimeError`` that torch raises if an allocation on a CPU fails.
    """
    if error is None:
        return False
    torch = sys.modules.get("torch")
    known = (MemoryError, torch.OutOfMemoryError) if torch is not None else (MemoryError,)
    by_message = isinstance(error, (RuntimeError, OSError)) and _OUT.search(str(error)) is not None
    return isinstance(error, known) or by_message or is_out_of_memory(error.__cause__)


def is_device_lost(error: BaseException) -> bool:
    """Returns whether an error of CUDA leaves the device of this process unusable."""
    torch = sys.modules.get("torch")
    lost = torch is not None and isinstance(error, torch.AcceleratorError)
    return lost and not is_out_of_memory(error)


def return_freed() -> None:
    """Returns memory that this process has freed to the system; does nothing without glibc.

    An allocator keeps freed memory for later. In a long-lived process whose requests have many
    different sizes, what it keeps is scattered, and grows.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def share_gpu(share: float) -> None:
    """Limits this process to a share of its GPU's memory; beyond it a batch is halved.

    `mmdecode.evaluation.row_bytes` tells which batch size fits the share.

    Args:
        share: Share of the memory; 0, or 1 and more: no limit.
    """
    if 0 < share < 1:
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(share)


def free_memory(root: Path = Path("/")) -> int | None:
    """Returns the bytes that this process can still use, by machine and control group limits.

    Args:
        root: Folder that holds the file systems ``proc`` and ``sys``.

    Returns:
        Free bytes; ``None`` if they are unknown.
    """
    found = [*_of_machine(root), *_of_groups(root)]
    return min(found, default=None)


def refuse_beyond_memory(needed: int, what: str, hint: str) -> None:
    """Refuses an operation that needs more memory than is free.

    Args:
        needed: Estimate of the bytes that the operation needs.
        what: Name of the operation, for the message.
        hint: Advice to the user, for the message.

    Raises:
        InputError: The operation needs more memory than is free. If the free memory is unknown,
            no error is raised.
    """
    free = free_memory()
    if free is not None and needed > free:
        raise InputError(
            f"{what} needs about {_size(needed)} of memory, {_size(free)} are free; {hint}"
        )


def cache_bytes(config: Any, rows: int, slots: int, itemsize: int) -> int:
    """Computes the memory of the keys and values of all layers, in bytes.

    Args:
        config: Configuration of the text model.
        rows: Rows of all branches.
        slots: Tokens that the cache holds in each row.
        itemsize: Bytes per element of the model's dtype.
    """
    layers, hidden = _number(config, "num_hidden_layers"), _number(config, "hidden_size")
    heads = _number(config, "num_attention_heads")
    groups = _number(config, "num_key_value_heads") or heads
    size = _number(config, "head_dim") or (hidden // heads if heads else 0)
    return 2 * layers * rows * slots * groups * size * itemsize


def pass_bytes(
    config: Any, rows: int, tokens: int, seen: int, itemsize: int, *, masked: bool, eager: bool
) -> int:
    """Estimates the memory that one pass takes beyond weights and cache, in bytes.

    The estimate counts the activations inside one layer, the attention mask, and the score matrix
    of eager attention. It errs on the low side.

    Args:
        config: Configuration of the text model.
        rows: Rows of the pass.
        tokens: Tokens of each row.
        seen: Tokens that attention covers.
        itemsize: Bytes per element of the model's dtype.
        masked: Whether a mask of queries by keys is built.
        eager: Whether the attention implementation materialises its scores.
    """
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    inner = _number(config, "intermediate_size") or 4 * hidden
    states = rows * tokens * (5 * hidden + 4 * inner) * itemsize
    pairs = rows * tokens * seen
    mask = pairs * (itemsize + 2) if masked else 0  # made of two flags for each number
    scores = pairs * 2 * heads * itemsize if eager else 0
    return states + mask + scores


def _number(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else 0


def _of_machine(root: Path) -> Iterator[int]:
    text = _read(root / "proc/meminfo")
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE))
    if "MemAvailable" in found:
        yield (int(found["MemAvailable"]) + int(found.get("SwapFree", 0))) * 1024
    elif root == Path("/") and hasattr(os, "sysconf"):
        names = ("SC_AVPHYS_PAGES", "SC_PAGE_SIZE")
        if all(name in os.sysconf_names for name in names):
            pages, size = (os.sysconf(name) for name in names)
            if pages > 0 and size > 0:
                yield pages * size


def _of_groups(root: Path) -> Iterator[int]:
    """Yields the free bytes of each control group of this process and of its parent groups."""
    top = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names not in ("", "memory"):
            continue
        base = top / names if names else top
        limit, usage = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes")
            if names
            else ("memory.max", "memory.current")
        )
        group = base / path.strip("/")
        # in a container its own group is the root, whatever the host calls it
        for folder in {base, *(f for f in (group, *group.parents) if base in f.parents)}:
            most, used = _read(folder / limit).strip(), _read(folder / usage).strip()
            if most.isdigit() and used.isdigit():
                stat = dict(re.findall(r"^(\w+) (\d+)$", _read(folder / "memory.stat"), re.M))
                files = int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0)
                yield max(int(most) - int(used) + files, 0)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _size(number: int) -> str:
    """Formats a number of bytes in the largest unit that gives a value of at least 1."""
    value, unit = float(number), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
