"""Architectures of trained drafters: how each is built, its loss, and the drafter that uses it.

A `Recipe` describes one architecture, such as EAGLE. Drafters that read the target's hidden states
(`FeatureDrafter`) may be trained in several passes: in later passes the input is the drafter's own
output of the pass before, and attention is as in drafting (`unrolled`).

Sources: Li et al. 2024, arXiv:2401.15077, section 3.2 (EAGLE); Zhang et al. 2024, arXiv:2408.15766
(HASS, several passes); Li et al. 2025, arXiv:2503.01840, section 3 (EAGLE-3, training-time test);
Cai et al. 2024, arXiv:2401.10774 (Medusa); Kang et al. 2025, arXiv:2509.15235 (ViSpec); Hu et al.
2025, arXiv:2505.19201 (DREAM); Wang et al. 2025, arXiv:2505.12728 (FLASH); Ankner et al. 2024,
arXiv:2402.05109 (Hydra); Liu et al. 2024, arXiv:2404.18911 (Kangaroo); Gui et al. 2024,
arXiv:2408.15562 (FSPAD). Differs from EAGLE-3's trainer: losses are averaged over the positions
that have a target, without padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdecode.draft.assistant import Assistant
from mmdecode.draft.dream import Dream
from mmdecode.draft.eagle import Eagle
from mmdecode.draft.features import FeatureDraft
from mmdecode.draft.flash import Flash
from mmdecode.draft.hydra import Hydra
from mmdecode.draft.kangaroo import Kangaroo, refuse_unsuited
from mmdecode.draft.medusa import Medusa
from mmdecode.draft.medusa_heads import MedusaHeads
from mmdecode.draft.vispec import ViSpec
from mmdecode.engine.contracts import Drafter
from mmdecode.errors import OptionError, UnknownNameError
from mmdecode.models.dream import DreamModel
from mmdecode.models.eagle import Eagle3Model, EagleModel
from mmdecode.models.feature_drafter import FeatureDrafter, Rows
from mmdecode.models.flash import FlashModel
from mmdecode.models.hydra import HydraHeads
from mmdecode.models.kangaroo import KangarooModel, rope_of
from mmdecode.models.vispec import ViSpecModel
from mmdecode.runs.files import write_folder
from mmdecode.train.drafters.losses import divergence, smooth_distance, vispec_loss
from mmdecode.train.drafters.medusa import head_losses
from mmdecode.train.loop import FitOptions, save_half

OWN = {
    "draft_vocabulary": ("eagle3",),
    "heads": ("medusa", "hydra"),
    "feature_sampling": ("eagle", "vispec"),
    "exit_layer": ("kangaroo",),
    "layers": ("text",),
    "queries": ("vispec", "flash"),
    "tokens": ("flash",),
}
"""The kinds of drafters that each option applies to; other options apply to all kinds."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of a drafter's training; values called "published" are those of the papers.

    Attributes:
        kind: Architecture of the drafter, a key of `RECIPES`.
        passes: Number of passes over a batch; in later passes the drafter reads its own output.
            ``None``: the architecture's default.
        decay: Factor between the loss weights of a pass (or head) and of the one before it.
        feature_weight, law_weight: Loss weights of smooth L1 between states and of cross-entropy
            between distributions, for eagle and flash. ``law_weight=None``: the published 0.1 for
            text, 1 for image codes, whose distributions are flat.
        noise: Width of the uniform noise on the target's states in the first pass, for a sequence
            of 512 tokens; inversely proportional to the length. Published 0.2.
        draft_vocabulary: Vocabulary size of eagle3's own output head, for the tokens most frequent
            in the answers; ``None``: the target's vocabulary.
        heads: Number of heads of medusa and hydra.
        feature_sampling: Whether eagle or vispec uses FSPAD: features are sampled by embeddings,
            and the feature passed on is separate from the feature that predicts tokens.
        exit_layer: Number of the target's first layers that kangaroo drafts with; published 2.
        layers: Number of layers of a drafter of kind ``text``.
        queries: Number of vectors that summarise an image: vispec's queries with the global vector
            (published 2) or flash's latents (published 64). ``None``: as published.
        tokens: Number of tokens that flash drafts in one pass; published 5.
        length: Number of drafted tokens in a pass of an evaluation (a chain, no tree).
        max_new_tokens: Maximum length of text answers in tokens.
        temperature: Sampling temperature of text answers; 0: greedy. Images are sampled with the
            settings of their model's checkpoint.
        held_out: Number of requests that are held out to choose the best checkpoint.
        tested: Number of further held-out requests on which the final drafter is measured; 0: it is
            measured on the ``held_out`` requests.
        memory: Megabytes of target states that are cached for later epochs; 0: no cache.
        fit: Steps, learning rates and early stopping.
    """

    kind: str = "eagle"
    passes: int | None = None
    decay: float = 0.8
    feature_weight: float = 1.0
    law_weight: float | None = None
    noise: float = 0.2
    draft_vocabulary: int | None = None
    heads: int = 4
    feature_sampling: bool = False
    exit_layer: int = 2
    layers: int = 2
    queries: int | None = None
    tokens: int = 5
    length: int = 4
    max_new_tokens: int = 96
    temperature: float = 0.0
    held_out: int = 32
    tested: int = 64
    memory: float = 512.0
    fit: FitOptions = field(
        default_factory=lambda: FitOptions(
            steps=1500, batch=16, peak_rate=2e-3, weight_decay=0.01, every=100, patience=5
        )
    )

    def __post_init__(self) -> None:
        if self.kind not in RECIPES:
            raise UnknownNameError.of("kind", self.kind, RECIPES)
        names = ("passes", "length", "held_out", "heads", "queries", "tokens", "exit_layer")
        counts = {name: getattr(self, name) for name in names}
        if any(count is not None and count < 1 for count in counts.values()):
            shown = ", ".join(f"{name}={count}" for name, count in counts.items())
            raise OptionError(f"{shown}; expected numbers of at least 1")
        usual = {one.name: one.default for one in fields(self)}
        for name, kinds in OWN.items():
            given = getattr(self, name)
            if given != usual[name] and self.kind not in kinds:
                raise OptionError(
                    f"{name}={given} has no effect with kind={self.kind!r}, only with "
                    f"{' and '.join(kinds)}; leave it out"
                )
        if self.tested < 0:
            raise OptionError(f"tested={self.tested}; expected at least 0")


@dataclass(frozen=True)
class Sample:
    """Training request with the target's own answer as token ids, including the end token."""

    request: Any
    answer: list[int]


def unguided(logits: Tensor) -> Tensor:
    """Returns the logits unchanged, as guidance for models without guidance."""
    return logits


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Training batch: sequences of prompt and answer with the target's hidden states.

    Attributes:
        rows: Inputs of the drafter for all tokens but the last; states of several layers are not
            combined yet. ``None``: the architecture reads only ``last``.
        ids: Token ids, ``(B, S)``.
        last: States of the target after its final norm, ``(B, S, H)``.
        words: Whether a token is neither padding nor part of an image, ``(B, S)`` bool.
        asked: Whether a token belongs to an answer, ``(B, S)`` bool.
        adapter: Adapter of the target.
        inner: States of an early layer for DREAM's loss, ``(B, S, H)``; ``None``: not recorded.
        guided: Applies guidance to logits ``(B, ..., V)``, whose rows are all conditional
            sequences, then all unconditional ones; both get the guided logits.
    """

    rows: Rows | None
    ids: Tensor
    last: Tensor
    words: Tensor
    asked: Tensor
    adapter: Any
    inner: Tensor | None = None
    guided: Callable[[Tensor], Tensor] = unguided

    def size(self) -> int:
        """Returns the size of the states in bytes."""
        states = [self.last] + ([self.rows.embeds, self.rows.features] if self.rows else [])
        states += [] if self.inner is None else [self.inner]
        return sum(part.numel() * part.element_size() for part in states)

    def logits(self) -> Tensor:
        """Computes the target's guided logits, ``(B, S, V)`` float32."""
        with torch.no_grad():
            return self.guided(self.adapter.head(self.last).float())


@dataclass(frozen=True, kw_only=True)
class Targets:
    """Labels of one pass: for each position, the target model's state and logits further ahead.

    Attributes:
        features: States of the target model, ``(B, L, H)``.
        logits: Logits of the target model, ``(B, L, V)``.
        asked: Whether the position counts in the loss, ``(B, L)`` bool.
    """

    features: Tensor
    logits: Tensor
    asked: Tensor

    def mean(self, losses: Tensor) -> Tensor:
        """Returns the mean of losses ``(B, L)`` over the positions that count."""
        return (losses * self.asked).sum() / self.asked.sum().clamp_min(1)


class Recipe:
    """Base class of the recipes: how a drafter of one architecture is built, trained and saved."""

    def build(self, adapter: Any, samples: Sequence[Sample], options: Options) -> nn.Module:
        """Builds the untrained drafter model for a target."""
        raise NotImplementedError

    def loss(self, module: Any, batch: Batch, options: Options, dice: torch.Generator) -> Tensor:
        """Computes the loss of a batch; ``dice`` is the random generator of the step."""
        raise NotImplementedError

    def draft(self, module: Any, length: int) -> Drafter:
        """Returns the drafter that proposes a chain of ``length`` tokens with the model."""
        raise NotImplementedError

    def reads(self, module: Any) -> FeatureDrafter | None:
        """Returns the drafter that ``Batch.rows`` is computed for; ``None``: no rows are needed."""
        return None

    def save(self, module: Any, out: Path, adapter: Any) -> None:
        """Writes the checkpoint to ``out``."""
        raise NotImplementedError


class FeatureRecipe(Recipe):
    """Base class of recipes for drafters that read the target's states (`FeatureDrafter`).

    Attributes:
        passes: Default number of passes.
        drafts: Class of the drafter that uses the model.
    """

    passes = 1
    drafts: type[FeatureDraft] = Eagle

    def pass_loss(
        self, module: Any, states: Tensor, logits: Tensor, targets: Targets, options: Options
    ) -> Tensor:
        """Computes the loss of a pass from its states ``(B, L, H)`` and logits ``(B, L, D)``."""
        raise NotImplementedError

    def rows(self, module: Any, batch: Batch, options: Options, dice: torch.Generator) -> Rows:
        """Returns the input of the first pass, with noise added to the target's states."""
        rows = batch.rows
        assert rows is not None, "read by `collect`"
        if options.noise:
            noise = torch.rand(rows.features.shape, generator=dice) - 0.5
            scaled = noise.to(rows.features) * (options.noise * 512 / batch.ids.shape[1])
            rows = replace(rows, features=rows.features + scaled)
        return module.prepare(replace(rows, features=module.fuse(rows.features)))

    def loss(self, module: Any, batch: Batch, options: Options, dice: torch.Generator) -> Tensor:
        """Computes the weighted mean of the losses of the passes."""
        passes = options.passes or self.passes
        rows, logits = self.rows(module, batch, options, dice), batch.logits()
        total, weights = torch.zeros((), device=batch.ids.device), 0.0
        for index, states in enumerate(unrolled(module, rows, passes)):
            weight = options.decay**index
            targets = targets_of(batch, logits, index)
            drafted = batch.guided(module.logits(states, batch.adapter).float())
            total = total + weight * self.pass_loss(module, states, drafted, targets, options)
            weights += weight
        return total / weights

    def draft(self, module: Any, length: int) -> Drafter:
        """Returns the drafter that proposes a chain of ``length`` tokens with the model."""
        return self.drafts(module, depth=length, top_k=1, nodes=length)

    def reads(self, module: Any) -> FeatureDrafter | None:
        """Returns the model itself."""
        return module

    def save(self, module: Any, out: Path, adapter: Any) -> None:
        """Saves the model in the layout of the published checkpoints."""
        write_folder(out, module.save_pretrained)


class EagleRecipe(FeatureRecipe):
    """Recipe of EAGLE: smooth L1 loss of states, cross-entropy of the target head's logits."""

    def build(self, adapter: Any, samples: Sequence[Sample], options: Options) -> nn.Module:
        """Builds one decoder layer with the target's sizes."""
        return EagleModel({**sizes_of(adapter), "feature_sampling": options.feature_sampling})

    def pass_loss(
        self, module: Any, states: Tensor, logits: Tensor, targets: Targets, options: Options
    ) -> Tensor:
        """Computes the weighted sum of the two losses of `eagle_losses`."""
        parts = eagle_losses(module.feature(states), logits, targets)
        return options.feature_weight * parts[0] + law_weight(module, options) * parts[1]


class Eagle3Recipe(FeatureRecipe):
    """Recipe of EAGLE-3: only cross-entropy, over the drafter's own vocabulary, in four passes."""

    passes = 4

    def build(self, adapter: Any, samples: Sequence[Sample], options: Options) -> nn.Module:
        """Builds one layer with the target's sizes, for the most frequent tokens of the answers."""
        size = options.draft_vocabulary or adapter.vocab
        if not 1 <= size <= adapter.vocab:
            raise OptionError(
                f"draft_vocabulary={size}; expected 1 to {adapter.vocab}, the size of the target's "
                "vocabulary"
            )
        module = Eagle3Model({**sizes_of(adapter), "draft_vocab_size": size})
        if module.d2t is not None and module.t2d is not None:
            counts = Counter(token for sample in samples for token in sample.answer)
            # tokens of equal frequency, 0 included, in the order of their ids
            chosen = sorted(range(adapter.vocab), key=lambda token: (-counts[token], token))[:size]
            ids = torch.tensor(sorted(chosen))
            module.d2t.copy_(ids - torch.arange(size))
            module.t2d.copy_(torch.isin(torch.arange(adapter.vocab), ids))
        return module

    def pass_loss(
        self, module: Any, states: Tensor, logits: Tensor, targets: Targets, options: Options
    ) -> Tensor:
        """Computes the mean of `distribution_losses` over the positions with a label."""
        losses, asked = distribution_losses(logits, targets, module.target_ids())
        return losses.sum() / asked.sum().clamp_min(1)


class ViSpecRecipe(FeatureRecipe):
    """Recipe of ViSpec: L1 distance of distributions and a ranking loss, in two passes.

    Differs from the reference: by default, training starts from random weights instead of a drafter
    trained on text, and the second pass attends as in drafting instead of only to its own states.
    """

    passes = 2
    drafts = ViSpec

    def build(self, adapter: Any, samples: Sequence[Sample], options: Options) -> nn.Module:
        """Builds one layer with the target's sizes, and the queries that attend to images."""
        own = {"num_queries": options.queries or 2, "feature_sampling": options.feature_sampling}
        return ViSpecModel({**sizes_of(adapter), **own})

    def pass_loss(
        self, module: Any, states: Tensor, logits: Tensor, targets: Targets, options: Options
    ) -> Tensor:
        """Computes the mean of `mmdecode.train.drafters.losses.vispec_loss`."""
        return targets.mean(vispec_loss(logits, targets.logits))


class DreamRecipe(FeatureRecipe):
    """Recipe of DREAM: losses of states, of distributions, and of the cross-attention's output.

    The cross-attention's output is compared with the states of an early layer, if the target has at
    least 8 layers. The losses have the paper's weights 0.2, 1 and 0.2.
    """

    drafts = Dream

    def build(self, adapter: Any, samples: Sequence[Sample], options: Options) -> nn.Module:
        """Builds three blocks with the target's sizes; the first position's feature is zero."""
        return DreamModel({**sizes_of(adapter), "first_row": "zero"})

    def loss(self, module: Any, batch: Batch, options: Options, dice: torch.Generator) -> Tensor:
        """Computes the mean loss of the passes, plus the loss of the cross-attention block."""
        crossed: list[Tensor] = []
        hook = module.layers[1].register_forward_hook(lambda *args: crossed.append(args[-1]))
        with hook:
            total = super().loss(module, batch, options, dice)
        if batch.inner is None:
            return total
        targets = targets_of(replace(batch, last=batch.inner), batch.inner, 0)
        distance = smooth_distance(crossed[0][:, 1:], targets.features)
        return total + 0.2 * targets.mean(distance)

    def pass_loss(
        self, module: Any, states: Tensor, logits: Tensor, targets: Targets, options: Options
    ) -> Tensor:
        """Computes the losses of states and distributions, without the first position."""
        distance = smooth_distance(states[:, 1:], targets.features)
        surprise = divergence(logits[:, 1:], targets.logits)
        return 0.2 * targets.mean(distance) + targets.mean(surprise)


class FlashRecipe(FeatureRecipe):
    """Recipe of FLASH: the losses of EAGLE for each of the tokens that one pass drafts."""

    drafts = Flash

    def build(self, adapter: Any, samples: Sequence[Sample], options: Options) -> nn.Module:
        """Builds one layer with the target's sizes, and latent vectors that summarise an image."""
        if (options.passes or 1) > 1:
            raise OptionError(
                f"passes={options.passes}; flash drafts {options.tokens} tokens in a single pass: "
                "leave passes out"
            )
        own = {"k": options.tokens, "compress_len": options.queries or 64}
        return FlashModel({**sizes_of(adapter), **own})

    def loss(self, module: Any, batch: Batch, options: Options, dice: torch.Generator) -> Tensor:
        """Computes the mean loss over the tokens that each position drafts in one pass."""
        logits = batch.logits()
        (made,) = unrolled(module, self.rows(module, batch, options, dice), 1)
        total = torch.zeros((), device=made.device)
        for index, states in enumerate(made.split(module.width, -1)):
            drafted = batch.adapter.head(states).float()
            parts = eagle_losses(states, drafted, targets_of(batch, logits, index))
            total = (
                total + options.feature_weight * parts[0] + law_weight(module, options) * parts[1]
            )
        return total / module.steps


class TextRecipe(Recipe):
    """Recipe of a small text-only language model, which the drafter ``assistant`` uses.

    It is distilled from the target's distribution at each token of the target's own answers,
    whereas Gagrani et al. 2024, arXiv:2404.08856, train on text.
    """

    def build(self, adapter: Any, samples: Sequence[Sample], options: Options) -> nn.Module:
        """Builds a Llama with ``options.layers`` layers and half the target's width."""
        from transformers import LlamaConfig, LlamaForCausalLM

        own = adapter.model.config.get_text_config(decoder=True)
        sizes = sizes_of(adapter)
        width, heads = sizes["hidden_size"] // 2, max(sizes["num_attention_heads"] // 2, 1)
        shape = {
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": width // heads,
            "num_hidden_layers": options.layers,
        }
        kept = ("vocab_size", "max_position_embeddings", "rms_norm_eps")
        ends = {name: getattr(own, name, None) for name in ("bos_token_id", "eos_token_id")}
        config = LlamaConfig(
            **{name: sizes[name] for name in kept}, **shape, **ends, tie_word_embeddings=True
        )
        return LlamaForCausalLM(config)

    def loss(self, module: Any, batch: Batch, options: Options, dice: torch.Generator) -> Tensor:
        """Computes the cross-entropy with the target; image tokens are removed from the input."""
        order = batch.words.long().argsort(dim=1, stable=True)[:, -int(batch.words.sum(1).max()) :]
        words, asked = batch.words.gather(1, order), batch.asked.gather(1, order)
        distribution = batch.logits().softmax(-1)
        distribution = distribution.gather(
            1, order[..., None].expand(-1, -1, distribution.shape[-1])
        )
        logits = module(
            input_ids=batch.ids.gather(1, order).masked_fill(~words, 0),
            attention_mask=words.long(),
            position_ids=(words.long().cumsum(1) - 1).clamp_min(0),
        ).logits
        losses = -(distribution * logits.float().log_softmax(-1)).sum(-1)[:, :-1]
        wanted = asked[:, 1:]  # the row before a token of an answer predicts it
        return (losses * wanted).sum() / wanted.sum().clamp_min(1)

    def draft(self, module: Any, length: int) -> Drafter:
        """Returns the drafter that proposes a chain of ``length`` tokens with the model."""
        return Assistant(module, length, text_only=True)

    def save(self, module: Any, out: Path, adapter: Any) -> None:
        """Saves the model in transformers' layout, with float16 weights."""
        save_half(module, out)


class MedusaRecipe(Recipe):
    """Recipe of Medusa heads, which read the last state of a decoder-only model."""

    def build(self, adapter: Any, samples: Sequence[Sample], options: Options) -> nn.Module:
        """Builds heads that initially predict the same token as the model's own head."""
        width = adapter.model.get_input_embeddings().embedding_dim
        return MedusaHeads(options.heads, 1, width)

    def loss(self, module: Any, batch: Batch, options: Options, dice: torch.Generator) -> Tensor:
        """Computes the weighted mean of the heads' cross-entropies; see ``Options.decay``."""
        asked = batch.asked[:, 1:-1] & batch.asked[:, 2:]
        labels = batch.ids[:, 2:].masked_fill(~asked, -100)
        states = batch.last[:, :-2]
        logits = module.logits(states.flatten(0, 1), batch.adapter)
        losses = head_losses(logits.unflatten(1, states.shape[:2]), labels)
        weights = options.decay ** torch.arange(len(losses), device=losses.device)
        known = ~losses.isnan()
        if not known.any():  # no answer is long enough for a loss
            return logits.sum() * 0
        return (losses[known] * weights[known]).sum() / weights[known].sum()

    def draft(self, module: Any, length: int) -> Drafter:
        """Returns the drafter of a chain, at most as long as there are heads."""
        most = min(length, module.weight.shape[1])
        return Medusa(module, paths=[(0,) * count for count in range(1, most + 1)])

    def save(self, module: Any, out: Path, adapter: Any) -> None:
        """Saves the heads in mmdecode's own layout."""
        config = {"model_type": adapter.model.config.model_type}
        write_folder(out, lambda into: Medusa(module).save_pretrained(into, config))


class HydraRecipe(Recipe):
    """Recipe of Hydra heads, trained on the target's distribution (as in Hydra++), not on ids."""

    def build(self, adapter: Any, samples: Sequence[Sample], options: Options) -> nn.Module:
        """Builds heads that initially predict the same token as the model's own head."""
        return HydraHeads({**sizes_of(adapter), "hydra_num_heads": options.heads})

    def loss(self, module: Any, batch: Batch, options: Options, dice: torch.Generator) -> Tensor:
        """Computes the weighted mean of the heads' cross-entropies; see ``Options.decay``.

        Position t counts for a head if token t + 1 and the predicted token belong to an answer.
        """
        first = batch.ids.shape[1] - 1 - int(batch.asked.sum(1).max())
        batch = replace(
            batch,
            ids=batch.ids[:, max(first, 0) :],
            last=batch.last[:, max(first, 0) :],
            asked=batch.asked[:, max(first, 0) :],
        )
        logits = batch.logits()
        # heads with a loss read tokens of answers alone
        embeds = module.embed(batch.ids.masked_fill(~batch.asked, 0), batch.adapter)
        length = batch.ids.shape[1] - 1
        read = batch.last[:, :length]
        total, weights = torch.zeros((), device=read.device), 0.0
        for head in range(len(module)):
            read = torch.cat([read, ahead(embeds, 1 + head, length).to(read.dtype)], -1)
            drafted = batch.guided(module.logits(head, read, batch.adapter).float())
            losses, asked = distribution_losses(drafted, targets_of(batch, logits, head))
            weight = options.decay**head
            total = total + weight * losses.sum() / asked.sum().clamp_min(1)
            weights += weight
        return total / weights

    def draft(self, module: Any, length: int) -> Drafter:
        """Returns the drafter of a chain, at most as long as there are heads."""
        return Hydra(module, depth=min(length, len(module)), top_k=1)

    def save(self, module: Any, out: Path, adapter: Any) -> None:
        """Saves the heads with the keys of the published checkpoints."""
        write_folder(out, module.save_pretrained)


class KangarooRecipe(FeatureRecipe):
    """Recipe of Kangaroo: predicts the target's distribution from the states of an early layer."""

    def build(self, adapter: Any, samples: Sequence[Sample], options: Options) -> nn.Module:
        """Builds Kangaroo's adapter network with the target's sizes and rotary embedding."""
        refuse_unsuited(adapter)
        if options.exit_layer >= adapter.num_layers:
            raise OptionError(
                f"exit_layer={options.exit_layer}; expected less than the target's "
                f"{adapter.num_layers} layers"
            )
        if (options.passes or 1) > 1:
            raise OptionError(
                f"passes={options.passes}; kangaroo is trained in a single pass on the target's "
                "states: leave passes out"
            )
        config = adapter.model.config.get_text_config(decoder=True)
        own = {"exit_layer": options.exit_layer}
        return KangarooModel({**sizes_of(adapter), **rope_of(config), **own})

    def loss(self, module: Any, batch: Batch, options: Options, dice: torch.Generator) -> Tensor:
        """Computes the cross-entropy with the target's distribution at the same position."""
        assert batch.rows is not None, "read by `collect`"
        (states,) = unrolled(module, batch.rows, 1)
        drafted = batch.guided(module.logits(states, batch.adapter).float())
        losses, asked = distribution_losses(drafted, targets_of(batch, batch.logits(), -1))
        return losses.sum() / asked.sum().clamp_min(1)

    def draft(self, module: Any, length: int) -> Drafter:
        """Returns the drafter of a chain of fixed length, without a confidence threshold."""
        return Kangaroo(module, length, confidence_threshold=0.0)


RECIPES: dict[str, Recipe] = {
    "eagle": EagleRecipe(),
    "eagle3": Eagle3Recipe(),
    "vispec": ViSpecRecipe(),
    "dream": DreamRecipe(),
    "flash": FlashRecipe(),
    "hydra": HydraRecipe(),
    "kangaroo": KangarooRecipe(),
    "medusa": MedusaRecipe(),
    "text": TextRecipe(),
}


def sizes_of(adapter: Any) -> dict[str, Any]:
    """Returns a drafter's configuration for ``config.json``, with the target's sizes."""
    config = adapter.model.config.get_text_config(decoder=True)
    width, heads = config.hidden_size, config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))
    positions = getattr(config, "max_position_embeddings", adapter.max_positions)
    images: dict[str, Any] = {}
    if adapter.layout is not None:
        images["draws_images"] = True
    if adapter.on_grid:
        # frequencies of rows and of columns alternate
        sections = (width // heads // 4) * [0, 1, 1]
        images["rope_parameters"] = {"rope_theta": theta, "mrope_section": sections}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": getattr(config, "intermediate_size", 4 * width),
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", heads),
        "head_dim": width // heads,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "max_position_embeddings": positions,
        "rope_theta": theta,
        "vocab_size": adapter.vocab,
        "target_model_type": adapter.model.config.model_type,
        "target_hidden_size": width,
        "target_num_layers": adapter.num_layers,
        **images,
    }


class Unrolled:
    """Key-value cache of the training passes, which concatenates their keys and values."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Appends a pass and returns the keys and values ``(B, heads, L, D)`` of all passes."""
        if layer in self.held:
            before = self.held[layer]
            keys, values = torch.cat([before[0], keys], 2), torch.cat([before[1], values], 2)
        self.held[layer] = keys, values
        return keys, values


def unrolled(drafter: FeatureDrafter, rows: Rows, passes: int) -> list[Tensor]:
    """Runs several passes of a drafter as it drafts; returns the states ``(B, L, H)`` of each.

    Position t of pass k (from 0) simulates the k-th drafting step from position t: its input is the
    output of pass k - 1 at t and the embedding of the token k positions further ahead. It attends
    to positions up to t of the first pass (the committed tokens) and to position t of the later
    passes (the tokens drafted so far).
    """
    length = rows.embeds.shape[1]
    device = rows.embeds.device
    past = Unrolled()
    dtype = rows.embeds.dtype
    low = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=device)
    itself = torch.eye(length, dtype=torch.bool, device=device)
    seen = torch.ones_like(itself).tril()[None]
    if rows.kept is not None:
        seen = seen & rows.kept[:, None]
    mask = torch.where(seen | itself, 0.0, low)[:, None]
    alone = torch.where(itself, 0.0, low).expand(len(mask), 1, -1, -1)
    result = []
    for _ in range(passes):
        states = drafter(rows, mask, past)
        result.append(states)
        rows = replace(
            rows,
            embeds=F.pad(rows.embeds[:, 1:], (0, 0, 0, 1)),
            features=states,
            positions=torch.cat([rows.positions[..., 1:], rows.positions[..., -1:] + 1], -1),
            images=None,
            carried=_moved(rows.carried),
        )
        mask = torch.cat([mask, alone], -1)
    return result


def _moved(carried: Tensor | None) -> Tensor | None:
    """Shifts states to the left by one position and repeats the last one."""
    if carried is None or carried.shape[1] == 1:
        return carried
    return torch.cat([carried[:, 1:], carried[:, -1:]], 1)


def targets_of(batch: Batch, logits: Tensor, index: int) -> Targets:
    """Returns the labels of pass ``index``: at t, the target's state and logits at t + 1 + index.

    Position t counts in the loss if the tokens t + 1 and t + 2 + index belong to an answer.
    """
    length = batch.ids.shape[1] - 1
    return Targets(
        features=ahead(batch.last, 1 + index, length).float(),
        logits=ahead(logits, 1 + index, length),
        asked=ahead(batch.asked, 1, length) & ahead(batch.asked, 2 + index, length),
    )


def ahead(values: Tensor, offset: int, length: int) -> Tensor:
    """Shifts values to the left and pads them with zeros, ``(B, length, ...)``.

    Args:
        values: Values ``(B, S, ...)``.
        offset: Number of positions to shift by.
        length: Length of the result, at most S.
    """
    moved = values[:, offset : offset + length]
    return F.pad(moved, (*[0] * (2 * (values.ndim - 2)), 0, length - moved.shape[1]))


def eagle_losses(states: Tensor, logits: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """Computes EAGLE's losses: mean smooth L1 of states, mean cross-entropy of distributions."""
    asked = targets.asked.float()
    count = asked.sum() + 1e-5
    distance = F.smooth_l1_loss(states, targets.features, reduction="none").mean(-1)
    distribution = targets.logits.softmax(-1)
    surprise = -(distribution * logits.log_softmax(-1)).sum(-1)
    return (distance * asked).sum() / count, (surprise * asked).sum() / count


def law_weight(module: FeatureDrafter, options: Options) -> float:
    """Returns the weight of the distribution loss: ``options.law_weight`` or its default."""
    usual = 1.0 if module.config.get("draws_images") else 0.1
    return usual if options.law_weight is None else options.law_weight


def distribution_losses(
    logits: Tensor, targets: Targets, own: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes the cross-entropy at each position, and whether it counts; both ``(B, L)``.

    Args:
        logits: Logits of the drafter, ``(B, L, D)``.
        targets: Labels of the pass, renormalised over the drafter's vocabulary. Positions whose
            most likely token is outside of this vocabulary do not count and have loss 0.
        own: Token id of each of the drafter's ids, ``(D,)``; ``None``: the ids are the same.
    """
    wanted, asked = targets.logits, targets.asked
    if own is not None:
        known = torch.zeros(wanted.shape[-1], dtype=torch.bool, device=own.device)
        known[own] = True
        asked = asked & known[wanted.argmax(-1)]
        wanted = wanted[..., own]
    losses = -(wanted.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return losses * asked, asked
