"""Inputs of streams: recordings in real time, pipes, microphones; and what feeds streams from them.

Streams hear recordings of ten samples a second, as in `test_streaming`. The clock is a number.
"""

import io
import os
import sys
import time

import numpy as np
import pytest

from mmdecode.asr.audio.inputs import Arrival, AudioInput, FileInput, PipeInput
from mmdecode.asr.audio.microphone import Microphone, find_device, input_devices
from mmdecode.asr.audio.reading import Source
from mmdecode.asr.results import Failure
from mmdecode.asr.streaming import Stream, StreamPool
from mmdecode.asr.streaming.feeding import Feeder
from mmdecode.errors import InputError, MissingExtraError
from tests.asr.test_stream_pool import Several, known
from tests.asr.test_streaming import RATE, Hearer, spoken, text_of, updates_of, words_up_to
from tests.support.microphone import SoundDevice

HIGH = 8_000
"""Rate of recordings, which are read by the real reader."""


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds


class Listed(AudioInput):
    """An input of blocks at known times: of a live source, or, without times, of a recording."""

    def __init__(self, name, blocks, clock, live=True, broken=False):
        super().__init__(name)
        self.blocks, self.clock, self.live, self.broken = list(blocks), clock, live, broken
        self.closed = False

    @property
    def is_live(self):
        return self.live

    def take(self):
        if self.ended:
            return None
        if self.blocks and (not self.live or self.blocks[0].arrived_s <= self.clock()):
            return self.blocks.pop(0)
        if self.broken and not self.blocks:
            raise InputError(f"{self.name}: is broken")
        self.ended = not self.blocks or self.closed
        return None

    def close(self):
        self.closed = True
        self.ended = not self.live


def live(name, samples, clock, begin_s=0.0, **how):
    """Half-second blocks, in real time."""
    blocks = [
        Arrival(samples[at : at + 5], begin_s + (at + len(samples[at : at + 5])) / RATE)
        for at in range(0, len(samples), 5)
    ]
    return Listed(name, blocks, clock, **how)


def recorded(name, samples, clock, **how):
    blocks = [Arrival(samples[at : at + 10]) for at in range(0, len(samples), 10)]
    return Listed(name, blocks, clock, live=False, **how)


class Slow(Several):
    """Takes ``cost_s`` seconds of the clock per batch."""

    def __init__(self, clock, cost_s):
        super().__init__()
        self.clock, self.cost_s = clock, cost_s

    def stream(self, requests, batch_size):
        self.clock.now += self.cost_s
        yield from super().stream(requests, batch_size)


def fed(inputs, clock, cost_s=0.0, stop_s=None):
    """Updates of inputs by name, and the feeder."""
    pool = StreamPool(Slow(clock, cost_s), clock=clock, most_waiting_s=1e9)
    feeder, found = Feeder(pool, inputs, 1.0, clock.wait), {one.name: [] for one in inputs}
    feeder.start()
    while not feeder.ended:
        for one, update in feeder.step():
            found[one.input.name].append(update)
        if stop_s is not None and clock() >= stop_s:
            stop_s = None
            feeder.stop()
    return found, feeder


# Feeding


@pytest.mark.parametrize("make", [live, recorded])
def test_inputs_have_the_texts_that_they_have_alone(make):
    clock, samples = Clock(), {"a": spoken(30), "b": spoken(12, first=101), "c": spoken(1)[:0]}
    found, feeder = fed([make(name, one, clock) for name, one in samples.items()], clock)
    for name, one in samples.items():
        assert text_of(found[name]) == text_of(updates_of(Stream(Hearer()), one)), name
    assert not any(one.error for one in feeder.streams)
    assert max(feeder._pool.transcriber.batches) == 2


def test_an_input_that_breaks_keeps_its_words_and_the_others_go_on():
    clock = Clock()
    inputs = [
        live("a", spoken(10), clock, broken=True),
        live("b", spoken(20), clock),
        recorded("c", spoken(1)[:0], clock, broken=True),
    ]
    found, feeder = fed(inputs, clock)
    assert [text_of(found[name]) for name in "abc"] == [words_up_to(10), words_up_to(20), ""]
    errors = [one.error for one in feeder.streams]
    assert errors[1] is None and [errors[0].error, errors[2].error] == [
        "a: is broken",
        "c: is broken",
    ]


def test_a_stream_that_fails_closes_its_input():
    clock = Clock()
    inputs = [live("a", spoken(10, first=1), clock), live("b", spoken(5, first=50), clock)]
    pool = StreamPool(Several(), clock=clock)
    pool.transcriber.broken = {3}
    feeder, results = Feeder(pool, inputs, 1.0, clock.wait), []
    while not feeder.ended:
        results += feeder.step()
    first, second = feeder.streams
    assert first.error.error == "too much" and inputs[0].closed and second.error is None
    assert sum(isinstance(found, Failure) for _, found in results) == 1


def test_an_input_that_cannot_start_is_its_own_failure():
    class Closed(Listed):
        def start(self):
            raise InputError("microphone 0 cannot be opened")

    clock = Clock()
    found, feeder = fed([Closed("a", [], clock), live("b", spoken(5), clock)], clock)
    assert feeder.streams[0].error.error == "microphone 0 cannot be opened"
    assert text_of(found["b"]) == words_up_to(5)


def test_a_recording_is_measured_as_if_it_had_arrived_in_real_time():
    for cost_s, delays in ((0.4, [0.4, 0.4, 0.4]), (1.5, [1.5, 2.0, 2.5])):
        clock = Clock()
        found, _ = fed([recorded("a", spoken(10)[:30], clock)], clock, cost_s)
        late = [round(update.ready_s - update.audio_s, 6) for update in found["a"]][:3]
        assert late == delays


def test_the_delay_of_a_live_input_grows_where_the_machine_is_slower_and_nothing_is_lost():
    clock = Clock()
    samples = spoken(40)
    found, feeder = fed([live("a", samples, clock, begin_s=0.0)], clock, cost_s=1.5)
    assert text_of(found["a"]) == text_of(updates_of(Stream(Hearer()), samples))
    late = [update.ready_s - update.audio_s for update in found["a"][:-1]]  # whole steps
    assert late == pytest.approx([1.5 + 0.5 * n for n in range(len(late))], abs=0.05)
    assert feeder.streams[0].discarded_s == 0


def test_a_stop_commits_what_is_provisional_and_counts_what_was_not_transcribed():
    clock = Clock()
    inputs = [live("a", spoken(40), clock), recorded("b", spoken(40), clock)]
    found, feeder = fed(inputs, clock, cost_s=1.5, stop_s=6.0)
    # four steps of b and three of a by 6 s, when it is stopped; a may take one more
    assert [found[name][-1].audio_s for name in "ab"] == [4.0, 4.0]
    for name, one in zip("ab", feeder.streams, strict=True):
        whole = updates_of(Stream(Hearer()), spoken(40)[: round(found[name][-1].audio_s * RATE)])
        assert known(text_of(found[name])) == known(text_of(whole)), "the provisional words too"
        assert one.ended and one.error is None
    assert [one.discarded_s for one in feeder.streams] == [pytest.approx(2.0), 0.0]


def test_a_stop_takes_one_step_more_however_much_a_block_holds():
    clock = Clock()
    inputs = [Listed("a", [Arrival(spoken(40)[:70], 0.0)], clock)]
    found, feeder = fed(inputs, clock, cost_s=1.5, stop_s=1.0)
    assert found["a"][-1].audio_s == 2.0 and not found["a"][-1].provisional
    assert feeder.streams[0].discarded_s == pytest.approx(5.0)


# Recordings and pipes


def source(seconds, broken=False):
    def read():
        yield HIGH, np.linspace(0, 0.5, round(seconds * HIGH), dtype=np.float32)[:, None]
        if broken:
            raise InputError("x: is broken")

    return Source("x", read)


def test_a_recording_in_real_time_arrives_with_the_clock():
    clock = Clock()
    one = FileInput(source(1.05), HIGH, HIGH // 10, real_time=True, clock=clock)
    clock.now = 7.0
    one.start()
    assert one.is_live and one.take() is None
    clock.now = 7.25
    assert [one.take().arrived_s for _ in range(2)] == pytest.approx([7.1, 7.2])
    assert one.take() is None and not one.ended
    clock.now = 9.0
    rest = []
    while (arrival := one.take()) is not None:
        rest.append(arrival)
    assert one.ended and rest[-1].arrived_s == pytest.approx(8.05)
    assert sum(len(arrival.samples) for arrival in rest) == round(0.85 * HIGH)


def test_a_recording_in_real_time_ends_with_what_has_arrived_when_it_is_closed():
    clock = Clock()
    one = FileInput(source(5), HIGH, HIGH // 10, real_time=True, clock=clock)
    clock.now = 0.55
    one.close()
    clock.now = 4.0
    taken = 0
    while not one.ended:
        arrival = one.take()
        taken += 0 if arrival is None else len(arrival.samples)
    assert taken == round(0.5 * HIGH)


def test_a_recording_is_there_at_once_and_raises_where_it_breaks():
    one = FileInput(source(1, broken=True), HIGH, HIGH)
    arrival = one.take()
    assert len(arrival.samples) == HIGH and arrival.arrived_s is None and not one.is_live
    with pytest.raises(InputError, match="x: is broken"):
        one.take()
    closed = FileInput(source(1), HIGH, HIGH)
    closed.close()
    assert closed.take() is None and closed.ended


def all_of(one):
    """Samples of an input until it ends."""
    found, until = [], time.monotonic() + 5
    while not one.ended:
        assert time.monotonic() < until
        arrival = one.take()
        if arrival is None:
            time.sleep(0.001)
        else:
            found.append(arrival.samples)
    return np.concatenate([np.zeros(0, np.float32), *found])


def test_a_pipe_gives_all_samples_and_a_cut_off_byte_is_ignored():
    samples = (1000 * np.sin(np.arange(40_000))).astype("<i2")
    one = PipeInput(io.BytesIO(samples.tobytes() + b"\0"), RATE, 1000)
    one.start()
    assert np.array_equal(all_of(one) * 32768, samples.astype(np.float32))
    assert not one.is_live, "it was faster than real time"


def test_a_pipe_that_is_slow_is_live_and_ends_with_what_it_gave():
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as file, os.fdopen(write_end, "wb") as writer:
        one = PipeInput(file, 16_000, 1600)
        one.start()
        writer.write(b"\1\0" * 1600)
        writer.flush()
        until = time.monotonic() + 5
        while (arrival := one.take()) is None:
            assert time.monotonic() < until
        assert len(arrival.samples) == 1600 and one.is_live and not one.ended
        one.close()
        assert one.take() is None and one.ended
        writer.close()
        time.sleep(0.01)  # the thread ends


def test_a_file_with_a_header_on_a_pipe_is_refused():
    one = PipeInput(io.BytesIO(b"RIFF" + bytes(100)), RATE, 1000)
    one.start()
    with pytest.raises(InputError, match="samples without a header"):
        all_of(one)


# Microphones


@pytest.fixture
def sound(monkeypatch):
    def made(*devices, **how):
        library = SoundDevice(devices or [("Desk", 1, 48_000.0)], **how)
        monkeypatch.setitem(sys.modules, "sounddevice", library)
        return library

    return made


def opened(rate=16_000, **how):
    one = Microphone(rate, find_device(), **how)
    one.start()
    return one


def test_devices_that_record_are_listed(sound):
    sound(("Speaker", 0, 44_100.0), ("Desk", 1, 48_000.0), ("Line", 2, 44_100.0), default=2)
    assert [(one.index, one.name, one.is_default) for one in input_devices()] == [
        (1, "Desk", False),
        (2, "Line", True),
    ]
    assert find_device().name == "Line" and find_device(1).name == "Desk"
    with pytest.raises(InputError, match=r"index 0; there are 1 \(Desk\), 2 \(Line\)"):
        find_device(0)


def test_without_a_default_the_first_device_is_taken_and_without_any_it_is_an_error(sound):
    sound(("Speaker", 0, 44_100.0), ("Desk", 1, 48_000.0), default=-1)
    assert find_device().name == "Desk"
    sound(("Speaker", 0, 44_100.0), default=-1)
    with pytest.raises(InputError, match="no microphone was found"):
        find_device()


def test_what_is_missing_is_named_with_what_installs_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'mmdecode\[mic\]'"):
        find_device()
    monkeypatch.delitem(sys.modules, "sounddevice")
    (tmp_path / "sounddevice.py").write_text("raise OSError('PortAudio library not found')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match="apt-get install libportaudio2"):
        find_device()


def test_a_microphone_that_does_the_rate_gives_its_samples(sound):
    library = sound()
    clock = Clock()
    one = opened(clock=clock)
    [stream] = library.streams
    assert (stream.rate, stream.channels, stream.active) == (16_000, 1, True)
    samples = np.linspace(-1, 1, 16_000, dtype=np.float32)
    clock.now = 3.0
    stream.record(samples)
    first = one.take()
    assert first.arrived_s == 3.0 and len(first.samples) == 1600
    one.close()
    assert stream.closed
    assert np.array_equal(np.concatenate([first.samples, all_of(one)]), samples)


def test_a_microphone_is_resampled_and_its_channels_averaged(sound):
    library = sound(takes=lambda channels, rate: (channels, rate) == (2, 48_000))
    library.devices = [("Desk", 2, 48_000.0)]
    one = opened()
    [stream] = library.streams
    assert (stream.rate, stream.channels) == (48_000, 2)
    stream.record(np.sin(2 * np.pi * 440 * np.arange(48_000) / 48_000).astype(np.float32))
    one.close()
    found = all_of(one)
    expected = np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    assert len(found) == 16_000 and np.abs(found - expected)[100:-100].max() < 1e-3


def test_a_full_queue_is_noted_once_and_what_was_lost_becomes_silence(sound):
    library = sound()
    one = opened(most_s=0.5)
    [stream] = library.streams
    samples = np.ones(16_000, np.float32)
    stream.record(samples)  # of ten blocks five fit
    taken = [one.take().samples for _ in range(5)]
    stream.record(samples[:1600])
    taken.append(one.take().samples)
    assert one.lost_s == 0.5
    found = np.concatenate(taken)
    assert len(found) == 16_000 + 1600
    assert found.sum() == 6 * 1600 and not found[8000:16_000].any()
    [note] = one.notes
    assert "is lost" in note and "more than 0.5 s wait" in note
    one.take()
    assert len(one.notes) == 1


def test_samples_that_port_audio_dropped_are_noted(sound):
    library = sound()
    one = opened()
    library.streams[0].record(np.ones(3200, np.float32), overflow=True)
    one.take(), one.take()
    assert [note.partition("lost")[1] for note in one.notes] == ["lost"]


def test_a_microphone_that_is_in_use_or_disconnected_is_an_error_of_a_line(sound):
    library = sound()
    one = opened()
    library.streams[0].active = False
    with pytest.raises(InputError, match=r"microphone 0 \(Desk\) stopped recording"):
        one.take()
    library.busy = True
    with pytest.raises(InputError, match="cannot be opened: Device unavailable"):
        opened()
    library.takes = lambda channels, rate: False
    with pytest.raises(InputError, match="records neither 16000 nor 48000 Hz"):
        opened()
