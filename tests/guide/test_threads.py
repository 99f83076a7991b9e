"""Calls of several threads on one model: they do not affect each other."""

import threading

import pytest

from tests.support.vision import decode

GUIDES = ["dcla:tau=2", "dola:bucket=all", "pai", "causalmm:released=true"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("guide", GUIDES)
def test_calls_that_overlap_do_not_change_one_another(guide):
    plain, expected = decode(None), decode(guide)
    found, done = [], threading.Event()

    def plainly():
        while not done.is_set():
            found.append(decode("vcd:alpha=0,beta=0") == plain)

    thread = threading.Thread(target=plainly)
    thread.start()
    guided = [decode(guide) == expected for _ in range(4)]
    done.set()
    thread.join()
    assert found and all(found) and all(guided)
