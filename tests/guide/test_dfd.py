"""Dynamic Focus Decoding on synthetic layers: the temperature of each node."""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.engine.contracts import BranchOutput
from mmdecode.errors import OptionError
from mmdecode.guide.dfd import DFD
from mmdecode.testing.table import call_of
from tests.support import tiny

CALL = call_of([[0]], SimpleNamespace(num_layers=4))


def made(distance=1.0, seed=0):
    """Early layers that are ``distance`` away from the last."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 3, 6, generator=draw) * 2
    steps = {i: torch.randn(2, 3, 6, generator=draw) for i in (1, 2, 3)}
    return BranchOutput(
        logits=logits, early_exit_logits={i: logits + distance * step for i, step in steps.items()}
    )


def temperature(scores, row, node, rho=0.1, sigma=4.0, start=1.1):
    """By the formula."""
    distribution = scores.logits[row, node].double().softmax(-1)
    kept = distribution > rho * distribution.max()
    distribution = distribution[kept] / distribution[kept].sum()
    total = 0.0
    for exit in scores.early_exit_logits.values():
        early = exit[row, node].double().softmax(-1)[kept]
        total += float((distribution * (distribution / (early / early.sum())).log()).sum())
    return start * 0.5 ** (total / len(scores.early_exit_logits) / sigma)


def test_each_node_has_the_temperature_of_the_formula():
    scores = made()
    found = DFD(sigma=0.5).apply(None, CALL, None, {"main": scores})
    expected = [[temperature(scores, b, u, sigma=0.5) for u in range(3)] for b in range(2)]
    ratio = (scores.logits / found)[..., 0]
    torch.testing.assert_close(ratio, torch.tensor(expected), atol=1e-4, rtol=1e-4)
    total = DFD(sigma=0.5).totals(None, CALL, None, {"main": scores})
    torch.testing.assert_close(total, 1 / torch.tensor(expected), atol=1e-4, rtol=1e-4)


def test_layers_that_agree_and_an_infinite_sigma_leave_the_first_temperature():
    for scores, guide in ((made(0.0), DFD(sigma=0.25)), (made(), DFD(sigma=math.inf))):
        found = guide.temperatures(CALL, scores)
        torch.testing.assert_close(found, torch.full_like(found, 1.1))


def test_the_temperature_falls_with_the_divergence_and_stays_finite():
    falling = [DFD(rho=0).temperatures(CALL, made(d)) for d in (0.0, 0.5, 1.0, 2.0)]
    assert all((a > b).all() for a, b in pairwise(falling))
    far = made(1e4)
    found = DFD(rho=0, sigma=0.01).apply(None, CALL, None, {"main": far})
    assert found.isfinite().all()
    assert torch.equal(found.argmax(-1), far.logits.argmax(-1))


def test_greedy_decoding_takes_the_same_tokens():
    expected = tiny.plain("llama")
    with pytest.warns(UserWarning, match="DFD is inert in greedy"):
        found = tiny.ours(Decoder(guide=DFD(sigma=0.1)), "llama")
    assert found.tolist() == expected.tolist()


def test_options():
    assert registry.create("guide", "dfd:sigma=inf,temperature=1").neutral
    assert not DFD().neutral
    for options in ({"rho": 1}, {"sigma": 0}, {"temperature": 0}):
        with pytest.raises(OptionError):
            DFD(**options)
