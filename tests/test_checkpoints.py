"""Names of checkpoints: how they resolve, and the errors if nothing can be loaded."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

from mmdecode import checkpoints
from mmdecode.asr import Transcriber
from mmdecode.checkpoints import code_trusted, local_path, trusting_code
from mmdecode.errors import InputError, MMDecodeError
from mmdecode.image_ar import ImageGenerator
from mmdecode.model_names import SHORT, full_name
from mmdecode.vlm import Answerer
from mmdecode.zoo.scenes import draw_scene, render
from mmdecode.zoo.speech import speech_test
from tests.support.commands import all_commands, invoke
from tests.support.hub import publish

ROOT = Path(__file__).parents[1]
ASKED = """
import sys
from mmdecode.checkpoints import local_path
for name in sys.argv[1:]:
    try:
        print(local_path(name))
    except ValueError as error:
        print(error)
"""


def asked(*names, **environment):
    """What `local_path` says in a process of its own, a line for each name."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "0", **environment}
    done = subprocess.run(
        [sys.executable, "-c", ASKED, *names],
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# Short names


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("large-v3", "openai/whisper-large-v3"),
        ("large", "openai/whisper-large-v3"),
        ("turbo", "openai/whisper-large-v3-turbo"),
        ("small.en", "openai/whisper-small.en"),
        ("whisper-tiny", "openai/whisper-tiny"),
        ("distil-large-v3", "distil-whisper/distil-large-v3"),
        ("LLaVA-1.5-7B", "llava-hf/llava-1.5-7b-hf"),
        ("qwen2.5-vl-7b", "Qwen/Qwen2.5-VL-7B-Instruct"),
        ("openai/whisper-base", "openai/whisper-base"),
        ("zoo:whisper-synth", "zoo:whisper-synth"),
    ],
)
def test_a_short_name_stands_for_a_hub_id(short, full):
    assert full_name(short) == full


def test_all_short_names_are_in_lower_case_and_lead_to_ids_of_their_authors():
    assert all(name == name.lower() and full.count("/") == 1 for name, full in SHORT.items())


def test_a_folder_of_that_name_comes_before_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("turbo").mkdir()
    assert full_name("turbo") == local_path("turbo") == "turbo"
    Path("tiny").write_text("a file is no checkpoint")
    assert full_name("tiny") == "openai/whisper-tiny"


def test_a_model_in_the_cache_is_loaded_without_a_connection_by_its_short_name():
    files = publish("openai/whisper-tiny")
    assert local_path("tiny") == str(files)
    transcriber = Transcriber.from_pretrained("tiny", device="cpu")
    assert transcriber.model.config.model_type == "whisper"


def test_results_are_kept_under_the_full_name_whichever_was_typed(tmp_path):
    publish("openai/whisper-tiny")
    clip, out = str(speech_test()[3].path), str(tmp_path / "out")
    for name, more in (("tiny", []), ("openai/whisper-tiny", ["--resume"])):
        words = ["transcribe", clip, "--model", name, "--out", out, "--format", "txt", *more]
        done = invoke(*words)
        assert done.exit_code == 0, (done.output, done.exception)
        assert "model openai/whisper-tiny on" in done.stderr
    assert "openai/whisper-tiny" in (tmp_path / "out" / "run.json").read_text(encoding="utf-8")


# Mistakes, and no connection


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("large-v33", "large-v3"),
        ("openai/whisper-smal", "openai/whisper-small"),
        ("whisper-synth", "zoo:whisper-synth"),
    ],
)
def test_a_typing_mistake_is_answered_with_what_was_meant(typed, meant):
    with pytest.raises(InputError, match=f"{typed}.*did you mean.*'{meant}'") as caught:
        local_path(typed)
    assert "HF_HUB_OFFLINE" in str(caught.value)


def test_a_name_that_is_like_no_other_gets_no_suggestion():
    with pytest.raises(InputError, match="'nowhere' cannot be loaded") as caught:
        local_path("nowhere")
    assert "did you mean" not in str(caught.value)


def test_a_name_that_is_known_is_not_called_a_mistake():
    with pytest.raises(InputError, match="openai/whisper-medium' cannot be loaded") as caught:
        local_path("medium")
    assert "did you mean" not in str(caught.value)
    assert "hf download openai/whisper-medium" in str(caught.value)


def test_a_hub_that_cannot_be_reached_is_recognised_at_once():
    started = time.perf_counter()
    [line] = asked("large-v33", HF_ENDPOINT="http://127.0.0.1:9")
    assert time.perf_counter() - started < 8, "the client's own retries take 20 s"
    assert "the Hub cannot be reached" in line
    assert "did you mean 'large-v3'" in line
    assert "give a folder" in line


class Hub(BaseHTTPRequestHandler):
    """Answers as the Hub does, by the author's name."""

    def do_HEAD(self):
        author = self.path.split("/")[1]
        if author == "silent":
            time.sleep(6)
        codes = {"missing": ("RepoNotFound", 404), "gated": ("GatedRepo", 403)}
        code, status = codes.get(author, ("", 503 if author == "broken" else 200))
        if author == "bare":
            code, status = "EntryNotFound", 404
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("ETag", '"0"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_answer_of_the_hub_decides_the_message(hub):
    there, bare, missing, gated, broken = asked(
        *("some/model", "bare/model", "missing/whisper-small", "gated/model", "broken/model"),
        HF_ENDPOINT=hub,
    )
    assert (there, bare) == ("some/model", "bare/model")
    assert "no such model on the Hub; did you mean" in missing
    assert "access must be requested" in gated
    assert "an error (503)" in broken


@pytest.mark.slow
def test_a_hub_that_says_nothing_is_not_waited_for(hub):
    started = time.perf_counter()
    [line] = asked("silent/model", HF_ENDPOINT=hub)
    assert time.perf_counter() - started < 6
    assert "the Hub cannot be reached" in line


# Code of others


def test_code_is_trusted_inside_of_the_block_alone_and_not_untrusted_by_an_inner_one():
    with trusting_code(False):
        assert not code_trusted()
    with trusting_code(), trusting_code(False):
        assert code_trusted()
    assert not code_trusted()


CODE = """
from pathlib import Path
Path({trace!r}).write_text("was here")
from transformers import PreTrainedConfig, PreTrainedModel
class TrapConfig(PreTrainedConfig):
    model_type = "trap"
class Trap(PreTrainedModel):
    config_class = TrapConfig
"""


@pytest.fixture
def trap(tmp_path):
    """A checkpoint whose Python leaves a file after where it is run, and that file."""
    folder, trace = tmp_path / "trap", tmp_path / "trace"
    folder.mkdir()
    autos = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForCTC")
    classes = {"AutoConfig": "code.TrapConfig", **dict.fromkeys(autos, "code.Trap")}
    config = {"model_type": "trap", "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(CODE.format(trace=str(trace)))
    return folder, trace


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with a recording, an image and tables of them."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(speech_test()[3].path, "talk.ogg")
    Image.fromarray(render(draw_scene(0))).save("photo.png")
    Path("clips.jsonl").write_text('{"path": "talk.ogg", "text": "a word"}\n')
    Path("asked.jsonl").write_text('{"image": "photo.png", "question": "A ring?"}\n')
    Path("statements.jsonl").write_text('{"image": "photo.png", "caption": "A.", "label": 1}\n')
    Path("amber").mkdir()
    asked = [{"id": 1, "image": "photo.png", "query": "Is there a ring in this image?"}]
    Path("amber/query_discriminative.json").write_text(json.dumps(asked))
    known = [{"id": 1, "type": "discriminative-hallucination", "truth": "no"}]
    Path("amber/annotations.json").write_text(json.dumps(known))
    Path("lines.txt").write_text("a line\n")
    lists = [{"id": str(i), "input": ["a word", "a ward"], "output": "a word"} for i in range(40)]
    Path("lists.json").write_text(json.dumps(lists))
    return tmp_path


LOADING = [
    "transcribe talk.ogg --model MODEL",
    "transcribe talk.ogg --model zoo:whisper-synth --correct llm:model=MODEL",
    "transcribe talk.ogg --model zoo:whisper-synth --word-method ctc:model=MODEL --json",
    "transcribe talk.ogg --model zoo:whisper-synth --draft assistant:model=MODEL",
    "stream talk.ogg --model MODEL",
    "serve --model MODEL --port 0",
    "ask photo.png -q ring --model MODEL",
    "generate-image --model MODEL --class ring --out drawn",
    "evaluate wer --data clips.jsonl --model MODEL",
    "evaluate chair --data zoo --model MODEL",
    "evaluate mme --data zoo --model MODEL",
    "evaluate amber --data amber --images . --model MODEL",
    "evaluate spatial --data zoo --model MODEL",
    "evaluate vsr --data statements.jsonl --model MODEL",
    "evaluate silence --model MODEL --clips 2",
    "evaluate pope --data zoo --model MODEL",
    "evaluate images --model MODEL",
    "evaluate nbest --data lists.json --corrector MODEL",
    "evaluate nbest --data lists.json --methods lm:MODEL",
    "train medusa --model MODEL --data clips.jsonl --out heads",
    "train ctc --model MODEL --data clips.jsonl --out head",
    "train drafter --model MODEL --data asked.jsonl --out drafter",
    "train alignment-heads --model MODEL --data clips.jsonl",
    "train corrector --model MODEL --data lists.json --out corrector",
    "audit --model MODEL --data lines.txt",
    "bench asr --model MODEL --data clips.jsonl",
    "bench vlm --model MODEL",
    "demo speech --model MODEL --out shown",
]
"""A line for each way in which a command comes to load a model."""


def output_of(line, model):
    """What a command prints and raises, with a yes on standard input."""
    words = [word.replace("MODEL", str(model)) for word in line.split()]
    done = invoke(*words, input="y\n" * 9)
    assert done.exit_code, done.output
    assert isinstance(done.exception, MMDecodeError | SystemExit)
    return f"{done.output} {done.exception}"


QUICK = ("transcribe", "stream", "serve", "ask", "generate-image", "audit", "train", "demo")


def tried(line):
    return line if line.startswith(QUICK) else pytest.param(line, marks=pytest.mark.slow)


@pytest.mark.parametrize("line", [tried(line) for line in LOADING])
def test_no_command_runs_code_of_a_checkpoint_unasked(line, trap, own):
    folder, trace = trap
    message = output_of(line, folder)
    assert not trace.exists()
    assert "--trust-remote-code" in message
    assert "read its .py files" in message


def test_the_flag_alone_lets_code_run(trap, own):
    folder, trace = trap
    message = output_of("transcribe talk.ogg --model MODEL --trust-remote-code", folder)
    assert trace.exists()
    assert "is a trap model" in message


@pytest.mark.parametrize("loader", [Transcriber, Answerer, ImageGenerator])
def test_a_loader_of_the_library_runs_code_where_its_argument_says_so(loader, trap):
    folder, trace = trap
    with pytest.raises(InputError, match="trust_remote_code=True"):
        loader.from_pretrained(folder)
    assert not trace.exists()
    with pytest.raises(MMDecodeError):
        loader.from_pretrained(folder, trust_remote_code=True)
    assert trace.exists()


def test_every_command_that_loads_a_model_is_tried_and_has_the_flag():
    for name, command in all_commands().items():
        loads = any(re.search(r"\bHub\b", p.help or "") for p in command.params)
        flags = {flag for p in command.params for flag in p.opts}
        assert ("--trust-remote-code" in flags) == loads, name
        if loads:
            assert any(line.startswith(name) for line in LOADING), name


RUNS_NO_CODE = {"GenerationConfig"}
"""Classes of transformers that read JSON alone and take no ``trust_remote_code``."""


def names_from_transformers(tree):
    names = {"transformers"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers"):
            names |= {alias.asname or alias.name for alias in node.names}
    return names - RUNS_NO_CODE


def loads_without_saying(text):
    """Lines that load with a class of transformers, or with one that a variable holds, and leave
    open whether code may be run. Classes of our own have capitals and are no such names."""
    tree = ast.parse(text)
    theirs = names_from_transformers(tree)
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        root = node.func.value
        while isinstance(root, ast.Attribute):
            root = root.value
        name = root.id if isinstance(root, ast.Name) else ""
        variable = (name.islower() and name not in ("cls", "peft")) or not name
        given = {keyword.arg for keyword in node.keywords}
        loads = node.func.attr == "from_pretrained" and (name in theirs or variable)
        if loads and "trust_remote_code" not in given:
            found.append(node.lineno)
    return found


def test_everything_that_loads_with_transformers_says_whether_code_is_trusted():
    rooms = ("mmdecode", "asr", "vlm", "image_ar", "benchmarks", "examples")
    files = [file for room in rooms for file in (ROOT / room).rglob("*.py")]
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    loading = {file: text for file, text in texts.items() if ".from_pretrained(" in text}
    assert len(files) > 200
    assert len(loading) > 20
    found = {str(file): loads_without_saying(text) for file, text in loading.items()}
    assert {file: lines for file, lines in found.items() if lines} == {}


def test_the_search_for_loads_finds_them():
    text = """
from transformers import AutoModel, GenerationConfig
import transformers
AutoModel.from_pretrained('x')
transformers.AutoConfig.from_pretrained('x')
auto.from_pretrained('x')
type(target).from_pretrained('x')
AutoModel.from_pretrained('x', trust_remote_code=code_trusted())
GenerationConfig.from_pretrained('x')
Transcriber.from_pretrained('x')
"""
    assert loads_without_saying(text) == [4, 5, 6, 7]


def test_drafters_ship_for_models_of_the_zoo_and_of_a_scheme(monkeypatch):
    monkeypatch.setattr(
        checkpoints, "zoo_names", lambda: ["moonshine-tiny-en-medusa", "whisper-synth-medusa"]
    )
    assert checkpoints.paired("zoo:whisper-synth", "medusa") == "zoo:whisper-synth-medusa"
    assert checkpoints.paired("moonshine:tiny-en", "medusa") == "zoo:moonshine-tiny-en-medusa"
    for name in (None, "whisper-synth", "moonshine-tiny-en", "zoo:moonshine"):
        assert checkpoints.paired(name, "medusa") is None
