"""The sampling pipeline, against transformers' warpers and by hand."""

import itertools

import pytest
import torch
from transformers.generation import logits_process as lp

from mmdecode.errors import OptionError
from mmdecode.image_ar.sampling import WARPERS, Sampling, guided

LOGITS = torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(0)) * 2


@pytest.mark.parametrize("order", [*itertools.permutations(WARPERS)])
def test_each_order_is_that_of_transformers_warpers_in_that_order(order):
    made = {
        "temperature": lp.TemperatureLogitsWarper(0.7),
        "top_k": lp.TopKLogitsWarper(6),
        "top_p": lp.TopPLogitsWarper(0.8),
    }
    expected = LOGITS.flatten(0, 1)
    for name in order:
        expected = made[name](None, expected)
    found = Sampling(0.7, 6, 0.8, order).warp(LOGITS)
    torch.testing.assert_close(found.flatten(0, 1), expected)


def test_the_order_matters():
    temperature_first = Sampling(2.0, 0, 0.6).warp(LOGITS) > -torch.inf
    last = Sampling(2.0, 0, 0.6, ("top_k", "top_p", "temperature")).warp(LOGITS) > -torch.inf
    assert temperature_first.sum() > last.sum()


def test_neutral_settings_hand_back_the_logits_themselves():
    assert Sampling().warp(LOGITS) is LOGITS
    assert guided(LOGITS, LOGITS * 0, 1) is LOGITS
    assert torch.equal(guided(LOGITS, LOGITS + 1, 0), LOGITS + 1)


def test_ties_of_the_last_token_stay_and_the_token_that_reaches_the_mass_is_in():
    tied = torch.tensor([[3.0, 1.0, 1.0, 0.0]])
    assert (Sampling(top_k=2).warp(tied) > -torch.inf).tolist() == [[True, True, True, False]]
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for mass, kept in ((0.4, 1), (0.6, 2), (0.79, 2), (0.9, 3), (0.97, 4)):
        assert int((Sampling(top_p=mass).warp(logits) > -torch.inf).sum()) == kept
    assert torch.equal(Sampling(top_k=9).warp(tied), tied)


def test_guidance_is_u_plus_s_times_the_difference():
    conditional, unconditional = torch.tensor([2.0, 1.0]), torch.tensor([1.0, 1.5])
    assert guided(conditional, unconditional, 3.0).tolist() == [4.0, 0.0]
    scale = torch.tensor([[1.0], [0.0]])
    both = guided(conditional.expand(2, -1), unconditional.expand(2, -1), scale)
    assert both.tolist() == [[2.0, 1.0], [1.0, 1.5]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0}, "temperature must be above 0, got 0"),
        ({"temperature": float("nan")}, "temperature must be above 0"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"top_p": 1.2}, "top_p must be above 0 and at most 1"),
        ({"order": ("top_k", "top_p")}, "order must name each of temperature, top_k, top_p once"),
    ],
)
def test_settings_out_of_range_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        Sampling(**options)
