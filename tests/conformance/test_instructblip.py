"""InstructBLIP passes its language model merged embeddings along with the ids."""

import functools
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import InstructBlipConfig, InstructBlipForConditionalGeneration

import mmdecode
from mmdecode.decoder import Decoder
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.layer_skip import LayerSkip
from mmdecode.draft.lookup import PromptLookup
from mmdecode.engine.adapter import BranchSpec
from mmdecode.errors import IncompatibleError
from mmdecode.guide.causalmm import CausalMM
from mmdecode.guide.cfg import CFG
from mmdecode.guide.damro import DAMRO
from mmdecode.guide.linear import Linear, contrast
from tests.support.tiny import HiddenPath, text_model
from tests.support.tiny_vlm import IMAGE, TEXT, TOWER
from tests.support.vision import assert_contrast_is_live, assert_drafts_change_nothing, decode

NEW = 12


@functools.cache
def model():
    config = InstructBlipConfig(
        vision_config={**TOWER, "patch_size": 4},
        qformer_config={
            "vocab_size": 80,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 24,
            "encoder_hidden_size": 16,
            "cross_attention_frequency": 1,
            "max_position_embeddings": 64,
        },
        text_config={"model_type": "llama", **TEXT},
        num_query_tokens=4,
        image_token_index=IMAGE,
    )
    torch.manual_seed(0)
    built = InstructBlipForConditionalGeneration(config).eval()
    for weight in built.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.4)
    return built


@functools.cache
def inputs():
    torch.manual_seed(1)
    rows = [[0, 0, 0, *[IMAGE] * 4, 5, 6, 7], [0, *[IMAGE] * 4, 5, 9, 8, 3, 4]]
    ids = torch.tensor(rows)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "pixel_values": torch.randn(2, 3, 8, 8),
        "qformer_input_ids": torch.randint(1, 60, (2, 5)),
    }


@functools.cache
def plain():
    return model().generate(**inputs(), max_new_tokens=NEW, do_sample=False)


DRAFTS = {
    "none": lambda: None,
    "lookup": PromptLookup,
    "known_tree": lambda: HiddenPath(plain()[:, -NEW:].tolist()),
    "text_assistant": lambda: Assistant(text_model("llama", seed=9, layers=1), 3),
    "whole_view": lambda: LayerSkip(skip=(), length=3),
}


@pytest.mark.parametrize("draft", DRAFTS)
def test_drafted_tokens_are_those_of_generate(draft):
    assert len(set(plain()[:, -NEW:].flatten().tolist())) >= 8
    options = {"max_new_tokens": NEW, "do_sample": False, **inputs()}
    decoder = Decoder(DRAFTS[draft]())
    found = model().generate(**options, custom_generate=decoder)
    assert found.tolist() == plain().tolist()
    if draft == "whole_view":  # it is given the embeddings
        assert decoder.stats.accepted == decoder.stats.drafted > 0
    found = mmdecode.generate(model(), decoder=decoder, **options)
    assert found.tolist() == plain().tolist()


def test_an_unconditional_branch_reads_no_image():
    words = torch.tensor([[3, 9, 27, 11, 8, 2, 40, 31, 7, 5, 6, 12, 33]])
    decoder = Decoder(guide=CFG(scale=0.0, negative_ids=words))
    options = {"max_new_tokens": NEW, "do_sample": False}
    found = model().generate(**options, **inputs(), custom_generate=decoder)[:, -NEW:]
    alone = model().language_model.generate(words, **options)[:, -NEW:]
    assert found.tolist() == alone.tolist() * 2


def test_embeddings_that_do_not_match_the_ids_are_refused():
    language = model().language_model
    embeds = torch.zeros(1, 4, 32)
    with pytest.raises(IncompatibleError, match="inputs_embeds"):
        language.generate(inputs_embeds=embeds, max_new_tokens=3, custom_generate=Decoder())


@dataclass(frozen=True)
class Asked:
    """A question, by the ids that the Q-Former and the language model read for it."""

    row: int
    text: tuple
    images: tuple = ()

    def build(self, questions):
        """A processor's output for several questions; the text comes after the image tokens."""
        own = inputs()
        rows = [question.row for question in questions]
        made = {name: own[name][rows] for name in ("pixel_values", "qformer_input_ids")}
        ids = own["input_ids"][rows].clone()
        for row, question in enumerate(questions):
            if question.text:
                made["qformer_input_ids"][row, : len(question.text)] = torch.tensor(question.text)
                ids[row, -len(question.text) :] = torch.tensor(question.text)
        return {**made, "input_ids": ids, "attention_mask": (ids != 0).long()}


def first_row():
    return {name: value[:1] for name, value in inputs().items()}


def seen(transform, given=None, questions=None, **options):
    """Greedy tokens of the branch alone that a transform shows."""
    given = given or inputs()
    spec = BranchSpec(name="seen", transform=transform, transform_options=options)
    guide = Linear([spec], [0.0, 1.0])
    asked = [Asked(row, ()) for row in range(len(given["input_ids"]))]
    return decode(guide, model=model(), inputs=given, mm_inputs={"questions": questions or asked})


UNCHANGED = {
    "pixels": {"change": lambda values, draw: values},
    "features": {"change": lambda features, draw: features},
    "tower": {"edit": lambda weights, seen, layer, draw: weights},
    "questions": {"change": lambda question, draw: question},
}


@pytest.mark.parametrize("transform", UNCHANGED)
def test_a_transform_that_changes_nothing_is_the_main_branch(transform):
    assert seen(transform, **UNCHANGED[transform]) == plain()[:, -NEW:].tolist()


CHANGED = {
    "pixels": {"change": lambda v, draw: v + torch.randn(v.shape, generator=draw)},
    "features": {"change": lambda f, draw: f + torch.randn(f.shape, generator=draw)},
    "tokens": {"select": lambda f, salience: salience.topk(2).indices},
    "tower": {"edit": lambda w, seen, layer, draw: w.flip(-1)},
    "questions": {"change": lambda question, draw: replace(question, text=(9, 8))},
}


@pytest.mark.parametrize("transform", CHANGED)
def test_a_row_is_changed_alike_in_every_batch(transform):
    together = seen(transform, **CHANGED[transform])
    for row, expected in zip(together, plain()[:, -NEW:].tolist(), strict=True):
        assert row != expected
    assert seen(transform, given=first_row(), **CHANGED[transform])[0] == together[0]


def test_without_the_image_the_prompt_is_what_stands_around_it():
    for row, found in enumerate(seen("no_image")):
        ids = inputs()["input_ids"][row]
        words = ids[(ids != IMAGE) & (ids != 0)][None]
        alone = model().language_model.generate(words, max_new_tokens=NEW, do_sample=False)
        assert found == alone[0, -NEW:].tolist()


def test_a_question_is_rewritten_for_the_qformer_too():
    change = CHANGED["questions"]["change"]
    asked = [change(Asked(row, ()), None) for row in range(2)]
    built = asked[0].build(asked)
    expected = model().generate(**built, max_new_tokens=NEW, do_sample=False)[:, -NEW:].tolist()
    assert seen("questions", change=change) == expected
    unread = {**built, "qformer_input_ids": inputs()["qformer_input_ids"]}
    other = model().generate(**unread, max_new_tokens=NEW, do_sample=False)[:, -NEW:].tolist()
    assert other != expected


def test_the_qformer_reads_the_chosen_patches():
    chosen = [2, 0]
    own = inputs()
    before = model().vision_model.register_forward_hook(
        lambda _, args, output: type(output)(
            last_hidden_state=output.last_hidden_state[:, [1 + patch for patch in chosen]]
        )
    )
    with before:
        expected = model().generate(**own, max_new_tokens=NEW, do_sample=False)[:, -NEW:].tolist()
    assert seen("tokens", select=lambda f, salience: torch.tensor(chosen)) == expected
    assert not model().vision_model._forward_hooks


def test_pixels_of_another_size_than_trained_for():
    larger = {**inputs(), "pixel_values": torch.randn(2, 3, 12, 12), "max_new_tokens": NEW}
    larger |= {"interpolate_pos_encoding": True, "do_sample": False}
    expected = model().generate(**larger)
    spec = BranchSpec(name="seen", transform="pixels", transform_options=UNCHANGED["pixels"])
    decoder = Decoder(guide=Linear([spec], [0.0, 1.0]))
    assert mmdecode.generate(model(), decoder=decoder, **larger).tolist() == expected.tolist()


def noised():
    """In the manner of VCD."""
    spec = BranchSpec(name="noised", transform="pixels", transform_options=CHANGED["pixels"])
    return Linear([spec], contrast(1.0), 0.1)


GUIDES = {
    "noised": noised,
    "damro": lambda: DAMRO(alpha=0.5, k=2, heads="joined"),
    "causalmm": lambda: CausalMM("both", "random", gamma=0.5),
}


@pytest.mark.parametrize("guide", GUIDES)
def test_guides_of_images_are_drafted_exactly_in_every_batch(guide):
    options = {"model": model(), "inputs": inputs()}
    assert_drafts_change_nothing(GUIDES[guide], **options)
    assert_contrast_is_live(GUIDES[guide](), **options)


def test_copies_of_a_row_share_its_image():
    spec = BranchSpec(name="seen", transform="pixels", transform_options=UNCHANGED["pixels"])
    options = {"num_return_sequences": 2, "do_sample": True, "model": model(), "inputs": inputs()}
    assert decode(Linear([spec], [0.0, 1.0]), **options) == decode(None, **options)


@pytest.mark.parametrize("guide", GUIDES)
def test_a_plain_call_is_refused_and_an_attached_one_is_not(guide):
    decoder = Decoder(guide=GUIDES[guide](), seed=3)
    options = {"max_new_tokens": NEW, "do_sample": False, **inputs()}
    with pytest.raises(IncompatibleError, match=r"attach\(model\)"):
        model().generate(custom_generate=decoder, **options)
    with mmdecode.attach(model()):
        found = model().generate(custom_generate=decoder, **options)[:, -NEW:]
    assert found.tolist() == decode(GUIDES[guide](), model=model(), inputs=inputs())
