"""Memory: what is free, what reading a prompt needs, and which errors mean that it ran out.

On a CPU an allocation rarely fails: the system promises memory that it does not have and kills the
process later. So a prompt is refused beforehand if an estimate exceeds the free memory. Nothing
here loads torch.
"""

from __future__ import annotations

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
    """Whether an error, or the one that it was raised from, means that memory ran out.

    CUDA's error, `MemoryError` (numpy's and Python's), ENOMEM, and the ``RuntimeError`` that torch
    raises for allocations on a CPU.
    """
    if error is None:
        return False
    torch = sys.modules.get("torch")
    known = (MemoryError, torch.OutOfMemoryError) if torch is not None else (MemoryError,)
    by_message = isinstance(error, (RuntimeError, OSError)) and _OUT.search(str(error)) is not None
    return isinstance(error, known) or by_message or is_out_of_memory(error.__cause__)


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process can still use, by the machine's and its control groups' limits.

    Args:
        root: Where the file systems ``proc`` and ``sys`` are found.

    Returns:
        ``None`` if nothing is known.
    """
    found = [*_of_machine(root), *_of_groups(root)]
    return min(found, default=None)


def refuse_beyond_memory(needed: int, what: str, hint: str, free: int | None = None) -> None:
    """Refuses an operation that needs more memory than is free.

    Args:
        needed: Bytes, as estimated.
        what: Purpose, for the message.
        hint: The way out, for the message.
        free: Bytes; default: what `free_memory` finds.

    Raises:
        InputError: More is needed than is free. If the free memory is not known, nothing is
            refused.
    """
    free = free_memory() if free is None else free
    if free is not None and needed > free:
        raise InputError(
            f"{what} needs about {_size(needed)} of memory, {_size(free)} are free; {hint}"
        )


def prompt_bytes(
    config: Any, rows: int, width: int, slots: int, itemsize: int, *, masked: bool, eager: bool
) -> int:
    """Estimate of the memory that reading a prompt takes beyond the weights, in bytes.

    Keys and values of all layers, the states inside one layer, and tensors of queries times keys: a
    mask, and the scores of eager attention. The estimate is rather too low than too high.

    Args:
        config: Configuration of the text model.
        rows: Rows of all branches.
        width: Tokens of the prompt.
        slots: Tokens that the cache holds.
        itemsize: Bytes of one number of the model.
        masked: Whether there is a mask of queries and keys.
        eager: Whether attention computes its scores explicitly.
    """
    layers, hidden = _number(config, "num_hidden_layers"), _number(config, "hidden_size")
    heads = _number(config, "num_attention_heads")
    groups = _number(config, "num_key_value_heads") or heads
    size = _number(config, "head_dim") or (hidden // heads if heads else 0)
    inner = _number(config, "intermediate_size") or 4 * hidden
    cache = 2 * layers * rows * slots * groups * size
    states = rows * width * (5 * hidden + 4 * inner)
    pairs = rows * width * slots
    mask = pairs * (itemsize + 2) if masked else 0  # made of two flags for each number
    scores = pairs * 2 * heads * itemsize if eager else 0
    return (cache + states) * itemsize + mask + scores


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
    """Free bytes of each control group of this process, and of each above it."""
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
    """Bytes as text, in the largest unit of which there is at least one."""
    value, unit = float(number), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
