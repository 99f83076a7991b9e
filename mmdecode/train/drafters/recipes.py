"""Kinds of drafters: the model of each, its loss and what drafts with it.

A kind is a `Recipe`. Recipes of a `FeatureDrafter` differ in the model they build and in the loss
of one pass: the passes after the first feed the drafter its own states, each seeing the states of
the prompt as in the first pass and its own chain alone, which is what drafting does.

Sources: Li et al. 2024, arXiv:2401.15077, section 3.2 (EAGLE); Zhang et al. 2024, arXiv:2408.15766
(HASS, several passes); Li et al. 2025, arXiv:2503.01840, section 3 (EAGLE-3, training-time test);
Cai et al. 2024, arXiv:2401.10774 (Medusa); Kang et al. 2025, arXiv:2509.15235 (ViSpec); Hu et al.
2025, arXiv:2505.19201 (DREAM); Wang et al. 2025, arXiv:2505.12728 (FLASH); Ankner et al. 2024,
arXiv:2402.05109 (Hydra); Liu et al. 2024, arXiv:2404.18911 (Kangaroo); Gui et al. 2024,
arXiv:2408.15562 (FSPAD). Differs from EAGLE-3's trainer: losses are means over the positions that
are asked, whatever the padding.
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
from mmdecode.draft.medusa import Medusa, MedusaHeads
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
"""Kinds that have an option."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of a training.

    Attributes:
        kind: One of `RECIPES`.
        passes: Passes over a batch, each but the first over the drafter's own states; ``None``: as
            the kind does.
        decay: Weight of each pass over that of the one before.
        feature_weight, law_weight: Weights of smooth L1 between states and of cross-entropy between
        distributions,
            for eagle and flash; the published ones. For distributions ``None`` is the published
            0.1, and 1 for a target that draws images: what is flat is foreseen by its distribution,
            not by a state.
        noise: Width of uniform noise on the target's states in the first pass, times 512 over the
            length; published 0.2.
        draft_vocabulary: Tokens of the head of a kind that has its own, the most frequent in the
            answers; ``None``: all.
        heads: Heads of Medusa and Hydra.
        feature_sampling: Whether an eagle or vispec samples features by embeddings and keeps what
            it hands on apart from what it says (FSPAD; see `mmdecode.models.eagle`).
        exit_layer: Number of the target's first layers that draft in kangaroo; published 2.
        layers: Layers of a drafter that reads words alone.
        queries: Queries per image: vispec's, the global vector counted, published 2; flash's
            latents, published 64. ``None``: as published.
        tokens: A pass of flash; published 5.
        length: Length of the chain by which training is judged.
        max_new_tokens: Longest answer in words.
        temperature: At which answers in words are drawn; 0: greedy. Images are drawn as their
            model's checkpoint says.
        held_out: Requests that are not learned, which choose what is kept.
        tested: Further requests that are not learned, of which the card tells; 0: it tells of those
            held out.
        memory: Megabytes of states that may be kept, so that they are computed once; 0: none.
        fit: How long and how fast.
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
            raise OptionError(f"{shown}; expected at least 1 of each")
        usual = {one.name: one.default for one in fields(self)}
        for name, kinds in OWN.items():
            given = getattr(self, name)
            if given != usual[name] and self.kind not in kinds:
                raise OptionError(
                    f"{name}={given} with kind={self.kind!r}; only {' and '.join(kinds)} have it: "
                    "leave it out"
                )
        if self.tested < 0:
            raise OptionError(f"tested={self.tested}; expected at least 0")


@dataclass(frozen=True)
class Sample:
    """A request and the target's own answer, as ids with the one that ends it."""

    request: Any
    answer: list[int]


def unguided(logits: Tensor) -> Tensor:
    """The logits of one branch, which decide alone."""
    return logits


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences of prompt and answer as a drafter sees them.

    Attributes:
        rows: All tokens but the last; features are not fused yet. ``None``: nobody reads them.
        ids: ``(B, S)``.
        last: The target's states after its final norm, ``(B, S, H)``.
        words: Tokens that are no padding and no part of an image, ``(B, S)`` bool.
        asked: Tokens of answers, ``(B, S)`` bool.
        adapter: Adapter of the target.
        inner: States that an inner block is asked to make, ``(B, S, H)``; ``None``: none.
        guided: Applies guidance to the logits of all rows, ``(B, ..., V)``, where the rows of a
            sequence under several conditions stand branch by branch: each has the distribution of
            all.
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
        """Bytes of its states."""
        states = [self.last] + ([self.rows.embeds, self.rows.features] if self.rows else [])
        states += [] if self.inner is None else [self.inner]
        return sum(part.numel() * part.element_size() for part in states)

    def logits(self) -> Tensor:
        """The target's, ``(B, S, V)`` float32."""
        with torch.no_grad():
            return self.guided(self.adapter.head(self.last).float())


@dataclass(frozen=True, kw_only=True)
class Targets:
    """Targets of one pass: row t should make the state of a later token and its distribution.

    Attributes:
        features: ``(B, L, H)``.
        logits: ``(B, L, V)``.
        asked: ``(B, L)`` bool.
    """

    features: Tensor
    logits: Tensor
    asked: Tensor

    def mean(self, losses: Tensor) -> Tensor:
        """Mean of losses ``(B, L)`` over the rows that have a target."""
        return (losses * self.asked).sum() / self.asked.sum().clamp_min(1)


class Recipe:
    """How a kind of drafter is built and learns; a method overrides what differs."""

    def build(self, adapter: Any, samples: Sequence[Sample], options: Options) -> nn.Module:
        """The untrained model for a target."""
        raise NotImplementedError

    def loss(self, module: Any, batch: Batch, options: Options, dice: torch.Generator) -> Tensor:
        """Loss of a batch."""
        raise NotImplementedError

    def draft(self, module: Any, length: int) -> Drafter:
        """A draft of a chain with it."""
        raise NotImplementedError

    def reads(self, module: Any) -> FeatureDrafter | None:
        """Drafter whose rows a batch holds; ``None``: only the last states are read."""
        return None

    def save(self, module: Any, out: Path, adapter: Any) -> None:
        """Writes the checkpoint."""
        raise NotImplementedError


class FeatureRecipe(Recipe):
    """A `FeatureDrafter`: passes over its own states, each with the loss of the kind.

    Attributes:
        passes: Where the options do not say.
        drafts: Makes the drafter of decoding.
    """

    passes = 1
    drafts: type[FeatureDraft] = Eagle

    def pass_loss(
        self, module: Any, states: Tensor, logits: Tensor, targets: Targets, options: Options
    ) -> Tensor:
        """Loss of one pass, from its states ``(B, L, H)`` and their logits ``(B, L, D)``."""
        raise NotImplementedError

    def rows(self, module: Any, batch: Batch, options: Options, dice: torch.Generator) -> Rows:
        """Input of the first pass, with noise on the target's states."""
        rows = batch.rows
        assert rows is not None, "read by `collect`"
        if options.noise:
            noise = torch.rand(rows.features.shape, generator=dice) - 0.5
            scaled = noise.to(rows.features) * (options.noise * 512 / batch.ids.shape[1])
            rows = replace(rows, features=rows.features + scaled)
        return module.prepare(replace(rows, features=module.fuse(rows.features)))

    def loss(self, module: Any, batch: Batch, options: Options, dice: torch.Generator) -> Tensor:
        """The weighted mean of the losses of the passes."""
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
        """A chain of ``length`` tokens."""
        return self.drafts(module, depth=length, top_k=1, nodes=length)

    def reads(self, module: Any) -> FeatureDrafter | None:
        """Its own."""
        return module

    def save(self, module: Any, out: Path, adapter: Any) -> None:
        """In the published layout."""
        write_folder(out, module.save_pretrained)


class EagleRecipe(FeatureRecipe):
    """EAGLE: states by smooth L1, distributions by cross-entropy through the target's head."""

    def build(self, adapter: Any, samples: Sequence[Sample], options: Options) -> nn.Module:
        """One layer of the target's sizes."""
        return EagleModel({**sizes_of(adapter), "feature_sampling": options.feature_sampling})

    def pass_loss(
        self, module: Any, states: Tensor, logits: Tensor, targets: Targets, options: Options
    ) -> Tensor:
        """See `eagle_losses`; the states are those that the next rows have as features."""
        parts = eagle_losses(module.feature(states), logits, targets)
        return options.feature_weight * parts[0] + law_weight(module, options) * parts[1]


class Eagle3Recipe(FeatureRecipe):
    """EAGLE-3: distributions alone, over the drafter's own vocabulary, in several passes."""

    passes = 4

    def build(self, adapter: Any, samples: Sequence[Sample], options: Options) -> nn.Module:
        """One layer of the target's sizes, and the vocabulary of the answers."""
        size = options.draft_vocabulary or adapter.vocab
        if not 1 <= size <= adapter.vocab:
            raise OptionError(
                f"draft_vocabulary={size}; the target's has {adapter.vocab} tokens: give as many "
                "or fewer"
            )
        module = Eagle3Model({**sizes_of(adapter), "draft_vocab_size": size})
        if module.d2t is not None and module.t2d is not None:
            counts = Counter(token for sample in samples for token in sample.answer)
            # of equals, unseen ones among them, the lower id
            chosen = sorted(range(adapter.vocab), key=lambda token: (-counts[token], token))[:size]
            ids = torch.tensor(sorted(chosen))
            module.d2t.copy_(ids - torch.arange(size))
            module.t2d.copy_(torch.isin(torch.arange(adapter.vocab), ids))
        return module

    def pass_loss(
        self, module: Any, states: Tensor, logits: Tensor, targets: Targets, options: Options
    ) -> Tensor:
        """See `law_losses`."""
        losses, asked = distribution_losses(logits, targets, module.target_ids())
        return losses.sum() / asked.sum().clamp_min(1)


class ViSpecRecipe(FeatureRecipe):
    """ViSpec: distributions by L1 and by the order of the most likely tokens, in two passes.

    From scratch, where the reference begins with a drafter that was trained on text. Its second
    pass sees states of the second pass alone; here as drafting does.
    """

    passes = 2
    drafts = ViSpec

    def build(self, adapter: Any, samples: Sequence[Sample], options: Options) -> nn.Module:
        """One layer of the target's sizes, and queries."""
        own = {"num_queries": options.queries or 2, "feature_sampling": options.feature_sampling}
        return ViSpecModel({**sizes_of(adapter), **own})

    def pass_loss(
        self, module: Any, states: Tensor, logits: Tensor, targets: Targets, options: Options
    ) -> Tensor:
        """See `mmdecode.train.drafters.losses.vispec_loss`."""
        return targets.mean(vispec_loss(logits, targets.logits))


class DreamRecipe(FeatureRecipe):
    """DREAM: states, distributions, and after the crossing block the target's surest early states.

    The weights are the paper's, 0.2, 1 and 0.2; the first row is given zeros. A target with fewer
    than 8 layers has no early ones.
    """

    drafts = Dream

    def build(self, adapter: Any, samples: Sequence[Sample], options: Options) -> nn.Module:
        """Three blocks of the target's sizes."""
        return DreamModel({**sizes_of(adapter), "first_row": "zero"})

    def loss(self, module: Any, batch: Batch, options: Options, dice: torch.Generator) -> Tensor:
        """The weighted mean of the losses of the passes, and that of the crossing block."""
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
        """Without the row of the first token, whose state nothing is drafted from."""
        distance = smooth_distance(states[:, 1:], targets.features)
        surprise = divergence(logits[:, 1:], targets.logits)
        return 0.2 * targets.mean(distance) + targets.mean(surprise)


class FlashRecipe(FeatureRecipe):
    """FLASH: the losses of EAGLE for each of the states that one pass makes."""

    drafts = Flash

    def build(self, adapter: Any, samples: Sequence[Sample], options: Options) -> nn.Module:
        """One layer of attention of the target's sizes, and latents."""
        if (options.passes or 1) > 1:
            raise OptionError(
                f"passes={options.passes}; flash makes its {options.tokens} states in one pass: "
                "leave passes out"
            )
        own = {"k": options.tokens, "compress_len": options.queries or 64}
        return FlashModel({**sizes_of(adapter), **own})

    def loss(self, module: Any, batch: Batch, options: Options, dice: torch.Generator) -> Tensor:
        """The mean over the states of a row: state i is that of the token i + 1 places on."""
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
    """A small language model that reads the words alone, for the draft ``assistant``.

    Learns the target's distribution at each token of an answer, as Gagrani et al. 2024,
    arXiv:2404.08856, train theirs on text; here on the target's own answers.
    """

    def build(self, adapter: Any, samples: Sequence[Sample], options: Options) -> nn.Module:
        """A Llama of as many layers as the options say, half as wide as the target."""
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
        """Cross-entropy against the target's distribution; words close ranks as in drafting."""
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
        wanted = asked[:, 1:]  # the row before a token of an answer says its distribution
        return (losses * wanted).sum() / wanted.sum().clamp_min(1)

    def draft(self, module: Any, length: int) -> Drafter:
        """A chain that sees no image."""
        return Assistant(module, length, text_only=True)

    def save(self, module: Any, out: Path, adapter: Any) -> None:
        """Same as in transformers, in half precision."""
        save_half(module, out)


class MedusaRecipe(Recipe):
    """Medusa heads on the last state of any decoder-only model."""

    def build(self, adapter: Any, samples: Sequence[Sample], options: Options) -> nn.Module:
        """Heads that say at first what the model's own head says."""
        width = adapter.model.get_input_embeddings().embedding_dim
        return MedusaHeads(options.heads, 1, width)

    def loss(self, module: Any, batch: Batch, options: Options, dice: torch.Generator) -> Tensor:
        """Cross-entropy of each head, those of later tokens with less weight."""
        asked = batch.asked[:, 1:-1] & batch.asked[:, 2:]
        labels = batch.ids[:, 2:].masked_fill(~asked, -100)
        states = batch.last[:, :-2]
        logits = module.logits(states.flatten(0, 1), batch.adapter)
        losses = head_losses(logits.unflatten(1, states.shape[:2]), labels)
        weights = options.decay ** torch.arange(len(losses), device=losses.device)
        known = ~losses.isnan()
        if not known.any():  # no answer is long enough: nothing is learned from this batch
            return logits.sum() * 0
        return (losses[known] * weights[known]).sum() / weights[known].sum()

    def draft(self, module: Any, length: int) -> Drafter:
        """A chain of at most as many tokens as there are heads."""
        most = min(length, module.weight.shape[1])
        return Medusa(module, paths=[(0,) * count for count in range(1, most + 1)])

    def save(self, module: Any, out: Path, adapter: Any) -> None:
        """In our layout."""
        config = {"model_type": adapter.model.config.model_type}
        write_folder(out, lambda into: Medusa(module).save_pretrained(into, config))


class HydraRecipe(Recipe):
    """Hydra heads: they learn the target's distribution, as in Hydra++, not its token."""

    def build(self, adapter: Any, samples: Sequence[Sample], options: Options) -> nn.Module:
        """Heads that say at first what the model's own head says."""
        return HydraHeads({**sizes_of(adapter), "hydra_num_heads": options.heads})

    def loss(self, module: Any, batch: Batch, options: Options, dice: torch.Generator) -> Tensor:
        """Weighted mean of the heads' cross-entropies; head k at row t reads tokens t + 1 to t + k.

        A head is asked where the first of these, and the token it is to say, belong to an answer.
        """
        first = batch.ids.shape[1] - 1 - int(batch.asked.sum(1).max())
        batch = replace(
            batch,
            ids=batch.ids[:, max(first, 0) :],
            last=batch.last[:, max(first, 0) :],
            asked=batch.asked[:, max(first, 0) :],
        )
        logits = batch.logits()
        # what is no part of an answer is read by no head that is asked
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
        """A chain of at most as many tokens as there are heads."""
        return Hydra(module, depth=min(length, len(module)), top_k=1)

    def save(self, module: Any, out: Path, adapter: Any) -> None:
        """With the published keys."""
        write_folder(out, module.save_pretrained)


class KangarooRecipe(FeatureRecipe):
    """Kangaroo: learns the target's distribution from the state after its first layers."""

    def build(self, adapter: Any, samples: Sequence[Sample], options: Options) -> nn.Module:
        """An adapter of the target's sizes, which turns positions as the target does."""
        refuse_unsuited(adapter)
        if options.exit_layer >= adapter.num_layers:
            raise OptionError(
                f"exit_layer={options.exit_layer}; the target has {adapter.num_layers} layers: "
                "give fewer"
            )
        if (options.passes or 1) > 1:
            raise OptionError(
                f"passes={options.passes}; a kangaroo reads states of the target alone: leave "
                "passes out"
            )
        config = adapter.model.config.get_text_config(decoder=True)
        own = {"exit_layer": options.exit_layer}
        return KangarooModel({**sizes_of(adapter), **rope_of(config), **own})

    def loss(self, module: Any, batch: Batch, options: Options, dice: torch.Generator) -> Tensor:
        """Cross-entropy between the distributions after the same token."""
        assert batch.rows is not None, "read by `collect`"
        (states,) = unrolled(module, batch.rows, 1)
        drafted = batch.guided(module.logits(states, batch.adapter).float())
        losses, asked = distribution_losses(drafted, targets_of(batch, batch.logits(), -1))
        return losses.sum() / asked.sum().clamp_min(1)

    def draft(self, module: Any, length: int) -> Drafter:
        """A chain, however sure."""
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
    """Configuration of a drafter as wide as its target, as ``config.json`` holds it."""
    config = adapter.model.config.get_text_config(decoder=True)
    width, heads = config.hidden_size, config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))
    places = getattr(config, "max_position_embeddings", adapter.max_positions)
    images: dict[str, Any] = {}
    if adapter.layout is not None:
        images["draws_images"] = True
    if adapter.on_grid:
        # frequencies by turns of rows and of columns
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
        "max_position_embeddings": places,
        "rope_theta": theta,
        "vocab_size": adapter.vocab,
        "target_model_type": adapter.model.config.model_type,
        "target_hidden_size": width,
        "target_num_layers": adapter.num_layers,
        **images,
    }


class Unrolled:
    """The cache of a training: each pass sees what all passes before it wrote, side by side."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``(B, heads, L, D)`` of all passes."""
        if layer in self.held:
            before = self.held[layer]
            keys, values = torch.cat([before[0], keys], 2), torch.cat([before[1], values], 2)
        self.held[layer] = keys, values
        return keys, values


def unrolled(drafter: FeatureDrafter, rows: Rows, passes: int) -> list[Tensor]:
    """States ``(B, L, H)`` of each pass over prepared rows.

    Row t of pass k has what pass k - 1 made of row t as its feature, and the token k places on. It
    sees the first pass up to row t and, of the later ones, its own row alone: as the k-th token
    drafted after row t sees the committed rows and the drafted ones between.
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
    """Carried state of each row, one position on."""
    if carried is None or carried.shape[1] == 1:
        return carried
    return torch.cat([carried[:, 1:], carried[:, -1:]], 1)


def targets_of(batch: Batch, logits: Tensor, index: int) -> Targets:
    """Targets of pass ``index``: for row t, state and distribution after token t + 1 + index.

    Asked where token t + 1 and the one after the distribution belong to an answer.
    """
    length = batch.ids.shape[1] - 1
    return Targets(
        features=ahead(batch.last, 1 + index, length).float(),
        logits=ahead(logits, 1 + index, length),
        asked=ahead(batch.asked, 1, length) & ahead(batch.asked, 2 + index, length),
    )


def ahead(values: Tensor, places: int, length: int) -> Tensor:
    """Value some positions ahead of each row, ``(B, length, ...)``; 0 after the last.

    Args:
        values: ``(B, S, ...)``.
        places: From a row to what it gets.
        length: Rows, at most S.
    """
    moved = values[:, places : places + length]
    return F.pad(moved, (*[0] * (2 * (values.ndim - 2)), 0, length - moved.shape[1]))


def eagle_losses(states: Tensor, logits: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """EAGLE's losses: mean smooth L1 of states and mean cross-entropy of distributions."""
    asked = targets.asked.float()
    count = asked.sum() + 1e-5
    distance = F.smooth_l1_loss(states, targets.features, reduction="none").mean(-1)
    distribution = targets.logits.softmax(-1)
    surprise = -(distribution * logits.log_softmax(-1)).sum(-1)
    return (distance * asked).sum() / count, (surprise * asked).sum() / count


def law_weight(module: FeatureDrafter, options: Options) -> float:
    """Weight in the options, or the default for the drafter's target."""
    usual = 1.0 if module.config.get("draws_images") else 0.1
    return usual if options.law_weight is None else options.law_weight


def distribution_losses(
    logits: Tensor, targets: Targets, own: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cross-entropy at each row, 0 where nothing is asked, and where something is, ``(B, L)``.

    Args:
        logits: The drafter's, ``(B, L, D)``.
        targets: Targets of the pass. Their distribution is renormalised over the drafter's
            vocabulary, and nothing is asked where its most likely token is outside.
        own: The target's id of each of the drafter's, ``(D,)``; ``None``: the same.
    """
    wanted, asked = targets.logits, targets.asked
    if own is not None:
        known = torch.zeros(wanted.shape[-1], dtype=torch.bool, device=own.device)
        known[own] = True
        asked = asked & known[wanted.argmax(-1)]
        wanted = wanted[..., own]
    losses = -(wanted.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return losses * asked, asked
