"""Every item of a batch ends with a result or a failure of its own."""

import weakref

import pytest
import torch

from mmdecode.engine.stats import Stats
from mmdecode.errors import InputError, OptionError
from mmdecode.runs.items import ENOUGH, Failed, Watch, each, tried
from tests.support.faults import ERRORS, failure_of


@pytest.mark.parametrize("name", ERRORS)
def test_whatever_an_item_raises_it_fails_alone(name):
    sizes = []

    def run(items):
        sizes.append(len(items))
        if 5 in items:
            raise ERRORS[name]()
        return [item * item for item in items]

    found = dict(each(range(8), run, hint="buy more"))
    failed = found.pop(5)
    assert found == {item: item * item for item in range(8) if item != 5}
    text, kind = failure_of(name)
    assert failed.kind == kind and text in failed.error
    assert sizes == [8, 4, 4, 2, 1, 1, 2]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_the_process_passes_through(error):
    def run(items):
        raise error

    with pytest.raises(error):
        list(each([1, 2], run, hint=""))


def test_what_a_failed_batch_held_is_let_go_before_its_halves_run():
    class Held:
        pass

    alive, held = [], []

    def run(items):
        alive.append(sum(one() is not None for one in held))
        mine = Held()
        held.append(weakref.ref(mine))
        if len(items) > 1:
            raise torch.OutOfMemoryError
        return items

    assert [found for _, found in each([1, 2, 3], run, hint="")] == [1, 2, 3]
    assert alive == [0] * 5


def test_what_failed_is_not_counted():
    stats = Stats()

    def run(items):
        stats.calls += 1
        stats.scored(torch.ones(len(items), 4, dtype=torch.long))
        if 1 in items:
            raise ValueError
        return items

    list(each([0, 1, 2, 3], run, hint="", attempt=stats.attempt))
    assert (stats.calls, stats.passes, stats.rounds) == (2, 2, 3)


def test_the_trace_of_an_unknown_error_is_shown_where_it_is_asked_for(monkeypatch, capsys):
    def run():
        raise ZeroDivisionError("by nothing")

    found = tried(run, "")
    assert found.error.startswith("ZeroDivisionError: by nothing; ")
    assert "MMDECODE_DEBUG=1" in found.error
    assert not capsys.readouterr().err
    monkeypatch.setenv("MMDECODE_DEBUG", "1")
    tried(run, "")
    assert "in run\n" in capsys.readouterr().err


def outcomes(*problems):
    for index, problem in enumerate(problems):
        yield index, None if problem is None else Failed.of(problem, "")


def test_an_error_of_the_configuration_that_every_item_has_is_the_jobs():
    wrong = [OptionError("a=1; expected 2") for _ in range(3)]
    with pytest.raises(OptionError, match="a=1"):
        list(Watch().released(outcomes(*wrong)))
    assert list(Watch().released(outcomes(*wrong, None))) == [0, 1, 2, 3]
    assert list(Watch().released(outcomes(*wrong, OptionError("b=1; expected 2")))) == [0, 1, 2, 3]
    assert list(Watch().released(outcomes(InputError("x"), InputError("x")))) == [0, 1]
    assert list(Watch().released(outcomes())) == []


def test_a_job_whose_first_items_fail_alike_by_the_configuration_stops_early():
    seen = []

    def many():
        for index in range(1000):
            seen.append(index)
            yield index, Failed.of(OptionError("a=1; expected 2"), "")

    with pytest.raises(OptionError, match="a=1"):
        list(Watch().released(many()))
    assert len(seen) == ENOUGH


def test_what_one_call_has_shown_counts_for_those_that_follow():
    watch = Watch()
    assert list(watch.released(outcomes(None))) == [0]
    assert list(watch.released(outcomes(OptionError("a=1; expected 2")))) == [0]


def test_what_was_halved_for_lack_of_memory_is_known_by_its_last_size_and_nothing_else_is():
    def run(items):
        if 3 in items and len(items) > 1:
            raise torch.OutOfMemoryError
        if 9 in items:
            raise ValueError
        return items

    watch = Watch()
    for batch in (range(8), (8, 9)):
        list(each(batch, run, hint="", watch=watch))
    assert watch.halved == {"0": 2, "1": 2, "2": 1, "3": 1} | dict.fromkeys("4567", 4)
