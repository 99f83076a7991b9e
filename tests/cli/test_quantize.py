"""``--quantize int8`` of the commands: the rounded model, in results, conditions and settings."""

import functools
import json

import pytest

from mmdecode.errors import OptionError
from mmdecode.zoo.speech import speech_test
from tests.support.commands import all_commands, invoke, json_of
from tests.support.files import json_lines
from tests.support.int8 import counted

run = functools.partial(invoke, catch_exceptions=False)
CPU = ("--device", "cpu", "--dtype", "fp32")
MODEL = ("--model", "zoo:whisper-synth")


def options_of(command):
    return {flag for option in command.params for flag in option.opts}


def test_every_command_that_runs_a_model_in_a_dtype_can_round_it():
    flags = {name: options_of(command) for name, command in all_commands().items()}
    with_dtype = {name for name, own in flags.items() if "--dtype" in own}
    trains = {name for name in with_dtype if name.startswith("train")}
    assert {name for name, own in flags.items() if "--quantize" in own} == with_dtype - trains
    assert len(with_dtype - trains) >= 15


def test_an_unknown_format_is_refused():
    done = invoke("transcribe", "x.wav", "--quantize", "int4")
    assert done.exit_code == 2
    assert "'int4' is not one of 'int8'" in done.stderr


def test_a_transcript_is_the_same_with_a_draft_and_a_run_is_not_that_of_the_float_model(tmp_path):
    clip, texts = speech_test()[0].path, {}
    for name, more in {
        "float": (),
        "int8": ("--quantize", "int8"),
        "drafted": ("--quantize", "int8", "--draft", "medusa"),
    }.items():
        with counted() as count:
            out = tmp_path / name
            done = run("transcribe", clip, *MODEL, *CPU, *more, "--out", out)
        assert done.exit_code == 0
        assert (count.products > 200) == bool(more)
        assert ("float32, int8 weights" in done.stderr) == bool(more)
        [line] = json_lines(out / "results.jsonl")
        texts[name] = (line["text"], line["tokens"])
    assert texts["int8"] == texts["drafted"]
    settings = {name: json.loads((tmp_path / name / "run.json").read_text()) for name in texts}
    assert '"quantize"' not in json.dumps(settings["float"])  # earlier runs can be resumed
    assert settings["int8"]["settings"]["quantize"] == "int8"
    again = ("transcribe", clip, *MODEL, *CPU, "--resume", "--out")
    with pytest.raises(OptionError, match="quantize"):
        run(*again, tmp_path / "float", "--quantize", "int8")
    with pytest.raises(OptionError, match="quantize"):
        run(*again, tmp_path / "int8")
    assert run(*again, tmp_path / "int8", "--quantize", "int8").exit_code == 0


def test_an_audit_is_of_the_rounded_model_and_says_how_far_it_is_from_the_float_one():
    with counted() as count:
        done = run(
            "audit",
            "--draft",
            "medusa",
            "--quantize",
            "int8",
            "--limit",
            1,
            *CPU,
            "--max-new-tokens",
            9,
            "--json",
        )
    found = json_of(done)
    assert done.exit_code == 0, found["words"]
    assert count.products > 500
    assert (found["identical"], found["noise"]) == (True, 0.0)
    assert found["given"]["quantize"] == "int8"
    apart = found["distance"]
    assert apart["tokens"] == found["tokens"] > 5
    assert 0 < apart["mean"] < apart["largest"] < 5
    assert 0.5 < apart["same_choice"] <= 1


def test_answers_of_an_evaluation_have_the_format_among_their_conditions(tmp_path):
    given = ("evaluate", "pope", "--model", "zoo:llava-scenes", "--data", "zoo", "--limit", 1, *CPU)
    given += ("--guide", "none", "--no-controls", "--warmup", 0, "--resamples", 20, "--out")
    with counted() as count:
        done = run(*given, tmp_path / "run", "--quantize", "int8")
    assert done.exit_code == 0
    assert count.products > 100
    run_file = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run_file["settings"]["quantize"] == "int8"
