"""Known mistakes, planted one at a time: the checks of the distribution tests must reject each of
them.

A suite whose mutants pass proves nothing. Not mutants: leaving out the bonus token (slower, still
exact), a draft under other processors than the target (exact, if q is its true distribution),
one-hot sample matching without the round in its key (it becomes the coupled rule).
"""

import sys
from dataclasses import replace

import pytest
import torch
from transformers import LogitsProcessor
from transformers.generation import logits_process as lp

from mmdecode.accept import exact
from mmdecode.accept import rejection as rejection_rule
from mmdecode.accept.exact import Coupled, GreedyMatch, SampleMatch
from mmdecode.accept.rejection import Rejection
from mmdecode.decoder import Decoder
from mmdecode.engine.noise import Noise, Role
from mmdecode.engine.proposal import Proposal, Tree
from mmdecode.guide.cfg import CFG
from mmdecode.testing import drafts
from mmdecode.testing.checks import (
    SEED,
    assert_distribution,
    assert_lossless,
    bigram,
    check_adapter,
    distribution_of,
)
from mmdecode.testing.table import Table, TableAdapter, left_pad
from tests.support import seams
from tests.support.seams import edited

V = 4
MODEL = Table(V, seed=11, sharpness=1.5)
Q = bigram(V)
TREE = Tree((-1, -1, 0, 0, 1, 2))


def iid(ragged=False):
    return drafts.Bigram(Q, kinds=("iid",), ragged=ragged)


def warpers():
    return [lp.TemperatureLogitsWarper(0.5)]


class Recent(LogitsProcessor):
    """Of unknown type: makes the last token unlikely."""

    def __call__(self, input_ids, scores):
        last = input_ids[:, -1:].clamp_max(V - 1)  # the padding of ended rows is the id V
        return scores.scatter_add(1, last, torch.full_like(scores[:, :1], -2.0))


def cfg_distribution(prompt, new):
    conditional = MODEL.target_logits([*prompt, *new]).log_softmax(-1)
    unconditional = MODEL.target_logits([prompt[-1], *new]).log_softmax(-1)
    return 2.0 * (conditional - unconditional) + unconditional


# The checks; each gets the rule, draft or guide to use, or the sound ones


def rejection(rule=Rejection, draft=iid, processors=warpers):
    assert_distribution(
        lambda: Decoder(draft(), accept=rule()),
        MODEL,
        distribution_of(MODEL),
        processors=processors,
    )


def membership(draft=lambda: drafts.Bigram(Q, kinds=("deterministic",))):
    assert_distribution(
        lambda: Decoder(draft(), accept=SampleMatch()), MODEL, distribution_of(MODEL)
    )


def guided(guide=CFG):
    assert_distribution(
        lambda: Decoder(drafts.Random(), guide(2.0), accept=SampleMatch()), MODEL, cfg_distribution
    )


def unguided_bytes(processors=tuple):
    for draft in (drafts.Random, lambda: drafts.Random(TREE), lambda: drafts.FullTree(2)):
        for do_sample in (False, True):
            decoder = Decoder(draft(), seed=SEED)
            for eos in ([V - 1], None):
                options = {"do_sample": do_sample, "eos": eos, "processors": processors}
                assert_lossless(decoder, MODEL, distribution_of(MODEL), **options)


def guided_bytes(guide=CFG):
    for do_sample in (False, True):
        decoder = Decoder(drafts.FullTree(2), guide(2.0), seed=SEED)
        assert_lossless(decoder, MODEL, cfg_distribution, do_sample=do_sample)


def min_new():
    return [lp.MinNewTokensLengthLogitsProcessor(6, 6, V - 1)]


def known_prefixes():
    unguided_bytes(min_new)


def unknown_prefixes():
    unguided_bytes(lambda: [Recent()])


def scoring():
    ids, mask = left_pad([[1, 2, 3], [0, 0, 2, 1], [3], [2, 2]])
    inputs = {"salt": torch.arange(4)}
    check_adapter(TableAdapter, MODEL, ids, mask, inputs, tolerance=0.0)


CHECKS = [
    rejection,
    membership,
    guided,
    unguided_bytes,
    guided_bytes,
    known_prefixes,
    unknown_prefixes,
    scoring,
]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_sound_code_passes_every_check(check):
    check()


def rejected(check, *args, **kwargs):
    with pytest.raises(AssertionError, match=r"another distribution|the plain loop|differ by"):
        check(*args, **kwargs)


# Drafts that do not draw from what they claim


class ArgmaxClaimingSoftQ(drafts.Bigram):
    def draw(self, call, distribution, position):
        return distribution.argmax(-1)


class OtherTemperature(drafts.Bigram):
    def draw(self, call, distribution, position):
        return super().draw(call, distribution * 1.5, position)


class QOffByOne(drafts.Bigram):
    def draft(self, call, budget):
        proposal = super().draft(call, budget)
        return replace(proposal, log_q=proposal.log_q.roll(1, 1))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("draft", [ArgmaxClaimingSoftQ, OtherTemperature, QOffByOne])
def test_a_draft_that_claims_another_distribution_is_found(draft):
    rejected(rejection, draft=lambda: draft(Q, kinds=("iid",)))


class Peeking(drafts.TestDrafter):
    """Chooses how far to draft by the noise that will decide: the positions' rounds are biased."""

    def draft(self, call, budget):
        positions = call.rows.length[:, None] + torch.arange(2)
        noise = call.request.noise.gumbel(
            positions, Role.ACCEPT, self.vocab, trial=call.rows.rounds + 1
        )
        drafted = noise.argmax(-1)
        wanted = drafted[:, 1:] == 0  # only if the second position would become a zero
        return Proposal(tokens=drafted.masked_fill(~wanted, -1), kind="deterministic")


def test_a_draft_that_reads_the_acceptance_noise_is_found():
    rejected(membership, Peeking)


# Rules


def mutant_of(method, old, new):
    """The rejection rule with one piece of one of its methods replaced."""
    return type("Mutant", (Rejection,), {method: edited(getattr(Rejection, method), old, new)})


CHOICE = "next_token = call.request.noise.sample(p.log()[:, None], at, Role.RESIDUAL, rounds)[:, 0]"
RULES = {
    "ratio_upside_down": (
        "odds",
        "at_token(candidate.p, candidate.token), at_token(candidate.q, candidate.token)",
        "at_token(candidate.q, candidate.token), at_token(candidate.p, candidate.token)",
    ),
    "resampled_from_p": ("_chain", "residual(_at(p, last), _at(q, last))", "_at(p, last)"),
    "residual_of_the_first_q": (
        "_chain",
        "residual(_at(p, last), _at(q, last))",
        "residual(_at(p, last), q[:, 0])",
    ),
    "tested_by_the_law_behind": ("_chain", "self.followed(rows[:, :-1], q)", "rows[:, 1:]"),
    "a_stopped_chain_is_not_a_rejection": (
        "_chain",
        "stopped = pad(used, (0, 1)).gather(1, count[:, None])",
        "stopped = (count < size)[:, None]",
    ),
    "bonus_unwarped": (
        "__call__",
        CHOICE,
        "raw = target.raw()[:, -1].softmax(-1)\n"
        "    p = torch.where((count == proposal.size)[:, None], raw, p)\n    " + CHOICE,
    ),
    "bonus_is_the_argmax": (
        "__call__",
        CHOICE,
        CHOICE + "\n    next_token = torch.where(count == proposal.size, p.argmax(-1), next_token)",
    ),
    "bonus_from_q": (
        "__call__",
        CHOICE,
        "if proposal.size:\n"
        "        q_last = proposal.log_q[:, -1].softmax(-1)\n"
        "        full = (count == proposal.size)[:, None]\n"
        "        p = torch.where(full, q_last, p)\n    " + CHOICE,
    ),
    "one_noise_for_all_rounds": (
        "_draws",
        "noise.uniform(positions, Role.ACCEPT, trial=call.rows.rounds)",
        "noise.uniform(positions - call.rows.length[:, None], Role.ACCEPT)",
    ),
    "unused_nodes_are_tested": ("_chain", "proposal.tokens >= 0", "proposal.tokens >= -1"),
    "residual_unnormalised_by_inverse_cdf": (
        "__call__",
        CHOICE,
        "at = (call.rows.length + count)[:, None]\n"
        "    unit = call.request.noise.uniform(at, Role.RESIDUAL, call.rows.rounds)\n"
        "    next_token = (p.cumsum(-1) < unit).sum(-1).clamp_max(p.shape[-1] - 1)",
    ),
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("mutant", RULES)
def test_a_wrong_rejection_rule_is_found(mutant, monkeypatch):
    if mutant == "residual_unnormalised_by_inverse_cdf":
        monkeypatch.setattr(rejection_rule, "residual", lambda p, q: (p - q).clamp_min(0))
    ragged = mutant in ("unused_nodes_are_tested", "a_stopped_chain_is_not_a_rejection")
    rejected(rejection, mutant_of(*RULES[mutant]), lambda: iid(ragged))


def test_without_renormalising_a_gumbel_draw_is_still_right(monkeypatch):
    # argmax(log c r + G) does not depend on c: the mutant above needs another way of drawing
    monkeypatch.setattr(
        rejection_rule,
        "residual",
        lambda p, q: torch.where(((p - q) > 0).any(-1, keepdim=True), (p - q).clamp_min(0), p),
    )
    rejection()


def wor():
    return drafts.Siblings(Q, (3, 2), ("without_replacement",))


def iid_tree():
    return drafts.Siblings(Q, (3, 2), ("iid",))


class SameSiblings(drafts.Siblings):
    """Independent draws that are not: all siblings are one draw, or two never agree."""

    def __init__(self, distinct):
        super().__init__(Q, (3, 2), ("iid",))
        self.distinct = distinct

    def draw(self, call, distribution, position, width):
        if not self.distinct:
            return super().draw(call, distribution, position, 1).expand(-1, -1, width)
        plan = replace(call.plan, kind="without_replacement")
        return super().draw(replace(call, plan=plan), distribution, position, width)


class Ranked(drafts.Siblings):
    """Siblings in the order of their probability, not of their draw."""

    def draw(self, call, distribution, position, width):
        sampled = super().draw(call, distribution, position, width)
        best = distribution.gather(2, sampled).argsort(dim=-1, descending=True)
        return sampled.gather(2, best)


TREES = {
    "q_keeps_the_rejected_siblings": (wor, 'proposal.kind == "without_replacement"', "False"),
    "q_loses_siblings_that_were_drawn_anew": (
        iid_tree,
        'proposal.kind == "without_replacement"',
        "True",
    ),
    "q_not_renormalised": (wor, "q = q / q.sum(", "q = q / torch.ones_like(q).mean("),
    "siblings_share_their_noise": (wor, "draws[:, index]", "draws[:, 0]"),
    "siblings_of_the_parent_stay_drawn": (wor, "rejected = rejected & ~keep[:, None]", "pass"),
    "the_law_behind_a_child_is_its_parents": (
        wor,
        "torch.where(keep, child + 1, -1)).s",
        "node + 1).s",
    ),
    "p_stays_for_the_next_sibling": (
        iid_tree,
        "p = torch.where(stay[:, None], residual(p, q), p)",
        "later = residual(p, q) if index == len(tests) - 1 else p\n"
        "        p = torch.where(stay[:, None], later, p)",
    ),
}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("mutant", TREES)
def test_a_wrong_rule_for_siblings_is_found(mutant):
    draft, old, new = TREES[mutant]
    rejected(rejection, mutant_of("_tree", old, new), draft)


@pytest.mark.slow
def test_siblings_out_of_the_order_of_sampling_are_found():
    rejected(rejection, draft=lambda: Ranked(Q, (3, 2), ("without_replacement",)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("distinct", [False, True], ids=["one_draw", "never_equal"])
def test_siblings_that_are_not_independent_are_found(distinct):
    rejected(rejection, draft=lambda: SameSiblings(distinct))


@pytest.mark.slow
def test_siblings_tested_in_the_wrong_order_are_found(monkeypatch):
    sound = rejection_rule._tests
    backwards = lambda *args: sorted(  # noqa: E731
        sound(*args), key=lambda nodes: (len(nodes), -int(nodes[0]))
    )
    monkeypatch.setattr(rejection_rule, "_tests", backwards)
    rejected(rejection, draft=wor)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("check", [rejection, membership])
def test_noise_that_is_reused_is_found(check, monkeypatch):
    sound = Noise._state

    def state(self, positions, role, trial):
        return sound(self, torch.zeros_like(positions), role, None)

    monkeypatch.setattr(Noise, "_state", state)
    rejected(check)


def test_padding_with_token_zero_is_found(monkeypatch):
    zero = lambda self, keep: replace(self, tokens=self.tokens.masked_fill(~keep, 0))  # noqa: E731
    monkeypatch.setattr(Proposal, "masked", zero)
    rejected(rejection, draft=lambda: iid(ragged=True))


# Distribution and guide


class RootGuide(CFG):
    """Evaluates the other branch at the root alone."""

    def apply(self, constants, call, proposal, outputs):
        other = outputs["unconditional"]
        outputs = {**outputs, "unconditional": replace(other, logits=other.logits[:, :1])}
        return super().apply(constants, call, proposal, outputs)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("check", [guided, guided_bytes])
def test_a_guide_that_reads_the_root_prefix_is_found(check):
    rejected(check, RootGuide)


def test_known_processors_at_the_root_prefix_are_found(monkeypatch):
    old = "self.depths = torch.nn.functional.pad(depths, (1, 0))"
    new = "self.depths = torch.zeros_like(torch.nn.functional.pad(depths, (1, 0)))"
    seams.NODES.edit(monkeypatch, old, new)
    rejected(known_prefixes)


def test_unknown_processors_at_the_root_prefix_are_found(monkeypatch):
    seams.without_prefix(monkeypatch)
    rejected(unknown_prefixes)


def test_a_temperature_left_off_after_the_first_position_is_found(monkeypatch):
    def first_only(sound):
        return lambda self, scores, nodes: torch.cat(
            [sound(self, scores, nodes)[:, :1], scores[:, 1:]], 1
        )

    seams.PROCESS_ALL.plant(monkeypatch, first_only)
    rejected(rejection)


# Cache, masks, positions, rows


def keep_one_more(sound):
    """After a rejection of everything, the first drafted node counts as committed."""
    return lambda self, count, path=None: sound(self, count + (count == 1), path)


@pytest.mark.parametrize("check", [scoring, unguided_bytes, membership])
def test_a_stale_entry_after_a_rejection_is_found(check, monkeypatch):
    seams.COMMIT_TO_CACHE.plant(monkeypatch, keep_one_more)
    rejected(check)


@pytest.mark.parametrize("check", [scoring, unguided_bytes])
def test_nodes_left_where_they_were_written_are_found(check, monkeypatch):
    seams.COMMIT_TO_CACHE.plant(monkeypatch, seams.nodes_stay_where_they_were_written)
    rejected(check)


def edited_mask(old, new):
    return lambda sound: edited(sound, old, new)


MASKS = {
    "slots_behind_the_block": edited_mask(
        "(relative < 0)[:, None]", "((relative < 0) | (relative >= width))[:, None]"
    ),
    "padding": seams.padding_is_seen,
    "later_tokens": edited_mask("seen = where <= last", "seen = where <= last + 1"),
    "siblings": seams.siblings_see_each_other,
}


def test_a_chain_that_forgets_what_is_before_it_is_found(monkeypatch):
    forgets = ("seen = where <= last", "seen = (where <= last) & (where >= 0)")
    seams.BLOCK_MASK.edit(monkeypatch, *forgets)
    rejected(unguided_bytes)


@pytest.mark.parametrize("mutant", MASKS)
@pytest.mark.parametrize("check", [scoring, unguided_bytes])
def test_a_wrong_mask_is_found(check, mutant, monkeypatch):
    seams.BLOCK_MASK.plant(monkeypatch, MASKS[mutant])
    rejected(check)


@pytest.mark.parametrize("check", [scoring, unguided_bytes])
def test_positions_that_count_padding_are_found(check, monkeypatch):
    seams.RUN_BRANCHES.edit(monkeypatch, "(begin - pads +", "(begin +")
    rejected(check)


def test_a_row_that_follows_its_neighbour_is_found(monkeypatch):
    def together(sound):
        def cut(self, call, block, count):
            count, ended = sound(self, call, block, count)
            return count, ended.any().expand_as(ended)

        return cut

    seams.CUT.plant(monkeypatch, together)
    rejected(unguided_bytes)


@pytest.mark.parametrize("rule", [GreedyMatch, Coupled])
def test_a_rule_that_trusts_the_draft_is_found(rule, monkeypatch):
    monkeypatch.setattr(
        sys.modules[rule.__module__],
        "follow",
        edited(exact.follow, "proposal.tokens == wanted", "proposal.tokens >= 0"),
    )
    rejected(unguided_bytes)
