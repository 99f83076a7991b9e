"""Control of the draft length: by the drafter's uncertainty, batch size, the cost of a round."""

import itertools
import random
from types import SimpleNamespace

import pytest

from mmdecode.decoder import Decoder
from mmdecode.draft.adaptive import Adaptive
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.none import NoDraft
from mmdecode.draft.target import TargetDistribution
from mmdecode.draft.trees import affordable, plan, value
from mmdecode.errors import OptionError
from mmdecode.testing import check_draft
from mmdecode.testing.checks import PROMPTS, SEED, assert_lossless, distribution_of, run_rows
from mmdecode.testing.table import Table
from tests.support.clock import call_after
from tests.support.rounds import rounds_of

MODEL, OTHER = Table(5, seed=3), Table(5, seed=8, sharpness=3.0)
modes = pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "coupled"])


# By uncertainty


def test_a_drafter_that_stops_when_uncertain_passes_the_public_check():
    check_draft(lambda: Assistant(OTHER, 4, max_rejection_probability=0.5))


def assert_stops(max_rejection_probability):
    decoder = Decoder(Assistant(OTHER, 6, max_rejection_probability=max_rejection_probability))
    rows = rounds_of(decoder, lambda d: run_rows(d, MODEL, PROMPTS, max_new_tokens=40))
    lengths = set()
    for prompt, rounds in zip(PROMPTS, rows, strict=True):
        for written, drafted in rounds:
            tokens, path_probability = [], 1.0
            while 1 - path_probability <= max_rejection_probability and len(tokens) < min(
                6, 40 - 1 - len(written)
            ):
                distribution = OTHER.target_logits([*prompt, *written, *tokens]).softmax(-1)
                tokens.append(int(distribution.argmax()))
                path_probability *= float(distribution.max())
            assert drafted == tokens
            lengths.add(len(tokens))
    return lengths


@pytest.mark.parametrize(
    ("max_rejection_probability", "lengths"), [(0.0, {1}), (0.5, None), (1.0, None)]
)
def test_a_row_stops_after_the_token_that_is_one_risk_too_many(max_rejection_probability, lengths):
    found = assert_stops(max_rejection_probability)
    assert found == lengths if lengths else len(found) > 2


def test_a_stop_before_the_uncertain_token_is_found(monkeypatch):
    from mmdecode.draft.assistant import Going

    sound = Going.submitted
    monkeypatch.setattr(
        Going, "submitted", lambda self, token: sound(self, token).masked_fill(self.kept < 0.8, -1)
    )
    with pytest.raises(AssertionError):
        assert_stops(0.5)


@modes
def test_where_all_rows_have_stopped_the_drafting_model_rests(do_sample, monkeypatch):
    steps = []
    distribution = TargetDistribution.__call__
    monkeypatch.setattr(
        TargetDistribution,
        "__call__",
        lambda self, *a: (steps.append(1), distribution(self, *a))[1],
    )
    counts = {}
    for max_rejection_probability in (0.3, 1.0):
        steps.clear()
        decoder = Decoder(
            Assistant(OTHER, 6, max_rejection_probability=max_rejection_probability), seed=SEED
        )
        assert_lossless(decoder, MODEL, distribution_of(MODEL), do_sample=do_sample)
        counts[max_rejection_probability] = len(steps)
    assert counts[0.3] < 0.7 * counts[1.0]


def test_a_risk_is_a_probability():
    for max_rejection_probability in (-0.1, 1.1):
        with pytest.raises(OptionError, match="max_rejection_probability"):
            Assistant(OTHER, max_rejection_probability=max_rejection_probability)


# By batch size


def test_batches_of_another_size_are_measured_apart(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)
    adaptive = Adaptive(NoDraft(), (None, 0))
    dice = random.Random(0)
    used = {1: [], 16: []}
    for _ in range(60):
        size = dice.choice([1, 13, 16])
        call = call_after(21, size)
        session = adaptive.begin(call, None)
        levels = session.depth.levels
        pays = size == 1  # a draft does with one row, and loses with many
        for _ in range(21):
            session.observe(None, None, None)
            clock.now += 0.5 if (levels is None) == pays else 1.0
        session.close()
        used[1 if size == 1 else 16].append(levels)
    assert used[1][-8:].count(None) >= 7
    assert used[16][-15:].count(0) >= 13


# By cost

RATES = [[0.5, 0.2, 0.1], [0.4, 0.2, 0.1], [0.3, 0.1, 0.1]]


@pytest.mark.parametrize("step", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("node", [0.0, 0.01, 0.1])
def test_the_tree_that_is_chosen_is_the_fastest(step, node):
    def seconds(nodes, levels):
        return 1 + step * levels + node * nodes

    def speed(paths):
        return value(RATES, paths) / seconds(len(paths), max(map(len, paths), default=0))

    found = affordable(RATES, seconds, most=8)
    every = [
        plan(RATES[:levels], nodes) for levels, nodes in itertools.product((1, 2, 3), (1, 2, 4, 8))
    ]
    assert speed(found) == pytest.approx(max(speed(paths) for paths in [[], *every]))


def test_a_draft_that_would_lose_is_switched_off():
    assert affordable(RATES, lambda nodes, levels: 1 + 2 * levels) == []
    assert affordable([[0.0]], lambda nodes, levels: 1.0) == []
    assert affordable(RATES, lambda nodes, levels: 1.0, most=0) == []
    free = affordable(RATES, lambda nodes, levels: 1.0, most=16)
    assert value(RATES, free) == pytest.approx(value(RATES, plan(RATES, 16)))
