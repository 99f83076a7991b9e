"""Recipe of ``zoo:llava-scenes``: a LLaVA of 3.6 M parameters, trained from scratch.

Output: a ``LlavaForConditionalGeneration`` (CLIP vision tower of 64 patches, projector, Llama text
model of eight layers) and its ``LlavaProcessor``. Training scenes are rendered during training
(`mmdecode.zoo.scenes`, `mmdecode.zoo.scene_text`), depending only on the seed and the step.

First the vision tower alone is trained to classify the noun and colour of each patch and, from the
class token, the nouns in the image. Then the whole model is trained to answer, with the tower's
classification as an auxiliary loss. Several exchanges (a request and its answer) about one scene
are packed into one sequence after the image tokens. Each exchange attends only to the image prefix
and to itself, and has the position ids that it would have if it were the only one.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from mmdecode.runs.files import append_line, open_append, write_file, write_folder
from mmdecode.train.loop import say_float32, write_state
from mmdecode.zoo import scene_sets, scene_text
from mmdecode.zoo.scene_text import Exchange
from mmdecode.zoo.scenes import (
    COLOURS,
    HELD_OUT,
    NOUNS,
    SIDE,
    Scene,
    draw_scene,
    owner_map,
    render,
)

BLIND_SHARE = 0.07
TOWER_SLOWER = 0.2  # of the learning rate after the first part: at the full one the tower forgets
NOUN_OF = {scene_text.existence_question(noun): index for index, noun in enumerate(NOUNS)}
PATCH = 8
PATCHES = (SIDE // PATCH) ** 2
MEAN, SPREAD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] != 'system' %}{{ message['role'].upper() }}: {% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}<image>\n{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
    "{% endif %}{{ '</s>' if message['role'] == 'assistant' else ' ' }}"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class LlavaScenesOptions:
    """Settings of the recipe.

    Attributes:
        tower_steps: Number of first steps, which train the vision tower alone.
        steps: Total number of steps.
        tower_batch, batch: Scenes per step, for the tower alone and for the whole model.
        questions: Minimum and maximum number of questions that are packed after an image.
        vocabulary: Vocabulary size of the tokenizer.
        vision_width, vision_layers: Sizes of the tower.
        width, layers: Sizes of the text model.
        peak_rate: Highest learning rate (AdamW).
        seed: Seed of the training.
    """

    tower_steps: int = 4000
    steps: int = 7500
    tower_batch: int = 48
    batch: int = 16
    questions: tuple[int, int] = (8, 12)
    vocabulary: int = 720
    vision_width: int = 128
    vision_layers: int = 5
    width: int = 160
    layers: int = 8
    peak_rate: float = 1.5e-3
    seed: int = 0


def build_processor(options: LlavaScenesOptions) -> LlavaProcessor:
    """Builds a LLaVA processor: byte-level BPE trained on texts about scenes, 64 x 64 images."""
    from tokenizers import ByteLevelBPETokenizer
    from tokenizers.processors import TemplateProcessing

    texts = []
    for index in range(3000):
        rng = random.Random(f"tokenizer/{options.seed}/{index}")
        for made in sampled_exchanges(draw_scene(index), rng, options):
            texts.append(f"USER: \n{made.request} ASSISTANT: {made.answer}")
            texts.append(f"USER: {made.request} ASSISTANT: {made.answer}")
    bpe = ByteLevelBPETokenizer()
    specials = ["<s>", "</s>", "<pad>", "<image>"]
    bpe.train_from_iterator(
        texts, vocab_size=options.vocabulary, special_tokens=specials, show_progress=False
    )
    inner = bpe._tokenizer
    inner.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": "<image>"},
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    images = CLIPImageProcessor(
        size={"height": SIDE, "width": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
        image_mean=MEAN,
        image_std=SPREAD,
    )
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    )


def build_model(
    options: LlavaScenesOptions, processor: LlavaProcessor
) -> LlavaForConditionalGeneration:
    """Builds the untrained model with its generation config."""
    tokenizer = processor.tokenizer
    torch.manual_seed(options.seed)
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=options.vision_width,
            intermediate_size=4 * options.vision_width,
            num_hidden_layers=options.vision_layers,
            num_attention_heads=options.vision_width // 32,
            projection_dim=options.vision_width,
            image_size=SIDE,
            patch_size=PATCH,
            hidden_act="gelu",
        ),
        text_config=LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=options.width,
            intermediate_size=options.width * 13 // 5,
            num_hidden_layers=options.layers,
            num_attention_heads=options.width // 32,
            num_key_value_heads=options.width // 32,
            max_position_embeddings=512,
            initializer_range=0.04,
            tie_word_embeddings=True,
            **special,
        ),
        image_token_id=processor.image_token_id,
        image_seq_length=PATCHES,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
        **special,
    )
    model = LlavaForConditionalGeneration(config)
    model.generation_config = GenerationConfig(**special, max_new_tokens=100)
    return model


class TowerHeads(nn.Module):
    """Linear classification heads on the tower's patches (noun, colour) and class token (nouns)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.noun = nn.Linear(width, len(NOUNS) + 1)
        self.colour = nn.Linear(width, len(COLOURS) + 1)
        self.present = nn.Linear(width, len(NOUNS))


class Learner(nn.Module):
    """All trained modules: the model, and the tower's classification heads, which are not saved."""

    def __init__(self, options: LlavaScenesOptions, processor: LlavaProcessor) -> None:
        super().__init__()
        self.model = build_model(options, processor)
        self.model.set_attn_implementation("eager")  # a fifth faster per step on a CPU
        self.heads = TowerHeads(options.vision_width)


@dataclass(frozen=True, kw_only=True)
class TowerBatch:
    """Images with labels for the classification heads of the tower.

    Attributes:
        pixels: Pixels, normalised as the processor does, ``(B, 3, SIDE, SIDE)``.
        nouns, colours: Class of each patch, ``(B, PATCHES)``; 0: background.
        present: Whether each noun occurs, ``(B, nouns)`` float.
    """

    pixels: Tensor
    nouns: Tensor
    colours: Tensor
    present: Tensor


def rendered_batch(scenes: Sequence[Scene]) -> TowerBatch:
    """Renders scenes; a patch is labelled with the object that covers most of it (at least 1/8)."""
    rendered = torch.from_numpy(np.stack([render(scene) for scene in scenes])).permute(0, 3, 1, 2)
    mean, spread = (torch.tensor(values)[:, None, None] for values in (MEAN, SPREAD))
    pixels = (rendered / 255 - mean) / spread
    nouns = np.zeros((len(scenes), PATCHES), dtype=np.int64)
    colours = np.zeros_like(nouns)
    present = torch.zeros(len(scenes), len(NOUNS))
    grid = SIDE // PATCH
    palette = tuple(COLOURS)
    for row, scene in enumerate(scenes):
        patches = owner_map(scene.things).reshape(grid, PATCH, grid, PATCH)
        kinds = np.arange(len(scene.things))[:, None, None, None, None]
        counts = (patches[None] == kinds).sum(axis=(2, 4)).reshape(len(scene.things), PATCHES)
        owner = np.where(counts.max(axis=0) >= PATCH, counts.argmax(axis=0) + 1, 0)
        things = scene.things
        nouns[row] = np.array([0, *(NOUNS.index(t.name) + 1 for t in things)])[owner]
        colours[row] = np.array([0, *(palette.index(t.colour) + 1 for t in things)])[owner]
        present[row, [NOUNS.index(name) for name in scene.names]] = 1
    return TowerBatch(
        pixels=pixels,
        nouns=torch.from_numpy(nouns),
        colours=torch.from_numpy(colours),
        present=present,
    )


def tower_loss(states: Tensor, pooled: Tensor, heads: TowerHeads, batch: TowerBatch) -> Tensor:
    """Computes the classification loss from ``(B, 1 + PATCHES, width)`` and the pooled output."""
    patches = states[:, 1:]
    noun = F.cross_entropy(heads.noun(patches).flatten(0, 1), batch.nouns.flatten())
    colour = F.cross_entropy(heads.colour(patches).flatten(0, 1), batch.colours.flatten())
    present = F.binary_cross_entropy_with_logits(heads.present(pooled), batch.present)
    return 2 * noun + 0.5 * colour + 4 * present


def sampled_exchanges(
    scene: Scene, rng: random.Random, options: LlavaScenesOptions
) -> list[Exchange]:
    """Samples training exchanges about a scene: questions, and in 80 % of calls a caption."""
    made = scene_text.exchanges(scene, rng, rng.randint(*options.questions))
    if rng.random() < 0.8:
        length = rng.choices(tuple(scene_text.DESCRIBE), (3, 3, 4))[0]
        made.append(scene_text.caption(scene, rng, length))
    return [scene_text.instructed(one, rng) for one in made]


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Exchanges about one image, packed into one sequence.

    Attributes:
        ids: Token ids: the prefix with the image, then requests and answers.
        positions: Position id of each token, as if its exchange were the only one.
        part: 0 in the prefix, else the number of the exchange; negative if it is without the image.
        answers: Whether the token belongs to an answer.
        weight: Loss weight of the token.
    """

    ids: list[int]
    positions: list[int]
    part: list[int]
    answers: list[bool]
    weight: list[float]


class Packer:
    """Packs exchanges after their image, with the same tokens as separate prompts would have."""

    def __init__(self, processor: LlavaProcessor) -> None:
        tokenizer = processor.tokenizer
        self.tokenizer = tokenizer
        self.bare = len(tokenizer("USER:").input_ids)
        image = processor.image_token * PATCHES
        self.prefix: list[int] = tokenizer(f"USER: {image}\n").input_ids

    def encode(self, text: str) -> list[int]:
        """Encodes a text without special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def pack(self, made: Sequence[Exchange], blind: Sequence[bool]) -> Packed:
        """Packs exchanges about one scene into a sequence.

        Args:
            made: The exchanges.
            blind: Whether an exchange is without the image, for each exchange.
        """
        start = len(self.prefix)
        packed = Packed(
            ids=list(self.prefix),
            positions=list(range(start)),
            part=[0] * start,
            answers=[False] * start,
            weight=[0.0] * start,
        )
        for number, (one, unseen) in enumerate(zip(made, blind, strict=True), 1):
            asked = self.encode(f"{' ' if unseen else ''}{one.request} ASSISTANT:")
            answer = [*self.encode(f" {one.answer}"), self.tokenizer.eos_token_id]
            length = len(asked) + len(answer)
            first = self.bare if unseen else start
            packed.ids.extend(asked + answer)
            packed.positions.extend(range(first, first + length))
            packed.part.extend([-number if unseen else number] * length)
            packed.answers.extend([False] * len(asked) + [True] * len(answer))
            packed.weight.extend([0.2 if one.kind == "caption" else 1.0] * length)
        return packed

    def visible(self, part: Tensor) -> Tensor:
        """Returns the additive attention mask ``(B, 1, L, L)``, given ``part (B, L)``.

        A token attends to the earlier tokens of its exchange and to the prefix; in an exchange
        without the image, only to the prefix's text before the image.
        """
        length = part.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mine = part[:, :, None] == part[:, None, :]
        head = (part[:, None, :] == 0) & (
            (part[:, :, None] > 0) | (torch.arange(length)[None, None, :] < self.bare)
        )
        hidden = ~(causal & (mine | head))[:, None]
        return hidden * torch.finfo(torch.float32).min

    def collate(self, rows: Sequence[Packed]) -> dict[str, Tensor]:
        """Pads sequences to tensors ``(B, L)``; padding is masked like a separate exchange."""
        length = max(len(row.ids) for row in rows)

        def padded(name: str, fill: Any) -> Tensor:
            values = [getattr(row, name) for row in rows]
            return torch.tensor([v + [fill] * (length - len(v)) for v in values])

        return {
            "ids": padded("ids", self.tokenizer.pad_token_id),
            "positions": padded("positions", 0),
            "part": padded("part", 10_000),
            "answers": padded("answers", False),
            "weight": padded("weight", 0.0),
        }


def states_of(
    model: LlavaForConditionalGeneration, packer: Packer, rows: dict[str, Tensor], pixels: Tensor
) -> tuple[Tensor, Any]:
    """Computes last hidden states ``(B, L, width)`` of packed sequences, and the tower's output."""
    seen = model.model.get_image_features(pixel_values=pixels)
    inputs = model.get_input_embeddings()(rows["ids"])
    is_image = rows["ids"] == model.config.image_token_id
    features = torch.cat(seen.pooler_output).to(inputs.dtype)
    inputs = inputs.masked_scatter(is_image[..., None], features)
    hidden = model.model.language_model(
        inputs_embeds=inputs,
        attention_mask=packer.visible(rows["part"]),
        position_ids=rows["positions"],
        use_cache=False,
    ).last_hidden_state
    return hidden, seen


def losses(
    learner: Learner,
    packer: Packer,
    scenes: Sequence[Scene],
    rng: random.Random,
    options: LlavaScenesOptions,
) -> tuple[Tensor, Tensor]:
    """Computes the weighted cross-entropy of the answers, and the tower's classification loss."""
    rows = []
    for scene in scenes:
        made = sampled_exchanges(scene, rng, options)
        rows.append(packer.pack(made, [rng.random() < BLIND_SHARE for _ in made]))
    batch = packer.collate(rows)
    rendered = rendered_batch(scenes)
    hidden, seen = states_of(learner.model, packer, batch, rendered.pixels)
    asked = batch["answers"][:, 1:]
    logits = learner.model.lm_head(hidden[:, :-1][asked])
    each = F.cross_entropy(logits.float(), batch["ids"][:, 1:][asked], reduction="none")
    weight = batch["weight"][:, 1:][asked]
    states = seen.last_hidden_state
    pooled = learner.model.model.vision_tower.post_layernorm(states[:, 0])
    return (each * weight).sum() / weight.sum(), tower_loss(states, pooled, learner.heads, rendered)


def losses_of_the_tower(learner: Learner, scenes: Sequence[Scene]) -> tuple[Tensor, Tensor]:
    """Computes the losses while the tower is trained alone: 0, and its classification loss."""
    rendered = rendered_batch(scenes)
    seen = learner.model.model.vision_tower(rendered.pixels)
    own = tower_loss(seen.last_hidden_state, seen.pooler_output, learner.heads, rendered)
    return own.new_zeros(()), own


def rate_at(step: int, options: LlavaScenesOptions) -> float:
    """Returns the learning rate; each of the two phases has a warm-up (200 steps) and a decay."""
    if step < options.tower_steps:
        begun, left = step, (options.tower_steps - step) / (0.3 * options.tower_steps)
    else:
        joint = options.steps - options.tower_steps
        begun, left = step - options.tower_steps, (options.steps - step) / (0.4 * joint)
    return options.peak_rate * min(1.0, (begun + 1) / 200, left + 0.02)


def optimizer_of(learner: Learner, options: LlavaScenesOptions) -> torch.optim.AdamW:
    """Builds AdamW with weight decay on matrices only, and separate groups for the tower."""
    tower = set(learner.model.model.vision_tower.parameters())
    groups: list[dict[str, Any]] = []
    for of_tower in (True, False):
        own = [p for p in learner.parameters() if (p in tower) == of_tower]
        groups += [
            {"params": [p for p in own if p.ndim > 1], "weight_decay": 0.03, "tower": of_tower},
            {"params": [p for p in own if p.ndim <= 1], "weight_decay": 0.0, "tower": of_tower},
        ]
    return torch.optim.AdamW(groups, lr=options.peak_rate, betas=(0.9, 0.98))


def train(
    options: LlavaScenesOptions, work: Path, out: Path, *, save_every_s: float = 240.0
) -> None:
    """Trains the model into ``out``, or resumes from ``work``; the result is the same."""
    processor = build_processor(options)
    learner = Learner(options, processor).train()
    packer = Packer(processor)
    optimizer = optimizer_of(learner, options)
    state_file = work / "state.pt"
    step = 0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        learner.load_state_dict(state["modules"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    answers = own = torch.zeros(())

    def save() -> None:
        """Writes the state, a line of the log and, in the second phase, the model."""
        states = {"modules": learner.state_dict(), "optimizer": optimizer.state_dict()}
        write_state(state_file, states | {"step": step})
        row: dict[str, Any] = {
            "step": step,
            "answers": round(float(answers), 4),
            "tower": round(float(own), 4),
        }
        if step > options.tower_steps:
            row["pope"] = pope_accuracy(learner.model, packer, 60, "development")
            export(learner.model, processor, options, out)
        else:
            row["pope"] = tower_accuracy(learner, 240)
        with open_append(work / "log.jsonl") as log:
            append_line(log, json.dumps(row).encode() + b"\n")

    saved = time.monotonic()
    while step < options.steps:
        alone = step < options.tower_steps
        for group in optimizer.param_groups:
            slower = TOWER_SLOWER if group["tower"] and not alone else 1.0
            group["lr"] = rate_at(step, options) * slower
        rng = random.Random(f"llava/{options.seed}/{step}")
        count = options.tower_batch if alone else options.batch
        scenes = [draw_scene(rng.randrange(HELD_OUT)) for _ in range(count)]
        with torch.autocast("cpu", torch.bfloat16):
            if alone:
                given = losses_of_the_tower(learner, scenes)
            else:
                given = losses(learner, packer, scenes, rng, options)
        (given[0] + (1.0 if alone else 0.3) * given[1]).backward()
        nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        answers, own = (
            old + 0.02 * (new.detach() - old)
            for old, new in zip((answers, own), given, strict=True)
        )
        step += 1
        if time.monotonic() - saved > save_every_s:
            save()
            saved = time.monotonic()
    save()


@torch.no_grad()
def tower_accuracy(learner: Learner, count: int) -> dict[str, float]:
    """Measures the tower's accuracy on POPE's questions, with the best threshold for each split.

    Args:
        learner: Model and heads.
        count: Number of development scenes.
    """
    found = {}
    tower, heads = learner.model.model.vision_tower, learner.heads
    for split in scene_sets.SPLITS:
        rows = scene_sets.scene_rows("development", f"pope_{split}")[: 6 * count]
        scenes = [scene_sets.scene_of(row["image"]) for row in rows[::6]]
        logits = heads.present(tower(rendered_batch(scenes).pixels).pooler_output)
        asked = torch.tensor([NOUN_OF[row["text"]] for row in rows]).view(count, 6)
        order = logits.gather(1, asked).flatten().argsort(descending=True)
        yes = torch.tensor([row["label"] == "yes" for row in rows])[order].int()
        right = yes.cumsum(0) + (1 - yes).sum() - (1 - yes).cumsum(0)
        found[str(split)] = round(float(right.max()) / len(rows), 4)
    return found


@torch.no_grad()
def pope_accuracy(
    model: LlavaForConditionalGeneration, packer: Packer, count: int, part: scene_sets.Part
) -> dict[str, float]:
    """Measures the accuracy of the likelier of Yes and No on each split, and the share of yes.

    Args:
        model: The model.
        packer: Packer with the model's processor.
        count: Number of scenes.
        part: ``development`` or ``test``.
    """
    asked: dict[str, list[tuple[scene_sets.Split, dict[str, Any]]]] = {}
    for split in scene_sets.SPLITS:
        for row in scene_sets.scene_rows(part, f"pope_{split}")[: 6 * count]:
            asked.setdefault(row["image"], []).append((split, row))
    yes, no = (packer.encode(f" {word}")[0] for word in ("Yes", "No"))
    right: dict[str, list[bool]] = {split: [] for split in scene_sets.SPLITS}
    answered_yes: list[bool] = []
    images = list(asked)
    for start in range(0, len(images), 8):
        chunk = [(image, asked[image]) for image in images[start : start + 8]]
        rows = []
        for _, questions in chunk:
            made = [Exchange(request=r["text"], answer="Yes", kind="") for _, r in questions]
            rows.append(packer.pack(made, [False] * len(made)))
        batch = packer.collate(rows)
        rendered = rendered_batch([scene_sets.scene_of(image) for image, _ in chunk])
        hidden, _ = states_of(model, packer, batch, rendered.pixels)
        answers = (batch["ids"] == yes) & batch["answers"]
        logits = model.lm_head(hidden[:, :-1][answers[:, 1:]])
        margins = (logits[:, yes] - logits[:, no]).tolist()
        questions = [question for _, several in chunk for question in several]
        for (split, row), margin in zip(questions, margins, strict=True):
            answered_yes.append(margin > 0)
            right[split].append(answered_yes[-1] == (row["label"] == "yes"))
    shares = {split: sum(hits) / len(hits) for split, hits in right.items()}
    shares |= {"yes": sum(answered_yes) / len(answered_yes)}
    return {name: round(share, 4) for name, share in shares.items()}


def export(
    model: LlavaForConditionalGeneration,
    processor: LlavaProcessor,
    options: LlavaScenesOptions,
    out: Path,
) -> None:
    """Saves float16 weights with ``dtype`` float32 in the configuration, and the processor."""
    clone = LlavaForConditionalGeneration(model.config)
    clone.load_state_dict(model.state_dict())
    clone.generation_config = model.generation_config

    def fill(into: Path) -> None:
        clone.half().save_pretrained(into)
        say_float32(into, "text_config", "vision_config")
        processor.save_pretrained(into)
        write_file(into / "recipe.json", json.dumps(asdict(options), indent=2) + "\n")

    write_folder(out, fill)


def run(options: LlavaScenesOptions, work: Path, out: Path) -> dict[str, Any]:
    """Trains the model, or resumes its training; returns the last line of its log."""
    train(options, work, out)
    last = (work / "log.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    return {"folder": str(out)} | json.loads(last)
