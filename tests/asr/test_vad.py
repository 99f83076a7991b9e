"""Voice activity: silence is skipped, the text stays, times are those of the recording."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch

from mmdecode.asr import Failure, TranscribeOptions, Transcriber
from mmdecode.asr.audio.blanks import Blanks
from mmdecode.asr.audio.reading import source_of
from mmdecode.asr.audio.vad import FRAME, RATE, Silero, Stretch, Timeline
from mmdecode.asr.options import BLANKS, SILERO
from mmdecode.errors import MissingExtraError, OptionError
from mmdecode.zoo.speech import speech_test

pytest.importorskip("silero_vad")
STEP = FRAME / RATE


def silence(seconds):
    return np.zeros(round(seconds * RATE), np.float32)


@pytest.fixture(scope="module")
def clips():
    """Of one sentence each."""
    short = [clip for clip in speech_test() if clip.duration_s < 8]
    return [soundfile.read(clip.path, dtype="float32")[0] for clip in short[:6]]


@pytest.fixture(scope="module")
def ours(trained):
    return Transcriber.from_pretrained(trained, device="cpu", vad=True)


@pytest.fixture(scope="module")
def plain(trained):
    return Transcriber.from_pretrained(trained, device="cpu")


def detector(**options):
    return Silero(TranscribeOptions(vad=True, **options))


# Text and times


def sound(samples):
    """Where a clip begins and ends to be heard, in seconds: 35 dB below its loudest."""
    loud = np.abs(samples) > np.abs(samples).max() * 10 ** (-35 / 20)
    return np.flatnonzero(loud)[[0, -1]] / RATE


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("one", "other"), [(0, 3), (0, 4), (0, 5), (1, 4)])
def test_inserted_silence_changes_neither_text_nor_times(ours, plain, clips, one, other):
    gaps = 5.0, 8.0, 6.0
    first, second = clips[one], clips[other]
    samples = np.concatenate([silence(gaps[0]), first, silence(gaps[1]), second, silence(gaps[2])])
    found = ours(samples)
    assert found.text == " ".join(t.text for t in plain([first, second]))
    disturbed = plain(samples)
    assert disturbed.text != found.text, "silence did no harm, so nothing is proved"
    assert found.stats["windows"] < disturbed.stats["windows"]
    offsets = gaps[0], gaps[0] + len(first) / RATE + gaps[1]
    wanted = [sound(clip) + offset for clip, offset in zip((first, second), offsets, strict=True)]
    times = [(s.start_s, s.end_s) for s in found.segments if s.text]
    assert len(times) == 2
    assert np.abs(np.array(times) - np.array(wanted)).max() < 0.2
    assert found.duration_s == pytest.approx(len(samples) / RATE, abs=1e-3)


@pytest.mark.parametrize("kind", ["silence", "noise", "hum"])
def test_without_speech_the_transcript_is_empty(ours, kind):
    random = np.random.default_rng(0)
    samples = {
        "silence": silence(9.0),
        "noise": 0.05 * random.standard_normal(9 * RATE).astype(np.float32),
        "hum": 0.1 * np.sin(2 * np.pi * 50 * np.arange(9 * RATE) / RATE).astype(np.float32),
    }[kind]
    found = ours(samples)
    assert (found.text, found.segments, found.tokens) == ("", [], [])
    assert found.duration_s == 9.0
    assert found.stats["windows"] == 0


def test_a_batch_with_and_without_speech_equals_one_by_one(ours, trained, clips):
    inputs = [silence(3.0), np.concatenate([clips[0], silence(4.0), clips[1]]), clips[2]]
    seconds = []
    together = list(ours.stream(inputs, seconds.append))
    together.sort(key=lambda t: t.index)
    assert sum(seconds) == pytest.approx(sum(len(x) for x in inputs) / RATE, abs=0.05)
    one = Transcriber.from_pretrained(trained, device="cpu", vad="silero", batch_size=1)
    for samples, found in zip(inputs, together, strict=True):
        alone = one(samples)
        assert (alone.tokens, alone.segments, alone.stats) == (
            found.tokens,
            found.segments,
            found.stats,
        )


def test_what_cannot_be_read_is_still_an_error(ours, tmp_path):
    found = ours([np.zeros(0, np.float32), tmp_path / "none.wav", silence(1.0)])
    assert [isinstance(t, Failure) for t in found] == [True, True, False]
    assert "no samples" in found[0].error


# Stretches by hand


def runs(vad, *parts):
    """What is kept of probabilities given as (value, seconds)."""
    values = [value for value, seconds in parts for _ in range(round(seconds / STEP))]
    found = vad.stretches(values, len(values) * STEP)
    return [(round(part.begin, 2), round(part.stop, 2)) for part in found]


def test_short_silences_are_kept_and_short_sounds_are_not():
    vad = detector(vad_min_silence_s=0.96, vad_min_speech_s=0.32, vad_pad_s=0.0)
    parts = (0.1, 1.6), (0.9, 3.2), (0.1, 0.64), (0.9, 1.6), (0.1, 1.6), (0.9, 0.16), (0.1, 1.6)
    assert runs(vad, *parts) == [(1.6, 7.04)]
    # between the threshold and what ends speech nothing changes
    assert runs(vad, (0.4, 1.6), (0.6, 1.6), (0.4, 3.2), (0.1, 1.6)) == [(1.6, 6.4)]
    assert runs(vad, (0.9, 1.6), (0.1, 0.64)) == [(0.0, 1.6)]  # the end of the recording
    assert runs(vad, (0.9, 3.2)) == [(0.0, 3.2)]
    assert runs(vad, (0.1, 3.2)) == []


def test_padding_joins_what_it_lets_touch_and_stays_inside():
    vad = detector(vad_min_silence_s=0.32, vad_pad_s=0.4)
    parts = (0.1, 0.32), (0.9, 1.6), (0.1, 0.64), (0.9, 1.6), (0.1, 1.6), (0.9, 0.64)
    assert runs(vad, *parts) == [(0.0, 4.56), (5.36, 6.4)]


def test_stretches_are_those_of_silero(clips):
    import silero_vad

    samples = np.concatenate([silence(3.0), clips[0], silence(4.0), clips[1], silence(2.5)])
    vad = detector(vad_pad_s=0.0)
    _, timeline = vad.cut(source_of(samples, RATE), RATE)
    theirs = silero_vad.get_speech_timestamps(
        torch.from_numpy(samples),
        vad._model,
        min_silence_duration_ms=2000,
        speech_pad_ms=0,
        return_seconds=True,
        time_resolution=3,
    )
    assert len(theirs) == len(timeline.stretches) == 2
    for part, other in zip(timeline.stretches, theirs, strict=True):
        assert (part.start, part.end) == pytest.approx((other["start"], other["end"]), abs=0.001)


def test_a_recording_has_the_same_speech_after_another(clips):
    vad = detector()
    first = vad.listen(source_of(clips[0], RATE))
    vad.listen(source_of(clips[1], RATE))
    assert vad.listen(source_of(clips[0], RATE)) == first


@pytest.mark.parametrize("rate", [8_000, 16_000])
def test_the_cut_recording_is_its_stretches(clips, rate):
    samples = np.concatenate([clips[0], silence(4.0), clips[1], silence(4.0), clips[2]])
    samples += 1e-4
    source, timeline = detector().cut(source_of(samples, RATE, block=5_000), rate)
    assert len(timeline.stretches) == 3
    packed = np.concatenate([part[:, 0] for _, part in source.read()])
    edges = [(round(s.begin * rate), round(s.stop * rate)) for s in timeline.stretches]
    assert len(packed) == sum(stop - begin for begin, stop in edges)
    if rate == RATE:
        wanted = [samples[begin:stop] for begin, stop in edges]
        assert np.array_equal(packed, np.concatenate(wanted))


TIMELINE = Timeline((Stretch(1.0, 1.5, 2.5, 3.0), Stretch(10.0, 10.5, 12.5, 13.0)), 20.0)


@pytest.mark.parametrize(
    ("stretch", "was"),
    [
        ((0.5, 1.5), (1.5, 2.5)),
        ((0.7, 1.3), (1.7, 2.3)),
        ((2.5, 4.0), (10.5, 12.0)),
        ((0.0, 2.0), (1.5, 2.5)),  # padding is no speech
        ((2.0, 5.0), (10.5, 12.5)),
        ((1.8, 4.0), (10.5, 12.0)),  # said to begin before the seam
        ((1.4, 4.0), (10.5, 12.0)),  # with less than a word of the first stretch
        ((1.2, 4.0), (2.2, 12.0)),  # across the seam
        ((0.7, 2.6), (1.7, 2.5)),  # said to end after the seam
        ((0.1, 0.3), (1.1, 1.3)),  # the detector heard nothing here, the model did
        ((4.7, 5.4), (12.7, 13.4)),  # a last window may say that it ends after the recording
    ],
    ids=str,
)
def test_times_are_carried_back(stretch, was):
    assert TIMELINE.span(*stretch) == pytest.approx(was)


@pytest.mark.parametrize(
    ("window", "was"), [(0.0, 1.0), (1.9, 2.9), (1.995, 10.0), (2.0, 10.0), (2.004, 10.004)]
)
def test_a_window_that_begins_at_a_seam_begins_after_the_pause(window, was):
    assert TIMELINE.window_at(window) == pytest.approx(was)


def test_a_whole_recording_keeps_its_times():
    whole = Timeline.whole(5.0)
    assert whole.span(0.1, 4.2) == (0.1, 4.2)
    assert whole.span(4.9, 5.3) == (4.9, 5.3)
    assert whole.at(0.3) == whole.window_at(0.3) == 0.3


# Options and what is missing


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"vad": "webrtc"}, "expected True, False, 'silero', 'ctc'"),
        ({"vad_threshold": 1.5}, "above 0 and below 1"),
        ({"vad_pad_s": -1.0}, "0 or more"),
        ({"vad_min_silence_s": float("nan")}, "0 or more"),
    ],
)
def test_options_out_of_range_are_refused(options, words):
    with pytest.raises(OptionError, match=words):
        TranscribeOptions(**options)


def test_without_the_package_the_extra_is_named(model, processor, monkeypatch):
    monkeypatch.setitem(sys.modules, "silero_vad", None)
    with pytest.raises(MissingExtraError, match=r"mmdecode\[vad\]"):
        Transcriber(model, processor, options=TranscribeOptions(vad=True))


def test_the_number_of_threads_stays_what_it_was(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("silero_vad")]:
        monkeypatch.delitem(sys.modules, name)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        detector()
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


# Blanks of a CTC head


class Loud(Blanks):
    """A head that finds labels where it is loud, a frame of 0.04 s at a time."""

    def __init__(self, window_s=8.0, **options):
        self.windows, self.length = [], round(0.04 * RATE)
        super().__init__(
            TranscribeOptions(vad="ctc", **options),
            SimpleNamespace(window_s=window_s, rate=RATE),
            torch.nn.Linear(1, 1),
        )

    def _chances(self, wave):
        self.windows.append(len(wave))
        frames = [wave[at : at + self.length] for at in range(0, len(wave), self.length)]
        return [float(np.abs(frame).max() > 0.1) for frame in frames]


def pauses(seconds, seed=0):
    """Loud and silent stretches of whole frames, and which frames are loud."""
    draw = np.random.default_rng(seed)
    loud = np.repeat(draw.random(2000) < 0.4, draw.integers(1, 40, 2000))
    loud = loud[: round(seconds / 0.04)]
    return np.repeat(loud, round(0.04 * RATE)).astype(np.float32), loud


@pytest.mark.parametrize("seconds", [0.04, 3.0, 8.0, 8.04, 20.0, 61.0])
@pytest.mark.parametrize("block", [700, 50_000, 10**7])
def test_every_frame_is_looked_at_once_with_audio_around_it(seconds, block):
    ours = Loud()
    samples, loud = pauses(seconds)
    found, duration_s = ours.listen(source_of((samples, RATE), RATE, block=block))
    assert found == [float(one) for one in loud]
    assert duration_s == pytest.approx(seconds)
    assert max(ours.windows) <= 8 * RATE


def test_a_window_that_begins_a_frame_late_is_noticed(monkeypatch):
    ours = Loud()
    ours.frame_s *= 1.01
    samples, loud = pauses(61.0)
    found, _ = ours.listen(source_of((samples, RATE), RATE))
    assert found != [float(one) for one in loud]


def test_labels_near_each_other_are_one_stretch():
    ours = Loud(vad_min_silence_s=0.4, vad_min_speech_s=0.0, vad_pad_s=0.0)
    chances = np.zeros(250)
    chances[[50, 56, 63, 100, 101]] = 1.0  # spikes; gaps of 0.2 and 1.4 s
    found = ours.stretches(chances.tolist(), 10.0)
    edges = [(round(one.start / 0.04), round(one.end / 0.04)) for one in found]
    assert edges == [(50, 64), (100, 102)]


def test_a_model_without_a_head_is_refused():
    with pytest.raises(OptionError, match="vad 'ctc' needs head="):
        Transcriber.from_pretrained("zoo:whisper-synth-320ms", device="cpu", vad="ctc")


def test_speech_ends_below_any_threshold():
    chances = [0.0] * 20 + [0.5] * 20 + [0.005] * 60
    for threshold in (0.1, 0.15, 0.4):
        ours = Loud(vad_min_silence_s=0.4, vad_threshold=threshold, vad_pad_s=0.0)
        (found,) = ours.stretches(chances, 4.0)
        assert (found.start, found.end) == (pytest.approx(0.8), pytest.approx(1.6))


def test_each_detector_has_settings_of_its_own():
    silero, head = TranscribeOptions(vad=True), TranscribeOptions(vad="ctc", vad_pad_s=0.3)
    assert silero.voice_activity == SILERO
    assert head.voice_activity == replace(BLANKS, pad_s=0.3)
    assert replace(head, vad="silero").voice_activity == replace(SILERO, pad_s=0.3)


def test_a_word_of_one_frame_is_speech():
    ours = Loud(vad_min_silence_s=0.5)
    chances = [0.0] * 100 + [1.0] + [0.0] * 100
    (found,) = ours.stretches(chances, 201 * 0.04)
    assert found.begin == found.start == pytest.approx(4.0 - BLANKS.pad_s)
    assert found.stop == found.end == pytest.approx(4.04 + BLANKS.pad_s)


def test_a_word_in_a_short_stretch_stays_there():
    short, long = Stretch(4.85, 4.85, 5.23, 5.23), Stretch(9.85, 9.85, 12.15, 12.15)
    timeline = Timeline((short, long), 20.0)
    assert timeline.span(0.1, 0.4) == (pytest.approx(4.95), 5.23)  # 0.02 s beyond the seam
    assert timeline.span(0.3, 0.9) == (9.85, pytest.approx(10.37))  # begins just before it


@pytest.mark.parametrize("vad", ["ctc", False])
def test_no_window_crosses_a_cut_at_blanks(vad):
    ours = Transcriber.from_pretrained("zoo:whisper-synth", device="cpu", vad=vad).recognizer
    wave = np.concatenate([clip.samples() for clip in speech_test()[:3]])[: 9 * RATE]
    recording, seams = ours.open(source_of((wave, RATE), RATE)), [0.0, 3.0, 6.0]
    spans = [ours.span(recording, seek, seams) for seek in (0, 143, 150, 400)]
    if not vad:
        assert [one.frames for one in spans] == [400, 307, 300, 50]
        assert not any(ours.is_silent(recording, 0, one.frames) for one in spans)
        return
    assert [one.frames for one in spans] == [150, 7, 150, 50]
    assert [one.following for one in spans] == [None, 150, None, None]
    assert ours.is_silent(recording, 143, 7) and not ours.is_silent(recording, 150, 150)
    cut, whole = ours.read(recording, 0, 150), ours.open(source_of((wave, RATE), RATE)).window(0)
    assert torch.equal(cut[:, :150], whole[:, :150]) and len(cut[:, 150:].unique()) == 1
    assert cut[0, 150] == cut.min() and cut.shape == whole.shape
