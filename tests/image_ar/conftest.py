"""Tiny random image models as checkpoints."""

import shutil

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

from mmdecode.models.llamagen import LlamaGenConfig, LlamaGenForImageGeneration
from mmdecode.models.multiscale_vq import MultiScaleVQ, MultiScaleVQConfig
from mmdecode.models.var import VarConfig, VarForImageGeneration
from mmdecode.models.vq import VQConfig, VQModel
from mmdecode.zoo.scenes import NOUNS

CODES, SIDE, SLOTS = 24, 5, 6
NAMES = {0: "ring", 1: "star", 2: "hound, dog", 3: "cup"}
WORDS = "a red blue ring star beside".split()


def with_random_weights(model, seed, std=0.5):
    """Weights large enough that images differ."""
    dice = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=std, generator=dice)
    return model.eval()


def tiny_llamagen(**options):
    shape = {
        "vocab_size": CODES,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "grid_size": SIDE,
        "num_classes": len(NAMES),
    }
    return with_random_weights(LlamaGenForImageGeneration(LlamaGenConfig(**shape | options)), 1)


def tiny_vq(codes=CODES):
    config = VQConfig(
        codebook_size=codes,
        codebook_dim=4,
        channels=8,
        channel_multipliers=(1, 1),
        residual_blocks=1,
        latent_channels=8,
        norm_groups=2,
    )
    torch.manual_seed(2)
    return VQModel(config).eval()


@pytest.fixture(scope="session")
def classes(tmp_path_factory):
    """A LlamaGen of named classes."""
    path = tmp_path_factory.mktemp("classes")
    tiny_llamagen(id2label=NAMES).save_pretrained(path)
    tiny_vq().save_pretrained(path / "vq")
    return path


@pytest.fixture(scope="session")
def scenes(tmp_path_factory):
    """A LlamaGen of the classes that the shipped one has."""
    path = tmp_path_factory.mktemp("scenes")
    labels = dict(enumerate(NOUNS))
    tiny_llamagen(num_classes=len(labels), id2label=labels).save_pretrained(path)
    tiny_vq().save_pretrained(path / "vq")
    return path


@pytest.fixture(scope="session")
def captions(tmp_path_factory):
    """A LlamaGen of captions, with text encoder and tokenizer."""
    path = tmp_path_factory.mktemp("captions")
    tiny_llamagen(num_classes=0, caption_slots=SLOTS, caption_size=12).save_pretrained(path)
    tiny_vq().save_pretrained(path / "vq")
    config = T5Config(
        vocab_size=16, d_model=12, d_kv=6, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0
    )
    with_random_weights(T5EncoderModel(config), 3).save_pretrained(path / "text_encoder")
    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def scales(tmp_path_factory):
    """A VAR beside its tokenizer."""
    path = tmp_path_factory.mktemp("scales")
    shared = {"codebook_dim": 4, "patch_nums": (1, 2, 3, 4)}
    config = MultiScaleVQConfig(
        codebook_size=16,
        channels=8,
        channel_multipliers=(1, 1),
        residual_blocks=1,
        norm_groups=4,
        **shared,
    )
    torch.manual_seed(4)
    MultiScaleVQ(config).save_pretrained(path / "tokenizer")
    config = VarConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_classes=len(NAMES),
        tokenizer="tokenizer",
        id2label=NAMES,
        **shared,
    )
    with_random_weights(VarForImageGeneration(config), 5).save_pretrained(path)
    return path


@pytest.fixture
def altered(tmp_path):
    """Copies of a checkpoint that a test may spoil."""

    def copy(path):
        return shutil.copytree(path, tmp_path / "altered")

    return copy
