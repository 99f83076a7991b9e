"""One transfer to the host per round in our code, counted where a device would have to wait."""

import collections

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation import logits_process as lp

from mmdecode.decoder import Decoder
from mmdecode.draft.adaptive import Adaptive
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.jacobi import Jacobi
from mmdecode.draft.layer_skip import LayerSkip
from mmdecode.draft.lookahead import Lookahead
from mmdecode.draft.lookup import PromptLookup
from mmdecode.draft.recycling import Recycling
from mmdecode.draft.source import Source
from mmdecode.draft.sparse import Sparse
from mmdecode.guide.cfg import CFG
from mmdecode.testing import drafts
from mmdecode.testing.checks import PROMPTS, SEED, bigram
from mmdecode.testing.table import Table, decode, left_pad
from tests.support import seams

MODEL = Table(5, seed=3)
# reads of values by Python: tolist and friends never reach the dispatcher on a CPU tensor
READS = (
    *("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"),
    *("__array__", "__contains__", "nonzero"),
)
DATA_DEPENDENT = ("nonzero", "masked_select", "_local_scalar_dense", "unique", "bincount", "equal")


class Counter(TorchDispatchMode):
    """Counts, by scoring pass, everything that must see values on the host."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.passes, self.inside = 0, False
        self.found = collections.defaultdict(list)
        for name in READS:
            sound = getattr(torch.Tensor, name)
            monkeypatch.setattr(torch.Tensor, name, self.counted(name, sound))
        seams.SCORE.plant(monkeypatch, self.counting_passes)
        seams.MAY_READ.plant(monkeypatch, lambda _: lambda device: False)  # as on an accelerator

    def counting_passes(self, score):
        def scored(*args, **kwargs):
            self.passes += 1
            return score(*args, **kwargs)

        return scored

    def counted(self, name, sound):
        def call(tensor, *args, **kwargs):
            if self.inside:  # not what this read does inside itself
                return sound(tensor, *args, **kwargs)
            self.note(name)
            self.inside = True
            try:
                return sound(tensor, *args, **kwargs)
            finally:
                self.inside = False

        return call

    @property
    def rounds(self):
        """What was found in each scoring pass; of a round, its one transfer is in the last."""
        return [self.found[p] for p in range(1, self.passes + 1)]

    def most(self):
        """Of any pass, the most."""
        assert self.passes >= 2
        return max(self.rounds, key=len)

    def note(self, name):
        self.found[self.passes].append(name)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if not self.inside and name.rstrip("2") in DATA_DEPENDENT:
            self.note(name)
        if not self.inside and name.startswith("index") and len(args) > 1:
            indices = args[1] if isinstance(args[1], (list, tuple)) else []
            if any(i is not None and i.dtype == torch.bool for i in indices):
                self.note(f"{name} with a mask")
        return func(*args, **(kwargs or {}))


def most_syncs(draft, monkeypatch, do_sample=True, accept="auto"):
    """The most transfers of any round but the first, and what they were."""
    ids, mask = left_pad(PROMPTS)
    processors = [
        lp.TemperatureLogitsWarper(0.7),
        lp.TopPLogitsWarper(0.9),
        lp.MinNewTokensLengthLogitsProcessor(6, 3, 4),
    ]
    decoder = Decoder(draft, CFG(2.0), accept, seed=SEED)
    options = {"mask": mask, "eos": 4, "processors": processors, "do_sample": do_sample}
    with monkeypatch.context() as patch, Counter(patch) as counter:
        decode(MODEL, ids, decoder, **options)
    assert sum(map(len, counter.rounds)) >= counter.passes  # it sees the one that is there
    return counter.most()


SOUND = {
    "none": (lambda: None, "auto"),
    "lookup": (PromptLookup, "auto"),
    "assistant": (lambda: Assistant(Table(5, seed=8), 3), "auto"),
    "tree": (lambda: drafts.Random(drafts.Tree((-1, -1, 0, 1))), "auto"),
    "row_trees": (drafts.RandomTrees, "sample_match"),
    "iid": (lambda: drafts.Bigram(bigram(5), kinds=("iid",)), "rejection"),
    "jacobi": (lambda: Jacobi(5), "auto"),
    "jacobi_adaptive": (lambda: Jacobi(5), "rejection"),
    "jacobi_tree": (lambda: Jacobi(5, siblings=2), "rejection"),
    "recycling": (Recycling, "auto"),
    "source": (lambda: Source(ids=[[0, 1, 2, 3, 4, 0, 1]]), "auto"),
    "layer_skip": (lambda: LayerSkip(exit_layer=1), "auto"),
    "sparse": (lambda: Sparse(length=2), "auto"),
    "lookahead": (Lookahead, "auto"),
    "adaptive": (lambda: Adaptive(Recycling(), (2,)), "auto"),
    "iid_tree": (lambda: drafts.Siblings(bigram(5), kinds=("iid",)), "rejection"),
    "wor_tree": (lambda: drafts.Siblings(bigram(5), kinds=("without_replacement",)), "ensemble"),
    "judged": (drafts.RandomTrees, "relative_threshold"),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_a_round_waits_for_the_device_once(name, do_sample, monkeypatch):
    make, accept = SOUND[name]
    if not do_sample:
        accept = "auto"
    assert most_syncs(make(), monkeypatch, do_sample, accept) == ["tolist"]


PLANTED = {
    "int": lambda call: int(call.rows.length.max()),
    "bool": lambda call: bool(call.rows.active.all()),
    "item": lambda call: call.rows.length.sum().item(),
    "tolist": lambda call: call.rows.length.tolist(),
    "cpu": lambda call: call.rows.length.cpu(),
    "numpy": lambda call: call.rows.length.numpy(),
    "mask": lambda call: call.rows.length[call.rows.active],
    "nonzero": lambda call: call.rows.active.nonzero(),
    "where": lambda call: torch.where(call.rows.active),
    "equal": lambda call: torch.equal(call.rows.length, call.rows.rounds),
    "select": lambda call: torch.masked_select(call.rows.length, call.rows.active),
    "index": lambda call: [1, 2, 3, 4][call.rows.length.amin() * 0],
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", PLANTED)
def test_a_second_wait_is_found(name, monkeypatch):
    class Waiting(drafts.Random):
        def draft(self, call, budget):
            PLANTED[name](call)
            return super().draft(call, budget)

    assert len(most_syncs(Waiting(), monkeypatch)) >= 2
