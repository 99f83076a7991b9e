"""Hydra heads: Medusa's if the weights of tokens are zero; else drafted tokens count."""

import pytest
import torch
from torch import nn

from mmdecode import registry
from mmdecode.draft.hydra import Hydra
from mmdecode.draft.medusa_heads import MedusaHeads
from mmdecode.engine.call import Call, Plan
from mmdecode.engine.contracts import Block, BranchOutput
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import IncompatibleError, InputError, OptionError, UnsupportedModelError
from mmdecode.models.hydra import HydraHeads
from mmdecode.testing import check_draft
from mmdecode.train.drafters import recipes
from mmdecode.train.drafters.recipes import RECIPES, Batch, Options
from tests.draft.test_eagle import decode, inputs_of, model_of
from tests.support.sessions import noting
from tests.support.tiny import VOCAB, WIDTH

CONFIG = {"hidden_size": WIDTH, "vocab_size": VOCAB, "hydra_num_heads": 3}


def random_heads(seed=0, **config):
    """Weights large enough that what is drafted follows the tokens before it."""
    torch.manual_seed(seed)
    heads = HydraHeads({**CONFIG, **config})
    for weight in heads.parameters():
        nn.init.normal_(weight, std=0.4)
    return heads


def alike(blocks):
    """Medusa's heads, and Hydra's with their weights and none for tokens."""
    torch.manual_seed(blocks)
    medusa = MedusaHeads(3, blocks, WIDTH)
    for weight in medusa.parameters():
        nn.init.normal_(weight, std=0.2)
    hydra = HydraHeads({**CONFIG, "hydra_num_layers": blocks})
    with torch.no_grad():
        for head, parts in enumerate(hydra.hydra_mlp):
            for index, part in enumerate(parts):
                part.linear.weight[:, :WIDTH] = medusa.weight[index, head]
                part.linear.bias.copy_(medusa.bias[index, head, 0])
    return medusa, hydra


class Head:
    """Of an adapter, the output matrix alone."""

    def __init__(self):
        self.weight = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(1))

    def head(self, states):
        return states @ self.weight.T

    unembed = head


@pytest.mark.parametrize("blocks", [1, 2])
@torch.no_grad()
def test_heads_that_do_not_look_at_tokens_are_medusas(blocks):
    medusa, hydra = alike(blocks)
    states = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2))
    expected = medusa.logits(states, Head())
    for head in range(3):
        read = torch.cat([states, torch.zeros(4, (1 + head) * WIDTH)], -1)
        torch.testing.assert_close(hydra.logits(head, read, Head()), expected[head])
        read[:, WIDTH:] = torch.randn(4, (1 + head) * WIDTH)  # its weights are zero
        torch.testing.assert_close(hydra.logits(head, read, Head()), expected[head])


def test_untrained_heads_say_what_the_model_says():
    heads = HydraHeads({**CONFIG, "hydra_num_layers": 2})
    states = torch.randn(2, WIDTH)
    read = torch.cat([states, torch.randn(2, 2 * WIDTH)], -1)
    torch.testing.assert_close(heads.logits(1, read, Head()), Head().head(states))


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "coupled"])
@pytest.mark.parametrize(("family", "top_k"), [("llama", 1), ("llama", 3), ("qwen2_5_vl", 2)])
def test_random_heads_change_no_token(family, top_k, do_sample):
    expected, _ = decode(family, do_sample=do_sample)
    draft = Hydra(random_heads(), top_k=top_k, nodes=7)
    found, decoder = decode(family, draft, do_sample=do_sample)
    assert found == expected
    assert decoder.stats.drafted > 0


def test_it_passes_the_public_check():
    check_draft(lambda: table_draft(5))


def table_draft(vocabulary):
    """For a table model, whose states are one number wide and whose tokens have no embeddings."""
    heads = HydraHeads({"hidden_size": 1, "vocab_size": vocabulary, "hydra_num_heads": 2})
    torch.manual_seed(0)
    weights = torch.randn(2, 3, vocabulary, dtype=torch.float64)
    heads.embed = lambda ids, adapter: (ids[..., None] % 3).double()
    heads.logits = lambda head, read, adapter: (read % 7 - 3) @ weights[head][: read.shape[-1]]
    return Hydra(heads, top_k=2, nodes=4)


def test_a_row_drafts_in_a_batch_what_it_drafts_alone():
    inputs = inputs_of("llama")
    draft = lambda: Hydra(random_heads(), top_k=3, nodes=7)  # noqa: E731
    _, batched = decode("llama", draft(), trace=True)
    for row in range(3):
        width = int(inputs["attention_mask"][row].sum())
        own = {name: value[row : row + 1, -width:] for name, value in inputs.items()}
        _, alone = decode("llama", draft(), inputs=own, trace=True)
        assert alone.trace[0] == batched.trace[row]
        assert any(step.drafted for step in alone.trace[0])


@torch.no_grad()
def test_each_node_is_a_child_of_its_own_path():
    """Every node is among what its head says of the state and the tokens above it."""
    heads, seen = random_heads(), []

    def note(session, proposal):
        seen.append((session.state.clone(), session.call.last(1), proposal))

    decode("llama", noting(Hydra(heads, top_k=2, nodes=14), proposed=note))
    adapter = registry.adapter_for(model_of("llama"))
    checked = 0
    for state, root, proposal in seen[:3]:
        for row in range(len(root)):
            paths = {-1: [int(root[row])]}
            for node, parent in enumerate(proposal.parents[row].tolist()):
                above = paths[parent]
                token = int(proposal.tokens[row, node])
                embeds = heads.embed(torch.tensor(above), adapter).flatten()
                read = torch.cat([state[row, 0], embeds])
                top = heads.logits(len(above) - 1, read, adapter).topk(2).indices.tolist()
                assert token in top
                paths[node] = [*above, token]
                checked += len(above) > 1
    assert checked > 10


def test_the_state_that_is_kept_is_that_at_the_end_of_the_path():
    adapter = registry.adapter_for(model_of("llama"))
    call = Call.of(torch.ones(3, 2, dtype=torch.long), plan=Plan(adapter=adapter))
    states = {"last": torch.zeros(3, 1, WIDTH)}
    prefill = BranchOutput(logits=torch.zeros(3, 1, VOCAB), hidden=states)
    session = Hydra(random_heads()).begin(call, prefill)
    hidden = torch.arange(15.0).view(3, 5, 1)  # of root and four nodes
    parents = torch.tensor([[-1, -1, 0, 2]]).expand(3, -1)
    proposal = Proposal(tokens=parents.clamp_min(0), kind="deterministic", parents=parents)
    accepted = torch.tensor([1, 2, 0])
    block = Block(
        path=torch.tensor([[1, -1, -1], [0, 2, -1], [-1, -1, -1]]),
        tokens=torch.zeros(3, 4, dtype=torch.long),
        num_accepted=accepted,
        num_drafted=torch.full((3,), 4),
        count=accepted + 1,
        ended=torch.zeros(3, dtype=torch.bool),
    )
    scores = BranchOutput(logits=hidden, hidden={"last": hidden})
    session.observe(proposal, scores, block)
    assert session.state[:, 0, 0].tolist() == [2, 8, 10]


# Training


@torch.no_grad()
def by_hand(heads, batch, options):
    """The loss, token by token."""
    distribution = batch.logits().log_softmax(-1)
    total, weights = 0.0, 0.0
    for head in range(len(heads)):
        losses = []
        for row, ids in enumerate(batch.ids):
            for t in range(len(ids)):
                last = t + 2 + head  # the token to predict
                if last >= len(ids) or not batch.asked[row, t + 1]:
                    continue
                embeds = heads.embed(ids[t + 1 : last], batch.adapter).flatten()
                read = torch.cat([batch.last[row, t], embeds])
                drafted = heads.logits(head, read, batch.adapter).log_softmax(-1)
                losses.append(-(distribution[row, last - 1].exp() * drafted).sum())
        total += options.decay**head * torch.stack(losses).mean()
        weights += options.decay**head
    return total / weights


def loss_and_by_hand():
    heads, options = random_heads(), Options(kind="hydra", heads=3)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (3, 11), generator=generator)
    batch = Batch(
        rows=None,
        ids=ids,
        last=torch.randn(3, 11, WIDTH, generator=generator),
        words=torch.ones_like(ids).bool(),
        asked=torch.arange(11) >= torch.tensor([[6], [4], [8]]),
        adapter=registry.adapter_for(model_of("llama")),
    )
    with torch.no_grad():
        loss = RECIPES["hydra"].loss(heads, batch, options, generator)
    return loss, by_hand(heads, batch, options)


def test_a_head_is_asked_for_the_token_after_those_it_reads():
    torch.testing.assert_close(*loss_and_by_hand(), atol=1e-4, rtol=1e-4)


def test_a_shift_that_wraps_round_is_found(monkeypatch):
    def rolled(values, shift, length):
        return values.roll(-shift, 1)[:, :length]

    monkeypatch.setattr(recipes, "ahead", rolled)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(*loss_and_by_hand(), atol=1e-4, rtol=1e-4)


# Checkpoints


def test_saved_heads_are_the_same_and_are_made_by_a_string(tmp_path):
    heads = random_heads(hydra_num_layers=2)
    for parameter in heads.parameters():
        parameter.data = parameter.data.half().float()
    heads.save_pretrained(tmp_path)
    draft = registry.create("draft", f"hydra:path={tmp_path},length=2")
    assert (draft.depth, draft.top_k) == (2, 1)
    found, expected = draft.heads.state_dict(), heads.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)


def test_the_published_layout_is_read_with_its_own_outputs(tmp_path):
    heads = random_heads(hydra_own_outputs=True, hydra_num_layers=2)
    assert {"hydra_mlp.2.0.res_connection.bias", "hydra_lm_head.1.weight"} <= {*heads.state_dict()}
    torch.save(heads.state_dict(), tmp_path / "hydra_lm_head.pt")
    (tmp_path / "config.json").write_text('{"hydra_num_heads": 3, "grounded_heads": true}')
    found = Hydra.from_pretrained(tmp_path)
    assert found.depth == 3
    read = torch.randn(2 * WIDTH)
    assert torch.equal(found.heads.logits(0, read, None), heads.logits(0, read, None))


def test_a_published_configuration_need_not_name_the_vocabulary(tmp_path):
    heads = random_heads()
    torch.save(heads.state_dict(), tmp_path / "hydra_lm_head.pt")
    (tmp_path / "config.json").write_text('{"hydra_num_heads": 3}')
    expected = decode("llama", Hydra(heads), trace=True)[1].trace
    assert decode("llama", Hydra.from_pretrained(tmp_path), trace=True)[1].trace == expected


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda weights: {}, InputError),
        (
            lambda weights: {k.replace("0.linear", "linear"): v for k, v in weights.items()},
            InputError,
        ),
        (lambda weights: weights | {"prefix_embeding_layer.norm.weight": torch.ones(1)}, None),
        (lambda weights: {k: v[..., :WIDTH] for k, v in weights.items()}, None),
    ],
    ids=["none", "of_one_matrix", "plus_plus", "ungrounded"],
)
def test_heads_of_another_form_are_refused(change, error, tmp_path):
    weights = change(random_heads().state_dict()) or {"fc.weight": torch.ones(1)}
    torch.save(weights, tmp_path / "hydra_lm_head.pt")
    with pytest.raises(error or UnsupportedModelError, match="Hydra"):
        Hydra.from_pretrained(tmp_path)


def test_what_does_not_fit_is_refused():
    with pytest.raises(IncompatibleError, match="vocabulary of 9"):
        decode("llama", Hydra(random_heads(vocab_size=9)))
    with pytest.raises(IncompatibleError, match="width 16"):
        decode("llama", Hydra(random_heads(hidden_size=16)))
    for options in ({"depth": 4}, {"top_k": 0}, {"nodes": 0}, {"min_expected_gain": -1}):
        with pytest.raises(OptionError):
            Hydra(random_heads(), **options)
