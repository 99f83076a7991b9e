"""DAMRO: what the reference's code chose and scored, and what must hold on every family."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlavaForConditionalGeneration

import mmdecode
from mmdecode import registry
from mmdecode._compat import attention_configs
from mmdecode.adapters.vision import encoding
from mmdecode.decoder import Decoder
from mmdecode.engine import attention
from mmdecode.engine.branches import ModelRunner
from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.guide.damro import DAMRO
from mmdecode.guide.linear import Linear
from tests.support.tiny import text_model
from tests.support.tiny_vlm import QWEN, plain, reference, vision_inputs, vision_model
from tests.support.vision import (
    Watched,
    assert_contrast_is_live,
    assert_drafts_change_nothing,
    decode,
)

DATA = Path(__file__).parents[1] / "data" / "golden" / "damro"
EXPECTED = load_file(DATA / "expected.safetensors")
RUNS = json.loads((DATA / "manifest.json").read_text())["runs"]
ONE_DIMENSIONAL = ("llava", "llava_next", "idefics3", "internvl", "gemma3", "paligemma", "janus")


def read(query, key, heads):
    """Attention of a class token over patches, read as a tower's layer is read."""
    module = torch.nn.Module()
    plan = attention.TowerPlan(sites={id(module): 0}, reads={0}, joined=heads == "joined")
    with attention.planned(plan):
        attention.attend(module, query, key, key, None)
    (found,) = encoding.salience(plan.chunks(), has_cls=True)
    return found


def test_joined_heads_choose_what_the_reference_chose_for_llava():
    split = [
        EXPECTED[f"headless.{name}"].unflatten(-1, (4, 8)).transpose(1, 2) for name in ("q", "k")
    ]
    found = read(*split, "joined")
    assert torch.allclose(found, EXPECTED["headless.cls_attention"], atol=1e-5)
    features = EXPECTED["headless.patch_features"]
    for k in (1, 4, 10, 40):
        chosen = torch.stack([DAMRO(k=k)._select(features[0], row) for row in found])
        assert torch.equal(chosen, EXPECTED[f"headless.top{k}.indices"])
        kept = torch.stack([row[own] for row, own in zip(features, chosen, strict=True)])
        assert torch.equal(kept, EXPECTED[f"headless.top{k}.features"])
    assert not torch.allclose(read(*split, "mean"), EXPECTED["headless.cls_attention"], atol=1e-3)


def test_the_mean_of_heads_chooses_what_the_reference_chose_for_instructblip():
    query, key, _ = EXPECTED["per_head.qkv"].unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
    found = read(query, key, "mean")
    assert torch.allclose(found, EXPECTED["per_head.cls_attention"], atol=1e-5)
    for k in (4, 10):  # the reference's features are another patch's: it forgets the class token
        chosen = torch.stack([DAMRO(k=k)._select(row, row) for row in found])
        assert torch.equal(chosen, EXPECTED[f"per_head.top{k}.indices"])


@pytest.mark.parametrize("run", RUNS[:3], ids=lambda run: f"alpha_{run['alpha']}")
def test_logits_and_tokens_are_those_of_the_reference(run):
    model = LlavaForConditionalGeneration.from_pretrained(DATA / "tiny_llava_4.43_layout").eval()
    ids = EXPECTED["tiny.input_ids_one_placeholder"][0].tolist()
    first = ids.index(model.config.image_token_id)
    ids = ids[:first] + [ids[first]] * 25 + ids[first + 1 :]
    guide = Watched(DAMRO(run["alpha"], run["topk"], run["beta"], heads="joined"))
    output = mmdecode.generate(
        model,
        input_ids=torch.tensor([ids]),
        pixel_values=EXPECTED["tiny.pixel_values"],
        decoder=Decoder(guide=guide),
        max_new_tokens=len(run["new_ids"]),
        do_sample=False,
        eos_token_id=None,
        output_scores=True,
        return_dict_in_generate=True,
    )
    assert output.sequences[0, len(ids) :].tolist() == run["new_ids"]
    name = f"generate.alpha_{run['alpha']}.beta_{run['beta']}"
    distribution, expected = torch.cat(output.scores), EXPECTED[f"{name}.combined_logits"]
    assert torch.equal(distribution.isinf(), expected.isinf())
    assert torch.allclose(distribution, expected, atol=1e-4)
    for branch, other in (("main", "main"), ("outliers", "selected")):
        assert (branch in guide.scores[0]) == (branch == "main" or run["alpha"] > 0)
        if branch in guide.scores[0]:
            own = torch.cat([scores[branch].logits[0] for scores in guide.scores])
            assert torch.allclose(own, EXPECTED[f"{name}.uncached_{other}"], atol=1e-4)


@pytest.mark.parametrize("heads", ["mean", "joined"])
@pytest.mark.parametrize("family", ONE_DIMENSIONAL)
def test_all_tokens_in_their_order_are_the_main_branch(family, heads):
    guide = DAMRO(k=1000, heads=heads, order="spatial")
    expected, _ = reference(family)
    rows = decode(Linear(guide.branches, [0.0, 1.0]), family)
    assert rows == expected[:, -len(rows[0]) :].tolist()
    if family == "llava":
        assert decode(Linear(DAMRO(k=1000).branches, [0.0, 1.0]), family) != rows  # other places


def test_without_alpha_and_cut_nothing_is_run():
    guide = DAMRO(alpha=0.0, beta=0.0)
    assert decode(guide) == plain("llava")[:, -12:].tolist()
    assert guide.neutral and guide.salience is None


def received(family):
    """Attention that patches get in the chosen layer, by transformers' own eager weights."""
    model, inputs = vision_model(family), vision_inputs(family)
    tower = model.base_model.vision_tower
    with torch.no_grad(), attention_configs(model, "eager"):
        weights = tower(inputs["pixel_values"], output_attentions=True).attentions
    chosen = weights[-2 if family == "llava" else -1].mean(1)
    return chosen[:, 0, 1:] if family == "llava" else chosen.mean(1)


@pytest.mark.parametrize(
    ("family", "measure"), [("llava", "class token"), ("paligemma", "mean received")]
)
def test_the_tokens_are_those_that_get_most_attention(family, measure):
    guide = DAMRO(k=3)
    (branch,) = guide.branches
    chosen = []

    def noted(features, salience):
        chosen.append(guide._select(features, salience).tolist())
        return torch.tensor(chosen[-1])

    guide.branches = [
        replace(branch, transform_options={**branch.transform_options, "select": noted})
    ]
    decode(guide, family)
    rows = [[0], [1, 2]]  # images of the rows that have some
    paid = received(family)
    for found, images in zip(chosen, rows, strict=True):
        ranked = sorted(enumerate(paid[images].flatten().tolist()), key=lambda one: -one[1])
        assert found == [index for index, _ in ranked[:3]]
    assert guide.salience == measure


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_the_branch_holds_k_image_tokens(family):
    guide = Watched(DAMRO(k=2))
    decode(guide, family, max_new_tokens=2)
    adapter = registry.adapter_for(vision_model(family))
    branches = ModelRunner(adapter, guide.branches)
    branches.prefill(guide.call, {})
    images = adapter.spans("image", guide.call.request.prompt_ids).sum(1)
    expected = guide.call.request.prompt_mask.sum(1) - images + images.clamp_max(2)
    assert (branches.cache.start - branches.pads).tolist() == expected.tolist()


def test_temperature_matters():
    greedy = decode(DAMRO(k=2))
    assert decode(DAMRO(k=2), do_sample=True, temperature=1e-6) == greedy
    assert decode(DAMRO(k=2, beta=0.0), do_sample=True, temperature=3.0) != greedy


@pytest.mark.parametrize("family", ["llava", "gemma3", QWEN[1]])
def test_drafts_and_batches_change_nothing(family):
    assert_drafts_change_nothing(lambda: DAMRO(k=2, heads="joined"), family)
    assert_contrast_is_live(DAMRO(k=2), family)


def test_bad_settings_are_refused():
    for wrong in ({"k": 0}, {"heads": "max"}, {"order": "random"}, {"alpha": -1.0}, {"beta": 2.0}):
        with pytest.raises(OptionError):
            DAMRO(**wrong)
    assert registry.create("guide", "damro:k=4,alpha=0.5,heads=joined").k == 4
    with pytest.raises(IncompatibleError, match="reads ids alone itself"):
        text_model("llama").generate(
            torch.tensor([[1, 2]]), custom_generate=Decoder(guide=DAMRO()), max_new_tokens=2
        )
