"""Known mistakes, planted one at a time: conformance must notice each of them."""

import pytest
import torch

from mmdecode.adapters.decoder_only import DecoderOnlyAdapter
from mmdecode.adapters.whisper import WhisperAdapter
from mmdecode.engine import branch
from mmdecode.engine.cache import RaggedCache
from mmdecode.engine.law import Nodes
from mmdecode.engine.stop import Stopping
from tests.conformance.tiny import TEXT_CONFIGS, DifferentError, assert_same, reference

FAMILIES = pytest.mark.parametrize("family", ["llama", "qwen2", "whisper"])
EVERY_FAMILY = pytest.mark.parametrize("family", [*TEXT_CONFIGS, "whisper"])
WINDOWED = pytest.mark.parametrize("family", ["qwen2_mixed", "mistral", "gemma2", "gemma3"])


def assert_noticed(family, draft, **options):
    with pytest.raises(DifferentError):
        assert_same(family, draft, **options)


def shifted(forward):
    def run(self, tokens, mask, positions, past):
        cache = getattr(past, "caches", past)
        rows = getattr(cache, "self_attention_cache", cache).rows
        return forward(self, tokens, mask, positions + (rows.start > 0)[:, None], past)

    return run


@EVERY_FAMILY
def test_positions_off_by_one_behind_the_prompt_are_noticed(family, monkeypatch):
    assert_same(family, "known")
    for adapter in (DecoderOnlyAdapter, WhisperAdapter):
        monkeypatch.setattr(adapter, "forward", shifted(adapter.forward))
    assert_noticed(family, "known")


@FAMILIES
def test_positions_by_slot_instead_of_depth_are_noticed(family, monkeypatch):
    assert_same(family, "known_tree")

    def by_slot(forward):
        def run(self, tokens, mask, positions, past):
            order = torch.arange(tokens.shape[1])
            return forward(self, tokens, mask, positions[:, :1] + order, past)

        return run

    for adapter in (DecoderOnlyAdapter, WhisperAdapter):
        monkeypatch.setattr(adapter, "forward", by_slot(adapter.forward))
    assert_noticed(family, "known_tree")


@FAMILIES
def test_a_boolean_mask_under_eager_attention_is_noticed(family, monkeypatch):
    assert_same(family, "known_tree", attention="eager")
    additive = branch.block_mask
    monkeypatch.setattr(branch, "block_mask", lambda *args: additive(*args) == 0)
    assert_noticed(family, "known_tree", attention="eager")


def with_window(change):
    """`block_mask` with another window."""
    additive = branch.block_mask

    def masked(begin, pads, depths, ancestors, visible, dtype, window):
        return change(additive, (begin, pads, depths, ancestors, visible, dtype), window)

    return masked


@WINDOWED
def test_a_window_that_is_dropped_is_noticed(family, monkeypatch):
    assert_same(family, "known")
    dropped = with_window(lambda additive, args, window: additive(*args, None))
    monkeypatch.setattr(branch, "block_mask", dropped)
    assert_noticed(family, "known")


@WINDOWED
def test_a_window_that_is_one_too_wide_is_noticed(family, monkeypatch):
    assert_same(family, "known")
    wider = with_window(lambda additive, args, window: additive(*args, window and window + 1))
    monkeypatch.setattr(branch, "block_mask", wider)
    assert_noticed(family, "known")


@WINDOWED
def test_a_window_that_counts_slots_of_a_tree_is_noticed(family, monkeypatch):
    assert_same(family, "known_tree")

    def by_slot(additive, args, window):
        begin, pads, depths, *rest = args
        order = torch.arange(depths.shape[1])[None]
        return additive(begin, pads, order, *rest, window)

    monkeypatch.setattr(branch, "block_mask", with_window(by_slot))
    assert_noticed(family, "known_tree")


@pytest.mark.parametrize("family", ["qwen2_mixed", "gemma2", "gemma3"])
def test_one_window_for_layers_of_all_types_is_noticed(family, monkeypatch):
    assert_same(family, "known")
    forward = DecoderOnlyAdapter.forward

    def swapped(self, tokens, mask, positions, past):
        return forward(
            self, tokens, dict.fromkeys(mask, mask["sliding_attention"]), positions, past
        )

    monkeypatch.setattr(DecoderOnlyAdapter, "forward", swapped)
    assert_noticed(family, "known")


def test_a_soft_cap_of_logits_that_is_dropped_is_noticed(monkeypatch):
    assert_same("gemma2", "known", processors="penalties")
    monkeypatch.setattr(DecoderOnlyAdapter, "head", DecoderOnlyAdapter.unembed)
    assert_noticed("gemma2", "known", processors="penalties")


@FAMILIES
def test_siblings_that_see_each_other_are_noticed(family, monkeypatch):
    assert_same(family, "known_tree")
    additive = branch.block_mask

    def causal(begin, pads, depths, ancestors, *rest):
        if ancestors is not None:
            ancestors = torch.ones_like(ancestors).tril()
        return additive(begin, pads, depths, ancestors, *rest)

    monkeypatch.setattr(branch, "block_mask", causal)
    assert_noticed(family, "known_tree")


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_padding_that_is_attended_to_is_noticed(family, monkeypatch):
    assert_same(family, "known")
    additive = branch.block_mask

    def unpadded(begin, pads, *rest):
        return additive(begin, torch.zeros_like(pads), *rest)

    monkeypatch.setattr(branch, "block_mask", unpadded)
    assert_noticed(family, "known")


@FAMILIES
def test_tree_nodes_that_are_not_moved_into_place_are_noticed(family, monkeypatch):
    assert_same(family, "known_tree")
    commit = RaggedCache.commit
    monkeypatch.setattr(RaggedCache, "commit", lambda self, count, path=None: commit(self, count))
    assert_noticed(family, "known_tree")


@FAMILIES
def test_a_root_that_is_not_kept_is_noticed(family, monkeypatch):
    assert_same(family, "known")
    commit = RaggedCache.commit

    def without_root(self, count, path=None):
        commit(self, (count - 1).clamp_min(0), path)

    monkeypatch.setattr(RaggedCache, "commit", without_root)
    assert_noticed(family, "known")


@FAMILIES
def test_processors_that_see_the_roots_length_at_every_node_are_noticed(family, monkeypatch):
    token = reference(family, ())[1][0][3]
    options = {"eos_token_id": token, "pad_token_id": 0, "min_new_tokens": 3}
    assert_same(family, "known_tree", **options)
    begin = Nodes.__init__

    def constant(self, ctx, proposal):
        begin(self, ctx, proposal)
        self.prefix_length = self.prefix_length[:, :1].expand_as(self.prefix_length)

    monkeypatch.setattr(Nodes, "__init__", constant)
    assert_noticed(family, "known_tree", **options)


@FAMILIES
def test_an_end_looked_for_in_the_last_token_only_is_noticed(family, monkeypatch):
    token = reference(family, ())[1][0][3]
    options = {"eos_token_id": token, "pad_token_id": 0}
    assert_same(family, "known", **options)
    cut = Stopping.cut

    def last_only(self, ctx, block, count):
        order = torch.arange(1, block.shape[1] + 1)
        hidden = torch.where(order < count[:, None], -1, block)
        return cut(self, ctx, hidden, count)

    monkeypatch.setattr(Stopping, "cut", last_only)
    assert_noticed(family, "known", **options)


@FAMILIES
def test_a_bonus_token_that_is_dropped_is_noticed_in_the_counts(family, monkeypatch):
    healthy = assert_same(family, "known").stats.passes
    cut = Stopping.cut

    def without_bonus(self, ctx, block, count):
        kept = torch.where(count > 1, count - 1, count)
        return cut(self, ctx, block, kept)

    monkeypatch.setattr(Stopping, "cut", without_bonus)
    assert assert_same(family, "known").stats.passes > healthy
