"""Commands and programs of docs/serve.md, against a running server."""

import contextlib
import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from mmdecode.zoo.speech import speech_test
from tests.serve.running import CHAT, SPEECH, running, transcriber

PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")
CLIP = speech_test()[3]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def server():
    with running() as found:
        yield found


def here(text, server):
    """Code of the page with the address, the model and a recording of this test."""
    text = text.replace("127.0.0.1:8000", server.url.partition("//")[2])
    text = text.replace("openai/whisper-small", SPEECH).replace("talk.mp3", str(CLIP.path))
    return text.replace("llava-hf/llava-1.5-7b-hf", CHAT)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl(server):
    [line] = [
        line for _, text in BLOCKS for line in text.splitlines() if line.startswith("$ curl ")
    ]
    done = subprocess.run(
        here(line[2:], server).split(), capture_output=True, text=True, timeout=60
    )
    assert json.loads(done.stdout)["text"] == transcriber()(str(CLIP.path)).text


def test_programs(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (64, 64), "red").save("photo.png")
    programs = [here(text, server) for kind, text in BLOCKS if kind == "py"]
    out = []
    for program in programs:
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            exec(program, {})
        out.append(shown.getvalue())
    text = transcriber()(str(CLIP.path)).text
    speech, chat, stream = out
    assert speech.startswith(text) and chat.strip() and "'type': 'done'" in stream
    assert stream.count("'type': 'update'") > 4


def test_the_page_names_every_endpoint_and_flag(server):
    named = set(re.findall(r"^\| `(?:GET |POST )?(/[\w/]*)`", PAGE, re.MULTILINE))
    assert {path for path in server.paths() if "{" not in path} == named - {"/v1/audio/stream"}
