"""Models that other libraries quantised run, with a warning where rows depend on each other."""

import copy
import warnings

import pytest
import torch

import mmdecode
from mmdecode.decoder import Decoder
from mmdecode.engine import capture
from mmdecode.errors import IncompatibleError, UnsupportedModelError
from mmdecode.quantization import foreign, quantize
from tests.support import tiny


def dynamic(model):
    """One scale for all activations of a product."""
    from torch.ao.quantization import quantize_dynamic

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def weights_alone(model):
    """Each weight is turned into a float before a product."""
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    return model


def decoded(model, family, draft=None):
    return mmdecode.generate(
        model, decoder=Decoder(draft), max_new_tokens=8, **tiny.inputs_of(family, 2)
    )


@pytest.mark.parametrize("family", ["llama", "whisper"])
def test_scales_of_all_rows_are_warned_of_once(family):
    model = dynamic(copy.deepcopy(tiny.model_of(family)))
    with pytest.warns(UserWarning, match=r"changes by .*% with the rows next to it") as caught:
        decoded(model, family)
        decoded(model, family, "lookup")
    assert sum("rows next to it" in str(one.message) for one in caught) == 1
    assert not any("lean" in str(one.message) for one in caught)


@pytest.mark.parametrize("family", ["llama", "whisper"])
def test_weights_that_are_made_float_are_not(family):
    model = weights_alone(copy.deepcopy(tiny.model_of(family)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = decoded(model, family)
        assert torch.equal(decoded(model, family, "layer_skip:exit_layer=1"), expected)


def test_what_is_rounded_already_is_refused():
    for change in (dynamic, weights_alone):
        model = change(copy.deepcopy(tiny.model_of("llama")))
        with pytest.raises(UnsupportedModelError, match="another library quantised"):
            quantize(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(IncompatibleError, match="another library quantised"):
                decoded(model, "llama", "quantized")


def test_our_own_layers_and_float_ones_are_not_foreign():
    model = copy.deepcopy(tiny.model_of("llama"))
    assert not list(foreign.foreign_layers(model))
    assert not list(foreign.foreign_layers(quantize(model)))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "whisper"])
def test_wrong_compiled_products_of_another_library_are_not_used(family, monkeypatch):
    def wrong(graph, inputs):
        def run(*given):
            found = graph(*given)
            return [100 * one if one.is_floating_point() else one for one in found]

        return run

    monkeypatch.setattr(capture, "BACKEND", wrong)
    model = weights_alone(copy.deepcopy(tiny.model_of(family)))
    expected = decoded(model, family)
    inputs = tiny.inputs_of(family, 2)
    with pytest.warns(UserWarning, match="run as usual: compiled, its states differ by 99 "):
        found = mmdecode.generate(model, decoder=Decoder(compile=True), max_new_tokens=8, **inputs)
    assert torch.equal(found, expected)


@pytest.mark.slow
def test_compiled_torchao_with_rounded_activations_gives_its_usual_tokens():
    torchao = pytest.importorskip("torchao.quantization")
    model = copy.deepcopy(tiny.model_of("whisper"))
    torchao.quantize_(model, torchao.Int8DynamicActivationInt8WeightConfig())
    expected = decoded(model, "whisper")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = mmdecode.generate(
            model,
            decoder=Decoder(compile=True),
            max_new_tokens=8,
            **tiny.inputs_of("whisper", 1),
        )
    assert torch.equal(found, expected[:1])
