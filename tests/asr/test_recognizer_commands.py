"""Recognisers without timestamps from the command line, one of them known to nobody."""

import json
import shutil

import numpy as np
import pytest
import soundfile

from mmdecode.asr import Failure, Transcriber
from mmdecode.errors import IncompatibleError, InputError, UnsupportedModelError
from tests.support.commands import invoke
from tests.support.files import write_json_lines
from tests.support.tiny_recognizers import MODELS

RATE = 16_000
KINDS = pytest.mark.parametrize(
    "kind", ["speech_to_text", pytest.param("moonshine", marks=pytest.mark.slow)]
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Each kind as a checkpoint."""
    found = {}
    for kind, make in MODELS.items():
        found[kind] = tmp_path_factory.mktemp(kind)
        for part in make():
            part.save_pretrained(found[kind])
    return found


@pytest.fixture
def talk(tmp_path, kit):
    path = tmp_path / "talk.wav"
    soundfile.write(path, np.concatenate([kit.noise(0.8), np.zeros(RATE), kit.noise(0.9, 1)]), RATE)
    return path


def run(*words):
    return invoke(*words, "--device", "cpu")


@KINDS
def test_a_recording_becomes_files_of_every_format(kind, saved, talk, tmp_path):
    out = tmp_path / "out"
    words = ["transcribe", talk, tmp_path / "gone.wav", "--model", saved[kind], "--window-s", "1.2"]
    done = run(*words, "--out", out, "--format", "all", "--fallback")
    assert done.exit_code == 1 and "1 transcribed" in done.stderr and "gone.wav" in done.stderr
    result = json.loads((out / "talk.json").read_text())
    assert result["timed_by"] == "windows" and len(result["segments"]) > 1 and result["text"]
    texts = [segment["text"] for segment in result["segments"]]
    for kind_ in ("txt", "srt", "vtt", "tsv", "jsonl", "whisper.json"):
        written = (out / f"talk.{kind_}").read_text()
        assert all(text.split()[0] in written for text in texts)
    assert len((out / "talk.tsv").read_text().splitlines()) == len(texts) + 1
    scored = json.loads((out / "talk.whisper.json").read_text())["segments"]
    assert [one["text"].strip() for one in scored] == texts
    assert all(one["no_speech_prob"] is None and one["avg_logprob"] < 0 for one in scored)
    again = run(*words[:2], *words[3:], "--out", out, "--format", "all", "--fallback", "--resume")
    assert again.exit_code == 0 and "1 done before" in again.stderr


@KINDS
def test_a_recording_is_streamed(kind, saved, talk):
    done = run("stream", talk, "--model", saved[kind], "--json", "--step", "0.5")
    assert done.exit_code == 0, done.output
    *updates, report = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(updates) == 6
    words = "".join("".join(update["committed"]) for update in updates).split()
    assert len(words) == report["committed_words"] > 0


@pytest.mark.slow
@KINDS
def test_a_data_set_is_scored(kind, saved, talk, tmp_path):
    rows = [{"audio": "talk.wav", "text": "w1 w2"}, {"audio": "gone.wav", "text": "w3"}]
    data = tmp_path / "data.jsonl"
    write_json_lines(data, rows)
    out = tmp_path / "wer"
    done = run("evaluate", "wer", "--model", saved[kind], "--data", data, "--out", out, "--json")
    assert done.exit_code == 1, done.output
    assert "gone.wav" in done.stderr
    alone = run("evaluate", "wer", "--model", saved[kind], "--data", data, "--limit", "1", "--json")
    assert alone.exit_code == 0, alone.output
    assert "wer" in alone.stdout


def test_a_language_the_model_lacks_costs_its_row(kit, talk, tmp_path):
    model, processor = MODELS["moonshine"](language="en")
    for part in (model, processor):
        part.save_pretrained(tmp_path / "model")
    rows = [{"audio": "talk.wav", "id": name, "language": name} for name in ("en", "de")]
    write_json_lines(tmp_path / "data.jsonl", rows)
    words = ["--model", tmp_path / "model", "--out", tmp_path / "out", "--format", "txt"]
    done = run("transcribe", "--data", tmp_path / "data.jsonl", *words)
    assert done.exit_code == 1, done.output
    assert "1 transcribed, 0 done before, 1 failed" in done.stderr
    assert "transcribes only 'en'" in done.stderr


# ---- checkpoints that lack something

SLOW = "tokenizer.json"  # transformers tries every way to make one
MISSING = {
    ("tokenizer.json", "tokenizer_config.json"): "tokenizer",
    ("preprocessor_config.json", "processor_config.json"): "feature extractor|processor",
    ("config.json",): "config.json",
    ("model.safetensors",): "model.safetensors",
}


@pytest.mark.parametrize(
    "names",
    [pytest.param(n, marks=[pytest.mark.slow] * (n[0] == SLOW), id=n[0]) for n in MISSING],
)
@KINDS
def test_a_checkpoint_that_lacks_a_file_is_refused_and_the_file_is_named(
    kind, names, saved, tmp_path
):
    shutil.copytree(saved[kind], tmp_path / "model")
    for name in names:
        (tmp_path / "model" / name).unlink(missing_ok=True)
    with pytest.raises(InputError, match=MISSING[names]) as caught:
        Transcriber.from_pretrained(tmp_path / "model", device="cpu")
    assert str(tmp_path / "model") in str(caught.value)


def test_an_empty_folder_is_no_checkpoint(tmp_path):
    with pytest.raises(InputError, match=r"config\.json"):
        Transcriber.from_pretrained(tmp_path, device="cpu")


def test_drafts_guides_and_heads_are_refused_with_what_to_do(saved):
    for draft in ("lookup", "medusa"):
        with pytest.raises(
            (IncompatibleError, InputError), match=r"leave them out|as medusa:path="
        ):
            Transcriber.from_pretrained(saved["speech_to_text"], draft=draft, device="cpu")


def test_commands_refuse_recognisers_that_they_are_not_for(saved, talk, tmp_path):
    data = ["--data", talk.parent, "--out", tmp_path / "heads"]
    refused = {
        "is a speech recogniser (moonshine)": ["audit", "--data", talk, "--model", "moonshine"],
        "speech recogniser (moonshine)": ["train", "drafter", *data, "--model", "moonshine"],
        "no adapter for": ["train", "medusa", *data, "--model", "speech_to_text"],
    }
    for why, words in refused.items():
        done = run(*words[:-1], saved[words[-1]])
        assert isinstance(done.exception, UnsupportedModelError), done.output
        assert why in str(done.exception)


def test_heads_for_a_recogniser_without_timestamps_are_trained_by_a_command(saved, talk, tmp_path):
    """From recordings of unequal length, which are given a draft by the heads afterwards."""
    folder, (wave, _) = tmp_path / "talks", soundfile.read(talk)
    folder.mkdir()
    for number in range(20):
        soundfile.write(folder / f"{number}.wav", wave[: RATE // 2 + 700 * number], RATE)
    heads, model = tmp_path / "heads", saved["moonshine"]
    shape = ["--heads", 2, "--nodes", 3, "--vocabulary", 5, "--epochs", 1]
    done = run("train", "medusa", "--data", folder, "--model", model, "--out", heads, *shape)
    assert done.exit_code == 0, done.output
    report = json.loads((heads / "report.json").read_text())
    assert report["samples"] == 20 and report["vocabulary"] <= 5
    drafted = Transcriber.from_pretrained(model, draft=f"medusa:path={heads}", device="cpu")
    plain = Transcriber.from_pretrained(model, device="cpu")
    assert drafted(talk).text == plain(talk).text
    assert len(drafted.decoder.draft.paths) == 3


def test_speech_detection_and_chunks_work(saved, talk):
    pytest.importorskip("silero_vad")
    for options in ({"vad": True}, {"mode": "chunked", "window_s": 1.2}):
        ours = Transcriber.from_pretrained(saved["speech_to_text"], device="cpu", **options)
        found = ours([str(talk), np.full(3, np.nan)])
        assert found[0].timed_by == "windows" and isinstance(found[1], Failure)
