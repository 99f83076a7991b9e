"""Jacobi windows and their rejection test, against what the reference's own code computed.

The reference tests slot i of a window by the distribution of slot i - 1; slot 0 is the last
committed token.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from mmdecode.accept.exact import GreedyMatch
from mmdecode.accept.rejection import Candidate, Rejection, residual
from mmdecode.draft.jacobi import Jacobi
from mmdecode.engine.call import Call, Plan
from mmdecode.engine.contracts import Block, BranchOutput, DraftWindow
from mmdecode.engine.noise import Role
from mmdecode.engine.proposal import Proposal
from mmdecode.image_ar.sampling import Sampling, guided
from mmdecode.models.image_layout import Layout
from tests.support.relaxed import one_token

DATA = Path(__file__).parents[1] / "data" / "golden" / "sjd"
SETUP = json.loads((DATA / "config.json").read_text())
VALUES = load_file(DATA / "sjd_io.safetensors")
VOCAB = SETUP["vocab"]
CASES = [
    *(f"single{i}" for i in range(SETUP["single_trials"])),
    *(f"batch{i}" for i in range(SETUP["batch_trials"])),
]
CLOSE = {"atol": 1e-6, "rtol": 0.0}


def of(case):
    """The tensors of a case by their short names."""
    parts = {k.split(".", 1)[1]: v for k, v in VALUES.items() if k.startswith(f"{case}.")}
    return SimpleNamespace(**{k.split(".", 1)[1]: v for k, v in parts.items()})


def context(rows, length=1, adapter=None, ids=None, noise=None, kind="deterministic"):
    ids = torch.zeros(rows, 40, dtype=torch.long) if ids is None else ids
    prompt = ids[:, :0]
    plan = Plan(adapter=adapter, kind=kind)
    return Call.of(
        prompt, generated=ids, length=length, max_new_tokens=20, room=0, plan=plan, noise=noise
    )


class Given:
    """The uniforms of a case as the draws of its tests, and noise that prefers certain tokens."""

    def __init__(self, uniforms, favourites):
        self.uniforms, self.favourites = uniforms, favourites

    def uniform(self, positions, role, trial=None):
        assert role is Role.ACCEPT
        return self.uniforms

    def sample(self, scores, positions, role, trial=None):
        favoured = torch.nn.functional.one_hot(self.favourites, scores.shape[-1])
        return (scores + 1e4 * favoured[:, None]).argmax(-1)


@pytest.mark.parametrize("case", CASES)
def test_odds_and_residuals_match(case):
    found = of(case)
    token = found.draft_tokens[:, 1:]
    rest = {"depth": token * 0, "position": token * 0, "adapter": None}
    p, q = found.p[:, :-1], found.q[:, 1:]
    first, second = Rejection().odds(Candidate(p=p, q=q, token=token, **rest))
    torch.testing.assert_close((first / second).clamp_max(1), found.accept_prob[:, 1:], **CLOSE)
    torch.testing.assert_close(residual(p, q), found.residual[:, 1:], **CLOSE)
    keeps = one_token(Rejection(), p, q).keeps.gather(-1, token[..., None])[..., 0]
    torch.testing.assert_close(keeps, found.accept_prob[:, 1:], **CLOSE)


@pytest.mark.parametrize("case", CASES)
def test_a_window_commits_the_same_tokens_row_by_row(case):
    found = of(case)
    rows, window = found.draft_tokens.shape
    last = found.committed[:, None] - 1
    decided = found.tokens.gather(1, last)[:, 0]
    proposal = Proposal(tokens=found.draft_tokens[:, 1:], kind="iid", log_q=found.q[:, 1:].log())
    target = SimpleNamespace(vectorised=True, all=lambda: found.p.log())
    arguments = (proposal, target, context(rows, noise=Given(found.uniform[:, 1:], decided)))

    path, count, next_probs = Rejection()._chain(*arguments)
    assert torch.equal(count + 1, found.committed)
    full = (count == window - 1)[:, None]
    slot = found.committed.clamp_max(window - 1)[:, None, None].expand(-1, 1, VOCAB)
    expected = torch.where(full, found.p[:, -1], found.residual.gather(1, slot)[:, 0])
    torch.testing.assert_close(next_probs, expected, **CLOSE)

    outcome = Rejection()(*arguments)
    kept = torch.arange(window - 1) < count[:, None]
    assert torch.equal(path, outcome.path) and torch.equal(path >= 0, kept)
    accepted = found.draft_tokens[:, 1:]
    assert torch.equal(accepted[kept], found.tokens[:, :-1][kept])
    # the reference drew the last one with a generator: it has probability here, so it is favoured
    assert torch.equal(outcome.next_token, decided)


def test_the_reference_commits_the_shortest_row_of_a_batch_and_this_loop_each_row_its_own():
    case = of(f"batch{SETUP['loop_trial']}")
    assert int(VALUES["loop.out.matched"]) == int(case.committed.min()) < int(case.committed.max())
    # what a row ahead gives back keeps the distribution of its draft there, which biases later
    # tests
    row = int(case.committed.argmax())
    torch.testing.assert_close(VALUES["loop.out.carried_scores"][row, 0], case.q[row, 2], **CLOSE)


def test_a_residual_is_sampled_unnormalised():
    """The reference warps it once more, which is wrong for a temperature."""
    again = VALUES["double_temperature.out.residual"]
    sound = VALUES["single0.out.residual"][0, 1:]
    warped = (sound.log() / SETUP["double_temperature"]).softmax(-1)
    torch.testing.assert_close(again, warped, **CLOSE)
    assert float((again - sound).abs().max()) > 0.2


def test_the_pipeline_matches():
    setup = SETUP["pipeline"]
    conditional, unconditional = VALUES["pipeline.in.logits_rows"].unbind(0)
    logits = guided(conditional, unconditional, setup["guidance_scale"])
    distribution = Sampling(top_k=setup["image_top_k"]).warp(logits).softmax(-1)
    torch.testing.assert_close(distribution, VALUES["pipeline.out.probs"][0], **CLOSE)
    assert torch.equal(distribution.argmax(-1), VALUES["pipeline.out.greedy_tokens"][0])


def test_the_plain_jacobi_rule_keeps_what_did_not_change():
    drafted, following = VALUES["jacobi.in.draft_tokens"], VALUES["jacobi.in.next_tokens"]
    scores = torch.nn.functional.one_hot(following, VOCAB).float()
    target = SimpleNamespace(vectorised=True, choices=lambda choose, depths: choose(scores, depths))
    proposal = Proposal(tokens=drafted[:, 1:], kind="deterministic")
    outcome = GreedyMatch()(proposal, target, context(1))
    assert torch.equal(outcome.num_accepted + 1, VALUES["jacobi.out.committed"])


def begun(start, layout):
    """Guesses at the fixture's new slots, after what a pass has left of the window."""
    history, carried = VALUES["init.in.input_ids"], VALUES["init.in.carried_tokens"]
    offset, new = SETUP["init"]["prefill_offset"], SETUP["init"]["new_tokens"]
    generated = history[:, offset:]
    ids = torch.nn.functional.pad(generated, (0, 40))
    adapter = SimpleNamespace(layout=layout)
    call = context(1, generated.shape[1], adapter, ids, kind="iid")
    draft = Jacobi(1 + SETUP["init"]["carried"] + new, start)
    scores = BranchOutput(logits=torch.zeros(1, 1, VOCAB))
    session = draft.begin(call, scores)
    none = torch.zeros(1, dtype=torch.long)
    left = Block(
        path=torch.empty(1, 0, dtype=torch.long),
        tokens=history[:, -1:],
        num_accepted=none,
        num_drafted=none,
        count=none + 1,
        ended=none > 0,
        window=DraftWindow(tokens=carried, logits=VALUES["init.in.carried_scores"].log()),
    )
    session.observe(Proposal.empty(1, call.device), scores, left)
    proposal = session.propose(20)
    assert torch.equal(proposal.tokens[:, :2], carried)
    return proposal.tokens[0, 2:], proposal.log_q[0, 2:].softmax(-1)


@pytest.mark.parametrize("name", ["repeat", "sample"])
def test_new_positions_begin_from_their_left_neighbour(name):
    """Where a neighbour is known. The reference samples by argmax, as here in greedy decoding.

    It also copies over the end of a row, and puts codes where only a newline can stand.
    """
    expected = VALUES[f"init_{name}_horizon.out.tokens"][0]
    has_left = VALUES["init.out.has_left_neighbour"].tolist()
    columns, stride = SETUP["init"]["grid_width"], SETUP["init"]["row_stride"]
    codes = VALUES["init.in.image_vocab"]
    start = {"repeat": "left", "sample": "left_law"}[name]
    plain = Layout(rows=4, columns=stride, ids=codes)
    tokens, distributions = begun(start, plain)
    assert [int(plain.left(torch.tensor(index))) >= 0 for index in range(9, 15)] == has_left
    assert tokens[0] == expected[0]
    if name == "repeat":
        torch.testing.assert_close(distributions[0], VALUES["init_repeat_horizon.out.scores"][0, 0])
    else:
        torch.testing.assert_close(distributions[0], VALUES["init.in.carried_scores"][0, -1])
    # a row of which nothing is known begins at random, with the distribution that is true of it
    assert torch.equal(
        distributions[1:], torch.zeros(VOCAB).index_fill(0, codes, 1 / 20).expand(5, -1)
    )

    newline = 3
    tokens, distributions = begun(
        start, Layout(rows=4, columns=columns, ids=codes, newline=newline)
    )
    assert (tokens == newline).tolist() == [True, False, False, False, False, True]
    assert bool(torch.isin(tokens[1:5], codes).all()) and float(distributions[0, newline]) == 1
