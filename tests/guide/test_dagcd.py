"""DAGCD's image-token form on synthetic attention: which words gain, and how much."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import EosTokenCriteria, StoppingCriteriaList

from mmdecode.engine.call import Call, Plan
from mmdecode.engine.contracts import BranchOutput
from mmdecode.errors import OptionError
from mmdecode.guide.dagcd import DAGCD, Words
from tests.support.vision import decode

V, P = 12, 7
ADAPTER = SimpleNamespace(num_layers=1)
NO_ENDS = torch.tensor([], dtype=torch.long)
# columns 1 to 4 are of the image; two of them stand for one word
IDS = torch.tensor([[0, 3, 5, 5, 8, 0, 0]])
SHARE = torch.tensor([[0.0, 1.0, 0.5, 0.5, 1.0, 0.0, 0.0]])


def words(weights=(1.0, 1.0), share=SHARE):
    return Words(IDS, share, {0: torch.tensor(weights)[:, None]})


def main(logits=None, heads=2, nodes=1, seed=0):
    draw = torch.Generator().manual_seed(seed)
    attention = torch.rand(1, heads, nodes, P, generator=draw).softmax(-1)
    if logits is None:
        logits = torch.randn(1, nodes, V, generator=draw)
    return BranchOutput(logits=logits, attention={0: attention})


def distribution(guide, scores, held=None, ends=NO_ENDS):
    call = Call.of(IDS, eos_token_ids=ends, plan=Plan(adapter=ADAPTER))
    return guide.apply(held or words(), call, None, {"main": scores})


def test_words_gain_by_attention_and_entropy():
    scores = main(nodes=3)
    found = distribution(DAGCD(4.0), scores)
    for node in range(3):
        p = scores.logits[0, node].double().softmax(-1)
        entropy = float(-(p * p.log()).sum()) / math.log(V)
        ratios = []
        for head in scores.attention[0][0, :, node].double():
            mean = {3: head[1], 5: (head[2] + head[3]) / 2, 8: head[4]}  # repeated ids count once
            ratios.append({word: value / sum(mean.values()) for word, value in mean.items()})
        best = set(p.topk(10).indices.tolist())
        usage = {w: sum(r[w] for r in ratios) * (w in best) for w in (3, 5, 8)}
        boosted = p.clone()
        for word, value in usage.items():
            boosted[word] += 4.0 * entropy * value / sum(usage.values())
        assert float(boosted.sum()) == pytest.approx(1 + 4.0 * entropy)
        expected = (boosted / boosted.sum()).log().float()
        torch.testing.assert_close(found[0, node].log_softmax(-1), expected)
        outside = [v for v in range(V) if v not in usage or not usage[v]]
        assert torch.equal(found[0, node, outside], scores.logits[0, node, outside])
        mass = found[0, node].double().exp().sum() / scores.logits[0, node].double().exp().sum()
        assert float(mass) == pytest.approx(1 + 4.0 * entropy, rel=1e-5)


def test_only_the_most_likely_gain():
    logits = torch.arange(V).flip(0).float()[None, None] / 4  # 3 is the fourth, 5 the sixth
    found = distribution(DAGCD(4.0, rank=5), main(logits))
    assert (found != logits).nonzero()[:, 2].tolist() == [3]


def test_without_entropy_without_an_image_or_at_the_end_nothing_changes():
    certain = torch.zeros(1, 1, V)
    certain[..., 3] = 200.0
    assert torch.equal(distribution(DAGCD(), main(certain)), certain)
    scores = main()
    blind = words(share=torch.zeros_like(SHARE))
    assert torch.equal(distribution(DAGCD(), scores, blind), scores.logits)
    best = scores.logits.argmax(-1)[0]
    assert torch.equal(
        distribution(DAGCD(), scores, ends=torch.cat([best + 1, best])), scores.logits
    )
    assert not torch.equal(distribution(DAGCD(), scores, ends=best + 1), scores.logits)


def test_a_model_that_knows_nothing_is_boosted_in_full():
    found = distribution(DAGCD(2.0, rank=V), main(torch.zeros(1, 1, V))).exp()[0, 0]
    assert float(found.sum()) / V == pytest.approx(3.0)  # 1 + alpha


def test_heads_weigh_by_themselves():
    scores = main()
    alone = BranchOutput(logits=scores.logits, attention={0: scores.attention[0][:, 1:]})
    one = distribution(DAGCD(), scores, words([0.0, 2.0]))
    torch.testing.assert_close(one, distribution(DAGCD(), alone, words([1.0])))
    assert torch.equal(distribution(DAGCD(), scores, words([-1.0, 0.0])), scores.logits)
    assert DAGCD(heads={(0, 1): 2.0}).needs(ADAPTER).attention == {0}
    with pytest.raises(OptionError, match="has 1"):
        DAGCD(heads={(4, 0): 1.0}).needs(ADAPTER)


class Kept(DAGCD):
    """Keeps the main branch's logits and the guide's output."""

    def apply(self, constants, call, proposal, outputs):
        found = super().apply(constants, call, proposal, outputs)
        self.main_logits, self.found = outputs["main"].logits, found
        return found


@pytest.mark.parametrize("form", ["option", "criterion"])
def test_the_call_says_what_ends_a_text(form):
    def first(ends):
        guide = Kept(rank=80)
        options = {"eos_token_id": ends, "pad_token_id": 0}
        if form == "criterion":
            options = {"stopping_criteria": StoppingCriteriaList([EosTokenCriteria(ends)])}
        decode(guide, batch=1, max_new_tokens=1, **options)
        return guide

    other = first([2, 3])
    assert not torch.equal(other.found, other.main_logits)
    best = int(other.main_logits.argmax())
    ending = first([2, best])
    assert torch.equal(ending.found, ending.main_logits)


def test_image_tokens_stand_for_what_the_head_reads_in_them():
    states = torch.nn.functional.one_hot(torch.tensor([[4, 3, 5, 5, 8, 1, 1]]), V).float()
    images = torch.tensor([[False, True, True, True, True, False, False]])
    prefill = BranchOutput(
        logits=torch.zeros(1, 1, V),
        images=images,
        prompt_hidden={"last": states},
        attention=dict.fromkeys((0, 1), torch.zeros(1, 2, 1, P)),
    )
    adapter = SimpleNamespace(
        head=lambda hidden: hidden, spans=lambda kind, ids: images, num_layers=2
    )
    call = Call.of(torch.zeros(1, P, dtype=torch.long), plan=Plan(adapter=adapter))
    found = DAGCD(layers=(1.0, 1.0)).begin(call, {"main": prefill})
    assert torch.equal(found.ids, IDS) and torch.equal(found.share, SHARE)
    assert {layer: w.tolist() for layer, w in found.weights.items()} == {1: [[1.0], [1.0]]}
    found = DAGCD(heads={(0, 1): 2.0, (1, 0): -1.0}).begin(call, {"main": prefill})
    assert {layer: w.flatten().tolist() for layer, w in found.weights.items()} == {
        0: [0.0, 2.0],
        1: [-1.0, 0.0],
    }
