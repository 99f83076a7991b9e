"""A tiny random LLaVA with a real LlavaProcessor, and images."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPImageProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

TEMPLATE = (
    "{% for message in messages %}USER: "
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>\n{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %} ASSISTANT:{% endif %}"
)
WORDS = [
    "USER: Is there a red circle in the image? ASSISTANT: Yes",
    "USER: Is there a blue square in the image? ASSISTANT: No",
    "Yes No Yes No",
    "USER: How many rings are there? What is beside the star? Describe the image. ASSISTANT: one",
]
SPECIAL = ["<pad>", "<s>", "</s>", "<image>"]
SIDE, PATCH = 16, 4


def build_processor():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        show_progress=False,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(WORDS * 2, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=["<image>"],
    )
    return LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size={"height": SIDE, "width": SIDE}, do_center_crop=False
        ),
        tokenizer=fast,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def build_model(processor, seed=0):
    """Weights large enough that image and question decide the answer."""
    tokenizer = processor.tokenizer
    torch.manual_seed(seed)
    config = LlavaConfig(
        text_config={
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 160,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": PATCH,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    model = LlavaForConditionalGeneration(config).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.4)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


def array(seed=0, size=(SIDE, SIDE)):
    return np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)


def image(seed=0, size=(SIDE, SIDE)):
    return Image.fromarray(array(seed, size))


@pytest.fixture(scope="session")
def processor():
    return build_processor()


@pytest.fixture(scope="session")
def model(processor):
    return build_model(processor)


@pytest.fixture(scope="session")
def folder(tmp_path_factory, processor, model):
    """The tiny random model as a checkpoint."""
    path = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def kit():
    """The functions above, for test modules, which cannot import this one."""
    return SimpleNamespace(
        array=array,
        image=image,
        build_processor=build_processor,
        build_model=build_model,
        tokens_per_image=(SIDE // PATCH) ** 2,
    )
