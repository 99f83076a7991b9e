"""Guides on CUDA: the tokens are those without a draft and those of a row alone, and distributions
are those of the CPU.

The same tests run on the CPU among the slow ones, so that they are known to work where they are
skipped.
"""

import copy
import functools

import pytest
import torch
from transformers import AutoTokenizer, LlavaForConditionalGeneration

import mmdecode
from mmdecode.checkpoints import local_path
from mmdecode.testing import drafts
from mmdecode.zoo.scenes import draw_scene, render
from tests.gpu.devices import DEVICES
from tests.support.tiny_vlm import vision_inputs, vision_model
from tests.support.traced import Traced

GUIDES = [
    "vcd",
    "pai:alpha=1,gamma=1.5",
    "causalmm:level=both,gamma=0.5",
    "damro:alpha=1,k=2",
    "dola:bucket=all",
    "conscious_gaze:alpha=2,threshold=3",
    "agla:beta=0.1",
]
MODELS = ["tiny", "zoo"]
QUESTIONS = [
    "Describe the image briefly.",
    "Is there a ring in the image?",
    "Describe the image.",
]
NEW = 12


@pytest.fixture(autouse=True)
def full_precision(monkeypatch):
    """Convolutions too, which round more by default."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@functools.cache
def model(name, device):
    if name == "zoo":
        path = local_path("zoo:llava-scenes")
        return LlavaForConditionalGeneration.from_pretrained(path).eval().to(device)
    return copy.deepcopy(vision_model("llava")).to(device)


@functools.cache
def inputs(name, rows=3):
    if name == "tiny":
        return vision_inputs("llava", rows)
    tokenizer = AutoTokenizer.from_pretrained(local_path("zoo:llava-scenes"))
    images = torch.stack([torch.from_numpy(render(draw_scene(seed))) for seed in range(rows)])
    texts = [f"USER: {'<image>' * 64}\n{text} ASSISTANT:" for text in QUESTIONS[:rows]]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    width = max(map(len, prompts))
    pads = [width - len(prompt) for prompt in prompts]
    return {
        "input_ids": torch.tensor([[0] * n + p for n, p in zip(pads, prompts, strict=True)]),
        "attention_mask": torch.tensor([[0] * n + [1] * (width - n) for n in pads]),
        "pixel_values": (images.permute(0, 3, 1, 2) / 255 - 0.5) / 0.25,
    }


def decode(name, device, guide, draft=None, rows=3, new=NEW, do_sample=False):
    """The decoder, with its trace, and the tokens of each row up to its end."""
    decoder = Traced(draft, guide, seed=3)
    mmdecode.generate(
        model(name, device),
        decoder=decoder,
        max_new_tokens=new,
        do_sample=do_sample,
        **{key: value.to(device) for key, value in inputs(name, rows).items()},
    )
    return decoder, [tokens_of(row) for row in decoder.trace]


def tokens_of(rounds):
    return [t for r in rounds for t in [*r.accepted, r.decided][: r.kept]]


@functools.cache
def undrafted(name, device, guide, do_sample):
    return decode(name, device, guide, do_sample=do_sample)[1]


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("guide", GUIDES)
@pytest.mark.parametrize("name", MODELS)
@DEVICES
def test_a_draft_changes_no_token(device, name, guide, do_sample):
    rows = undrafted(name, device, guide, do_sample)
    if name == "tiny":  # what is trained may be sure of its words
        assert rows != undrafted(name, device, None, do_sample), "the guide does nothing"
    known = drafts.Known(rows, length=4, wrong_at=[2, 9])
    for draft in (known, "lookup", "recycling"):
        decoder, found = decode(name, device, guide, draft, do_sample=do_sample)
        assert found == rows
        assert decoder.stats.accepted > 0 or draft is not known


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("guide", GUIDES)
@pytest.mark.parametrize("name", MODELS)
@DEVICES
def test_a_row_alone_is_as_in_the_batch(device, name, guide, do_sample):
    _, [alone] = decode(name, device, guide, rows=1, do_sample=do_sample)
    assert alone == undrafted(name, device, guide, do_sample)[0]


@pytest.mark.parametrize("guide", GUIDES)
@pytest.mark.parametrize("name", MODELS)
@DEVICES
def test_what_each_branch_says_first_is_what_it_says_on_the_cpu(device, name, guide):
    here, there = (decode(name, where, guide, new=1)[0].trace for where in (device, "cpu"))
    for [ours], [expected] in zip(here, there, strict=True):
        assert ours.opening.keys() == expected.opening.keys() >= {"main", "guided"}
        for branch, logits in expected.opening.items():
            torch.testing.assert_close(ours.opening[branch], logits, atol=2e-3, rtol=1e-3)
