"""Processors at all nodes together are the stock ones, one prefix at a time."""

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as lp

from mmdecode.engine.call import Call
from mmdecode.engine.nodes import Nodes
from mmdecode.engine.processors import Processors
from mmdecode.engine.proposal import Proposal, Tree
from mmdecode.engine.target_logits import TargetLogits
from mmdecode.testing import tape

VOCAB, ROWS, PROMPT, ROOM = 11, 6, 5, 9
ENCODER = torch.randint(VOCAB, (ROWS // 2, 7), generator=torch.Generator().manual_seed(3))
STOCK = {
    "repetition": lambda: lp.RepetitionPenaltyLogitsProcessor(1.3),
    "repetition_ignores": lambda: lp.RepetitionPenaltyLogitsProcessor(1.3, PROMPT),
    "repetition_ignores_rows": lambda: lp.RepetitionPenaltyLogitsProcessor(
        0.7, torch.arange(ROWS) + 1
    ),
    "encoder_repetition": lambda: lp.EncoderRepetitionPenaltyLogitsProcessor(1.4, ENCODER),
    "no_repeat_1": lambda: lp.NoRepeatNGramLogitsProcessor(1),
    "no_repeat_2": lambda: lp.NoRepeatNGramLogitsProcessor(2),
    "no_repeat_3": lambda: lp.NoRepeatNGramLogitsProcessor(3),
    "no_repeat_8": lambda: lp.NoRepeatNGramLogitsProcessor(8),
    "encoder_no_repeat_1": lambda: lp.EncoderNoRepeatNGramLogitsProcessor(1, ENCODER),
    "encoder_no_repeat_3": lambda: lp.EncoderNoRepeatNGramLogitsProcessor(3, ENCODER),
    "bias": lambda: lp.SequenceBiasLogitsProcessor(
        [[[2], 1.5], [[1, 2], -2.0], [[3, 1, 2], 4.0], [[4, 1, 2], 0.5], [[0, 5], float("-inf")]]
    ),
    "bad_words": lambda: lp.NoBadWordsLogitsProcessor([[3], [1, 2], [2, 2, 4]], eos_token_id=3),
    "forced_bos": lambda: lp.ForcedBOSTokenLogitsProcessor(4),
    "forced_eos": lambda: lp.ForcedEOSTokenLogitsProcessor(PROMPT + 6, [1, 3]),
    "decay": lambda: lp.ExponentialDecayLengthPenalty((2, 1.7), [1, 3], PROMPT),
    "top_h": lambda: lp.TopHLogitsWarper(0.4),
    "watermark": lambda: lp.WatermarkLogitsProcessor(VOCAB, "cpu", context_width=2),
    "watermark_left": lambda: lp.WatermarkLogitsProcessor(VOCAB, "cpu", bias=3.0),
}


def case(seed, prompt=PROMPT, shared=False):
    """Rows of unequal length after padded prompts, a proposal with unused nodes, and logits."""
    dice = torch.Generator().manual_seed(seed)
    length = torch.randint(ROOM - 3, (ROWS,), generator=dice) + seed % 2
    length[0] = 0
    ids = torch.randint(VOCAB - 6, (ROWS, prompt + ROOM), generator=dice)
    ids[1, : prompt // 2] = VOCAB - 1  # padding, of an id of its own
    nodes = 9
    tokens = torch.randint(VOCAB - 6, (ROWS, nodes), generator=dice)
    ids[3], tokens[3] = 2, 2  # a row that repeats one token
    above = (torch.rand(ROWS, nodes, generator=dice) * (torch.arange(nodes) + 1)).long() - 1
    if shared:
        tree = Tree(tuple(above[0].tolist()))
        proposal = Proposal(tokens=tokens, kind="deterministic", tree=tree)
    else:
        tokens[:, -2:] = torch.where(torch.arange(ROWS)[:, None] < 2, -1, tokens[:, -2:])
        above[:2, -2:] = -1
        proposal = Proposal(tokens=tokens, kind="deterministic", parents=above)
    call = Call.of(ids[:, :prompt], generated=ids[:, prompt:], length=length, max_new_tokens=40)
    logits = torch.randn(ROWS, nodes + 1, VOCAB, generator=dice) * 3
    logits[0, :, 6] = -torch.inf
    return call, proposal, logits


def differing(stock, call, proposal, logits):
    """Score rows in use at which the two differ, and how many were compared."""
    found = TargetLogits(logits, call, proposal, Processors(LogitsProcessorList([stock]))).all()
    parents, tokens = proposal.structure()[0].expand(ROWS, -1), proposal.tokens
    different, compared = [], 0
    for row in range(logits.shape[1]):
        prefixes = {}
        for b in range(ROWS):
            path, node = [], row - 1
            while node >= 0:
                path.insert(0, int(tokens[b, node]))
                node = int(parents[b, node])
            if -1 not in path:
                committed = call.rows.ids[b, : call.end()[b]]
                prefixes[b] = torch.cat([committed, torch.tensor(path, dtype=torch.long)])
        for b, prefix in prefixes.items():
            # in the batch's shape, as generate calls it
            scores = stock(prefix.expand(ROWS, -1), logits[:, row].clone())
            compared += 1
            if not torch.equal(found[b, row], scores[b]):
                different.append((b, row))
    return different, compared


@pytest.mark.one_in(4)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", STOCK)
def test_a_processor_at_all_nodes_is_the_stock_one_at_each_prefix(name, shared):
    changed = 0
    for seed in range(6):
        call, proposal, logits = case(seed, shared=shared, prompt=1 if seed == 5 else PROMPT)
        stock = STOCK[name]()
        different, compared = differing(stock, call, proposal, logits)
        assert not different, (seed, different)
        assert compared > 40
        processors = Processors(LogitsProcessorList([STOCK[name]()]))
        assert processors.vectorised
        found = TargetLogits(logits, call, proposal, processors).all()
        changed += int((found != logits).any(-1).sum())
    assert changed > 0  # the processor did something


@pytest.mark.parametrize("name", STOCK)
def test_a_captured_round_runs_it_unless_it_needs_the_host(name):
    call, proposal, logits = case(1)
    processors = Processors(LogitsProcessorList([STOCK[name]()]))
    assert processors.on_host == (name in ("top_h", "watermark", "watermark_left"))
    if processors.on_host:
        return
    run = lambda: TargetLogits(logits, call, proposal, processors).all()  # noqa: E731
    expected = run()  # the first round is not captured
    result, replay, _ = tape.record(run)
    replay()
    assert torch.equal(result, expected)


MUTANTS = {
    "a path has nodes of other branches": ("on_path", lambda self: self.ancestors[:, :, 1:] | True),
    "the suffix begins one token early": (
        "suffix",
        lambda self, count, right=Nodes.suffix: right(self, count + 1)[..., :-1],
    ),
    "what comes after a row's end counts": (
        "committed",
        lambda self, right=Nodes.committed: (right(self)[0], right(self)[1] | True),
    ),
    "the root is forgotten": (
        "committed",
        lambda self, right=Nodes.committed: (
            right(self)[0],
            right(self)[1].roll(-1, 1) & right(self)[1],
        ),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mistake_is_seen(mutant, monkeypatch):
    monkeypatch.setattr(Nodes, *MUTANTS[mutant])
    names = ("repetition", "no_repeat_2", "bad_words")
    assert any(differing(STOCK[name](), *case(1))[0] for name in names)


def test_a_bias_of_a_token_that_there_is_none_of_is_refused():
    call, proposal, logits = case(0)
    stock = lp.SequenceBiasLogitsProcessor([[[VOCAB], 1.0]])
    processors = Processors(LogitsProcessorList([stock]))
    with pytest.raises(ValueError, match=f"names token {VOCAB}; expected ids below {VOCAB}"):
        TargetLogits(logits, call, proposal, processors).all()


def test_ids_beyond_the_vocabulary_are_no_generated_tokens():
    call, proposal, logits = case(2)
    call.rows.ids[:, 0] = VOCAB + 3  # an image token of a larger vocabulary
    for name in ("repetition", "no_repeat_1"):
        assert differing(STOCK[name](), call, proposal, logits)[0] == []


class Unchanged(lp.LogitsProcessor):
    """Returns the scores that it is given."""

    prefix_free = True

    def at_nodes(self, scores, nodes):
        return scores.view_as(scores)


@pytest.mark.parametrize("others", [[], [Unchanged()]], ids=["alone", "after one that is idle"])
def test_scores_that_are_overwritten_are_a_copy(others):
    call, proposal, logits = case(1)
    before = logits.clone()
    penalty = lp.RepetitionPenaltyLogitsProcessor(1.5)
    found = TargetLogits(
        logits, call, proposal, Processors(LogitsProcessorList([*others, penalty, penalty]))
    ).all()
    assert torch.equal(logits, before)
    assert not torch.equal(found, before)
