"""Tiny random vision-language models, and prompts whose rows hold different numbers of images."""

import functools

import torch
from transformers import (
    AutoModelForImageTextToText,
    ChameleonConfig,
    Emu3Config,
    Gemma3Config,
    Idefics3Config,
    InternVLConfig,
    JanusConfig,
    LlavaConfig,
    LlavaNextConfig,
    PaliGemmaConfig,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
    SmolVLMConfig,
)

from mmdecode.draft.amateur import Amateur
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.layer_skip import LayerSkip
from mmdecode.draft.lookup import PromptLookup
from mmdecode.draft.medusa import Medusa
from mmdecode.draft.none import NoDraft
from mmdecode.testing import drafts
from tests.support.tiny import (
    PROCESSORS,
    TREE,
    VOCAB,
    WIDTH,
    HiddenPath,
    assert_generates,
    generated,
    random_heads,
    text_model,
)
from tests.support.traced import Traced

NEW = 12
IMAGE = 78  # the placeholder; words of prompts are below 60
END = 79  # of a line of image tokens
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
}


CLIP = {"model_type": "clip_vision_model", **TOWER, "patch_size": 4}
SIGLIP = {"model_type": "siglip_vision_model", **TOWER, "vision_use_head": False}
LLAVA = {
    "text_config": {"model_type": "llama", **TEXT},
    "vision_config": CLIP,
    "image_token_index": IMAGE,
}
IDEFICS = {
    "text_config": {"model_type": "llama", **TEXT},
    "vision_config": {**TOWER, "patch_size": 2},
    "image_token_id": IMAGE,
    "scale_factor": 2,
}


def qwen(vision):
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    return {
        "text_config": {**TEXT, "rope_parameters": rope},
        "vision_config": {"depth": 2, "num_heads": 2, "patch_size": 4, **vision},
        "image_token_id": IMAGE,
        "video_token_id": 77,
        "vision_start_token_id": 75,
        "vision_end_token_id": 76,
    }


def gemma(model_type, **more):
    # tied to the input, the output repeats it
    more = {"head_dim": 8, "tie_word_embeddings": False, **more}
    return {"model_type": model_type, **TEXT, **more}


VQ = {
    "embed_dim": 4,
    "latent_channels": 4,
    "base_channels": 32,
    "num_res_blocks": 1,
}
MIXED = ["sliding_attention", "full_attention"]

CONFIGS = {
    "llava": lambda: LlavaConfig(**LLAVA),
    "llava_next": lambda: LlavaNextConfig(**LLAVA, image_grid_pinpoints=[[8, 8], [8, 16]]),
    "qwen2_vl": lambda: Qwen2VLConfig(
        **qwen({"embed_dim": 16, "hidden_size": WIDTH, "mlp_ratio": 2})
    ),
    "qwen2_5_vl": lambda: Qwen2_5_VLConfig(
        **qwen(
            {
                "hidden_size": 16,
                "intermediate_size": 24,
                "out_hidden_size": WIDTH,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            }
        )
    ),
    "qwen3_vl": lambda: Qwen3VLConfig(
        **qwen(
            {
                "hidden_size": 16,
                "intermediate_size": 24,
                "out_hidden_size": WIDTH,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            }
        )
    ),
    "idefics3": lambda: Idefics3Config(**IDEFICS),
    "smolvlm": lambda: SmolVLMConfig(**IDEFICS),
    "internvl": lambda: InternVLConfig(
        text_config={"model_type": "qwen2", **TEXT},
        vision_config={**TOWER, "image_size": [8, 8], "patch_size": [2, 2]},
        image_token_id=IMAGE,
    ),
    "gemma3": lambda: Gemma3Config(
        text_config=gemma(
            "gemma3_text",
            final_logit_softcapping=2.0,  # which the model around it leaves out
            sliding_window=5,
            layer_types=MIXED,
            rope_parameters={kind: {"rope_type": "default", "rope_theta": 100.0} for kind in MIXED},
        ),
        vision_config={**SIGLIP, "patch_size": 2},
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=75,
        eoi_token_index=76,
        tie_word_embeddings=False,
    ),
    "paligemma": lambda: PaliGemmaConfig(
        text_config=gemma("gemma"),
        vision_config={**SIGLIP, "patch_size": 4},
        image_token_index=IMAGE,
        projection_dim=WIDTH,
        tie_word_embeddings=False,
    ),
    "paligemma2": lambda: PaliGemmaConfig(
        text_config=gemma(
            "gemma2", sliding_window=5, layer_types=MIXED, final_logit_softcapping=2.0
        ),
        vision_config={**SIGLIP, "patch_size": 4},
        image_token_index=IMAGE,
        projection_dim=WIDTH,
        tie_word_embeddings=False,
    ),
    "chameleon": lambda: ChameleonConfig(
        **TEXT,
        vq_config={
            **VQ,
            "num_embeddings": 16,
            "resolution": 8,
            "channel_multiplier": [1, 1, 1],
        },
        vocabulary_map={
            "<image>": IMAGE,
            **{f"IMGIMG{'ABCDEFGHIJ'[n // 10]}{'ABCDEFGHIJ'[n % 10]}Z": 60 + n for n in range(16)},
        },
    ),
    "janus": lambda: JanusConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={
            **TOWER,
            "patch_size": 4,
            "projection_dim": WIDTH,
            "mlp_ratio": 2,
            "num_image_tokens": 4,
        },
        vq_config={
            **VQ,
            "num_embeddings": 16,
            "channel_multiplier": [1, 1, 1],
            "num_patches": 2,
            "projection_dim": WIDTH,
            "image_token_embed_dim": WIDTH,
        },
        image_token_id=IMAGE,
    ),
    "emu3": lambda: Emu3Config(
        text_config={**TEXT, "bos_token_id": 1, "eos_token_id": 2},
        vq_config={
            **VQ,
            "codebook_size": 16,
            "hidden_size": 32,
            "channel_multiplier": [1, 1, 1],
            "attn_resolutions": [2],
        },
        vocabulary_map={
            "<image>": IMAGE,
            "<|extra_200|>": END,
            **{f"<|visual token {n:06d}|>": 60 + n for n in range(16)},
        },
    ),
}


@functools.cache
def vision_model(family, attention=None, seed=0):
    """Weights large enough that the output does not settle on one token."""
    torch.manual_seed(seed)
    attention = attention or ("eager" if family == "paligemma2" else "sdpa")
    model = AutoModelForImageTextToText.from_config(
        CONFIGS[family](), attn_implementation=attention
    ).eval()
    for name, weight in model.named_parameters():
        if "vq" not in name and weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.4)
    model.tie_weights()
    model.generation_config.eos_token_id = None
    return model


SQUARE, WIDE = (8, 8), (8, 16)
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def image_tokens(family, size=SQUARE):
    """Placeholders of one image."""
    high, wide = size
    if family == "llava_next":
        return 4 + 2 * (wide // 4 + 1)  # the image as a whole, then its parts line by line
    if family in QWEN:
        return high * wide // 64
    if family == "emu3":
        return high // 4 * (wide // 4 + 1)
    return 4


def pixels(family, sizes, batch, rows, seed=5):
    """What the processor of a family makes of images: ``sizes`` in order, ``rows`` they are in."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=generator)

    count = len(sizes)
    if family == "llava_next":
        return {
            "pixel_values": noise(count, 3, 3, 8, 8),
            "image_sizes": torch.tensor(sizes),
        }
    if family in QWEN:
        grids = torch.tensor([[1, high // 4, wide // 4] for high, wide in sizes])
        return {"pixel_values": noise(int(grids.prod(1).sum()), 96), "image_grid_thw": grids}
    if family in ("idefics3", "smolvlm"):
        images_per_row = max(rows.count(row) for row in range(batch))
        values = torch.zeros(batch, images_per_row, 3, 8, 8)
        for row in range(batch):
            values[row, : rows.count(row)] = noise(rows.count(row), 3, 8, 8)
        return {"pixel_values": values}
    if family == "emu3":
        return {"pixel_values": noise(count, 3, 8, 8), "image_sizes": torch.tensor(sizes)}
    return {"pixel_values": noise(count, 3, 8, 8)}


IMAGES = [1, 0, 2, 1]  # per row
SIZES = {"llava_next": [SQUARE, WIDE]}
SIZES |= {family: [(16, 16), (16, 24)] for family in QWEN}


def vision_inputs(family, batch=3, images=True, seed=1):
    """Left-padded prompts; images between words, one row without any."""
    generator = torch.Generator().manual_seed(seed)
    known = SIZES.get(family, [SQUARE])
    sizes, owners, rows = [], [], []
    for row in range(batch):
        tokens = torch.randint(1, 60, (2 + row,), generator=generator).tolist()
        for _ in range(IMAGES[row] if images else 0):
            sizes.append(known[len(sizes) % len(known)])
            owners.append(row)
            tokens += [IMAGE] * image_tokens(family, sizes[-1])
            tokens += torch.randint(1, 60, (3,), generator=generator).tolist()
        rows.append(tokens)
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    inputs = {"input_ids": ids, "attention_mask": mask}
    if family.startswith("paligemma"):
        inputs["token_type_ids"] = torch.zeros_like(ids)
    elif not images:
        pass
    elif family == "gemma3":
        inputs["token_type_ids"] = (ids == IMAGE).long()
    elif family in QWEN:
        inputs["mm_token_type_ids"] = (ids == IMAGE).long()
    if sizes:
        inputs |= pixels(family, sizes, batch, owners)
    return inputs


def plain(family, attention=None, batch=3, images=True, processors="no_processor", **options):
    """What transformers generates greedily without us."""
    options = {"max_new_tokens": NEW, **PROCESSORS[processors](), **options}
    inputs = options.pop("inputs", None) or vision_inputs(family, batch, images)
    model = vision_model(family, attention) if attention else vision_model(family)
    return model.generate(**inputs, do_sample=False, **options)


def ours(decoder, family, **options):
    """The same through a decoder."""
    return plain(family, custom_generate=decoder, **options)


@functools.cache
def reference(family, options=()):
    """Plain output and the rows to draft from, computed once; ``options`` as sorted items."""
    expected = plain(family, **dict(options))
    decoder = Traced()
    ours(decoder, family, **dict(options))
    rows = generated(decoder.trace)
    if sum(map(len, rows)) > 20:
        assert len({t for row in rows for t in row}) >= 8, "the model repeats itself too much"
    return expected, rows


DRAFTS = {
    "none": lambda family, rows: NoDraft(),
    "lookup": lambda family, rows: PromptLookup(length=5),
    "text_assistant": lambda family, rows: Assistant(text_model("llama", seed=9, layers=1), 3),
    "assistant_is_target": lambda family, rows: Assistant(vision_model(family), length=3),
    "amateur": lambda family, rows: Amateur(length=3),
    "amateur_that_sees_all": lambda family, rows: Amateur(length=3, transform=None),
    "layer_skip": lambda family, rows: LayerSkip(exit_layer=1, length=3),
    "known": lambda family, rows: drafts.Known(rows, length=4, wrong_at=[2, 9]),
    "known_tree": lambda family, rows: HiddenPath(rows),
    "random_trees": lambda family, rows: drafts.RandomTrees(),
    "medusa_tree": lambda family, rows: Medusa(random_heads(layers=2), paths=TREE),
}


def assert_same(family, draft, **options):
    """Asserts that a decoder with the named draft generates what `generate` does."""
    expected, rows = reference(family, tuple(sorted(options.items())))
    decoder = Traced(DRAFTS[draft](family, rows))
    assert_generates(decoder, draft, lambda: ours(decoder, family, **options), expected)
    return decoder


def without_tokens(inputs, tokens):
    """The text of left-padded prompts, without placeholder ``tokens`` and without images."""
    rows = [
        [t for t, real in zip(ids, mask, strict=True) if real and t not in tokens]
        for ids, mask in zip(
            inputs["input_ids"].tolist(), inputs["attention_mask"].tolist(), strict=True
        )
    ]
    width = max(map(len, rows))
    text = {
        "input_ids": torch.tensor([[0] * (width - len(r)) + r for r in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows]),
    }
    kinds = {"token_type_ids", "mm_token_type_ids"} & inputs.keys()
    return text | {name: torch.zeros_like(text["input_ids"]) for name in kinds}
