"""A command that is refused leaves every file and folder as it was, and is refused first."""

import pytest

from mmdecode.errors import MMDecodeError, OptionError
from mmdecode.runs.files import note_settings, write_file
from tests.support.commands import all_commands, invoke

NO_MODEL = ["--model", "./nowhere"]
OUT = ["--out", "out"]
ASKED = ["--data", "questions.jsonl", *NO_MODEL, *OUT]
COMMAND_LINES = {
    "demo": ["speech", *NO_MODEL, *OUT],
    "demo vlm": [*NO_MODEL, *OUT],
    "demo image": [*NO_MODEL, *OUT],
    "transcribe": ["speech.wav", *NO_MODEL, *OUT],
    "stream": ["speech.wav", *NO_MODEL, *OUT],
    "ask": ASKED,
    "generate-image": ["--class-id", "1", *NO_MODEL, *OUT],
    "evaluate wer": ["--data", "texts.jsonl", *NO_MODEL, *OUT],
    "evaluate silence": [*NO_MODEL, *OUT],
    "evaluate nbest": ["--data", "nowhere.jsonl", *OUT],
    "evaluate pope": ["--data", "zoo", *NO_MODEL, *OUT],
    "evaluate chair": ["--data", "zoo", *NO_MODEL, *OUT],
    "evaluate mme": ["--data", "zoo", *NO_MODEL, *OUT],
    "evaluate amber": ["--data", "nowhere", *NO_MODEL, *OUT],
    "evaluate spatial": ["--data", "zoo", *NO_MODEL, *OUT],
    "evaluate vsr": ["--data", "nowhere", *NO_MODEL, *OUT],
    "evaluate images": [*NO_MODEL, *OUT],
    "train medusa": ["--data", "texts.jsonl", *NO_MODEL, *OUT],
    "train ctc": ["--data", "texts.jsonl", *NO_MODEL, *OUT],
    "train drafter": ASKED,
    "train alignment-heads": ["--data", "texts.jsonl", *NO_MODEL, *OUT],
    "train corrector": ["--data", "lists.jsonl", *NO_MODEL, *OUT],
    "train zoo": ["nothing", "--work", "work", *OUT],
    "bench asr": ["--data", "texts.jsonl", *NO_MODEL, *OUT],
    "bench vlm": ASKED,
}
REPLACED = {
    "demo": "report.html",
    "demo vlm": "report.html",
    "demo image": "report.html",
    "evaluate wer": "summary.json",
    "evaluate silence": "summary.json",
    "evaluate nbest": "table.csv",
    "evaluate pope": "table.csv",
    "evaluate chair": "items.jsonl",
    "evaluate mme": "report.html",
    "evaluate amber": "run.json",
    "evaluate spatial": "auroc.png",
    "evaluate vsr": "run.json",
    "evaluate images": "summary.json",
    "train medusa": "model.safetensors",
    "train ctc": "model.safetensors",
    "train drafter": "card.json",
    "train alignment-heads": "generation_config.json",
    "train corrector": "tokenizer.json",
    "bench asr": "results.json",
    "bench vlm": "results.json",
}
"""A file of each command's results; the other commands ask about theirs in tests of their own."""


def refused(name):
    """The error of a command line."""
    done = invoke(*name.split(), *COMMAND_LINES[name])
    assert isinstance(done.exception, MMDecodeError), (done.output, done.exception)
    return done.exception


def tree(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "speech.wav").write_bytes(b"RIFF")
    (tmp_path / "texts.jsonl").write_text('{"audio": "speech.wav", "text": "hello"}\n')
    (tmp_path / "questions.jsonl").write_text('{"id": "a", "question": "what?"}\n')
    rows = ['{"input": ["a b", "a c"], "output": "a b"}'] * 5
    (tmp_path / "lists.jsonl").write_text("\n".join(rows) + "\n")
    return tmp_path


def test_each_command_that_writes_is_tried_here():
    writing = {n for n, c in all_commands().items() if any("--out" in p.opts for p in c.params)}
    assert writing <= set(COMMAND_LINES)


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_a_refused_command_leaves_everything_as_it_was(name, inputs):
    before = tree(inputs)
    refused(name)
    assert tree(inputs) == before


@pytest.mark.parametrize("name", REPLACED)
def test_a_file_of_somebody_else_is_named_before_a_model_is_looked_for(name, inputs):
    (inputs / "out").mkdir()
    theirs = inputs / "out" / REPLACED[name]
    theirs.write_text("theirs")
    before = tree(inputs)
    error = refused(name)
    assert isinstance(error, OptionError) and f"{REPLACED[name]}: there already" in str(error)
    assert "--overwrite" in str(error)
    assert tree(inputs) == before
    COMMAND_LINES[name].append("--overwrite")
    try:  # refused by something else then, the model that is nowhere
        assert "there already" not in str(refused(name))
    finally:
        COMMAND_LINES[name].remove("--overwrite")
    assert theirs.read_text() == "theirs"


# the run.json of amber is what a report is known by
@pytest.mark.parametrize("name", [name for name in REPLACED if name != "evaluate amber"])
def test_a_file_of_ours_is_no_reason_to_refuse_a_file_of_that_name(name, inputs):
    write_file(inputs / "out" / REPLACED[name], "ours")
    assert "there already" not in str(refused(name))


RESUMABLE = {
    "transcribe": "results.jsonl",
    "ask": "results.jsonl",
    "generate-image": "results.jsonl",
    "evaluate wer": "samples.jsonl",
    "evaluate silence": "samples.jsonl",
    "evaluate pope": "items.jsonl",
    "evaluate spatial": "items.jsonl",
    "evaluate images": "images.jsonl",
}
"""The file of rows of commands that continue a run."""


@pytest.mark.parametrize("name", RESUMABLE)
def test_overwrite_costs_no_old_result_where_no_model_could_be_loaded(name, inputs, monkeypatch):
    rows = inputs / "out" / RESUMABLE[name]
    write_file(rows, '{"id": "old", "source": "old", "name": "old"}\n')
    note_settings(rows if name == "ask" else rows.parent, {"model": "old"})
    before = tree(inputs)
    monkeypatch.setitem(COMMAND_LINES, name, [*COMMAND_LINES[name], "--overwrite"])
    assert "nowhere" in str(refused(name))
    assert tree(inputs) == before
