"""A captured round does what the round does; on a tape, which replays as a CUDA graph would."""

import pytest
import torch
from transformers.generation import logits_process as lp

from mmdecode.decoder import Decoder
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.layer_skip import LayerSkip
from mmdecode.draft.lookup import PromptLookup
from mmdecode.draft.recycling import Recycling
from mmdecode.draft.source import Source
from mmdecode.engine import capture
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.guide.cfg import CFG
from mmdecode.testing import drafts, tape
from mmdecode.testing.checks import PROMPTS, SEED, bigram
from mmdecode.testing.table import Table, decode, left_pad
from tests.support import seams

MODEL = Table(5, seed=3)


def rows(decoder, **options):
    ids, mask = left_pad(PROMPTS)
    known = [
        lp.TemperatureLogitsWarper(0.7),
        lp.MinNewTokensLengthLogitsProcessor(ids.shape[1], 16, 4),
    ]
    settings = {"mask": mask, "eos": 4, "max_new_tokens": 30, "processors": known, **options}
    found = decode(MODEL, ids, decoder, **settings)
    return getattr(found, "sequences", found).tolist()


def static(draft):
    """One of the tests' drafts, which runs no Python that a replay would miss."""
    draft.capabilities = DrafterCapabilities(graph_safe=True)
    return draft


TREE = drafts.Tree((-1, -1, 0, 1))
DRAFTS = {
    "none": lambda: None,
    "lookup": PromptLookup,
    "assistant": lambda: Assistant(Table(5, seed=8), 3),
    "tree": lambda: static(drafts.Random(TREE)),
    "recycling": Recycling,
    "source": lambda: Source(ids=[[0, 1, 2, 3, 0, 2, 1, 3, 3, 1]]),
    "layer_skip": lambda: LayerSkip(exit_layer=1),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("guide", [None, "cfg"], ids=["plain", "guided"])
@pytest.mark.parametrize("name", DRAFTS)
def test_replayed_rounds_generate_the_same(name, guide, do_sample, taped):
    make = (lambda: CFG(2.0)) if guide else (lambda: None)
    options = {"do_sample": do_sample}
    plain = Decoder(DRAFTS[name](), make(), seed=SEED)
    expected = rows(plain, **options)
    assert not taped
    captured = Decoder(DRAFTS[name](), make(), seed=SEED, compile=True)
    assert rows(captured, **options) == expected
    assert len(taped) >= 5
    assert captured.stats.as_dict() == plain.stats.as_dict()


JUDGED = {
    "rejection of chains": lambda: drafts.Bigram(bigram(5), kinds=("iid",)),
    "rejection of trees": lambda: drafts.Siblings(bigram(5)),
    "ensemble of trees": lambda: drafts.Siblings(bigram(5), kinds=("iid",)),
    "sample_match": lambda: drafts.Random(TREE),
    "typical": lambda: drafts.Random(TREE),
    "relative_threshold": lambda: drafts.Random(TREE),
}


@pytest.mark.parametrize(
    ("name", "do_sample"),
    [*((name, True) for name in JUDGED), ("typical", False), ("relative_threshold", False)],
)
def test_every_rule_replays(name, do_sample, taped):
    rule = name.split()[0]
    plain = Decoder(JUDGED[name](), accept=rule, seed=SEED)
    expected = rows(plain, do_sample=do_sample)
    captured = Decoder(static(JUDGED[name]()), accept=rule, seed=SEED, compile=True)
    assert rows(captured, do_sample=do_sample) == expected
    assert len(taped) >= 5 and plain.stats.accepted > 0
    assert captured.stats.as_dict() == plain.stats.as_dict()


def moved_length(sound):
    """Commits as ever, but puts a new tensor where the old one was."""

    def commit(run, *args):
        result = sound(run, *args)
        run.call.rows.length = run.call.rows.length.clone()
        return result

    return commit


def moved_start(sound):
    def commit(cache, count, path=None):
        sound(cache, count, path)
        cache.rows.start = cache.rows.start.clone()

    return commit


MUTANTS = {
    "length": (seams.COMMIT, moved_length),
    "start": (seams.COMMIT_TO_CACHE, moved_start),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_state_that_moves_is_found(name, taped, monkeypatch):
    seam, moved = MUTANTS[name]
    seam.plant(monkeypatch, moved)
    expected = rows(Decoder(PromptLookup()))
    assert rows(Decoder(PromptLookup(), compile=True)) != expected
    assert taped


class Odd(lp.LogitsProcessor):
    """Known to nobody: forbids the token that came last."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -1:].clamp_max(4), -float("inf"))


class Unlike(drafts.Random):
    """Proposes, and says nothing of its rounds."""


SPLIT = {
    "logits processor": (None, {"processors": [Odd()]}),
    "stopping criterion": (None, {"criteria": [lambda ids, scores: ids[:, -1] == 3]}),
    "scores": (None, {"return_dict_in_generate": True, "output_scores": True}),
    "draft Unlike": (lambda: Unlike(drafts.Tree((-1, -1, 0))), {}),
}


@pytest.mark.parametrize("name", SPLIT)
def test_what_the_host_must_do_leaves_the_scoring_captured(name, taped):
    make, options = SPLIT[name]
    make = make or PromptLookup
    expected = rows(Decoder(make()), **options)
    with pytest.warns(UserWarning, match=f"scoring alone is captured.*{name}"):
        assert rows(Decoder(make(), compile=True), **options) == expected
    assert taped


def test_a_capture_that_fails_warns_and_costs_nothing_else(taped, monkeypatch):
    def refuse(call, device, pool):
        raise RuntimeError("no stream")

    monkeypatch.setattr(capture, "record", refuse)
    expected = rows(Decoder(PromptLookup()))
    with pytest.warns(UserWarning, match="no stream"):
        assert rows(Decoder(PromptLookup(), compile=True)) == expected


UNFIT = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).all()),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "select": lambda x: torch.masked_select(x, x > 0),
    "mask": lambda x: x[x > 0],
    "put": lambda x: x.clone().index_put_((x > 0,), x.new_ones(())),
    "unique": lambda x: x.unique(),
    "tensor": lambda x: torch.tensor([1, 2]),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_tape_refuses_what_no_graph_holds(name):
    x = torch.arange(3)
    with pytest.raises(RuntimeError, match="does not fit a graph"), tape.Tape():
        UNFIT[name](x)
