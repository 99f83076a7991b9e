"""Models for lm-eval and lmms-eval: with the harnesses if they are installed, else a stand-in."""

import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from mmdecode.checkpoints import local_path
from mmdecode.errors import MMDecodeError, OptionError
from mmdecode.evaluation import harnesses

MODEL = "zoo:lm-synth"
ASKED = ("the cat", "add six spoons of", "my brother played a new song on")


class Harness:
    """Loads and generates as the classes of the harnesses for models of transformers do."""

    def __init__(self, pretrained, dtype="float32"):
        self.model = AutoModelForCausalLM.from_pretrained(pretrained, dtype=dtype)
        self.tokenizer = AutoTokenizer.from_pretrained(pretrained)

    def texts(self, asked):
        found = []
        for text in asked:
            ids = self.tokenizer(text, return_tensors="pt").input_ids
            ids = self.model.generate(
                input_ids=ids, max_length=ids.shape[1] + 24, do_sample=False, use_cache=True
            )
            found.append(self.tokenizer.decode(ids[0]))
        return found


def test_a_model_of_a_harness_generates_the_same_text_with_a_draft():
    drafted = harnesses.with_decoder(Harness)(MODEL, draft="lookup", dtype="float32")
    assert drafted.texts(ASKED) == Harness(local_path(MODEL)).texts(ASKED)
    stats = drafted.decoder.stats
    assert stats.drafted > 0 and stats.acceptance_length > 1


def test_a_guide_changes_what_is_generated(tmp_path):
    (tmp_path / "words.txt").write_text("violin\n")
    guide = f"bias:words={tmp_path / 'words.txt'},bonus=30"
    guided = harnesses.with_decoder(Harness)(MODEL, guide=guide)
    [text] = guided.texts(ASKED[2:])
    assert "violin" in text and [text] != Harness(local_path(MODEL)).texts(ASKED[2:])


def test_lm_eval_knows_the_model():
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    how = {"until": ["\n"], "max_gen_toks": 24, "do_sample": False}
    asked = [Instance("generate_until", {}, (text, how), 0) for text in ASKED]
    options = {"device": "cpu", "dtype": "float32", "batch_size": 3}
    plain = HFLM(pretrained=str(local_path(MODEL)), **options)
    drafted = harnesses.LM(MODEL, draft="lookup", **options)
    assert drafted.generate_until(asked) == plain.generate_until(asked)
    assert drafted.decoder.stats.drafted > 0


def test_lmms_eval_finds_the_model():
    registry = pytest.importorskip("lmms_eval.models.registry_v2")
    known = registry.ModelRegistryV2()
    known.register_manifest(harnesses.MANIFEST)
    assert known.get_manifest("mmdecode").chat_class_path.endswith("harnesses.LMM")
    options = {"device": "cpu", "device_map": "cpu", "draft": "lookup"}
    assert harnesses.LMM("zoo:llava-scenes", **options).decoder.draft is not None


def test_what_is_missing_is_named(monkeypatch):
    for name in ("lm_eval.models.huggingface", "lmms_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("LM", "LMM", "MANIFEST"):
        with pytest.raises(MMDecodeError, match="pip install lm-eval"):
            getattr(harnesses, name)
    with pytest.raises(AttributeError):
        _ = harnesses.other
    monkeypatch.setattr(sys, "argv", ["harnesses", "run"])
    with pytest.raises(OptionError, match="lm_eval ARGUMENTS"):
        harnesses.main()


@pytest.mark.slow
def test_the_command_of_lm_eval_knows_the_model():
    pytest.importorskip("lm_eval")
    words = ["lm_eval", "ls", "--help"]
    done = subprocess.run(
        [sys.executable, "-m", "mmdecode.evaluation.harnesses", *words], capture_output=True
    )
    assert done.returncode == 0, done.stderr
