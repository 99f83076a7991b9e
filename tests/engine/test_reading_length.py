"""How much of the library one greedy call with a drafter runs through: what a reader has to follow.

Before the engine had one file a responsibility, the same call ran 748 lines of 20 files.
"""

import collections
import sys
from pathlib import Path

import torch

import mmdecode
from mmdecode import Decoder
from tests.support.tiny import model_of

ROOT = f"{Path(mmdecode.__file__).parent}/"
FILES, LINES, EVENTS = 30, 890, 8_950
"""At most so many. Events are lines run, each as often as it is."""


class Counter:
    """Lines between the entry and the return of ``Decoder.__call__``, and how often each ran."""

    def __init__(self):
        self.lines, self.inside = collections.Counter(), None

    def __call__(self, frame, event, arg):
        code = frame.f_code
        if self.inside is None and code is Decoder.__call__.__wrapped__.__code__:
            self.inside = frame
        return self.line if self.inside and code.co_filename.startswith(ROOT) else None

    def line(self, frame, event, arg):
        if self.inside and event == "line":
            self.lines[frame.f_code.co_filename, frame.f_lineno] += 1
        elif event == "return" and frame is self.inside:
            self.inside = None
        return self.line


def test_a_greedy_call_with_lookup_runs_through_so_much():
    ids = torch.tensor([[5, 17, 40, 8, 31, 5, 17, 40, 8, 31, 5, 17]])
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
    decoder = Decoder("lookup")
    llama = model_of("llama")
    llama.generate(
        ids, custom_generate=decoder, **call
    )  # what is kept between calls does not count
    counter = Counter()
    sys.settrace(counter)
    try:
        llama.generate(ids, custom_generate=decoder, **call)
    finally:
        sys.settrace(None)
    files = {file for file, _ in counter.lines}
    assert len(counter.lines) > 300, "the call was not traced"
    found = len(files), len(counter.lines), sum(counter.lines.values())
    over = [own > most for own, most in zip(found, (FILES, LINES, EVENTS), strict=True)]
    assert not any(over), found
