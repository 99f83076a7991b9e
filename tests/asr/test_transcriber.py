"""`Transcriber`: inputs, options, failures, and real recordings in batches."""

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from mmdecode import Decoder
from mmdecode.asr import FALLBACK, Failure, TranscribeOptions, Transcriber, Transcript
from mmdecode.asr.audio.reading import Source, source_of
from mmdecode.asr.audio.recording import KEEP_S
from mmdecode.asr.output.manifest import opened, read_manifest
from mmdecode.errors import InputError, OptionError, UnknownNameError, UnsupportedModelError
from tests.support.files import json_lines

QUICK = {"max_new_tokens": 6}  # per window


@pytest.fixture(scope="module")
def tiny(model, processor):
    return Transcriber(model, processor, Decoder(seed=0), TranscribeOptions(**QUICK))


# Options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "at least 1"),
        ({"temperatures": ()}, "one or more"),
        ({"temperatures": (-0.1,)}, "from 0"),
        ({"temperatures": (0.4, 0.2), "logprob_threshold": -1.0}, "numbers in rising order"),
        ({"temperatures": (0.0, 0.2)}, "no threshold is set"),
        ({"no_speech_threshold": 0.6}, "logprob_threshold, which is not set"),
        ({"no_speech_threshold": 6.0, "logprob_threshold": -1.0}, "probability"),
        ({"logprob_threshold": 1.0}, "0 or less"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"task": "sing"}, "'transcribe' or 'translate'"),
        ({"padding": "ones"}, "silence"),
        ({"condition_on_prev_tokens": True, "timestamps": False}, "needs timestamps"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused_together(options, words):
    with pytest.raises(OptionError, match=words):
        TranscribeOptions(**options)


def test_options_are_frozen_and_the_fallback_is_valid():
    options = TranscribeOptions(**FALLBACK)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.batch_size = 3
    with pytest.raises(TypeError):
        TranscribeOptions(4)


def test_what_the_model_cannot_do_is_refused(folder, model, processor, kit):
    with pytest.raises(OptionError, match=r"does not know the language 'xx'.*de, en"):
        Transcriber.from_pretrained(folder, language="xx")
    with pytest.raises(OptionError, match="did you mean 'batch_size'"):
        Transcriber.from_pretrained(folder, batchsize=3)
    with pytest.raises(OptionError, match="expected auto, fp32"):
        Transcriber.from_pretrained(folder, dtype="int8")
    with pytest.raises(UnknownNameError, match="lookup"):
        Transcriber.from_pretrained(folder, draft="look", device="cpu")
    with pytest.raises(InputError, match="does not exist"):
        Transcriber.from_pretrained(folder / "nothing")
    single = kit.build_model(processor, is_multilingual=False)
    with pytest.raises(OptionError, match="one language"):
        Transcriber(single, processor, options=TranscribeOptions(language="en"))
    linear = torch.nn.Linear(1, 1)
    linear.config = None
    with pytest.raises(UnsupportedModelError, match="Linear"):
        Transcriber(linear, processor)


@pytest.mark.parametrize("language", ["de", "german", "<|de|>", "DE"])
def test_a_language_may_be_given_in_any_of_its_names(model, processor, kit, language):
    options = TranscribeOptions(language=language, **QUICK)
    assert Transcriber(model, processor, options=options)([kit.noise(0.5)])[0].language == "de"


def test_loading_gives_what_building_gives(folder, tiny, kit):
    loaded = Transcriber.from_pretrained(folder, draft="lookup", device="cpu", **QUICK)
    samples = kit.noise(2.5)
    assert loaded(samples).tokens == tiny(samples).tokens


# Inputs and failures


def test_one_recording_gives_its_transcript_and_many_a_list_in_order(tiny, tmp_path, kit):
    path = tmp_path / "a.wav"
    soundfile.write(path, kit.noise(4.2), kit.rate)
    assert tiny(path).source == tiny(str(path)).source == str(path)
    assert [t.source for t in tiny([path])] == [t.source for t in tiny(iter([path]))] == [str(path)]
    assert tiny(kit.noise(0.5)).duration_s * 2 == tiny((kit.noise(0.5), 8_000)).duration_s == 1.0
    assert tiny({"audio": kit.noise(0.5), "language": "de"}).language == "de"
    found = tiny([path, kit.noise(0.4), (kit.noise(1.0), 32_000)])
    assert [t.source for t in found] == [str(path), "array 1", "array 2"]
    assert [round(t.duration_s, 3) for t in found] == [4.2, 0.4, 0.5]
    assert tiny([]) == []


def test_a_short_recording_is_yielded_before_a_long_one_ends(tiny, kit):
    found = tiny.stream([kit.noise(6.5), kit.noise(0.5)])
    assert [t.index for t in found] == [1, 0]


def test_progress_adds_up_to_the_audio(tiny, kit):
    seconds = []
    found = list(tiny.stream([kit.noise(4.3), kit.noise(0.5)], seconds.append))
    assert sum(seconds) == pytest.approx(sum(t.duration_s for t in found), abs=0.05)


def test_failures_are_collected_and_the_rest_goes_on(tiny, tmp_path, kit):
    (tmp_path / "bad.wav").write_text("no audio")
    bad = kit.noise(1.0)
    bad[5] = np.nan
    inputs = [kit.noise(0.5), tmp_path / "bad.wav", bad, object(), np.zeros(2), tmp_path / "none"]
    found = tiny(inputs)
    assert [type(t) for t in found] == [Transcript, Failure, Failure, Failure, Transcript, Failure]
    assert [t.index for t in found] == list(range(6))
    assert found[1].kind == "InputError" and str(tmp_path / "bad.wav") in found[1].error
    assert [t.text == "" and bool(t.error) for t in found if t.kind] == [True] * 4
    with pytest.raises(InputError, match=r"bad\.wav"):
        tiny(inputs, on_error="raise")


def test_a_single_recording_that_cannot_be_read_raises_its_own_error(tiny, tmp_path):
    with pytest.raises(InputError, match=r"none\.wav: does not exist"):
        tiny(tmp_path / "none.wav")
    failed = tiny(tmp_path / "none.wav", on_error="return")
    assert (failed.text, failed.kind) == ("", "InputError") and "none.wav" in failed.error
    with pytest.raises(InputError, match="language 'xx'"):
        tiny({"audio": np.zeros(4), "language": "xx"})
    with pytest.raises(OptionError, match="on_error='ignore'; expected 'raise' or 'return'"):
        tiny([], on_error="ignore")


def test_bytes_and_open_files_are_transcribed_as_their_paths_are(tiny, tmp_path, kit):
    for name in ("a.flac", "a.mp3"):
        path = tmp_path / name
        soundfile.write(path, kit.noise(0.6), kit.rate)
        expected, data = tiny(path), path.read_bytes()
        with path.open("rb") as file:
            found = [tiny(data), tiny(bytearray(data)), tiny(io.BytesIO(data)), tiny(file)]
        assert [t.tokens for t in found] == [expected.tokens] * 4
        assert [t.source for t in found] == ["bytes 0", "bytes 0", "file 0", str(path)]
    with path.open("rb") as file:
        file.read(9)
        at = file.tell()
        mixed = tiny([data, file, io.BytesIO(), data[: len(data) // 2], b"no audio", file])
    assert at == 9 and mixed[0].tokens == expected.tokens
    assert [t.source for t in mixed if t.error][-4:] == [
        "file 2", "bytes 3", "bytes 4", str(path),
    ]  # fmt: skip
    assert "file 2: is empty" in mixed[2].error and "bytes 4: is not audio" in mixed[4].error
    with path.open(errors="replace") as file:
        assert "mode 'rb'" in tiny([file])[0].error
    assert "closed" in tiny([file])[0].error


@pytest.mark.parametrize(
    ("address", "hint"),
    [
        ("https://example.org/a.wav", "download it first, for example with curl"),
        (Path("http://example.org/a.wav"), "download it first"),
        ("s3://bucket/a.wav", "download it first"),
        ("file:///tmp/a.wav", "leave out file://"),
        ("data:audio/wav;base64,UklGRg==", "base64.b64decode"),
    ],
    ids=str,
)
def test_an_address_is_refused_with_what_to_do(tiny, tmp_path, address, hint):
    with pytest.raises(InputError, match=hint) as caught:
        tiny(address)
    assert str(caught.value).startswith(f"{address}: is a") and "exist" not in str(caught.value)
    table = tmp_path / "calls.jsonl"
    table.write_text(json.dumps({"audio": str(address)}))
    [entry] = read_manifest(table)
    assert hint in tiny([opened(entry)])[0].error


def test_a_file_that_is_named_like_an_address_is_read(tiny, tmp_path, kit, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("https:/example").mkdir(parents=True)
    soundfile.write("https:/example/a.wav", kit.noise(0.4), kit.rate)
    assert tiny("https://example/a.wav").duration_s == 0.4


def test_a_recording_that_vanishes_while_it_is_read_fails_alone(tiny, tmp_path, kit, monkeypatch):
    read = source_of

    def reopened(item, *args):
        """As if each block were opened again, so that a vanished file shows at once."""
        source = read(item, *args, block=8_000)

        def parts():
            for number, part in enumerate(source.read()):
                if number and not path.exists():
                    raise InputError(f"{source.name}: does not exist; check the path")
                yield part

        return Source(source.name, parts)

    monkeypatch.setattr("mmdecode.asr.transcriber.source_of", reopened)
    path = tmp_path / "gone.wav"
    long = np.tile(kit.noise(6.0), round(KEEP_S / 6) + 1)  # more than is kept in memory
    soundfile.write(path, long, kit.rate)
    stream = tiny.stream([path, kit.noise(0.5)])
    assert next(stream).index == 1
    path.unlink()
    assert [type(result) for result in stream] == [Failure]


# Real recordings


def clips(kit):
    return [kit.data / row["audio"] for row in rows_of(kit.data)]


def rows_of(folder):
    return json_lines(folder / "manifest.jsonl")


def test_shipped_recordings_are_read_with_their_lengths(tiny, kit):
    for row, found in zip(rows_of(kit.data), tiny(clips(kit)), strict=True):
        assert found.duration_s == pytest.approx(row["duration_s"], abs=0.02)


def test_real_recordings_have_the_same_text_in_a_batch_and_alone(model, processor, kit):
    def run(size):
        options = TranscribeOptions(batch_size=size, **QUICK)
        return Transcriber(model, processor, Decoder(seed=0), options)

    one = [run(1)(path) for path in clips(kit)]
    assert [t.tokens for t in run(4)(clips(kit))] == [t.tokens for t in one]


def test_the_trained_model_gives_the_same_text_in_a_batch_and_alone(trained, kit):
    one = Transcriber.from_pretrained(trained, device="cpu", batch_size=1)
    many = Transcriber.from_pretrained(trained, device="cpu", batch_size=4, draft="lookup")
    assert [t.tokens for t in many(clips(kit))] == [t.tokens for t in one(clips(kit))]


@pytest.mark.slow
def test_all_thirty_recordings_are_read_and_equal_in_batches(model, processor, kit):
    if not kit.shared.exists():
        pytest.skip("some recordings may not be shipped, and ../shared/data/speech is not here")
    rows = rows_of(kit.shared)
    paths = [kit.shared / row["audio"] for row in rows]
    assert len(paths) == 30

    def run(size):
        options = TranscribeOptions(batch_size=size, **QUICK)
        return Transcriber(model, processor, Decoder(seed=0), options)(paths)

    batched = run(8)
    assert [t.tokens for t in batched] == [t.tokens for t in run(1)]
    for row, found in zip(rows, batched, strict=True):
        assert found.duration_s == pytest.approx(row["duration_s"], abs=0.02)
