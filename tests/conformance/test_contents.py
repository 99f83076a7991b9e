"""Rows without names are named by their images, and not by what fills these up in a batch."""

import pytest
import torch
from transformers import AutoModelForImageTextToText, LlavaConfig

import mmdecode
from mmdecode import registry
from mmdecode.adapters.vision import encoding
from mmdecode.decoder import Decoder
from tests.conformance.test_transforms import CHANGED, UNCHANGED, alone, seen
from tests.support.tiny_vlm import (
    END,
    IMAGE,
    LLAVA,
    NEW,
    SIGLIP,
    TOWER,
    pixels,
    plain,
    vision_inputs,
    vision_model,
)

PIXTRAL = {"model_type": "pixtral", **TOWER, "image_size": 16, "patch_size": 4}


def adapter_of(family):
    return registry.adapter_for(vision_model(family))


def llava(**changes):
    torch.manual_seed(0)
    return registry.adapter_for(
        AutoModelForImageTextToText.from_config(LlavaConfig(**{**LLAVA, **changes})).eval()
    )


def test_an_image_is_named_by_all_its_pixels_where_nothing_fills_them_up():
    inputs = vision_inputs("llava")
    found = adapter_of("llava").contents(inputs, inputs["input_ids"])
    assert [len(own) for own in found] == [1, 0, 2]
    assert torch.equal(torch.stack([*found[0], *found[2]]), inputs["pixel_values"])


def untiled():
    """One image of LLaVA-NeXT, of two pictures, in a batch of images of three, and alone."""
    inputs = vision_inputs("llava_next")
    inputs["pixel_values"][0, 2] = 0
    own = alone("llava_next", inputs, row=0)
    return inputs, own | {"pixel_values": own["pixel_values"][:, :2]}


def test_tiles_of_other_images_do_not_name_a_row():
    together, own = untiled()
    adapter = adapter_of("llava_next")
    found = adapter.contents(together, together["input_ids"])
    assert torch.equal(found[0][0], own["pixel_values"][0])
    assert torch.equal(found[2][1], together["pixel_values"][2, :2])  # of two again
    assert torch.equal(found[2][0], together["pixel_values"][1])
    (again,) = adapter.contents(own, own["input_ids"])
    assert torch.equal(again[0], found[0][0])


def test_a_row_of_tiles_draws_alike_in_every_batch():
    together, own = untiled()
    options = {"do_sample": True, "temperature": 3.0, "max_new_tokens": NEW}
    model = vision_model("llava_next")
    texts = [
        mmdecode.generate(model, decoder=Decoder(seed=3), **options, **inputs)[0, -NEW:].tolist()
        for inputs in (together, own)
    ]
    assert texts[0] == texts[1]
    transforms = [
        seen("llava_next", "pixels", inputs, **CHANGED["pixels"])[0, -NEW:].tolist()
        for inputs in (together, own)
    ]
    same = seen("llava_next", "pixels", together, **UNCHANGED["pixels"])[0, -NEW:].tolist()
    assert transforms[0] == transforms[1] != same


@pytest.mark.parametrize("family", ["idefics3", "smolvlm"])
def test_what_a_mask_hides_does_not_name_a_row(family):
    inputs = vision_inputs(family)
    adapter, ids = adapter_of(family), inputs["input_ids"]
    values = inputs["pixel_values"]
    mask = torch.ones_like(values[:, :, 0], dtype=torch.long)
    unpadded = adapter.contents(inputs, ids)
    assert [len(own) for own in unpadded] == [1, 0, 2]
    for fill in ({}, {"pixel_attention_mask": mask}):
        found = adapter.contents({**inputs, **fill}, ids)
        assert torch.equal(found[0][0], values[0, 0]) and torch.equal(found[2][1], values[2, 1])
    grown = torch.nn.functional.pad(values, (0, 4, 0, 2))
    wide = torch.nn.functional.pad(mask, (0, 4, 0, 2))
    found = adapter.contents({"pixel_values": grown, "pixel_attention_mask": wide}, ids)
    for own, before in zip(found, unpadded, strict=True):
        for one, other in zip(own, before, strict=True):
            assert torch.equal(one, other)


def test_what_fills_up_images_of_pixtral_does_not_name_a_row():
    adapter = llava(
        vision_config=PIXTRAL, vision_feature_layer=-1, vision_feature_select_strategy="full"
    )
    line = [IMAGE, IMAGE, END]
    ids = torch.tensor([[0, 0, 0, 5, *line, *line, 6], [IMAGE] * 4 + [END, 7, 8, 9, 9, 9, 9]])
    sizes = torch.tensor([[8, 8], [4, 16]])
    values = pixels("llava", [None] * 2, 2, [0, 1])["pixel_values"]
    values = torch.nn.functional.pad(values, (0, 8))
    found = adapter.contents({"pixel_values": values, "image_sizes": sizes}, ids)
    assert torch.equal(found[0][0], values[0, :, :, :8])
    assert torch.equal(found[1][0], values[1, :, :4])


# Salience and features of the same tokens


@pytest.mark.parametrize("tower", ["clip", "siglip"])
def test_salience_is_of_the_neighbouring_features_however_they_were_selected(tower):
    vision = {**SIGLIP, "patch_size": 4} if tower == "siglip" else LLAVA["vision_config"]
    values = {"pixel_values": torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))}
    encoded = {}
    for strategy in ("default", "full"):
        adapter = llava(vision_config=vision, vision_feature_select_strategy=strategy)
        with torch.no_grad():
            encoded[strategy] = encoding.encode(adapter, values, salient="mean")
        assert len(encoded[strategy].salience) == len(encoded[strategy].features)
    fewer, more = (
        (own.features.unflatten(0, (3, -1)), own.salience.unflatten(0, (3, -1)))
        for own in encoded.values()
    )
    assert torch.allclose(more[0][:, 1:], fewer[0], atol=1e-6)
    assert torch.allclose(more[1][:, 1:], fewer[1], atol=1e-6)
    assert bool(more[1][:, 0].any()) == (tower == "siglip"), "a class token is no patch"


# Features that are added after the first layers


def test_features_are_changed_at_every_depth():
    model = vision_model("qwen3_vl")
    found = seen("qwen3_vl", "features", change=lambda features, draw: features * 0)

    def blind(_, args, output):
        assert output.deepstack_features
        output.pooler_output = output.pooler_output * 0
        output.deepstack_features = [level * 0 for level in output.deepstack_features]
        return output

    hook = model.model.visual.register_forward_hook(blind)
    try:
        expected = plain("qwen3_vl")
    finally:
        hook.remove()
    assert found.tolist() == expected.tolist() != plain("qwen3_vl").tolist()
