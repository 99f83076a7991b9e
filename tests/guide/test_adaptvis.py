"""ScalingVis and AdaptVis, against what the reference's own code computed."""

import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.engine.attention import NAME, AttentionPlan, planned
from mmdecode.engine.noise import Noise
from mmdecode.errors import OptionError
from mmdecode.guide.adaptvis import AdaptVis
from mmdecode.guide.scalingvis import ScalingVis
from tests.guide.test_inside import decoded
from tests.support.tiny_vlm import NEW, reference, vision_inputs, vision_model

DATA = Path(__file__).parents[1] / "data" / "golden" / "adaptvis"
EXPECTED = load_file(DATA / "expected.safetensors")
MANIFEST = json.loads((DATA / "manifest.json").read_text())
CLOSE = {"atol": 1e-5, "rtol": 0.0}


@functools.cache
def module():
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=4)
    config._attn_implementation = NAME
    attention = LlamaAttention(config, layer_idx=0).eval()
    weights = {k.removeprefix("weights."): v for k, v in EXPECTED.items() if "_proj" in k}
    attention.load_state_dict(weights)
    return attention, LlamaRotaryEmbedding(config)


def plan_of(guide, is_prompt=True):
    last = torch.zeros(1, 13, dtype=torch.bool)
    last[:, -1] = True
    return AttentionPlan(
        sites={id(module()[0]): 0},
        depth=1,
        edits=[(edit, slice(0, 1)) for edit in guide.edits],
        reads=frozenset([0]),
        images=EXPECTED["image_positions"],
        decoding_rows=last,
        is_prompt=is_prompt,
        positions=torch.arange(13)[None],
        keys=torch.arange(13)[None],
        noise=Noise.of(0, [0]),
    )


def attended(plan):
    attention, rotary = module()
    states = EXPECTED["hidden_states"]
    with torch.no_grad(), planned(plan):
        return attention(
            states,
            position_embeddings=rotary(states, torch.arange(13)[None]),
            attention_mask=EXPECTED["causal_mask"],
        )


@pytest.mark.parametrize("weight", MANIFEST["weights"])
def test_attention_is_that_of_the_reference(weight):
    plan = plan_of(ScalingVis(weight))
    output, _ = attended(plan)
    expected = EXPECTED[f"weight_{weight}.probabilities"][:, :, -1:]
    torch.testing.assert_close(plan.weights[0], expected, **CLOSE)
    torch.testing.assert_close(output, EXPECTED[f"weight_{weight}.attention_output"], **CLOSE)
    seen = EXPECTED["causal_mask"] == 0
    scores = plan.apply(EXPECTED["unscaled.masked_scores"].clone(), 0, seen, "scores")
    expected = EXPECTED[f"weight_{weight}.masked_scores"]
    torch.testing.assert_close(scores[:, :, -1], expected[:, :, -1], **CLOSE)
    assert torch.equal(scores[:, :, :-1], EXPECTED["unscaled.masked_scores"][:, :, :-1])


def test_tokens_after_the_prompt_attend_as_before():
    plan = plan_of(ScalingVis(2.0), is_prompt=False)
    attended(plan)
    expected = EXPECTED["decode_step_weight_2.0.probabilities"]
    torch.testing.assert_close(plan.weights[0][:, :, -1:], expected, **CLOSE)


@pytest.mark.parametrize("threshold", [0.3, 0.4])
def test_confidence_chooses_as_the_reference_does(threshold):
    found = AdaptVis(threshold=threshold).confident(EXPECTED["first_step_logits"])
    choices = [case["choice_at"][str(threshold)] for case in MANIFEST["confidence_rule"]]
    assert found.tolist() == [choice == "weight2" for choice in choices]


def test_confidence_is_rounded_before_it_is_compared():
    logits = torch.tensor([0.396, 0.604]).log()
    even = torch.tensor([0.2, 0.2, 0.2, 0.396, 0.004]).log()
    assert AdaptVis(threshold=0.6).confident(logits)
    assert AdaptVis(threshold=0.4).confident(even)  # 0.396 counts as 0.4
    assert not AdaptVis(threshold=0.41).confident(even)


def test_equal_weights_are_one_weight():
    for weight in (0.0, 3.0):
        expected = decoded("llava", Decoder(guide=ScalingVis(weight)))
        assert decoded("llava", Decoder(guide=AdaptVis(weight, weight))).tolist() == (
            expected.tolist()
        )


def test_rows_choose_by_themselves():
    confidence = reference_confidence()
    threshold = float(confidence.sort().values[1]) - 0.005
    weak, strong = (decoded("llava", Decoder(guide=ScalingVis(w))) for w in (0.2, 3.0))
    found = decoded("llava", Decoder(guide=AdaptVis(0.2, 3.0, threshold)))
    sharpened = confidence.round(decimals=2) >= threshold
    assert 0 < sharpened.sum() < 3
    expected = [strong[row] if own else weak[row] for row, own in enumerate(sharpened)]
    assert found.tolist() == torch.stack(expected).tolist()
    assert weak[0].tolist() != strong[0].tolist()


def reference_confidence():
    inputs = vision_inputs("llava")
    output = vision_model("llava").generate(
        **inputs,
        max_new_tokens=1,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.logits[0].double().softmax(-1).amax(-1)


def test_a_row_without_images_stays():
    expected, _ = reference("llava")
    found = decoded("llava", Decoder(guide=ScalingVis(3.0)), max_new_tokens=NEW)
    assert found[1].tolist() == expected[1].tolist()
    assert found[2].tolist() != expected[2].tolist()


def test_prompts_without_images_are_left_alone_with_a_warning():
    inputs = vision_inputs("llava", images=False)
    expected = decoded("llava", Decoder(), inputs)
    for name in ("scalingvis:weight=3", "adaptvis:unsure=3,sure=3", "dagcd"):
        with pytest.warns(UserWarning, match="is inactive: the prompts have no image tokens"):
            found = decoded("llava", Decoder(guide=name), inputs)
        assert found.tolist() == expected.tolist()


def test_options():
    assert ScalingVis(1.0).neutral and not ScalingVis(0.0).neutral
    assert AdaptVis(1.0, 1.0).neutral and not AdaptVis(1.0, 1.5).neutral
    named = registry.create("guide", "adaptvis:unsure=0.8,sure=2,threshold=0.3")
    assert (named.weight_below, named.weight_above, named.threshold) == (0.8, 2, 0.3)
    with pytest.raises(OptionError):
        ScalingVis(-1)
    with pytest.raises(OptionError):
        AdaptVis(0.5, -1)
    with pytest.raises(OptionError):
        AdaptVis(threshold=3)
