"""No value of any option ends in a traceback.

Every option of every command is given values of the wrong type, files that are missing, folders,
empty and binary files, names that nobody knows, and odd numbers. Commands run in this process, up
to the loading of a model, which fails.
"""

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import PreTrainedModel

from mmdecode.cli.app import main
from mmdecode.runs.console import console
from mmdecode.zoo.speech import speech_test
from tests.support.commands import all_commands

ROOT = Path(__file__).parents[2]
LEAVES = all_commands()
BASES = {
    "demo": "vlm --limit 1",
    "transcribe": "CLIP --model zoo:whisper-synth --max-new-tokens 2",
    "ask": "IMAGE -q What? --max-new-tokens 2",
    "generate-image": "--class ring -n 1 --out out",
    "results": "FOLDER",
    "serve": "--model zoo:whisper-synth --port 0",
    "stream": "CLIP --model zoo:whisper-synth --max-new-tokens 2",
    "evaluate wer": "--model zoo:whisper-synth --data TABLE --max-new-tokens 2 --resamples 2",
    "evaluate silence": "--clips 2 --seconds 1 --limit 1 --speech none --max-new-tokens 2",
    "evaluate nbest": "--data cv --limit 4 --resamples 2 --methods 1best",
    **{
        f"evaluate {task}": "--model zoo:llava-scenes --data zoo --limit 1 --seeds 1 --greedy "
        "--no-controls --max-new-tokens 2 --resamples 2 --warmup 0"
        for task in ("pope", "chair", "mme", "spatial", "amber", "vsr")
    },
    "evaluate images": "--model zoo:llamagen-scenes -n 2 --modes plain --resamples 20",
    "train medusa": "--model zoo:whisper-synth --data TABLE --out out",
    "train ctc": "--model zoo:whisper-synth --data TABLE --out out",
    "train drafter": "--model zoo:llava-scenes --out out --steps 1 --limit 3 --held-out 1",
    "train alignment-heads": "--model zoo:whisper-synth --data TABLE --limit 1",
    "train corrector": "--data LISTS --out out --method scratch --steps 1",
    "train zoo": "nonsense",
    "audit": "--data CLIP --max-new-tokens 2 --draft lookup",
    "bench asr": "--data TABLE --limit 1 --repeats 1 --max-new-tokens 2 --no-peers --dtype fp32 "
    "--draft lookup",
    "bench vlm": "--limit 1 --max-new-tokens 2 --no-peers",
    "zoo": "",
    "methods": "",
    "env": "",
}
"""What each command is given next to the option that is tried."""

NUMBERS = ["abc", "", "-1", "0", "nan", "inf", "-inf", "1e999", "99999999999999999999", "0x10"]
TEXTS = [
    *("", "gone", "gone/gone.jsonl", ".", "FOLDER", "EMPTY", "BINARY", "TABLE", "no-such-name"),
    *("zoo:", "zoo:gone", ":", "a:b", "a:b=c", "medusa:", "medusa:=", "lookup:length=x", "=x"),
    *("-", "é\udce9", "x" * 5000, "x" * 300, "/dev/null", "[bold", "{}", "%s", "nan"),
]
NOT_TRIED = {("train zoo", "--work")}  # nothing is read from it before the name is refused


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files by the words that stand for them."""
    folder = tmp_path_factory.mktemp("files")
    clip = speech_test()[0]
    (folder / "empty").write_text("")
    (folder / "binary").write_bytes(bytes(range(256)) * 8)
    (folder / "folder").mkdir()
    (folder / "table.jsonl").write_text(f'{{"path": "{clip.path}", "text": "a"}}\n')
    row = '{"id": "%d", "hypotheses": ["a b", "a c"], "reference": "a b"}\n'
    (folder / "lists.jsonl").write_text("".join(row % n for n in range(12)))
    Image.fromarray(np.full((32, 32, 3), 128, np.uint8)).save(folder / "image.png")
    names = {"CLIP": clip.path, "TABLE": "table.jsonl", "LISTS": "lists.jsonl"}
    names |= {"IMAGE": "image.png", "EMPTY": "empty", "BINARY": "binary", "FOLDER": "folder"}
    return {word: str(folder / name) for word, name in names.items()}


@pytest.fixture
def refused(files, capfd, monkeypatch, tmp_path):
    """What is wrong with how a command line ends; ``None``: nothing."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, words: list[str]) -> str | None:
        words = [files.get(word, word) for word in words]
        monkeypatch.setattr(sys, "argv", ["mmdecode", *name.split(), *words])
        with Path(files["EMPTY"]).open() as nothing:
            monkeypatch.setattr(sys, "stdin", nothing)
            try:
                main()
                code: Any = 0
            except SystemExit as error:
                code = error.code
            except BaseException as error:
                return f"{type(error).__name__}: {str(error)[:200]}"
            finally:
                console.errors_only = console.tells_all = False
                stderr = capfd.readouterr().err
        if "Traceback" in stderr and "--verbose" not in words:
            return f"a traceback: {stderr[-300:]}"
        if "error: unexpected" in stderr:
            return stderr[-300:]
        if code not in (0, None, 1, 2):
            return f"exit code {code}"
        lines = [line for line in stderr.splitlines() if line.startswith("error: ")]
        if code == 2 and len(lines) != 1 and "─ Error ─" not in stderr and "Error" not in stderr:
            return f"no error in: {stderr[-200:]}"
        if code == 2 and lines and not stderr.rstrip().splitlines()[-1].startswith("error: "):
            return f"more than a line: {stderr[-200:]}"
        return None

    return run


@pytest.fixture
def no_models(monkeypatch):
    """Models cannot be loaded."""

    def stop(*args: Any, **given: Any) -> None:
        raise OSError("models are not loaded here")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", stop)


def is_number(option: Any) -> bool:
    shown = str(option.type_descriptor.annotation)
    return "int" in shown or "float" in shown


def cases(name: str) -> list[list[str]]:
    """Words next to the base of a command, one list for each value of each option."""
    found = []
    for option in LEAVES[name].params:
        flag = option.opts[-1]
        if not flag.startswith("-"):
            found += [[text] for text in TEXTS if not text.startswith("-")]
        elif option.is_flag:
            found += [[f"{flag}=3"], [flag, flag]]
        elif (name, flag) not in NOT_TRIED:
            found += [[flag, text] for text in (NUMBERS if is_number(option) else TEXTS)]
    return [*found, ["--no-such-option"], ["--options", "EMPTY"], ["too", "many", "words"]]


def test_every_command_is_tried():
    assert set(BASES) == set(LEAVES)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", BASES)
def test_some_bad_values_end_without_a_traceback(name, refused, no_models):
    base = BASES[name].split()
    some = cases(name)[:: max(len(cases(name)) // 6, 1)]
    found = [f"{name} {words}: {why}" for words in some if (why := refused(name, [*base, *words]))]
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", BASES)
def test_no_bad_value_ends_in_a_traceback(name, refused, no_models):
    base, every = BASES[name].split(), cases(name)
    found = [f"{name} {words}: {why}" for words in every if (why := refused(name, [*base, *words]))]
    print(f"{name}: {len(every)} values of {len(LEAVES[name].params)} options")
    assert not found, "\n".join(re.sub(r"x{50,}", "x...", line) for line in found)


# Recipes and benchmarks


SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for room in ("asr", "vlm", "image_ar", "benchmarks")
    for path in (ROOT / room).rglob("*.py")
    if "run_script(main)" in path.read_text()
)


@pytest.fixture
def script(monkeypatch, capfd, tmp_path, no_models):
    """How a script ends, as its code and stderr; no model is loaded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))

    def run(path: str, words: list[str]) -> tuple[Any, str]:
        monkeypatch.setattr(sys, "argv", [path, *words])
        try:
            runpy.run_path(str(ROOT / path), run_name="__main__")
        except SystemExit as error:
            stderr = capfd.readouterr().err
            return (1, error.code) if isinstance(error.code, str) else (error.code, stderr)
        return 0, capfd.readouterr().err

    return run


def test_every_script_of_the_recipes_ends_in_a_line():
    for room in ("asr", "vlm", "image_ar"):
        own = {path.relative_to(ROOT).as_posix() for path in (ROOT / room).glob("*.py")}
        assert own <= set(SCRIPTS)
    assert len(SCRIPTS) > 25


@pytest.mark.slow
@pytest.mark.parametrize("path", SCRIPTS)
def test_no_script_ends_in_a_traceback(path, script):
    words = re.findall(r'add_argument\(\s*"([^"]+)"([^\n]*)', (ROOT / path).read_text())
    given = ["gone/gone.jsonl" for name, _ in words if not name.startswith("-")]
    for name, how in words:
        if "required=True" in how:
            given += [name, "gone/gone.jsonl"]
    for bad in (["--no-such-option"], ["--device", "gpu"], ["--result", "gone.json"]):
        if bad[0] == "--no-such-option" or any(name == bad[0] for name, _ in words):
            code, stderr = script(path, [*given, *bad])
            assert code in (1, 2), (bad, code)
            assert "Traceback" not in stderr and "error: unexpected" not in stderr, (bad, stderr)
    for name, how in words:
        if "type=int" in how or "type=float" in how:
            assert script(path, [*given, name, "x"])[0] == 2
