"""InstructBLIP hands its language model merged embeddings beside the ids."""

import functools

import pytest
import torch
from transformers import InstructBlipConfig, InstructBlipForConditionalGeneration

import mmdecode
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.layer_skip import LayerSkip
from mmdecode.draft.lookup import PromptLookup
from mmdecode.engine.decoder import Decoder
from mmdecode.errors import IncompatibleError
from mmdecode.guide.cfg import CFG
from tests.conformance.tiny import HiddenPath, text_model
from tests.conformance.tiny_vlm import IMAGE, TEXT, TOWER

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


def test_an_unconditional_branch_sees_no_image():
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
