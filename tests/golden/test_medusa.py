"""Medusa heads on a Llama, against what the reference's own code computed on the same weights."""

import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, TemperatureLogitsWarper

from mmdecode import registry
from mmdecode.accept.typical import Typical
from mmdecode.draft.medusa import Medusa
from mmdecode.engine.adapter import MAIN
from mmdecode.engine.branches import ModelRunner
from mmdecode.engine.call import Call, Plan
from mmdecode.engine.contracts import Requirements
from mmdecode.engine.processors import Processors
from mmdecode.engine.proposal import Proposal, Tree
from mmdecode.engine.target_logits import TargetLogits
from mmdecode.train.drafters.medusa import head_losses
from tests.support.traced import Traced

DATA = Path(__file__).parents[1] / "data" / "golden" / "medusa"
CHOICES = {
    name: [tuple(path) for path in paths]
    for name, paths in json.loads((DATA / "medusa_choices.json").read_text()).items()
}
RUNS = json.loads((DATA / "expected_generation.json").read_text())
EXPECTED = load_file(DATA / "expected.safetensors")
CLOSE = {"atol": 1e-4, "rtol": 0.0}
LAYOUTS = ("heads_v01", "heads_v01_safetensors", "full")


@functools.cache
def base_of(layout):
    if layout != "full":
        return LlamaForCausalLM.from_pretrained(DATA / "base").eval()
    weights = torch.load(DATA / "full" / "pytorch_model.bin", weights_only=True)
    own = {k: v for k, v in weights.items() if not k.startswith("medusa_head.")}
    config = LlamaConfig.from_pretrained(DATA / "full")
    model = LlamaForCausalLM(config)
    model.load_state_dict(own)
    return model.eval()


def expected_of(layout):
    prefix = "full." if layout == "full" else "heads_v01."
    return {k.removeprefix(prefix): v for k, v in EXPECTED.items() if k.startswith(prefix)}


def rows_context(ids, adapter=None):
    return Call.of(ids, plan=Plan(adapter=adapter))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_of_base_and_heads_match(layout):
    expected, model = expected_of(layout), base_of(layout)
    adapter = registry.adapter_for(model)
    ids = EXPECTED["input_ids"]
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state
        logits = Medusa.from_pretrained(DATA / layout).heads.logits(hidden.flatten(0, 1), adapter)
    torch.testing.assert_close(hidden, expected["last_hidden_state"], **CLOSE)
    torch.testing.assert_close(adapter.head(hidden), expected["base_logits"], **CLOSE)
    heads = logits.view(len(logits), *ids.shape, -1)
    torch.testing.assert_close(heads, expected["medusa_logits"], **CLOSE)


@pytest.mark.parametrize("name", CHOICES)
def test_trees_have_the_masks_positions_and_paths_of_the_reference(name):
    buffers = {
        k.removeprefix(f"{name}."): v
        for k, v in load_file(DATA / "buffers.safetensors").items()
        if k.startswith(f"{name}.")
    }
    tree, order = Tree.from_paths(CHOICES[name])
    _, depths, ancestors = tree.tensors(torch.device("cpu"))
    assert sorted(CHOICES[name], key=lambda path: (len(path), path)) == order
    assert torch.equal(ancestors, buffers["medusa_attn_mask"][0, 0] > 0)
    assert [0, *depths.tolist()] == buffers["medusa_position_ids"].tolist()
    # candidates: the root's token, then ten per head
    ranks = [0, *(10 * (len(path) - 1) + path[-1] + 1 for path in order)]
    assert ranks == buffers["tree_indices"].tolist()
    leaves = [path for path in order if not any(p[: len(path)] == path != p for p in order)]
    row = {path: node + 1 for node, path in enumerate(order)}
    ours = [[0, *(row[leaf[:i]] for i in range(1, len(leaf) + 1))] for leaf in leaves]
    theirs = [[i for i in path if i >= 0] for path in buffers["retrieve_indices"].tolist()]
    assert sorted(ours) == sorted(theirs)


@pytest.mark.parametrize("layout", ["heads_v01", "full"])
def test_one_tree_pass_scores_every_path_as_the_reference_does(layout):
    expected, model = expected_of(layout), base_of(layout)
    adapter = registry.adapter_for(model)
    branch = ModelRunner(adapter, [MAIN], Requirements(hidden=frozenset({"last"})))
    draft = Medusa.from_pretrained(DATA / layout, paths=CHOICES["small"])
    call = rows_context(EXPECTED["input_ids"][:1], adapter=adapter)
    with torch.no_grad():
        prefill = branch.prefill(call, {})["main"]
        session = draft.begin(call, prefill)
        session.state = prefill.hidden["last"][:, -1]
        proposal = session.propose(10)
        root = int(prefill.logits[0, -1].argmax())
        call.rows.ids[0, call.prompt_length] = root
        call.rows.length += 1
        scores = branch.score(call, proposal, {})["main"]
        heads = draft.heads.logits(scores.hidden["last"][0], adapter)
    assert [root, *proposal.tokens[0].tolist()] == expected["step.tree_candidates"][0].tolist()
    retrieve = load_file(DATA / "buffers.safetensors")["small.retrieve_indices"]
    real = retrieve >= 0  # padded entries read an unrelated node in the reference
    paths = retrieve.clamp_min(0)
    torch.testing.assert_close(
        scores.logits[0, paths][real], expected["step.tree_logits_by_path"][real], **CLOSE
    )
    theirs = expected["step.tree_medusa_logits_by_path"]
    torch.testing.assert_close(heads[:, paths][:, real], theirs[:, real], **CLOSE)


def run(layout, choices, accept, **options):
    """New ids of each input alone, and how many drafted tokens each round accepted."""
    decoder = Traced(Medusa.from_pretrained(DATA / layout, paths=choices), accept=accept)
    ids = []
    for row in EXPECTED["input_ids"]:
        out = base_of(layout).generate(
            row[None],
            attention_mask=torch.ones_like(row[None]),
            custom_generate=decoder,
            max_new_tokens=70,
            do_sample=False,
            eos_token_id=None,
            **options,
        )
        ids.append(out[0, len(row) :].tolist())
    return ids, [[len(r.accepted) for r in row[1:]] for row in decoder.trace]


def assert_run(name, ids, accepted):
    for row, case in enumerate(RUNS["runs"][name]):
        new, lengths = case["new_ids"], [n for _, n in case["best_candidate_and_accept_length"]]
        shared = min(len(new), len(ids[row]))
        assert shared >= 12
        assert ids[row][:shared] == new[:shared], (name, row)
        assert accepted[row][: len(lengths)] == lengths, (name, row)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [n for n in RUNS["runs"] if n.endswith(".temperature0")])
def test_strict_runs_are_plain_greedy_and_accept_as_much_as_the_reference(name):
    layout, tree, _ = name.split(".")
    ids, accepted = run(layout, CHOICES[tree], "auto")
    assert ids == RUNS["plain_greedy_of_base"]
    assert_run(name, ids, accepted)


def test_both_files_of_the_heads_draft_the_same():
    assert run("heads_v01", CHOICES["small"], "auto") == run(
        "heads_v01_safetensors", CHOICES["small"], "auto"
    )


@pytest.mark.parametrize("name", [n for n in RUNS["runs"] if ".typical_fast" in n])
def test_typical_runs_are_those_of_the_reference(name):
    layout, tree, rest = name.split(".", 2)
    numbers = rest.removeprefix("typical_fast_temperature").replace("_threshold", " ")
    temperature, epsilon, delta = map(float, numbers.replace("_alpha", " ").split())
    warper = TemperatureLogitsWarper(temperature)
    rule = Typical(epsilon, delta)
    ids, accepted = run(layout, CHOICES[tree], rule, logits_processor=[warper])
    assert_run(name, ids, accepted)


def decide(rule, logits, candidates, temperature):
    """How many tokens of each candidate the rule keeps; each row is a chain of its own."""
    proposal = Proposal(tokens=candidates[:, 1:].contiguous(), kind="deterministic")
    call = rows_context(candidates[:, :1])
    if temperature:
        logits = logits / temperature
    target = TargetLogits(logits.float(), call, proposal, Processors([]))
    return rule(proposal, target, call).num_accepted, logits


def best_of(counts, logits, candidates):
    """The longest row, then the likelier one."""
    longest = int(counts.max())
    if longest == 0:
        return 0, 0
    log_p = logits[:, :longest].log_softmax(-1)
    likely = log_p.gather(2, candidates[:, 1 : longest + 1, None]).sum((1, 2))
    return int(likely.masked_fill(counts < longest, -torch.inf).argmax()), longest


CASES = json.loads((DATA / "evaluate_posterior_cases.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_posterior_decisions_are_those_of_the_reference(case):
    inputs = load_file(DATA / "posterior.safetensors")
    logits = inputs[f"posterior{case['case']}.logits"]
    candidates = inputs[f"posterior{case['case']}.candidates"]
    temperature = case["temperature"]
    if temperature:
        rule = Typical(case["posterior_threshold"], case["posterior_alpha"])
    else:
        rule = registry.create("accept", "greedy")
    counts, logits = decide(rule, logits, candidates, temperature)
    best, longest = best_of(counts, logits, candidates)
    assert longest == case["accept_length"]
    if temperature:
        assert best == case["best_candidate"]
    else:
        assert counts[case["best_candidate"]] == longest


def test_losses_of_the_heads_match():
    ids, labels = EXPECTED["loss.input_ids"], EXPECTED["loss.labels"]
    model = base_of("heads_v01")
    adapter = registry.adapter_for(model)
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state[:, :-2]
        heads = Medusa.from_pretrained(DATA / "heads_v01").heads
        logits = heads.logits(hidden.flatten(0, 1), adapter)
    logits = logits.view(len(logits), *hidden.shape[:2], -1)
    losses = head_losses(logits, labels[:, 2:])  # head 0 at position t predicts t + 2
    log = json.loads((DATA / "loss_log.json").read_text())
    expected = torch.tensor([log[f"medusa{head}_loss"] for head in range(len(losses))])
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(losses.sum()[None], EXPECTED["loss.sum_over_heads"])
