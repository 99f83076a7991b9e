"""The recipe of recordings that heads are trained on."""

import ctypes.util
from dataclasses import replace

import numpy as np
import pytest
import soundfile

from mmdecode.asr.audio.reading import blocks
from mmdecode.asr.output.inputs import recordings_in
from mmdecode.asr.output.manifest import opened, read_manifest
from mmdecode.train.zoo.spoken_sentences import SpokenOptions, run

needs_espeak = pytest.mark.skipif(
    ctypes.util.find_library("espeak-ng") is None,
    reason="espeak-ng, the system package that speaks the training data, is not installed",
)
OPTIONS = SpokenOptions(domain="grammar", count=4)


def seconds(folder):
    return [soundfile.info(path).duration for path in sorted(folder.glob("*.wav"))]


@needs_espeak
def test_recordings_are_written_once_and_can_be_trained_on(tmp_path):
    report = run(OPTIONS, tmp_path)
    assert report["recordings"] == len(seconds(tmp_path)) == 4
    entries = recordings_in(tmp_path / "manifest.jsonl", None)
    for entry, length in zip(entries, seconds(tmp_path), strict=True):
        wave = np.concatenate(list(blocks(opened(entry), 16_000)))
        assert len(wave) == round(16_000 * length) and np.abs(wave).max() > 0.05
    texts = [one.text for one in read_manifest(tmp_path / "manifest.jsonl", text=True)]
    assert len({*texts}) == 4
    kept, second = (tmp_path / "000000.wav").read_bytes(), tmp_path / "000001.wav"
    before = soundfile.info(second).duration
    second.unlink()
    run(OPTIONS, tmp_path)
    assert (tmp_path / "000000.wav").read_bytes() == kept
    # the same voice and noise, though others were not made again
    assert soundfile.info(second).duration == pytest.approx(before, abs=0.02)


@needs_espeak
def test_shares_of_noise_and_rooms_are_those_of_the_settings(tmp_path):
    clean = replace(OPTIONS, noisy=0.0, reverberant=0.0)
    for name, options in (("clean", clean), ("noisy", replace(clean, noisy=1.0))):
        run(options, tmp_path / name)
    quiet = {
        name: [
            np.abs(soundfile.read(path)[0][:1000]).max()  # before the voice begins
            for path in (tmp_path / name).glob("*.wav")
        ]
        for name in ("clean", "noisy")
    }
    assert max(quiet["clean"]) == 0.0 < min(quiet["noisy"])
