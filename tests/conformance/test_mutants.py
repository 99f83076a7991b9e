"""Known mistakes, planted one at a time: conformance must notice each of them."""

import pytest
import torch

from mmdecode.adapters.audio.whisper import WhisperAdapter
from mmdecode.adapters.text import DecoderOnlyAdapter
from tests.support import seams
from tests.support.tiny import TEXT_CONFIGS, DifferentError, assert_same, reference

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
def test_positions_off_by_one_after_the_prompt_are_noticed(family, monkeypatch):
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
    seams.BLOCK_MASK.plant(monkeypatch, lambda additive: lambda *args: additive(*args) == 0)
    assert_noticed(family, "known_tree", attention="eager")


def with_window(change):
    """The mask with another window."""

    def planted(additive):
        def masked(begin, pads, depths, ancestors, visible, dtype, window):
            return change(additive, (begin, pads, depths, ancestors, visible, dtype), window)

        return masked

    return planted


@WINDOWED
def test_a_window_that_is_dropped_is_noticed(family, monkeypatch):
    assert_same(family, "known")
    dropped = with_window(lambda additive, args, window: additive(*args, None))
    seams.BLOCK_MASK.plant(monkeypatch, dropped)
    assert_noticed(family, "known")


@WINDOWED
def test_a_window_that_is_one_too_wide_is_noticed(family, monkeypatch):
    assert_same(family, "known")
    wider = with_window(lambda additive, args, window: additive(*args, window and window + 1))
    seams.BLOCK_MASK.plant(monkeypatch, wider)
    assert_noticed(family, "known")


@WINDOWED
def test_a_window_that_counts_slots_of_a_tree_is_noticed(family, monkeypatch):
    assert_same(family, "known_tree")

    def by_slot(additive, args, window):
        begin, pads, depths, *rest = args
        order = torch.arange(depths.shape[1])[None]
        return additive(begin, pads, order, *rest, window)

    seams.BLOCK_MASK.plant(monkeypatch, with_window(by_slot))
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
    seams.BLOCK_MASK.plant(monkeypatch, seams.siblings_see_each_other)
    assert_noticed(family, "known_tree")


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_padding_that_is_attended_to_is_noticed(family, monkeypatch):
    assert_same(family, "known")
    seams.BLOCK_MASK.plant(monkeypatch, seams.padding_is_seen)
    assert_noticed(family, "known")


@FAMILIES
def test_tree_nodes_that_are_not_moved_in_the_cache_are_noticed(family, monkeypatch):
    assert_same(family, "known_tree")
    seams.COMMIT_TO_CACHE.plant(monkeypatch, seams.nodes_stay_where_they_were_written)
    assert_noticed(family, "known_tree")


@FAMILIES
def test_a_root_that_is_not_kept_is_noticed(family, monkeypatch):
    assert_same(family, "known")

    def without_root(sound):
        return lambda self, count, path=None: sound(self, (count - 1).clamp_min(0), path)

    seams.COMMIT_TO_CACHE.plant(monkeypatch, without_root)
    assert_noticed(family, "known")


@FAMILIES
def test_processors_that_see_the_roots_length_at_every_node_are_noticed(family, monkeypatch):
    token = reference(family, ())[1][0][3]
    options = {"eos_token_id": token, "pad_token_id": 0, "min_new_tokens": 3}
    assert_same(family, "known_tree", **options)
    seams.NODES.plant(monkeypatch, seams.nodes_have_the_roots_length)
    assert_noticed(family, "known_tree", **options)


@FAMILIES
def test_an_end_looked_for_in_the_last_token_only_is_noticed(family, monkeypatch):
    token = reference(family, ())[1][0][3]
    options = {"eos_token_id": token, "pad_token_id": 0}
    assert_same(family, "known", **options)
    seams.CUT.plant(monkeypatch, seams.ends_in_the_last_token_only)
    assert_noticed(family, "known", **options)


@FAMILIES
def test_a_bonus_token_that_is_dropped_is_noticed_in_the_counts(family, monkeypatch):
    healthy = assert_same(family, "known").stats.passes

    def without_bonus(sound):
        return lambda self, call, block, count: sound(
            self, call, block, torch.where(count > 1, count - 1, count)
        )

    seams.CUT.plant(monkeypatch, without_bonus)
    assert assert_same(family, "known").stats.passes > healthy
