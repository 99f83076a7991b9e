"""Next-scale models: one model (VAR) or two (CoDe) generate images scale by scale.

START HERE: `NextScale.generate`. At each scale the model reads the image so far and returns the
distributions of all codes of the scale at once; the codes are sampled and added to the image. A
stage is a sequence of scales that one model generates. VAR has one stage. CoDe has two: a large
drafter generates the first N scales, which have few codes but decide most of the image; then its
cache is freed, and a smaller refiner reads these scales in one pass and generates the others.

The request and the code's index over all scales seed the sampling noise of a code, so that an image
does not depend on its batch. Drafters and acceptance rules are not used.

Source: VAR, Tian et al. 2024, arXiv:2404.02905; CoDe, Chen et al. 2024, arXiv:2411.17787. CoDe
samples the first scales from the drafter's distribution and the others from the refiner's; it is
exactly VAR if drafter and refiner are the same model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from mmdecode.engine.noise import Noise, Role, request_key
from mmdecode.errors import IncompatibleError, OptionError, ShapeError
from mmdecode.image_ar.loading import load_scales
from mmdecode.image_ar.sampling import Sampling, Warper, guided
from mmdecode.models.multiscale_vq import MultiScaleVQ, resized
from mmdecode.models.var import ScaleCache, VarForImageGeneration


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Guidance and sampling of the codes.

    Attributes:
        guidance: The published strength t: the guidance scale at scale k of K is
            ``1 + t k / (K - 1)`` and grows from 1 (off) at the first scale; ``0`` is neutral and
            runs no unconditional rows.
        sampling: Sampling settings of all scales, or a tuple with the settings of each scale.
        greedy: Whether to take the most likely code by guided logits instead of sampling.

    Raises:
        OptionError: ``guidance`` is negative or not finite.
    """

    guidance: float = 0.0
    sampling: Sampling | tuple[Sampling, ...] = field(default_factory=Sampling)
    greedy: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.guidance < float("inf"):
            raise OptionError(f"guidance must be 0 (off) or more, got {self.guidance}")

    def strength(self, scale: int, scales: int) -> float:
        """Returns the guidance scale s of ``u + s (c - u)`` at an image scale; 1 is neutral."""
        return 1 + self.guidance * scale / max(scales - 1, 1)

    def sampling_of(self, scale: int) -> Sampling:
        """Returns the sampling settings of a scale."""
        return self.sampling if isinstance(self.sampling, Sampling) else self.sampling[scale]


_LAST: tuple[Warper, ...] = ("top_k", "top_p", "temperature")
VAR = Drawing(guidance=1.5, sampling=Sampling(top_k=900, top_p=0.96))
"""Sampling of VAR's published evaluation."""
CODE = Drawing(
    guidance=1.5,
    sampling=(Sampling(temperature=1.1, top_k=600, top_p=0.95, order=_LAST),) * 7
    + (Sampling(top_k=600, top_p=0.95, order=_LAST),) * 3,
)
"""Guidance and sampling of the published CoDe, for ten scales."""


@dataclass(frozen=True)
class Stage:
    """Consecutive scales that one model generates.

    Attributes:
        model: Model of the stage.
        first, end: The scales that it generates, ``end`` excluded.
    """

    model: VarForImageGeneration
    first: int
    end: int


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """Forward passes and memory of a stage.

    Attributes:
        first, end: Scales of the stage, ``end`` excluded.
        fed: Tokens per row that the model read in each pass.
        cache_bytes: Size of the keys and values of all rows at the end of the stage.
        device_bytes: Maximum CUDA memory allocated after any pass, minus that at the start of the
            call; ``None`` on other devices.
    """

    first: int
    end: int
    fed: tuple[int, ...]
    cache_bytes: int
    device_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class NextScaleOutput:
    """Result of `NextScale.generate`.

    Attributes:
        codes: Codes that were sampled at all scales, small scales first, ``(B, L)``.
        f_hat: Sum of the scales' latents, ``(B, D, side, side)``; in the kept part of an image, the
            latents of the given image.
        stages: Passes and memory of each stage.
        tokenizer: Tokenizer of the model.
    """

    codes: Tensor
    f_hat: Tensor
    stages: tuple[StageReport, ...]
    tokenizer: MultiScaleVQ = field(repr=False)

    @cached_property
    def images(self) -> Tensor:
        """Pixels from 0 to 1, ``(B, 3, H, W)`` float32."""
        with torch.no_grad():
            return self.tokenizer.image(self.f_hat)

    @property
    def passes(self) -> int:
        """Forward passes of all models; conditional and unconditional rows share a pass."""
        return sum(len(stage.fed) for stage in self.stages)


@dataclass(frozen=True, kw_only=True)
class Known:
    """The part of an image to keep, for inpainting.

    Attributes:
        running: ``f_hat`` of the given image after each scale, ``(B or 1, K, D, side, side)``.
        keep: Mask of the latents to keep, bool ``(B or 1, 1, side, side)``.
    """

    running: Tensor
    keep: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, tokenizer: MultiScaleVQ, images: Tensor, keep: Tensor) -> Known:
        """Encodes the images and reduces the mask to latents.

        Args:
            tokenizer: Tokenizer of the model.
            images: Pixels from 0 to 1, ``(B or 1, 3, H, W)``.
            keep: True where the image is kept, ``(B or 1, rows, columns)`` in pixels or in latents;
                a latent is kept if all its pixels are.

        Raises:
            ShapeError: Images or masks have the wrong shape, or their numbers differ.
        """
        grid, pixels = tokenizer.config.patch_nums[-1], tokenizer.config.side
        if keep.ndim != 3 or tuple(keep.shape[1:]) not in ((grid, grid), (pixels, pixels)):
            raise ShapeError(
                f"the mask to keep has shape {tuple(keep.shape)}; expected (batch, {pixels}, "
                f"{pixels}) in pixels or (batch, {grid}, {grid}) in latents"
            )
        if 1 not in (len(keep), len(images)) and len(keep) != len(images):
            raise ShapeError(
                f"{len(images)} images and {len(keep)} masks; give one mask per image, or one mask"
            )
        share = resized(keep[:, None].float().to(tokenizer.device), grid)
        latents = tokenizer.encode(images.to(tokenizer.device, tokenizer.dtype) * 2 - 1)
        return cls(running=tokenizer.quantize(latents).running, keep=share == 1)

    def over(self, f_hat: Tensor, scale: int) -> Tensor:
        """Returns ``f_hat`` after a scale, with the given image's latents in the kept part."""
        return torch.where(self.keep, self.running[:, scale], f_hat)


def class_requests(classes: Sequence[int]) -> list[int]:
    """Returns keys that seed the rows' noise by default: class and ordinal among equal classes."""
    seen: Counter[int] = Counter()
    keys = []
    for label in classes:
        keys.append(request_key("class", label, seen[label]))
        seen[label] += 1
    return keys


class NextScale:
    """A next-scale model with its tokenizer.

    Args:
        model: The transformer.
        tokenizer: Tokenizer that the transformer was trained on.

    Raises:
        IncompatibleError: Transformer and tokenizer differ in codes or scales.
    """

    def __init__(self, model: VarForImageGeneration, tokenizer: MultiScaleVQ) -> None:
        self.tokenizer = tokenizer
        self.scales = len(tokenizer.config.patch_nums)
        _check_pair("the model", model, tokenizer)
        self.stages: tuple[Stage, ...] = (Stage(model, 0, self.scales),)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        quantize: str | None = None,
    ) -> NextScale:
        """Loads a model and its tokenizer; see `mmdecode.image_ar.loading.load_scales`."""
        return cls(*load_scales(name, device, dtype, quantize))

    @torch.no_grad()
    def generate(
        self,
        classes: Sequence[int] | Tensor,
        *,
        drawing: Drawing = VAR,
        seed: int = 0,
        requests: Sequence[int] | None = None,
        known: Known | None = None,
        on_scale: Callable[[int, Tensor], None] | None = None,
    ) -> NextScaleOutput:
        """Generates images of classes, one row each.

        Args:
            classes: Class numbers from 0, ``(B,)``.
            drawing: Guidance and sampling.
            seed: Seed of the sampling noise.
            requests: One key per row, which seeds its noise; ``None``: `class_requests`.
            known: Part of the images to keep.
            on_scale: Called after each scale with its index and ``f_hat``; for progress bars and
                previews.

        Raises:
            OptionError: A class is out of range, guidance is used with a model that has no
                unconditional input, or the sampling settings are not one per scale.
            ShapeError: ``known`` or ``requests`` has another number of rows than ``classes``.
        """
        labels = self._checked(classes, drawing)
        if requests is None:
            requests = class_requests(labels.tolist())
        _check_rows(len(labels), requests, known)
        config, tokenizer, device = self.tokenizer.config, self.tokenizer, self.tokenizer.device
        starts, side = tokenizer.starts, config.patch_nums[-1]
        noise = Noise.of(seed, requests, device)
        before = _allocated(device)

        f_hat = torch.zeros(len(labels), config.codebook_dim, side, side, device=device)
        f_hat = f_hat.to(tokenizer.dtype)
        codes: list[Tensor] = []
        inputs: list[Tensor] = []  # what the scales after the first read
        reports = []
        for stage in self.stages:
            rows = _with_null_class(stage.model, labels, drawing)
            cache = ScaleCache(
                stage.model.config, len(rows), starts[stage.end], device, stage.model.dtype
            )
            fed, held = [], 0
            for scale in range(stage.first, stage.end):
                # the first pass of a stage reads all earlier scales, the others one scale each
                unread = inputs if scale == stage.first else inputs[-1:]
                logits = stage.model(rows, _for_rows(unread, len(rows)), cache)
                fed.append(logits.shape[1])
                logits = logits[:, starts[scale] - starts[scale + 1] :]  # (R, n_k, V)
                logits = _guided(logits, len(labels), drawing.strength(scale, self.scales))
                if drawing.greedy:
                    tokens = logits.argmax(-1)
                else:
                    positions = torch.arange(starts[scale], starts[scale + 1], device=device)
                    positions = positions.expand(len(labels), -1)
                    warped = drawing.sampling_of(scale).warp(logits)
                    tokens = noise.sample(warped, positions, Role.TARGET)
                codes.append(tokens)
                f_hat = tokenizer.add_scale(f_hat, tokens, scale)
                if known is not None:
                    f_hat = known.over(f_hat, scale)
                if scale + 1 < self.scales:
                    inputs.append(tokenizer.scale_input(f_hat, scale + 1))
                held = max(held, _allocated(device) - before)
                if on_scale is not None:
                    on_scale(scale, f_hat)
            reports.append(
                StageReport(
                    first=stage.first,
                    end=stage.end,
                    fed=tuple(fed),
                    cache_bytes=cache.num_bytes,
                    device_bytes=held if device.type == "cuda" else None,
                )
            )
            del cache, logits  # freed before the next stage allocates its own
        return NextScaleOutput(
            codes=torch.cat(codes, 1),
            f_hat=f_hat,
            stages=tuple(reports),
            tokenizer=tokenizer,
        )

    @torch.no_grad()
    def score(
        self, classes: Sequence[int] | Tensor, codes: Tensor, *, drawing: Drawing = VAR
    ) -> Tensor:
        """Returns the guided logits ``(B, L, V)`` of given codes ``(B, L)``, in one pass per stage.

        Each code's logits depend on the codes of earlier scales. Up to rounding, they are the
        logits that `generate` samples from.
        """
        labels = self._checked(classes, drawing)
        starts = self.tokenizer.starts
        inputs = self.tokenizer.inputs_of(codes)
        found = []
        for stage in self.stages:
            rows = _with_null_class(stage.model, labels, drawing)
            read = inputs[:, : starts[stage.end] - starts[1]]
            logits = stage.model(rows, _for_rows([read], len(rows)))
            for scale in range(stage.first, stage.end):
                of_scale = logits[:, starts[scale] : starts[scale + 1]]
                strength = drawing.strength(scale, self.scales)
                found.append(_guided(of_scale, len(labels), strength))
        return torch.cat(found, 1)

    def _checked(self, classes: Sequence[int] | Tensor, drawing: Drawing) -> Tensor:
        labels = torch.as_tensor(classes, dtype=torch.long, device=self.tokenizer.device)
        if labels.ndim != 1 or not len(labels):
            raise ShapeError(f"classes have shape {tuple(labels.shape)}; expected a list of them")
        known = min(stage.model.config.num_classes for stage in self.stages)
        for label in labels.tolist():
            if not 0 <= label < known:
                raise OptionError(f"class {label} does not exist; expected 0 to {known - 1}")
        if not isinstance(drawing.sampling, Sampling) and len(drawing.sampling) != self.scales:
            raise OptionError(
                f"{len(drawing.sampling)} sampling settings for {self.scales} scales; give one for "
                "each scale, or a single one for all"
            )
        return labels


class Collaborative(NextScale):
    """CoDe: a large model generates the first scales, a small one the others.

    Args:
        drafter: The large model.
        refiner: The small model.
        tokenizer: Tokenizer of both.
        drafted: Number N of scales that the drafter generates. With 0 the drafter is not run, with
            all scales the refiner is not run.

    Raises:
        IncompatibleError: A model and the tokenizer differ in codes or scales, or the two models
            differ in their number of classes.
        OptionError: ``drafted`` is negative or above the number of scales.
    """

    def __init__(
        self,
        drafter: VarForImageGeneration,
        refiner: VarForImageGeneration,
        tokenizer: MultiScaleVQ,
        drafted: int,
    ) -> None:
        super().__init__(drafter, tokenizer)
        _check_pair("the refiner", refiner, tokenizer)
        classes = [model.config.num_classes for model in (drafter, refiner)]
        if classes[0] != classes[1]:
            raise IncompatibleError.between(
                "the drafter",
                "the refiner",
                f"they have {classes[0]} and {classes[1]} classes",
                "give models that were trained on the same classes",
            )
        if not 0 <= drafted <= self.scales:
            raise OptionError(
                f"drafted={drafted}; expected 0 (refiner alone) to {self.scales} (drafter alone)"
            )
        stages = (Stage(drafter, 0, drafted), Stage(refiner, drafted, self.scales))
        self.stages = tuple(stage for stage in stages if stage.first < stage.end)

    @classmethod
    def from_names(
        cls,
        drafter: str | Path,
        refiner: str | Path,
        drafted: int,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        quantize: str | None = None,
    ) -> Collaborative:
        """Loads both models and their tokenizer; see `load_scales`.

        Raises:
            IncompatibleError: The models differ in codes, scales or classes, or have different
                tokenizers.
        """
        large, tokenizer = load_scales(drafter, device, dtype, quantize)
        small, other = load_scales(refiner, device, dtype, quantize)
        mine, theirs = tokenizer.state_dict(), other.state_dict()
        if mine.keys() != theirs.keys() or not all(mine[n].equal(theirs[n]) for n in mine):
            raise IncompatibleError.between(
                f"drafter {str(drafter)!r}",
                f"refiner {str(refiner)!r}",
                "their tokenizers differ, so neither model can read the other's codes",
                "give models that were trained with the same tokenizer",
            )
        return cls(large, small, tokenizer, drafted)


def _check_pair(role: str, model: VarForImageGeneration, tokenizer: MultiScaleVQ) -> None:
    mine, theirs = model.config, tokenizer.config
    for what, left, right in (
        ("codes", mine.vocab_size, theirs.codebook_size),
        ("numbers in a code", mine.codebook_dim, theirs.codebook_dim),
        ("sides of the scales", tuple(mine.patch_nums), tuple(theirs.patch_nums)),
    ):
        if left != right:
            raise IncompatibleError.between(
                role,
                "the tokenizer",
                f"{what}: {left} and {right}",
                "give the tokenizer that it was trained with",
            )


def _check_rows(rows: int, requests: Sequence[int], known: Known | None) -> None:
    if len(requests) != rows:
        raise ShapeError(f"{len(requests)} requests for {rows} classes; give one for each")
    for part in () if known is None else (known.running, known.keep):
        if len(part) not in (1, rows):
            raise ShapeError(
                f"known has {len(part)} images for {rows} classes; give one per class, or only one"
            )


def _with_null_class(model: VarForImageGeneration, labels: Tensor, drawing: Drawing) -> Tensor:
    """Returns the classes of the conditional rows and, with guidance, of the unconditional rows."""
    if drawing.guidance == 0:
        return labels
    return torch.cat([labels, torch.full_like(labels, model.null_class)])


def _for_rows(inputs: Sequence[Tensor], rows: int) -> Tensor | None:
    """Concatenates inputs along the sequence and repeats them for any unconditional rows."""
    if not inputs:
        return None
    joined = torch.cat(list(inputs), 1)
    return joined.repeat(rows // len(joined), 1, 1)


def _guided(logits: Tensor, rows: int, strength: float) -> Tensor:
    """Returns guided logits ``(B, n, V)`` from conditional rows, followed by unconditional rows."""
    if len(logits) == rows:
        return logits
    return guided(logits[:rows], logits[rows:], strength)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
