"""Files of the next batch are read while one is decoded, and nothing else changes."""

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from mmdecode.runs import ahead
from mmdecode.runs.ahead import BLOCKS, read_ahead
from mmdecode.runs.crashes import InFlight, suspects_in, watched


@dataclass(frozen=True)
class File:
    name: str
    read: Callable[..., object]


def files(count, begun, wait=None, broken=()):
    def read(name, *how):
        begun.append((name, threading.current_thread() is threading.main_thread()))
        return blocks(name)

    def blocks(name):
        for number in range(3 * BLOCKS):
            if name in broken and number == broken[name]:
                raise ValueError(name)
            yield name, number

    return [File(n, lambda *how, n=n: read(n, *how)) for n in range(count)]


def test_sources_are_read_ahead_in_order_and_no_further_than_asked():
    begun = []
    sources = read_ahead(files(9, begun), 3)
    assert not begun
    first = sources[0].read()
    until(lambda: len(begun) == 4)
    assert sorted(begun) == [(0, True), (1, False), (2, False), (3, False)]
    for number, source in enumerate(sources[1:], 1):
        assert list(source.read()) == [(number, block) for block in range(3 * BLOCKS)]
    assert list(first) == [(0, block) for block in range(3 * BLOCKS)]
    until(lambda: len(begun) == 9)
    assert next(sources[4].read()) == (4, 0)  # once more


def test_only_the_first_blocks_are_read_ahead():
    taken = itertools.count()
    one = File("a", lambda: (next(taken) for _ in range(10 * BLOCKS)))
    sources = read_ahead([File("b", lambda: 1), one], 1)
    assert sources[0].read() == 1
    content = sources[1].read()
    assert next(taken) == BLOCKS
    assert len(list(content)) == 10 * BLOCKS


@pytest.mark.parametrize("at", [0, 2, BLOCKS + 1])
def test_what_reading_raises_is_raised_where_it_is_read_after_the_blocks_before(at):
    sources = read_ahead(files(2, [], broken={1: at}), 1)
    list(sources[0].read())
    content = sources[1].read()
    assert [next(content) for _ in range(at)] == [(1, block) for block in range(at)]
    with pytest.raises(ValueError, match="1"):
        next(content)


def test_files_that_are_read_at_once_are_all_noted(tmp_path):
    note, gate = InFlight(tmp_path / "note"), threading.Event()

    def read(name):
        if name != "a":
            gate.wait(10)
        return name

    made = [watched(File(n, lambda n=n: read(n)), note, n, "", "") for n in "abc"]
    sources = read_ahead(made, 2)
    assert sources[0].read() == "a"
    until(lambda: sorted(suspects_in([tmp_path / "note"])) == ["b", "c"])
    gate.set()
    assert [source.read() for source in sources[1:]] == ["b", "c"]
    until(lambda: not suspects_in([tmp_path / "note"]))
    note.close()


def until(true):
    for _ in range(1000):
        if true():
            return
        threading.Event().wait(0.01)
    raise AssertionError("in vain")


def without_end(source, how):
    return itertools.islice(source.read(*how), BLOCKS)


def without_error(source, how):
    def quiet(content):
        try:
            yield from content
        except ValueError:
            return

    return quiet(source.read(*how))


def everything(source, how):
    return iter(list(source.read(*how)))


def errors_of_the_second_block():
    test_what_reading_raises_is_raised_where_it_is_read_after_the_blocks_before(2)


@pytest.mark.parametrize(
    ("mistake", "noticed_by"),
    [
        (without_end, test_sources_are_read_ahead_in_order_and_no_further_than_asked),
        (without_error, errors_of_the_second_block),
        (everything, test_only_the_first_blocks_are_read_ahead),
    ],
)
def test_broken_reading_is_noticed(mistake, noticed_by, monkeypatch):
    monkeypatch.setattr(ahead, "_begin", mistake)
    with pytest.raises((AssertionError, pytest.fail.Exception, StopIteration)):
        noticed_by()
