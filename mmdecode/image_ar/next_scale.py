"""Next-scale models: a picture scale by scale, written by one model or by a large and a small one.

START HERE: `NextScale.generate`. A model reads the picture so far on a scale's grid and gives the
distribution of all its codes at once; they are drawn, added to the picture, and the next scale
reads that. One stage of a picture is a run of scales by one model: VAR has one stage. CoDe has two:
the drafter writes the first N scales, whose codes are few and decide most, then its cache is freed
and a smaller refiner reads them in one pass and writes the rest, where most of the tokens are.

Every draw has noise of its own, keyed by request and by the token's index in all scales laid one
after the other: a picture depends neither on its batch nor on which model of equal weights wrote
which scale. This is a loop of its own, no token tree: drafts and rules of the engine do not apply.

Source: VAR, Tian et al. 2024, arXiv:2404.02905; CoDe, Chen et al. 2024, arXiv:2411.17787. CoDe's
distribution is a hybrid: that of the drafter for the first scales, of the refiner for the others;
it is exactly VAR's where both are one model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from mmdecode.checkpoints import dtype_of, local_path, placed
from mmdecode.engine.noise import Noise, Role, request_key
from mmdecode.errors import IncompatibleError, InputError, OptionError, ShapeError
from mmdecode.image_ar.loading import whole
from mmdecode.image_ar.sampling import Sampling, Warper, guided
from mmdecode.models.multiscale_vq import MultiScaleVQ, resized
from mmdecode.models.var import ScaleCache, VarForImageGeneration


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How codes are drawn.

    Attributes:
        guidance: The published strength t: scale k of K is guided by ``1 + t k / (K - 1)``, so the
            first one is not and the last one most; ``0`` is neutral and reads no unconditional
            input.
        sampling: Sampling options of all scales, or one set for each.
        greedy: The most likely code of the guided logits everywhere.

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
        """Guidance scale ``s`` of ``u + s (c - u)`` at a scale; 1 is neutral."""
        return 1 + self.guidance * scale / max(scales - 1, 1)

    def sampling_of(self, scale: int) -> Sampling:
        """The sampling of a scale."""
        return self.sampling if isinstance(self.sampling, Sampling) else self.sampling[scale]


_LAST: tuple[Warper, ...] = ("top_k", "top_p", "temperature")
VAR = Drawing(guidance=1.5, sampling=Sampling(top_k=900, top_p=0.96))
"""Sampling of VAR's published evaluation."""
CODE = Drawing(
    guidance=1.5,
    sampling=(Sampling(temperature=1.1, top_k=600, top_p=0.95, order=_LAST),) * 7
    + (Sampling(top_k=600, top_p=0.95, order=_LAST),) * 3,
)
"""Stages of the published CoDe, for ten scales."""


@dataclass(frozen=True)
class Stage:
    """A run of scales by one model.

    Attributes:
        model: Model of the stage.
        first, end: The scales it writes, ``end`` not among them.
    """

    model: VarForImageGeneration
    first: int
    end: int


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """Cost of a stage.

    Attributes:
        first, end: Its scales.
        fed: Tokens per row that its model read in each pass.
        cache_bytes: Keys and values of all rows, from the stage's start to its end.
        device_bytes: The most that CUDA had allocated beyond what it had at the picture's start,
            asked after each pass; None elsewhere.
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
        codes: Codes of all scales, small ones first, ``(B, L)``. In a known region they are those
            the model would have written.
        f_hat: The latents they add up to, the known region in place, ``(B, D, side, side)``.
        stages: Cost of each model.
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
        """Forward passes of all models; a conditional row and its unconditional one are one."""
        return sum(len(stage.fed) for stage in self.stages)


@dataclass(frozen=True, kw_only=True)
class Known:
    """The part of a picture that is to stay, for in-painting.

    Attributes:
        running: f_hat of the given image after each scale, ``(B or 1, K, D, side, side)``.
        keep: Where it stays, bool ``(B or 1, 1, side, side)``.
    """

    running: Tensor
    keep: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, tokenizer: MultiScaleVQ, images: Tensor, keep: Tensor) -> Known:
        """From an image and a mask.

        Args:
            tokenizer: Tokenizer of the model.
            images: Pixels from 0 to 1, ``(B or 1, 3, H, W)``.
            keep: True where the image stays, ``(B or 1, rows, columns)`` in pixels or in latents; a
                latent stays if all its pixels do.

        Raises:
            ShapeError: Images or mask have another shape, or are of different numbers.
        """
        grid, pixels = tokenizer.config.patch_nums[-1], tokenizer.config.side
        if keep.ndim != 3 or tuple(keep.shape[1:]) not in ((grid, grid), (pixels, pixels)):
            raise ShapeError(
                f"the mask of what stays has shape {tuple(keep.shape)}; expected (batch, {pixels}, "
                f"{pixels}) in pixels or (batch, {grid}, {grid}) in latents"
            )
        if 1 not in (len(keep), len(images)) and len(keep) != len(images):
            raise ShapeError(
                f"{len(images)} images and {len(keep)} masks; give as many, or one for all"
            )
        share = resized(keep[:, None].float().to(tokenizer.device), grid)
        latents = tokenizer.encode(images.to(tokenizer.device, tokenizer.dtype) * 2 - 1)
        return cls(running=tokenizer.quantize(latents).running, keep=share == 1)

    def over(self, f_hat: Tensor, scale: int) -> Tensor:
        """``f_hat`` after a scale, with what stays put in."""
        return torch.where(self.keep, self.running[:, scale], f_hat)


def class_requests(classes: Sequence[int]) -> list[int]:
    """Keys of the noise: a class and its ordinal among equal ones."""
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
        tokenizer: Tokenizer it was trained on.

    Raises:
        IncompatibleError: The two have other codes or other scales.
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
    ) -> NextScale:
        """A model and its tokenizer from a folder, a Hub id or ``zoo:NAME``; see `load`."""
        return cls(*load(name, device, dtype))

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
        """Pictures of classes, one row each.

        Args:
            classes: From 0.
            drawing: How codes are drawn.
            seed: Seed of the noise.
            requests: Keys of the rows' noise; default: `class_requests`.
            known: Part of the pictures that stays as given.
            on_scale: Called after each scale with its index and the latents so far; for progress
                and previews.

        Raises:
            OptionError: A class out of range, guidance without an unconditional input, or not one
                sampling for each scale.
            ShapeError: ``known`` or ``requests`` are of another number of rows.
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
                # a stage's first pass reads all scales before it at once, its others one each
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
                    gumbel = noise.gumbel(positions, Role.TARGET, logits.shape[-1])
                    tokens = (drawing.sampling_of(scale).warp(logits) + gumbel).argmax(-1)
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
            del cache, logits  # before the next stage makes its own
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
        """Guided logits of given codes ``(B, L)``, each from the scales before it, ``(B, L, V)``.

        One pass for each stage; what `generate` draws from, up to the rounding of other shapes.
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
                f"{len(drawing.sampling)} samplings for {self.scales} scales; give one for each, "
                "or one for all"
            )
        return labels


class Collaborative(NextScale):
    """CoDe: a large model writes the first scales, a small one the others.

    Args:
        drafter: The large one.
        refiner: The small one.
        tokenizer: Tokenizer of both.
        drafted: N, scales that the drafter writes; all: the refiner is not run, 0: the drafter is
            not.

    Raises:
        IncompatibleError: The models have other codes or scales than the tokenizer, or other
            classes than one another.
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
                f"they know {classes[0]} and {classes[1]} classes",
                "give models of one training set",
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
    ) -> Collaborative:
        """Both models and their tokenizer; see `load`.

        Raises:
            IncompatibleError: Their tokenizers differ, too.
        """
        large, tokenizer = load(drafter, device, dtype)
        small, other = load(refiner, device, dtype)
        mine, theirs = tokenizer.state_dict(), other.state_dict()
        if mine.keys() != theirs.keys() or not all(mine[n].equal(theirs[n]) for n in mine):
            raise IncompatibleError.between(
                f"drafter {str(drafter)!r}",
                f"refiner {str(refiner)!r}",
                "their tokenizers differ, so the codes of one are noise to the other",
                "give models that were trained on one tokenizer",
            )
        return cls(large, small, tokenizer, drafted)


def load(
    name: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
) -> tuple[VarForImageGeneration, MultiScaleVQ]:
    """A transformer and the tokenizer that its configuration names, ready to generate.

    Published checkpoints have loaders of their own, `mmdecode.models.var.load_published` and
    `mmdecode.models.multiscale_vq.load_published`.

    Args:
        name: A folder, a Hub id or ``zoo:NAME``.
        device: ``None``: CUDA where there is one.
        dtype: Data type of the transformer; the tokenizer is in float32 always, where running sums
            need it.

    Raises:
        InputError: There is no such model, its weights are not all there, or it does not say where
            its tokenizer is.
        OptionError: The device or the dtype does not exist.
    """
    model = whole(VarForImageGeneration, str(name), dtype=dtype_of(dtype, name, device))
    if not model.config.tokenizer:
        raise InputError(
            f"{name} does not name its tokenizer; write its folder into config.json as "
            "'tokenizer', or load both apart and give them to NextScale"
        )
    folder = Path(local_path(name)) / model.config.tokenizer
    source = str(folder) if folder.is_dir() else model.config.tokenizer
    return placed(model, device), placed(whole(MultiScaleVQ, source, dtype=torch.float32), device)


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
                "give the one it was trained on",
            )


def _check_rows(rows: int, requests: Sequence[int], known: Known | None) -> None:
    if len(requests) != rows:
        raise ShapeError(f"{len(requests)} requests for {rows} classes; give one for each")
    for part in () if known is None else (known.running, known.keep):
        if len(part) not in (1, rows):
            raise ShapeError(
                f"known is of {len(part)} pictures for {rows} classes; give as many, or one"
            )


def _with_null_class(model: VarForImageGeneration, labels: Tensor, drawing: Drawing) -> Tensor:
    """Classes of all rows: the conditional ones, then as many unconditional ones if guided."""
    if drawing.guidance == 0:
        return labels
    return torch.cat([labels, torch.full_like(labels, model.null_class)])


def _for_rows(inputs: Sequence[Tensor], rows: int) -> Tensor | None:
    """Inputs one after the other, the same for conditional and unconditional rows."""
    if not inputs:
        return None
    joined = torch.cat(list(inputs), 1)
    return joined.repeat(rows // len(joined), 1, 1)


def _guided(logits: Tensor, rows: int, strength: float) -> Tensor:
    """``(B, n, V)`` of conditional rows, and of the unconditional ones after them if there are."""
    if len(logits) == rows:
        return logits
    return guided(logits[:rows], logits[rows:], strength)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
