"""Windows of several recordings are corrected in one batch, and one that fails fails alone."""

import contextlib
from dataclasses import replace

import pytest

from mmdecode.asr import TranscribeOptions, Transcriber
from mmdecode.asr.audio.reading import source_of
from mmdecode.asr.audio.recording import Tape
from mmdecode.errors import InputError
from mmdecode.runs.items import Watch
from tests.support.correctors import Marked

OPTIONS = TranscribeOptions(batch_size=3, timestamps=False)


@pytest.fixture(scope="module")
def sources(kit):
    """Recordings of one window each, of which the third cannot be read."""

    def broken():
        raise InputError("it is broken")
        yield

    found = [
        replace(source_of(kit.noise(0.6 + 0.1 * clip, seed=clip), kit.rate), name=f"clip {clip}")
        for clip in range(6)
    ]
    found[2] = replace(found[2], read=broken)
    return found


def test_a_batch_is_of_several_recordings(model, processor, sources):
    method, noted = Marked(batch_size=3), []
    watch = Watch(lambda names: noted.append(list(names)) or contextlib.nullcontext())
    found, batches = [], []
    for one in Transcriber(model, processor, None, OPTIONS, method).stream(sources, watch=watch):
        found.append(one)
        batches.append(len(method.batches))
    # a failure waits for nobody, three for a full batch, the others for the end
    assert [one.index for one in found] == [2, 0, 1, 3, 4, 5] and batches == [0, 1, 1, 1, 2, 2]
    assert method.batches == [["clip 0#0", "clip 1#0", "clip 3#0"], ["clip 4#0", "clip 5#0"]]
    assert noted == [["clip 0", "clip 1", "clip 3"]] * 2 + [["clip 4", "clip 5"]] * 2
    assert all(one.text.endswith(" indeed") for one in found[1:])
    assert "clip 2" in found[0].source and "it is broken" in found[0].error


def test_every_recording_has_the_result_that_it_has_alone(model, processor, sources):
    transcribed = {}
    for size, batch_size in ((1, None), (4, None), (4, 2)):
        method = Marked(batch_size=size)
        transcriber = Transcriber(model, processor, None, OPTIONS, method)
        found = list(transcriber.stream(sources, batch_size=batch_size))
        transcribed[size, batch_size] = sorted(found, key=lambda one: one.index)
        assert max(len(batch) for batch in method.batches) == min(size, batch_size or size)
    assert all(found == transcribed[1, None] for found in transcribed.values())


def test_a_recording_that_vanishes_before_its_correction_fails_alone(
    model, processor, sources, monkeypatch
):
    class Gone(Tape):
        def read(self, start, stop):
            raise InputError("it is gone")

    transcriber = Transcriber(model, processor, None, OPTIONS, Marked(batch_size=2))
    opened = transcriber.recognizer.open

    def open_one(source):
        recording = opened(source)
        if source.name == "clip 1":
            recording.tape = lambda: Gone(iter([]))
        return recording

    monkeypatch.setattr(transcriber.recognizer, "open", open_one)
    found = {one.source: one for one in transcriber.stream([*sources[:2], *sources[3:5]])}
    assert found.pop("clip 1").error == "it is gone"
    assert len(found) == 3 and all(one.text.endswith("indeed") for one in found.values())
