"""Tiny random models that write image tokens, what to draw with them, and drafts."""

import functools

import torch
from transformers import (
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    Emu3Config,
    Emu3ForConditionalGeneration,
    ImageGPTConfig,
    ImageGPTForCausalImageModeling,
    JanusConfig,
    JanusForConditionalGeneration,
)

from mmdecode import registry
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.eagle import Eagle
from mmdecode.draft.jacobi import Jacobi
from mmdecode.image_ar.raster import generate
from mmdecode.image_ar.sampling import Sampling
from mmdecode.models.eagle import KINDS
from mmdecode.models.llamagen import LlamaGenConfig, LlamaGenForImageGeneration
from mmdecode.train.drafters.recipes import sizes_of
from tests.support.tiny_vlm import TEXT, TOWER, VQ, WIDTH

CODES = 24
FIRST = 50  # of the ids that codes have among words, which are below 40
PAD, BEGINS, ENDS, OPENS, CLOSES, STARTS, EOL, EOF = range(40, 48)
GRID = (3, 4)  # of Emu3
WORDS = {**TEXT, "bos_token_id": BEGINS, "eos_token_id": ENDS, "pad_token_id": PAD}
EMU3_WORDS = {
    "<image>": 78,
    "<|extra_200|>": EOL,
    "<|extra_201|>": EOF,
    "<|image start|>": OPENS,
    "<|image end|>": CLOSES,
    "<|image token|>": STARTS,
    "*": 3,
    **{str(n): 4 + n for n in range(10)},
    **{f"<|visual token {n:06d}|>": FIRST + n for n in range(CODES)},
}
DIGITS = "ABCDEFGHIJ"


def imaged(number):
    """Chameleon's name of a code; its ids run the other way round."""
    return f"IMGIMG{DIGITS[number // 10]}{DIGITS[number % 10]}Z"


def llamagen(**options):
    config = {
        "vocab_size": CODES,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "grid_size": 4,
        "num_classes": 6,
        **options,
    }
    return LlamaGenForImageGeneration(LlamaGenConfig(**config))


MODELS = {
    "llamagen": llamagen,
    "llamagen_captions": lambda: llamagen(num_classes=0, caption_slots=6, caption_size=12),
    "janus": lambda: JanusForConditionalGeneration(
        JanusConfig(
            text_config={"model_type": "llama", **WORDS},
            vision_config={
                **TOWER,
                "patch_size": 2,
                "projection_dim": WIDTH,
                "mlp_ratio": 2,
                "num_image_tokens": 16,
            },
            vq_config={
                **VQ,
                "num_embeddings": CODES,
                "channel_multiplier": [1, 1, 1],
                "projection_dim": WIDTH,
                "image_token_embed_dim": WIDTH,
            },
            image_token_id=78,
        )
    ),
    "emu3": lambda: Emu3ForConditionalGeneration(
        Emu3Config(
            text_config=WORDS,
            vq_config={
                **VQ,
                "codebook_size": CODES,
                "hidden_size": 32,
                "channel_multiplier": [1, 1, 1],
                "attn_resolutions": [2],
            },
            vocabulary_map=EMU3_WORDS,
        )
    ),
    "chameleon": lambda: ChameleonForConditionalGeneration(
        ChameleonConfig(
            **WORDS,
            vq_config={
                **VQ,
                "num_embeddings": CODES,
                "resolution": 16,
                "channel_multiplier": [1, 1, 1],
            },
            vocabulary_map={
                "<image>": 78,
                "<racm3:break>": OPENS,
                **{imaged(n): FIRST + CODES - 1 - n for n in range(CODES)},
            },
        )
    ),
    "imagegpt": lambda: ImageGPTForCausalImageModeling(
        ImageGPTConfig(
            vocab_size=CODES + 1,
            n_positions=16,
            n_embd=WIDTH,
            n_layer=2,
            n_head=2,
            n_inner=48,
            scale_attn_by_inverse_layer_idx=True,
        )
    ),
}
GUIDED = [name for name in MODELS if name != "imagegpt"]


@functools.cache
def image_model(family, seed=0):
    """Weights large enough that the output does not settle on one token."""
    torch.manual_seed(seed)
    model = MODELS[family]().eval()
    for name, weight in model.named_parameters():
        if "vq" not in name and weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.4)
    if family == "janus":
        config = model.generation_config
        config.bos_token_id, config.pad_token_id = BEGINS, PAD
        config.eos_token_id, config.generation_kwargs = None, {"boi_token_id": OPENS}
    return model


def rows_of_ids(rows):
    """Ids and mask, padded on the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


TEXTS = [[5, 9, 31, 22], [17], [30, 11, 2, 8, 25, 1, 13]]


def opening(family):
    """What stands after the words of a prompt."""
    if family == "emu3":
        digits = [EMU3_WORDS[c] for c in f"{GRID[0]}*{GRID[1]}"]
        return [OPENS, *digits, STARTS]
    return [OPENS]


def conditions(family, rows=(0, 1, 2)):
    """What to draw: rows that differ, and differ in length where they can."""
    if family == "llamagen":
        return {"classes": [(4, 0, 3)[row] for row in rows]}
    if family == "llamagen_captions":
        lengths = torch.tensor([(2, 6, 3)[row] for row in rows])
        longest = int(lengths.max())
        generator = torch.Generator().manual_seed(7)
        features = torch.randn(3, 6, 12, generator=generator)[list(rows), :longest]
        return {"features": features, "mask": torch.arange(longest) < lengths[:, None]}
    if family == "imagegpt":
        return {"count": len(rows)}
    given = rows_of_ids([[BEGINS, *TEXTS[row], *opening(family)] for row in rows])
    return {**given, "grid": GRID} if family == "emu3" else given


SAMPLING = Sampling(temperature=0.9, top_k=12, top_p=0.95)
SEED = 3


def scale_of(family):
    """Of guidance, wherever there is any."""
    return 2.5 if family in GUIDED else 1.0


def draw(family, decoder=None, rows=(0, 1, 2), do_sample=False, **options):
    """Tokens of images, ``(B, length)``; a row is named by its number."""
    defaults = {
        "guidance": scale_of(family),
        "sampling": SAMPLING if do_sample else None,
        "seed": SEED,
        "request": [f"image {row}" for row in rows],
    }
    options = {**defaults, **conditions(family, rows), **options}
    model = options.pop("model", None) or image_model(family)
    return generate(model, decoder=decoder, do_sample=do_sample, **options).tokens


SHAPES = {
    "chain": {"depth": 3, "top_k": 1, "nodes": 3},
    "tree": {"depth": 3, "top_k": 2, "nodes": 10},
}


def feature_drafter(adapter, kind="eagle", seed=0, **config):
    """A random one that drafts many tokens."""
    dice = torch.Generator().manual_seed(seed)
    module = KINDS[kind]({**sizes_of(adapter), **config})
    for weight in module.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.1, generator=dice)
    return module.eval()


def eagle_of(model, shape="chain", **options):
    """A draft with a random drafter."""
    grid = {"grid": GRID} if model.config.model_type == "emu3" else {}
    adapter = registry.image_adapter_for(model, **grid)
    return Eagle(feature_drafter(adapter), **SHAPES[shape], **options)


DRAFTS = {
    "eagle": lambda family: eagle_of(image_model(family)),
    "two": lambda family: Jacobi(2),
    "past_a_row": lambda family: Jacobi(7, start="above"),
    "tree": lambda family: Jacobi(5, siblings=2),
    "whole": lambda family: Jacobi(16, start="left_law"),
    "itself": lambda family: Assistant(image_model(family), 5),
    "another": lambda family: Assistant(image_model(family, seed=1), 3),
}
