"""Shipped models generate, with every drafter and guide, the ids that a file holds."""

import copy

import pytest

from tests.exactness import baseline
from tests.exactness.baseline import Case

QUICK = [
    Case("lm-synth", guide, drafter, rule, how)
    for guide, drafter, rule, how in (
        ("none", "none", "greedy", "batch"),
        ("none", "lookup", "greedy", "captured"),
        ("none", "eagle", "coupled", "batch"),
        ("none", "jacobi", "coupled", "alone"),
        ("none", "assistant", "rejection", "batch"),
        ("cfg", "medusa", "greedy", "batch"),
        ("dola", "layer_skip", "coupled", "batch"),
    )
] + [
    Case("llava-scenes", "vcd", "medusa", "coupled", "batch"),
    Case("llava-scenes", "pai", "eagle", "greedy", "batch"),
    Case("whisper-synth", "whisper_cd", "medusa", "greedy", "batch"),
    Case("llamagen-digits", "guidance", "recycling", "coupled", "batch"),
]


def test_some_ids_are_those_of_the_baseline():
    found = baseline.differences(QUICK)
    assert not found, "\n".join(found)


def test_an_id_that_changed_and_an_entry_that_is_new_are_named(monkeypatch):
    kept = copy.deepcopy(baseline.kept())
    changed, new = QUICK[:2]
    kept["exact"][changed.name] = [[0], [0]]
    del kept["exact"][new.name]
    monkeypatch.setattr(baseline, "kept", lambda: kept)
    messages = baseline.differences([changed, new])
    assert [changed.name in messages[0], new.name in messages[1], len(messages)] == [True, True, 2]


def test_the_file_is_read_as_it_was_written():
    sections = baseline.kept()
    assert sum(map(len, sections.values())) > 5000
    for entries in sections.values():
        assert baseline.unpacked(baseline.packed(entries)) == entries


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a busy machine takes several minutes for the largest
@pytest.mark.parametrize("model", baseline.MODELS)
def test_ids_are_those_of_the_baseline(model):
    found = baseline.differences(baseline.cases([model], half=True))
    assert not found, "\n".join(found)
    known = {case.name for case in baseline.cases([model])}
    kept = {name for entries in baseline.kept().values() for name in entries}
    assert {name for name in kept if name.startswith(f"{model}/")} <= known
