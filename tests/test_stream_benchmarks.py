"""Benchmarks of models for streams are tried on a few clips."""

import importlib
import json
import random
import sys

import pytest
import torch

from mmdecode.asr import Transcriber
from mmdecode.models.ctc_head import CTCHead
from mmdecode.train.punctuation import disfluent, grammar_paragraphs
from mmdecode.zoo import synthesis
from mmdecode.zoo.speech import speech_test
from tests.test_benchmarks import ROOT


@pytest.fixture
def measured(monkeypatch, tmp_path, capsys):
    """Runs a benchmark in this process; returns its result, and what its page shows."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    threads = torch.get_num_threads()

    def called(script, *words):
        page = tmp_path / "page.md"
        page.write_text("<!-- tables -->\n<!-- end of tables -->\n")
        own = ["--out", str(tmp_path), "--page", str(page)]
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *words, *own])
        importlib.import_module(script).main()
        (path,) = tmp_path.glob("*-cpu-*.json")
        assert path.name in page.read_text()
        return json.loads(path.read_text()), page.read_text()

    yield called
    torch.set_num_threads(threads)


@pytest.fixture
def espeak(monkeypatch):
    """A synthesiser that is there everywhere; it says the same, whatever it is given."""

    class Same:
        def speak(self, text, voice):
            return speech_test()[0].samples()[: 2000 * len(text.split())]

    monkeypatch.setattr(synthesis, "Espeak", Same)


@pytest.fixture
def head(tmp_path):
    """Folder of a CTC head with random weights, for ``zoo:whisper-synth``."""
    torch.manual_seed(0)
    recognizer = Transcriber.from_pretrained("zoo:whisper-synth", device="cpu").recognizer
    config = recognizer.model.config
    sizes = {"source_size": config.d_model, "hidden_size": config.d_model, "inner_size": 16}
    made = CTCHead(
        {**sizes, "kernel": 3, "strides": [1], "subwords": 50, "vocab_size": config.vocab_size}
    )
    made.ids.copy_(torch.arange(50))
    made.save_pretrained(tmp_path / "head")
    return str(tmp_path / "head")


@pytest.mark.slow
def test_causal_models_are_measured_on_a_clip(measured):
    words = ["--limit", "2", "--few", "1", "--models", "zoo:whisper-synth-320ms"]
    result, page = measured("causal", *words)
    rows = {(row["model"], row["policy"]): row for row in result["costs"]}
    uncut, causal = (rows[f"zoo:whisper-synth{name}", "agreement:n=2"] for name in ("", "-320ms"))
    assert causal["states_per_second"] < 60 < uncut["states_per_second"]
    assert len(result["curves"]) == 2 * 4 + 6 and "-960ms" not in page


@pytest.mark.slow
def test_a_head_is_measured_in_every_part(measured, espeak, head):
    words = ["--head", head, "--limit", "2", "--rounds", "1", "--seconds", "40"]
    result, page = measured("ctc", *words)
    assert all(row["equal"] for row in result["draft"])
    weights = {row["weight"] for row in result["guide"]}
    assert len(weights) == 5 and {row["of"] for row in result["head"]} == {"head", "decoder"}
    assert [row["way"] for row in result["cuts"]][-1] == "without pauses, by silero"
    assert page.count("**") >= 8


@pytest.mark.slow
def test_marks_are_measured_on_few_paragraphs(measured, monkeypatch):
    script = importlib.import_module("punctuation")  # on the path by now
    monkeypatch.setattr(script, "handbook", lambda part: grammar_paragraphs(9, 5, part))
    result, page = measured("punctuation", "--limit", "4")
    rows = {(row["texts"], row["delay"]): row for row in result["rows"]}
    assert rows["grammar", 2]["."]["f1"] > 0.9
    assert rows["grammar", 2]["."]["f1"] > rows["grammar", 0]["."]["f1"]
    assert rows["handbook, disfluent", 2]["repair"]["places"] > 0
    assert "[" in page


@pytest.mark.slow
def test_alternatives_are_trained_and_measured(measured, espeak, head, tmp_path):
    words = ["--work", str(tmp_path / "work"), "--minutes", "0.02", "--examples", "4"]
    result, _ = measured("alternatives", *words, "--utterances", "12", "--head", head)
    assert len(result["rows"]) == 9 and result["weights"]["segmental"] > 1e5


def test_repairs_of_the_recipe_are_words_repeated():
    words = grammar_paragraphs(3, 1, "train")[0]
    made = disfluent(words, random.Random(0), 0.5)
    assert [word for word in made if not word.disfluency] == words
    repairs = [index for index, word in enumerate(made) if word.disfluency == 2]
    again = [any(made[i].text == later.text for later in made[i + 1 : i + 4]) for i in repairs]
    assert 0.5 < sum(again) / len(again) < 1
