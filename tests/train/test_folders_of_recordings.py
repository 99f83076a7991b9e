"""Trainings over recordings take a table or a folder, and refuse other files before they begin."""

import json
import shutil

import numpy as np
import pytest

from mmdecode.asr.output.inputs import recordings_in
from mmdecode.errors import InputError
from mmdecode.train.alignment_heads import recordings
from mmdecode.zoo.speech import speech_test
from tests.support.commands import invoke


@pytest.fixture
def folder(tmp_path):
    for clip in speech_test()[:2]:
        shutil.copy(clip.path, tmp_path)
    return tmp_path


def test_a_folder_is_a_table_of_its_recordings(folder):
    found = recordings_in(folder)
    assert len(found) == 2 and len(recordings_in(folder, 1)) == 1
    table = folder / "table.jsonl"
    table.write_text("".join(json.dumps({"path": entry.audio}) + "\n" for entry in found))
    assert [entry.audio for entry in recordings_in(table)] == [entry.audio for entry in found]
    for one, other in zip(recordings(folder, 16_000, 2), recordings(table, 16_000, 2), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("command", ["medusa", "alignment-heads"])
def test_what_holds_no_recordings_is_refused(command, tmp_path):
    (tmp_path / "notes.md").write_text("# Notes")
    (tmp_path / "empty").mkdir()
    for name in ("notes.md", "empty"):
        words = ["train", command, "--model", "zoo:whisper-synth", "--data", str(tmp_path / name)]
        words += ["--out", str(tmp_path / "out")] if command == "medusa" else []
        done = invoke(*words)
        assert isinstance(done.exception, InputError), done.exception
    assert not (tmp_path / "out").exists()
