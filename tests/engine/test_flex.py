"""FlexAttention: its mask is the additive one, and nothing is compiled again for another tree."""

import copy
import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import flex_attention

import mmdecode
from mmdecode.decoder import Decoder
from mmdecode.draft.eagle import Eagle
from mmdecode.draft.kangaroo import Kangaroo
from mmdecode.draft.medusa import Medusa
from mmdecode.engine import flex
from mmdecode.engine.attention import explicit
from mmdecode.engine.cache import bucket
from mmdecode.engine.masks import block_mask
from mmdecode.engine.proposal import Tree
from tests.draft.test_eagle import random_drafter
from tests.draft.test_kangaroo import random_adapter
from tests.support import seams
from tests.support.tiny import TREE, model_of, prompts, random_heads
from tests.support.tiny_vlm import vision_inputs, vision_model

WINDOWS = (None, 3, 11)


def random_block(seed, rows=3, nodes=9, chain=False, shared=False):
    """Write positions, padding, depths, ancestors and visible slots."""
    dice = torch.Generator().manual_seed(seed)
    begin = torch.randint(4, 150, (rows,), generator=dice)
    pads = (begin * torch.rand(rows, generator=dice)).long()
    count = 1 if shared else rows
    if chain:
        return begin, pads, torch.arange(nodes + 1)[None], None, bucket(150 + nodes + 1)
    parents = [[int(torch.randint(-1, n, (), generator=dice)) for n in range(nodes)]]
    parents += [[int(torch.randint(-1, n, (), generator=dice)) for n in range(nodes)]] * (count - 1)
    trees = [Tree(tuple(row)) for row in parents]
    tensors = [tree.tensors(torch.device("cpu")) for tree in trees]
    depths = torch.stack([torch.nn.functional.pad(t[1], (1, 0)) for t in tensors])
    return begin, pads, depths, torch.stack([t[2] for t in tensors]), bucket(150 + nodes + 1)


CASES = [
    {"chain": True},
    {"shared": True},
    {},
    {"rows": 1, "nodes": 0, "chain": True},
    {"rows": 2, "nodes": 63},
]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_mask_is_the_additive_one(case, window):
    for seed in range(8):
        block = random_block(seed, **case)
        expected = block_mask(*block, torch.float32, window)
        found = flex.dense(flex.tree_mask(*block, torch.float32, window), len(block[0]))
        assert torch.equal(found, expected == 0)


def states(seed, rows, heads, groups, queries, slots, width=16):
    dice = torch.Generator().manual_seed(seed)
    sizes = ((heads, queries), (heads // groups, slots), (heads // groups, slots))
    return [torch.randn(rows, *size, width, generator=dice) for size in sizes]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", WINDOWS[:2])
@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_is_that_of_the_additive_mask(groups, window, softcap):
    for seed, case in enumerate(({}, {"chain": True}, {"nodes": 30, "shared": True})):
        block = random_block(seed, **case)
        rows, queries, slots = len(block[0]), block[2].shape[1], block[4]
        given = states(seed, rows, 8, groups, queries, slots)
        seen = block_mask(*block, torch.float32, window) == 0
        expected, _ = explicit(*given, seen, 0.3, softcap)
        mask = flex.tree_mask(*block, torch.float32, window)
        found = flex.compiled(*given, mask, 0.3, softcap, kernel=flex_attention)
        torch.testing.assert_close(found.transpose(1, 2), expected, atol=1e-5, rtol=1e-5)
        on_cpu, _ = flex.attend(torch.nn.Identity(), *given, mask, 0.3, softcap=softcap)
        torch.testing.assert_close(on_cpu, expected, atol=1e-5, rtol=1e-5)


def test_another_tree_other_lengths_or_another_window_compile_nothing():
    torch._dynamo.reset()
    counter = CompileCounter()
    kernel = torch.compile(flex_attention, backend=counter)

    def run(block, window):
        given = states(0, len(block[0]), 8, 4, block[2].shape[1], block[4])
        flex.compiled(*given, flex.tree_mask(*block, torch.float32, window), 0.3, kernel=kernel)

    run(random_block(0), None)
    assert counter.frame_count == 1
    for seed, window in enumerate([*WINDOWS, 5], start=1):
        run(random_block(seed), window)
        run(random_block(seed, shared=True), window)
        run(random_block(seed, chain=True), window)
    assert counter.frame_count == 1
    sizes = [(nodes, slots) for nodes in (4, 9, 17, 40, 63) for slots in (192, 320, 1024, 4096)]
    for nodes, slots in sizes:
        run((*random_block(1, nodes=nodes)[:4], slots), None)
    assert counter.frame_count <= 5, "sizes became symbols"
    torch._dynamo.reset()


def test_blocks_are_made_once_for_visible_slots():
    flex._blocks.cache_clear()
    for seed in range(5):
        flex.tree_mask(*random_block(seed), torch.float32)
    assert flex._blocks.cache_info().misses == 1
    counts, blocks = flex._blocks(64, 300, torch.device("cpu"))
    assert counts.tolist() == [[[3]]] and blocks.tolist() == [[[[0, 1, 2]]]]


DRAFTS = {
    "none": lambda: None,
    "lookup": lambda: "lookup",
    "medusa": lambda: Medusa(random_heads(layers=2), paths=TREE),
    "kangaroo": lambda: Kangaroo(random_adapter("llama"), length=3, confidence_threshold=0.05),
    "eagle": lambda: Eagle(random_drafter(seed=1), depth=3, top_k=3, nodes=9),
}


@functools.cache
def model(family):
    return copy.deepcopy(vision_model(family) if family == "llava" else model_of(family))


def decode(family, decoder, do_sample):
    inputs = vision_inputs(family, 3) if family == "llava" else prompts(3)
    found = mmdecode.generate(
        model(family), decoder=decoder, **inputs, max_new_tokens=40, do_sample=do_sample
    )
    return found.tolist()


def masks_made(monkeypatch):
    made = []
    sound = flex._blocks
    monkeypatch.setattr(flex, "_blocks", lambda *given: made.append(1) or sound(*given))
    return made


@pytest.mark.one_in(9)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "coupled"])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llava", "gemma3"))],
)
def test_captured_rounds_with_it_decode_as_without(family, draft, do_sample, taped, monkeypatch):
    if family == "gemma3" and draft in ("medusa", "eagle", "kangaroo"):
        pytest.skip("no heads of its width")
    expected = decode(family, Decoder(seed=7), do_sample)
    made = masks_made(monkeypatch)
    decoder = Decoder(DRAFTS[draft](), seed=7, compile=True, flex=True)
    assert decode(family, decoder, do_sample) == expected
    assert made and taped
    before = len(made)
    assert decode(family, decoder, do_sample) == expected
    assert len(made) == before or draft != "none", "rounds of the first call are replayed"


def test_it_is_not_used_without_capture_or_where_attention_is_edited(taped, monkeypatch):
    made = masks_made(monkeypatch)
    decode("llama", Decoder("lookup", flex=True), False)
    expected = decode("llava", Decoder("lookup", "pai:alpha=1,gamma=1.5", seed=7), False)
    decoder = Decoder("lookup", "pai:alpha=1,gamma=1.5", seed=7, compile=True, flex=True)
    assert decode("llava", decoder, False) == expected
    assert not made


def test_a_wrong_mask_is_noticed(taped, monkeypatch):
    """Siblings that see each other change the tokens of a tree's rounds."""
    expected = decode("llama", Decoder(seed=7), False)
    monkeypatch.setattr(flex, "tree_mask", seams.siblings_see_each_other(flex.tree_mask))
    decoder = Decoder(DRAFTS["eagle"](), seed=7, compile=True, flex=True)
    assert decode("llama", decoder, False) != expected
