"""Adapter of LlamaGen, which generates image tokens for a class or for features of a caption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmdecode.adapters.images.base import ImageAdapter, Preset, to_unit
from mmdecode.engine.adapter import Mask, Prompt
from mmdecode.errors import IncompatibleError, OptionError, ShapeError
from mmdecode.models.image_layout import Layout
from mmdecode.models.llamagen import left_padded

if TYPE_CHECKING:
    from mmdecode.engine.cache import RaggedCache
    from mmdecode.models.llamagen import LlamaGenForImageGeneration
    from mmdecode.models.vq import VQModel

CLASSES = Preset(guidance=4.0, sampling={"top_k": 2000})
CAPTIONS = Preset(guidance=7.5, sampling={"top_k": 1000})


class LlamaGenAdapter(ImageAdapter):
    """LlamaGen: positions count the slots of the condition, padding included, and then the grid.

    For captions, the unconditional prompt has padding at the same slots as the conditional one, as
    in the published sampling code.

    Args:
        model: The transformer.
        vq: Its image tokenizer, which is needed for pixels and for the codebook.

    Raises:
        IncompatibleError: Tokenizer and model have different numbers of codes.
    """

    summary = "LlamaGen, generating image tokens of a class or a caption"
    source = "Sun et al. 2024"
    image_types = ("llamagen",)

    def __init__(self, model: LlamaGenForImageGeneration, vq: VQModel | None = None) -> None:
        super().__init__(model)
        self.config = model.config
        self.preset = CAPTIONS if self.config.caption_slots else CLASSES
        side = self.config.grid_size
        self.layout = Layout(side, side, torch.arange(self.vocab, device=model.device))
        self.max_positions = self.config.slots + self.layout.length
        if vq is not None and vq.config.codebook_size != self.vocab:
            raise IncompatibleError.between(
                "the tokenizer",
                self.name,
                f"it has {vq.config.codebook_size} codes, the model {self.vocab}",
                "give the tokenizer that the model was trained on",
            )
        self.vq = vq
        self._codes = None if vq is None else vq.codes.detach()

    def condition(  # type: ignore[override]
        self,
        *,
        classes: Sequence[int] | Tensor | None = None,
        features: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> dict[str, Any]:
        """Returns model inputs for class ids, or for caption features.

        Args:
            classes: Class ids, counted from 0, one per image.
            features: Hidden states of a text encoder, padded on the right, ``(B, n,
                caption_size)``.
            mask: True where features are not padding, ``(B, n)``; ``None``: no padding.

        Raises:
            OptionError: The model has the other kind of condition; a class does not exist; or a
                caption is too long.
            ShapeError: Features or mask have the wrong shape.
        """
        captioned = bool(self.config.caption_slots)
        kind = "captions" if captioned else "classes"
        if (features is None) == captioned or (classes is None) != captioned:
            raise OptionError(
                f"this {self.name} is conditioned on {kind}; give "
                f"{'features=..., from its text encoder' if captioned else 'classes=[...]'}, and "
                "nothing else"
            )
        device = self.model.device
        if features is None:
            found = torch.as_tensor(classes, dtype=torch.long)
            if found.ndim != 1 or not len(found):
                raise ShapeError(f"classes have shape {tuple(found.shape)}; give a list of them")
            for label in found.tolist():
                if not 0 <= label < self.config.num_classes:
                    raise OptionError(
                        f"class {label} does not exist; expected 0 to {self.config.num_classes - 1}"
                    )
            return {"classes": found.to(device)}
        slots, size = self.config.caption_slots, self.config.caption_size
        if features.ndim != 3 or features.shape[2] != size:
            raise ShapeError(
                f"features have shape {tuple(features.shape)}; expected (batch, n, {size}), the "
                "states of the text encoder that the model was trained with"
            )
        mask = torch.ones(features.shape[:2]) if mask is None else mask
        if mask.shape != features.shape[:2]:
            raise ShapeError(
                f"the mask has shape {tuple(mask.shape)}; expected {tuple(features.shape[:2])}, "
                "as the features"
            )
        longest = int(mask.sum(1).max())
        if longest > slots:
            raise OptionError(
                f"a caption has {longest} tokens, the model reads {slots}: shorten it"
            )
        features, mask = left_padded(features, mask.to(features.device))
        room = slots - features.shape[1]  # if negative, columns of padding are cut
        features, mask = pad(features, (0, 0, room, 0)), pad(mask, (room, 0))
        return {"features": features.to(device, self.model.dtype), "slot_mask": mask.to(device)}

    def row_names(self, inputs: Mapping[str, Any]) -> list[bytes]:
        """Returns the class or the features' bytes as the name of each row."""
        if "classes" in inputs:
            return [b"class %d" % label for label in inputs["classes"].tolist()]
        rows = zip(inputs["features"].float().cpu(), inputs["slot_mask"].cpu(), strict=True)
        return [features[mask].numpy().tobytes() for features, mask in rows]

    def condition_prompt(self, inputs: Mapping[str, Any], unconditional: bool) -> Prompt:
        """Returns the condition's prompt, or that of the null class or null caption."""
        condition = inputs["classes"] if "classes" in inputs else inputs["features"]
        if unconditional:
            condition = self.model.unconditional(condition)
        embeds = self.model.embed_condition(condition)
        ids = torch.zeros(embeds.shape[:2], dtype=torch.long, device=embeds.device)
        mask = inputs.get("slot_mask")
        mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        return Prompt(ids=ids, mask=mask, inputs={"inputs_embeds": embeds})

    @property
    def on_grid(self) -> bool:
        """Whether `grid_positions` is available: for classes, whose prompts have no padding."""
        return not self.config.caption_slots

    def grid_positions(self, positions: Tensor) -> Tensor:
        """Returns time, row and column of positions, ``(B, 3, Q)``; all 0 before the image."""
        index = (positions - self.config.slots).clamp_min(0)
        side = self.config.grid_size
        return torch.stack([torch.zeros_like(index), index // side, index % side], 1)

    def open(self, cache: RaggedCache, prompt: Prompt) -> Any:
        """Returns the cache along with the number of padded slots of each row."""
        return LlamaGenPast(cache, (~prompt.mask).sum(1, keepdim=True))

    def join(self, pasts: Sequence[Any], cache: RaggedCache) -> Any:
        """Returns the joined cache along with the numbers of padded slots of all rows."""
        return LlamaGenPast(cache, torch.cat([past.padded for past in pasts]))

    def _run(self, mask: Mask, positions: Tensor, past: Any, **tokens: Tensor) -> Tensor:
        last = self.config.slots + self.layout.length - 1
        positions = (positions + past.padded).clamp(max=last)
        return super()._run(mask, positions, past.cache, **tokens)

    def codebook(self) -> Tensor | None:
        """Returns the normalised embeddings of the codes; for grey levels, the levels in 0..1."""
        if self.config.grey:
            return torch.linspace(0, 1, self.vocab, device=self.model.device)[:, None]
        if self._codes is not None:
            # moved once: the tokenizer may be elsewhere, and a captured round cannot copy
            self._codes = self._codes.to(self.model.device)
        return self._codes

    def pixels(self, codes: Tensor) -> Tensor:
        """Decodes codes with the image tokenizer; grey levels are used as pixels."""
        if self.config.grey:
            return (codes / (self.vocab - 1))[:, None].expand(-1, 3, -1, -1)
        if self.vq is None:
            raise IncompatibleError.between(
                self.name,
                "pixels",
                "its image tokenizer is a separate model, which was not given",
                "pass vq=..., a mmdecode.models.vq.VQModel",
            )
        return to_unit(self.vq.decode_codes(codes.to(self.vq.device)))


class LlamaGenPast:
    """A key-value cache, and the number of padding tokens in each row's condition, ``(R, 1)``."""

    def __init__(self, cache: RaggedCache, padded: Tensor) -> None:
        self.cache, self.padded = cache, padded

    def reorder_cache(self, rows: Tensor) -> None:
        """Keeps the rows ``rows``, in that order."""
        self.cache.reorder_cache(rows)
        self.padded = self.padded[rows]
