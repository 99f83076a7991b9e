import itertools

import pytest
import torch
from torch.nn import functional as F

from mmdecode.draft.trees import choose_tree, expected_length
from mmdecode.train.drafters.medusa import head_losses, moved


def test_head_losses_are_zero_for_a_model_that_knows_the_sequence_and_not_for_a_shift():
    labels = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    logits = torch.full((3, 1, 8, 10), -30.0)
    for head in range(3):
        for t in range(8 - head):
            logits[head, 0, t, labels[0, t + head]] = 30.0
    assert head_losses(logits, labels).max() < 1e-6
    assert head_losses(logits.roll(1, 2), labels).min() > 1
    masked = labels.clone()
    masked[0, 4:] = -100
    assert head_losses(logits, masked).max() < 1e-6


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_heads_without_a_label_left_get_nan_and_change_nothing(length):
    """Five heads over a sequence that is shorter than they reach, or as long."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 2, length, 10, generator=generator).requires_grad_()
    labels = torch.randint(0, 10, (2, length), generator=generator)
    losses = head_losses(logits, labels)
    assert losses.isnan().tolist() == [head >= length for head in range(5)]
    for head in range(length):
        row = logits[head, :, : length - head].flatten(0, 1)
        wanted = F.cross_entropy(row, labels[:, head:].flatten())
        torch.testing.assert_close(losses[head], wanted)
    losses.nanmean().backward()
    assert logits.grad.isfinite().all() and not logits.grad[length:].any()


def test_labels_may_be_fewer_or_more_than_positions():
    labels = torch.tensor([[3, 1, 4]])
    assert moved(labels, 1, 4).tolist() == [[1, 4, -100, -100]]
    assert moved(labels, 1, 1).tolist() == [[1]]
    assert moved(labels, 5, 2).tolist() == [[-100, -100]]
    logits = torch.randn(3, 1, 5, 10, generator=torch.Generator().manual_seed(0))
    padded = F.pad(labels, (0, 2), value=-100)
    assert head_losses(logits, labels).tolist() == head_losses(logits, padded).tolist()


def test_chosen_tree_is_the_best_of_its_size_on_the_sample():
    generator = torch.Generator().manual_seed(0)
    right = torch.multinomial(torch.tensor([0.5, 0.2, 0.1, 0.2]), 60, True, generator=generator)
    second = torch.multinomial(torch.tensor([0.3, 0.3, 0.1, 0.3]), 60, True, generator=generator)
    hits = torch.stack(
        [torch.stack([r == 0, r == 1, r == 2], 1) for r in (right, second)]
    )  # rank 3 stands for a miss
    every = [(a,) for a in range(3)] + list(itertools.product(range(3), range(3)))
    for size in (1, 2, 3, 4):
        closed = [
            list(c)
            for c in itertools.combinations(every, size)
            if all(path[:-1] in c or len(path) == 1 for path in c)
        ]
        best = max(expected_length(hits, paths) for paths in closed)
        assert expected_length(hits, choose_tree(hits, size)) == best


def test_every_beginning_of_the_order_is_closed_under_prefixes():
    hits = torch.rand(4, 200, 3, generator=torch.Generator().manual_seed(1)) < 0.4
    paths = choose_tree(hits, 20)
    for index, path in enumerate(paths):
        assert len(path) == 1 or path[:-1] in paths[:index]
    assert {len(path) for path in paths} >= {1, 2}
