"""Moonshine tiny-en: found, checked, converted once, and what transformers makes of it."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import mmdecode as mm
from mmdecode.checkpoints import is_installed, local_path
from mmdecode.errors import InputError, UnknownNameError
from mmdecode.models.moonshine import convert, wheel
from mmdecode.models.moonshine.ort_file import read_graph
from mmdecode.models.moonshine.tokenizer import read_pieces, tokenizer_json
from mmdecode.runs import console
from mmdecode.zoo.real_clips import real_clips
from tests.support.commands import invoke, json_of
from tests.support.moonshine import NAME, hide_wheel, needs_wheel, show_wheel

ROOT = Path(__file__).parents[2]


@pytest.fixture
def no_wheel(monkeypatch, tmp_path):
    hide_wheel(monkeypatch, tmp_path / "cache")


@pytest.fixture
def files():
    """The folder of the wheel's files."""
    return wheel.assets()


def clip(name):
    return next(clip for clip in real_clips() if clip.name == name)


def python(code, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# What is said where it cannot be had


def test_without_the_wheel_one_command_is_named_that_installs_it(no_wheel):
    assert not is_installed(NAME)
    with pytest.raises(
        InputError,
        match=r"needs the wheel .* install it with: pip install --no-deps moonshine-voice==0\.1\.0;"
        " it exists for Linux on x86_64",
    ):
        mm.load(NAME)


@pytest.mark.parametrize("name", [f"{NAME}n", "moonshine:", "moonshine:base-en"])
def test_another_checkpoint_of_the_scheme_gets_a_suggestion(name):
    with pytest.raises(UnknownNameError, match=r"no moonshine checkpoint named .*known: tiny-en"):
        local_path(name)


def test_the_environment_says_that_only_the_cache_has_the_recogniser(monkeypatch, tmp_path):
    monkeypatch.setattr(console.out, "width", 400)
    hide_wheel(monkeypatch, tmp_path)
    assert re.search(rf"{NAME} +. not installed +.", invoke("env").stdout)
    wheel.converted_folder().mkdir()
    for name in wheel._FILES:
        (wheel.converted_folder() / name).touch()
    found = invoke("env").stdout
    assert f"not installed here, but converted in the user's cache: {tmp_path}" in found
    show_wheel(monkeypatch, tmp_path)
    monkeypatch.setenv("MMDECODE_CACHE", str(tmp_path))
    assert re.search(rf"{NAME} +. installed +.", invoke("env").stdout)


def test_a_mistyped_scheme_gets_a_suggestion():
    with pytest.raises(InputError, match=f"did you mean '{NAME}'"):
        local_path("moonshin:tiny-en")


def test_files_of_another_version_are_refused_with_both_hashes(tmp_path):
    for name in wheel.SHA256:
        (tmp_path / name).write_bytes(b"of another version")
    [(name, expected), *_] = wheel.SHA256.items()
    assert not is_installed(f"moonshine:{tmp_path}")
    for given in (tmp_path, f"moonshine:{tmp_path}"):
        with pytest.raises(InputError) as caught:
            local_path(given)
        message = str(caught.value)
        found = hashlib.sha256(b"of another version").hexdigest()
        assert str(tmp_path / name) in message
        assert f"its sha256 is {found}, expected {expected}" in message
        assert "--no-deps moonshine-voice==0.1.0" in message


def test_a_folder_without_one_of_the_files_is_refused_by_its_name(tmp_path):
    with pytest.raises(InputError, match=r"encoder_model\.ort cannot be read: No such file"):
        local_path(f"moonshine:{tmp_path}")


# Tokenizer files


def test_lengths_of_pieces_take_two_bytes_from_128_on():
    pieces = [b"a", b"b" * 127, b"c" * 128, b"d" * 300]
    heads = [b"\x01", b"\x7f", b"\x80\x01", b"\xac\x02"]
    data = b"".join(head + piece for head, piece in zip(heads, pieces, strict=True))
    assert read_pieces(data) == pieces
    for cut in (1 + 127, len(data) - 1):
        with pytest.raises(InputError, match=r"tokenizer\.bin is damaged: piece"):
            read_pieces(data[:cut])


def test_pieces_of_another_tokenizer_are_refused():
    with pytest.raises(InputError, match="expected the pieces <unk>, <s> and </s>"):
        tokenizer_json([b"[PAD]", b"[CLS]"])


@pytest.fixture(scope="module")
def tokenizer():
    pieces = read_pieces((wheel.assets() / "tokenizer.bin").read_bytes())
    return Tokenizer.from_str(tokenizer_json(pieces))


@needs_wheel
@pytest.mark.parametrize(
    "text",
    [
        "And so, my fellow Americans: ask not!",
        " two  spaces, a\ttab\nand a line ",
        "naïve café, 你好, Ω ≈ 1.5 — “quoted”",
        "\U0001f389 \x00 \x7f",
        "",
    ],
)
def test_any_text_comes_back_from_its_ids(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


# Conversion


@needs_wheel
def test_every_weight_is_there_and_the_embedding_is_the_output_matrix(files):
    weights = convert.read_weights(files)
    assert len(weights) == 160
    assert sum(value.size for value in weights.values()) == 27_092_736
    assert {value.dtype for value in weights.values()} == {np.dtype("float32")}
    restored = dict(convert._restored(read_graph(files / convert.DECODER)))
    embedding = restored["model.decoder.embed_tokens.weight"]
    assert np.array_equal(restored["proj_out.weight"], embedding)


@needs_wheel
def test_a_graph_that_is_cut_off_is_refused(files, tmp_path):
    shutil.copy(files / convert.DECODER, tmp_path)
    whole = (files / convert.ENCODER).read_bytes()
    for size in (100, len(whole) // 2, len(whole) - 100):
        (tmp_path / convert.ENCODER).write_bytes(whole[:size])
        with pytest.raises(InputError, match=r"encoder_model\.ort is damaged"):
            convert.read_weights(tmp_path)


@needs_wheel
def test_another_graph_is_refused(files, tmp_path):
    for name in (convert.ENCODER, convert.DECODER):
        shutil.copy(files / convert.ENCODER, tmp_path / name)
    with pytest.raises(InputError, match=r"tensors of .* expected 160 of 27092736"):
        convert.read_weights(tmp_path)


# The checkpoint


@pytest.fixture(scope="module")
def folder():
    return Path(local_path(NAME))


@needs_wheel
def test_it_is_loaded_by_name_with_its_processor_and_no_code_of_the_wheel_runs(folder, monkeypatch):
    monkeypatch.delitem(sys.modules, wheel.PACKAGE, raising=False)  # another test imports it
    model, processor = mm.load(NAME, "cpu")
    assert type(model).__name__ == "MoonshineForConditionalGeneration"
    assert not model.training
    assert processor.feature_extractor.sampling_rate == 16_000
    assert local_path(folder) == str(folder)
    assert wheel.PACKAGE not in sys.modules


PLAIN = """
import json, sys
import soundfile
import transformers as tr
folder, clip = sys.argv[1:]
model = tr.AutoModelForSpeechSeq2Seq.from_pretrained(folder)
processor = tr.AutoProcessor.from_pretrained(folder)
samples, rate = soundfile.read(clip, dtype="float32")
inputs = processor(samples, sampling_rate=rate, return_tensors="pt")
ids = model.generate(**inputs)
print(json.dumps({
    "text": processor.batch_decode(ids, skip_special_tokens=True),
    "tokenizer": tr.AutoTokenizer.from_pretrained(folder)("Hello there.").input_ids,
    "normalises": tr.AutoFeatureExtractor.from_pretrained(folder).do_normalize,
    "mmdecode": "mmdecode" in sys.modules,
}))
"""


@needs_wheel
@pytest.mark.slow
def test_transformers_alone_writes_what_a_clip_says(folder):
    command = [sys.executable, "-c", PLAIN, folder, clip("librivox-0930").path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json_of(done)
    assert found == {
        "text": ["He might even have been made amiable himself."],
        "tokenizer": [15043, 727, 29889],
        "normalises": False,
        "mmdecode": False,
    }


@needs_wheel
def test_the_folder_has_card_licence_and_hashes(folder):
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert all(value in page for value in wheel.SHA256.values())
    assert "Copyright (c) 2025 Moonshine AI" in (folder / "LICENSE").read_text(encoding="utf-8")


@needs_wheel
def test_the_listing_knows_its_size(folder):
    size = sum(file.stat().st_size for file in folder.iterdir()) / 2**20
    assert abs(size - wheel.CARD["mib"]) < 0.1


@needs_wheel
def test_a_folder_of_the_three_files_is_the_same_checkpoint(files, folder, tmp_path, monkeypatch):
    for name in wheel.SHA256:
        (tmp_path / name).symlink_to(files / name)
    monkeypatch.setitem(sys.modules, wheel.PACKAGE, None)
    assert is_installed(f"moonshine:{tmp_path}")
    assert local_path(tmp_path) == local_path(f"moonshine:{tmp_path}") == str(folder)
    assert is_installed(NAME)  # from the cache


@needs_wheel
def test_a_file_that_somebody_removed_from_the_cache_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("MMDECODE_CACHE", str(tmp_path))
    cached = wheel.converted_folder()
    cached.mkdir()
    for file in folder.iterdir():
        if file.name != "tokenizer.json":
            (cached / file.name).symlink_to(file)
    with pytest.raises(InputError, match=r"lacks tokenizer\.json.*delete that folder"):
        local_path(NAME)


@needs_wheel
@pytest.mark.slow
def test_two_processes_that_ask_at_once_get_one_whole_checkpoint(folder, tmp_path):
    code = f"from mmdecode.checkpoints import local_path; print(local_path({NAME!r}))"
    runs = [python(code, MMDECODE_CACHE=str(tmp_path)) for _ in range(2)]
    printed = {run.communicate()[0] for run in runs}
    assert [run.returncode for run in runs] == [0, 0]
    [made] = tmp_path.iterdir()
    assert printed == {f"{made}\n"}
    for file in folder.iterdir():
        assert (made / file.name).read_bytes() == file.read_bytes()


@needs_wheel
def test_whether_it_is_installed_is_known_in_milliseconds():
    code = f"""
import sys, time
from mmdecode.checkpoints import is_installed
begin = time.perf_counter()
found = is_installed({NAME!r})
took = time.perf_counter() - begin
heavy = {{"torch", "numpy", "transformers", {wheel.PACKAGE!r}}} & set(sys.modules)
print(found, took < 0.05, heavy)
"""
    assert python(code).communicate()[0] == "True True set()\n"


# Listing


def test_the_zoo_lists_it_with_licence_origin_notice_and_command(no_wheel):
    done = invoke("zoo", "--json")
    [row] = [row for row in json.loads(done.stdout) if row["name"] == NAME]
    assert row["licence"] == "MIT"
    assert row["notice"] == "Copyright (c) 2025 Moonshine AI"
    assert "moonshine-voice==0.1.0" in row["origin"]
    assert row["installed"] is False
    assert row["install"] == "pip install --no-deps moonshine-voice==0.1.0"
    shown = invoke("zoo").stdout
    assert NAME in shown
    assert "MIT" in shown
