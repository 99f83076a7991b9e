"""What tests of several folders share, and an environment that is the same on every machine.

A test must not depend on what a machine happens to have: this hides programs that libraries start
where they are there, GPUs from all but the tests for them, the user's Hub cache, account and
connection, and an encoding other than UTF-8, from this process and those it starts.
"""

import atexit
import contextlib
import locale
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

OPTIONAL_PROGRAMS = ("ffmpeg", "ffprobe", "avconv", "sox", "espeak", "espeak-ng")
"""What some library here starts if it finds it."""

FOREIGN = ("HF_ENDPOINT", "HF_TOKEN", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE")
_OF_SESSION = Path(tempfile.mkdtemp(prefix="mmdecode-tests-"))
atexit.register(shutil.rmtree, _OF_SESSION, ignore_errors=True)


def _without_programs(path: str) -> str:
    """The search path with a copy, in links, of each folder that has one of `OPTIONAL_PROGRAMS`."""
    found = []
    for number, folder in enumerate(path.split(os.pathsep)):
        if any(os.path.lexists(Path(folder) / name) for name in OPTIONAL_PROGRAMS):
            links = _OF_SESSION / f"path-{number}"
            links.mkdir()
            for program in os.scandir(folder):
                if program.name not in OPTIONAL_PROGRAMS:
                    (links / program.name).symlink_to(os.path.abspath(program.path))
            folder = str(links)
        found.append(folder)
    return os.pathsep.join(found)


# before any library is imported that reads these once
os.environ["PATH"] = _without_programs(os.environ.get("PATH", os.defpath))
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - else workers starve beside a test
os.environ["HF_HOME"] = str(_OF_SESSION / "huggingface")
os.environ["MMDECODE_CACHE"] = str(_OF_SESSION / "mmdecode")
for _name in (*FOREIGN, "PYTEST_ADDOPTS"):  # pytest has read its options by now
    os.environ.pop(_name, None)
for _name in ("C.UTF-8", "C.utf8", "en_US.UTF-8"):
    with contextlib.suppress(locale.Error):  # the machine has none of that name
        locale.setlocale(locale.LC_ALL, _name)
        os.environ["LC_ALL"] = _name
        break

import pytest  # noqa: E402

from tests.support.taping import taping  # noqa: E402


@pytest.hookimpl(tryfirst=True)  # before those of other marks are left out
def pytest_collection_modifyitems(items):
    """Marks as slow what `one_in` says: cases are counted in the order of their test."""
    cases = Counter()
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is not None:
            (step,) = mark.args
            test = item.nodeid.partition("[")[0]
            if cases[test] % step:
                item.add_marker(pytest.mark.slow)
            cases[test] += 1


def pytest_configure(config):
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture
def taped():
    """Captures on the CPU, and counts replays."""
    with taping() as replays:
        yield replays
