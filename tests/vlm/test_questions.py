"""A question becomes the prompt that its model knows, with its images where they belong."""

import copy
import dataclasses
import warnings
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    ChameleonProcessor,
    Gemma3Processor,
    Idefics3Processor,
    InstructBlipProcessor,
    JanusProcessor,
    LlavaNextProcessor,
    PaliGemmaProcessor,
)
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
from transformers.models.chameleon.image_processing_pil_chameleon import (
    ChameleonImageProcessorPil,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import (
    Idefics3ImageProcessorPil,
)
from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from mmdecode.checkpoints import ZOO
from mmdecode.errors import InputError, UnsupportedModelError
from mmdecode.train.zoo.llava_scenes import TEMPLATE
from mmdecode.vlm import Answerer
from mmdecode.vlm.messages import Turn
from mmdecode.vlm.questions import Prompts
from tests.support.tiny_vlm import CONFIGS, image_tokens

SIZE = {"height": 8, "width": 8}


@pytest.fixture
def prompts(model, processor):
    return Prompts(model, processor)


@pytest.fixture
def images(kit):
    return [kit.image(seed) for seed in range(3)]


@pytest.fixture
def untemplated(kit, model):
    processor = kit.build_processor()
    processor.chat_template = None
    return Prompts(model, processor)


# The prompt


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        ("Is it?", 1, "USER: <image>\nIs it? ASSISTANT:"),
        ("Is it?", 2, "USER: <image>\n<image>\nIs it? ASSISTANT:"),
        ("<image>\nIs it?", 1, "USER: <image>\nIs it? ASSISTANT:"),
        ("Is it? ", 0, "USER: Is it?  ASSISTANT:"),
    ],
)
def test_the_chat_template_and_the_plain_prompt_of_llava_agree(
    prompts, untemplated, images, text, count, expected
):
    for built in (prompts, untemplated):
        question = built.question(text, images[:count], text_only=not count)
        assert built.prompt(question) == expected


def test_images_stand_where_the_text_says(prompts, untemplated, images):
    text = "First <image> and then <image>."
    found = untemplated.prompt(untemplated.question(text, images[:2]))
    assert found == "USER: First <image> and then <image>. ASSISTANT:"
    found = prompts.prompt(prompts.question(text, images[:2]))
    assert found == "USER: First <image>\n and then <image>\n. ASSISTANT:"


def test_a_template_that_puts_images_first_warns_once(kit, model, images):
    processor = kit.build_processor()
    processor.chat_template = TEMPLATE  # of the shipped model, and of LLaVA-1.5
    moved = Prompts(model, processor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moved.prompt(moved.question("<image> What?", images[:1]))
        kept = Prompts(model, kit.build_processor())
        kept.prompt(kept.question("Is <image> it?", images[:1]))
    with pytest.warns(UserWarning, match="puts all images of a message before") as shown:
        for text in ("Is <image> it?", "Is it <image>?"):
            found = moved.prompt(moved.question(text, images[:1]))
            assert found.startswith("USER: <image>\nIs")
    assert len(shown) == 1


def test_the_shipped_template_has_a_system(kit, model):
    processor = kit.build_processor()
    processor.chat_template = TEMPLATE
    turns = [Turn("system", "Be brief."), Turn("user", "What?"), Turn("assistant", "One.")]
    prompts = Prompts(model, processor)
    asked = prompts.question("Why?", text_only=True, history=turns)
    assert prompts.prompt(asked) == (
        "Be brief. USER: What? ASSISTANT: One.</s>USER: Why? ASSISTANT:"
    )
    assert (ZOO / "llava-scenes" / "chat_template.jinja").read_text() == TEMPLATE


def test_inputs_are_those_of_the_processor_padded_on_the_left(prompts, processor, images, kit):
    asked = [
        prompts.question("Is there a red circle in the image?", images[:1]),
        prompts.question("What?", images[1:3]),
        prompts.question("What is it?", text_only=True),
    ]
    found = prompts.build(asked)
    mask = found["attention_mask"].bool()
    assert (mask[:, 1:] >= mask[:, :-1]).all()
    assert (~mask).any()
    image_token = prompts.processor.image_token_id
    counts = (found["input_ids"] == image_token).sum(1).tolist()
    assert counts == [kit.tokens_per_image, 2 * kit.tokens_per_image, 0]
    for row, question in enumerate(asked):
        alone = processor(
            text=prompts.prompt(question), images=list(question.images) or None, return_tensors="pt"
        )
        assert found["input_ids"][row, mask[row]].tolist() == alone["input_ids"][0].tolist()
    stock = processor.image_processor(images, return_tensors="pt")["pixel_values"]
    assert torch.equal(found["pixel_values"], stock)


def test_the_caller_of_a_tokenizer_that_pads_on_the_right_finds_it_so(kit, model, images):
    processor = kit.build_processor()
    processor.tokenizer.padding_side = "right"
    prompts = Prompts(model, processor)
    asked = [prompts.question(text, images[:1]) for text in ("What?", "What is beside the star?")]
    assert prompts.build(asked)["attention_mask"][:, -1].tolist() == [1, 1]
    assert processor.tokenizer.padding_side == "right"


def test_a_template_that_begins_the_text_is_not_begun_twice(kit, model, images):
    processor = kit.build_processor()
    tokenizer = processor.tokenizer
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    plain = Prompts(model, processor)
    begun = kit.build_processor()
    begun.tokenizer = tokenizer
    begun.chat_template = "<s>" + processor.chat_template
    for built in (plain, Prompts(model, begun)):
        ids = built.build([built.question("What?", images[:1])])["input_ids"]
        assert (ids == tokenizer.bos_token_id).sum() == 1


def test_a_changed_question_is_built_like_the_first(prompts, images):
    question = prompts.question("What?", images[:1])
    other = dataclasses.replace(question, text="You are confused. What?", images=(images[1],))
    found = other.build([question, other])
    assert found["input_ids"].shape[0] == 2
    assert not torch.equal(found["pixel_values"][0], found["pixel_values"][1])
    blind = question.build([dataclasses.replace(question, images=())])
    assert "pixel_values" not in blind


def test_inputs_have_the_dtype_of_the_model(kit, processor, images):
    prompts = Prompts(kit.build_model(processor).to(torch.bfloat16), processor)
    found = prompts.build([prompts.question("What?", images[:1])])
    assert found["pixel_values"].dtype == torch.bfloat16
    assert found["input_ids"].dtype == torch.int64


# What does not belong together


@pytest.mark.parametrize(
    ("text", "count", "message"),
    [
        ("Is it?", 0, "has no image; give one, or ask text alone with text_only=True"),
        ("<image> Is it?", 0, "has no image"),
        ("<image> Is it?", 2, "2 images and 1 placeholder, more images than placeholders"),
        ("<image> or <image>?", 1, "1 image and 2 placeholders, more placeholders than images"),
        ("", 1, "expected a text"),
        (" \n", 1, "expected a text"),
        (None, 1, "expected a text"),
        ("Is\x00 it?", 1, "control characters; expected plain text"),
        ("Is\x1b[31m it?", 1, "control characters; expected plain text"),
    ],
)
def test_a_question_and_its_images_must_belong_together(prompts, images, text, count, message):
    with pytest.raises(InputError, match=message):
        prompts.question(text, images[:count])


def test_a_placeholder_without_an_image_is_refused_of_text_alone_too(prompts):
    with pytest.raises(InputError, match="has no image"):
        prompts.question("<image> Is it?", text_only=True)


def test_a_template_that_drops_images_is_refused(kit, model, images):
    processor = kit.build_processor()
    processor.chat_template = "USER: {{ messages[0]['content'][-1]['text'] }} ASSISTANT:"
    prompts = Prompts(model, processor)
    with pytest.raises(InputError, match=r"leaves 0 placeholders '<image>' for 1 image; give"):
        prompts.build([prompts.question("What?", images[:1])])


def test_a_template_that_fails_is_refused(kit, model, images):
    processor = kit.build_processor()
    processor.chat_template = "{{ raise_exception('only one turn') }}"
    prompts = Prompts(model, processor)
    with pytest.raises(InputError, match="cannot be filled in: only one turn"):
        prompts.build([prompts.question("What?", images[:1])])


def test_what_a_processor_refuses_is_an_input_error(kit, model, images, monkeypatch):
    processor = kit.build_processor()
    prompts = Prompts(model, processor)

    def narrow(*args, **kwargs):
        raise ValueError("absolute aspect ratio must be smaller than 200, got 300")

    monkeypatch.setattr(type(processor.image_processor), "__call__", narrow)
    with pytest.raises(
        InputError, match=r"LlavaProcessor refuses .*smaller than 200, got 300; try"
    ):
        prompts.build([prompts.question("What?", images[:1])])


def test_a_processor_that_reads_no_images_is_refused(model, processor):
    with pytest.raises(UnsupportedModelError, match=r"has no tokenizer; give the processor"):
        Prompts(model, processor.tokenizer)


# Other families, with their own processors


def with_tokens(tokenizer, **tokens):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"extra_special_tokens": list(tokens.values())})
    for name, token in tokens.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    return tokenizer


FAMILIES = {
    "llava_next": lambda t: LlavaNextProcessor(
        LlavaNextImageProcessorPil(
            size={"shortest_edge": 8}, crop_size=SIZE, image_grid_pinpoints=[[8, 8], [8, 16]]
        ),
        copy.deepcopy(t),
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ),
    "idefics3": lambda t: Idefics3Processor(
        Idefics3ImageProcessorPil(size={"longest_edge": 8}, max_image_size={"longest_edge": 8}),
        with_tokens(
            t,
            fake_token="<fake_token_around_image>",
            global_token="<global-img>",
            end_token="<end_of_utterance>",
        ),
        image_seq_len=4,
    ),
    "gemma3": lambda t: Gemma3Processor(
        Gemma3ImageProcessorPil(size=SIZE),
        with_tokens(t, boi_token="<boi>", eoi_token="<eoi>", image_token="<soft>"),
        image_seq_length=4,
    ),
    "paligemma": lambda t: PaliGemmaProcessor(
        SiglipImageProcessorPil(size=SIZE, image_seq_length=4), copy.deepcopy(t)
    ),
    "janus": lambda t: JanusProcessor(
        JanusImageProcessorPil(size=SIZE, min_size=8),
        with_tokens(t, image_token="<picture>", boi_token="<boi>", eoi_token="<eoi>"),
        num_image_tokens=4,
    ),
    "chameleon": lambda t: ChameleonProcessor(
        ChameleonImageProcessorPil(size={"shortest_edge": 8}, crop_size=SIZE),
        with_tokens(t, boi_token="<boi>", eoi_token="<eoi>"),
        image_seq_length=4,
    ),
    "instructblip": lambda t: InstructBlipProcessor(
        BlipImageProcessorPil(size=SIZE), copy.deepcopy(t), copy.deepcopy(t), num_query_tokens=4
    ),
}


def named(family):
    """What `Prompts` looks at of a model."""
    config = SimpleNamespace(model_type=family)
    return SimpleNamespace(config=config, device="cpu", dtype=torch.float32)


SEEING = ["llava_next", "idefics3", "gemma3", "paligemma", "janus"]


def family_model(family, processor):
    """The tiny random model of a family, with the processor's vocabulary."""
    config = CONFIGS[family]()
    tokenizer = processor.tokenizer
    config.text_config.vocab_size = len(tokenizer)
    own = {"gemma3": "<soft>", "janus": "<picture>"}.get(family, "<image>")
    for name in ("image_token_id", "image_token_index"):
        if hasattr(config, name):
            setattr(config, name, tokenizer.convert_tokens_to_ids(own))
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and "vq" not in name:
            torch.nn.init.normal_(weight, std=0.3)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of PaliGemma's processor
@pytest.mark.parametrize("family", SEEING)
def test_each_family_answers_as_its_own_generate_does(family, processor, kit):
    built = FAMILIES[family](processor.tokenizer)
    model = family_model(family, built)
    answerer = Answerer(model, built)
    images = [kit.image(0, (8, 8)), kit.image(1, (8, 16))]
    texts = ["What?", "Is there a red circle in the image?"]
    found = answerer(images, texts, max_new_tokens=6, on_error="raise")
    for image, text, answer in zip(images, texts, found, strict=True):
        inputs = answerer.prompts.build([answerer.prompts.question(text, [image])])
        stock = model.generate(**inputs, do_sample=False, max_new_tokens=6)
        assert answer.token_ids == stock[0, inputs["input_ids"].shape[1] :].tolist()
    assert found[0].token_ids != found[1].token_ids
    blind = answerer(255 - kit.array(0, (8, 8)), "What?", max_new_tokens=6)
    assert blind.margin != pytest.approx(found[0].margin, abs=1e-3), "it does not look"


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of PaliGemma's processor
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "instructblip"])
def test_each_family_takes_several_images_in_one_question(family, processor, kit):
    built = FAMILIES[family](processor.tokenizer)
    prompts = Prompts(named(family), built)
    images = [kit.image(seed, (8, 8)) for seed in range(3)]
    found = prompts.build(
        [
            prompts.question("What?", images[:1]),
            prompts.question("<image> or <image>?", images[1:]),
        ]
    )
    token = {"gemma3": "<soft>", "janus": "<picture>"}.get(family, "<image>")
    counts = (found["input_ids"] == built.tokenizer.convert_tokens_to_ids(token)).sum(1).tolist()
    one = image_tokens(family)
    assert counts == [one, 2 * one]
    assert found["attention_mask"][:, -1].tolist() == [1, 1]
    assert "labels" not in found


def test_instructblip_takes_one_image_which_its_processor_inserts(processor, kit):
    built = FAMILIES["instructblip"](processor.tokenizer)
    prompts = Prompts(named("instructblip"), built)
    images = [kit.image(seed, (8, 8)) for seed in range(2)]
    asked = [prompts.question("What?", images[:1]), prompts.question("Is it?", images[1:])]
    found = prompts.build(asked)
    assert found["pixel_values"].shape[0] == found["qformer_input_ids"].shape[0] == 2
    image_token = built.tokenizer.convert_tokens_to_ids("<image>")
    assert (found["input_ids"] == image_token).sum(1).tolist() == [4, 4]
    mask = found["attention_mask"]
    assert (mask[:, 1:] >= mask[:, :-1]).all()
    alone = [prompts.build([question])["input_ids"][0].tolist() for question in asked]
    kept = [ids[m].tolist() for ids, m in zip(found["input_ids"], mask.bool(), strict=True)]
    assert kept == alone
    assert len(alone[0]) != len(alone[1])
    with pytest.raises(InputError, match="exactly one image per question, and this one has 2"):
        prompts.build([prompts.question("What?", images)])
