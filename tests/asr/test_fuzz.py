"""Broken recordings and manifests by the hundred; see `fuzz.py`, which makes and reads them."""

import importlib.util
import sys
from pathlib import Path

import pytest

from mmdecode.asr.results import Failure
from mmdecode.asr.transcriber import Transcriber
from mmdecode.errors import InputError

pytest.importorskip("av")
spec = importlib.util.spec_from_file_location("fuzz", Path(__file__).with_name("fuzz.py"))
fuzz = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fuzz)


def check(found):
    assert found["bad"] == []
    outcomes = found["outcomes"]
    cut = outcomes["cut"]
    assert cut.get("read", 0) <= 0.1 * cut["InputError"], "what a few last samples are missing from"
    for kind in ("cut_header", "empty", "text", "html", "picture", "nan", "rate"):
        assert set(outcomes.get(kind, ["InputError"])) == {"InputError"}, kind
    for kind in ("double", "column", "shape", "nothing"):
        assert set(outcomes.get(f"manifest {kind}", ["InputError"])) == {"InputError"}, kind


def test_a_hundred_broken_files_are_read_or_refused(tmp_path):
    found = fuzz.run(tmp_path, 111, seed=3)
    check(found)
    assert found["files"] - found["outcomes"]["whole"]["read"] >= 99


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_two_thousand_broken_files_are_read_or_refused(tmp_path):
    found = fuzz.run(tmp_path, 2_250, seed=4)
    check(found)
    assert found["files"] - found["outcomes"]["whole"]["read"] >= 2_000
    assert len(found["outcomes"]) == 27


def test_recordings_among_broken_ones_are_transcribed_as_alone(tmp_path, folder):
    made = fuzz.make(tmp_path, 60, seed=5)
    paths = [str(path) for path, kind in made if not kind.startswith("manifest")]
    controls = [str(path) for path, kind in made if kind == fuzz.CONTROL]
    transcriber = Transcriber.from_pretrained(folder, device="cpu", max_new_tokens=5, batch_size=4)
    found = {one.source: one for one in transcriber(paths)}
    assert list(found) == paths
    assert sum(isinstance(one, Failure) for one in found.values()) > 10
    for control in controls:
        [alone] = transcriber([control])
        assert found[control].tokens == alone.tokens


# What the tests above would not be worth if they could not fail

READER = """
import os, sys, time
print("{}", flush=True)
for line in sys.stdin:
    if "bad" in line:
        WAY
    print('{"outcome": "read", "value": "same"}', flush=True)
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", ["os.abort()", "time.sleep(99)", "sys.exit()"])
def test_a_reader_that_crashes_or_hangs_is_seen_and_the_next_file_is_read(way):
    read_file = fuzz.Reader([sys.executable, "-c", READER.replace("WAY", way)], limit_s=2)
    outcomes = [read_file(path)["outcome"].split()[0] for path in ("good", "bad", "good")]
    read_file.close()
    assert outcomes == ["read", "CRASH", "read"]


@pytest.mark.parametrize(
    ("problem", "outcome"),
    [
        (KeyError("a.wav"), "BUG KeyError"),
        (MemoryError(), "BUG MemoryError"),
        (InputError("it is broken; mend it"), "unclear"),
        (InputError("a.wav: is broken"), "unclear"),
        (InputError("a.wav: is broken; mend it"), "InputError"),
    ],
    ids=str,
)
def test_what_a_reader_raises_is_judged(monkeypatch, problem, outcome):
    def fails(path):
        raise problem

    monkeypatch.setattr(fuzz, "read", fails)
    assert fuzz.outcome("a.wav")["outcome"] == outcome
