"""START HERE for images: `ImageGenerator`, which generates images from classes or prompts.

Samples in batches with raster or next-scale models and returns codes, pixels and the pass in which
each code was decided. The seed, the condition and the image's ordinal among those of its condition
seed its sampling noise, so that an image does not depend on its batch. With the acceptance rule
``coupled`` a drafter does not change it either.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmdecode.checkpoints import AUTO, trusting_as_asked
from mmdecode.decoder import Decoder
from mmdecode.errors import InputError, OptionError
from mmdecode.image_ar import next_scale
from mmdecode.image_ar.backends import OnTokens, RasterBackend, RowBackend, Start
from mmdecode.image_ar.conditions import Conditions, is_list, utf8
from mmdecode.image_ar.loading import RasterModel, config_of, generation_settings, labels_of, load
from mmdecode.image_ar.modes import check_mode, decoder_of, lead_of
from mmdecode.image_ar.next_scale import Collaborative, NextScale
from mmdecode.image_ar.next_scale_backend import NextScaleBackend, drawing_of, published_drawing
from mmdecode.image_ar.results import GeneratedImage, ImageRequest, request_name
from mmdecode.image_ar.sampling import Sampling
from mmdecode.model_names import full_name
from mmdecode.runs.items import Failed, OnError, Watch, collected, each, tried

if TYPE_CHECKING:
    from mmdecode.engine.contracts import AcceptanceRule, Drafter
    from mmdecode.engine.stats import Stats
    from mmdecode.image_ar.backends import SampledImage

_MEMORY_HINT = "load the model in half precision, or use a smaller window"


class ImageGenerator:
    """Generates images from classes or prompts.

    Args:
        model: A `RasterModel`, see `mmdecode.image_ar.loading.load`, or a `NextScale`.
        decoder: Decoder of a raster model; ``None``: a decoder without a drafter.
        guidance: Classifier-free guidance scale s of ``u + s (c - u)``; 1 switches guidance off.
            For next-scale models it is the scale at the last resolution, 1 + t for VAR's published
            t. ``None``: the model's own.
        sampling: Sampling settings; ``None``: the model's own.
        temperature, top_k, top_p: Replace these values of ``sampling``; ``None``: keep them.
        negative_prompt: Prompt of the unconditional branch, which guidance leads away from; only
            for models that take prompts.
        lead: Number of codes by which a row must be ahead of the row below it when rows are decoded
            in parallel (ZipAR, lossy); only for raster models, and without ``decoder``. ``None``:
            codes are decoded one after another.
        seed: Seed of the sampling noise.
        batch: Images sampled at once; it does not change the images.

    Attributes:
        guarantee: Whether images have the model's distribution, see `GeneratedImage`.
        classes: Number of classes; 0: the model takes prompts.
        labels: Class names by number; empty if the model's configuration has none.
        tokens: Number of tokens of an image.
        grid: Rows and columns of codes; for next-scale models, at the last scale.
        repeatable: Whether an image always takes the same number of passes; see
            `mmdecode.engine.capabilities.DrafterCapabilities`.

    Raises:
        OptionError: A value is out of range, or the model does not support an option.
    """

    def __init__(
        self,
        model: RasterModel | NextScale,
        decoder: Decoder | None = None,
        *,
        guidance: float | None = None,
        sampling: Sampling | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        negative_prompt: str | None = None,
        lead: int | None = None,
        seed: int = 0,
        batch: int = 8,
    ) -> None:
        if batch < 1:
            raise OptionError(f"batch={batch}; expected at least 1")
        asked = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        changed: dict[str, Any] = {n: value for n, value in asked.items() if value is not None}
        self._backend: RasterBackend | NextScaleBackend
        if isinstance(model, NextScale):
            if negative_prompt is not None or lead is not None:
                raise OptionError(
                    f"negative_prompt={negative_prompt!r}, lead={lead}; a next-scale model takes "
                    "classes and has no raster order: leave out negative_prompt and lead"
                )
            if decoder is not None:
                raise OptionError(
                    "a next-scale model decides a scale at once, so there is nothing to draft; "
                    "leave out the decoder"
                )
            drawing = drawing_of(model, guidance, sampling, changed)
            config = model.stages[0].model.config
            labels = labels_of(config, config.num_classes)
            self._backend = NextScaleBackend(model, drawing, labels)
        else:
            if negative_prompt is not None:
                model = model.away_from(utf8(negative_prompt))
            base = Sampling(**model.preset.sampling) if sampling is None else sampling
            settings = replace(base, **changed)
            if lead is None:
                self._backend = RasterBackend(model, decoder or Decoder(), guidance, settings)
            elif decoder is None:
                self._backend = RowBackend(model, lead, guidance, settings)
            else:
                raise OptionError(f"lead={lead} cannot be used with a decoder; leave out either")
            if negative_prompt is not None and self._backend.guidance == 1:
                raise OptionError(
                    "a negative prompt does nothing without guidance; give guidance above 1"
                )
        self.seed, self.batch = seed, batch
        self.guarantee, self.classes = self._backend.guarantee, self._backend.classes
        self.labels, self.tokens = self._backend.labels, self._backend.tokens
        self.grid = self._backend.grid
        self.repeatable = decoder is None or decoder.draft.capabilities.repeatable
        self._conditions = Conditions(self.classes, self.labels)

    @classmethod
    @trusting_as_asked
    def from_pretrained(
        cls,
        model_id: str | os.PathLike[str],
        draft: Drafter | str | None = None,
        accept: AcceptanceRule | str = "auto",
        mode: str | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        quantize: str | None = None,
        compile: bool = False,
        grid: tuple[int, int] | None = None,
        refiner: str | os.PathLike[str] | None = None,
        drafted: int | None = None,
        template: bool = True,
        trust_remote_code: bool = False,
        **how: Any,
    ) -> ImageGenerator:
        """Loads a model and builds its decoder.

        Args:
            model_id: A folder, a Hub id, a short name such as ``janus-pro-1b``, or ``zoo:NAME``.
            draft: A drafter, or the name of a drafter with its options (``name:key=value``).
            accept: The acceptance rule, or its name; see `mmdecode.Decoder`.
            mode: Name of a combination of drafter and rule, see `mmdecode.image_ar.modes`: ``ar``,
                ``exact``, ``fast``, ``relaxed`` (lossy), or ``zipar:window=8`` (lossy).
            device: Device of the model; ``None``: CUDA if available, else the CPU.
            dtype: ``None``: float32; ``auto``: see `mmdecode.checkpoints.dtype_of`.
            quantize: ``int8`` or ``fp8``, see `mmdecode.quantize`; ``None``: weights as loaded.
            compile: See `mmdecode.Decoder`.
            grid: Rows and columns of codes, for model families whose images may have any size.
            refiner: A smaller next-scale model that generates the last scales (CoDe).
            drafted: Number of scales that ``model_id`` generates before the refiner.
            template: See `mmdecode.image_ar.loading.load`.
            trust_remote_code: Run Python files that come with the model; read them first.
            **how: Guidance, sampling and the other arguments of `ImageGenerator`.

        Raises:
            InputError: The checkpoint cannot be loaded.
            IncompatibleError: Parts of the checkpoint, or drafter and rule, do not fit each other.
            OptionError: The model does not support an option, or a value is out of range.
            UnknownNameError: A mode, drafter or rule is unknown.
            UnsupportedModelError: No adapter supports image generation with this model.
        """
        check_mode(mode, draft, accept)
        name = full_name(str(model_id))
        if config_of(name).model_type == "var":
            given = {
                "draft": draft,
                "accept": None if accept == "auto" else accept,
                "mode": None if mode == "ar" else mode,
                "compile": compile or None,
                "grid": grid,
                "dtype": None if dtype in (AUTO, "fp32", "float32", torch.float32) else dtype,
                "quantize": quantize,
            }
            for option, value in given.items():
                if value is not None:
                    raise OptionError(
                        f"{option}={value!r} is for models in raster order, and {name} generates "
                        f"images scale by scale; leave {option} out"
                    )
            stages = _next_scale(name, refiner, drafted, device)
            if published_drawing(stages) is next_scale.VAR:
                usual = generation_settings(name)
                if how.get("sampling") is not None:
                    usual = {"guidance": usual.get("guidance")}
                how |= {n: value for n, value in usual.items() if how.get(n) is None}
            return cls(stages, **how)
        if refiner is not None or drafted is not None:
            raise OptionError(
                f"a refiner is for next-scale models, and {name} generates in raster order; to "
                "draft with a smaller model, use draft='assistant:model=...'"
            )
        model = load(name, device, dtype, quantize, grid, template)
        lead = lead_of(mode)
        if lead is not None:
            if compile:
                raise OptionError(f"mode {mode!r} cannot be compiled; leave out compile")
            return cls(model, lead=lead, **how)
        decoder = decoder_of(
            mode,
            draft,
            accept,
            adapter=model.adapter,
            compile=compile,
            target=model.adapter.model,
            model_id=name,
        )
        return cls(model, decoder, **how)

    @property
    def stats(self) -> Stats:
        """Counters over all calls."""
        return self._backend.stats

    @property
    def settings(self) -> dict[str, Any]:
        """Guidance and sampling in use, defaults of the model included, as plain values.

        The sampling of a next-scale model may be a list, one per scale.
        """
        sampling = self._backend.sampling
        values = asdict(sampling) if isinstance(sampling, Sampling) else list(map(asdict, sampling))
        return {"guidance": self._backend.guidance, "sampling": values}

    def __call__(
        self,
        conditions: int | str | Sequence[int | str],
        n: int | None = None,
        *,
        on_error: OnError | None = None,
        seed: int | None = None,
        start: Tensor | None = None,
        known: int | Tensor | None = None,
        on_tokens: OnTokens | None = None,
        likelihood: bool = False,
    ) -> Any:
        """Generates images from one or several conditions.

        Args:
            conditions: Classes, by number or name, or prompts: one, or a list.
            n: Images per condition; ``None``: one.
            on_error: ``raise`` the first error, or ``return`` an image that holds its error;
                ``None``: raise for a single condition, return for a list.
            seed: Seed of the sampling noise; ``None``: the generator's.
            start: An image to complete: its codes, integers ``(rows, columns)``, or its pixels from
                0 to 1, ``(3, H, W)``.
            known: Part of ``start`` to keep: a number of codes in raster order, or a mask of codes
                or pixels, true where the image is kept. If the first codes are kept, the rest is
                sampled exactly; for other masks see `mmdecode.image_ar.completion`.
            on_tokens: Called every few passes with the number of tokens added to the batch.
            likelihood: Whether images get a log-likelihood, which takes another forward pass.

        Returns:
            A `GeneratedImage` for a single condition without ``n``; otherwise a list, the images of
            each condition together, with an ``error`` for each image that failed.

        Raises:
            UnknownNameError: A single condition is the name of no class.
            OptionError: ``n`` is less than 1; a single class is out of range; a single prompt is
                too long; or only one of ``start`` and ``known`` is given.
            ShapeError: ``start`` or ``known`` has the wrong shape.
            IncompatibleError: Guidance, rule or drafter do not fit the model.
        """
        single = not is_list(conditions)
        requests, wrong = self._conditions.requests(conditions, 1 if n is None else n)
        for request in requests:
            if request.condition not in wrong:
                wrong[request.condition] = self._wrong(request.condition)
        if single and on_error is None:
            on_error = "raise"
        if on_error == "raise":  # before anything is generated
            for error in filter(None, wrong.values()):
                raise error
        watch = Watch()
        images = self._images(requests, watch, wrong, seed, start, known, on_tokens, likelihood)
        return collected(watch.released(images), single and n is None, on_error)

    def requests(
        self, conditions: int | str | Sequence[int | str], n: int = 1
    ) -> list[ImageRequest]:
        """Returns the requests of a call: ``n`` images of each condition, in order.

        Raises:
            UnknownNameError: No class has a given name.
            OptionError: ``n`` is less than 1, no condition is given, or a condition is invalid.
        """
        found, wrong = self._conditions.requests(conditions, n)
        for error in filter(None, wrong.values()):
            raise error
        return found

    def images(
        self,
        requests: Sequence[ImageRequest],
        *,
        seed: int | None = None,
        start: Tensor | None = None,
        known: int | Tensor | None = None,
        on_tokens: OnTokens | None = None,
        likelihood: bool = False,
        watch: Watch | None = None,
    ) -> Iterator[GeneratedImage]:
        """Yields images as soon as their batch is generated; a failed image has an ``error``.

        If one image fails, the others are generated all the same.

        Args:
            requests: Requests as `requests` returns them.
            seed: See `__call__`, also for the next four arguments.
            start: An image to complete.
            known: Part of ``start`` to keep.
            on_tokens: Called every few passes.
            likelihood: Whether images get a log-likelihood.
            watch: Error state that several calls of one job share; see `mmdecode.runs.items`.

        Raises:
            MMDecodeError: The configuration is wrong, so that all images fail.
        """
        watch = Watch() if watch is None else watch
        yield from watch.released(
            self._images(requests, watch, {}, seed, start, known, on_tokens, likelihood)
        )

    def _images(
        self,
        requests: Sequence[ImageRequest],
        watch: Watch,
        checked: dict[int | str, Exception | None],
        seed: int | None,
        start: Tensor | None,
        known: int | Tensor | None,
        on_tokens: OnTokens | None,
        likelihood: bool,
    ) -> Iterator[tuple[GeneratedImage, Failed | None]]:
        """See `images`; ``checked`` has the error, or ``None``, of conditions already checked."""
        if (start is None) != (known is None):
            raise OptionError("start and known belong together; give both, or neither")
        begun = None
        if start is not None and known is not None:
            begun = self._backend.started(Start(image=start, known=known))
        seed = self.seed if seed is None else seed
        for first in range(0, len(requests), self.batch):
            good = []
            for request in requests[first : first + self.batch]:
                condition = request.condition
                if condition not in checked:
                    checked[condition] = self._wrong(condition)
                error = checked[condition]
                if error is not None:
                    failed = Failed.of(error, _MEMORY_HINT)
                    # must not fail the other conditions
                    failed = replace(failed, problem=InputError(failed.error))
                    yield self._failed(request, seed, failed), failed
                else:
                    good.append(request)

            def draw(some: Sequence[ImageRequest]) -> list[GeneratedImage]:
                return self._batch(some, seed, begun, on_tokens, likelihood)

            for request, found in each(
                good,
                draw,
                hint=_MEMORY_HINT,
                name=request_name,
                watch=watch,
                attempt=self.stats.attempt,
            ):
                if isinstance(found, Failed):
                    yield self._failed(request, seed, found), found
                else:
                    yield found, None

    def _batch(
        self,
        requests: Sequence[ImageRequest],
        seed: int,
        start: Any,
        on_tokens: OnTokens | None,
        likelihood: bool,
    ) -> list[GeneratedImage]:
        """Generates a batch of images."""
        sampled, likely, seconds = self._sample(requests, seed, start, on_tokens, likelihood)
        completion = None if start is None else start[1]
        found = []
        for request, one, value in zip(requests, sampled, likely, strict=True):
            asked = self._asked(request, seed)
            if completion not in (None, "continued") and self.guarantee == "exact":
                asked["guarantee"] = "locally constrained"
            image = GeneratedImage(
                **asked,
                completion=completion,
                codes=one.codes,
                tokens=one.tokens,
                commits=one.commits,
                passes=one.passes,
                seconds=seconds,
                log_likelihood=value,
                _pixels=one.pixels,
            )
            found.append(image)
        return found

    def _sample(
        self,
        requests: Sequence[ImageRequest],
        seed: int,
        start: Any,
        on_tokens: OnTokens | None,
        likelihood: bool,
    ) -> tuple[list[SampledImage], Sequence[float | None], float]:
        """Samples a batch; returns images, their log-likelihoods, and seconds per image."""
        conditions: list[Any] = [request.condition for request in requests]
        ordinals = [request.ordinal for request in requests]
        began = time.perf_counter()
        sampled = self._backend.sample(conditions, ordinals, seed, start, on_tokens)
        seconds = (time.perf_counter() - began) / len(requests)
        if not likelihood:
            return sampled, [None] * len(requests), seconds
        tokens = torch.stack([one.tokens for one in sampled])
        return sampled, self._backend.log_likelihood(conditions, tokens, start), seconds

    def _wrong(self, condition: int | str) -> Exception | None:
        """Returns the error of a condition; ``None``: images can be generated from it."""
        found = tried(lambda: self._backend.check(condition), _MEMORY_HINT)
        return found.problem if isinstance(found, Failed) else None

    def _failed(self, request: ImageRequest, seed: int, failed: Failed) -> GeneratedImage:
        return GeneratedImage(**self._asked(request, seed), error=failed.error, kind=failed.kind)

    def _asked(self, request: ImageRequest, seed: int) -> dict[str, Any]:
        condition = request.condition
        return {
            "index": request.index,
            "condition": condition,
            "label": self.labels.get(condition) if isinstance(condition, int) else None,
            "ordinal": request.ordinal,
            "seed": seed,
            "guarantee": self.guarantee,
        }


def _next_scale(
    name: str,
    refiner: str | os.PathLike[str] | None,
    drafted: int | None,
    device: Any,
) -> NextScale:
    if (refiner is None) != (drafted is None):
        raise OptionError(
            f"refiner={refiner!r}, drafted={drafted}; give refiner and drafted together: drafted "
            "is the number of scales that the large model generates"
        )
    if refiner is None or drafted is None:
        return NextScale.from_pretrained(name, device)
    return Collaborative.from_names(name, str(refiner), drafted, device)
