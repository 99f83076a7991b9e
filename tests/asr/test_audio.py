"""Reading audio: any rate, channels and length; clear errors for the rest; bounded memory."""

import os
import struct
import sys
import tracemalloc

import numpy as np
import pytest
import soundfile
import torch

from mmdecode.asr.audio.reading import BLOCK, Source, blocks, part, recording, source_of
from mmdecode.asr.audio.recording import KEEP_S
from mmdecode.asr.recognizers.whisper_features import STEP, Mel, Speech
from mmdecode.errors import InputError


def read(item, rate=16_000):
    return np.concatenate(list(blocks(source_of(item, rate), rate)))


@pytest.fixture
def wav(tmp_path, kit):
    path = tmp_path / "good.wav"
    soundfile.write(path, kit.noise(2.0), kit.rate, subtype="PCM_16")
    return path


# What is read


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 96_000, 192_000])
def test_any_rate_arrives_at_the_rate_of_the_model(tmp_path, rate):
    times = np.arange(2 * rate) / rate
    soundfile.write(tmp_path / "tone.wav", 0.5 * np.sin(2 * np.pi * 440 * times), rate)
    samples = read(tmp_path / "tone.wav")
    assert abs(len(samples) - 32_000) <= 1
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(len(samples)) / 16_000)
    assert np.abs(samples - expected)[200:-200].max() < 2e-3


@pytest.mark.parametrize("channels", [1, 2, 6])
def test_channels_are_averaged(tmp_path, kit, channels):
    parts = np.stack([kit.noise(1.0, seed=i) for i in range(channels)], 1)
    soundfile.write(tmp_path / "many.wav", parts, kit.rate, subtype="FLOAT")
    np.testing.assert_allclose(read(tmp_path / "many.wav"), parts.mean(1), atol=1e-6)
    np.testing.assert_allclose(read(parts.T), parts.mean(1), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.flac", {}),
        ("a.ogg", {}),
        ("a.opus", {"format": "OGG", "subtype": "OPUS"}),
        ("a.mp3", {}),
        ("a.aiff", {}),
        ("a.wav", {"subtype": "ULAW"}),
        ("a.wav", {"format": "FLAC"}),  # the content decides, not the name
    ],
    ids=str,
)
def test_common_formats_are_read_whatever_their_name(tmp_path, kit, name, options):
    samples = kit.noise(2.0)
    soundfile.write(tmp_path / name, samples, kit.rate, **options)
    found = read(tmp_path / name)
    assert len(found) == len(samples)
    assert np.corrcoef(found, samples)[0, 1] > 0.9


CONTAINERS = {"m4a": "aac", "mp4": "aac", "mkv": "flac", "webm": "libopus", "mov": "aac"}


def container(path, samples, codec, video=False):
    """Writes mono samples of 48 kHz, with a film of black pictures next to them or without."""
    av = pytest.importorskip("av")
    name = {".m4a": "ipod", ".mkv": "matroska"}.get(path.suffix, path.suffix[1:])
    with av.open(str(path), "w", format=name) as file:
        stream = file.add_stream(codec, rate=48_000, layout="mono")
        if video:
            film = file.add_stream("mpeg4", rate=10)
            film.width = film.height = 32
            for _ in range(len(samples) // 4_800 + 20):  # it goes on after the sound
                image = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8))
                file.mux(film.encode(image))
            file.mux(film.encode(None))
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate, frame.pts = 48_000, 0
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            file.mux(packet)


CASES = [(ending, False) for ending in CONTAINERS] + [(ending, True) for ending in ("mp4", "mkv")]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("ending", "video"), CASES)
def test_containers_are_read_and_truncated_ones_refused(tmp_path, kit, ending, video):
    path = tmp_path / f"a.{ending}"
    samples = kit.noise(3.0, rate=48_000)
    container(path, samples, CONTAINERS[ending], video)
    found = read(path)
    assert abs(len(found) / kit.rate - 3.0) < 0.1
    expected = read((samples, 48_000))
    size = min(len(found), len(expected))
    shifts = [np.corrcoef(found[s:size], expected[: size - s])[0, 1] for s in range(1100)]
    assert max(shifts) > 0.9, "not the sound that was written"
    data = path.read_bytes()
    for kept in (0.3, 0.6, 0.8):
        path.write_bytes(data[: int(kept * len(data))])
        with pytest.raises(InputError, match=rf"a\.{ending}: "):
            read(path)


def test_containers_without_pyav_say_what_to_install(tmp_path, kit, monkeypatch):
    path = tmp_path / "a.m4a"
    container(path, kit.noise(1.0, rate=48_000), "aac")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(InputError, match=r"a\.m4a: .*pip install 'mmdecode\[media\]'"):
        read(path)


def test_integers_and_pairs_with_a_rate_are_taken(kit):
    samples = kit.noise(1.0)
    whole = np.round(samples * 32768).astype(np.int16)
    np.testing.assert_allclose(read(whole), samples, atol=4e-5)
    assert len(read((samples, 8_000))) == 32_000
    assert len(read({"array": samples, "sampling_rate": 8_000})) == 32_000
    np.testing.assert_allclose(read(torch.from_numpy(samples)), samples)


def test_a_wav_written_to_a_pipe_is_read_although_its_header_has_no_length(wav, kit):
    data = bytearray(wav.read_bytes())
    struct.pack_into("<I", data, 4, 0xFFFFFFFF)
    struct.pack_into("<I", data, data.index(b"data") + 4, 0xFFFFFFFF)
    wav.write_bytes(data)
    assert len(read(wav)) == 2 * kit.rate


# Parts


def counted(samples, rate, size, taken):
    """A recording in blocks, and how many were taken."""

    def read():
        for start in range(0, len(samples), size):
            taken.append(start)
            yield rate, samples[start : start + size, None]

    return Source("counted", read)


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100])
@pytest.mark.parametrize("size", [1, 700, 1 << 18])
def test_a_part_has_the_samples_between_its_bounds_and_no_other(rate, size):
    samples = np.arange(2_000, dtype=np.float32)
    for first, count in [(0, 1), (0, 2_000), (699, 2), (700, 700), (1_234, 321), (1_999, 1)]:
        taken = []
        found = part(counted(samples, rate, size, taken), first / rate, count / rate)
        read = np.concatenate([frames[:, 0] for _, frames in found.read()])
        np.testing.assert_array_equal(read, samples[first : first + count])
        assert taken[-1] < first + count, "what is behind it was read"
        rest = part(counted(samples, rate, size, []), first / rate)
        read = np.concatenate([frames[:, 0] for _, frames in rest.read()])
        np.testing.assert_array_equal(read, samples[first:])


def test_a_part_of_a_file_is_the_part_of_its_samples(tmp_path, kit):
    samples = np.stack([kit.noise(3.0, seed=seed) for seed in (1, 2)], 1)
    soundfile.write(tmp_path / "a.wav", samples, kit.rate, subtype="FLOAT")
    found = read(part(recording(tmp_path / "a.wav", block=5_000), 0.7501, 1.25))
    np.testing.assert_allclose(found, samples[12_002:32_002].mean(1), atol=1e-7)


@pytest.mark.parametrize(
    ("start", "length", "words"),
    [
        (2.0, None, "has 0 s of the part that begins at 2 s;"),
        (5.0, 1.0, "has 0 s of the part that begins at 5 s and lasts 1 s;"),
        (1.5, 1.0, "has 0.5 s of the part that begins at 1.5 s and lasts 1 s;"),
        (1.0, 0.0, "has 0 s of the part"),
    ],
)
def test_a_part_that_is_not_there_is_refused(kit, start, length, words):
    with pytest.raises(InputError, match=f"array 0: {words}"):
        read(part(source_of(kit.noise(2.0), kit.rate), start, length))


def test_a_part_may_end_a_little_after_the_recording_since_durations_are_rounded(kit):
    assert len(read(part(source_of(kit.noise(2.0), kit.rate), 1.0, 1.2))) == kit.rate


# What is refused


def broken(tmp_path, kit, kind):
    """A bad file of some kind, and words its error must contain."""
    path = tmp_path / "bad.wav"
    samples = kit.noise(2.0)
    if kind == "missing":
        return path, "does not exist"
    if kind == "long name":
        return tmp_path / ("a" * 300), "cannot be read"
    if kind == "pipe":
        os.mkfifo(path)
        return path, "is no regular file"
    if kind == "folder":
        return tmp_path, "is a folder"
    if kind == "empty":
        path.write_bytes(b"")
        return path, "empty"
    if kind == "text":
        path.write_text("this is no audio\n" * 100)
        return path, "is not audio"
    if kind == "image":
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(1000))
        return path, "is not audio"
    if kind == "raw":
        path = tmp_path / "bad.raw"
        path.write_bytes(bytes(1000))
        return path, "is not audio"
    if kind == "header only":
        soundfile.write(path, samples, kit.rate)
        path.write_bytes(path.read_bytes()[:30])
        return path, "is not audio"
    if kind == "no samples":
        soundfile.write(path, samples[:0], kit.rate)
        return path, "no samples"
    if kind == "NaN":
        samples[123] = np.nan
        soundfile.write(path, samples, kit.rate, subtype="FLOAT")
        return path, "NaN"
    if kind == "rate":
        soundfile.write(path, samples, 4_000)
        return path, "4000 Hz"
    if kind in ("text as mp3", "picture as mp3", "picture as au"):
        path = path.with_suffix(f".{kind[-3:].strip()}")
        noise = np.random.default_rng(0).bytes(6000)
        path.write_bytes(b"no sound " * 600 if kind[0] == "t" else b"\x89PNG\r\n\x1a\n" + noise)
        return path, "is not audio"
    kind, _, part = kind.removeprefix("truncated ").partition(" at ")
    path = path.with_suffix(f".{kind}")
    soundfile.write(path, samples, kit.rate)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * float(part or 0.5))])
    return path, "truncated"


BROKEN = ["missing", "folder", "empty", "text", "image", "raw", "header only", "no samples", "NaN"]
BROKEN += [
    "long name",
    "pipe",
    "rate",
    "text as mp3",
    "picture as mp3",
    "picture as au",
    "truncated ogg at 0.97",
]
BROKEN += [f"truncated {kind}" for kind in "wav flac ogg mp3 aiff au w64 caf".split()]


@pytest.mark.parametrize("kind", BROKEN)
def test_what_cannot_be_trusted_is_refused_with_its_name_and_a_hint(tmp_path, kit, kind):
    path, words = broken(tmp_path, kit, kind)
    with pytest.raises(InputError, match=words) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert ";" in message, "what was expected or what to do comes behind a semicolon"


@pytest.mark.parametrize("kind", ["text", "missing", "truncated ogg", "text as mp3", "empty"])
def test_errors_say_what_a_recording_is_called_and_not_where_it_is_kept(tmp_path, kit, kind):
    path, words = broken(tmp_path, kit, kind)
    with pytest.raises(InputError, match=rf"^stdin: .*{words}") as caught:
        read(recording(path, "id", shown="stdin"))
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (np.zeros(0), "no samples"),
        (np.full(100, np.inf), "infinite"),
        (np.zeros((16_000, 2)), r"pass array\.T"),
        (np.zeros((2, 2, 2)), "one recording at a time"),
        (np.zeros(100, complex), "real numbers"),
        ((np.zeros(100), 16), "16 Hz"),
        (["a", "b"], "real numbers"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_arrays_that_are_no_recording_are_refused(item, words):
    with pytest.raises(InputError, match=words):
        read(item)


# Features


def speech(item, processor, frames=100, block=BLOCK, step=STEP, **options):
    mel = Mel(processor.feature_extractor, frames, step=step)
    return Speech(source_of(item, 16_000, block=block), mel, **options)


@pytest.mark.parametrize("seconds", [2.303, 7.77, 30.01])
def test_windows_of_a_long_recording_are_those_of_the_feature_extractor(
    tmp_path, processor, kit, seconds
):
    samples = kit.noise(seconds, seed=3)
    samples[: len(samples) // 2] *= 0.01  # the maximum is in the second half
    expected = kit.long_features(processor, samples)[0]
    for keep in (KEEP_S, 1):  # from memory, and streamed twice
        found = speech(samples, processor, block=5_000, step=64, keep_s=keep)
        assert found.frames == expected.shape[1]
        for seek in range(0, found.frames, 70):
            part = expected[:, seek : seek + 100]
            part = torch.nn.functional.pad(part, (0, 100 - part.shape[1]))
            torch.testing.assert_close(found.window(seek), part, atol=2e-5, rtol=0)


def test_a_recording_of_one_window_is_padded_with_silence_as_by_the_processor(processor, kit):
    samples = kit.noise(1.3, seed=4)
    expected = processor.feature_extractor(samples, sampling_rate=16_000, return_tensors="pt")
    found = speech(samples, processor)
    assert found.frames == 65
    torch.testing.assert_close(found.window(0), expected.input_features[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize("padding", ["auto", "zeros", "silence"])
@pytest.mark.parametrize("count", [1, 2, 399, 641])
def test_a_recording_of_two_samples_is_padded_and_processed(processor, count, padding):
    found = speech(np.full(count, 0.1, np.float32), processor, padding=padding)
    assert found.frames == max(1, count // 320)
    assert torch.isfinite(found.window(0)).all()
    assert found.peak > -10, "measured, not left at the floor"


def test_silence_is_finite(processor):
    assert torch.isfinite(speech(np.zeros(50_000, np.float32), processor).window(0)).all()


def hours(path, seconds):
    """Writes a low-rate recording block by block."""
    with soundfile.SoundFile(path, "w", 8_000, 1, format="FLAC", subtype="PCM_16") as file:
        block = (np.random.default_rng(0).standard_normal(80_000) * 3000).astype(np.int16)
        for _ in range(seconds // 10):
            file.write(block)


def peak_of_windows(path, processor):
    tracemalloc.start()
    try:
        found = speech(path, processor, frames=1_500)
        for seek in range(0, found.frames, 1_500):
            assert found.window(seek).shape == (20, 1_500)
        return tracemalloc.get_traced_memory()[1], found.duration_s
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_length_of_a_recording(tmp_path, processor):
    peaks = []
    for minutes in (6, 12):
        hours(tmp_path / "long.flac", 60 * minutes)
        peak, seconds = peak_of_windows(tmp_path / "long.flac", processor)
        assert seconds == 60 * minutes
        peaks.append(peak)
    assert peaks[1] < 1.1 * peaks[0] < 60e6, peaks


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_ten_hours_are_read_in_bounded_memory(tmp_path, processor):
    hours(tmp_path / "ten.flac", 36_000)
    peak, seconds = peak_of_windows(tmp_path / "ten.flac", processor)
    assert seconds == 36_000
    assert peak < 80e6, f"{peak / 1e6:.0f} MB"


@pytest.mark.parametrize("rate", ["x", None])
def test_what_is_no_rate_is_refused(rate):
    with pytest.raises(InputError, match=r"its rate is .*; expected samples a second"):
        source_of((np.zeros(16_000, np.float32), rate), 16_000).read()
