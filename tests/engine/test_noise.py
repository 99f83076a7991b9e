"""Keyed noise: a pure function of its key, uniform, and independent across every part of it."""

import pytest
import torch

from mmdecode.engine.noise import Noise, Role, request_key

NOISE = Noise.of(7, range(50))
POSITIONS = torch.arange(40).expand(50, -1)


def test_a_draw_does_not_depend_on_the_shape_it_is_made_in():
    whole = NOISE.gumbel(POSITIONS, Role.TARGET, 9)
    for row in (0, 17, 49):
        alone = Noise.of(7, [row])
        for position in (0, 13, 39):
            draw = alone.gumbel(torch.tensor([[position]]), Role.TARGET, 9)[0, 0]
            torch.testing.assert_close(draw, whole[row, position], rtol=1e-6, atol=1e-6)
    assert torch.equal(
        NOISE.uniform(POSITIONS, Role.ACCEPT)[3], Noise.of(7, [3]).uniform(POSITIONS[:1], 2)[0]
    )


def test_uniform_draws_are_uniform_and_stay_inside():
    draws = NOISE.uniform(torch.arange(2000).expand(50, -1), Role.ACCEPT).flatten()
    assert float(draws.min()) > 0 and float(draws.max()) < 1
    counts = torch.histc(draws.float(), 100, 0, 1)
    statistic = float(((counts - 1000) ** 2 / 1000).sum())
    assert 50 < statistic < 160  # 99 degrees of freedom


def test_gumbel_draws_have_their_moments():
    draws = NOISE.gumbel(POSITIONS, Role.TARGET, 50).double().flatten()
    assert float(draws.mean()) == pytest.approx(0.5772, abs=0.015)
    assert float(draws.var()) == pytest.approx(1.6449, abs=0.05)


@pytest.mark.parametrize(
    "other",
    [
        lambda: Noise.of(8, range(50)).uniform(POSITIONS, Role.ACCEPT),
        lambda: Noise.of(7, range(50, 100)).uniform(POSITIONS, Role.ACCEPT),
        lambda: NOISE.uniform(POSITIONS + 1, Role.ACCEPT),
        lambda: NOISE.uniform(POSITIONS, Role.RESIDUAL),
        lambda: NOISE.uniform(POSITIONS, Role.ACCEPT, trial=torch.zeros(50, dtype=torch.long)),
    ],
    ids=["seed", "request", "position", "role", "trial"],
)
def test_every_part_of_the_key_matters(other):
    here = NOISE.uniform(POSITIONS, Role.ACCEPT).flatten()
    there = other().flatten()
    correlation = torch.corrcoef(torch.stack([here, there]))[0, 1]
    assert abs(float(correlation)) < 0.1 and not torch.equal(here, there)


def test_trials_differ_from_each_other():
    trials = [NOISE.uniform(POSITIONS, Role.WINDOW, trial=torch.full((50,), t)) for t in (0, 1, -1)]
    assert not torch.equal(trials[0], trials[1]) and not torch.equal(trials[0], trials[2])


def test_request_keys_keep_their_parts_apart():
    keys = {request_key("ab", "c"), request_key("a", "bc"), request_key("abc"), request_key()}
    assert len(keys) == 4 and request_key("x", 1) == request_key("x", 1) >= 0
