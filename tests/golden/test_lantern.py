"""LANTERN's verification, against what the reference's own code computed.

Its ``exact`` rows are plain tree verification, and right. Of the relaxed rows the test of the first
candidate at each level is right; after a rejection the release takes probability from all
neighbours, so later ratios and distributions differ from the rule, which is not asserted.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import LogitsProcessorList

from mmdecode.accept.exact import GreedyMatch
from mmdecode.accept.lantern import LANTERN, nearest
from mmdecode.accept.rejection import Candidate, residual
from mmdecode.engine.call import Call
from mmdecode.engine.noise import Role
from mmdecode.engine.processors import Processors
from mmdecode.engine.proposal import Proposal, Tree
from mmdecode.engine.target_logits import TargetLogits
from mmdecode.image_ar.sampling import Sampling

DATA = Path(__file__).parents[1] / "data" / "golden" / "lantern"
SETUP = json.loads((DATA / "config.json").read_text())
VALUES = load_file(DATA / "lantern_io.safetensors")
VOCAB, TRIALS = SETUP["vocab"], range(SETUP["trials"])
ORDER = SETUP["setting_order"]
TREE, PATHS = Tree.from_paths([tuple(path) for path in SETUP["tree_choices"]])
RELAXED = {
    "d0.1_k8": {"delta": 0.1, "k": 8},
    "d0.3_k16": {"delta": 0.3, "k": 16},
    "d0_k8": {"delta": 0.0, "k": 8},
    "lam3_k6": {"lambda_": 3.0, "k": 6},
    "d1_k8": {"delta": 1.0, "k": 8},
}
CLOSE = {"atol": 1e-5, "rtol": 0.0}


def of(case):
    parts = {k.split(".", 1)[1]: v for k, v in VALUES.items() if k.startswith(f"{case}.")}
    return SimpleNamespace(**{k.split(".", 1)[1]: v for k, v in parts.items()})


def p_of(case):
    """Distributions at root and nodes, ``(9, V)``."""
    sampling = Sampling(SETUP["temperature"], SETUP["top_k"])
    return sampling.warp(case.node_target_logits).softmax(-1)


def q_of(case, kind):
    """The distribution that each node was sampled from, its siblings not removed, ``(8, V)``."""
    if kind == "dynamic":
        return torch.nn.functional.one_hot(case.node_tokens[1:], VOCAB).float()
    rows = [getattr(case, f"q_rows_level{level}") for level in range(3)]
    parents = SETUP["rows_per_level"]
    return torch.stack([rows[len(p) - 1][parents[len(p) - 1].index([*p[:-1]])] for p in PATHS])


def children(node):
    return [child for child, parent in enumerate(TREE.parents) if parent == node]


def odds(rule, p, q, token):
    zero = torch.tensor(0)
    candidate = Candidate(p=p, q=q, token=token, depth=zero, position=zero, adapter=None)
    first, second = rule.odds(candidate)
    return float(first / second)


def test_neighbours_match():
    codes = VALUES["codebook.in.embedding"]
    assert torch.equal(nearest(codes, VOCAB - 1), VALUES["codebook.out.neighbours"])
    decoded = torch.nn.functional.normalize(codes, dim=-1)
    expected = VALUES["codebook.out.neighbours_of_normalised"]
    assert torch.equal(nearest(decoded, VOCAB - 1), expected)


def test_the_tree_matches():
    parents, depths, ancestors = TREE.tensors(torch.device("cpu"))
    assert torch.equal(ancestors.float(), VALUES["tree.out.attn_mask"])
    assert [0, *depths.tolist()] == VALUES["tree.out.position_ids"].tolist()
    leaves = [node for node in range(len(TREE)) if not children(node)]
    paths = [[row for row in range(9) if ancestors[leaf + 1, row]] for leaf in leaves]
    padded = [[*path, *[-1] * (4 - len(path))] for path in paths]
    expected = VALUES["tree.out.retrieve_indices"].tolist()
    assert sorted(padded) == sorted(expected)
    assert parents.tolist() == [PATHS.index(p[:-1]) if len(p) > 1 else -1 for p in PATHS]


def walk(rule, case, kind, uniforms, expected):
    """Follows a path by the rule's formulas alone, child by child.

    Returns:
        Ratios tested, the uniform each node was tested with, the path, and the distribution after
        it.
    """
    p, q = p_of(case), q_of(case, kind)
    ratios, used, path, node = [], {}, [], -1
    distribution = p[0]
    while children(node):
        kept = None
        rest = q[children(node)[0]]
        for child in children(node):
            token = case.node_tokens[child + 1]
            distribution_of_child = q[child] if kind == "dynamic" else rest / rest.sum()
            ratios.append(odds(rule, distribution, distribution_of_child, token))
            used[child] = float(uniforms[len(ratios) - 1])
            if used[child] <= ratios[-1]:
                kept = child
                break
            distribution = residual(distribution, distribution_of_child)
            rest = rest.index_fill(0, token, 0)
        if kept is None:
            break
        node, distribution = kept, p[kept + 1]
        path.append(kept)
    return ratios, used, path, distribution


class Given:
    """Uniforms of the tests, ``(B, tests)``, and no noise after them."""

    def __init__(self, uniforms):
        self.uniforms = uniforms

    def uniform(self, positions, role, trial=None):
        assert role is Role.ACCEPT
        return self.uniforms

    def sample(self, scores, positions, role, trial=None):
        return scores.argmax(-1)


def context(rows, noise=None):
    prompt = torch.zeros(rows, 0, dtype=torch.long)
    return Call.of(prompt, max_new_tokens=20, length=1, noise=noise)


def run(rule, proposal, scores, noise=None):
    """The rule's outcome for ``scores (B, 9, V)``."""
    call = context(len(scores), noise)
    target = TargetLogits(scores, call, proposal, Processors(LogitsProcessorList()))
    return rule(proposal, target, call)


# nodes are tested depth by depth, the eldest siblings first: which test asks about a node
TESTS = sorted({(len(path), path[-1]) for path in PATHS})
TEST_OF = [TESTS.index((len(path), path[-1])) for path in PATHS]


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_exact_verification_matches(kind):
    """By the formulas, and by the rule over all trials as rows of a batch."""
    neutral, row = LANTERN(delta=0), ORDER.index("exact")
    cases = [of(f"{kind}{trial}") for trial in TRIALS]
    uniform = torch.ones(len(cases), len(TESTS))
    for trial, case in enumerate(cases):
        ratios, used, path, distribution = walk(neutral, case, kind, VALUES["uniforms"][trial], row)
        count = int(case.uniforms_used[row])
        tested = case.tested_ratio[row, :count]
        torch.testing.assert_close(torch.tensor(ratios), tested, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(distribution, case.sample_p[row], **CLOSE)
        assert len(path) == int(case.accept_length[row])
        for node, u in used.items():
            uniform[trial, TEST_OF[node]] = u

    tokens = torch.stack([case.node_tokens[1:] for case in cases])
    q = torch.stack([q_of(case, kind) for case in cases]).log()
    proposal = Proposal(tokens=tokens, kind="without_replacement", tree=TREE, log_q=q)
    if kind == "dynamic":
        proposal = Proposal(tokens=tokens, kind="deterministic", tree=TREE)
    found = []

    class Seen(LANTERN):
        def _tree(self, *arguments):
            found.append(super()._tree(*arguments))
            return found[-1]

    run(Seen(delta=0), proposal, torch.stack([p_of(case) for case in cases]).log(), Given(uniform))
    [(path, count, next_probs)] = found
    retrieve = VALUES["tree.out.retrieve_indices"]
    for trial, case in enumerate(cases):
        best = retrieve[int(case.best_candidate[row])]
        length = int(case.accept_length[row])
        assert int(count[trial]) == length
        assert (path[trial, :length] + 1).tolist() == best[1 : length + 1].tolist()
        torch.testing.assert_close(next_probs[trial], case.sample_p[row], **CLOSE)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("setting", RELAXED)
def test_the_first_test_of_each_level_borrows_as_published(setting, kind):
    row = ORDER.index(setting)
    # the release sorts the codes as stored, not as decoded
    rule = LANTERN(**RELAXED[setting], neighbours=VALUES["codebook.out.neighbours"])
    compared = 0
    for trial in TRIALS:
        case = of(f"{kind}{trial}")
        p, q = p_of(case), q_of(case, kind)
        tested = case.tested_ratio[row, : int(case.uniforms_used[row])].tolist()
        node, used = -1, 0
        while children(node):
            first = children(node)[0]
            found = odds(rule, p[node + 1], q[first], case.node_tokens[first + 1])
            assert found == pytest.approx(tested[used], abs=1e-5, rel=1e-5)
            compared += 1
            kept = None
            for child in children(node):  # follow the path that the release took
                used += 1
                if float(VALUES["uniforms"][trial][used - 1]) <= tested[used - 1]:
                    kept = child
                    break
            if kept is None:
                break
            node = kept
    assert compared > 12


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_neutral_settings_are_neutral_here_and_not_in_the_release(kind):
    """At delta = 0 the release still takes from the neighbours of what it turned down."""
    exact, row = ORDER.index("exact"), ORDER.index("d0_k8")
    rule = LANTERN(delta=0, k=8, neighbours=VALUES["codebook.out.neighbours"])
    moved = 0.0
    for trial in TRIALS:
        case = of(f"{kind}{trial}")
        _, _, path, distribution = walk(rule, case, kind, VALUES["uniforms"][trial], row)
        torch.testing.assert_close(distribution, case.sample_p[exact], **CLOSE)
        if len(path) == int(case.accept_length[row]):
            moved = max(moved, float((distribution - case.sample_p[row]).abs().max()))
    assert moved > 0.1


def test_greedy_verification_matches():
    row = ORDER.index("exact")
    retrieve = VALUES["tree.out.retrieve_indices"]
    for trial in TRIALS:
        case = of(f"greedy{trial}")
        tokens = case.node_tokens[None, 1:]
        proposal = Proposal(tokens=tokens, kind="deterministic", tree=TREE)
        outcome = run(GreedyMatch(), proposal, case.node_target_logits[None])
        length = int(case.accept_length[row])
        assert int(outcome.num_accepted) == length
        best = retrieve[int(case.best_candidate[row]), 1 : length + 1].tolist()
        assert (outcome.path[0, :length] + 1).tolist() == best
        assert int(outcome.next_token) == int(case.next_logits[row].argmax())
