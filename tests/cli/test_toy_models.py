"""A shipped model that is run on the user's own files is announced as the toy it is."""

import re
import shutil
from pathlib import Path

import pytest
from PIL import Image

from mmdecode.checkpoints import zoo_names
from mmdecode.cli.models import INSTEAD, MODELS, toy_note
from mmdecode.zoo.scenes import draw_scene, render
from mmdecode.zoo.speech import speech_test
from tests.support.commands import all_commands, invoke
from tests.support.moonshine import NAME, hide_wheel, show_wheel

CLIP = speech_test()[3].path


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hide_wheel(monkeypatch, tmp_path / "cache")
    shutil.copy(CLIP, "talk.ogg")
    Image.fromarray(render(draw_scene(0))).save("photo.png")
    Path("clips.jsonl").write_text('{"path": "talk.ogg", "text": "a word"}\n')
    return tmp_path


def printed(*words, **options):
    done = invoke(*words, **options)
    assert done.exit_code == 0, (done.output, done.exception)
    return done


def test_the_first_command_that_one_types_says_what_to_give_instead(own):
    done = printed("transcribe", "talk.ogg")
    [line] = [line for line in done.stderr.splitlines() if "toy" in line]
    assert line.startswith("zoo:whisper-synth is a toy")
    assert "knows 489 words" in line and "openai/whisper-small" in line
    assert line.endswith(f"{NAME} after: pip install --no-deps moonshine-voice==0.1.0")
    assert "toy" not in done.stdout


def test_a_recogniser_that_is_installed_is_named_without_how_to_install_it(own, monkeypatch):
    show_wheel(monkeypatch, own)
    note = toy_note({"paths": ["talk.ogg"], "model": "zoo:whisper-synth"})
    assert note.endswith(f"or {NAME}")


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ({"path": "-", "model": "zoo:whisper-synth"}, "openai/whisper-small"),
        ({"data": "zoo:real-clips", "model": "zoo:whisper-synth"}, "openai/whisper-small"),
        ({"paths": ["photo.png"], "model": "zoo:llava-scenes"}, "llava-hf/llava-1.5-7b-hf"),
        ({"table": "clips.jsonl", "model": "zoo:llava-scenes"}, "llava-hf/llava-1.5-7b-hf"),
        ({"start": Path("photo.png"), "model": "zoo:llamagen-scenes"}, "Janus-Pro-1B"),
        ({"start": Path("photo.png"), "model": "zoo:var-scenes"}, "VAR"),
        (
            {"paths": ["."], "model": "openai/whisper-small", "correct": "llm:model=zoo:lm-synth"},
            "train corrector",
        ),
        ({"data": ["clips.jsonl"], "corrector": ["zoo:lm-synth"]}, "train corrector"),
        ({"data": "clips.jsonl", "model": "zoo:llava-scenes"}, "llava-hf/llava-1.5-7b-hf"),
        ({"data": ["clips.jsonl"], "model": "zoo:lm-synth"}, "or another language model"),
    ],
)
def test_own_files_of_any_kind_are_noticed(own, given, instead):
    assert instead in toy_note(given)


@pytest.mark.parametrize(
    "given",
    [
        {"paths": ["talk.ogg"], "model": "openai/whisper-small"},
        {"paths": [str(CLIP)], "model": "zoo:whisper-synth"},
        {"data": "zoo", "model": "zoo:llava-scenes"},
        {"data": "zoo:scenes", "model": "zoo:llava-scenes"},
        {"data": None, "model": "zoo:llamagen-scenes", "names": ["ring"]},
        {"what": "speech", "model": None},
        {
            "paths": ["photo.png"],
            "model": "zoo:scene-classifier",
        },  # refused later
        {"paths": ["talk.ogg"], "model": "zoo:nobody"},
    ],
)
def test_real_models_and_what_ships_go_without_a_word(own, given):
    assert toy_note(given) is None


ON_OWN_FILES = [
    "transcribe talk.ogg",
    "transcribe -",
    "transcribe --files-from clips.jsonl",
    "transcribe --data clips.jsonl",
    "transcribe talk.ogg --model openai/whisper-small --correct llm:model=zoo:lm-synth",
    "stream talk.ogg",
    "ask photo.png -q ring",
    "ask --data clips.jsonl",
    "generate-image --class ring --start photo.png --keep-rows 2",
    "generate-image --prompts clips.jsonl",
    "evaluate wer --data clips.jsonl --model zoo:whisper-synth",
    "evaluate silence --recordings clips.jsonl",
    "evaluate silence --speech clips.jsonl",
    "evaluate pope --data clips.jsonl --model zoo:llava-scenes",
    "evaluate chair --data clips.jsonl --model zoo:llava-scenes",
    "evaluate mme --data clips.jsonl --model zoo:llava-scenes",
    "evaluate amber --data clips.jsonl --model zoo:llava-scenes",
    "evaluate vsr --data clips.jsonl --model zoo:llava-scenes",
    "evaluate spatial --data clips.jsonl --model zoo:llava-scenes",
    "evaluate images --prompts clips.jsonl --model zoo:llamagen-scenes",
    "evaluate nbest --data clips.jsonl --corrector zoo:lm-synth",
    "evaluate nbest --data clips.jsonl --methods mbr,lm:zoo:lm-synth",
    "train medusa --data clips.jsonl --model zoo:whisper-synth --out heads",
    "train ctc --data clips.jsonl --model zoo:whisper-synth --out head",
    "train drafter --data clips.jsonl --model zoo:llava-scenes --out drafter",
    "train alignment-heads --data clips.jsonl --model zoo:whisper-synth",
    "train corrector --data clips.jsonl --model zoo:lm-synth --out corrector",
    "audit --data talk.ogg",
    "serve --model zoo:whisper-synth",
    "bench asr --data clips.jsonl",
    "bench vlm --data clips.jsonl",
]
NO_OWN_FILES = {"demo"}


@pytest.mark.parametrize("line", ON_OWN_FILES)
def test_every_command_notices_own_files(own, line):
    name, command = next((n, c) for n, c in all_commands().items() if f"{line} ".startswith(n))
    with command.make_context(name, line.removeprefix(name).split()) as context:
        assert "is a toy" in toy_note(context.params)


def test_every_command_that_loads_a_model_is_tried():
    for name, command in all_commands().items():
        if any("--trust-remote-code" in parameter.opts for parameter in command.params):
            assert name in NO_OWN_FILES or any(line.startswith(name) for line in ON_OWN_FILES), name


def test_the_help_of_every_command_that_loads_a_model_names_a_real_one():
    for name, command in all_commands().items():
        loads = [p for p in command.params if "Hub id" in (p.help or "") and p.name in MODELS]
        assert all(re.search(r"\b[\w-]+/[\w.-]+\w\b", p.help) for p in loads), name
        examples = [line for line in (command.help or "").splitlines() if "mmdecode " in line]
        assert not any("zoo:whisper" in line or "zoo:lm" in line for line in examples), name


def test_for_each_shipped_model_that_can_be_named_there_is_a_real_one():
    unnamed = ("scene-classifier", "punctuation")  # no option names them
    models = [name for name in zoo_names() if name not in unnamed]
    assert {name.split("-")[0] for name in models} == set(INSTEAD)
