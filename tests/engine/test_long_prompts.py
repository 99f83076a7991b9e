"""Prompts of great length: what reading them makes, and which are refused before anything runs."""

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    CTRLConfig,
    GPT2Config,
    GPTJConfig,
    OPTConfig,
)

from mmdecode.decoder import Decoder
from mmdecode.engine.masks import block_mask
from mmdecode.errors import InputError
from mmdecode.testing.drafts import RandomTrees
from tests.support import tiny_models, tiny_vlm
from tests.support.tiny import text_model

WIDTH = 96


class Dense(TorchDispatchMode):
    """Types of the tensors that an operation makes as large as ``width`` squared."""

    def __init__(self, width):
        super().__init__()
        self.least, self.types = width**2, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and made.numel() >= self.least:
                own = made.untyped_storage().nbytes() >= made.numel()  # else it is a broadcast
                self.types |= {made.dtype} if own else set()
        return result


def words(width=WIDTH, rows=1):
    return torch.randint(1, 60, (rows, width), generator=torch.Generator().manual_seed(3))


def read(model, pads=0, inputs=None, **options):
    """Types of dense tensors that plain generate makes, those made here; the ids are the same."""
    ids = words()
    mask = torch.ones_like(ids)
    mask[:, :pads] = 0
    call = inputs or {"input_ids": ids, "attention_mask": mask}
    call |= {"max_new_tokens": 5, "do_sample": False}
    with Dense(WIDTH) as plain:
        expected = model.generate(**call)
    with Dense(WIDTH) as ours:
        found = model.generate(**call, custom_generate=Decoder(**options))
    assert found.tolist() == expected.tolist()
    return plain.types, ours.types


@pytest.mark.parametrize("draft", [None, RandomTrees()], ids=["none", "trees"])
def test_a_prompt_without_padding_is_read_without_a_mask(draft):
    model = text_model("llama")
    read(model)  # the first call may check the model
    assert read(model, draft=draft) == (set(), set())


def test_layers_that_see_a_window_get_the_mask_that_generate_gives_them():
    plain, ours = read(text_model("mistral"))
    assert plain == ours == {torch.bool, torch.float32}


def test_padding_takes_a_mask_but_no_integers():
    _, ours = read(text_model("llama"), pads=9)
    assert ours == {torch.bool, torch.float32}


def test_a_prompt_with_an_image_is_masked_as_generate_masks_it():
    inputs = tiny_vlm.vision_inputs("llava", batch=1)
    more = words()
    inputs["input_ids"] = torch.cat([inputs["input_ids"], more], 1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    assert read(tiny_vlm.vision_model("llava"), inputs=inputs) == (set(), set())


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_masks_allow_what_a_loop_over_tokens_and_slots_allows(window, tree):
    begin, pads, visible = torch.tensor([5, 2]), torch.tensor([1, 0]), 10
    depths = torch.tensor([[0, 1, 1, 2]]) if tree else torch.arange(4)[None]
    parents = [-1, 0, 0, 1] if tree else [-1, 0, 1, 2]
    ancestors = torch.eye(4, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            ancestors[node] |= ancestors[parent]
    block = ancestors[None] if tree else None
    found = block_mask(begin, pads, depths, block, visible, torch.float32, window)
    for row in range(2):
        for query in range(4):
            for slot in range(visible):
                node = slot - int(begin[row])
                inside = 0 <= node < 4
                seen = bool(ancestors[query, node]) if inside else node < 0
                relative = int(depths[0, node]) if inside else node
                seen &= slot >= int(pads[row])
                seen &= window is None or int(depths[0, query]) - relative < window
                assert (found[row, 0, query, slot] == 0) == (seen or node == query)


ADDED = """
import resource, sys, time, torch
from transformers import LlamaConfig, LlamaForCausalLM
from mmdecode.decoder import Decoder

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32768,
    )
).eval()
decoder = Decoder() if sys.argv[1] == "ours" else None

def read(width):
    ids = torch.randint(1, 500, (1, width), generator=torch.Generator().manual_seed(1))
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "do_sample": False}
    model.generate(ids, custom_generate=decoder, **call)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

before, start = read(64), time.perf_counter()
print(read(16384) - before, time.perf_counter() - start)
"""


@pytest.mark.slow
def test_a_prompt_of_16384_tokens_adds_memory_and_time_like_plain_generate():
    added = {}
    for kind in ("plain", "ours"):
        done = subprocess.run([sys.executable, "-c", ADDED, kind], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        added[kind] = [float(number) for number in done.stdout.split()]
    megabytes, seconds = zip(added["ours"], added["plain"], strict=True)
    assert megabytes[0] < 1.5 * megabytes[1] + 40, added
    assert seconds[0] < 3 * seconds[1] + 1, added


SHAPE = {
    "vocab_size": 80,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "max_position_embeddings": 64,
}
TABLES = {
    "gpt2, learned": GPT2Config(**SHAPE),
    "opt, learned with an offset": OPTConfig(ffn_dim=48, **SHAPE),
    "gptj, a buffer": GPTJConfig(rotary_dim=4, **SHAPE),
    "ctrl, a tensor": CTRLConfig(dff=48, **SHAPE),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_prompt_longer_than_a_table_of_positions_is_refused_before_it_runs(name):
    model = AutoModelForCausalLM.from_config(TABLES[name]).eval()
    widths = []
    model.get_input_embeddings().register_forward_hook(
        lambda _, args, out: widths.append(out.shape[1])
    )
    with pytest.raises(InputError, match=r"prompt of 80 tokens; .* has 64 positions"):
        model.generate(words(80), max_new_tokens=4, custom_generate=Decoder())
    assert max(widths) < 80
    assert model.generate(words(60), max_new_tokens=4, custom_generate=Decoder()).shape == (1, 64)


def test_a_text_longer_than_a_rotary_model_was_made_for_is_warned_of():
    model = text_model("llama")
    call = {"max_new_tokens": 4, "do_sample": False}
    for width, beyond in ((140, 140), (126, 130)):
        expected = model.generate(words(width), **call)
        with pytest.warns(UserWarning, match=rf"text of {beyond} tokens; .* made for 128") as seen:
            found = model.generate(words(width), custom_generate=Decoder(), **call)
        assert len(seen) == 1
        assert found.tolist() == expected.tolist()


def test_a_prompt_that_no_memory_holds_is_refused_before_a_layer_reads_it(monkeypatch):
    deep = {**SHAPE, "hidden_size": 128, "num_hidden_layers": 64, "max_position_embeddings": 10**7}
    model = tiny_models.llama(**deep)
    read = []
    monkeypatch.setattr(type(model.model.layers[0]), "forward", lambda *_, **given: read.append(1))
    ids = torch.ones(2, 1_500_000, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with pytest.raises(InputError, match=r"1500000 tokens in 2 rows needs about [\d.]+ GB"):
        model.generate(ids, attention_mask=mask, max_new_tokens=4, custom_generate=Decoder())
    assert not read


def test_a_rotary_model_reads_as_long_a_prompt_as_plain_generate(monkeypatch):
    model, ids = text_model("llama"), words(300)
    monkeypatch.setattr(model.config, "max_position_embeddings", 2)
    call = {"max_new_tokens": 2, "do_sample": False}
    expected = model.generate(ids, **call)
    with pytest.warns(UserWarning, match="text of 300 tokens; .* made for 2"):
        found = model.generate(ids, custom_generate=Decoder(), **call)
    assert found.tolist() == expected.tolist()
