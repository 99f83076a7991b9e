"""Models that the documentation names by their Hub ids, put into the test session's cache.

The session is offline and its cache empty (``tests/conftest.py``), so that a test uses what is put
there and nothing else. `STANDS_FOR` is the one table of what stands for what: a model of the same
class, shipped or with random weights.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from mmdecode.checkpoints import ZOO


def qwen(folder: Path) -> None:
    """A Qwen2 with random weights that reads the words of the shipped language model."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    words = AutoTokenizer.from_pretrained(ZOO / "lm-synth")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=len(words), **sizes, **heads)).save_pretrained(folder)
    words.save_pretrained(folder)


def janus(folder: Path) -> None:
    """A Janus with random weights whose words are letters, and whose images have 64 tokens."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        JanusConfig,
        JanusForConditionalGeneration,
        JanusImageProcessor,
        JanusProcessor,
        PreTrainedTokenizerFast,
    )

    from tests.support.tiny_images import BEGINS, CLOSES, CODES, ENDS, OPENS, PAD, WORDS
    from tests.support.tiny_vlm import TOWER, VQ, WIDTH

    seen = {"image_size": 16, "patch_size": 2, "num_image_tokens": 64}
    image_options = {"num_embeddings": CODES, "channel_multiplier": [1, 1, 1], "num_patches": 8}
    both = {"projection_dim": WIDTH}
    torch.manual_seed(0)
    network = JanusForConditionalGeneration(
        JanusConfig(
            text_config={"model_type": "llama", **WORDS, "max_position_embeddings": 256},
            vision_config={**TOWER, "mlp_ratio": 2, **seen, **both},
            vq_config={**VQ, "image_token_embed_dim": WIDTH, **image_options, **both},
            image_token_id=78,
        )
    )
    config = network.generation_config
    config.bos_token_id, config.pad_token_id, config.eos_token_id = BEGINS, PAD, None
    config.generation_kwargs = {"boi_token_id": OPENS}
    config._from_model_config = False  # else it is not written
    network.save_pretrained(folder)
    special = {"<pad>": PAD, "<s>": BEGINS, "</s>": ENDS, "<open>": OPENS, "<close>": CLOSES}
    characters = {
        letter: number for number, letter in enumerate("? abcdefghijklmnopqrstuvwxyz.,:\n")
    }
    words = Tokenizer(models.WordLevel({**characters, **special, "<image>": 78}, "?"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    names = {"boi_token": "<open>", "eoi_token": "<close>", "image_token": "<image>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=names,
    )
    JanusProcessor(JanusImageProcessor(), tokenizer, num_image_tokens=64).save_pretrained(folder)


STANDS_FOR: dict[str, str | Callable[[Path], None]] = {
    "openai/whisper-tiny": "whisper-synth",
    "openai/whisper-small": "whisper-synth",
    "openai/whisper-large-v3": "whisper-synth",
    "llava-hf/llava-1.5-7b-hf": "llava-scenes",
    "deepseek-community/Janus-Pro-1B": janus,
    "Qwen/Qwen2.5-0.5B-Instruct": qwen,
    "Qwen/Qwen2.5-1.5B-Instruct": qwen,
}
"""By Hub id a shipped model, or what writes one with random weights into a folder."""


def publish(name: str) -> Path:
    """Puts what stands for a model into the cache, once a session, and returns its folder."""
    stands = STANDS_FOR[name]
    cache = Path(os.environ["HF_HOME"]) / "hub" / f"models--{name.replace('/', '--')}"
    files = cache / "snapshots" / ("0" * 40)
    if not files.exists():
        files.mkdir(parents=True)
        if callable(stands):
            stands(files)
        else:
            shutil.copytree(ZOO / stands, files, dirs_exist_ok=True)
        (cache / "refs").mkdir()
        (cache / "refs" / "main").write_text("0" * 40)
    return files


def publish_named(text: str) -> None:
    """Puts into the cache what stands for each model that a text names."""
    for name in STANDS_FOR:
        if name in text:
            publish(name)
