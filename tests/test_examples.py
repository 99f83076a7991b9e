"""Every script in ``examples/`` runs offline, without arguments, and says what it promises."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
PACKAGE = ROOT / "examples" / "third_party_drafter"


def run(script):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=250
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_an_example_runs(script):
    done = run(script)
    assert done.returncode == 0, done.stderr
    if script.stem == "cfg_with_drafts":
        assert [line.split(": ")[1] for line in done.stdout.splitlines()] == ["False", "True"]


# A package by others


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder into which the example package was installed, as pip does it."""
    pytest.importorskip("pip")
    pytest.importorskip("hatchling")
    target = tmp_path_factory.mktemp("site")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", target, PACKAGE],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return target


def run_with(installed, *command):
    path = os.pathsep.join([str(ROOT), str(installed)])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=installed,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_methods_lists_the_drafter_of_another_package(installed):
    shown = run_with(installed, "-m", "mmdecode.cli.app", "methods", "draft", "--json")
    (entry,) = [e for e in json.loads(shown)["draft"] if e["name"] == "bigram"]
    assert entry["plugin"] == "bigram-draft"
    assert entry["guarantee"] == "as the rule"
    assert "when it was last seen" in entry["summary"]


USE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from mmdecode import Decoder

set_seed(0)
sizes = {"vocab_size": 80, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
config = LlamaConfig(**sizes, num_attention_heads=4, initializer_range=0.3, eos_token_id=None)
model, prompt = LlamaForCausalLM(config).eval(), torch.tensor([[5, 9, 5, 9], [7, 3, 3, 7]])
options = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0}
decoder = Decoder(draft="bigram:length=3")
found = model.generate(prompt, **options, custom_generate=decoder)
print(torch.equal(found, model.generate(prompt, **options)), decoder.stats.accepted > 0)
"""


@pytest.mark.slow
def test_the_drafter_of_another_package_is_used_by_its_name(installed):
    assert run_with(installed, "-c", USE).split() == ["True", "True"]


@pytest.mark.slow
def test_the_package_passes_its_own_test(installed):
    test = PACKAGE / "test_bigram_draft.py"
    shown = run_with(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", test)
    assert " passed" in shown and "failed" not in shown
