"""Weights rounded by torchao, as on CUDA: what may be a target, and what may draft."""

import builtins
import copy

import pytest
import torch

import mmdecode as mm
from mmdecode.errors import MissingExtraError, OptionError, UnsupportedModelError
from mmdecode.quantization import is_quantized, models, weight_only
from mmdecode.runs.conditions import surroundings
from tests.support import tiny
from tests.support.rounded import FORMATS, as_on_cuda, decoded, on


@pytest.fixture(autouse=True)
def by_torchao(monkeypatch):
    as_on_cuda(monkeypatch)


@FORMATS
def test_a_rounded_model_decodes_the_same_with_a_draft(to):
    model = on("cpu", "llama")
    before = model.lm_head.weight.detach().clone()
    assert mm.quantize(model, to) is model
    assert is_quantized(model) and models.format_of(model) == to
    assert surroundings(model)["quantize"] == to
    weight = model.lm_head.weight
    assert type(weight.data) is not torch.Tensor
    error = (weight.dequantize() - before).abs().amax(1)
    step = {"int8": 1 / 250, "fp8": 1 / 15}[to]  # half of it, at a row's largest weight
    assert (error > 0).all() and (error <= before.abs().amax(1) * step).all()
    assert model.get_input_embeddings().weight.dtype == torch.float32, "embeddings stay in float"
    assert model.config._attn_implementation == "sdpa", "attention stays as it is"
    expected, _ = decoded(model, "llama")
    found, decoder = decoded(model, "llama", "recycling:nodes=12")
    assert found == expected and decoder.stats.drafted > 0
    assert mm.quantize(model, to) is model, "rounded already"


def test_the_rounded_copy_drafts_for_the_float_model():
    model = on("cpu", "whisper")
    expected, _ = decoded(model, "whisper")
    found, decoder = decoded(model, "whisper", "quantized:bits=8")
    assert found == expected
    assert decoder.stats.acceptance_length > 2
    assert not is_quantized(model) and type(model.proj_out.weight.data) is torch.Tensor


@FORMATS
def test_an_output_without_weights_stays_0(to):
    layer = torch.nn.Linear(32, 16, bias=False)
    layer.weight.data[5] = 0
    model = torch.nn.Sequential(layer)
    weight_only.round_weights(model, to)
    found = model(torch.randn(4, 32))
    assert found.isfinite().all()
    assert (found[:, 5] == 0).all() and (found != 0).sum() == 4 * 15


def shared_scale(layer, x):
    """A product as of ``quantize_dynamic``: one scale for all activations."""
    step = x.abs().amax() / 127
    return torch.nn.functional.linear((x / step).round() * step, layer.weight, layer.bias)


@pytest.fixture
def dependent(monkeypatch):
    """Rounding after which rows depend on each other."""

    class Shared(torch.nn.Linear):
        forward = shared_scale

    def round_all(module):
        for layer in module.modules():
            if type(layer) is torch.nn.Linear:
                layer.__class__ = Shared

    monkeypatch.setattr(weight_only, "rounding", lambda to: round_all)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_depend_on_each_other_are_refused_as_a_target_and_may_draft(dependent, dtype):
    model = on("cpu", "llama", dtype)
    expected, _ = decoded(model, "llama")
    with pytest.raises(UnsupportedModelError, match=r"a row of .* changes by .*draft='quantized'"):
        mm.quantize(model)
    assert not is_quantized(model)
    assert all(type(m).__name__ != "Shared" for m in model.modules()), "it stays as it is"
    found, decoder = decoded(model, "llama", "quantized")
    assert found == expected and decoder.stats.drafted > 0


def test_a_last_bit_is_no_dependence_and_three_are():
    layer = torch.nn.Linear(64, 32, bias=False)

    class Off(torch.nn.Linear):
        by = 0.0

        def forward(self, x):
            found = super().forward(x)
            return found if x.shape[1] == 1 else found + self.by * found.abs().amax()

    def rounded(by):
        def round_all(module):
            for one in module.modules():
                if type(one) is torch.nn.Linear:
                    one.__class__, one.by = Off, by

        return round_all

    model = torch.nn.Sequential(layer).bfloat16()
    # the largest output of a block is that of its large row
    unit = torch.finfo(torch.bfloat16).eps / weight_only.LARGE
    weight_only.refuse_dependent(model, "int8", rounded(0.2 * unit))
    with pytest.raises(UnsupportedModelError, match=r"may by 0\.016"):
        weight_only.refuse_dependent(model, "int8", rounded(20 * unit))


def test_every_shape_is_tested_once(monkeypatch):
    seen = []
    sound = weight_only.change

    def change(layer, weight):
        seen.append(weight.shape)
        return sound(layer, weight)

    monkeypatch.setattr(weight_only, "change", change)
    model = mm.quantize(on("cpu", "llama"))
    shapes = {layer.weight.shape for layer in model.modules() if type(layer) is torch.nn.Linear}
    assert set(seen) == shapes
    assert len(seen) == 2 * len(shapes), "as rounded and in float"


def test_saving_is_refused_with_what_to_save(tmp_path):
    model = mm.quantize(on("cpu", "llama"))
    with pytest.raises(UnsupportedModelError, match="save the float model, and round it after"):
        model.save_pretrained(tmp_path)
    again, _ = decoded(copy.deepcopy(model), "llama")
    assert again == decoded(model, "llama")[0]


def test_without_torchao_the_error_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def missing(name, *given, **named):
        if name.startswith("torchao"):
            raise ImportError("No module named 'torchao'")
        return real(name, *given, **named)

    monkeypatch.setattr(builtins, "__import__", missing)
    model = on("cpu", "llama")
    with pytest.raises(MissingExtraError, match=r"pip install 'mmdecode\[torchao\]'"):
        mm.quantize(model)
    with pytest.raises(MissingExtraError, match="torchao"):
        decoded(model, "llama", "quantized")


def test_fp8_is_refused_where_there_is_none(monkeypatch):
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(OptionError, match=r"A100 has compute capability 8.0, .* use int8"):
        weight_only.refuse_gpu("fp8", device)
    weight_only.refuse_gpu("int8", device)
    monkeypatch.undo()
    with pytest.raises(OptionError, match=r"on CUDA, and .* is on the CPU; use quantize='int8'"):
        mm.quantize(copy.deepcopy(tiny.model_of("llama")), "fp8")
