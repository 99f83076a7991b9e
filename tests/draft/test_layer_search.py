"""Search for layers to skip: which ones are found, and that only the speed depends on it."""

import copy
import functools

import pytest
import torch
from torch.nn.functional import cosine_similarity

from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.draft.layer_search import (
    Clasp,
    Programme,
    Swift,
    SwiftSession,
    partial,
    units_of,
)
from mmdecode.draft.mirror import CopySession
from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.testing import check_draft
from tests.support.rounds import sessions_of
from tests.support.tiny import ours as whisper
from tests.support.tiny import text_model
from tests.support.tiny_vlm import ours, reference

NEW = 40
IDLE = {0: "layer", 3: "layer", 4: "layer"}
"""Layers of the model here that do next to nothing."""


@functools.cache
def model(family="llama", idle=(0, 3, 4)):
    made = copy.deepcopy(text_model(family, layers=6))
    torch.manual_seed(0)  # with some draws all that is drafted is accepted
    for index in idle:
        layer = made.model.layers[index]
        for weight in (layer.mlp.down_proj.weight, layer.self_attn.o_proj.weight):
            torch.nn.init.normal_(weight, std=1e-5)
    return made


def prompts(rows=3):
    return torch.randint(1, 60, (rows, 6), generator=torch.Generator().manual_seed(0))


def written(draft, family="llama", ids=None, **options):
    decoder = Decoder(draft, seed=5)
    ids = prompts() if ids is None else ids
    options = {"max_new_tokens": NEW, "mm_request": range(len(ids)), **options}
    found = model(family).generate(ids, custom_generate=decoder, **options)
    return found.tolist(), decoder


@pytest.mark.parametrize("make", [Clasp, Swift])
def test_they_pass_the_public_check(make):
    check_draft(lambda: make(share=0.5, length=2, every=2), learns=make is Swift)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "coupled"])
@pytest.mark.parametrize("make", [Clasp, Swift])
def test_the_output_is_that_of_the_undrafted_loop(make, do_sample):
    expected, _ = written(None, do_sample=do_sample)
    found, decoder = written(make(0.75, length=3, every=2), do_sample=do_sample)
    assert found == expected
    assert 0 < decoder.stats.accepted < decoder.stats.drafted


@pytest.mark.parametrize("make", [Clasp, Swift])
def test_where_nothing_is_skipped_everything_is_accepted(make):
    expected, _ = written(None)
    found, decoder = written(make(0.0, length=3))
    assert found == expected
    assert decoder.stats.accepted == decoder.stats.drafted > 0


@pytest.mark.parametrize("make", [Clasp, Swift])
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_a_vision_language_model_is_drafted_for(family, make):
    expected, _ = reference(family)
    assert ours(Decoder(make(0.5, length=3, every=1)), family).tolist() == expected.tolist()


@pytest.mark.parametrize("family", ["llama", "gemma", "mistral", "qwen3"])
def test_the_programme_finds_what_does_nothing(family):
    draft = Clasp(0.5, length=3, every=2)
    sessions = sessions_of(draft)
    found, decoder = written(draft, family)
    assert found == written(None, family)[0]
    assert sessions[0].skipped == frozenset(IDLE.items())
    assert decoder.stats.accepted > 0.9 * decoder.stats.drafted


def test_the_programme_is_the_one_of_the_paper():
    """Next to a plain loop over g(i, j), on layers that are random matrices."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(8, 8, generator=generator) * 0.3 for _ in range(5)]
    start = torch.randn(8, generator=generator)
    for count in (0, 1, 2, 4):
        states = [start]
        for weight in weights:
            states.append(states[-1] + weight @ states[-1])
        best = {(0, 0): (start, [])}
        for i, weight in enumerate(weights, 1):
            for j in range(min(i, count) + 1):
                ways = []
                if (i - 1, j) in best:
                    before, skipped = best[i - 1, j]
                    ways.append((before + weight @ before, skipped))
                if (i - 1, j - 1) in best:
                    before, skipped = best[i - 1, j - 1]
                    ways.append((before, [*skipped, i - 1]))
                near = [float(cosine_similarity(way[0], states[i], dim=0)) for way in ways]
                best[i, j] = ways[near.index(max(near))]
        programme = Programme(count, torch.tensor([True]))
        queries = start.expand(1, count + 1, 8)
        for weight in weights:
            queries = programme.after(None, (queries,), {}, queries + queries @ weight.T)
        assert sorted(programme.skipped()) == best[5, count][1]
        torch.testing.assert_close(queries[0, count], best[5, count][0])


def test_the_search_finds_what_does_nothing_and_ends():
    draft = Swift(0.5, length=3, every=1)
    sessions = sessions_of(draft)
    for _ in range(3):  # what was found is kept from call to call
        found, decoder = written(draft)
    assert found == written(None)[0]
    assert sessions[2].skipped == {(i, part) for i in (3, 4) for part in ("attention", "mlp")}
    assert sessions[2].found.enough
    assert decoder.stats.accepted == decoder.stats.drafted


SEARCH, MATCHES = SwiftSession.search, SwiftSession.matches


def watched(self):
    """A search, after which the copy of the cache is compared with the model's own."""
    SEARCH(self)
    for own, main in zip(self.branch.cache.layers, self.main.cache.layers, strict=True):
        for row, end in enumerate(self.branch.cache.start.tolist()):
            for name in ("keys", "values"):
                mine, theirs = (getattr(layer, name)[row, :, :end] for layer in (own, main))
                assert torch.equal(mine, theirs), "the copy is another"


def test_a_search_leaves_the_copy_as_it_was(monkeypatch):
    monkeypatch.setattr(SwiftSession, "search", watched)
    written(Swift(0.5, length=3, every=1))
    monkeypatch.setattr(SwiftSession, "matches", leave_it)
    with pytest.raises(AssertionError, match="the copy is another"):
        written(Swift(0.5, length=3, every=1))


def leave_it(self, skip, window):
    """The mutant: what the trial has overwritten is not put back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CopySession, "copy", lambda *_: None)
        return MATCHES(self, skip, window)


def test_a_view_without_a_sublayer_keeps_the_residual_stream():
    whole = model(idle=())
    adapter = registry.adapter_for(whole)
    assert units_of(adapter)[:2] == [(1, "attention"), (1, "mlp")]
    assert len(units_of(adapter)) == 2 * 4
    skip = {(1, "attention"), (1, "mlp"), (2, "mlp"), (4, "attention"), (5, "layer")}
    by_hand = copy.deepcopy(whole)
    for index, part in skip:
        layer = by_hand.model.layers[index]
        for name, weight in (("mlp", layer.mlp.down_proj), ("attention", layer.self_attn.o_proj)):
            if part in (name, "layer"):
                weight.weight.data.zero_()
    view = partial(adapter, skip)
    assert len(view.model.layers) == 4
    torch.testing.assert_close(view(prompts()).logits, by_hand(prompts()).logits)
    assert not torch.equal(view(prompts()).logits, whole(prompts()).logits)
    assert len(whole.model.layers) == 6


def test_rows_of_a_batch_write_what_they_write_alone():
    for make in (Clasp, Swift):
        options = {"do_sample": True, "max_new_tokens": 16}
        together, _ = written(make(0.5, length=3, every=1), **options)
        for row in range(2):
            ids, draft = prompts()[row : row + 1], make(0.5, length=3, every=1)
            alone, _ = written(draft, ids=ids, mm_request=[row], **options)
            assert alone[0] == together[row]


def test_what_cannot_be_skipped_is_refused():
    mixed = text_model("gemma2")
    with pytest.raises(IncompatibleError, match=r"Clasp.*Gemma2"):
        mixed.generate(prompts(), custom_generate=Decoder(Clasp()), max_new_tokens=3)
    with pytest.raises(IncompatibleError, match=r"Clasp.*Whisper.*inside"):
        whisper(Decoder(Clasp()), "whisper")
    for options in ({"share": 1.5}, {"share": -0.1}, {"every": 0}, {"length": -1}):
        with pytest.raises(OptionError):
            Clasp(**options)
    with pytest.raises(OptionError):
        Swift(window=0)
