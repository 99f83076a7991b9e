"""EAGLE's drafters against what the reference's own code computed on the same weights."""

import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.draft.eagle import Eagle
from mmdecode.draft.growing import grow
from mmdecode.engine.cache import RaggedCache
from mmdecode.engine.contracts import AcceptanceRule
from mmdecode.engine.masks import block_mask, chain
from mmdecode.engine.proposal import Proposal
from mmdecode.models.feature_drafter import Rows
from mmdecode.train.drafters.recipes import Targets, distribution_losses, eagle_losses, unrolled
from tests.support.sessions import noting
from tests.support.traced import Traced

DATA = Path(__file__).parents[1] / "data" / "golden" / "eagle"
EXPECTED = load_file(DATA / "expected.safetensors")
TREES = load_file(DATA / "tree_from_logits.safetensors")
CASES = json.loads((DATA / "tree_cases.json").read_text())
RUNS = json.loads((DATA / "expected_generation.json").read_text())
CLOSE = {"atol": 1e-4, "rtol": 0.0}
LAYOUTS = ("eagle1", "eagle1_qkv_bias", "eagle3", "eagle3_full_vocab")
layouts = pytest.mark.parametrize("layout", LAYOUTS)


@functools.cache
def target():
    return LlamaForCausalLM.from_pretrained(DATA / "target").eval()


def drafter_of(layout):
    return Eagle.from_pretrained(DATA / layout).drafter


def features_of(layout):
    name = "target.eagle3_features" if "3" in layout else "target.last_hidden_state"
    return EXPECTED[name]


def run(drafter, ids, features, cache=None, offset=0):
    """States of rows whose features are a target's, ``(1, Q, H)``, through a cache."""
    adapter = registry.adapter_for(target())
    cache = cache or RaggedCache(drafter.cache_layers, 1, ids.device)
    width, zero = ids.shape[1], torch.zeros(1, dtype=torch.long)
    cache.open(offset + width, offset)
    rows = Rows(
        embeds=drafter.embed(ids, adapter),
        features=drafter.fuse(features),
        positions=offset + torch.arange(width)[None],
    )
    block = chain(width, ids.device)
    mask = block_mask(zero + offset, zero, *block, offset + width, torch.float32)
    with torch.no_grad():
        states = drafter(rows, mask, cache)
        return rows, states, drafter.logits(states, adapter), cache


@layouts
def test_states_keys_and_logits_of_a_prompt_match(layout):
    drafter = drafter_of(layout)
    ids = torch.cat([EXPECTED["input_ids"][:1, 1:], EXPECTED["target.next_token"]], 1)
    rows, states, logits, cache = run(drafter, ids, features_of(layout))
    found = {
        "hidden": states,
        "draft_logits": logits,
        "key": cache.layers[0].keys[:, :, : ids.shape[1]],
        "value": cache.layers[0].values[:, :, : ids.shape[1]],
        "fc_output": rows.features,
    }
    if "3" not in layout:
        del found["fc_output"]  # there is nothing to fuse
    for name, value in found.items():
        torch.testing.assert_close(value, EXPECTED[f"{layout}.prefill.{name}"], **CLOSE)


def leaves(proposal):
    """Paths from the root to the leaves, as the reference counts nodes: the root is 0."""
    parents = proposal.structure()[0][0].tolist()
    paths = {-1: (0,)}
    for node, parent in enumerate(parents):
        paths[node] = (*paths[parent], node + 1)
    inner = set(parents)
    return sorted(path for node, path in paths.items() if node not in inner)


def assert_tree(proposal, prefix, expected=EXPECTED, root=None):
    tokens = expected[f"{prefix}.draft_tokens"][0].tolist()
    if root is not None:
        assert tokens[0] == root
    assert proposal.tokens[0].tolist() == tokens[1:]
    theirs = expected[f"{prefix}.retrieve_indices"].tolist()
    assert leaves(proposal) == sorted(tuple(i for i in path if i >= 0) for path in theirs)
    _, depths, ancestors = proposal.structure()
    assert torch.equal(ancestors[0], expected[f"{prefix}.tree_mask"][0, 0] > 0)
    assert [0, *depths[0].tolist()] == expected[f"{prefix}.tree_position_ids"].tolist()


def recording(draft):
    """The drafter, and a list of what it proposes, after which ids and from which keys."""
    seen = []

    def note(session, proposal):
        keys, call = session.cache.layers[0].keys.clone(), session.call
        seen.append((call.rows.ids[0, : int(call.end()[0])].tolist(), proposal, keys))

    return noting(draft, proposed=note), seen


def generated(layout, total, depth, top_k, prompt, new=60):
    draft, seen = recording(
        Eagle(drafter_of(layout), depth=depth + 1, top_k=top_k, nodes=total - 1)
    )
    decoder = Traced(draft)
    ids = EXPECTED["input_ids"][prompt][None]
    out = target().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        custom_generate=decoder,
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=2,
        pad_token_id=0,
    )
    return out[0].tolist(), decoder.trace[0], seen


@pytest.mark.parametrize("order", ["greedy", "sampling"])
@pytest.mark.parametrize("shape", [(12, 3, 4), (26, 4, 5)], ids=str)
@layouts
def test_trees_after_a_prompt_match(layout, shape, order):
    prefix = f"{layout}.tree_{'_'.join(map(str, shape))}.{order}"
    *_, seen = generated(layout, *shape, 0, new=9)
    assert_tree(seen[0][1], prefix, root=int(EXPECTED["target.next_token"]))


@layouts
def test_the_tree_and_the_keys_of_a_second_round_match(layout):
    name = f"{layout}.second_cycle"
    committed = EXPECTED[f"{name}.committed"][0].tolist()
    drafter = drafter_of(layout)
    keys = EXPECTED[f"{name}.stable_key"]
    # the committed ids are not what the target says: read them as one prompt
    draft, seen = recording(Eagle(drafter, depth=5, top_k=5, nodes=25))
    ids = torch.tensor([committed[:-1]])
    decoder = Decoder(draft, accept=Forced(committed[-1]))
    target().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        custom_generate=decoder,
        max_new_tokens=9,
        do_sample=False,
    )
    before, proposal, found = seen[0]
    assert before == committed
    assert_tree(proposal, name, root=committed[-1])
    torch.testing.assert_close(found[:, :, : keys.shape[2]], keys, **CLOSE)


class Forced(AcceptanceRule):
    """A greedy rule whose first token is given."""

    guarantee, kinds, modes = "exact", ("deterministic",), frozenset({"greedy"})

    def __init__(self, token):
        self.token = token

    def __call__(self, proposal, target, call):
        outcome = registry.create("accept", "greedy")(proposal, target, call)
        if int(call.rows.rounds[0]):
            return outcome
        return type(outcome)(
            path=outcome.path,
            num_accepted=outcome.num_accepted,
            next_token=torch.full_like(outcome.next_token, self.token),
        )


@pytest.mark.parametrize("order", ["greedy", "sampling"])
@pytest.mark.parametrize("index", range(len(CASES)))
def test_trees_grown_from_given_logits_match(index, order):
    case, prefix = CASES[index], f"case{index}"
    asked = []

    def step(level, tokens, above):
        asked.append(tokens)
        assert torch.equal(tokens, TREES[f"{prefix}.drafter_input_ids.level{level}"])
        return TREES[f"{prefix}.logits.level{level}"][None]

    root = TREES[f"{prefix}.logits.root"][None]
    grown = grow(root, step, case["depth"] + 1, case["top_k"]).best(case["total_token"] - 1)
    proposal = Proposal(tokens=grown.tokens, kind="deterministic", parents=grown.parents)
    assert_tree(proposal, f"{prefix}.{order}", TREES)
    assert len(asked) == case["depth"]


RUN_CASES = [(layout, number) for layout in RUNS for number in (0, len(RUNS[layout]) - 1)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("layout", "number"), RUN_CASES)
def test_generation_and_accepted_lengths_match(layout, number):
    case = RUNS[layout][number]
    shape = (case["total_token"], case["depth"], case["top_k"], case["prompt"])
    found, trace, _ = generated(layout, *shape)
    shorter = min(len(found), len(case["output_ids"]))
    assert found[:shorter] == case["output_ids"][:shorter]
    lengths = [len(r.accepted) for r in trace[1:]]
    # the last rounds end at another limit
    common = min(len(lengths), len(case["accept_lengths"])) - 1
    assert lengths[:common] == case["accept_lengths"][:common]
    assert common > 3


@pytest.mark.parametrize("layout", ["eagle1", "eagle1_qkv_bias"])
def test_losses_of_eagle_match(layout):
    drafter, adapter = drafter_of(layout), registry.adapter_for(target())
    features, wanted = EXPECTED["loss.input_features"], EXPECTED["loss.target_features"]
    after = F.pad(EXPECTED["loss.input_ids"][:, 1:], (0, 1))
    rows = rows_of(drafter.embed(after, adapter), features)
    with torch.no_grad():
        [states] = unrolled(drafter, rows, 1)
        torch.testing.assert_close(states, EXPECTED[f"{layout}.loss.prediction"], **CLOSE)
        asked = EXPECTED["loss.loss_mask"] > 0
        targets = Targets(features=wanted, logits=adapter.head(wanted), asked=asked)
        v, p = eagle_losses(states, drafter.logits(states, adapter), targets)
    found = torch.stack([v, p, v + 0.1 * p])
    expected = EXPECTED[f"{layout}.loss.vloss_ploss_total"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0.0)


def rows_of(embeds, features):
    positions = torch.arange(embeds.shape[1]).expand(embeds.shape[:2])
    return Rows(embeds=embeds, features=features, positions=positions)


def test_losses_of_eagle3_match_in_every_pass():
    drafter, adapter = drafter_of("eagle3"), registry.adapter_for(target())
    ids, mask = EXPECTED["loss.input_ids"], EXPECTED["loss.loss_mask"] > 0
    with torch.no_grad():
        found = target()(ids, output_hidden_states=True)
        levels = [found.hidden_states[level] for level in drafter.levels(7)]
        # after the end the reference reads token 0
        embeds = drafter.embed(F.pad(ids[:, 1:], (0, 1)), adapter)
        rows = rows_of(embeds, drafter.fuse(torch.cat(levels, -1)))
        losses = []
        for index, states in enumerate(unrolled(drafter, rows, 7)):
            ahead = index + 1
            targets = Targets(
                features=states,
                logits=F.pad(found.logits[:, ahead:], (0, 0, 0, ahead)),
                asked=F.pad(mask[:, index:], (0, index)),
            )
            logits = drafter.logits(states, adapter)
            losses.append(distribution_losses(logits, targets, drafter.target_ids())[0].mean())
    expected = EXPECTED["eagle3.loss.per_step"]
    torch.testing.assert_close(torch.stack(losses), expected, rtol=1e-4, atol=0.0)
    total = sum(0.8**index * loss for index, loss in enumerate(losses))
    torch.testing.assert_close(
        total[None], EXPECTED["eagle3.loss.weighted_total_0.8"], rtol=1e-4, atol=0.0
    )
