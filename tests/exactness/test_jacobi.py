"""Jacobi windows: every variant that claims to be exact is enumerated, every biased one must fail.

The variants and the mutants are those of the field's released samplers.
"""

import math
from dataclasses import replace

import pytest
import torch

from mmdecode.accept import rejection as rejection_rule
from mmdecode.decoder import Decoder
from mmdecode.draft.jacobi import STARTS, Jacobi, JacobiSession
from mmdecode.engine import window
from mmdecode.errors import OptionError
from mmdecode.image_ar.grammar import Grammar
from mmdecode.models.image_layout import Layout
from mmdecode.testing import mistakes
from mmdecode.testing.checks import (
    PROMPTS,
    SEED,
    assert_distribution,
    assert_lossless,
    distribution_of,
    run_rows,
)
from mmdecode.testing.table import Table, decode

GRID = Layout(rows=2, columns=2, ids=torch.arange(4))
LINES = Layout(rows=2, columns=2, ids=torch.tensor([2, 0, 3]), newline=1)
MODEL = Table(4, seed=11, sharpness=1.5, layout=GRID)
RULED = Table(4, seed=11, sharpness=1.5, layout=LINES)

VARIANTS = {
    **{f"adaptive-{start}": {"start": start} for start in STARTS},
    **{f"redraw-{start}": {"start": start, "continuation": "redraw"} for start in STARTS},
    **{f"shared-{start}": {"start": start, "continuation": "shared"} for start in STARTS},
    "tree": {"siblings": 2, "levels": 2},
    "tree-shared-above_law": {"siblings": 3, "continuation": "shared", "start": "above_law"},
    "tree-redraw": {"siblings": 2, "levels": 1, "continuation": "redraw"},
    "tree-above_law": {"siblings": 3, "levels": 2, "start": "above_law"},
}


@pytest.mark.one_in(24)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_has_the_joint_distribution_of_enumeration(name):
    options = VARIANTS[name]
    make = lambda: Decoder(Jacobi(4, **options), accept="rejection")  # noqa: E731
    samples = 20_000 if name.startswith("tree") else 40_000
    assert_distribution(make, MODEL, distribution_of(MODEL), samples=samples)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["adaptive-random", "shared-left", "redraw-above_law", "tree"])
def test_forced_tokens_keep_their_positions_and_the_rest_the_distribution(name):
    options = VARIANTS[name]
    make = lambda: Decoder(Jacobi(5, **options), accept="rejection")  # noqa: E731
    grammar = lambda: [Grammar(LINES, prompt_length=3)]  # noqa: E731
    found = assert_distribution(
        make, RULED, distribution_of(RULED), length=5, samples=20_000, processors=grammar
    )
    assert bool((found[:, 2] == 1).all()) and not bool((found[:, [0, 1, 3, 4]] == 1).any())


@pytest.mark.one_in(6)
@pytest.mark.parametrize("window", [1, 2, 7, 12])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_greedy_and_coupled_tokens_are_those_of_the_plain_loop(options, window):
    big = Table(5, seed=3, layout=Layout(rows=4, columns=3, ids=torch.arange(5)))
    for do_sample in (False, True):
        decoder = Decoder(Jacobi(window, **options), seed=SEED)
        assert_lossless(decoder, big, distribution_of(big), do_sample=do_sample, max_new_tokens=12)


def test_a_row_of_a_ragged_batch_draws_what_it_draws_alone():
    for options in VARIANTS.values():
        make = lambda options=options: Decoder(Jacobi(4, **options), None, "rejection", SEED)  # noqa: E731
        together = run_rows(make(), MODEL, PROMPTS, do_sample=True, max_new_tokens=4)
        alone = [run_rows(make(), MODEL, [p], do_sample=True, max_new_tokens=4)[0] for p in PROMPTS]
        assert together == alone


# Closed forms


def passes(draft, model, length, rows=1, accept="rejection", do_sample=True):
    decoder = Decoder(draft, accept=accept if do_sample else "auto", seed=SEED)
    ids = torch.tensor([[1, 0, 2]]).repeat(rows, 1)
    decode(model, ids, decoder, do_sample=do_sample, max_new_tokens=length, request=range(rows))
    return decoder.stats.rounds / rows


def test_a_constant_token_copied_from_its_neighbour_takes_one_pass_per_window():
    size = Layout(rows=1, columns=30, ids=torch.arange(4))
    constant = Table(4, bias={2: 1000.0}, layout=size)
    # the prompt decides the first token; the rest are 29 of 8 a pass
    assert passes(Jacobi(8, "left"), constant, 30) == math.ceil(29 / 8)
    assert passes(Jacobi(8, "left"), constant, 30, do_sample=False) == math.ceil(29 / 8)


@pytest.mark.parametrize("continuation", ["adaptive", "redraw"])
def test_guesses_from_a_distribution_that_no_longer_moves_are_all_kept(continuation):
    blind = Table(6, seed=3, blind=True, sharpness=1.0)
    draft = Jacobi(9, continuation=continuation)
    # all guesses that a pass has scored are right: at worst every other pass begins from nothing
    assert passes(draft, blind, 81, rows=50) < 2 * 80 / 9 + 1


def test_a_window_of_one_token_is_the_plain_loop():
    smooth = Table(6, seed=5, sharpness=0.7)
    adaptive, redrawn, plain = (
        passes(draft, smooth, 60, rows=40)
        for draft in (Jacobi(12), Jacobi(12, continuation="redraw"), Jacobi(1))
    )
    assert adaptive < 0.5 * plain and redrawn < 0.5 * plain and plain == 59


def test_what_a_window_may_be():
    for options in ({"window": 0}, {"start": "up"}, {"continuation": "coupled"}, {"siblings": 0}):
        with pytest.raises(OptionError, match=r"expected|must be"):
            Jacobi(**options)
    with pytest.raises(OptionError, match=r"a window of 9 tokens is larger than the image.*4"):
        passes(Jacobi(9), MODEL, 4)


# Mutants: the biased rows of the table; each is caught by the enumeration above


def caught(options=None, model=MODEL, accept="rejection", window=4):
    options = {"start": "random"} | (options or {})
    make = lambda: Decoder(Jacobi(window, **options), accept=accept)  # noqa: E731
    with pytest.raises(AssertionError, match="have another distribution"):
        assert_distribution(make, model, distribution_of(model))


def test_a_kept_token_with_its_old_distribution_is_caught():
    with mistakes.stale_distribution():
        caught()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("record", ["new", "old"])
def test_a_token_kept_without_a_test_is_caught(record, monkeypatch):
    sound = window.continued

    def untested(outcome, proposal, target, call):
        result = sound(outcome, proposal, target, call)
        size = proposal.size
        if not size:
            return result
        source = outcome.num_accepted[:, None] + 1 + torch.arange(size)
        before = source.clamp_max(size - 1)
        old = proposal.tokens.gather(1, before)
        q = proposal.log_q.gather(1, before[..., None].expand_as(proposal.log_q))
        p = result.logits
        stay = (source < size) & (result.tokens >= 0)
        if record == "old":  # kept where it is likely enough by what the pass says
            likely = p.softmax(-1).gather(2, old.clamp_min(0)[..., None])[..., 0] > 0.3
            stay &= likely
        tokens = torch.where(stay, old, result.tokens)
        distributions = torch.where(stay[..., None], q, p) if record == "old" else p
        return replace(result, tokens=tokens, logits=distributions)

    monkeypatch.setattr(window, "continued", untested)
    caught()


def test_redrawing_from_the_distribution_instead_of_the_residual_is_caught():
    with mistakes.resampled_from_p():
        caught({"continuation": "redraw"})


def test_redrawing_a_tail_from_the_distribution_instead_of_the_residual_is_caught(monkeypatch):
    monkeypatch.setattr(window, "residual", lambda p, q: p)
    caught()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("record", ["old", "new"])
def test_a_batch_that_commits_the_shortest_row_and_keeps_stale_distributions_is_caught(
    record, monkeypatch
):
    """Keeps the draft's distribution beyond the commit, as published; with the new one it holds."""

    continued = window.continued
    before = []  # the outcomes of the rule, before rows ahead give back what they accepted

    class Shortest(rejection_rule.Rejection):
        def __call__(self, proposal, target, call):
            sound = super().__call__(proposal, target, call).of_active(call.rows.active)
            before.append(sound)
            least = shortest(sound)
            size = proposal.size
            if not size:
                return sound
            own = proposal.tokens.gather(1, least.clamp_max(size - 1)[:, None])[:, 0]
            ahead = sound.num_accepted > least
            return replace(
                sound,
                path=torch.where(torch.arange(size) < least[:, None], sound.path, -1),
                num_accepted=least,
                next_token=torch.where(ahead, own, sound.next_token),
            )

    def shortest(sound):
        pairs = sound.num_accepted.view(-1, 2)
        return pairs.amin(1, keepdim=True).expand_as(pairs).reshape(-1)

    def kept(outcome, proposal, target, call):
        sound, size = before[-1], proposal.size
        left = continued(sound, proposal, target, call)
        if not size:
            return left
        least = shortest(sound)
        cut = sound.num_accepted - least
        ahead, order = cut > 0, torch.arange(size)
        source = (least[:, None] + 1 + order).clamp_max(size - 1)
        given = (order < cut[:, None] - 1) & ahead[:, None]
        record_from = proposal.log_q if record == "old" else target.all()
        q = record_from.gather(1, source[..., None].expand_as(proposal.log_q))
        # after what was given back stand the decided token and the sound window
        shift = (order - cut[:, None]).clamp_min(0)
        tokens = left.tokens.gather(1, shift)
        logits = left.logits.gather(1, shift[..., None].expand_as(q))
        here = order == cut[:, None] - 1
        tokens = torch.where(here, sound.next_token[:, None], tokens)
        rows = target.all().gather(1, (least + cut)[:, None, None].expand(-1, 1, q.shape[-1]))
        logits = torch.where(here[..., None], rows, logits)
        tokens = torch.where(given, proposal.tokens.gather(1, source), tokens)
        logits = torch.where(given[..., None], q, logits)
        room = (least[:, None] + 1 + order) <= size
        return replace(
            left,
            tokens=torch.where(ahead[:, None], tokens.masked_fill(~room, -1), left.tokens),
            logits=torch.where(ahead[:, None, None], logits, left.logits),
        )

    monkeypatch.setattr(window, "continued", kept)
    if record == "old":
        caught({"continuation": "redraw"}, accept=Shortest())
        return
    make = lambda: Decoder(Jacobi(4, continuation="redraw"), accept=Shortest())  # noqa: E731
    assert_distribution(make, MODEL, distribution_of(MODEL))


def test_siblings_that_forget_which_came_first_are_caught(monkeypatch):
    sound = JacobiSession._with_siblings

    def shuffled(self, *given):
        proposal = sound(self, *given)
        first, second = proposal.tokens[:, :1], proposal.tokens[:, 1:2]
        swap = second > first  # by their value: no longer in the order of drawing
        front = torch.where(swap, torch.cat([second, first], 1), proposal.tokens[:, :2])
        return replace(proposal, tokens=torch.cat([front, proposal.tokens[:, 2:]], 1))

    monkeypatch.setattr(JacobiSession, "_with_siblings", shuffled)
    caught({"siblings": 2, "levels": 1})


def test_a_guess_that_reads_the_noise_of_its_own_test_is_caught(monkeypatch):
    from mmdecode.engine.noise import Role

    def leaked(self, positions, log_q):
        noise, trial = self.call.request.noise, self.call.rows.rounds
        return (
            log_q + noise.gumbel(positions, Role.RESIDUAL, log_q.shape[-1], trial=trial)
        ).argmax(-1)

    assert callable(JacobiSession._sampled)
    monkeypatch.setattr(JacobiSession, "_sampled", leaked)
    caught()
