"""Keyed noise: a pure function of its key, uniform, and independent across every part of it."""

import pytest
import torch

from mmdecode.engine import host
from mmdecode.engine import noise as noise_module
from mmdecode.engine.noise import Noise, Role, request_key
from tests.support import seams

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


def dense(noise, scores, positions, role, trial=None):
    """Sums of scores and exact draws of all tokens, float64."""
    state = noise._state(positions, role, trial).expand(scores.shape[:-1])
    tokens = torch.arange(scores.shape[-1])
    return scores + noise_module._exact(
        noise_module._upper_bits(state, tokens), state[..., None], tokens
    )


@pytest.mark.parametrize("vocab", [1, 7, 3000, 152_000])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_a_sample_is_the_largest_of_all_exact_sums(vocab, spread):
    noise = Noise.of(11, range(2))
    scores = torch.randn(2, 9, vocab, generator=torch.Generator().manual_seed(1)) * spread
    scores[0, 0, 1:] = -torch.inf
    scores[0, 1, : vocab // 2] = -torch.inf
    positions = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 4]).expand(2, -1)
    found = noise.sample(scores, positions, Role.TARGET)
    assert torch.equal(found, dense(noise, scores, positions, Role.TARGET).argmax(-1))


def test_the_largest_sum_is_found_where_bounds_say_nothing(monkeypatch):
    positions = torch.zeros(1, 1, dtype=torch.long)
    scores = torch.randn(1, 1, 500, generator=torch.Generator().manual_seed(2)) * 3
    right = noise_module._upper_bits
    for value in (0, 0x7FFFFFFF):  # the ends, at which the upper bits alone are wrong by most

        def upper(state, tokens, value=value):
            bits = right(state, tokens)
            return torch.where(tokens % 5 == 0, value, bits).to(torch.int32)

        monkeypatch.setattr(noise_module, "_upper_bits", upper)
        found = NOISE.sample(scores.expand(50, 1, -1), POSITIONS[:, :1], Role.TARGET)
        exact = dense(NOISE, scores.expand(50, 1, -1), POSITIONS[:, :1], Role.TARGET)
        assert torch.equal(found, exact.argmax(-1))
        assert bool((found % 5 == 0).any()) == (value == 0)
        only = scores.masked_fill(torch.arange(500) % 5 != 0, -torch.inf).expand(50, 1, -1)
        found = NOISE.sample(only, positions.expand(50, 1), Role.TARGET)
        assert torch.equal(found, dense(NOISE, only, positions, Role.TARGET).argmax(-1))


@pytest.mark.parametrize("mistake", ["no slack", "a float for all bits", "too low is left out"])
def test_a_mistake_in_the_bounds_is_seen(mistake, monkeypatch):
    if mistake == "no slack":
        monkeypatch.setattr(noise_module, "_SLACK", -1e-6)
    elif mistake == "a float for all bits":
        monkeypatch.setattr(noise_module, "_exact", lambda upper, *_: _rounded(upper))
    else:
        right = noise_module._Bounds.__init__

        def without(self, *args):
            right(self, *args)
            self.too_low = []

        monkeypatch.setattr(noise_module._Bounds, "__init__", without)
    with pytest.raises(AssertionError):
        for vocab in (3000, 152_000):
            test_a_sample_is_the_largest_of_all_exact_sums(vocab, 1.0)
        test_ties_of_upper_bits_are_decided_by_the_lower_ones()
        test_the_largest_sum_is_found_where_bounds_say_nothing(monkeypatch)


def _rounded(upper):
    return noise_module._gumbel(upper).double()


def test_ties_of_upper_bits_are_decided_by_the_lower_ones():
    state = torch.full((1,), 5)
    upper = torch.zeros(40, dtype=torch.int32) + 77
    draws = noise_module._exact(upper, state, torch.arange(40))
    assert len(draws.unique()) == 40


@pytest.mark.slow
def test_a_sample_follows_the_distribution_at_a_large_vocabulary():
    vocab, rows = 20_000, 4000
    scores = torch.zeros(vocab)
    scores[7] = torch.tensor(vocab / 3.0).log()
    noise = Noise.of(3, range(rows))
    chosen = noise.sample(
        scores.expand(rows, 1, -1), torch.zeros(rows, 1, dtype=torch.long), Role.TARGET
    )[:, 0]
    share = float((chosen == 7).float().mean())
    assert abs(share - (1 / 3) / (4 / 3)) < 0.03
    others = chosen[chosen != 7].double() / vocab
    assert abs(float(others.mean()) - 0.5) < 0.03


def test_upper_bits_are_uniform_and_differ_from_token_to_token():
    states = NOISE._state(POSITIONS, Role.TARGET, None)[:4]
    bits = noise_module._upper_bits(states, torch.arange(20_000))
    assert bits.min() >= 0
    for shift in (0, 8, 16, 24):
        counts = torch.bincount(((bits >> shift) & 127).flatten().long(), minlength=128).double()
        mean = counts.mean()
        assert 80 < float(((counts - mean) ** 2 / mean).sum()) < 185  # 127 degrees of freedom
    unit = bits.double() / 2**31
    for other in (unit.roll(1, -1), unit.roll(1, 0), unit.roll(1, 1), unit.roll(64, -1)):
        both = torch.stack([unit.flatten(), other.flatten()])
        assert abs(float(torch.corrcoef(both)[0, 1])) < 0.005


@pytest.mark.parametrize("reads", [True, False], ids=["host", "device"])
def test_rows_of_one_position_share_its_draws(reads, monkeypatch):
    monkeypatch.setattr(host, "may_read", lambda device: reads)
    scores = torch.randn(len(POSITIONS), 5, 40, generator=torch.Generator().manual_seed(3))
    depths = torch.tensor([[0, 1, 1, 2, 2]])
    begin = POSITIONS[:, :1]
    apart = NOISE.sample(scores, begin + depths, Role.TARGET)
    shared = NOISE.sample(scores, begin + torch.arange(3), Role.TARGET, index=depths)
    assert torch.equal(shared, apart)
    assert not torch.equal(apart, NOISE.sample(scores, begin + depths * 0, Role.TARGET))


@pytest.mark.parametrize("reads", [True, False], ids=["host", "device"])
def test_rows_without_a_finite_score_are_sampled_alike(reads, monkeypatch):
    monkeypatch.setattr(host, "may_read", lambda device: reads)
    scores = torch.zeros(1, 3, 9)
    scores[0, 0] = -torch.inf
    scores[0, 1, 4] = torch.nan
    found = Noise.of(7, [1]).sample(scores, torch.tensor([[0, 1, 2]]), Role.TARGET)[0]
    assert found[:2].tolist() == [0, 4]


def in_chunks(monkeypatch, scores, sums, index=None, change=None):
    """Samples without reading values, so many sums at a time."""
    monkeypatch.setattr(host, "may_read", lambda device: False)
    monkeypatch.setattr(noise_module, "_SUMS", sums)
    if change is not None:
        monkeypatch.setattr(noise_module, "_chunked", seams.edited(noise_module._chunked, *change))
    keyed = Noise.of(3, range(len(scores)))
    positions = torch.arange(scores.shape[1] if index is None else 2).expand(len(scores), -1)
    return keyed.sample(scores, positions, Role.TARGET, index=index)


def hard_scores():
    """Rows of random scores, of -inf but for a few, of -inf alone, and with a NaN."""
    scores = torch.randn(3, 5, 1000, generator=torch.Generator().manual_seed(0)) * 3
    scores[0, 1, 7:] = -torch.inf
    scores[1, 2] = -torch.inf
    scores[2, 3, 411] = torch.nan
    return scores


@pytest.mark.parametrize("most", [15, 15 * 64, 15 * 999, 1 << 22])
@pytest.mark.parametrize("shared", [False, True])
def test_samples_are_the_same_in_chunks_of_the_vocabulary(most, shared, monkeypatch):
    index = torch.tensor([[0, 1, 1, 0, 1]]) if shared else None
    whole = in_chunks(monkeypatch, hard_scores(), 1 << 40, index)
    if not shared:
        sums = dense(Noise.of(3, range(3)), hard_scores(), POSITIONS[:3, :5], Role.TARGET)
        assert torch.equal(whole, sums.argmax(-1))
    assert torch.equal(in_chunks(monkeypatch, hard_scores(), most, index), whole)


@pytest.mark.parametrize(
    "change",
    [
        ("token + begin, chosen", "token, chosen"),
        ("value > best", "value >= best"),
        (" | (value.isnan() & ~best.isnan())", ""),
        ("begin + step, vocab), device", "begin + step, vocab - 1), device"),
    ],
)
def test_a_mistake_in_the_chunks_is_seen(change, monkeypatch):
    whole = in_chunks(monkeypatch, hard_scores(), 1 << 40)
    try:
        found = in_chunks(monkeypatch, hard_scores(), 15 * 64, change=change)
    except RuntimeError:
        return
    assert not torch.equal(found, whole)
