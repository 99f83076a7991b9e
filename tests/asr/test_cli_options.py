"""Every option of a transcription has its flag, and the flag reaches it."""

import dataclasses
import inspect

import pytest

from mmdecode.asr import TranscribeOptions, Transcriber
from mmdecode.cli.transcribe import command
from mmdecode.zoo.speech import speech_test
from tests.support.commands import invoke, json_of

DEFAULTS = {field.name: field.default for field in dataclasses.fields(TranscribeOptions)}
del DEFAULTS["scores"]  # a format asks for them
CHANGED = {
    "condition_on_prev_tokens": True,
    "prompt": "Anna",
    "prompt_condition_type": "all-segments",
    "hotwords": "Athens",
    "loop_guard": "cut",
    "vad": True,
    "vad_threshold": 0.4,
    "vad_min_speech_s": 0.1,
    "vad_min_silence_s": 1.0,
    "vad_pad_s": 0.3,
    "n_best": 2,
    "n_best_method": "sample",
}


def test_every_option_has_a_flag_with_its_default():
    flags = {name: p.default for name, p in inspect.signature(command).parameters.items()}
    flags["temperatures"] = (0.0,) if flags.pop("temperature") is None else None
    assert {name: flags[name] for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize("options", [CHANGED, {"mode": "chunked", "overlap_s": 4.0}], ids=len)
def test_flags_give_what_the_options_give(options, trained):
    clip = str(speech_test()[11].path)
    flags = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        flags += [flag] if value is True else [flag, str(value)]
    words = ["transcribe", clip, "--model", trained, "--device", "cpu", "--json", *flags]
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    [found] = json_of(done)["results"]
    expected = Transcriber.from_pretrained(trained, device="cpu", **options)(clip)
    assert found["tokens"] == expected.tokens
    assert found["stats"] == expected.stats
    assert (found["n_best"] is None) == ("n_best" not in options)
    if expected.n_best:
        assert [[h["text"] for h in texts] for texts in found["n_best"]] == [
            [h.text for h in texts] for texts in expected.n_best
        ]
