"""Devices and dtypes by name, and what ``auto`` chooses."""

import json
import warnings

import pytest
import torch
from transformers import LlamaConfig

from mmdecode.checkpoints import device_of, dtype_of
from mmdecode.errors import OptionError
from mmdecode.quantization import products
from mmdecode.train.distributed import precision_of
from tests.support.commands import invoke


@pytest.fixture
def cuda(monkeypatch):
    """A machine that has one card, as far as torch is asked; with bfloat16 or without."""

    def has(bf16=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: bf16)

    return has


@pytest.fixture
def checkpoint(tmp_path):
    def of(dtype):
        LlamaConfig(dtype=dtype, num_hidden_layers=1).save_pretrained(tmp_path)
        return str(tmp_path)

    return of


def test_dtypes_have_short_names_and_those_of_torch():
    for short, name in (("fp32", "float32"), ("fp16", "float16"), ("bf16", "bfloat16")):
        assert dtype_of(short) == dtype_of(name) == dtype_of(getattr(torch, name))
    assert dtype_of(None) == torch.float32
    for wrong in ("fp8", "int8", "float", "half", ""):
        with pytest.raises(OptionError, match="expected auto, fp32, fp16, bf16 or torch's"):
            dtype_of(wrong)
    with pytest.raises(OptionError, match="expected float32"):
        dtype_of(torch.int8)


@pytest.mark.parametrize("measured", [0.5, 1.5])
def test_a_processor_slower_in_16_bits_is_warned_of(measured, monkeypatch):
    monkeypatch.setattr(products, "gain", lambda to: measured)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert dtype_of("bf16", device="cpu") == torch.bfloat16
        dtype_of("fp32", device="cpu")
    warned = ["bfloat16 in 2.0 times the time" in str(one.message) for one in found]
    assert warned == [True] * (measured < 1)


@pytest.mark.parametrize(
    ("stored", "bf16", "chosen"),
    [
        ("float16", True, torch.float16),
        ("bfloat16", True, torch.bfloat16),
        ("bfloat16", False, torch.float16),
        ("float32", True, torch.bfloat16),
        ("float32", False, torch.float16),
        (None, True, torch.bfloat16),
    ],
)
def test_auto_on_cuda_is_half_precision(cuda, checkpoint, stored, bf16, chosen):
    cuda(bf16)
    folder = checkpoint(stored)
    assert dtype_of("auto", folder, "cuda") == dtype_of("auto", folder) == chosen
    assert dtype_of("auto", folder, "cpu") == torch.float32


def test_auto_is_float32_for_shipped_models_and_on_a_cpu(cuda, checkpoint):
    assert dtype_of("auto", checkpoint("float16")) == torch.float32
    cuda()
    assert dtype_of("auto", "zoo:whisper-synth", "cuda") == torch.float32
    assert precision_of("auto", "zoo:llava-scenes", "cuda") == "fp32"
    assert precision_of("auto", checkpoint("float16"), "cuda") == "fp16"


def test_a_device_is_one_that_is_there(cuda):
    assert device_of(None) == device_of("auto") == device_of("cpu") == torch.device("cpu")
    for wrong, message in (("gpu", "is not known; expected auto"), ("cuda:3", "has 0 of type")):
        with pytest.raises(OptionError, match=message):
            device_of(wrong)
    cuda()
    assert device_of("auto") == torch.device("cuda") and device_of("cuda:0").index == 0
    with pytest.raises(OptionError, match="has 1 of type cuda"):
        device_of("cuda:1")


def test_the_chosen_device_is_printed_first_and_stands_in_the_settings(tmp_path, cuda):
    words = ["evaluate", "nbest", "--data", "cv", "--limit", "6", "--methods", "1best"]
    words += ["--resamples", "20", "--out", str(tmp_path / "run")]
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    settings = json.loads((tmp_path / "run" / "run.json").read_text())["settings"]
    assert settings["dtype"] == "float32"
    assert invoke(*words, "--resume", "--dtype", "fp32").exit_code == 0
    changed = invoke(*words, "--resume", "--dtype", "bf16")
    assert "dtype was 'float32', is 'bfloat16'" in str(changed.exception)
    outcome = invoke("ask", "--model", "zoo:llava-scenes", "--dtype", "bf16")
    assert outcome.stderr.splitlines()[0] == "model zoo:llava-scenes on cpu, bfloat16"
    cuda()
    outcome = invoke("ask")
    assert outcome.stderr.splitlines()[0] == "model zoo:llava-scenes on cuda, float32"
