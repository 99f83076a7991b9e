"""Free memory, the memory that a prompt needs, and errors that mean that memory ran out."""

import errno
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmdecode.errors import InputError
from mmdecode.runs import memory
from mmdecode.runs.memory import (
    free_memory,
    is_out_of_memory,
    pass_bytes,
    refuse_beyond_memory,
)


def raised(call):
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def wrapped():
    try:
        raise MemoryError
    except MemoryError as error:
        raise ValueError("a model failed") from error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        pytest.param(lambda: torch.empty(2**59, dtype=torch.uint8), id="torch"),
        pytest.param(lambda: torch.empty(2**40, 2**40), id="more than can be counted"),
        pytest.param(lambda: np.empty(2**59, dtype=np.uint8), id="numpy"),
        pytest.param(wrapped, id="raised from another"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_errors_of_every_allocator_are_known(error):
    assert is_out_of_memory(raised(error) if callable(error) else error)


@pytest.mark.parametrize(
    "error", [None, ValueError("out of memory"), RuntimeError("shapes differ"), KeyError("memory")]
)
def test_other_errors_are_not_taken_for_it(error):
    assert not is_out_of_memory(error)


def machine(root, **files):
    for name, text in files.items():
        path = root / name.replace("__", ".").replace("_", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:  900 kB\nMemAvailable:  600 kB\nSwapFree:  0 kB\n"


def test_what_the_machine_has_free_is_read(tmp_path):
    assert free_memory(machine(tmp_path, proc_meminfo=MEMINFO)) == 600 * 1024
    found = free_memory()
    assert found > 0 if Path("/proc/meminfo").exists() else found is None


@pytest.mark.parametrize(
    ("line", "folder", "limit", "usage"),
    [
        ("0::/job/inner", "job", "memory.max", "memory.current"),
        ("0::/", "", "memory.max", "memory.current"),
        ("0::/of/the/host", "", "memory.max", "memory.current"),
        ("4:memory:/job", "memory/job", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_the_tightest_control_group_counts(tmp_path, line, folder, limit, usage):
    machine(tmp_path, proc_meminfo=MEMINFO, proc_self_cgroup=f"1:cpu:/x\n{line}\n")
    group = tmp_path / "sys/fs/cgroup" / folder
    group.mkdir(parents=True)
    (group / limit).write_text("5000\n")
    (group / usage).write_text("4000\n")
    (group / "memory.stat").write_text("anon 7\ninactive_file 500\n")
    assert free_memory(tmp_path) == 1500


def test_a_group_without_a_limit_sets_none(tmp_path):
    machine(tmp_path, proc_meminfo=MEMINFO, proc_self_cgroup="0::/\n")
    machine(tmp_path, sys_fs_cgroup_memory__max="max\n", sys_fs_cgroup_memory__current="4000\n")
    assert free_memory(tmp_path) == 600 * 1024


def test_where_nothing_is_known_nothing_is_refused(tmp_path):
    assert free_memory(tmp_path) is None
    refuse_beyond_memory(1, "a prompt", "shorten it")


def test_too_much_is_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: 2 * 10**9)
    with pytest.raises(InputError, match=r"needs about 75 TB of memory, 2 GB are free; shorten"):
        refuse_beyond_memory(75 * 10**12, "a prompt", "shorten it")


def test_the_estimate_grows_with_the_square_only_where_there_is_a_mask():
    config = SimpleNamespace(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, intermediate_size=128
    )

    def needed(width, masked, eager=False):
        return pass_bytes(config, 2, width, width, 4, masked=masked, eager=eager)

    assert needed(2000, masked=False) == 2 * needed(1000, masked=False)
    assert needed(2000, masked=True) - needed(2000, masked=False) == 2 * 2000**2 * 6
    assert needed(2000, masked=True, eager=True) > 8 * needed(2000, masked=True) / 2


FREED = """
import ctypes, psutil, sys
from mmdecode.runs import memory
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
blocks = [libc.malloc(4000) for _ in range(50_000)]
for block in blocks:
    ctypes.memset(block, 1, 4000)
full = psutil.Process().memory_info().rss
for block in blocks[:-1]:  # the last one is at the end of the heap
    libc.free(block)
kept = psutil.Process().memory_info().rss
memory.return_freed()
print(full - kept, kept - psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="malloc_trim is glibc's")
def test_freed_memory_is_returned_to_the_system():
    found = subprocess.run(
        [sys.executable, "-c", FREED], capture_output=True, text=True, check=True
    )
    before, after = map(int, found.stdout.split())
    assert before < 50e6 and after > 150e6
