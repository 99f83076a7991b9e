"""What Medusa heads must do whatever their weights, on tiny random models."""

import math
from functools import partial

import pytest
import torch
from transformers import LogitsProcessor

from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.draft.medusa import Medusa
from mmdecode.draft.medusa_heads import MedusaHeads
from mmdecode.engine.adapter import Prompt
from mmdecode.engine.cache import RaggedCache
from mmdecode.engine.contracts import DraftSession
from mmdecode.engine.masks import block_mask, chain
from tests.support import seams
from tests.support.sessions import noting
from tests.support.tiny import (
    NEW,
    TEXT_DRAFTS,
    TREE,
    VOCAB,
    WIDTH,
    audio,
    generated,
    inputs_of,
    model_of,
    ours,
    plain,
    random_block,
    random_heads,
    reference,
    whisper_model,
)
from tests.support.traced import Traced

FAMILIES = pytest.mark.parametrize("family", ["llama", "whisper"])


@FAMILIES
def test_zero_heads_say_what_the_model_says_bit_for_bit(family):
    adapter = registry.adapter_for(model_of(family))
    hidden = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = MedusaHeads(4, 2, WIDTH).logits(hidden, adapter)
        base = adapter.head(hidden.expand(4, -1, -1))
    assert torch.equal(logits, base)


def test_zero_heads_after_a_block_predict_what_the_block_predicts():
    model, block = whisper_model(), random_block().eval()
    adapter = registry.adapter_for(model)
    draft, seen = Medusa(MedusaHeads(3, 1, WIDTH), block), []
    noting(draft, proposed=lambda session, _: seen.append(session.state))
    options = {"language": "en", "task": "transcribe", "max_new_tokens": NEW}
    out = model.generate(**audio(1), **options, custom_generate=Decoder(draft))
    # all states of the text, then the block over all of them at once
    prompt = torch.tensor([[61, 62, 64, 67]])
    ids = torch.cat([prompt, out], 1)
    with torch.no_grad():
        encoded = model.get_encoder()(audio(1)["input_features"]).last_hidden_state
        hidden = model.get_decoder()(input_ids=ids, encoder_hidden_states=encoded)[0]
        cache = RaggedCache(1, 1, ids.device)
        past = adapter.open(cache, Prompt(ids=ids, mask=ids >= 0, inputs={"source": encoded}))
        zero = torch.zeros(1, dtype=torch.long)
        cache.open(ids.shape[1])
        order = chain(ids.shape[1], ids.device)
        mask = block_mask(zero, zero, *order, ids.shape[1], hidden.dtype)
        states = adapter.run_extra_layer(block, hidden, mask, past)[0]
        logits = draft.heads.logits(seen[0], adapter)
    assert torch.equal(logits, adapter.unembed(seen[0].expand(3, -1, -1)))
    assert len(seen) > 1
    for state in seen:  # whatever was accepted, the block saw the committed states and no other
        assert (states - state[0]).abs().amax(1).min() < 1e-4


SOME = [3, 8, 12, 17, 24, 31, 40, 59]
EVERY_FAMILY = pytest.mark.parametrize("family", ["llama", "whisper", "moonshine"])


@EVERY_FAMILY
def test_heads_with_a_list_of_tokens_score_these_as_heads_without_one(family):
    adapter = registry.adapter_for(model_of(family))
    heads, few = random_heads(), random_heads(vocabulary=SOME)
    hidden = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = heads.logits(hidden, adapter)
        for _ in range(2):  # the rows of the output matrix are kept
            scores = few.logits(hidden, adapter)
            torch.testing.assert_close(scores, whole[..., SOME], atol=1e-5, rtol=1e-5)
    spread = few.spread(scores, whole.shape[-1])
    assert torch.equal(spread[..., SOME], scores) and (spread > -1e4).sum() == scores.numel()


class OnlySome(MedusaHeads):
    """Heads that score all tokens, of which some are then masked."""

    def logits(self, hidden, adapter):
        scores = super().logits(hidden, adapter)
        masked = torch.ones(scores.shape[-1]).index_fill(0, torch.tensor(SOME), 0.0).bool()
        return scores.masked_fill(masked, -1e4)


@EVERY_FAMILY
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("paths", [None, TREE])
def test_heads_with_a_list_of_tokens_draft_the_most_likely_of_them(family, sampled, paths):
    """Also where warpers ask for logits of the whole vocabulary."""
    masked = random_heads()
    masked.__class__ = OnlySome
    warpers = {"do_sample": True, "temperature": 0.7, "top_k": 20} if sampled else {}
    options = {"max_new_tokens": NEW, **warpers}
    found = []
    for heads in (random_heads(vocabulary=SOME), masked):
        proposals = []
        draft = noting(
            Medusa(heads, paths=paths),
            proposed=lambda _, proposal, seen=proposals: seen.append(proposal.tokens.tolist()),
        )
        decoder = Decoder(draft, seed=5)
        ids = model_of(family).generate(**inputs_of(family, 2), **options, custom_generate=decoder)
        found.append((ids.tolist(), proposals))
    assert found[0] == found[1]
    drafted = {token for one in found[0][1] for row in one for token in row}
    assert len(drafted) > 2 and drafted <= {*SOME, -1}


class Oracle(MedusaHeads):
    """Heads patched to say the true continuation."""

    def __init__(self, row, count):
        super().__init__(count, 1, WIDTH)
        self.row, self.session = row, None

    def logits(self, hidden, adapter):
        position = int(self.session.call.rows.length[0])
        known = [*self.row, *[0] * 20][position : position + self.weight.shape[1]]
        return torch.nn.functional.one_hot(torch.tensor(known), VOCAB)[:, None].float()


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_heads_that_are_always_right_need_one_pass_for_each_block(count):
    row = reference("llama", (("batch", 1),))[1][0]
    heads = Oracle(row, count)
    decoder = Decoder(noting(Medusa(heads), opened=partial(setattr, heads, "session")))
    assert ours(decoder, "llama", batch=1).tolist() == plain("llama", batch=1).tolist()
    # the prompt's own pass decides the first token
    assert decoder.stats.passes == math.ceil((NEW - 1) / (count + 1))


class Seen(LogitsProcessor):
    """Notes the length of every prefix it is shown, and checks that it is the right one."""

    def __init__(self, truth):
        self.truth, self.lengths = truth, []

    def __call__(self, input_ids, scores):
        self.lengths.append(input_ids.shape[1])
        assert input_ids[0].tolist() == self.truth[: input_ids.shape[1]]
        return scores


@pytest.mark.parametrize("heads", ["random", "oracle"])
def test_a_processor_is_called_once_for_each_prefix_and_not_after_a_rejection(heads):
    truth = plain("llama", batch=1)[0].tolist()
    module = random_heads() if heads == "random" else Oracle(truth[7:], 3)
    draft = Medusa(module, paths=TREE if heads == "random" else None)
    noting(draft, opened=partial(setattr, module, "session"))
    watcher = Seen(truth)
    ours(Decoder(draft), "llama", batch=1, logits_processor=[watcher])
    assert watcher.lengths == list(range(7, 7 + NEW))


@FAMILIES
def test_the_order_of_the_tree_list_does_not_matter(family):
    results = []
    for paths in (TREE, TREE[::-1], sorted(TREE, key=lambda p: p[-1])):
        decoder = Traced(Medusa(random_heads(), paths=paths))
        results.append((ours(decoder, family).tolist(), decoder.trace))
    assert results[0] == results[1] == results[2]
    assert generated(results[0][1]) == reference(family, ())[1]


@FAMILIES
def test_no_heads_is_the_plain_loop(family):
    draft = Medusa(random_heads())
    draft.begin = lambda call, prefill: DraftSession(call)
    decoder = Decoder(draft)
    assert ours(decoder, family).tolist() == plain(family).tolist()
    assert decoder.stats.passes == NEW - 1


@FAMILIES
@pytest.mark.parametrize("draft", ["known", "known_tree"])
def test_the_cache_after_acceptance_is_that_of_a_fresh_prefill(family, draft, monkeypatch):
    kept = []
    seams.KEEP.plant(
        monkeypatch, lambda keep: lambda self, *args: kept.append(self) or keep(self, *args)
    )
    rows = reference(family, (("batch", 1),))[1]
    decoder = Decoder(TEXT_DRAFTS[draft](family, rows))
    out = ours(decoder, family, batch=1)
    assert decoder.stats.accepted > 2
    cache, model = kept[-1].cache, model_of(family)
    used = int(cache.start[0])
    with torch.no_grad():
        if family == "whisper":
            ids = torch.cat([torch.tensor([[61, 62, 64, 67]]), out], 1)[:, :used]
            fresh = model(**audio(1), decoder_input_ids=ids, use_cache=True)
            fresh = fresh.past_key_values.self_attention_cache
        else:
            fresh = model(out[:, :used], use_cache=True).past_key_values
    assert used >= NEW
    for ours_layer, fresh_layer in zip(cache.layers, fresh.layers, strict=True):
        for name in ("keys", "values"):
            mine = getattr(ours_layer, name)[:, :, :used]
            torch.testing.assert_close(mine, getattr(fresh_layer, name), atol=1e-4, rtol=1e-4)


def test_a_cpu_drafts_half_of_its_nodes_for_many_rows():
    sizes = {}

    def note(session, proposal):
        sizes.setdefault(session.call.batch, set()).add(proposal.size)

    decoder = Decoder(noting(Medusa(random_heads(), paths=TREE, cpu_nodes=5), proposed=note))
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 7, 8, 9):
        ids = torch.randint(VOCAB, (rows, 4), generator=generator)
        call = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        model = model_of("llama")
        assert torch.equal(
            model.generate(ids, custom_generate=decoder, **call), model.generate(ids, **call)
        )
    assert sizes == {1: {5}, 7: {5}, 8: {3}, 9: {3}}
