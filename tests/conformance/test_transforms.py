"""Inputs that a branch reads instead of the prompt, in every family: `vision.transforms`."""

import inspect
from dataclasses import dataclass

import pytest
import torch
from transformers.models.llava.modeling_llava import LlavaModel

import mmdecode
from mmdecode.decoder import Decoder
from mmdecode.engine.adapter import BranchSpec
from mmdecode.errors import IncompatibleError
from mmdecode.guide.linear import Linear
from tests.support.tiny_vlm import (
    IMAGE,
    NEW,
    QWEN,
    plain,
    reference,
    vision_inputs,
    vision_model,
    without_tokens,
)

FAMILIES = (
    "llava",
    "llava_next",
    *QWEN,
    "idefics3",
    "smolvlm",
    "internvl",
    "gemma3",
    "paligemma",
    "janus",
)


@dataclass(frozen=True)
class Asked:
    """A question whose processor output is known: what Answerer hands over, in small."""

    text: str
    images: tuple
    inputs: dict

    def build(self, questions):
        return self.inputs


def seen(family, transform, inputs=None, mm_inputs=None, **options):
    """Greedy output of the branch alone that a transform shows."""
    spec = BranchSpec(name="seen", transform=transform, transform_options=options)
    decoder = Decoder(guide=Linear([spec], [0.0, 1.0]), seed=3)
    return mmdecode.generate(
        vision_model(family),
        decoder=decoder,
        max_new_tokens=NEW,
        do_sample=False,
        mm_inputs=mm_inputs,
        **(inputs or vision_inputs(family)),
    )


def questions(family):
    inputs = vision_inputs(family)
    return {"questions": [Asked("?", (), inputs)] * len(inputs["input_ids"])}


UNCHANGED = {
    "pixels": {"change": lambda values, draw: values},
    "features": {"change": lambda features, draw: features},
    "tokens": {"select": lambda features, salience: torch.arange(len(features))},
    "tower": {"edit": lambda weights, seen, layer, draw: weights},
    "questions": {"change": lambda question, draw: question},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("transform", UNCHANGED)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_transform_that_changes_nothing_is_the_main_branch(family, transform):
    if transform == "tokens" and family in QWEN:
        pytest.skip("chosen tokens are read at consecutive positions, not on their grid")
    expected, _ = reference(family)
    found = seen(family, transform, mm_inputs=questions(family), **UNCHANGED[transform])
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_that_are_laid_out_alike_are_read_in_one_pass(family):
    """Two branches; the main one too, unless it is given otherwise, as with encoded images."""
    specs = [
        BranchSpec(name=name, transform="pixels", transform_options=UNCHANGED["pixels"])
        for name in "ab"
    ]
    decoder = Decoder(guide=Linear(specs, [0.0, 0.5, 0.5]))
    model, read = vision_model(family), []
    options = {"decoder": decoder, "max_new_tokens": NEW, "do_sample": False}
    hook = model.model.register_forward_hook(lambda module, inputs, output: read.append(module))
    try:
        found = mmdecode.generate(model, **options, **vision_inputs(family))
    finally:
        hook.remove()
    expected, _ = reference(family)
    assert found.tolist() == expected.tolist()
    assert len(read) <= 2


CHANGED = {
    "pixels": {"change": lambda v, draw: v + torch.randn(v.shape, generator=draw)},
    "features": {"change": lambda f, draw: f + torch.randn(f.shape, generator=draw)},
    "tokens": {"select": lambda f, salience: salience.topk(1).indices},
    "tower": {"edit": lambda w, seen, layer, draw: w.flip(-1) if w.shape[-1] > 1 else w * 0},
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("transform", CHANGED)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_changed_alike_in_every_batch(family, transform):
    inputs = vision_inputs(family)
    together = seen(family, transform, **CHANGED[transform])[:, -NEW:]
    expected, _ = reference(family)
    assert together[0].tolist() != expected[0, -NEW:].tolist()  # it does change something
    assert together[1].tolist() == expected[1, -NEW:].tolist()  # a row without images
    for row in (0, 2):
        found = seen(family, transform, inputs=alone(family, inputs, row), **CHANGED[transform])[
            0, -NEW:
        ]
        assert found.tolist() == together[row].tolist()


def alone(family, inputs, row):
    """One row of three, as a processor would make it alone."""
    mask = inputs["attention_mask"][row].bool()
    own = {
        name: inputs[name][row : row + 1, mask]
        for name in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
        if name in inputs
    }
    images = slice(0, 1) if row == 0 else slice(1, 3)
    values = inputs["pixel_values"]
    if family in QWEN:
        cells = inputs["image_grid_thw"].prod(1)
        first, last = int(cells[: images.start].sum()), int(cells[: images.stop].sum())
        grid = inputs["image_grid_thw"][images]
        return own | {"pixel_values": values[first:last], "image_grid_thw": grid}
    if family in ("idefics3", "smolvlm"):
        return own | {"pixel_values": values[row : row + 1, : images.stop - images.start]}
    own["pixel_values"] = values[images]
    if "image_sizes" in inputs:
        own["image_sizes"] = inputs["image_sizes"][images]
    return own


@pytest.mark.parametrize("family", FAMILIES)
def test_without_images_the_prompt_is_the_text_around_them(family):
    inputs = vision_inputs(family)
    expected = plain(family, inputs=without_tokens(inputs, {IMAGE}))[:, -NEW:]
    assert seen(family, "no_image")[:, -NEW:].tolist() == expected.tolist()


def wordless(ids, mask):
    """Image tokens and the last token; the token before an image that another came before."""
    kept = []
    for index, (token, real) in enumerate(zip(ids, mask, strict=True)):
        begins_later = IMAGE in kept and token != IMAGE and ids[index + 1 : index + 2] == [IMAGE]
        if real and (token == IMAGE or begins_later or index + 1 == len(ids)):
            kept.append(token)
    return kept


@pytest.mark.parametrize("family", FAMILIES)
def test_only_images_are_the_prompt_without_its_words(family):
    inputs = vision_inputs(family)
    ids, mask = inputs["input_ids"].tolist(), inputs["attention_mask"].tolist()
    rows = [wordless(*row) for row in zip(ids, mask, strict=True)]
    width = max(map(len, rows))
    assert [len(row) for row in rows][1] == 1  # a row without images
    left = {
        **inputs,
        "input_ids": torch.tensor([[0] * (width - len(r)) + r for r in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows]),
    }
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in inputs:
            marked = (left["input_ids"] == IMAGE).long()
            left[name] = marked * 0 if family == "paligemma" else marked
    expected = plain(family, inputs=left)[:, -NEW:]
    assert seen(family, "only_images")[:, -NEW:].tolist() == expected.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_only_images_can_be_changed_as_pixels_are(family):
    before = seen(family, "only_images")[:, -NEW:].tolist()
    same = seen(family, "only_images", **UNCHANGED["pixels"])[:, -NEW:].tolist()
    found = seen(family, "only_images", **CHANGED["pixels"])[:, -NEW:].tolist()
    assert same == before
    assert found[0] != before[0] and found[1] == before[1]


@pytest.mark.skipif(
    "mm_encoder_outputs" not in inspect.signature(LlavaModel.forward).parameters,
    reason="this transformers repeats images of rows that have several out of order",
)
@pytest.mark.parametrize("family", FAMILIES)
def test_copies_of_a_row_share_its_images(family):
    inputs = vision_inputs(family)
    options = {"num_return_sequences": 2, "do_sample": True, "max_new_tokens": NEW}
    spec = BranchSpec(name="seen", transform="pixels", transform_options=UNCHANGED["pixels"])
    outputs = [
        mmdecode.generate(
            vision_model(family), decoder=Decoder(guide=guide, seed=3), **options, **inputs
        )
        for guide in (None, Linear([spec], [0.0, 1.0]))
    ]
    assert outputs[0].tolist() == outputs[1].tolist()


def test_images_that_were_encoded_before_are_refused():
    spec = BranchSpec(name="seen", transform="pixels", transform_options=UNCHANGED["pixels"])
    decoder = Decoder(guide=Linear([spec], [0.0, 1.0]))
    model = vision_model("llava")
    options = {"max_new_tokens": 2, "do_sample": False, **vision_inputs("llava")}
    if "mm_encoder_outputs" in model.base_model.forward.__code__.co_varnames:
        with pytest.raises(IncompatibleError, match=r"attach\(model\)"):
            model.generate(custom_generate=decoder, **options)
    with mmdecode.attach(model):
        model.generate(custom_generate=decoder, **options)
    with pytest.raises(IncompatibleError, match="no such transform"):
        seen("llava", "noise")
    with pytest.raises(IncompatibleError, match="Answerer"):
        seen("llava", "questions", change=lambda question, draw: question)


@pytest.mark.parametrize("transform", CHANGED)
def test_a_batch_without_images_is_as_its_rows_are_among_others(transform):
    inputs = vision_inputs("llava", images=False)
    found = seen("llava", transform, inputs=inputs, **CHANGED[transform])
    assert found.tolist() == plain("llava", inputs=inputs).tolist()
