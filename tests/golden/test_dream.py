"""DREAM's drafter against what the reference's own code computed on the same weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from mmdecode.draft.dream import Dream
from mmdecode.engine.cache import RaggedCache
from mmdecode.engine.masks import block_mask, chain
from mmdecode.models.dream import early_layers, entropies, least_entropy, most_received
from mmdecode.models.feature_drafter import Rows
from mmdecode.train.drafters.losses import divergence, smooth_distance
from tests.golden.given import Given, begin, commit
from tests.golden.test_eagle import assert_tree

DATA = Path(__file__).parents[1] / "data" / "golden" / "dream"
INPUTS = load_file(DATA / "inputs.safetensors")
EXPECTED = load_file(DATA / "expected.safetensors")
TARGET = load_file(DATA / "target_embedding_and_head.safetensors")
TABLE, HEAD = TARGET["embed_tokens.weight"], TARGET["lm_head.weight"]
CLOSE = {"atol": 1e-4, "rtol": 0.0}
EXACT = {"atol": 0.0, "rtol": 0.0}


def draft_of(depth=5):
    return Dream.from_pretrained(DATA / "drafter", depth=depth, top_k=1, nodes=depth)


def rows_of():
    """Rows of the prompt and the token after it; the first has no state."""
    embeds = TABLE[INPUTS["prompt_ids"]]
    embeds[INPUTS["image_mask"]] = INPUTS["image_embeds"]
    return Rows(
        embeds=torch.cat([embeds, TABLE[INPUTS["next_token"]]], 1),
        features=F.pad(INPUTS["target_hidden"], (0, 0, 1, 0)),
        positions=torch.arange(15)[None],
    )


def run(drafter, rows, cache=None, first=0):
    """States after each block and the norm, through a cache."""
    width, zero = rows.embeds.shape[1], torch.zeros(1, dtype=torch.long)
    cache = cache or RaggedCache(drafter.cache_layers, 1, zero.device)
    cache.open(first + width, first)
    mask = block_mask(zero + first, zero, *chain(width, zero.device), first + width, torch.float32)
    return drafter.stages(rows, mask, cache), cache


def part(rows, span):
    return replace(
        rows,
        embeds=rows.embeds[:, span],
        features=rows.features[:, span],
        positions=rows.positions[:, span],
    )


@torch.no_grad()
def test_states_keys_and_logits_of_a_prompt_match():
    stages, cache = run(draft_of().drafter, rows_of())
    names = ("hidden_states.1", "hidden_states.2", None, "output")
    for name, states in zip(names, stages, strict=True):
        if name:
            torch.testing.assert_close(states, EXPECTED[f"prefill.{name}"], **CLOSE)
    torch.testing.assert_close(stages[-1] @ HEAD.T, EXPECTED["prefill.logits"], **CLOSE)
    for block, layer in enumerate(cache.layers):
        rows = slice(block % 2, stages[0].shape[1])  # the first row has no feature
        for kind, found in (("key", layer.keys), ("value", layer.values)):
            expected = EXPECTED[f"prefill.cache.{block}.{kind}"]
            torch.testing.assert_close(found[:, :, rows], expected, **CLOSE)


@torch.no_grad()
def test_closed_gates_let_everything_pass():
    drafter = draft_of().drafter
    for gate in (drafter.layers[1].cross_attn_attn_gate, drafter.layers[1].cross_attn_mlp_gate):
        gate.zero_()
    stages, _ = run(drafter, rows_of())
    assert torch.equal(stages[0], stages[1])
    torch.testing.assert_close(stages[-1], EXPECTED["gates_closed.output"], **CLOSE)


@torch.no_grad()
def test_rows_through_a_cache_match():
    drafter, rows = draft_of().drafter, rows_of()
    first, cache = run(drafter, part(rows, slice(0, 8)))
    second, _ = run(drafter, part(rows, slice(8, None)), cache, 8)
    torch.testing.assert_close(first[-1], EXPECTED["incremental.first_part"], **CLOSE)
    torch.testing.assert_close(second[-1], EXPECTED["incremental.second_part"], **CLOSE)


@torch.no_grad()
def test_a_first_row_of_zeros_makes_rows_depend_on_earlier_ones_alone():
    """Unlike the published form, in which the last feature reaches all rows."""
    published, rows = draft_of().drafter, rows_of()
    config = published.config | {"first_row": "zero"}
    ours = type(published).from_weights(config, published.state_dict(), "")
    for drafter, first in ((published, 0), (ours, 14)):
        changed = rows.features.clone()
        changed[:, 14] += 1
        before, _ = run(drafter, rows)
        after, _ = run(drafter, replace(rows, features=changed))
        moved = (after[-1] - before[-1]).abs().amax(-1)[0] > 1e-6
        assert moved.nonzero().flatten().tolist() == list(range(first, 15))
    first, cache = run(ours, part(rows, slice(0, 8)))
    second, _ = run(ours, part(rows, slice(8, None)), cache, 8)
    whole, _ = run(ours, rows)
    torch.testing.assert_close(torch.cat([first[-1], second[-1]], 1), whole[-1])


@torch.no_grad()
def test_a_chain_matches():
    draft, rows = draft_of(), rows_of()
    session = begin(draft, Given(HEAD, INPUTS["image_mask"], TABLE), *prompt())
    commit(session, INPUTS["next_token"], INPUTS["target_hidden"][:, -1:], 0)
    # the reference reads the whole prompt in one pass, which its first row tells from two
    cache = RaggedCache(3, 1, session.call.device)
    stages, cache = run(draft.drafter, rows, cache)
    cache.set_start(session.cache.start)
    session.cache, session.state = cache, stages[-1][:, -1:]
    found = session.propose(40)
    chained = type(found)(tokens=found.tokens, kind=found.kind, parents=torch.arange(-1, 4)[None])
    assert_tree(chained, "chain_6_4_1.greedy", EXPECTED)


def prompt():
    rows = rows_of()
    return INPUTS["prompt_ids"], INPUTS["target_hidden"], rows.embeds[:, :-1]


@pytest.mark.parametrize("gate", [0.7, 0.0])
@torch.no_grad()
def test_a_draft_reads_a_prompt_and_its_rounds_as_one_pass_would(gate):
    draft = draft_of()
    config = draft.drafter.config | {"first_row": "zero"}
    drafter = type(draft.drafter).from_weights(config, draft.drafter.state_dict(), "")
    drafter.layers[1].cross_attn_attn_gate.fill_(gate)
    draft = Dream(drafter, depth=3, top_k=1)
    session = begin(draft, Given(HEAD, INPUTS["image_mask"], TABLE), *prompt())
    commit(session, INPUTS["next_token"], INPUTS["target_hidden"][:, -1:], 0)
    commit(session, INPUTS["more_ids"], INPUTS["more_hidden"], 2)
    rows = rows_of()
    rows = Rows(
        embeds=torch.cat([rows.embeds, TABLE[INPUTS["more_ids"]]], 1),
        features=torch.cat([rows.features, INPUTS["more_hidden"]], 1),
        positions=torch.arange(18)[None],
    )
    stages, cache = run(drafter, rows)
    torch.testing.assert_close(session.state, stages[-1][:, -1:])
    for found, expected in zip(session.cache.layers, cache.layers, strict=True):
        torch.testing.assert_close(found.keys[:, :, :18], expected.keys[:, :, :18])


def test_the_losses_match():
    given = load_file(DATA / "losses.safetensors")
    made, wanted = given["predict"] @ HEAD.T, given["target"] @ HEAD.T
    last = smooth_distance(given["predict"], given["target"])
    inner = smooth_distance(given["mid_predict"], given["mid_target"])
    surprise = divergence(made, wanted)
    asked = given["loss_mask"]
    # the reference divides two of them by all positions, and the third by the vocabulary too
    last, inner = ((loss * asked).sum() / (asked.numel() + 1e-5) for loss in (last, inner))
    surprise = (surprise * asked).sum() / made.shape[-1] / (asked.sum() + 1e-5)
    found = torch.stack([last, surprise, inner, 0.2 * last + surprise + inner])
    torch.testing.assert_close(found, given["feature_kl_mid_total"], rtol=1e-4, atol=1e-7)


def test_the_surest_layer_is_chosen_by_token():
    given = load_file(DATA / "entropy_selection.safetensors")
    layers = early_layers(12)
    assert list(layers) == [1, 2] and list(early_layers(32)) == list(range(1, 11))
    weights = given["attention"][layers.start : layers.stop]
    uncertain = torch.stack([entropies(each) for each in weights])
    own = given["entropy_float32_own_recompute"][layers.start : layers.stop]
    torch.testing.assert_close(uncertain, own, atol=1e-5, rtol=0.0)
    states = given["hidden_states"][layers.start : layers.stop]
    found = least_entropy(states, uncertain)
    expected = given["hidden_states"].gather(
        0, given["selected_hidden_state_index"][None, ..., None].expand(-1, -1, -1, 48)
    )[0]
    assert torch.equal(found, expected)
    torch.testing.assert_close(
        found.bfloat16().float(), given["selected_features_bf16_as_float32"], **EXACT
    )


def test_entropy_is_that_of_the_weights():
    uniform = torch.full((1, 2, 1, 8), 1 / 8)
    certain = F.one_hot(torch.tensor([[[3]]]), 8).float().expand(1, 2, -1, -1)
    assert entropies(uniform).item() == pytest.approx(torch.tensor(8.0).log().item())
    assert entropies(certain).item() == 0


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.75, 1.0])
def test_the_image_tokens_that_stay_match(share):
    given = load_file(DATA / "pruning.safetensors")
    images = given["input_ids"] == 71
    stays = most_received(given["scores"], images, share) | ~images
    assert torch.equal(given["input_ids"][stays][None], given[f"ratio_{share}.input_ids"])
    assert torch.equal(given["embeds"][stays][None], given[f"ratio_{share}.embeds"])
    assert bool(stays.all()) == (share == 1)
