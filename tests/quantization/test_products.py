"""Products with int8 matrices: a row's result is its own, to the bit."""

import copy
import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import linear

from mmdecode.quantization import kernels, models, products, quantize
from mmdecode.quantization.attention import attend_by_rows
from mmdecode.quantization.modules import Int8Linear
from mmdecode.quantization.products import Matrix, gain, rounded, steps
from mmdecode.quantization.source import Int8Source, Int8States
from tests.support import tiny

WIDE, DEEP = 96, 160


def matrix(seed=0):
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(WIDE, DEEP, generator=dice)


def inputs(rows=64, seed=1):
    """With a huge row, a row of zeros, a constant one, one value alone, and a tiny row."""
    x = torch.randn(rows, DEEP, generator=torch.Generator().manual_seed(seed))
    x[3] *= 1e6
    x[5], x[6], x[7] = 0, 2.5, 0
    x[7, 11], x[8] = -3, x[8] * 1e-12
    return x


def alone(product, x):
    return torch.cat([product(row[None]) for row in x])


def assert_by_rows(product, x):
    expected = alone(product, x)
    for count in range(1, len(x) + 1):
        for begin in range(0, len(x) - count + 1, max(count, 7)):
            rows = slice(begin, begin + count)
            assert torch.equal(product(x[rows]), expected[rows]), (count, begin)
    assert torch.equal(product(x.view(2, -1, DEEP)).view(-1, WIDE), expected)


def test_rows_of_a_block_equal_rows_alone():
    assert_by_rows(Matrix.of(matrix()), inputs())


def test_one_scale_for_all_rows_would_not_do():
    made = Matrix.of(matrix())

    def together(x):
        largest = x.abs().amax().clamp_min(1e-30)
        return kernels.product(x / largest, made.packed, made.steps, True) * largest

    x = inputs()
    assert not torch.equal(together(x), alone(together, x))


def test_the_error_is_that_of_two_roundings():
    x, weight = inputs(), matrix()
    bias = torch.randn(WIDE)
    found, expected = Matrix.of(weight)(x, bias), linear(x, weight, bias)
    steps = (weight.abs().amax(1) / 254)[None], x.abs().amax(1, keepdim=True) / 254
    bound = steps[0] * x.abs().sum(1, keepdim=True) + steps[1] * weight.abs().sum(1)[None]
    assert ((found - expected).abs() <= bound * 1.02 + 1e-6).all()
    assert torch.equal(found[5], bias)


def test_the_form_without_fbgemm_computes_the_same(monkeypatch):
    assert steps() == 255, "this processor's products of 8 bits are exact"
    x, weight = inputs(), matrix()
    expected = Matrix.of(weight)(x)
    monkeypatch.setattr(products, "steps", lambda: 0)
    monkeypatch.setattr(kernels.Scripted, "enabled", False)
    plain = Matrix.of(weight)
    assert isinstance(plain.packed, kernels.Integers)
    assert torch.allclose(plain(x), expected, rtol=1e-5)
    assert_by_rows(plain, x)


def test_matrices_for_many_rows_compute_the_same():
    x, weight = inputs(600), matrix()
    few, many = Matrix.of(weight), Matrix.of(weight, many=True)
    bias = torch.randn(WIDE)
    found = many(x, bias)
    # a value between two steps may be rounded to either
    assert torch.allclose(found, few(x, bias), rtol=1e-2, atol=1e-5 + float(x.abs().max()) / 1e4)
    assert torch.equal(found, torch.cat([many(row[None], bias) for row in x])), "chunks of rows"
    assert_by_rows(many, x[:64])
    assert torch.equal(many.ints()[0], few.ints()[0])


def test_matrices_are_pickled():
    x = inputs()
    for many in (False, True):
        made = Matrix.of(matrix(), many)
        assert torch.equal(pickle.loads(pickle.dumps(made))(x), made(x))


def test_the_gain_over_float_is_measured_once():
    first, measured = gain("int8"), gain.cache_info().misses
    assert first > 0 and gain("int8") == first
    assert gain.cache_info().misses == measured


@pytest.mark.parametrize("measured", [0.5, 1.5])
def test_a_processor_slower_than_in_float_is_warned_of(measured, monkeypatch):
    monkeypatch.setattr(models, "gain", lambda to: measured)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        quantize(copy.deepcopy(tiny.model_of("llama")))
    assert ["2.0 times the time" in str(one.message) for one in found] == [True] * (measured < 1)


def test_seven_bits_where_sums_of_two_products_saturate(monkeypatch):
    x, weight = inputs(), matrix()
    exact = Matrix.of(weight)(x)
    monkeypatch.setattr(products, "steps", lambda: 127)
    coarse = Matrix.of(weight)
    assert_by_rows(coarse, x)
    errors = [(y - x @ weight.T)[9:].abs().mean() for y in (exact, coarse(x))]
    assert 1 < errors[1] / errors[0] < 3


def test_unsigned_inputs_have_twice_the_steps():
    weight = matrix()
    x = torch.rand(9, DEEP, generator=torch.Generator().manual_seed(4))
    made = Matrix.of(weight)
    expected = x @ weight.T

    def product(x, signed=False):
        return kernels.product(x, made.packed, made.steps, signed)

    fine, coarse = ((product(x, signed) - expected).abs().mean() for signed in (False, True))
    assert fine < coarse * 0.9
    assert_by_rows(product, torch.rand(32, DEEP))


def test_integers_survive_packing():
    ints, scale = rounded(matrix())
    made = Matrix(ints, scale)
    assert not isinstance(made.packed, kernels.Integers)
    assert torch.equal(made.ints()[0], ints) and torch.equal(made.ints()[1], scale)
    assert ints.abs().amax() == 127


def test_one_input_serves_several_matrices():
    x, bias = inputs(), torch.randn(WIDE)
    one, other = Matrix.of(matrix()), Matrix.of(matrix(9))
    found = kernels.run_linears(x, [one.packed, other.packed], [bias, None], one.steps)
    assert torch.equal(found[0], one(x, bias)) and torch.equal(found[1], other(x))


@pytest.mark.skipif(not steps(), reason="no packed products")
@torch.no_grad()
def test_torchscript_computes_what_python_does(monkeypatch):
    x, bias, made = inputs(), torch.randn(WIDE), Matrix.of(matrix())
    states = Int8States.of(torch.randn(2, 300, 48))
    keys, values = (Int8Linear.of(torch.nn.Linear(48, 96)) for _ in range(2))
    source, layer = Int8Source(states, keys, values), SimpleNamespace(scale=None)
    queries = torch.randn(2, 5, 6, 16)
    query, key, value = (torch.randn(2, 4, n, 16) for n in (5, 30, 30))
    mask = torch.ones(5, 30, dtype=torch.bool).tril(25).expand(2, 1, 5, 30).clone()
    mask[0, 0, 4, 26:28] = False  # a node of a tree

    def all_of(x, queries, query, mask):
        found = made(x, bias), source.attend(layer, queries)
        return *found, attend_by_rows(query, key, value, mask)

    given = (x, queries, query, mask), (x[:1], queries[:, :1], query[:, :, :1], mask[:, :, :1])
    scripted = [all_of(*given[turn % 2]) for turn in range(6)]  # some runs optimise
    assert kernels.run_linear.compiled is not None
    monkeypatch.setattr(kernels.Scripted, "enabled", False)
    for turn, found in enumerate(scripted):
        assert all(map(torch.equal, found, all_of(*given[turn % 2])))


@torch.no_grad()
def test_without_torchscript_python_runs(monkeypatch):
    def script(function):
        raise RuntimeError("gone")

    one, x, made = kernels.Scripted(kernels.linear), inputs(), Matrix.of(matrix())
    monkeypatch.setattr(torch.jit, "script", script)
    with pytest.warns(UserWarning, match="TorchScript is not at hand, int8 is slower: gone"):
        found = one(x, made.packed, None, made.steps)
    assert torch.equal(found, made(x)) and one.compiled is kernels.linear


def test_torchs_engine_is_as_before():
    before = torch.backends.quantized.engine
    Matrix.of(matrix())
    assert torch.backends.quantized.engine == before
