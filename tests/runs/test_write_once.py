"""Folders of the user's cache: written atomically, and once for concurrent processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mmdecode.checkpoints import cache_folder
from mmdecode.errors import InputError
from mmdecode.runs.files import write_once
from mmdecode.runs.locks import LOCK

FILES = {"a.txt": b"a" * 1000, "b.txt": b"b"}

PREPARE = """
import os, signal, sys, time
from pathlib import Path
from mmdecode.runs.files import write_once
folder = Path(sys.argv[1])
"""
DIES = """
class Files(dict):
    def items(self):
        yield "a.txt", b"half"
        os.kill(os.getpid(), signal.SIGKILL)
write_once(folder, Files)
"""
SLOW = """
def make():
    time.sleep(0.2)
    print("made", flush=True)
    return {"a.txt": b"whole"}
write_once(folder, make)
print((folder / "a.txt").read_bytes())
"""
NO_ROOM = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    write_once(folder, lambda: {"a.txt": b"a" * 1000})
except ValueError as error:
    print(error)
"""


def start(code, folder):
    command = [sys.executable, "-c", PREPARE + code, folder]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_folder_is_made_whole_and_not_again(tmp_path):
    folder = tmp_path / "cache" / "one"
    write_once(folder, lambda: FILES)
    write_once(folder, lambda: pytest.fail("made twice"))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == FILES
    assert list(folder.parent.iterdir()) == [folder]


def test_what_fails_while_it_is_made_leaves_nothing(tmp_path):
    def fails():
        raise InputError("no")

    with pytest.raises(InputError, match="no"):
        write_once(tmp_path / "one", fails)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_process_that_is_killed_in_the_middle_leaves_nothing_that_is_taken_for_whole(tmp_path):
    folder = tmp_path / "one"
    killed = start(DIES, folder)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert [file.suffix for file in tmp_path.iterdir() if file.name != LOCK] == [".tmp"]
    write_once(folder, lambda: FILES)
    assert list(tmp_path.iterdir()) == [folder]
    assert (folder / "a.txt").read_bytes() == FILES["a.txt"]


@pytest.mark.skipif(os.name != "posix", reason="locks")
def test_of_processes_that_ask_at_once_one_makes_it_and_all_get_it(tmp_path):
    runs = [start(SLOW, tmp_path / "one") for _ in range(3)]
    printed = [run.communicate()[0] for run in runs]
    assert sorted(printed) == ["b'whole'\n"] * 2 + ["made\nb'whole'\n"]


@pytest.mark.skipif(os.name != "posix", reason="limits of a process")
def test_a_disk_without_room_is_an_error_that_says_what_to_do(tmp_path):
    printed = start(NO_ROOM, tmp_path / "cache" / "one").communicate()[0]
    assert printed.startswith(f"cannot write to the cache {tmp_path / 'cache'}: File too large")
    assert "MMDECODE_CACHE" in printed
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_made_is_an_error_that_says_what_to_do(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"cannot write to the cache .*file.*MMDECODE_CACHE"):
        write_once(tmp_path / "file" / "one", lambda: FILES)


def test_the_cache_is_where_the_environment_says(monkeypatch):
    monkeypatch.setenv("MMDECODE_CACHE", "~/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert cache_folder() == Path("~/own").expanduser()
    monkeypatch.delenv("MMDECODE_CACHE")
    assert cache_folder() == Path("/shared/mmdecode")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("~/.cache/mmdecode").expanduser()


def test_a_user_without_a_home_is_asked_to_name_a_folder(monkeypatch):
    pwd = pytest.importorskip("pwd")

    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for name in ("HOME", "MMDECODE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match="set MMDECODE_CACHE"):
        cache_folder()
