"""What the host does in a round does not grow with the text: operations and lines are counted.

Times would be noise on a shared machine. How many operations a round dispatches to torch and how
many lines of Python it runs, those of transformers included, are exact; loops inside C are not
seen.
"""

import collections
import functools
import gc
import itertools
import sys
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GenerationConfig,
)
from transformers.generation import logits_process as lp
from transformers.modeling_outputs import BaseModelOutput

from mmdecode.decoder import Decoder
from mmdecode.draft.lookup import PromptLookup
from mmdecode.draft.medusa import Medusa
from mmdecode.draft.medusa_heads import MedusaHeads
from mmdecode.testing import drafts
from mmdecode.testing.table import decode
from tests.support import seams, tiny_models

VOCAB, WIDTH, POSITIONS = 40, 16, 512
LENGTHS = ((8, 30), (200, 30), (8, 90))
"""Of prompt and output."""


class Operations(TorchDispatchMode):
    """What is dispatched to torch."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


class Lines:
    """Lines of Python, again for each turn of a loop; not those of a garbage collection."""

    count = 0

    def __enter__(self):
        gc.collect()
        gc.disable()  # hypothesis has a callback of some lines, at whatever round it comes
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *error):
        sys.settrace(self.before)
        gc.enable()

    def trace(self, frame, event, arg):
        self.count += event == "line"
        return self.trace


COUNTERS = pytest.mark.parametrize("counter", [Operations, Lines])


@functools.cache
def model_of(family):
    if family == "llama":
        return tiny_models.llama(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=32,
            num_key_value_heads=1,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=True,  # says the last token again, so that lookup always finds it
        )
    return tiny_models.whisper(
        vocab_size=VOCAB,
        d_model=WIDTH,
        max_source_positions=20,
        max_target_positions=POSITIONS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=1,
    )


def processors_of(family, prompt):
    """For Whisper its rules for timestamps, ids 30 and above, whose past is the whole text."""
    if family == "llama":
        return [lp.MinNewTokensLengthLogitsProcessor(prompt, 9, 1)]
    config = GenerationConfig(eos_token_id=1)
    config.no_timestamps_token_id = 29
    config.max_initial_timestamp_index = 5
    return [lp.WhisperTimeStampLogitsProcessor(config, prompt)]


def medusa():
    heads = MedusaHeads(3, 1, WIDTH)
    torch.nn.init.normal_(heads.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    return Medusa(heads, paths=[(0,), (1,), (0, 0), (0, 1), (1, 0, 0)])


DRAFTS = {"none": lambda: None, "lookup": PromptLookup, "medusa": medusa}


class Mark(NamedTuple):
    """Where the loop stands at a transfer."""

    drafted: int
    scored: int
    slots: int
    spare: bool
    asked: bool
    even: tuple[bool, bool]
    late: bool
    count: int


def run(family, draft, lengths):
    """Decodes after a prompt and over new tokens of these lengths."""
    prompt, new = lengths
    ids = torch.randint(VOCAB, (2, prompt), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": new, "processors": processors_of(family, prompt)}
    if family == "whisper":
        audio = torch.randn(2, 20, WIDTH, generator=torch.Generator().manual_seed(2))
        options["inputs"] = {"encoder_outputs": BaseModelOutput(last_hidden_state=audio)}
    decode(model_of(family), ids, Decoder(draft()), **options)


def rounds(counter, family, draft, lengths, monkeypatch):
    """What each round counts, with what the host knows of its kind.

    That is: nodes drafted, nodes scored, nodes drafted next, whether the cache grew, whether it
    has slots to spare, whether the drafter was asked, whether rows are equally long and all active,
    before the round and after it, and whether the round may reach the longest text.
    """
    marks = []

    def marking(sync):
        def marked(this, result, count):
            # whether the drafter was asked for more, which it is not for a last token
            asked = this.call.request.max_new_tokens - this.shortest > 2
            before = work.count  # what makes the next proposal narrow belongs to its round
            state, cache = sync(this, result, count), this.runners[0].cache
            slots = cache.layers[0].keys.shape[2]
            spare = slots > cache.rows.visible
            sizes = result.proposal.size, state.proposal.size
            even = this.call.rows.even, this.call.rows.full
            levels = max(state.proposal.structure()[1][0].tolist(), default=0)
            late = state.cur_len + levels + 1 >= this.call.request.max_new_tokens
            marks.append(Mark(*sizes, slots, spare, asked, even, late, before))
            return state

        return marked

    with monkeypatch.context() as patch, counter() as work:
        seams.SYNC.plant(patch, marking)
        run(family, draft, lengths)
    found = []
    for a, b in itertools.pairwise(marks[1:]):  # the prompt is counted otherwise
        kind = (a.drafted, a.scored, b.drafted, b.slots > a.slots, b.spare, b.asked)
        kind += (a.even, b.even, a.late)
        found.append((kind, b.count - a.count))
    return found


def assert_constant(counter, family, draft, monkeypatch):
    """Asserts that rounds of one kind count the same, after whatever text."""
    for lengths in LENGTHS:  # fills what is looked up once a process
        run(family, draft, lengths)
    found = [rounds(counter, family, draft, lengths, monkeypatch) for lengths in LENGTHS]
    counts = collections.defaultdict(set)
    for kind, count in itertools.chain(*found):
        counts[kind].add(count)
    assert all(len(each) == 1 for each in counts.values()), f"work grows: {dict(counts)}"
    assert set.intersection(*({kind for kind, _ in each} for each in found)), "nothing is compared"


@pytest.mark.one_in(15)
@COUNTERS
@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("family", ["llama", "whisper"])
def test_a_round_costs_the_host_the_same_after_any_text(family, name, counter, monkeypatch):
    assert_constant(counter, family, DRAFTS[name], monkeypatch)


# Loops that must be found


def operations_by_token(call, kept):
    return [call.rows.ids[:, column] for column in range(int(call.end().max()))]


def lines_by_token(call, kept):
    return [token + 1 for token in call.rows.ids[0, : int(call.end()[0])].tolist()]


def lines_by_round(call, kept):
    kept.append(len(kept))
    return [index + 1 for index in kept]


PLANTED = [
    (operations_by_token, Operations),
    (lines_by_token, Lines),
    (lines_by_round, Lines),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("loop", "counter"), PLANTED)
def test_a_loop_over_what_is_committed_is_found(loop, counter, monkeypatch):
    def draft():
        kept = []
        looping = drafts.Random()
        looping.learn = lambda call, *rest: loop(call, kept)
        return looping

    with pytest.raises(AssertionError, match="work grows"):
        assert_constant(counter, "llama", draft, monkeypatch)
