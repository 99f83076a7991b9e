"""Whisper-Medusa checkpoints, against what the reference's own code computed on them."""

import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmdecode import registry
from mmdecode.accept.typical import Typical
from mmdecode.decoder import Decoder
from mmdecode.draft.medusa import Medusa, paths_of_choices
from mmdecode.engine.adapter import Prompt
from mmdecode.engine.cache import RaggedCache
from mmdecode.engine.call import Call
from mmdecode.engine.masks import block_mask, chain
from mmdecode.engine.processors import Processors
from mmdecode.engine.proposal import Proposal, Tree
from mmdecode.engine.target_logits import TargetLogits
from mmdecode.models.whisper_medusa import load_target
from mmdecode.train.drafters.medusa import head_losses

DATA = Path(__file__).parents[1] / "data" / "golden" / "whisper_medusa"
RUNS = json.loads((DATA / "expected_generation.json").read_text())
INPUTS = load_file(DATA / "inputs.safetensors")
EXPECTED = load_file(DATA / "expected.safetensors")
UTILS = load_file(DATA / "medusa_utils.safetensors")
CHECKPOINTS = ("linear", "linear_bin", "linear_kl", "block")
CLOSE = {"atol": 1e-4, "rtol": 0.0}
EOS, SOT, PROMPT = 60, 61, [61, 62, 64, 67]


@functools.cache
def target(name):
    return load_target(DATA / name)


@functools.cache
def medusa(name):
    return Medusa.from_pretrained(DATA / name)


def expected_of(name):
    prefix = f"{name.removesuffix('_bin')}."
    return {k.removeprefix(prefix): v for k, v in EXPECTED.items() if k.startswith(prefix)}


@torch.no_grad()
def all_logits(name, features, ids, encoded=None):
    """Base and head logits ``(1 + K, B, T, V)``, decoder states, and what the heads read."""
    model, draft = target(name), medusa(name)
    adapter = registry.adapter_for(model)
    if encoded is None:
        encoded = model.get_encoder()(features).last_hidden_state
    decoder = model.get_decoder()
    hidden = decoder(input_ids=ids, encoder_hidden_states=encoded).last_hidden_state
    read = hidden
    if draft.block is not None:
        rows, length = ids.shape
        cache = RaggedCache(1, rows, ids.device)
        past = adapter.open(cache, Prompt(ids=ids, mask=ids >= 0, inputs={"source": encoded}))
        zero = torch.zeros(rows, dtype=torch.long)
        cache.open(length)
        mask = block_mask(zero, zero, *chain(length, ids.device), length, hidden.dtype)
        read = adapter.run_extra_layer(draft.block, hidden, mask, past)
    heads = draft.heads.logits(read.flatten(0, 1), adapter)
    heads = heads.view(len(heads), *ids.shape, -1)
    return torch.cat([adapter.head(hidden)[None], heads]), hidden, read


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_of_base_heads_and_block_match(name):
    expected = expected_of(name)
    logits, hidden, read = all_logits(
        name, INPUTS["input_features"][:2], INPUTS["decoder_input_ids"]
    )
    torch.testing.assert_close(hidden, expected["forward.decoder_last_hidden_state"], **CLOSE)
    torch.testing.assert_close(logits, expected["forward.logits"], **CLOSE)
    if name == "block":
        torch.testing.assert_close(read, expected["forward.medusa_block_output"], **CLOSE)


def teacher_forced(labels):
    start = torch.full_like(labels[:, :1], SOT)
    return torch.cat([start, labels[:, :-1].masked_fill(labels[:, :-1] < 0, EOS)], 1)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_losses_per_head_match(name):
    expected, labels = expected_of(name), INPUTS["labels"]
    logits, _, _ = all_logits(name, INPUTS["input_features"], teacher_forced(labels))
    torch.testing.assert_close(logits[:, :2], expected["teacher_forced.logits_first_two"], **CLOSE)
    part = "ce_part_per_head" if name == "linear_kl" else "loss_per_head"
    wanted = expected[f"teacher_forced.{part}"]
    ours = head_losses(logits, labels)
    if name == "block":  # trained without a loss on the base output
        ours = ours[1:]
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


def generate(name, rows, decoder):
    """Tokens of each row up to and including the first end of sequence."""
    found = target(name).generate(
        INPUTS["input_features"][rows],
        language="en",
        task="transcribe",
        do_sample=False,
        custom_generate=decoder,
    )
    return [upto_eos(row) for row in found.tolist()]


def upto_eos(row):
    row = row[len(PROMPT) :] if row[: len(PROMPT)] == PROMPT else row
    return row[: row.index(EOS)] if EOS in row else row


def plain_of(name):
    rows = RUNS[name.removesuffix("_bin")]["plain_greedy_of_head0_full_recompute"]
    return [upto_eos(row) for row in rows]


TREES = {
    "published": None,
    "pairs": [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (1, 0, 1)],
    "gaps": [(3,), (0, 2), (2, 0, 1), (0,), (1, 1, 1, 0)],
}


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_strict_decoding_is_plain_greedy_in_any_batch(name, tree):
    draft = medusa(name)
    decoder = Decoder(
        Medusa(draft.heads, draft.block, TREES[tree] or paths_of_choices([1, 1, 1, 1, 1]))
    )
    assert generate(name, slice(0, 6), decoder) == plain_of(name)
    assert decoder.stats.accepted > 0
    assert generate(name, slice(3, 4), decoder) == plain_of(name)[3:4]


def test_strict_decoding_with_the_checkpoints_own_tree_needs_half_the_passes():
    decoder = Decoder(medusa("linear"))
    generate("linear", slice(0, 1), decoder)
    reference = RUNS["linear"]["typical_chain"][0]
    tokens = len(plain_of("linear")[0]) + 1
    assert decoder.stats.passes < reference["passes"] < tokens


def test_a_block_checkpoint_leaves_the_whisper_as_it_was():
    rows = RUNS["block"]["plain_greedy_whisper_generate"]
    assert generate("block", slice(0, 6), Decoder()) == [upto_eos(row) for row in rows]


@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (1, 2, 2), (1, 3, 2, 2), (1, 6, 1, 4)])
def test_trees_of_counts_per_level_are_those_of_the_reference(counts):
    key = "choices_" + "_".join(map(str, counts)) + "."
    buffers = {k.removeprefix(key): v for k, v in UTILS.items() if k.startswith(key)}
    tree, order = Tree.from_paths(paths_of_choices(list(counts)))
    _, depths, ancestors = tree.tensors(torch.device("cpu"))
    assert torch.equal(ancestors, buffers["medusa_attn_mask"][0, 0] > 0)
    assert [0, *depths.tolist()] == buffers["medusa_position_ids"].tolist()
    base, heads = buffers["in.base_logits"], buffers["in.medusa_logits"]
    top = heads[:, 0, -1].topk(max(counts)).indices
    tokens = [int(top[len(path) - 1, path[-1]]) for path in order]
    assert [int(base[0, -1].argmax()), *tokens] == buffers["tree_candidates"][0].tolist()
    row = {path: node + 1 for node, path in enumerate(order)}
    leaves = [path for path in order if len(path) == len(counts) - 1]
    ours = [[0, *(row[leaf[:i]] for i in range(1, len(leaf) + 1))] for leaf in leaves]
    assert sorted(ours) == sorted(buffers["retrieve_indices"].tolist())


def decide(rule, logits, candidates):
    """How many tokens of each candidate the rule keeps; each row is a chain of its own."""
    call = Call.of(candidates[:, :1], generated=candidates[:, 1:], length=0)
    proposal = Proposal(tokens=candidates[:, 1:].contiguous(), kind="deterministic")
    logits = TargetLogits(logits.float(), call, proposal, Processors([]))
    return rule(proposal, logits, call).num_accepted


CASES = json.loads((DATA / "evaluate_posterior_cases.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_posterior_decisions_are_those_of_the_reference(case):
    logits, candidates = (UTILS[f"posterior{case['case']}.{k}"] for k in ("logits", "candidates"))
    temperature = case["temperature"]
    rule = registry.create("accept", "greedy")
    if temperature:
        rule = Typical(case["posterior_threshold"], case["posterior_alpha"])
        logits = logits / temperature
    counts = decide(rule, logits, candidates)
    assert int(counts.max()) == case["accept_length"]
    assert counts[case["best_candidate"]] == case["accept_length"]


def suppressed(logits, first):
    """The reference suppresses the tokens of the beginning at all positions of iteration one."""
    banned = [2, 5, *range(61, 67)] + ([1, EOS] if first else [])
    logits = logits.clone()
    logits[..., banned] = -torch.inf
    return logits


def two_passes(name, row, epsilon, delta, limit=48):
    """The reference's loop: a pass for the candidate, one to verify, no bonus token."""
    features = INPUTS["input_features"][row : row + 1]
    with torch.no_grad():
        encoded = target(name).get_encoder()(features).last_hidden_state
    heads = medusa(name).heads.weight.shape[1]
    ids, first, rounds = list(PROMPT), True, []
    while True:
        logits, _, _ = all_logits(name, features, torch.tensor([ids]), encoded)
        candidate = suppressed(logits[:, 0, -1], first).argmax(-1)
        verified, _, _ = all_logits(
            name, features, torch.tensor([ids + candidate.tolist()]), encoded
        )
        distribution = suppressed(verified[0, 0, len(ids) :], first)
        count = int(decide(Typical(epsilon, delta), distribution[None], candidate[None]))
        rounds.append((candidate.tolist(), distribution.argmax(-1).tolist(), count))
        kept = candidate[: count + 1].tolist()
        ids += kept if count else [kept[0], int(distribution[0].argmax())]
        first = False
        if EOS in ids[len(PROMPT) :] or len(ids) + heads >= limit:
            return ids, rounds


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("run", "epsilon", "delta", "limit"),
    [
        ("typical_chain", 0.09, 0.3, 48),
        ("typical_chain_threshold0.5_alpha0.9", 0.5, 0.9, 48),
        ("typical_chain_max_length_16", 0.09, 0.3, 16),
    ],
)
@pytest.mark.parametrize("name", ["linear", "linear_kl", "block"])
def test_the_two_pass_rule_on_our_functions_repeats_the_typical_runs(
    name, run, epsilon, delta, limit
):
    for row, reference in enumerate(RUNS[name][run]):
        ids, rounds = two_passes(name, row, epsilon, delta, limit)
        wanted = [
            (i["candidate"], i["verifier_argmax"], i["accept_length"])
            for i in reference["iterations"]
        ]
        assert rounds == wanted, row
        assert upto_eos(ids) == upto_eos(reference["raw_sequence_with_prompt"]), row
