"""Float32 products by oneDNN: values and tokens stay, and one choice holds for all rows."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from mmdecode import _compat, registry
from mmdecode.adapters import products
from mmdecode.adapters.products import float_product, onednn
from mmdecode.decoder import Decoder
from mmdecode.draft.lookup import PromptLookup
from tests.support.tiny import NEW, inputs_of, model_of

pytestmark = pytest.mark.skipif(not _compat.has_onednn_linear(), reason="torch has no oneDNN here")
BOTH = pytest.mark.parametrize("faster", [True, False], ids=["onednn", "stock"])


@pytest.fixture
def choose(monkeypatch):
    """A function that has every matrix multiplied by oneDNN, or none."""

    def to(faster):
        monkeypatch.setattr(products, "SMALLEST", 0)
        monkeypatch.setattr(products, "_chosen", {})
        monkeypatch.setattr(products, "gain", lambda *_: 9.0 if faster else 0.5)

    return to


@torch.no_grad()
def test_values_are_those_of_linear(choose):
    choose(True)
    torch.manual_seed(0)
    weight, bias = torch.randn(200, 96), torch.randn(200)
    for rows in (1, 2, 6, 7, 16, 65):
        x = torch.randn(rows, 96)
        for given in (bias, None):
            product = float_product(weight, given)
            assert product.func is onednn
            expected = linear(x, weight, given)
            assert torch.allclose(product(x), expected, atol=1e-4)
            assert torch.allclose(product(x[:, None]), expected[:, None], atol=1e-4)


@BOTH
@pytest.mark.parametrize("family", ["whisper", "moonshine", "moonshine_padded"])
def test_tokens_are_those_of_generate_and_all_rows_have_one_kernel(
    choose, family, faster, monkeypatch
):
    choose(faster)
    rows, original = set(), _compat.onednn_linear
    monkeypatch.setattr(
        _compat,
        "onednn_linear",
        lambda x, *given: rows.add(x.shape[:-1].numel()) or original(x, *given),
    )
    model = copy.deepcopy(model_of(family))
    options = {**inputs_of(family, 1), "max_new_tokens": NEW, "do_sample": False}
    expected = model.generate(**options).tolist()
    for draft in (None, PromptLookup()):
        assert model.generate(**options, custom_generate=Decoder(draft)).tolist() == expected
    assert (1 in rows and len(rows) > 1) == faster
    layer = registry.adapter_for(model).describe(model.get_decoder().layers[0])
    kernels = {one.func for one in (layer.out, layer.cross_q, layer.up)}
    assert kernels == {onednn if faster else linear}
    assert model.generate(**options).tolist() == expected


def test_gradients_and_other_types_are_those_of_linear(choose):
    choose(True)
    layer, x = nn.Linear(96, 64), torch.randn(2, 96, requires_grad=True)
    float_product(layer.weight, layer.bias)(x).sum().backward()
    found, layer.weight.grad, x.grad = (layer.weight.grad, x.grad), None, None
    layer(x).sum().backward()
    assert torch.equal(found[0], layer.weight.grad)
    assert torch.equal(found[1], x.grad)
    for weight in (layer.weight.double(), layer.weight.bfloat16(), layer.weight.t()):
        assert float_product(weight).func is linear


@torch.no_grad()
def test_autocast_decides(choose):
    choose(True)
    weight, x = torch.randn(64, 96), torch.randn(2, 96)
    with torch.autocast("cpu", torch.bfloat16):
        assert float_product(weight)(x).dtype == torch.bfloat16


def test_a_shape_is_measured_once_for_all_threads(monkeypatch):
    measured = []

    def gain(*shape):
        measured.append(shape)
        return [2.0, 0.5][len(measured) % 2]

    monkeypatch.setattr(products, "_chosen", {})
    monkeypatch.setattr(products, "gain", gain)
    monkeypatch.setattr(products, "SMALLEST", 8)
    found = []
    threads = [threading.Thread(target=lambda: found.append(products.chosen(4, 4))) for _ in "abcd"]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert found == [False] * 4
    assert products.chosen(4, 8)
    assert not products.chosen(2, 2), "too small to gain"
    assert measured == [(4, 4), (4, 8)]


def test_measuring_gives_a_ratio():
    assert 0.01 < products.gain(256, 256) < 100
