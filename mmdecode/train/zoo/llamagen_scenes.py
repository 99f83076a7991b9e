"""Recipe of the ``zoo:llamagen-scenes`` models: tiny LlamaGens, trained from scratch.

First an image tokenizer is trained, which encodes 64 x 64 pixels as 16 x 16 codes. Then three
transformers ("parts") are trained on one corpus of encoded images: ``class``, conditioned on the
noun of an image's large object; ``small``, a smaller one that drafts for it; and ``caption``,
conditioned on captions and trained together with its text encoder. An interrupted run is resumed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

from mmdecode.models.llamagen import LlamaGenConfig, LlamaGenForImageGeneration, left_padded
from mmdecode.models.vq import VQModel
from mmdecode.runs.files import write_arrays, write_folder
from mmdecode.train import loop as fitting
from mmdecode.train.drafters.ahead import Ahead
from mmdecode.train.loop import FitOptions, progress, save_half, write_state
from mmdecode.train.zoo import image_codes, image_tokenizer
from mmdecode.train.zoo.image_codes import Setting
from mmdecode.train.zoo.image_tokenizer import TokenizerOptions
from mmdecode.zoo.scene_images import (
    CORPUS_IMAGES,
    CORPUS_SEED,
    SCATTERED,
    image_scene,
    labelled_images,
    rendered_images,
    to_pixels,
)
from mmdecode.zoo.scene_text import article
from mmdecode.zoo.scenes import COLOURS, HELD_OUT, NOUNS, SIDE, Scene

Part = Literal["class", "small", "caption"]
NAMES: dict[Part, str] = {
    "class": "llamagen-scenes",
    "small": "llamagen-scenes-small",
    "caption": "llamagen-scenes-caption",
}

STEPS_ON_CUDA: dict[Part, int] = {"class": 5000, "small": 5000, "caption": 5000}
SHARD = 2000
SLOTS = 24


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Size and training of one transformer.

    Attributes:
        width, layers, heads, inner: Sizes of the transformer; ``inner`` is its feed-forward width.
        fit: Steps, learning rates and early stopping.
    """

    width: int = 144
    layers: int = 8
    heads: int = 6
    inner: int = 384
    fit: FitOptions


def _plans() -> dict[Part, Plan]:
    learned = FitOptions(steps=6000, batch=8, matrix_rate=0.02, every=200)
    return {
        "class": Plan(fit=learned),
        "small": Plan(width=96, layers=2, heads=4, inner=256, fit=learned),
        "caption": Plan(fit=replace(learned, steps=4000)),
    }


@dataclass(frozen=True, kw_only=True)
class LlamaGenScenesOptions:
    """Settings of the recipe.

    Attributes:
        tokenizer: Settings of the tokenizer's training.
        num_images: Number of encoded training images.
        development: Number of held-out images that decide when training stops.
        test: Number of other held-out images on which the card's numbers are measured.
        plans: Size and training of each transformer, in the order of training.
        text_width, text_layers: Sizes of the text encoder.
        setting: Decoding settings of the models.
        num_sampled: Number of images that are sampled to measure entropies.
        device: Device of the transformers' training; the tokenizer is trained on the CPU.
        workers: Number of processes that prepare batches; 0: this process prepares them.
    """

    tokenizer: TokenizerOptions = field(default_factory=TokenizerOptions)
    num_images: int = CORPUS_IMAGES
    development: int = 256
    test: int = 512
    plans: dict[Part, Plan] = field(default_factory=_plans)
    text_width: int = 96
    text_layers: int = 2
    setting: Setting = field(default_factory=lambda: Setting(scale=3.0))
    num_sampled: int = 128
    device: str = "cpu"
    workers: int = 0


def on_cuda() -> LlamaGenScenesOptions:
    """Returns the settings of the package's models: about ten minutes of training on a GPU."""
    plans = {
        part: replace(plan, fit=replace(plan.fit, steps=STEPS_ON_CUDA[part], batch=64, every=500))
        for part, plan in _plans().items()
    }
    return LlamaGenScenesOptions(num_images=80000, plans=plans, device="cuda", workers=4)


# Captions


def caption(scene: Scene, rng: random.Random) -> str:
    """Samples a one-sentence caption, the large object first; some colours are left out."""
    named = []
    for thing in reversed(scene.things):
        colour = f"{thing.colour} " if rng.random() < 0.85 else ""
        named.append(article(f"{colour}{thing.name}"))
    listed = " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)
    return rng.choice(("There is {}.", "I see {}.", "A picture of {}.")).format(listed)


def build_text_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a word-level, lower-case tokenizer of the captions."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    words = {word for noun in NOUNS for word in noun.split()}
    words |= {*COLOURS, *"there is i see a an picture of and , .".split()}
    vocabulary = {w: i for i, w in enumerate(["<pad>", "</s>", "<unk>", *sorted(words)])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", vocabulary["</s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="right",
        model_max_length=SLOTS,
        clean_up_tokenization_spaces=False,
    )


# Codes


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Encoded images.

    Attributes:
        codes: Codes in raster order, ``(n, tokens)`` int64.
        classes: Class of each image, ``(n,)`` int64.
        seeds: Seeds of the images' scenes, ``(n,)`` int64.
    """

    codes: Tensor
    classes: Tensor
    seeds: Tensor


@torch.no_grad()
def encode(model: VQModel, seeds: Sequence[int], *, batch: int = 50, workers: int = 0) -> Corpus:
    """Encodes the images of seeds; ``workers`` processes render them."""
    parts = -(-len(seeds) // batch)
    coming = Ahead(
        lambda part: labelled_images(seeds[part * batch : (part + 1) * batch]), parts, workers
    )
    codes: list[Tensor] = []
    classes: list[int] = []
    for part in range(parts):
        labels, images = coming(part)
        classes += labels
        codes.append(model.encode(to_pixels(images).to(model.device)).flatten(1).cpu())
    return Corpus(
        codes=torch.cat(codes), classes=torch.tensor(classes), seeds=torch.tensor(list(seeds))
    )


def build_corpus(
    model: VQModel, options: LlamaGenScenesOptions, folder: Path, *, shard: int = SHARD
) -> Corpus:
    """Encodes the training images into files of ``shard`` images; existing files are read."""
    parts = []
    for start in progress(range(0, options.num_images, shard), "encoding"):
        file = folder / f"{start:07d}.npz"
        seeds = range(CORPUS_SEED + start, CORPUS_SEED + min(start + shard, options.num_images))
        if not file.exists():
            made = encode(model, seeds, workers=options.workers)
            arrays = {
                "codes": made.codes.numpy().astype(np.uint16),
                "classes": made.classes.numpy(),
            }
            write_arrays(file, arrays, packed=True)
        with np.load(file) as stored:
            codes = torch.from_numpy(stored["codes"].astype(np.int64))
            classes = torch.from_numpy(stored["classes"])
        parts.append(Corpus(codes=codes, classes=classes, seeds=torch.tensor(list(seeds))))
    names = ("codes", "classes", "seeds")
    return Corpus(**{name: torch.cat([getattr(p, name) for p in parts]) for name in names})


# Models


def build_transformer(
    part: Part, options: LlamaGenScenesOptions, grid: int
) -> LlamaGenForImageGeneration:
    """Builds the untrained transformer of a part; ``grid`` is the side of its grid of codes."""
    plan, captioned = options.plans[part], part == "caption"
    torch.manual_seed(plan.fit.seed)
    names = {} if captioned else {"id2label": dict(enumerate(NOUNS))}
    config = LlamaGenConfig(
        **names,
        vocab_size=options.tokenizer.codebook_size,
        hidden_size=plan.width,
        intermediate_size=plan.inner,
        num_hidden_layers=plan.layers,
        num_attention_heads=plan.heads,
        grid_size=grid,
        num_classes=0 if captioned else len(NOUNS),
        caption_slots=SLOTS if captioned else 0,
        caption_size=options.text_width if captioned else 0,
        tokenizer=f"../{NAMES['class']}/vq" if captioned and "class" in options.plans else "vq",
        rope_theta=100.0,  # wavelengths for 16 positions rather than thousands
        initializer_range=0.03,
    )
    return LlamaGenForImageGeneration(config)


class CaptionReader(nn.Module):
    """Small text encoder of captions, with its tokenizer."""

    def __init__(self, options: LlamaGenScenesOptions) -> None:
        super().__init__()
        self.tokenizer = build_text_tokenizer()
        width = options.text_width
        self.encoder = T5EncoderModel(
            T5Config(
                vocab_size=len(self.tokenizer),
                d_model=width,
                d_kv=width // 6,
                d_ff=2 * width,
                num_layers=options.text_layers,
                num_heads=6,
                dropout_rate=0.0,
                pad_token_id=self.tokenizer.pad_token_id,
                eos_token_id=self.tokenizer.eos_token_id,
                tie_word_embeddings=False,
            )
        )

    def forward(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Encodes captions; returns features ``(B, SLOTS, width)`` and mask, padded on the left."""
        given = self.tokenizer(
            list(texts), padding="max_length", truncation=True, return_tensors="pt"
        )
        given = given.to(self.encoder.device)
        hidden = self.encoder(
            input_ids=given.input_ids, attention_mask=given.attention_mask
        ).last_hidden_state
        return left_padded(hidden, given.attention_mask)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Training batch of a step.

    Attributes:
        codes: Codes of the images, ``(B, tokens)`` int64.
        raw_conditions: Classes ``(B,)`` or captions.
        left_out: Whether a row's condition is dropped, bool ``(B,)``.
    """

    codes: Tensor
    raw_conditions: Tensor | list[str]
    left_out: Tensor


class Learner(nn.Module):
    """Trained modules of a part: the transformer, and for captions the text encoder."""

    def __init__(self, part: Part, options: LlamaGenScenesOptions, grid: int) -> None:
        super().__init__()
        self.transformer = build_transformer(part, options, grid)
        if options.device == "cpu":
            self.transformer.set_attn_implementation("eager")  # faster per step there
        self.setting = options.setting
        self.reader = CaptionReader(options) if part == "caption" else None

    def raw_conditions(self, corpus: Corpus, rows: Tensor, salt: int) -> Tensor | list[str]:
        """Returns the classes of images, or captions sampled with the seed ``salt``."""
        if self.reader is None:
            return corpus.classes[rows]
        return [
            caption(image_scene(seed), random.Random(f"caption/{seed}/{salt}"))
            for seed in corpus.seeds[rows].tolist()
        ]

    def conditions(self, raw_conditions: Tensor | list[str]) -> tuple[Tensor, Tensor | None]:
        """Converts conditions to inputs: classes and ``None``, or caption features and mask."""
        if isinstance(raw_conditions, Tensor):
            return raw_conditions.to(self.transformer.device), None
        assert self.reader is not None
        return self.reader(raw_conditions)

    def batch_at(self, corpus: Corpus, options: FitOptions, step: int) -> Batch:
        """Samples the training batch of a step."""
        dice = options.dice(step)
        rows = torch.randint(len(corpus.codes), (options.batch,), generator=dice)
        left_out = torch.rand(options.batch, generator=dice) < options.condition_dropout
        raw_conditions = self.raw_conditions(corpus, rows, step)
        return Batch(codes=corpus.codes[rows], raw_conditions=raw_conditions, left_out=left_out)

    def loss(self, batch: Batch) -> Tensor:
        """Computes the mean negative log-likelihood of a batch, in nats per code."""
        device = self.transformer.device
        with torch.autocast(device.type, torch.bfloat16):
            condition, mask = self.conditions(batch.raw_conditions)
            condition = image_codes.dropped(self.transformer, condition, batch.left_out.to(device))
            return image_codes.code_loss(self.transformer, condition, batch.codes.to(device), mask)

    @torch.no_grad()
    def bits(self, corpus: Corpus) -> float:
        """Computes the negative log2-likelihood per code of held-out images."""
        condition, mask = self.conditions(
            self.raw_conditions(corpus, torch.arange(len(corpus.codes)), 0)
        )
        return image_codes.bits_per_code(self.transformer, condition, corpus.codes, mask)

    def export(self, folder: Path, tokenizer: VQModel | None) -> None:
        """Saves the transformer, and the image tokenizer and text encoder if there are any."""
        save_half(self.transformer, folder)
        image_codes.write_setting(self.setting, folder)
        if tokenizer is not None:
            save_half(tokenizer, folder / "vq")
        if self.reader is not None:
            save_half(self.reader.encoder, folder / "text_encoder")
            write_folder(folder, self.reader.tokenizer.save_pretrained)


def held_out(model: VQModel, options: LlamaGenScenesOptions) -> tuple[Corpus, Corpus]:
    """Encodes the held-out images for development and test."""
    first = HELD_OUT + options.development
    return (
        encode(model, range(HELD_OUT, first)),
        encode(model, range(first, first + options.test)),
    )


def measured(
    learner: Learner, train: Corpus, test: Corpus, options: LlamaGenScenesOptions
) -> dict[str, Any]:
    """Measures a transformer for its card: likelihood, and `image_codes.distributions_of`."""
    model = learner.transformer.eval()
    with torch.no_grad():
        raw_conditions = learner.raw_conditions(
            test, torch.arange(len(test.codes))[: options.num_sampled], 0
        )
        condition, mask = learner.conditions(raw_conditions)
    return {
        "parameters": model.num_parameters(),
        "bits_per_code": round(learner.bits(test), 3),
        "position_entropy_bits": round(image_codes.position_entropy(train.codes), 3),
        **image_codes.distributions_of(model, condition, options.setting, mask),
    }


def train_part(
    part: Part,
    tokenizer: VQModel,
    corpus: Corpus,
    held: tuple[Corpus, Corpus],
    options: LlamaGenScenesOptions,
    work: Path,
    out: Path,
) -> dict[str, Any]:
    """Trains the transformer of a part into its subfolder of ``out`` and writes its card."""
    grid = SIDE // tokenizer.config.factor
    learner = Learner(part, options, grid).to(options.device)
    shares = part == "small" or learner.transformer.config.tokenizer != "vq"
    own = None if shares else tokenizer
    folder, fit = out / NAMES[part], options.plans[part].fit
    best = work / part / "best.pt"

    def keep() -> None:
        write_state(best, learner.state_dict())
        learner.export(folder, own)

    coming = Ahead(partial(learner.batch_at, corpus, fit), fit.steps, options.workers)
    log = fitting.fit(
        learner,
        loss_at=lambda step: learner.loss(coming(step)),
        held_out=partial(learner.bits, held[0]),
        keep=keep,
        options=fit,
        work=work / part,
    )
    learner = learner.cpu()
    learner.load_state_dict(torch.load(best, map_location="cpu", weights_only=True))
    best_at = min(log, key=lambda row: row["held_out"])
    numbers = {
        "steps": int(best_at["step"]),
        "minutes": round(log[-1]["seconds"] / 60, 1),
        "train_bits_per_code": round(best_at["train"], 3),
        **measured(learner, corpus, held[1], options),
        "decoding": options.setting.described(),
    }
    if part != "small":
        pixels = to_pixels(rendered_images(held[1].seeds.tolist()))
        numbers["tokenizer"] = image_tokenizer.measure(tokenizer, pixels)
        numbers["tokenizer"]["parameters"] = tokenizer.num_parameters()
    return describe(part, numbers, options, folder)


_CONDITIONS: dict[Part, str] = {
    "class": f"one of {len(NOUNS)} nouns, the large thing of a picture",
    "small": f"one of {len(NOUNS)} nouns, to draft the codes of `zoo:llamagen-scenes`",
    "caption": f"a caption of up to {SLOTS} words, read by a tiny frozen T5 encoder",
}


def describe(
    part: Part, numbers: dict[str, Any], options: LlamaGenScenesOptions, folder: Path
) -> dict[str, Any]:
    """Writes ``card.json`` and ``README.md`` of a part; returns the card."""
    plan, guided = options.plans[part], numbers["guided"]
    scale = options.setting.scale
    facts = [
        "Data: pictures of `mmdecode/zoo/scene_images.py`, their digits from real scans (see "
        f"`data/digits.md`); {options.num_images} were encoded once, {numbers['steps']} steps of "
        f"{plan.fit.batch} drawn from them.",
        f"Held out by seed, and for digits by scan: {options.development} pictures decided when to "
        f"stop, {options.test} others gave the numbers.",
        f"Meant to be decoded with guidance {scale:g}, where s = 1 is none, temperature "
        f"{options.setting.sampling.temperature:g}, and without top-k and top-p.",
    ]
    if "tokenizer" in numbers:
        seen = numbers["tokenizer"]
        facts.append(
            f"`{LlamaGenConfig.from_pretrained(folder).tokenizer}` holds the tokenizer of "
            f"{seen['parameters'] / 1e6:.2f} M parameters: "
            f"{100 * seen['codes_used']:.1f} % of its {options.tokenizer.codebook_size} codes "
            f"occur, {seen['code_entropy_bits']} bits each; pictures come back with "
            f"{seen['psnr_db']} dB, noise included. It learned from the harder pictures of the "
            "layout `SCATTERED`."
        )
    return image_codes.write_card(
        folder,
        recipe=NAMES["class"],
        what=f"LlamaGen of {numbers['parameters'] / 1e6:.2f} M parameters, {plan.layers} layers of "
        f"width {plan.width}: 16 x 16 codes, 64 x 64 pixels, for {_CONDITIONS[part]}",
        measured=f"{numbers['bits_per_code']} bits per held-out code (positions alone: "
        f"{numbers['position_entropy_bits']}); the distribution it decodes by has "
        f"{guided['law_entropy_bits']} bits at guidance {scale:g}",
        facts=facts,
        numbers=numbers,
    )


def run(
    options: LlamaGenScenesOptions, work: Path, out: Path, *, shard: int = SHARD
) -> dict[str, Any]:
    """Trains the tokenizer and all transformers; an interrupted run is resumed.

    Args:
        options: Settings.
        work: Folder of the training state.
        out: Folder of the results, with one subfolder for each transformer.
        shard: Number of images in each file of codes.
    """
    torch.set_num_threads(1)
    vq = work / "vq"
    if not (vq / "config.json").exists():
        scattered = partial(rendered_images, layout=SCATTERED)
        image_tokenizer.train(options.tokenizer, scattered, work / "tokenizer", vq)
    tokenizer = VQModel.from_pretrained(vq).eval().to(options.device)
    corpus = build_corpus(tokenizer, options, work / "corpus", shard=shard)
    held = held_out(tokenizer, options)
    tokenizer = tokenizer.cpu()
    cards = {
        NAMES[part]: train_part(part, tokenizer, corpus, held, options, work, out)
        for part in options.plans
    }
    return {"folder": str(out)} | cards
