"""Sparse-to-Dense: the kept image tokens, the drafts made with them, and unchanged output."""

import functools

import pytest
import torch

from mmdecode.adapters.vision.base import VisionLanguageAdapter
from mmdecode.decoder import Decoder
from mmdecode.draft.mirror import CacheCopyDrafter, CopySession
from mmdecode.draft.sparse import Sparse, most_attended
from mmdecode.engine.attention import mean_weights
from mmdecode.engine.branches import ModelRunner
from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.guide.cfg_image import CFGImage
from tests.support.rounds import rounds_of
from tests.support.tiny_vlm import (
    IMAGE,
    NEW,
    ours,
    plain,
    reference,
    vision_inputs,
    vision_model,
)

FAMILIES = pytest.mark.parametrize("family", ["llava", "llava_next", "qwen2_5_vl", "qwen3_vl"])


@FAMILIES
def test_the_output_does_not_depend_on_what_is_kept(family):
    expected, _ = reference(family)
    for cells in (0, 2):
        decoder = Decoder(Sparse(cells, length=3))
        assert ours(decoder, family).tolist() == expected.tolist()
        assert 0 < decoder.stats.accepted < decoder.stats.drafted


@FAMILIES
def test_with_all_image_tokens_everything_is_accepted(family):
    expected, _ = reference(family)
    for draft in (Sparse(cells=99, length=3), CacheCopyDrafter(length=3)):
        decoder = Decoder(draft)
        assert ours(decoder, family).tolist() == expected.tolist()
        assert decoder.stats.accepted == decoder.stats.drafted > 0


@pytest.mark.parametrize("guide", [None, CFGImage], ids=["plain", "guided"])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_a_seed_writes_the_same_with_and_without(guide, do_sample):
    inputs = vision_inputs("llava", batch=3)
    pixels = {"pixel_values": inputs["pixel_values"]}
    options = {**inputs, "do_sample": do_sample, "max_new_tokens": NEW}
    options |= {"mm_request": ["a", "b", "c"], "mm_inputs": pixels}
    model, rows = vision_model("llava"), []
    for draft in (None, Sparse(2, length=3)):
        decoder = Decoder(draft, guide and guide(0.5), seed=5)
        rows.append(model.generate(**options, custom_generate=decoder).tolist())
    assert rows[0] == rows[1]
    assert decoder.stats.accepted > 0


def test_a_row_alone_is_the_row_in_a_batch():
    inputs = vision_inputs("llava")
    _, rows = reference("llava")
    for row, images in ((0, [0]), (2, [1, 2])):
        width = int(inputs["attention_mask"][row].sum())
        own = {"pixel_values": inputs["pixel_values"][images]}
        own |= {n: inputs[n][row : row + 1, -width:] for n in ("input_ids", "attention_mask")}
        alone = Decoder(Sparse(2, length=3))
        drafted = rounds_of(alone, lambda d, own=own: ours(d, "llava", inputs=own))
        batched = Decoder(Sparse(2, length=3))
        assert drafted[0] == rounds_of(batched, lambda d: ours(d, "llava"))[row]
        assert ours(Decoder(Sparse(2)), "llava", inputs=own)[0, -NEW:].tolist() == rows[row]


# What is drafted


@functools.cache
def drafted_by_hand(written, length):
    """The most likely tokens of a model that attends to all words and to no image token.

    Row 2, whose keys and values come of the whole prompt.
    """
    model, inputs = vision_model("llava"), vision_inputs("llava")
    ids = inputs["input_ids"][2:]
    whole = torch.cat([ids, torch.tensor([written[:-1]], dtype=torch.long)], 1)
    pixels = inputs["pixel_values"][1:]
    past = model(input_ids=whole, pixel_values=pixels, use_cache=True).past_key_values
    tokens, token = [], written[-1]
    for step in range(length):
        position = whole.shape[1] + step
        seen = torch.ones(1, position + 1, dtype=torch.long)
        seen[:, : ids.shape[1]] = (ids != IMAGE).long()
        scores = model(
            input_ids=torch.tensor([[token]]),
            attention_mask=seen,
            position_ids=torch.tensor([[position]]),
            past_key_values=past,
        ).logits
        token = int(scores[0, -1].argmax())
        tokens.append(token)
    return tokens


def assert_drafts_by_hand():
    decoder = Decoder(Sparse(0, length=3))
    rounds = rounds_of(decoder, lambda d: ours(d, "llava"))[2]
    assert len(rounds) > 3
    for written, drafted in rounds:
        assert drafted == drafted_by_hand(tuple(written), 3)[: len(drafted)]


@torch.no_grad()
def test_drafts_are_those_of_the_model_that_looks_at_no_image_token():
    assert vision_inputs("llava")["attention_mask"][2].all(), "the widest row has no padding"
    assert_drafts_by_hand()


def closed_ranks(self, *args, **kwargs):
    self.left_out = 0
    return RUN(self, *args, **kwargs)


RUN = ModelRunner.run
PLANTED = {
    "positions that close ranks": (ModelRunner, "run", closed_ranks),
    "tokens that are not copied": (CopySession, "copy", lambda *_: None),
    "one image token too many": (
        Sparse,
        "__init__",
        lambda self, cells, length: (
            CacheCopyDrafter.__init__(self, length),
            setattr(self, "cells", cells + 1),
        )[0],
    ),
}


@pytest.mark.parametrize("name", PLANTED)
@torch.no_grad()
def test_the_comparison_by_hand_finds(name, monkeypatch):
    monkeypatch.setattr(*PLANTED[name])
    with pytest.raises(AssertionError):
        assert_drafts_by_hand()


# What is kept


def test_the_most_attended_are_kept_by_group_of_heads():
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(3, 4, 9, generator=generator)
    images = torch.rand(3, 9, generator=generator) < 0.6
    for cells in (0, 1, 3, 20):
        found = most_attended(weights, images, cells, groups=2)
        for row in range(3):
            columns = images[row].nonzero()[:, 0].tolist()
            for group in range(2):
                score = weights[row, 2 * group] + weights[row, 2 * group + 1]
                best = sorted(columns, key=lambda c: -float(score[c]))[:cells]
                assert found[row, group].nonzero()[:, 0].tolist() == sorted(best)


def test_a_mean_of_weights_is_that_of_the_whole_matrix():
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, heads, 5, 6, generator=generator) for heads in (4, 2))
    seen = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    chosen = torch.tensor([[1, 4, -1], [0, 2, 3]])
    found = mean_weights(query, key, seen, 0.3, 2.0, chosen)
    for row, queries in enumerate([[1, 4], [0, 2, 3]]):
        for head in range(4):
            total = torch.zeros(5)
            for q in queries:
                scores = query[row, head, q] @ key[row, head // 2].T * 0.3
                scores = ((scores / 2.0).tanh() * 2.0)[: q + 1]
                total[: q + 1] += scores.softmax(-1)
            torch.testing.assert_close(found[row, head], total / len(queries))


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
@torch.no_grad()
def test_what_text_attends_to_is_what_transformers_says(family, monkeypatch):
    class Noting(Sparse):
        def begin(self, call, prefill):
            self.found, self.images = prefill.text_attention, prefill.images
            return super().begin(call, prefill)

    model, inputs = vision_model(family), vision_inputs(family)
    draft = Noting(2)
    ours(Decoder(draft), family)
    expected = vision_model(family, "eager")(**inputs, output_attentions=True).attentions
    real = inputs["attention_mask"].bool()
    images = (inputs["input_ids"] == IMAGE) & real
    assert torch.equal(draft.images & real, images)
    for layer, whole in enumerate(expected):
        for row in range(len(real)):
            text = (real & ~images)[row]
            mean = whole[row][:, text].mean(1)
            torch.testing.assert_close(
                draft.found[layer][row][:, real[row]], mean[:, real[row]], atol=1e-5, rtol=1e-4
            )
    assert model.config._attn_implementation == "sdpa", "and no trace of the reading is left"


def test_layers_that_see_a_window_are_refused():
    with pytest.raises(IncompatibleError, match=r"Sparse.*Gemma3.*window"):
        ours(Decoder(Sparse()), "gemma3")
    with pytest.raises(OptionError, match="cells"):
        Sparse(cells=-1)


def test_a_model_that_does_not_show_its_inside_is_refused(monkeypatch):
    monkeypatch.setattr(VisionLanguageAdapter, "shows_inside", False)
    with pytest.raises(IncompatibleError, match="gives no access"):
        plain("llava", custom_generate=Decoder(Sparse()))
