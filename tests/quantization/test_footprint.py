"""``get_memory_footprint`` of models with int8 weights counts packed matrices."""

import copy
import gc
import pickle
import weakref
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import mmdecode as mm
from mmdecode.quantization import quantize
from mmdecode.quantization.modules import Int8Linear
from mmdecode.quantization.source import Int8Source, Int8States
from tests.support import tiny
from tests.support.rounded import FORMATS, as_on_cuda, on

MAPS = Path("/proc/self/maps")


def expected(model):
    """Bytes of what a rounded model saves, and of buffers; transformers counts a scale, too."""
    saved = {id(t) if t.dtype != torch.int8 else n: t for n, t in model.state_dict().items()}
    own = sum(t.nbytes for t in saved.values())
    persistent = {id(t) for t in model.state_dict(keep_vars=True).values()}
    return own + sum(b.nbytes for b in model.buffers() if id(b) not in persistent)


@pytest.mark.parametrize("family", ["llama", "gemma", "whisper"])
def test_packed_matrices_are_counted(family, tmp_path):
    model = on("cpu", family)
    before = model.get_memory_footprint()
    mm.quantize(model)
    size = model.get_memory_footprint()
    assert size == expected(model)
    assert size < before / 1.5, "tiny models have scales and norms of the same order"
    decoder = model.get_decoder()
    inner = [m for m in decoder.modules() if isinstance(m, Int8Linear)]
    least = sum(m.in_features * m.out_features for m in inner)
    assert least < decoder.get_memory_footprint() < size
    assert model.get_memory_footprint(return_buffers=False) <= size

    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    for one in (again, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert one.get_memory_footprint() == size
        one.get_input_embeddings().weight = torch.nn.Parameter(torch.zeros(0))
        assert one.get_memory_footprint() < size, "it is that of the copy"
    assert model.get_memory_footprint() == size


def test_projections_that_whisper_keeps_are_counted():
    keys, values = (Int8Linear.of(torch.nn.Linear(40, 64)) for _ in range(2))
    before = keys.packed_bytes() + values.packed_bytes()
    assert before == 2 * 64 * (40 + 4)
    source = Int8Source(Int8States.of(torch.randn(1, 30, 40)), keys, values)
    source.attend(type("Layer", (), {"scale": None}), torch.randn(1, 2, 4, 16))
    after = keys.packed_bytes() + values.packed_bytes()
    assert after == before + 2 * 64 * 40 + 4 * (40 + 64), "by groups once more, and their scales"


@FORMATS
def test_weights_of_torchao_are_counted(to, monkeypatch):
    as_on_cuda(monkeypatch)
    model = on("cpu", "llama")
    before = model.get_memory_footprint()
    mm.quantize(model, to)
    linear = [m for m in model.modules() if type(m) is torch.nn.Linear]
    weights = sum(m.weight.numel() for m in linear)
    outputs = sum(m.out_features for m in linear)
    # three bytes of a weight are saved, and each output has a scale, in int8 a zero point, too
    more = {"int8": 5, "fp8": 4}[to]
    assert before - model.get_memory_footprint() == 3 * weights - more * outputs
    assert copy.deepcopy(model).get_memory_footprint() == model.get_memory_footprint()


def test_a_rounded_model_is_freed_with_its_last_name():
    model = quantize(copy.deepcopy(tiny.model_of("llama")))
    assert model.get_memory_footprint() > 0
    kept = weakref.ref(model.lm_head)
    gc.disable()
    try:
        del model
        assert kept() is None
    finally:
        gc.enable()


def test_a_rounded_model_runs_where_gradients_are_counted():
    model = quantize(copy.deepcopy(tiny.model_of("llama")))
    assert not model(torch.ones(1, 300, dtype=torch.long)).logits.requires_grad


@pytest.mark.one_in(2)
@pytest.mark.skipif(not MAPS.exists(), reason="Linux lists the files that are mapped")
@pytest.mark.parametrize("rounded", [False, True])
def test_the_checkpoint_is_not_kept_in_memory(rounded, tmp_path):
    """It would be by a single norm that was loaded from it."""
    model = copy.deepcopy(tiny.model_of("llama"))
    (quantize(model) if rounded else model).save_pretrained(tmp_path)
    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    quantize(found)
    gc.collect()
    assert str(tmp_path) not in MAPS.read_text()
    assert isinstance(found.lm_head, Int8Linear)
