"""The model of `transcribe` and `stream` where none is named: the published one if installed."""

import json
import shutil

import pytest

from mmdecode.asr import Transcriber
from mmdecode.errors import OptionError
from mmdecode.zoo.speech import speech_test
from tests.support.commands import all_commands, invoke
from tests.support.moonshine import NAME, hide_wheel, needs_wheel, show_wheel

SYNTHETIC = "zoo:whisper-synth"
COMMANDS = ("transcribe", "stream")


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(speech_test()[3].path, "talk.ogg")
    return tmp_path


def parsed(name, *words):
    with all_commands()[name].make_context(name, ["talk.ogg", *words]) as context:
        return context.params["model"]


def run(*words):
    return invoke(*words, "--device", "cpu")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_default_is_the_published_model_where_it_is_installed(name, own, monkeypatch):
    hide_wheel(monkeypatch, own / "cache")
    assert parsed(name) == SYNTHETIC
    with monkeypatch.context() as patch:
        show_wheel(patch, own)
        assert parsed(name) == NAME
        assert parsed(name, "--model", SYNTHETIC) == SYNTHETIC
        (own / "o.yaml").write_text("model: small")
        assert parsed(name, "--options", "o.yaml") == "small"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_says_what_the_default_is_on_every_machine(name, own, monkeypatch):
    hide_wheel(monkeypatch, own / "cache")
    without = run(name, "--help").stdout
    show_wheel(monkeypatch, own)
    assert run(name, "--help").stdout == without
    shown = " ".join(without.replace("│", " ").split())
    assert f"{NAME} if it is installed, else {SYNTHETIC}, which knows 489 words" in shown


def test_the_model_is_printed_once_and_is_what_the_results_hold(own, monkeypatch):
    hide_wheel(monkeypatch, own / "cache")
    words = ["transcribe", "talk.ogg", "--out", "out", "--format", "txt"]
    done = run(*words, "--json")
    assert done.exit_code == 0, done.output
    assert done.stderr.count(f"model {SYNTHETIC} on cpu, float32") == 1
    assert json.loads(done.stdout)["model"] == SYNTHETIC
    assert json.loads((own / "out" / "run.json").read_text())["settings"]["model"] == SYNTHETIC
    show_wheel(monkeypatch, own)
    changed = run(*words, "--resume")
    message = str(changed.exception)
    assert f"model was {SYNTHETIC!r}, is {NAME!r}" in message
    assert f"the earlier ones, including --model {SYNTHETIC}, to continue" in message
    again = run(*words, "--resume", "--model", SYNTHETIC, "--quiet")
    assert again.exit_code == 0 and again.stderr == ""


@needs_wheel
@pytest.mark.slow
def test_the_published_model_hears_a_stream_and_a_file(own):
    for name in COMMANDS:
        done = run(name, "talk.ogg")
        assert done.exit_code == 0, done.output
        assert f"model {NAME} on cpu, float32" in done.stderr
        assert "toy" not in done.stderr
        assert len(done.stdout.split()) > 3


def test_what_a_family_cannot_do_is_refused_before_weights_are_looked_for(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "moonshine"}')
    with pytest.raises(OptionError, match=r"cannot time words; .* with --model"):
        Transcriber.from_pretrained(tmp_path, word_timestamps=True)


REFUSED = {
    "--word-timestamps": "cannot time words",
    "--word-method attention": "cannot time words",
    "--task translate": "cannot translate",
    "--language de": "transcribes only 'en'",
    "--prompt Athens": "decoder prompt cannot contain text",
    "--hotwords Athens": "decoder prompt cannot contain text",
    "--condition-on-prev-tokens": "decoder prompt cannot contain text",
    "--word-timestamps --hallucination-silence-threshold 2": "cannot time words",
    "--no-speech-threshold 0.6 --logprob-threshold -1": "predicts no no-speech probability",
    "--padding zeros": "windows are not padded",
    "--draft medusa": "holds no Medusa heads",
    "--guide whisper_cd": "the guide changes the waveform",
}
"""What the published model cannot do, and what is said of it."""


@needs_wheel
@pytest.mark.slow
@pytest.mark.parametrize("flags", REFUSED)
def test_an_option_that_the_default_cannot_serve_is_refused_naming_model(flags, own):
    done = run("transcribe", "talk.ogg", *flags.split(), "--out", "out")
    assert done.exit_code and not (own / "out").exists()
    message = str(done.exception)
    assert REFUSED[flags] in message
    assert "--model" in message
    assert done.stdout == ""


def test_env_says_whether_the_published_model_is_installed(own, monkeypatch):
    for change, installed in ((hide_wheel, False), (show_wheel, True)):
        with monkeypatch.context() as patch:
            change(patch, own)
            done = invoke("env", "--json")
            assert json.loads(done.stdout)["checkpoints"][NAME] is installed
