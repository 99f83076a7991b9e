"""Functions of the engine that tests replace or record, each once under a name of its own.

A rewrite that moves one of them changes it here. Replacements that several tests use are here too.
"""

import inspect
import sys
import textwrap
from typing import Any, NamedTuple

import torch

from mmdecode.engine import branches, capture, host, prefill
from mmdecode.engine.branches import ModelRunner
from mmdecode.engine.cache import RaggedCache, RaggedLayer
from mmdecode.engine.loop import Run
from mmdecode.engine.nodes import Nodes
from mmdecode.engine.prefill import Cost
from mmdecode.engine.processors import Processors
from mmdecode.engine.stop import Stopping
from mmdecode.engine.target_logits import TargetLogits


class Seam(NamedTuple):
    """A function or method that a test replaces."""

    owner: Any
    name: str

    @property
    def sound(self):
        """What stands there now."""
        return getattr(self.owner, self.name)

    def plant(self, patch, change):
        """Puts ``change(sound)`` there until ``patch`` is undone."""
        patch.setattr(self.owner, self.name, change(self.sound))

    def edit(self, patch, old, new):
        """Puts the function there with one piece of its source replaced."""
        patch.setattr(self.owner, self.name, edited(self.sound, old, new))


BLOCK_MASK = Seam(branches, "block_mask")
"""``(begin, pads, depths, ancestors, visible, dtype, window)``: what each token of a pass may
attend to."""
LONG = Seam(prefill, "LONG")
"""Tokens from which on a prompt may take several passes."""
MASKED = Seam(prefill, "MASKED")
"""Bytes of one pass with a mask; more are split into chunks."""
ONE_PASS = Seam(prefill, "ONE_PASS")
"""The same without a mask."""
CHUNK = Seam(prefill, "CHUNK")
"""Bytes of a chunk, unless it has `LEAST` tokens."""
LEAST = Seam(prefill, "LEAST")
FIRST_SEEN = Seam(Cost, "seen")
"""``(cost, first)``: the first column that a chunk from ``first`` on attends to."""
WRITE_PIECE = Seam(RaggedLayer, "_of_piece")
"""Writes keys and values of a piece of a prompt, and returns those that it attends to."""
RUN_BRANCHES = Seam(ModelRunner, "run")
SCORE = Seam(ModelRunner, "score")
KEEP = Seam(ModelRunner, "commit")
COMMIT_TO_CACHE = Seam(RaggedCache, "commit")
"""``(cache, count, path=None)``."""
CUT = Seam(Stopping, "cut")
"""``(stopping, call, block, count)`` gives ``(count, ended)``."""
NODES = Seam(Nodes, "__init__")
"""A block's nodes, as known processors are given them."""
PROCESS_ALL = Seam(Processors, "run_all")
PROCESS_ONE_BY_ONE = Seam(TargetLogits, "_run_lazily")
DECODE = Seam(Run, "run")
COMMIT = Seam(Run, "commit")
GUIDE = Seam(Run, "guided")
MAY_READ = Seam(host, "may_read")
"""``(device)``: whether reading a value on the host costs nothing."""
CAPTURE = Seam(capture.Replayed, "_capture")
BACKEND = Seam(capture, "BACKEND")
"""What compiles, by a name that torch knows or as a function."""
STEP = Seam(capture, "STEP")
"""Lengths of static caches are multiples of it; tests take fewer, to see them grow."""
COMPILED = Seam(capture, "_compiled")
"""Models that were compiled, with their code."""
SYNC = Seam(Run, "sync")
"""``(run, result, count)``, once a round, on the host."""


def edited(function, old, new):
    """The function with one piece of its source replaced, bound to its own module's names."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{function.__qualname__} has changed: update this mutant"
    names = vars(sys.modules[function.__module__])
    scope = {}
    exec("from __future__ import annotations\n" + source.replace(old, new), names, scope)
    return scope[function.__name__]


def read_by_rows(patch):
    """Rows of every padded prompt are read one by one."""
    LONG.plant(patch, lambda sound: 1)


def read_in_chunks(patch, tokens):
    """Prompts are read in chunks of so many tokens, where they may be."""
    read_by_rows(patch)
    for limit in (MASKED, ONE_PASS, CHUNK):
        limit.plant(patch, lambda sound: 0)
    LEAST.plant(patch, lambda sound: tokens)


# Changes of what stands there


def siblings_see_each_other(sound):
    """Of `BLOCK_MASK`."""

    def masked(begin, pads, depths, ancestors, *rest):
        if ancestors is not None:
            ancestors = torch.ones_like(ancestors).tril()
        return sound(begin, pads, depths, ancestors, *rest)

    return masked


def padding_is_seen(sound):
    """Of `BLOCK_MASK`."""
    return lambda begin, pads, *rest: sound(begin, torch.zeros_like(pads), *rest)


def without_window(sound):
    """Of `BLOCK_MASK`."""
    return lambda *args: sound(*args[:6])


def nodes_stay_where_they_were_written(sound):
    """Of `COMMIT_TO_CACHE`."""
    return lambda self, count, path=None: sound(self, count)


def nodes_have_the_roots_length(sound):
    """Of `NODES`."""

    def constant(self, call, proposal):
        sound(self, call, proposal)
        self.prefix_length = self.prefix_length[:, :1].expand_as(self.prefix_length)

    return constant


def ends_in_the_last_token_only(sound):
    """Of `CUT`."""

    def cut(self, call, block, count):
        order = torch.arange(1, block.shape[1] + 1)
        return sound(self, call, torch.where(order < count[:, None], -1, block), count)

    return cut


def without_prefix(patch):
    """Unknown processors see no drafted token of a node's path."""
    old = "ids[b, width + length[b] :] = self._proposal.tokens[b, above]"
    PROCESS_ONE_BY_ONE.edit(patch, old, "pass")
