import itertools

import torch

from mmdecode.draft.trees import choose_tree, expected_length
from mmdecode.train.medusa import head_losses


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
