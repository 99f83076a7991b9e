"""`mmdecode.generate` and `attach`: arguments that transformers does not pass to a callable."""

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPImageProcessor,
    GenerationConfig,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    pipeline,
)

import mmdecode
from mmdecode.decoder import Decoder
from mmdecode.draft.lookup import PromptLookup
from mmdecode.errors import IncompatibleError, InputError, OptionError
from mmdecode.testing.drafts import Known, TestDrafter
from tests.support.tiny import (
    NEW,
    VOCAB,
    audio,
    plain,
    prompts,
    reference,
    small_of,
    text_model,
    whisper_model,
)
from tests.support.tiny_vlm import IMAGE, vision_inputs, vision_model


def character_tokenizer(words=None):
    """One printable character for each id of the tiny models; ``words`` for some of them."""
    vocabulary = {(words or {}).get(i, chr(33 + i)): i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def generate(batch=1, decoder=None, **options):
    options = {"max_new_tokens": NEW, "do_sample": False, **prompts(batch), **options}
    return mmdecode.generate(text_model("llama"), decoder=decoder, **options)


class Collector:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.tokens, self.blocks, self.ends = [], [], 0

    def put(self, value):
        self.blocks.append(value.reshape(-1).tolist())
        self.tokens += self.blocks[-1]

    def end(self):
        self.ends += 1


def test_quantize_is_a_name_of_the_package():
    from mmdecode.quantization import quantize

    assert "quantize" in mmdecode.__all__
    assert mmdecode.quantize is quantize


def test_without_a_decoder_it_is_plain_generate():
    assert generate(3).tolist() == plain("llama").tolist()


@pytest.mark.parametrize("draft", ["none", "known"])
def test_stop_strings_end_rows_where_generate_ends_them(draft):
    rows = reference("llama", (("batch", 4),))[1]
    tokenizer = character_tokenizer()
    stops = [tokenizer.decode(rows[0][3:5]), tokenizer.decode(rows[2][6:7])]
    options = {"stop_strings": stops, "tokenizer": tokenizer, "pad_token_id": 0}
    options["eos_token_id"] = VOCAB + 1  # so that transformers pads rows that ended
    expected = plain("llama", batch=4, **options)
    decoder = Decoder(Known(rows)) if draft == "known" else None
    found = generate(4, decoder, **options)
    assert found.tolist() == expected.tolist()
    assert int((found[0, 9:] != 0).sum()) <= 5


def test_stop_strings_of_a_config_end_rows_too(monkeypatch):
    rows = reference("llama", (("batch", 4),))[1]
    tokenizer = character_tokenizer()
    config = GenerationConfig(
        stop_strings=[tokenizer.decode(rows[0][3:5])],
        max_new_tokens=NEW,
        eos_token_id=VOCAB + 1,  # so that transformers pads rows that ended
        pad_token_id=0,
    )
    call = {"generation_config": config, "tokenizer": tokenizer, **prompts(4)}
    expected = text_model("llama").generate(**call)
    assert mmdecode.generate(text_model("llama"), **call).tolist() == expected.tolist()
    assert config.stop_strings is not None
    monkeypatch.setattr(text_model("llama").generation_config, "stop_strings", ["x"])
    with pytest.raises(OptionError, match=r"model\.generation_config\.stop_strings = None"):
        generate(4, tokenizer=tokenizer)


def test_stop_strings_without_a_tokenizer_are_refused():
    with pytest.raises(OptionError, match="pass tokenizer"):
        generate(stop_strings="x")


@pytest.mark.parametrize("draft", [None, "known"])
def test_a_streamer_gets_the_tokens_that_generate_would_stream(draft):
    rows = reference("llama", (("batch", 1),))[1]
    theirs, mine = Collector(), Collector()
    options = {"eos_token_id": rows[0][10], "pad_token_id": 0}
    expected = plain("llama", batch=1, streamer=theirs, **options)
    generate(1, Decoder(Known(rows)) if draft else None, streamer=mine, **options)
    assert mine.tokens == theirs.tokens == expected[0].tolist()
    assert mine.ends == theirs.ends == 1
    assert draft is None or max(map(len, mine.blocks[1:])) > 2


class Broken(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        raise RuntimeError("broken")


def test_a_streamer_is_ended_when_decoding_fails():
    streamer = Collector()
    with pytest.raises(RuntimeError, match="broken"):
        generate(streamer=streamer, stopping_criteria=[Broken()])
    assert streamer.ends == 1


def test_a_streamer_is_ended_when_the_request_is_refused():
    streamer = Collector()
    with pytest.raises(IncompatibleError, match="num_beams"):
        generate(streamer=streamer, num_beams=2)
    assert streamer.ends == 1


def test_a_streamer_for_several_rows_is_refused():
    with pytest.raises(IncompatibleError, match="the batch has 2"):
        generate(2, streamer=Collector())


def test_a_draft_model_that_does_not_exist_is_refused_at_once():
    model, ids = small_of("llama"), torch.tensor([[1, 2, 3]])
    for make in (
        lambda: mmdecode.generate(model, ids, draft_model="./nowhere", max_new_tokens=2),
        lambda: Decoder("assistant:model=./nowhere"),
        lambda: mmdecode.draft.Assistant("./nowhere"),
    ):
        with pytest.raises(InputError, match=r"model folder './nowhere' does not exist; give a"):
            make()
    with pytest.raises(OptionError, match=r"no option 'path'; did you mean 'model'\?"):
        Decoder("assistant:path=./nowhere")


def test_a_model_given_as_a_drafter_is_named_without_its_modules():
    with pytest.raises(OptionError) as caught:
        Decoder(draft=small_of("llama"))
    assert str(caught.value) == (
        "draft=LlamaForCausalLM is a model, not a drafter: use mmdecode.generate(..., "
        "draft_model=small), or draft=mmdecode.draft.Assistant(small), where small is that model"
    )


def test_a_draft_model_is_an_assistant():
    decoder = Decoder()
    found = generate(3, decoder, draft_model=small_of("llama"))
    assert found.tolist() == plain("llama").tolist()
    assert decoder.stats.drafted > 0
    with pytest.raises(IncompatibleError, match="one draft"):
        generate(3, Decoder(PromptLookup()), draft_model=small_of("llama"))


@pytest.mark.parametrize(("given", "meant"), [(1 << 20, "max_bytes=1048576"), (True, "")])
def test_a_prompt_cache_that_is_none_is_refused(given, meant):
    with pytest.raises(
        OptionError, match=rf"prompt_cache={given}; .* such as PromptCache\({meant}"
    ):
        generate(prompt_cache=given)


def test_request_names_decide_the_noise():
    ids = torch.tensor([[5, 6, 7], [5, 6, 7]])
    options = {"do_sample": True, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    decoder = Decoder(seed=1)
    first, second = generate(2, decoder, request=["a", "b"], **options).tolist()
    assert first != second
    assert generate(2, decoder, request=["b", "a"], **options).tolist() == [second, first]


class Listener(TestDrafter):
    """Proposes nothing and keeps the raw inputs of each call."""

    def __init__(self):
        self.inputs_of_calls = []

    def begin(self, call, prefill):
        self.inputs_of_calls.append(dict(call.request.inputs))
        return super().begin(call, prefill)


FAMILY_CALLS = {
    "llava": lambda **options: vision_model("llava").generate(
        **vision_inputs("llava"), max_new_tokens=2, do_sample=False, **options
    ),
    "whisper": lambda **options: whisper_model().generate(
        audio(2)["input_features"], language="en", task="transcribe", max_new_tokens=2, **options
    ),
}
RAW = {
    "llava": (lambda: vision_model("llava"), vision_inputs("llava")["pixel_values"]),
    "whisper": (whisper_model, audio(2)["input_features"]),
}


@pytest.mark.parametrize("family", FAMILY_CALLS)
def test_raw_inputs_reach_a_decoder_inside_attach_and_only_there(family):
    call, (model, raw) = FAMILY_CALLS[family], RAW[family]
    draft = Listener()
    decoder = Decoder(draft)
    call(custom_generate=decoder)
    with mmdecode.attach(model()) as attached:
        assert attached is model()
        inside = call(custom_generate=decoder)
        call(custom_generate=decoder, mm_inputs={"note": ["a"]})
        plainly = call()
        mmdecode.generate(model(), decoder=decoder, **prompts_of(family))
    call(custom_generate=decoder)
    assert inside.tolist() == plainly.tolist()
    before, during, named, front, after = draft.inputs_of_calls
    assert before == after == {}
    name = {"llava": "pixel_values", "whisper": "input_features"}[family]
    assert torch.equal(during[name], raw)
    assert named["note"] == ["a"] and torch.equal(named[name], raw)
    assert torch.equal(front[name], raw)


def prompts_of(family):
    if family == "whisper":
        return {**audio(2), "language": "en", "task": "transcribe", "max_new_tokens": 2}
    return {**vision_inputs("llava"), "max_new_tokens": 2, "do_sample": False}


def test_attach_leaves_no_trace():
    model = text_model("llama")
    before = dict(vars(model))

    def other(*args, **kwargs):
        return "of the caller's own"

    with pytest.raises(RuntimeError, match="broken"), mmdecode.attach(model):
        assert "generate" in vars(model)
        raise RuntimeError("broken")
    with mmdecode.attach(model):
        with mmdecode.attach(model):
            assert generate(3).tolist() == plain("llama").tolist()
        assert plain("llama", custom_generate=Decoder()).tolist() == plain("llama").tolist()
    assert vars(model) == before
    model.generate = other
    try:
        with mmdecode.attach(model):
            assert model.generate() == "of the caller's own"
        assert vars(model)["generate"] is other
    finally:
        del model.generate
    assert vars(model) == before


def test_a_callable_that_is_no_decoder_is_left_alone_inside_attach():
    def stranger(model, input_ids, **kwargs):
        return sorted(name for name in kwargs if name.startswith("mm_"))

    with mmdecode.attach(vision_model("llava")):
        assert "mm_inputs" not in FAMILY_CALLS["llava"](custom_generate=stranger)


def image_pipeline():
    """Of a tiny LLaVA, whose processor reads letters and pictures of 8 by 8."""
    tokenizer = character_tokenizer({IMAGE: "<image>"})
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"], "pad_token": "!"})
    tokenizer.padding_side = "left"
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}
        ),
        tokenizer=tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
    )
    return pipeline("image-text-to-text", model=vision_model("llava"), processor=processor)


def test_a_decoder_works_inside_the_image_pipeline():
    ask = image_pipeline()
    noise = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
    images = [Image.fromarray(array) for array in noise]
    texts = ["<image>abc", "de<image>f"]

    def answer(**options):
        kwargs = {"max_new_tokens": 8, "do_sample": False, "num_beams": 1, **options}
        return ask(images=images, text=texts, batch_size=2, generate_kwargs=kwargs)

    expected = answer()
    draft = Listener()
    decoder = Decoder(draft)
    assert answer(custom_generate=decoder) == expected
    with mmdecode.attach(ask.model):
        assert answer(custom_generate=decoder) == expected
    seen = [call.get("pixel_values") for call in draft.inputs_of_calls]
    half = len(seen) // 2
    assert half and all(pixels is None for pixels in seen[:half])
    assert all(pixels is not None for pixels in seen[half:])
