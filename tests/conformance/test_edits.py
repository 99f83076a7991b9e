"""Edits inside a branch, against uncached passes of the whole model with the same edit."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

import mmdecode
from mmdecode import registry
from mmdecode._compat import attention_configs
from mmdecode.decoder import Decoder
from mmdecode.engine.adapter import BranchSpec
from mmdecode.engine.attention import NAME, AttentionEdit, layer_range, switched
from mmdecode.engine.contracts import Guide, Requirements, StateEdit
from mmdecode.errors import IncompatibleError
from mmdecode.testing import drafts
from tests.support import tiny
from tests.support.tiny_vlm import (
    IMAGE,
    NEW,
    plain,
    reference,
    vision_inputs,
    vision_model,
)

FAMILIES = ("llava", "qwen2_vl", "qwen3_vl", "idefics3", "internvl", "gemma3", "paligemma", "janus")


class Edited(Guide):
    """The main branch's distribution under edits."""

    neutral = False
    branches = ()

    def __init__(self, *edits, needs=None, branches=()):
        self.edits, self.branches, self.wanted = edits, branches, needs or Requirements()
        self.seen = []

    def needs(self, adapter):
        return self.wanted

    def begin(self, call, prefill):
        self.confidence = prefill["main"].logits.softmax(-1).amax(-1)

    def apply(self, constants, call, proposal, outputs):
        self.seen.append(outputs)
        return outputs["main"].logits


def doubled(scores, site):
    return torch.where(site.images, scores * 2.0, scores)


def squared(weights, site):
    weights = weights**2
    return weights / weights.sum(-1, keepdim=True)


ORACLE = {}


def oracle(module, query, key, value, attention_mask, scaling=None, softcap=None, **_):
    mask = attention_mask
    heads = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(heads, 1), value.repeat_interleave(heads, 1)
    scores = query @ key.transpose(2, 3) * scaling
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    rows = ORACLE["rows"](query.shape[2])
    is_text = id(module) in ORACLE["sites"]
    if is_text and ORACLE["stage"] == "scores":
        scores[:, :, rows] = torch.where(
            ORACLE["images"][: scores.shape[-1]], scores[:, :, rows] * 2.0, scores[:, :, rows]
        )
    if mask is not None:
        scores = scores + mask[..., : scores.shape[-1]]
    weights = scores.softmax(-1)
    if is_text and ORACLE["stage"] == "weights":
        chosen = weights[:, :, rows] ** 2
        weights[:, :, rows] = chosen / chosen.sum(-1, keepdim=True)
    return (weights @ value).transpose(1, 2), weights


AttentionInterface.register("oracle", oracle)
AttentionMaskInterface.register("oracle", eager_mask)


def recomputed(family, stage, kind, steps=NEW):
    """Greedy tokens by a pass of the whole prompt and text per token, with nothing cached."""
    model, inputs = vision_model(family), vision_inputs(family, batch=1)
    prompt = inputs["input_ids"].shape[1]
    rows = {
        "all": lambda count: slice(0, count),
        "decoding": lambda count: slice(prompt - 1, count),
        "last_prompt": lambda count: slice(prompt - 1, prompt),
    }
    ids = inputs["input_ids"]
    with attention_configs(model, "oracle"):
        for _ in range(steps):
            ORACLE.update(
                stage=stage,
                rows=rows[kind],
                images=torch.nn.functional.pad((ids[0] == IMAGE), (0, 64)),
                sites={id(m) for n, m in model.get_decoder().named_modules() if "attn" in n},
            )
            options = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
            for name in ("token_type_ids", "mm_token_type_ids"):
                if name in options:
                    fill = 1 if family == "paligemma" else 0
                    more = ids.shape[1] - prompt
                    options[name] = torch.nn.functional.pad(options[name], (0, more), value=fill)
            logits = model(**options, use_cache=False).logits[:, -1]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
            if ids[0, -1] == IMAGE:
                break  # an uncached pass would look for one more image
    return ids[0, prompt:].tolist()


def ours(family, guide, draft=None, batch=1):
    return mmdecode.generate(
        vision_model(family),
        decoder=Decoder(draft, guide),
        max_new_tokens=NEW,
        do_sample=False,
        **vision_inputs(family, batch),
    )


@pytest.mark.one_in(16)
@pytest.mark.parametrize("rows", ["decoding", "last_prompt", "all"])
@pytest.mark.parametrize("stage", ["scores", "weights"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_edit_is_that_of_uncached_passes(family, stage, rows):
    change = {"scores": doubled, "weights": squared}[stage]
    guide = Edited(AttentionEdit(branch="main", rows=rows, **{stage: change}))
    expected = recomputed(family, stage, rows)
    assert len(expected) >= 5
    assert ours(family, guide)[0, -NEW:].tolist()[: len(expected)] == expected
    rows_of_batch = ours(family, guide, batch=3)
    assert rows_of_batch[0, -NEW:].tolist()[: len(expected)] == expected
    known = [row[-NEW:] for row in rows_of_batch.tolist()]
    draft = drafts.Known(known, length=4, wrong_at=[2, 9])
    assert ours(family, guide, draft, batch=3).tolist() == rows_of_batch.tolist()


class Matrices(TorchDispatchMode):
    """Counts results that have all queries of a prompt by at least as many keys, by head."""

    def __init__(self, queries, heads):
        super().__init__()
        self.queries, self.heads, self.count = queries, heads, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        shape = tuple(getattr(result, "shape", ()))
        if len(shape) == 4 and shape[1:3] == (self.heads, self.queries):
            self.count += shape[3] >= self.queries
        return result


ROWS_OF_A_PROMPT = {
    "decoding": Edited(AttentionEdit(branch="main", scores=doubled)),
    "last_prompt": Edited(AttentionEdit(branch="main", rows="last_prompt", weights=squared)),
    "read": Edited(needs=Requirements(attention=frozenset([0, 1]))),
    "all": Edited(AttentionEdit(branch="main", rows="all", weights=squared)),
}


@pytest.mark.parametrize("name", ROWS_OF_A_PROMPT)
def test_queries_that_no_part_asks_for_are_done_as_usual(name):
    queries = vision_inputs("llava", 1)["input_ids"].shape[1]
    with Matrices(queries, vision_model("llava").get_decoder().config.num_attention_heads) as seen:
        ours("llava", ROWS_OF_A_PROMPT[name])
    assert bool(seen.count) == (name == "all")


@pytest.mark.parametrize("name", ROWS_OF_A_PROMPT)
def test_eager_attention_is_edited_alike(name):
    guide, model = ROWS_OF_A_PROMPT[name], copy.deepcopy(vision_model("llava"))
    guide.seen.clear()
    expected = ours("llava", guide, batch=3)
    model.set_attn_implementation("eager")
    decoder = Decoder(guide=guide)
    options = {"max_new_tokens": NEW, "do_sample": False, **vision_inputs("llava")}
    assert mmdecode.generate(model, decoder=decoder, **options).tolist() == expected.tolist()
    usual, eager = (guide.seen[i]["main"] for i in (0, NEW))
    torch.testing.assert_close(usual.logits, eager.logits, atol=3e-5, rtol=1e-5)
    torch.testing.assert_close(dict(usual.attention), dict(eager.attention))


def test_a_cap_on_scores_is_handed_on():
    caps = []

    def noted(module, query, key, value, attention_mask, softcap=None, **kwargs):
        caps.append(softcap)
        return oracle(module, query, key, value, attention_mask, softcap=softcap, **kwargs)

    AttentionInterface.register("noted", noted)
    AttentionMaskInterface.register("noted", eager_mask)
    model = copy.deepcopy(tiny.text_model("gemma2"))
    model.set_attn_implementation("noted")
    ORACLE.update(stage=None, rows=lambda count: slice(0, count), sites=())
    with switched(model):
        model(input_ids=torch.tensor([[5, 6, 7]]))
    assert caps == [model.config.attn_logit_softcapping] * model.config.num_hidden_layers


def test_the_edit_matters_and_leaves_no_trace():
    before = plain("llava", batch=1)
    for rows in ("decoding", "all"):
        guide = Edited(AttentionEdit(branch="main", rows=rows, scores=doubled))
        assert ours("llava", guide).tolist() != before.tolist()
    assert plain("llava", batch=1).tolist() == before.tolist()
    assert vision_model("llava").config._attn_implementation == "sdpa"


def test_edits_are_of_the_branch_the_layers_and_the_strength_named():
    text = vision_model("llava").get_decoder()
    layers, strengths = [], []

    def noted(scores, site):
        layers.append((site.layer, scores.shape[0]))
        strengths.append(site.strength.flatten().tolist())
        return scores * 3.0

    second = BranchSpec(name="second", stage=2)
    edit = AttentionEdit(
        branch="second",
        layers=(1.0, 1.0),
        scores=noted,
        strength=lambda call, earlier: (earlier["main"].logits[..., 0] > 0).float(),
    )
    guide = Edited(edit, branches=[second])
    found = ours("llava", guide, batch=3)
    assert {layer for layer, _ in layers} == {len(text.layers) - 1}
    assert {rows for _, rows in layers} == {3}
    assert found.tolist() == reference("llava")[0].tolist()  # the main branch is as it was
    changed = [
        not torch.allclose(s["main"].logits[row], s["second"].logits[row], atol=1e-4)
        for s in guide.seen[:1]
        for row in range(3)
    ]
    signs = [bool(v > 0) for v in guide.seen[0]["main"].logits[:, 0, 0]]
    assert changed == signs and len(set(signs)) == 2


def test_a_branch_that_replaces_the_main_one_is_alone_from_the_first_round_on():
    law = BranchSpec(name="edited", stage=2, replaces_after_prefill="main")
    edit = AttentionEdit(branch="edited", rows="last_prompt", scores=doubled)
    expected = ours(
        "llava", Edited(AttentionEdit(branch="main", rows="last_prompt", scores=doubled))
    )
    guide = Edited(edit, branches=[law])
    assert ours("llava", guide).tolist() == expected.tolist()
    assert all(set(scores) == {"main"} for scores in guide.seen)


def test_weights_are_read_of_every_node():
    guide = Edited(needs=Requirements(attention=frozenset([0])))
    found = ours("llava", guide, batch=3)
    assert found.tolist() == reference("llava")[0].tolist()
    inputs = vision_inputs("llava")
    model = vision_model("llava")
    width = inputs["input_ids"].shape[1]
    with attention_configs(model, "eager"):
        ids = found[:, :-1]
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, NEW - 1), value=1)
        output = model(
            **{**inputs, "input_ids": ids, "attention_mask": mask}, output_attentions=True
        )
    expected = output.attentions[0][:, :, width - 1 :, :width]
    read = torch.cat([scores["main"].attention[0] for scores in guide.seen], 2)
    assert torch.allclose(read, expected, atol=1e-5)
    assert torch.equal(guide.seen[-1]["main"].images, inputs["input_ids"] == IMAGE)


def test_states_are_edited_by_position():
    def halved(layer, states, earlier):
        return states if layer == 0 else 0.5 * (states + earlier[0])

    layers = vision_model("llava").get_decoder().layers
    hooks = [len(layer._forward_hooks) for layer in layers]
    guide = Edited(StateEdit(branch="main", change=halved))
    expected = ours("llava", guide, batch=3)
    assert expected.tolist() != reference("llava")[0].tolist()
    known = drafts.Known([r[-NEW:] for r in expected.tolist()], length=4, wrong_at=[2, 9])
    assert ours("llava", guide, known, batch=3).tolist() == expected.tolist()
    alone = ours("llava", guide)
    assert alone[0, -NEW:].tolist() == expected[0, -NEW:].tolist()
    assert [len(layer._forward_hooks) for layer in layers] == hooks


def test_exits_are_logits_of_inner_layers():
    guide = Edited(needs=Requirements(early_exit_logits=frozenset([1])))
    ours("llava", guide)
    scores, model = guide.seen[0]["main"], vision_model("llava")
    expected = model.lm_head(model.get_decoder().norm(scores.hidden[1]))
    assert torch.allclose(scores.early_exit_logits[1], expected, atol=1e-5)
    assert not torch.allclose(scores.early_exit_logits[1], scores.logits, atol=1e-2)


def test_layers_are_fractions_of_the_depth():
    assert list(layer_range((0.0, 1.0), 4)) == [0, 1, 2, 3]
    assert list(layer_range((0.5, 0.5), 33)) == [16]
    assert list(layer_range((0.15, 0.6), 32)) == list(range(5, 20))


def test_an_encoder_decoder_gives_no_access_to_its_layers():
    decoder = Decoder(guide=Edited(needs=Requirements(early_exit_logits=frozenset([0]))))
    with pytest.raises(IncompatibleError, match="no access to the model's layers"):
        tiny.ours(decoder, "whisper")


def test_overlapping_calls_give_a_model_back_as_it_was():
    model = vision_model("llava")
    inputs = torch.tensor([[5, 6, 7]])
    before = model(input_ids=inputs).logits
    one, other = switched(model), switched(model.base_model.vision_tower)
    one.__enter__()
    other.__enter__()
    assert torch.equal(model(input_ids=inputs).logits, before)
    one.__exit__(None, None, None)
    assert model.base_model.vision_tower.config._attn_implementation == NAME
    other.__exit__(None, None, None)
    assert model.base_model.vision_tower.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "sdpa"
    with switched(model), switched(model):
        assert torch.equal(model(input_ids=inputs).logits, before)


@pytest.mark.filterwarnings("ignore:guide CausalMM is inactive")  # a tower of two layers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_guide_of_images_runs_in_half_precision(dtype):
    model = copy.deepcopy(vision_model("llava")).to(dtype)
    inputs = vision_inputs("llava")
    inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
    names = [e.name for e in registry.describe("guide")]
    images = [n for n in names if "image" in registry.resolve("guide", n)[0].requires_inputs]
    assert len(images) >= 10
    for spec in [
        *images,
        "causalmm:released=true",
        "causalmm:level=both,first=0.6",
        "dola",
        "dcla",
    ]:
        if spec.partition(":")[0] in ("icd", "ritual", "prompt_bias"):
            continue  # they ask for questions or eight-bit images
        decoder = Decoder(guide=spec, seed=0)
        found = mmdecode.generate(
            model, decoder=decoder, max_new_tokens=3, do_sample=False, **inputs
        )
        assert found.shape[1] == inputs["input_ids"].shape[1] + 3, spec
