"""``mmdecode stream`` from its inputs to its exit code, on the shipped model, loaded once."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import soundfile
from rich.console import Console

from mmdecode.asr.streaming import StreamPool
from mmdecode.asr.streaming.feeding import Feeder
from mmdecode.asr.transcriber import Transcriber
from mmdecode.cli.screen import Screen
from mmdecode.cli.stream import Progress, interrupts
from mmdecode.errors import InputError, MissingExtraError, MMDecodeError, OptionError
from mmdecode.zoo.speech import speech_test
from tests.asr.test_audio_inputs import Clock, Slow, live
from tests.asr.test_captions import cues_of, update
from tests.asr.test_streaming import spoken, words_up_to
from tests.support.commands import invoke, json_of
from tests.support.microphone import SoundDevice

CLIP, OTHER = speech_test()[3], speech_test()[5]
MODEL = ["--model", "zoo:whisper-synth", "--device", "cpu"]


@pytest.fixture(scope="module")
def loaded():
    return Transcriber.from_pretrained("zoo:whisper-synth", device="cpu")


@pytest.fixture
def run(loaded, monkeypatch, tmp_path):
    """Runs a command line next to two clips, with the model that is loaded already."""
    monkeypatch.chdir(tmp_path)
    for clip, name in ((CLIP, "a.ogg"), (OTHER, "b.ogg")):
        shutil.copy(clip.path, tmp_path / name)

    def load(model, draft, device, dtype, quantize, **options):
        return loaded.with_options(**options)

    monkeypatch.setattr(Transcriber, "from_pretrained", load)
    return lambda *words, **how: invoke("stream", *words, *MODEL, **how)


@pytest.fixture
def microphone(monkeypatch):
    """A microphone on which somebody says the first clip as soon as it is opened."""
    library = SoundDevice([("Desk", 1, 16_000.0)])
    make = library.InputStream

    def opened(**how):
        stream = make(**how)
        stream.start = lambda: (setattr(stream, "active", True), stream.record(CLIP.samples()))
        return stream

    monkeypatch.setattr(library, "InputStream", opened)
    monkeypatch.setitem(sys.modules, "sounddevice", library)
    return library


def test_speech_is_found_as_asked(run, loaded, monkeypatch):
    asked = []
    monkeypatch.setattr(
        Transcriber, "from_pretrained", lambda *_, **more: asked.append(more) or loaded
    )
    run("a.ogg", "--vad-method", "ctc", "--vad-threshold", "0.4", "--vad-pad-s", "1.2")
    [options] = asked
    assert options["vad"] == "ctc" and options["vad_threshold"] == 0.4
    assert options["vad_pad_s"] == 1.2 and "vad_min_silence_s" not in options
    with pytest.raises(OptionError, match="--vad-pad-s does nothing without --vad or --vad-method"):
        raise run("a.ogg", "--vad-pad-s", "1.2").exception
    with pytest.raises(OptionError, match="vad_threshold=2"):
        raise run("a.ogg", "--vad", "--vad-threshold", "2").exception


def after_rounds(monkeypatch, count, action):
    """Calls a function while the given round is decoded."""
    decode, rounds = StreamPool.round, []

    def counted(pool):
        found = decode(pool)
        if found:
            rounds.append(found)
            if len(rounds) == count:
                action()
        return found

    monkeypatch.setattr(StreamPool, "round", counted)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def lines_of(done):
    return [json.loads(line) for line in done.stdout.splitlines()]


# Text and JSON


def test_one_input_prints_its_text_and_the_statistics(run):
    done = run("a.ogg")
    assert done.exit_code == 0, done.output
    summary = done.stderr.replace("\n", " ")
    assert "words committed; lagging (AL, DAL)" in summary
    assert "% of the words shown were provisional and changed; updates at most" in summary
    assert "a.ogg" not in done.stdout
    samples = (CLIP.samples() * 32767).astype("<i2")
    piped = run("-", "--json", input=samples.tobytes() + b"\0")
    assert piped.exit_code == 0, piped.output
    *updates, report = lines_of(piped)
    assert report["model"] == "zoo:whisper-synth" and {u["input"] for u in updates} == {"stdin"}
    text = "".join(word for update in updates for word in update["committed"])
    assert done.stdout.strip() == text.strip()
    assert report["committed_words"] == len(text.split())
    assert 0 < report["provisional_change_rate"] < 1 and report["error"] is None
    assert updates[0]["provisional"] and not updates[-1]["provisional"]
    assert [update["heard_s"] for update in updates[:2]] == [1, 2]


def test_several_inputs_are_labelled_and_a_broken_one_ends_alone(run, tmp_path):
    (tmp_path / "broken.wav").write_bytes(b"RIFF" + bytes(50))
    words = ["a.ogg", "gone.wav", "b.ogg", "broken.wav"]
    done = run(*words, "--out", "captions")
    assert done.exit_code == 1, done.output
    labelled = [line.split(": ", 1) for line in done.stdout.splitlines()]
    texts = {n: " ".join(t for name, t in labelled if name == n) for n in ("a.ogg", "b.ogg")}
    assert {name for name, _ in labelled} == set(texts)
    failed = [line for line in done.stderr.splitlines() if line.startswith("failed: ")]
    assert failed[0] == "failed: gone.wav: does not exist; check the path"
    assert len(failed) == 2 and failed[1].startswith("failed: broken.wav: ")
    for name, text in texts.items():
        cues = cues_of((tmp_path / "captions" / name).with_suffix(".vtt").read_bytes())
        assert " ".join(line for _, _, line in cues) == text == run(name).stdout.strip()
    assert cues_of((tmp_path / "captions" / "gone.vtt").read_bytes()) == []
    *updates, report = lines_of(run(*words, "--json"))
    assert {update["input"] for update in updates} == set(texts)
    committed = "".join(
        w for update in updates if update["input"] == "b.ogg" for w in update["committed"]
    )
    assert committed.strip() == texts["b.ogg"]
    assert report["failed"] == 2 and [one["input"] for one in report["inputs"]] == words
    assert [bool(one["error"]) for one in report["inputs"]] == [False, True, False, True]


def test_a_header_on_stdin_is_the_failure_of_that_input(run, tmp_path):
    soundfile.write(tmp_path / "x.wav", np.zeros(100), 16_000)
    done = run("-", input=(tmp_path / "x.wav").read_bytes())
    assert done.exit_code == 1 and "failed: stdin: " in done.stderr
    assert "samples without a header" in done.stderr.replace("\n", " ")


def test_words_of_captions_have_times_where_the_model_has_them(run, tmp_path):
    done = run("a.ogg", "--out", "x", "--json")
    *updates, _ = lines_of(done)
    [first, *_] = [update for update in updates if update["committed"]]
    begin, end, _ = cues_of((tmp_path / "x" / "a.vtt").read_bytes())[0]
    assert begin == round(1000 * first["words"][0]["start_s"])
    assert end == round(1000 * first["words"][-1]["end_s"])


def test_a_file_in_real_time_takes_its_time(run, tmp_path):
    soundfile.write(tmp_path / "short.wav", CLIP.samples()[: 16_000 * 6 // 10], 16_000)
    done = run("short.wav", "--real-time", "--step", "0.3", "--json")
    *updates, report = lines_of(done)
    assert [update["heard_s"] for update in updates[:2]] == [0.3, 0.6]
    assert 0 < report["delay_s"] < 5 and done.exit_code == 0


# A terminal


def shown_on_terminal(monkeypatch, names, updates):
    terminal = Console(file=io.StringIO(), force_terminal=True, width=60)
    monkeypatch.setattr("mmdecode.cli.screen.out", terminal)
    with Screen(names) as screen:
        for name, one, ended in updates:
            screen.show(name, one, ended)
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", terminal.file.getvalue())
    return re.split(r"[\r\n]+", plain)


def test_a_terminal_shows_provisional_words_and_keeps_sentences(monkeypatch):
    first, last = update(1, "one two", "thre"), update(2, "three.")
    lines = shown_on_terminal(monkeypatch, ["a"], [("a", first, False), ("a", last, True)])
    assert lines == ["one two thre", "one two three.", ""]
    others = [("a", first, False), ("b", update(1, "", "wo"), False), ("a", last, True)]
    lines = shown_on_terminal(monkeypatch, ["a", "b"], [*others, ("b", update(2, "word"), True)])
    assert {"a: one two thre", "b: wo", "a: one two three.", "b: word"} <= set(lines)


# Ends


def test_ctrl_c_ends_all_inputs_with_their_provisional_words(run, monkeypatch, tmp_path):
    long = np.concatenate([clip.samples() for clip in speech_test()[:6]])
    soundfile.write(tmp_path / "long.wav", long, 16_000)
    usual = signal.getsignal(signal.SIGINT)
    after_rounds(monkeypatch, 2, interrupt)
    done = run("long.wav", "a.ogg", "--json", "--out", "x", "--policy", "wait:k=9")
    assert done.exit_code == 0 and signal.getsignal(signal.SIGINT) is usual
    *updates, report = lines_of(done)
    assert len(updates) == 6, "two steps of each, and what was provisional"
    for name in ("long.wav", "a.ogg"):
        own = [one for one in updates if one["input"] == name]
        assert own[-1]["committed"] and not own[-1]["provisional"] and own[-1]["heard_s"] == 2
        cues = cues_of((tmp_path / "x" / name).with_suffix(".vtt").read_bytes())
        committed = "".join(word for one in own for word in one["committed"]).strip()
        assert " ".join(text for _, _, text in cues) == committed
    assert [one["discarded_s"] for one in report["inputs"]] == [0, 0]
    assert [one["captions"] for one in report["inputs"]] == ["x/long.vtt", "x/a.vtt"]


@pytest.fixture
def usual():
    """Python's own handler of Ctrl-C, which a process in the background does not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_a_second_ctrl_c_is_raised(usual):
    with pytest.raises(KeyboardInterrupt), interrupts() as asked:
        assert not asked()
        interrupt()
        assert asked()
        interrupt()
    assert signal.getsignal(signal.SIGINT) is usual


def test_a_live_input_that_is_too_fast_is_warned_of_once_and_loses_nothing(capfd):
    clock = Clock()
    pool = StreamPool(Slow(clock, 3.0), clock=clock)
    feeder = Feeder(pool, [live("hall", spoken(40), clock)], 1.0, clock.wait)
    Progress(feeder, 1.0, [], None).run()
    printed = capfd.readouterr()
    assert printed.err.count("hall: words come") == 1 and "5.0 s late" not in printed.err
    assert "nothing is dropped" in printed.err.replace("\n", " ")
    words = [w for line in printed.out.splitlines() for w in json.loads(line)["committed"]]
    assert len(words) == 40
    clock = Clock()
    pool = StreamPool(Slow(clock, 0.5), clock=clock)
    feeder = Feeder(pool, [live("hall", spoken(40), clock)], 1.0, clock.wait)
    Progress(feeder, 1.0, [], None).run()
    assert "late" not in capfd.readouterr().err


@pytest.mark.parametrize("delay", [None, 5])
def test_a_stream_that_fails_shows_every_word_that_was_committed(capfd, delay):
    clock = Clock()
    transcriber = Slow(clock, 0.0)
    transcriber.broken = {20}  # the last word of the audio
    pool = StreamPool(transcriber, clock=clock)
    feeder = Feeder(pool, [live("hall", spoken(40), clock)], 1.0, clock.wait)
    progress = Progress(feeder, 1.0, [], None)
    if delay:
        progress.finish_words(delay, False)
    progress.run()
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    words = [word.strip(" .,").lower() for one in lines for word in one["committed"]]
    assert words == [word.strip().lower() for word in words_up_to(40).split()][: len(words)]
    assert len(words) == 15
    if delay:
        assert lines[-1]["committed"][-1].endswith(".") and len(lines[-1]["committed"]) == delay


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_whole_cues(tmp_path):
    long = np.concatenate([clip.samples() for clip in speech_test()])
    soundfile.write(tmp_path / "long.wav", long, 16_000)
    words = ["long.wav", "--real-time", "--out", "x", *MODEL]
    running = subprocess.Popen([sys.executable, "-m", "mmdecode", "stream", *words], cwd=tmp_path)
    path, until = tmp_path / "x" / "long.vtt", time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"-->") < 3:
        assert time.monotonic() < until and running.poll() is None
        time.sleep(0.01)
    running.kill()
    running.wait()
    data = path.read_bytes()
    assert data.endswith(b"\n\n") and len(cues_of(data)) >= 3


# Microphones


def test_a_microphone_is_transcribed_until_ctrl_c(run, microphone, monkeypatch):
    whole = run("a.ogg").stdout.strip()
    after_rounds(monkeypatch, 2, interrupt)
    done = run("mic")
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == whole
    assert "recording from Desk; Ctrl-C ends" in done.stderr
    assert microphone.streams[0].closed


def test_a_microphone_that_is_disconnected_keeps_its_words(run, microphone, monkeypatch):
    after_rounds(monkeypatch, 2, lambda: microphone.streams[0].close())
    done = run("--device-index", "0", "b.ogg")
    assert done.exit_code == 1
    assert "failed: microphone 0 (Desk) stopped recording" in done.stderr.replace("\n", " ")
    assert "mic: " in done.stdout and "b.ogg: " in done.stdout


def test_microphones_are_listed(microphone):
    microphone.devices = [("Speaker", 0, 44_100.0), ("Desk", 1, 48_000.0)]
    microphone.default.device = (1, 0)
    done = invoke("stream", "--list-devices")
    assert (done.exit_code, done.stdout) == (0, "1: Desk, 1 in, 48000 Hz (default)\n")
    assert done.stderr == "", "no model is named"
    [device] = json_of(invoke("stream", "--list-devices", "--json"))["devices"]
    assert device["index"] == 1 and device["is_default"]
    microphone.devices = []
    assert "no microphone was found" in invoke("stream", "--list-devices").stderr


# Refusals


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ([], OptionError, "nothing to transcribe"),
        (["a.ogg", "a.ogg"], OptionError, "'a.ogg' is given 2 times"),
        (["a.ogg", "--overwrite"], OptionError, "--overwrite does nothing without --out"),
        (["-", "--real-time"], OptionError, "--real-time does nothing without a file"),
        (["a.ogg", "--policy", "hold:k=1"], OptionError, "has no option 'k'"),
        (["a.ogg", "--task", "sing"], OptionError, "task='sing'; expected 'transcribe' or"),
        (["a.ogg", "--out", "x.vtt"], OptionError, "--out x.vtt looks like a file"),
        (["mic"], MissingExtraError, r"pip install 'mmdecode\[mic\]'"),
        (["--device-index", "3"], MissingExtraError, "recording needs sounddevice"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(words, error, message, monkeypatch):
    def load(*_, **__):
        raise AssertionError("loaded")

    monkeypatch.setattr(Transcriber, "from_pretrained", load)
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    done = invoke("stream", *words, *MODEL)
    assert isinstance(done.exception, error) and isinstance(done.exception, MMDecodeError)
    with pytest.raises(error, match=message):
        raise done.exception


def test_a_model_that_cannot_translate_is_refused_by_name_before_its_weights(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "moonshine"}')
    words = ["stream", str(CLIP.path), "--model", tmp_path, "--task", "translate"]
    done = invoke(*words, "--device", "cpu")
    assert isinstance(done.exception, OptionError)
    assert re.match(
        "task='translate' does not work with .*: it cannot translate", str(done.exception)
    )


def test_captions_that_are_there_are_refused_before_a_model_is_loaded(run, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "b.vtt").write_text("mine")
    done = run("a.ogg", "b.ogg", "--out", "x")
    assert isinstance(done.exception, OptionError) and "b.vtt: there already" in str(done.exception)
    assert os.listdir(tmp_path / "x") == ["b.vtt"]
    assert run("b.ogg", "--out", "x", "--overwrite").exit_code == 0
    assert cues_of((tmp_path / "x" / "b.vtt").read_bytes())
    assert isinstance(run("b.ogg", "--out", "x").exception, OptionError), "ours are kept too"


def test_a_microphone_that_cannot_be_opened_is_its_own_failure(run, microphone, monkeypatch):
    microphone.busy = True
    done = run("mic", "a.ogg")
    assert done.exit_code == 1 and "cannot be opened: Device unavailable" in done.stderr
    assert "a.ogg: " in done.stdout and not isinstance(done.exception, InputError)
