"""Recordings that heads are trained on: what is kept, and what is left out."""

from dataclasses import dataclass

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor

from mmdecode.asr import TranscribeOptions
from mmdecode.asr.output.inputs import recordings_in
from mmdecode.asr.recognizers import of_type
from mmdecode.errors import InputError, OptionError
from mmdecode.train.drafters import recordings
from mmdecode.train.drafters.recordings import forget, read_windows, refuse_finished, stored
from tests.support.tiny_recognizers import moonshine


@dataclass
class Sample:
    length: int
    mean: Tensor


class Stopped(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def windows():
    dice = np.random.default_rng(0)
    return [dice.standard_normal(100 + n).astype("f4") for n in range(7)]


def test_what_is_stored_is_not_computed_again(tmp_path, windows, monkeypatch):
    monkeypatch.setattr(recordings, "PART", 3)
    computed = []

    def compute(part, stop=99):
        for window in part:
            if len(computed) == stop:
                raise Stopped
            computed.append(len(window))
            yield Sample(len(window), torch.tensor(window).mean())

    def run(given=windows, settings=("a",), **stop):
        computed.clear()
        found = stored(tmp_path, Sample, given, lambda part: compute(part, **stop), settings)
        expected = [float(window.mean()) for window in given]
        assert [float(one.mean) for one in found] == pytest.approx(expected)
        assert [one.length for one in found] == [len(window) for window in given]
        return len(computed)

    with pytest.raises(Stopped):
        run(stop=5)
    assert run() == 4  # the first part of three was there
    assert run() == 0
    assert run(settings=("b",)) == 7
    assert run([window + 1 for window in windows]) == 7
    forget(tmp_path)
    assert not tmp_path.exists()


def test_damaged_recordings_are_left_out_and_named(tmp_path, capsys):
    model, processor = moonshine()
    recognizer = of_type(model.config.model_type)(model, processor, TranscribeOptions())
    for index, seconds in enumerate((1.0, 0.5, 2.0)):
        wave = np.random.default_rng(index).standard_normal(round(16_000 * seconds)) * 0.1
        soundfile.write(tmp_path / f"{index}.wav", wave, 16_000)
    whole = (tmp_path / "2.wav").read_bytes()
    (tmp_path / "2.wav").write_bytes(whole[:3000])
    found = read_windows(recognizer, recordings_in(tmp_path), None)
    assert [len(window) for window in found] == [8_000, 16_000]
    printed = capsys.readouterr().err.replace("\n", " ")
    assert "left out" in printed and "2.wav" in printed and "1 of 3" in printed
    for index in range(2):
        (tmp_path / f"{index}.wav").write_bytes(b"RIFF nothing")
    with pytest.raises(InputError, match="none of 3 recordings"):
        read_windows(recognizer, recordings_in(tmp_path), None)


def test_heads_that_are_trained_are_not_replaced_unasked(tmp_path):
    refuse_finished(tmp_path / "new", False)
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(OptionError, match=r"holds trained heads.*--overwrite"):
        refuse_finished(tmp_path, False)
    refuse_finished(tmp_path, True)
