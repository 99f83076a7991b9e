"""`past_key_values` of transformers, in and out, as with plain `generate`."""

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache

from mmdecode import generate
from mmdecode.decoder import Decoder
from mmdecode.draft.eagle import Eagle
from mmdecode.draft.lookup import PromptLookup
from mmdecode.engine import checks
from mmdecode.engine.prompt_cache import PromptCache
from mmdecode.errors import IncompatibleError
from tests.engine.test_prefill import eagle
from tests.support.tiny import prompts, text_model
from tests.support.tiny_vlm import vision_inputs, vision_model

NEW = 6
DRAFTS = {
    "none": lambda: None,
    "lookup": lambda: PromptLookup(length=3),
    "eagle": lambda: Eagle(eagle(), depth=3, top_k=2, nodes=6),
}


def turns(model, inputs, *decoders, **options):
    """Ids of three turns, by one decoder or one each; each turn adds three words."""
    decoders, cache = decoders if len(decoders) > 1 else decoders * 3, DynamicCache()
    ids, mask, found = inputs["input_ids"], inputs["attention_mask"], []
    images = {k: v for k, v in inputs.items() if k not in ("input_ids", "attention_mask")}
    for turn, decoder in enumerate(decoders):
        more = images if turn == 0 else {}
        ids = model.generate(
            input_ids=ids,
            attention_mask=mask,
            **more,
            past_key_values=cache,
            max_new_tokens=NEW,
            do_sample=False,
            custom_generate=decoder,
            **options,
        )
        found.append((ids.tolist(), cache.get_seq_length()))
        words = torch.arange(3).repeat(len(ids), 1) + 7 + turn
        ids = torch.cat([ids, words], 1)
        mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], 1)
    return found


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_three_turns_are_those_of_generate(family, draft):
    model = text_model(family)
    decoder = Decoder(DRAFTS[draft]())
    assert turns(model, prompts(3), decoder) == turns(model, prompts(3), None)
    reused = decoder.stats.prompt_tokens["reused"]
    # a drafter that reads the prompt's states has it read again
    assert not reused if draft == "eagle" else reused


@pytest.mark.parametrize("draft", ["none", "lookup"])
def test_three_turns_about_an_image(draft):
    model = vision_model("llava")
    decoder = Decoder(DRAFTS[draft]())
    expected = turns(model, vision_inputs("llava"), None)
    assert turns(model, vision_inputs("llava"), decoder) == expected
    assert decoder.stats.prompt_tokens["reused"]


def test_a_cache_is_used_however_little_it_saves():
    """Images of earlier turns are not passed again, so the prompt cannot be read whole."""
    model, inputs = vision_model("llava"), vision_inputs("llava")
    found = []
    for decoder in (None, Decoder()):
        cache = DynamicCache()
        options = {"past_key_values": cache, "do_sample": False, "custom_generate": decoder}
        ids = model.generate(**inputs, **options, max_new_tokens=2)
        ids = torch.cat([ids, torch.arange(60).repeat(len(ids), 1) % 50 + 1], 1)
        mask = F.pad(inputs["attention_mask"], (0, 62), value=1)
        call = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": NEW}
        found.append(model.generate(**call, **options).tolist())
    assert found[0] == found[1]


def test_turns_may_alternate_with_plain_generate():
    """A cache that generate has filled, and one that it goes on from."""
    model, inputs = text_model("llama"), prompts(2)
    expected = turns(model, inputs, None)
    for order in ([None, Decoder(), None], [Decoder(PromptLookup()), None, Decoder()]):
        assert turns(model, inputs, *order) == expected


def test_a_guide_reads_its_own_branch():
    model, inputs = text_model("llama"), prompts(2)
    options = {"guidance_scale": 1.5}
    assert turns(model, inputs, Decoder(PromptLookup()), **options) == turns(
        model, inputs, Decoder(), **options
    )


def test_the_output_holds_the_cache():
    model, cache = text_model("llama"), DynamicCache()
    found = model.generate(
        **prompts(2),
        past_key_values=cache,
        max_new_tokens=NEW,
        do_sample=False,
        return_dict_in_generate=True,
        custom_generate=Decoder(),
    )
    assert found.past_key_values is cache
    assert cache.get_seq_length() == found.sequences.shape[1] - 1
    found = model.generate(
        **prompts(2), past_key_values=DynamicCache(), max_new_tokens=NEW, do_sample=False
    )


def test_keys_are_those_of_generate():
    model, (mine, theirs) = text_model("llama"), (DynamicCache(), DynamicCache())
    for cache, decoder in ((mine, Decoder(PromptLookup())), (theirs, None)):
        model.generate(
            **prompts(1),
            past_key_values=cache,
            max_new_tokens=NEW,
            do_sample=False,
            custom_generate=decoder,
        )
    for one, other in zip(mine.layers, theirs.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys)
        torch.testing.assert_close(one.values, other.values)


def test_positions_after_an_image_of_qwen_need_it():
    model, inputs = vision_model("qwen2_vl"), vision_inputs("qwen2_vl")
    with pytest.raises(IncompatibleError, match="positions after an image depend on its size"):
        turns(model, inputs, Decoder())


def test_a_cache_of_other_rows_is_refused():
    model, inputs, cache = text_model("llama"), prompts(3), DynamicCache()
    options = {"past_key_values": cache, "max_new_tokens": 2, "do_sample": False}
    model.generate(**inputs, **options)
    long = {name: F.pad(value[1:], (0, 9), value=1) for name, value in inputs.items()}
    with pytest.raises(IncompatibleError, match="hold 3 rows, the prompt has 2; take or repeat"):
        model.generate(**long, **options, custom_generate=Decoder())


@pytest.mark.parametrize("family", ["llava", "llava_next"])
@pytest.mark.parametrize("shared", [False, True])
def test_branches_of_a_guide_have_no_part_in_the_cache(family, shared):
    model, inputs = vision_model(family), vision_inputs(family)
    found = []
    for kept in (True, False):
        cache = DynamicCache() if kept else None
        decoder = Decoder(guide="vcd", seed=1)
        more = {"past_key_values": cache} if kept else {}
        more |= {"prompt_cache": PromptCache()} if shared else {}
        call = {**inputs, "max_new_tokens": NEW, "do_sample": False, "decoder": decoder, **more}
        names = {"request": ["a", "b", "c"]}
        ids = generate(model, **call, **names)[:, inputs["input_ids"].shape[1] :] % 50 + 1
        ids = torch.cat([inputs["input_ids"], ids], 1)
        call |= {
            "input_ids": ids,
            "attention_mask": F.pad(inputs["attention_mask"], (0, NEW), value=1),
        }
        if kept:  # what was generated is replaced by words, so is its part of the cache
            cache.crop(inputs["input_ids"].shape[1] - cache.get_seq_length())
        found.append(generate(model, **call, **names).tolist())
    assert found[0] == found[1]


def test_caches_that_cannot_be_continued():
    model, inputs = text_model("mistral"), prompts(1)
    cache = DynamicCache(config=model.config)
    model.generate(**inputs, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
    long = {name: torch.cat([value] * 4, 1) for name, value in inputs.items()}
    with pytest.raises(IncompatibleError, match="layers of type DynamicSlidingWindowLayer"):
        model.generate(**long, past_key_values=cache, max_new_tokens=2, custom_generate=Decoder())
    model = text_model("llama")
    cache = DynamicCache()
    model.generate(**inputs, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
    with pytest.raises(IncompatibleError, match="pass the whole text as input_ids"):
        checks.continued(cache, inputs["input_ids"])
