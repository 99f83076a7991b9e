"""One drafter or guide for two threads, or two models in turn: calls do not affect each other."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.draft.assistant import Assistant
from mmdecode.engine.contracts import DraftSession
from mmdecode.testing.checks import run_rows
from mmdecode.testing.table import Table
from tests.exactness.test_matrix import GUIDES, MODEL, OTHER, SEED, V, make

DRAFTERS = registry.names("draft")
LEARN = ("adaptive", "swift")
"""What these draft depends on earlier calls, though never what is written."""
PROMPTS = [[[1, 0, 2], [3, 1]], [[2, 2, 0, 1], [0], [1, 3, 3]]]
"""Of two callers: batches of unlike sizes, so that states which are mixed up do not fit."""
MODELS = [MODEL, Table(V, seed=77), MODEL]
modes = pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "coupled"])


def decoded(name, drafter, model, prompts, do_sample, guide=None):
    """Ids by row, and how much was drafted and accepted."""
    decoder = Decoder(drafter, guide, seed=SEED, draft_guided=True)
    rows = run_rows(decoder, model, prompts, do_sample=do_sample, max_new_tokens=12)
    return rows, None if name in LEARN else (decoder.stats.drafted, decoder.stats.accepted)


@functools.cache
def alone(name, model, caller, do_sample):
    """By a drafter that nobody else uses."""
    return decoded(name, make("draft", name), model, PROMPTS[caller], do_sample)


def assert_threads_do_not_meet(name, drafter, do_sample):
    both, begin = threading.Barrier(2, timeout=20), drafter.begin

    def at_once(*given):
        session = begin(*given)
        both.wait()  # nobody goes on before both calls are open
        return session

    drafter.begin = at_once
    with ThreadPoolExecutor(2) as threads:
        calls = [
            threads.submit(decoded, name, drafter, MODEL, prompts, do_sample) for prompts in PROMPTS
        ]
        found = [call.result() for call in calls]
    assert found == [alone(name, MODEL, caller, do_sample) for caller in (0, 1)]


@modes
@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", DRAFTERS)
def test_two_threads_may_use_one_drafter(name, do_sample):
    assert_threads_do_not_meet(name, make("draft", name), do_sample)


@modes
@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", DRAFTERS)
def test_two_models_may_use_one_drafter_in_turn(name, do_sample):
    shared = make("draft", name)
    for model in MODELS:
        found = decoded(name, shared, model, PROMPTS[1], do_sample)
        assert found == alone(name, model, 1, do_sample)


def guided(guide, model, caller, do_sample):
    drafter = make("draft", "lookup")
    return decoded("lookup", drafter, model, PROMPTS[caller], do_sample, guide)


@pytest.mark.one_in(8)
@modes
@pytest.mark.filterwarnings("ignore:.*is inert in greedy generation:UserWarning")
@pytest.mark.parametrize("name", GUIDES)
def test_two_threads_and_two_models_may_use_one_guide(name, do_sample):
    shared = make("guide", name)
    both, begin = threading.Barrier(2, timeout=20), shared.begin

    def at_once(*given):
        constants = begin(*given)
        both.wait()
        return constants

    expected = [guided(make("guide", name), MODEL, caller, do_sample) for caller in (0, 1)]
    if not shared.neutral:
        shared.begin = at_once
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(guided, shared, MODEL, caller, do_sample) for caller in (0, 1)]
        assert [call.result() for call in calls] == expected
    shared.begin = begin
    for model in MODELS:
        own = make("guide", name)
        assert guided(shared, model, 1, do_sample) == guided(own, model, 1, do_sample)


class Kept(Assistant):
    """The mistake: the drafter holds what belongs to a call."""

    def begin(self, call, prefill):
        self.session = super().begin(call, prefill)
        return KeptSession(call, self)


class KeptSession(DraftSession):
    def __init__(self, call, drafter):
        super().__init__(call)
        self.drafter = drafter

    def propose(self, budget):
        return self.drafter.session.propose(budget)

    def observe(self, *given):
        self.drafter.session.observe(*given)


def test_a_call_that_is_kept_in_the_drafter_is_found():
    with pytest.raises((AssertionError, RuntimeError)):
        assert_threads_do_not_meet("assistant", Kept(OTHER, length=2), do_sample=False)
