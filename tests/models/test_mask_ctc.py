"""Mask-CTC: the schedule of filling, and the aligned cross-entropy against all alignments."""

import itertools
import math

import pytest
import torch
from torch.nn import functional as F

from mmdecode.errors import InputError, OptionError
from mmdecode.models.mask_ctc import MaskedDecoder, aligned_cross_entropy, confidences, filled

MASK = 9


def brute_force(log_probs, targets, blank, penalty):
    """The cheapest path through the grid of predictions and targets, by trying all."""
    m, n = log_probs.shape[0], len(targets)
    best = math.inf
    for moves in itertools.product("abs", repeat=m + n):  # aligned, blank, skipped
        j = i = 0
        cost = 0.0
        for move in moves:
            if (i, j) == (n, m):
                break
            if move == "a" and i < n and j < m:
                cost -= float(log_probs[j, targets[i]])
                i, j = i + 1, j + 1
            elif move == "b" and j < m:
                cost -= float(log_probs[j, blank])
                j += 1
            elif move == "s" and i < n:
                cost -= penalty * float(log_probs[max(j - 1, 0), targets[i]])
                i += 1
            else:
                break
        if (i, j) == (n, m):
            best = min(best, cost)
    return best


def distributions(m, vocab, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, vocab, generator=generator, dtype=torch.double).log_softmax(-1)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("m", "n"), [(3, 3), (4, 2), (2, 3), (1, 2)])
def test_the_aligned_cross_entropy_is_that_of_the_cheapest_alignment(m, n, seed):
    log_probs = distributions(m, 4, seed)
    targets = torch.randint(1, 4, (n,), generator=torch.Generator().manual_seed(seed))
    for penalty in (1.0, 2.5):
        found = aligned_cross_entropy(log_probs, targets, 0, penalty)
        assert float(found) == pytest.approx(brute_force(log_probs, targets, 0, penalty), abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_limits_of_the_aligned_cross_entropy(seed):
    log_probs, n = distributions(6, 5, seed), 6
    targets = torch.randint(1, 5, (n,), generator=torch.Generator().manual_seed(seed))
    plain = F.nll_loss(log_probs, targets, reduction="sum")
    assert float(aligned_cross_entropy(log_probs, targets, 0)) <= float(plain) + 1e-9
    never = log_probs.clone()
    never[:, 0] = -1e6
    assert float(aligned_cross_entropy(never, targets, 0, 1e6)) == pytest.approx(float(plain))


def test_a_text_that_is_shifted_costs_one_skip():
    n, high = 8, 0.9
    low = (1 - high) / (n + 1)
    probs = torch.full((n, n + 2), low, dtype=torch.double)
    targets = torch.arange(1, n + 1)
    probs[0, 0] = high
    for j in range(1, n):
        probs[j, targets[j - 1]] = high
    found = aligned_cross_entropy(probs.log(), targets, 0, 1.0)
    assert float(found) == pytest.approx(-n * math.log(high) - math.log(low), abs=1e-9)
    assert float(F.nll_loss(probs.log(), targets, reduction="sum")) > 2 * float(found)


def test_gradients_flow_along_the_alignment():
    high = torch.full((4, 4), -9.0, dtype=torch.double)
    on_the_path = [(0, 0), (1, 1), (2, 0), (3, 2)]  # blank, 1, blank, 2
    for j, token in on_the_path:
        high[j, token] = 0.0
    log_probs = high.log_softmax(-1).requires_grad_()
    aligned_cross_entropy(log_probs, torch.tensor([1, 2]), 0).backward()
    expected = torch.zeros_like(high)
    for j, token in on_the_path:
        expected[j, token] = -1.0
    assert torch.equal(log_probs.grad, expected)


def test_no_predictions_are_refused():
    with pytest.raises(InputError, match="no predictions"):
        aligned_cross_entropy(torch.zeros(0, 4), torch.tensor([1]), 0)


def test_confidences_are_the_largest_of_each_run():
    probs = torch.tensor(
        [[0.8, 0.1, 0.1], [0.2, 0.7, 0.1], [0.05, 0.9, 0.05], [0.6, 0.2, 0.2], [0.1, 0.5, 0.4],
         [0.1, 0.3, 0.6]]
    )  # fmt: skip
    labels, chances = confidences(probs.log())
    assert labels == [1, 1, 2]
    assert chances == pytest.approx([0.9, 0.5, 0.6])


class Guess:
    """Predicts the position, surer of later ones; keeps what it was shown."""

    def __init__(self, vocab=10):
        self.vocab, self.shown = vocab, []

    def __call__(self, text):
        self.shown.append(text.tolist())
        order = torch.arange(len(text), dtype=torch.float)
        found = torch.full((len(text), self.vocab), -10.0)
        found[torch.arange(len(text)), torch.arange(len(text))] = order
        found[:, MASK] = 100.0  # the mask itself is never filled in
        return found


def test_nothing_is_masked_at_threshold_zero():
    guess = Guess()
    assert filled([5, 6, 7], [0.1, 0.2, 0.3], guess, mask=MASK, threshold=0.0) == [5, 6, 7]
    assert guess.shown == []


def test_confident_tokens_stay_and_the_most_confident_masks_are_filled_first():
    guess = Guess()
    chances = [0.1, 0.999, 0.2, 0.3, 0.999, 0.4]
    found = filled([8] * 6, chances, guess, mask=MASK, passes=2)
    assert found == [0, 8, 2, 3, 8, 5]
    assert guess.shown == [[MASK, 8, MASK, MASK, 8, MASK], [MASK, 8, MASK, 3, 8, 5]]


@pytest.mark.parametrize(("passes", "expected"), [(1, 1), (3, 3), (10, 4)])
def test_the_number_of_passes(passes, expected):
    guess = Guess()
    found = filled([8] * 5, [0.1, 0.1, 0.999, 0.1, 0.1], guess, mask=MASK, passes=passes)
    assert MASK not in found
    with pytest.raises(OptionError, match="passes=0; expected 1 or more"):
        filled([8], [0.1], guess, mask=MASK, passes=0)
    assert len(guess.shown) == expected
    assert all(MASK in text for text in guess.shown)


def test_padding_changes_no_logits():
    torch.manual_seed(0)
    decoder = MaskedDecoder(vocab=10, width=16, layers=2, heads=2).eval()
    texts = [torch.tensor([1, 2, 9]), torch.tensor([3, 9])]
    states = [torch.randn(5, 16), torch.randn(3, 16)]
    both = decoder(texts, states)
    for row in range(2):
        alone = decoder(texts[row : row + 1], states[row : row + 1])[0]
        assert torch.allclose(both[row, : len(alone)], alone, atol=1e-5)
    with pytest.raises(InputError, match="a text of 161 tokens; expected at most 160"):
        decoder([torch.zeros(161, dtype=torch.long)], states[:1])
