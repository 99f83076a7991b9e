"""Top-p and typical sampling keep what their sorted forms keep."""

import pytest
import torch
from transformers.generation import logits_process as lp

from mmdecode.engine import nucleus


def sorted_top_p(processor, scores):
    """The form of transformers, with sums in float64 of the same probabilities."""
    order = scores.argsort(stable=True)
    sums = scores.softmax(-1).gather(-1, order).double().cumsum(-1)
    removed = sums <= 1 - processor.top_p
    removed[..., -processor.min_tokens_to_keep :] = False
    return scores.masked_fill(torch.zeros_like(removed).scatter(-1, order, removed), -torch.inf)


def sorted_typical(processor, scores):
    logs = scores.log_softmax(-1)
    entropy = -(logs * logs.exp()).nansum(-1, keepdim=True)
    distance = (-logs - entropy).abs()
    order = distance.argsort(stable=True)
    sums = logs.exp().gather(-1, order).double().cumsum(-1)
    last = (sums < processor.mass).sum(-1, keepdim=True).clamp(max=scores.shape[-1] - 1)
    ranked = distance.gather(-1, order)
    removed = ranked > ranked.gather(-1, last)
    removed[..., : processor.min_tokens_to_keep] = False
    return scores.masked_fill(torch.zeros_like(removed).scatter(-1, order, removed), -torch.inf)


FORMS = {
    "top_p": (nucleus.top_p, sorted_top_p, lp.TopPLogitsWarper),
    "typical": (nucleus.typical, sorted_typical, lp.TypicalLogitsWarper),
}


def rows(vocab, seed):
    """Flat, usual, peaked, tied, cut and one-token rows of scores."""
    dice = torch.Generator().manual_seed(seed)
    normal = torch.randn(6, vocab, generator=dice)
    scores = normal * torch.tensor([0.0, 0.5, 3.0, 20.0, 2.0, 1.0])[:, None]
    scores[4] = scores[4].round()  # ties everywhere
    scores[5, torch.randperm(vocab, generator=dice)[: vocab - 20]] = -torch.inf
    return torch.cat([scores, scores[:1].where(torch.arange(vocab) == 3, -torch.inf)])


def left(scores):
    """Which tokens are left; NaN, a mistake, is none."""
    return scores > -torch.inf


@pytest.mark.one_in(2)
@pytest.mark.parametrize("vocab", [1, 40, 5000, 60_000])
@pytest.mark.parametrize("share", [0.001, 0.3, 0.8, 0.95, 0.999])
@pytest.mark.parametrize("least", [1, 5])
@pytest.mark.parametrize("name", FORMS)
def test_what_is_kept_is_what_the_sorted_form_keeps(name, share, vocab, least):
    ours, reference, stock = FORMS[name]
    if least > vocab:
        return
    processor = stock(share, min_tokens_to_keep=least)
    for seed in range(2):
        scores = rows(vocab, seed)
        found, expected = ours(processor, scores), reference(processor, scores)
        assert torch.equal(found, expected), (left(found) != left(expected)).sum(-1)
    assert 0 < int(left(found).sum()) <= found.numel()


@pytest.mark.parametrize("name", FORMS)
def test_the_warper_of_transformers_differs_at_most_by_rounding_at_the_edge(name):
    ours, _, stock = FORMS[name]
    for share in (0.3, 0.8, 0.95):
        scores = rows(20_000, 3)[1:4]
        processor = stock(share)
        different = left(ours(processor, scores)) != left(processor(None, scores))
        mass = (scores.softmax(-1) * different).sum(-1)
        assert float(mass.max()) < 1e-5


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("at - 1", "at"),
        ("stable=True", "stable=True, descending=True"),
        ("limit).sum()), len(order)", "limit).sum()) + 1, len(order)"),
    ],
)
def test_a_mistake_at_the_edge_is_seen(old, new, monkeypatch):
    from tests.support.seams import edited

    monkeypatch.setattr(nucleus, "_edge", edited(nucleus._edge, old, new))
    with pytest.raises(AssertionError):
        for share in (0.3, 0.8, 0.95):
            test_what_is_kept_is_what_the_sorted_form_keeps("top_p", share, 60_000, 1)
