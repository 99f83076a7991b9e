"""Random models of real shapes, and inputs for them. A part of real_sizes.py.

Weights are random, so that times and memory mean something and tokens nothing. Configurations are
those of transformers; ``tiny`` ones are toys that try the script.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from step_speed import Shape, build, shapes
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    Qwen2Config,
    Qwen2VLConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from mmdecode.models.llamagen import LlamaGenConfig, LlamaGenForImageGeneration

FIRST_WORD = 8
"""Lower ids are placeholders of images and padding; words of prompts are from here on."""
IMAGE, BEGIN, END = 2, 3, 4


@dataclass(frozen=True)
class Subject:
    """A model and a prompt.

    Attributes:
        model: With random weights, in evaluation mode.
        inputs: Keyword arguments of ``generate``.
        note: Its shape, in words.
    """

    model: Any
    inputs: Mapping[str, Any]
    note: str

    def warm_inputs(self) -> dict[str, Any]:
        """A short text for the same model."""
        name = "decoder_input_ids" if "encoder_outputs" in self.inputs else "input_ids"
        short = {name: self.inputs[name][:1, -16:].clamp_min(FIRST_WORD)}
        if "encoder_outputs" in self.inputs:
            short["encoder_outputs"] = self.inputs["encoder_outputs"]
        return short


def finished(model: Any, start: int | None = None) -> Any:
    """The model for evaluation, whose answers have no end but their length."""
    model.eval()
    model.generation_config = GenerationConfig(
        pad_token_id=0, eos_token_id=None, decoder_start_token_id=start
    )
    return model


def text(width: int, vocab: int, **more: Any) -> dict[str, Any]:
    """Sizes of two layers of text; heads are of width 32."""
    return {
        "hidden_size": width,
        "intermediate_size": 11 * width // 4,
        "num_hidden_layers": 2,
        "num_attention_heads": width // 32,
        "num_key_value_heads": width // 32,
        "vocab_size": vocab,
        "max_position_embeddings": 2**17,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        **more,
    }


def words(batch: int, length: int, vocab: int, seed: int = 0, period: int = 0) -> Tensor:
    """Random words, ``(batch, length)``, repeating after ``period`` if that is not 0."""
    dice = torch.Generator().manual_seed(seed)
    ids = torch.randint(FIRST_WORD, vocab, (batch, period or length), generator=dice)
    return ids.repeat(1, -(-length // ids.shape[1]))[:, :length]


def llama(
    lengths: Sequence[int], width: int = 256, vocab: int = 32000, period: int = 0, **more: Any
) -> Subject:
    """Two layers of Llama; prompts of several lengths are padded on the left."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**text(width, vocab, **more)))
    most = max(lengths)
    ids = words(len(lengths), most, vocab, period=period)
    mask = torch.arange(most) >= most - torch.tensor(list(lengths))[:, None]
    inputs = {"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long()}
    note = f"Llama, 2 layers of width {width}, V = {vocab:,}"
    return Subject(finished(model), inputs, note)


def qwen(batch: int, length: int = 16, tiny: bool = False, spread: float = 4.0) -> Subject:
    """Qwen2.5-0.5B's shape, tied; the last norm is scaled until logits spread as widely as asked.

    Embeddings of standard deviation 0.02 would give nearly flat logits, whose nucleus is most of
    the vocabulary; with a spread of 4 it holds some hundred tokens.
    """
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    sizes |= {"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936}
    if tiny:
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 600}
    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = Qwen2Config(**sizes, **ends, tie_word_embeddings=True, max_position_embeddings=32768)
    model = finished(AutoModelForCausalLM.from_config(config))
    ids = words(batch, length, config.vocab_size)
    with torch.no_grad():
        found = model(ids[:1]).logits[0].std(-1).mean()
        model.model.norm.weight.mul_(spread / found)
    note = (
        f"Qwen2, {config.num_hidden_layers} layers of width {config.hidden_size}, "
        f"V = {config.vocab_size:,}, tied, logits of standard deviation {spread:g}"
    )
    return Subject(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, note)


def nucleus(subject: Subject, mass: float, temperature: float = 1.0) -> int:
    """Tokens that hold the mass at the end of the prompt, on average over rows."""
    with torch.no_grad():
        logits = subject.model(**subject.inputs).logits[:, -1].float() / temperature
    held = logits.softmax(-1).sort(-1, descending=True).values.cumsum(-1)
    return round(float((held < mass).sum(-1).float().mean())) + 1


def with_images(images: int, each: int, before: int, after: int, vocab: int, batch: int) -> Tensor:
    """Prompts of words, images, each between two marks, and words, ``(batch, L)``."""
    one = torch.tensor([BEGIN, *[IMAGE] * each, END]).repeat(images).expand(batch, -1)
    first, last = words(batch, before, vocab), words(batch, after, vocab, seed=1)
    return torch.cat([first, one, last], 1)


def tower(side: int, patch: int, **more: Any) -> dict[str, Any]:
    """Sizes of two layers of a vision tower."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return {**sizes, "num_attention_heads": 2, "image_size": side, "patch_size": patch, **more}


def llava(
    images: int, side: int = 448, width: int = 256, vocab: int = 32000, batch: int = 1
) -> Subject:
    """Two layers of Llama behind a CLIP of patches of 14, ``(side / 14) ** 2`` tokens an image."""
    torch.manual_seed(0)
    config = LlavaConfig(
        text_config={"model_type": "llama", **text(width, vocab)},
        vision_config={"model_type": "clip_vision_model", **tower(side, 14)},
        image_token_index=IMAGE,
    )
    model = finished(AutoModelForImageTextToText.from_config(config))
    each = (side // 14) ** 2
    ids = with_images(images, each, 16, 32, vocab, batch)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["pixel_values"] = torch.randn(batch * images, 3, side, side)
    note = f"LLaVA, {images} images of {each:,} tokens, 2 layers of width {width}, V = {vocab:,}"
    return Subject(model, inputs, note)


def qwen_vl(images: int, grid: int = 64, width: int = 256, vocab: int = 32000) -> Subject:
    """Two layers of Qwen2 behind a tower of patches of 4; a token for each 2 x 2 of them."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4}
    vision = {"depth": 2, "embed_dim": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    config = Qwen2VLConfig(
        text_config=text(width, vocab, rope_parameters=rope),
        vision_config={**vision, "hidden_size": width},
        image_token_id=IMAGE,
        video_token_id=5,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
    )
    model = finished(AutoModelForImageTextToText.from_config(config))
    each = grid**2 // 4
    ids = with_images(images, each, 16, 32, vocab, 1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["mm_token_type_ids"] = (ids == IMAGE).long()
    inputs["image_grid_thw"] = torch.tensor([[1, grid, grid]] * images)
    inputs["pixel_values"] = torch.randn(images * grid**2, 3 * 2 * 4 * 4)
    note = f"Qwen2-VL, {images} images of {each:,} tokens, 2 layers of width {width}"
    return Subject(model, inputs, note)


def gemma(images: int, side: int = 128, width: int = 256, vocab: int = 32000) -> Subject:
    """Gemma3: a layer with a window of 512 and one without, images attended to both ways."""
    torch.manual_seed(0)
    each = (side // 8) ** 2
    kinds = ["sliding_attention", "full_attention"]
    rope = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in kinds}
    own = {"head_dim": 32, "sliding_window": 512, "layer_types": kinds, "rope_parameters": rope}
    config = Gemma3Config(
        text_config={"model_type": "gemma3_text", **text(width, vocab, **own)},
        vision_config={
            **tower(side, 8, vision_use_head=False),
            "model_type": "siglip_vision_model",
        },
        mm_tokens_per_image=each,
        image_token_index=IMAGE,
        boi_token_index=BEGIN,
        eoi_token_index=END,
    )
    model = finished(AutoModelForImageTextToText.from_config(config))
    ids = with_images(images, each, 16, 32, vocab, 1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["token_type_ids"] = (ids == IMAGE).long()
    inputs["pixel_values"] = torch.randn(images, 3, side, side)
    note = f"Gemma3, {images} images of {each:,} tokens both ways, a window of 512 in every other "
    return Subject(model, inputs, f"{note}of 2 layers of width {width}")


def t5(length: int, width: int = 256, vocab: int = 32000, batch: int = 1) -> Subject:
    """Two layers of T5 each in encoder and decoder; the prompt is the encoder's."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=vocab,
        d_model=width,
        d_kv=32,
        d_ff=4 * width,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=width // 32,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=None,
        decoder_start_token_id=1,
    )
    model = finished(T5ForConditionalGeneration(config), start=1)
    ids = words(batch, length, vocab)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return Subject(model, inputs, f"T5, 2 + 2 layers of width {width}, V = {vocab:,}")


def qwen_text(length: int, width: int = 64, vocab: int = 600, batch: int = 1) -> Subject:
    """Two layers of Qwen2."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**text(width, vocab)))
    ids = words(batch, length, vocab)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return Subject(finished(model), inputs, f"Qwen2, 2 layers of width {width}, V = {vocab}")


def of_shape(name: str, scale: str = "tiny") -> Subject:
    """A shape of `step_speed.shapes`."""
    shape: Shape = shapes(scale)[name]
    model, inputs = build(shape, torch.device("cpu"), torch.float32)
    return Subject(model, inputs, f"{name} of step_speed.py, {scale}")


def tiny_models() -> dict[str, Callable[[], Subject]]:
    """Models whose step is Python, of one row each, by name."""
    return {
        "tiny Llama": partial(llama, [16], 64, 600),
        "tiny Qwen2": partial(qwen_text, 16),
        "tiny LLaVA": partial(llava, 1, 56, 64, 600),
        "tiny T5": partial(t5, 16, 64, 600),
        "tiny Whisper": partial(of_shape, "whisper"),
    }


def llamagen(tiny: bool = False, grid: int = 24, dtype: torch.dtype = torch.float32) -> Any:
    """LlamaGen-B's shape; ``grid`` squared is the number of image tokens."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 2048, "vocab_size": 16384}
    sizes |= {"num_hidden_layers": 12, "num_attention_heads": 12, "num_classes": 1000}
    if tiny:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 300}
        sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_classes": 10}
    config = LlamaGenConfig(**sizes, grid_size=grid)
    model = LlamaGenForImageGeneration(config).eval()
    with torch.no_grad():  # flat logits would take any token for any other
        model.model.norm.weight.mul_(8)
    return model.to(dtype)
