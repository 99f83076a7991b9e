"""Losses of the zoo's LlamaGen models over image codes, and measurements of their distributions.

Two measurements predict how much parallel decoding can gain: the entropy of the distribution that
codes are sampled from, and how strongly this distribution depends on the code at a given distance
before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from mmdecode.image_ar.sampling import Sampling, guided
from mmdecode.models.llamagen import LlamaGenForImageGeneration, padding_mask
from mmdecode.runs.files import marked_json, write_file
from mmdecode.train.loop import BITS


def dropped(model: LlamaGenForImageGeneration, condition: Tensor, which: Tensor) -> Tensor:
    """Replaces the conditions of some images by the unconditional one, such as the null class.

    Args:
        model: The model.
        condition: Classes ``(B,)`` or caption features ``(B, slots, width)``.
        which: Whether an image's condition is replaced, bool ``(B,)``.
    """
    shape = (-1, *[1] * (condition.ndim - 1))
    return torch.where(which.view(shape), model.unconditional(condition), condition)


def code_loss(
    model: LlamaGenForImageGeneration,
    condition: Tensor,
    codes: Tensor,
    slot_mask: Tensor | None = None,
) -> Tensor:
    """Computes the mean negative log-likelihood of codes ``(B, n)``, in nats per code."""
    logits = model.code_logits(condition, codes, slot_mask)
    return F.cross_entropy(logits.float().flatten(0, 1), codes.flatten())


@torch.no_grad()
def bits_per_code(
    model: LlamaGenForImageGeneration,
    conditions: Tensor,
    codes: Tensor,
    slot_mask: Tensor | None = None,
    batch: int = 32,
) -> float:
    """Computes the negative log2-likelihood per code of images ``(n, tokens)``."""
    total = 0.0
    device = model.device
    for start in range(0, len(codes), batch):
        part = slice(start, start + batch)
        mask = None if slot_mask is None else slot_mask[part].to(device)
        loss = code_loss(model, conditions[part].to(device), codes[part].to(device), mask)
        total += float(loss) * len(codes[part])
    return total / len(codes) * BITS


def position_entropy(codes: Tensor) -> float:
    """Computes the mean over positions of the entropy of the codes at a position, in bits.

    A model that knows only the position needs as many bits per code. The estimate is too small by
    about ``k / (1.4 n)`` bits, where k is the number of different codes at a position.

    Args:
        codes: Codes of n images, ``(n, tokens)``.
    """
    entropies = []
    for column in codes.T:
        share = column.unique(return_counts=True)[1].double() / len(column)
        entropies.append(float(-(share * share.log2()).sum()))
    return sum(entropies) / len(entropies)


@dataclass(frozen=True, kw_only=True)
class SampledCodes:
    """Codes of images sampled from a model.

    Attributes:
        codes: Image codes, ``(B, tokens)``.
        entropy: Entropy of the distribution that each code was sampled from, in bits, ``(B,
            tokens)``.
    """

    codes: Tensor
    entropy: Tensor


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Decoding settings of a model.

    Attributes:
        scale: Scale of classifier-free guidance; 1: no guidance.
        sampling: Sampling settings, applied to guided logits.
    """

    scale: float = 1.0
    sampling: Sampling = field(default_factory=Sampling)

    def target_logits(self, logits: Tensor) -> Tensor:
        """Computes log-probabilities after guidance and sampling settings, ``(B, ..., V)``.

        Args:
            logits: Logits of B conditional rows, then of B unconditional rows, ``(2 B, ..., V)``.
        """
        given, nothing = logits.float().chunk(2)
        return self.sampling.warp(guided(given, nothing, self.scale)).log_softmax(-1)

    def described(self) -> dict[str, Any]:
        """Returns the settings as a dictionary for ``card.json``."""
        order = list(self.sampling.order)
        return {"guidance": self.scale, **asdict(self.sampling), "order": order}


def write_setting(setting: Setting, folder: Path) -> None:
    """Writes the decoding settings to ``generation_config.json`` in a model's folder."""
    settings = {"do_sample": True, "guidance_scale": setting.scale} | {
        name: value for name, value in asdict(setting.sampling).items() if name != "order"
    }
    write_file(folder / "generation_config.json", json.dumps(settings, indent=2) + "\n")


def entropy_of(distribution: Tensor) -> Tensor:
    """Computes the entropy in bits of log-probabilities ``(..., V)``."""
    return -(distribution.exp() * distribution.clamp_min(-1e4)).sum(-1) * BITS


@torch.no_grad()
def draw(
    model: LlamaGenForImageGeneration,
    conditions: Tensor,
    setting: Setting,
    dice: torch.Generator,
    slot_mask: Tensor | None = None,
) -> SampledCodes:
    """Samples one image for each condition, code by code, and records the entropies.

    Args:
        model: The model.
        conditions: Classes or caption features, one for each image.
        setting: Guidance and sampling.
        dice: Random generator of the codes.
        slot_mask: Mask of caption features; ``None`` for classes.
    """
    both = torch.cat([conditions, model.unconditional(conditions)])
    length = model.config.slots + model.config.image_tokens
    mask = None if slot_mask is None else padding_mask(slot_mask.repeat(2, 1), length)
    cache = DynamicCache(config=model.config)
    inputs = model.embed_condition(both)
    codes, entropies, start = [], [], 0
    for _ in range(model.config.image_tokens):
        end = start + inputs.shape[1]
        block = None if mask is None else mask[:, :, start:end, :end]
        hidden = model.model(
            inputs_embeds=inputs, attention_mask=block, past_key_values=cache
        ).last_hidden_state
        distribution = setting.target_logits(model.lm_head(hidden[:, -1]))
        codes.append(distribution.exp().multinomial(1, generator=dice))
        entropies.append(entropy_of(distribution))
        inputs = model.model.embed_tokens(codes[-1].repeat(2, 1))
        start = end
    return SampledCodes(codes=torch.cat(codes, 1), entropy=torch.stack(entropies, 1))


@torch.no_grad()
def reach(
    model: LlamaGenForImageGeneration,
    conditions: Tensor,
    codes: Tensor,
    setting: Setting,
    dice: torch.Generator,
    slot_mask: Tensor | None = None,
) -> dict[str, float]:
    """Measures how much a code influences the distributions of later codes, by distance.

    In each image one code is resampled from its own distribution. The effect at distance d is the
    mean total variation between the distributions, before and after, of the code d positions later
    in raster order: the code to the right at distance 1, the code below at the grid's width.

    Args:
        model: The model.
        conditions: Classes or caption features, one for each image.
        codes: Codes of images sampled from the model under ``setting``, ``(B, tokens)``.
        setting: Guidance and sampling.
        dice: Random generator of positions and codes.
        slot_mask: Mask of caption features; ``None`` for classes.

    Returns:
        Mean total variation, 0 to 1, by distance.
    """
    both = torch.cat([conditions, model.unconditional(conditions)])
    mask = None if slot_mask is None else slot_mask.repeat(2, 1)
    width = model.config.grid_size
    distances = (1, 2, 3, width - 1, width, width + 1, 2 * width)
    rows = torch.arange(len(codes))
    position = torch.randint(codes.shape[1] - max(distances), rows.shape, generator=dice)
    before = setting.target_logits(model.code_logits(both, codes.repeat(2, 1), mask))
    changed = codes.clone()
    changed[rows, position] = before[rows, position].exp().multinomial(1, generator=dice)[:, 0]
    after = setting.target_logits(model.code_logits(both, changed.repeat(2, 1), mask))
    found = {}
    for k in distances:
        distributions = (distribution[rows, position + k].exp() for distribution in (before, after))
        found[str(k)] = round(float(torch.sub(*distributions).abs().sum(-1).mean()) / 2, 4)
    return found


def distributions_of(
    model: LlamaGenForImageGeneration,
    conditions: Tensor,
    setting: Setting,
    slot_mask: Tensor | None = None,
) -> dict[str, dict[str, Any]]:
    """Measures entropy and `reach` of sampled images, without guidance and under ``setting``.

    Args:
        model: The model.
        conditions: Classes or caption features of the images to sample.
        setting: Guidance and sampling.
        slot_mask: Mask of caption features; ``None`` for classes.

    Returns:
        Mean entropy in bits and mean total variation by distance, under ``plain`` (no guidance)
        and ``guided``.
    """
    found = {}
    for name, how in (("plain", Setting()), ("guided", setting)):
        dice = torch.Generator().manual_seed(0)
        sampled = draw(model, conditions, how, dice, slot_mask)
        found[name] = {
            "law_entropy_bits": round(float(sampled.entropy.mean()), 3),
            "total_variation_at": reach(model, conditions, sampled.codes, how, dice, slot_mask),
        }
    return found


_README = """# zoo:{name}

{what}.

Trained from scratch by `mmdecode train zoo {recipe}`; weights in half precision, config float32.

{facts}
- Not for: anything but tests and demonstrations. It knows one little world.

Measured: {measured}. All numbers are in `card.json`.

Apache-2.0.
"""


def write_card(
    folder: Path,
    *,
    recipe: str,
    what: str,
    measured: str,
    facts: Sequence[str],
    numbers: dict[str, Any],
) -> dict[str, Any]:
    """Writes ``card.json`` and ``README.md`` of a zoo model; returns the card.

    Args:
        folder: Folder of the model.
        recipe: Name of the recipe, for ``mmdecode train zoo``.
        what: Description of the model in one line.
        measured: Main numbers in one line.
        facts: Sentences about the model's data and decoding settings.
        numbers: All measurements, for ``card.json``.
    """
    card = {"what": what, "measured": measured} | numbers
    write_file(folder / "card.json", marked_json(card))
    text = _README.format(
        name=folder.name,
        recipe=recipe,
        what=what,
        measured=measured,
        facts="\n".join(f"- {fact}" for fact in facts),
    )
    write_file(folder / "README.md", text)
    return card
