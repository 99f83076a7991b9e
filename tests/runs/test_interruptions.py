"""Jobs that are killed at random moments end as if they had been left alone."""

import os
import subprocess
import sys

import pytest

from tests.image_ar.conftest import NAMES, tiny_llamagen, tiny_vq
from tests.support.commands import json_of


def interrupted(*words):
    done = subprocess.run(
        [sys.executable, "-m", "tests.runs.interrupted", *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json_of(done)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_five_killed_runs_end_as_one_that_was_left_alone_and_a_crash_as_a_failure(tmp_path):
    found = interrupted(tmp_path, "--kills", 5, "--items", 60, "--seed", 1)
    assert [one["killed"] for one in found.values()] == [5, 5]


@pytest.mark.slow
@pytest.mark.timeout(3_600)
def test_a_hundred_killed_runs_lose_nothing_double_nothing_and_change_nothing(tmp_path):
    tiny_llamagen(id2label=NAMES).save_pretrained(tmp_path / "classes")
    tiny_vq().save_pretrained(tmp_path / "classes" / "vq")
    images = ["--image-model", tmp_path / "classes"]
    found = interrupted(tmp_path / "runs", "--kills", 34, "--items", 500, "--seed", 2, *images)
    assert [one["killed"] for one in found.values()] == [34] * 3
    assert min(one["compared"] for one in found.values()) >= 4
