"""Targets that drafters are trained for: models of text answers, and models of image codes.

A `Target` answers requests, computes its states over prompts and answers in one pass of the engine,
and decodes with a drafter; `mmdecode.train.drafters.trainer` uses nothing else of it. Answers are
the target's own, with the settings it is decoded with. Images are generated with guidance: the rows
of all branches are in one batch, and a drafter is trained on the states of each branch and on the
guided distribution.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from mmdecode import registry
from mmdecode.api import generate
from mmdecode.decoder import Decoder
from mmdecode.engine.adapter import BranchSpec
from mmdecode.engine.contracts import Drafter
from mmdecode.engine.request import token_ids, up_to_end
from mmdecode.errors import OptionError, UnsupportedModelError
from mmdecode.guide.guidance import Guidance
from mmdecode.image_ar.loading import RasterModel
from mmdecode.image_ar.loading import load as load_raster
from mmdecode.image_ar.raster import ImageTokens
from mmdecode.image_ar.raster import generate as draw
from mmdecode.image_ar.sampling import Sampling, guided
from mmdecode.models.llamagen import LlamaGenConfig
from mmdecode.train.drafters.recipes import Options, Sample, unguided
from mmdecode.vlm.requests import AnswerRequest, read_requests

SCENES = "zoo:scenes"
BY_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""Inputs with a value per prompt token."""

Build = Callable[[Sequence[AnswerRequest]], dict[str, Any]]
"""Model inputs of some requests, padded on the left."""


class Target(Protocol):
    """Model that drafters are trained for.

    Attributes:
        at_once: Number of requests per batch.
        kinds: Kinds of drafters that the target supports; ``None``: all.
    """

    at_once: int
    kinds: Sequence[str] | None

    @property
    def branches(self) -> Sequence[BranchSpec]:
        """Branches other than the main one whose states are collected."""

    @property
    def model(self) -> Any:
        """The model."""

    @property
    def adapter(self) -> Any:
        """Adapter of the model."""

    def answers(self, requests: Sequence[Any], options: Options) -> list[list[int]]:
        """Answers the requests; returns token ids, each with its end token."""

    def read(self, decoder: Decoder, samples: Sequence[Sample]) -> None:
        """Runs one pass over prompts and answers; the decoder's guide collects the states."""

    def guided(self, logits: Tensor) -> Tensor:
        """Guided logits from those of all branches; see `Batch`."""

    def drafted(self, draft: Drafter, requests: Sequence[Any], options: Options) -> Decoder:
        """Answers all requests with a drafter; returns the decoder, whose counters say how well."""


@dataclass
class Texts:
    """A model that generates text, with or without images in its prompts.

    Args:
        model: The model.
        build: Turns requests into model inputs.
    """

    model: Any
    build: Build
    at_once: int = 32
    kinds: Sequence[str] | None = None
    branches: Sequence[BranchSpec] = ()

    @property
    def adapter(self) -> Any:
        """Adapter of the model."""
        return registry.adapter_for(self.model)

    def answers(self, requests: Sequence[AnswerRequest], options: Options) -> list[list[int]]:
        """Answers greedily, or samples at the options' temperature."""
        given = _greedily(options.max_new_tokens)
        if options.temperature:
            given |= {"do_sample": True, "temperature": options.temperature}
            given |= {"top_k": 0, "top_p": 1.0}
        inputs = self.build(requests)
        names = [request.id for request in requests]
        decoder = Decoder(seed=options.fit.seed)
        out = generate(self.model, decoder=decoder, request=names, **inputs, **given)
        ends = token_ids(self.model.generation_config.eos_token_id)
        rows = out[:, inputs["input_ids"].shape[1] :].tolist()
        return [up_to_end(row, ends) for row in rows]

    def read(self, decoder: Decoder, samples: Sequence[Sample]) -> None:
        """Passes prompt and answer as one prompt and generates one token."""
        answers = [sample.answer for sample in samples]
        inputs = with_answers(self.build([sample.request for sample in samples]), answers)
        generate(self.model, decoder=decoder, **inputs, **_greedily(1))

    def guided(self, logits: Tensor) -> Tensor:
        """Returns the logits unchanged."""
        return unguided(logits)

    def drafted(
        self, draft: Drafter, requests: Sequence[AnswerRequest], options: Options
    ) -> Decoder:
        """Decodes greedily with the drafter."""
        decoder = Decoder(draft)
        for start in range(0, len(requests), self.at_once):
            inputs = self.build(requests[start : start + self.at_once])
            generate(self.model, decoder=decoder, **inputs, **_greedily(options.max_new_tokens))
        return decoder


@dataclass(frozen=True)
class Drawing:
    """Request for an image.

    Attributes:
        id: Id of the request, which keys its noise.
        condition: A class or a prompt, as `RasterModel.given` takes it.
    """

    id: str
    condition: Any


@dataclass
class Images:
    """A model that generates images code by code, with its checkpoint's sampling and guidance.

    Args:
        raster: The model.
    """

    raster: RasterModel
    at_once: int = 128
    kinds: Sequence[str] | None = ("eagle", "eagle3")

    @property
    def branches(self) -> Sequence[BranchSpec]:
        """Branches of the checkpoint's guidance."""
        guide = Guidance(self.raster.preset.guidance)
        return () if guide.neutral else guide.branches

    @property
    def model(self) -> Any:
        """The transformer."""
        return self.adapter.model

    @property
    def adapter(self) -> Any:
        """Adapter of the model."""
        return self.raster.adapter

    def answers(self, requests: Sequence[Drawing], options: Options) -> list[list[int]]:
        """Samples images; returns their tokens, forced ones included."""
        return self._draw(Decoder(seed=options.fit.seed), requests).tokens.tolist()

    def read(self, decoder: Decoder, samples: Sequence[Sample]) -> None:
        """Passes condition and tokens as one prompt."""
        codes = torch.tensor([sample.answer for sample in samples], device=self.model.device)
        inputs = self.adapter.condition(
            **self.raster.given([sample.request.condition for sample in samples])
        )
        decoder(
            self.model,
            codes[:, :0],
            logits_processor=LogitsProcessorList(),
            stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(1)]),
            generation_config=GenerationConfig(max_length=1, do_sample=False),
            mm_adapter=self.adapter.with_prefix(codes),
            mm_request=[sample.request.id for sample in samples],
            **inputs,
        )

    def guided(self, logits: Tensor) -> Tensor:
        """Applies the checkpoint's guidance scale; 1 has no second branch."""
        if self.raster.preset.guidance == 1:
            return logits
        conditional, nothing = logits.chunk(2)
        distribution = guided(conditional, nothing, self.raster.preset.guidance)
        return torch.cat([distribution, distribution])

    def drafted(self, draft: Drafter, requests: Sequence[Drawing], options: Options) -> Decoder:
        """Samples with the drafter, by the exact rule for sampling."""
        decoder = Decoder(draft, accept="rejection", seed=options.fit.seed)
        for start in range(0, len(requests), self.at_once):
            self._draw(decoder, requests[start : start + self.at_once])
        return decoder

    def _draw(self, decoder: Decoder, requests: Sequence[Drawing]) -> ImageTokens:
        return draw(
            self.model,
            decoder=decoder,
            adapter=self.adapter,
            guidance=self.raster.preset.guidance,
            sampling=Sampling(**self.raster.preset.sampling),
            request=[request.id for request in requests],
            **self.raster.given([request.condition for request in requests]),
        )


def with_answers(inputs: Mapping[str, Any], answers: Sequence[list[int]]) -> dict[str, Any]:
    """Appends answers to the inputs' texts, padded on the left again."""
    real = inputs["attention_mask"].bool()
    appended = {"input_ids": answers, "attention_mask": [[1] * len(a) for a in answers]}
    given = dict(inputs)
    for name in BY_TOKEN:
        if name not in inputs:
            continue
        added = appended.get(name, [[0] * len(answer) for answer in answers])
        rows = [
            torch.cat([own[there], own.new_tensor(more)])
            for own, there, more in zip(inputs[name], real, added, strict=True)
        ]
        longest = max(map(len, rows))
        given[name] = torch.stack([F.pad(row, (longest - len(row), 0)) for row in rows])
    return given


def _greedily(tokens: int) -> dict[str, Any]:
    given = dict.fromkeys(("temperature", "top_p", "top_k"))
    return {"max_new_tokens": tokens, "do_sample": False, "num_beams": 1, **given}


def loaded(model_id: str, device: str = "cpu", dtype: torch.dtype | None = None) -> Target:
    """Loads a target; its model is in float32 by default.

    Raises:
        InputError: The checkpoint cannot be loaded.
        OptionError: The device does not exist.
        UnsupportedModelError: The checkpoint is a speech recogniser.
    """
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    from mmdecode.asr.correction.corrector import load as load_text
    from mmdecode.asr.recognizers.generic import GenericRecognizer
    from mmdecode.checkpoints import config_of, loading, local_path
    from mmdecode.vlm.loading import load
    from mmdecode.vlm.questions import Prompts

    with loading(model_id):
        config = config_of(local_path(model_id))
    if config.model_type == LlamaGenConfig.model_type:
        return Images(load_raster(model_id, device, dtype))
    if GenericRecognizer.fits(config.model_type):
        raise UnsupportedModelError(
            f"{model_id} is a speech recogniser ({config.model_type}), and drafters are trained "
            "for models of text and images; of recognisers Whispers alone have heads: name one, "
            "and run 'mmdecode train medusa'"
        )
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        model, tokenizer = load_text(model_id, device, dtype)
        return Texts(model.eval(), partial(_texts, tokenizer, model.device))
    model, processor = load(model_id, device, dtype)
    return Texts(model.eval(), Prompts(model, processor).read)


def requests_for(target: Target, data: str, limit: int | None) -> list[Any]:
    """Training requests of a target.

    Args:
        target: The target. A class-conditional one gets its classes in turn.
        data: `SCENES`, also for class-conditional targets, or a table of questions or prompts.
        limit: Number of requests; ``None``: 1,000 of scenes and classes, else the whole table.

    Raises:
        OptionError: A class-conditional model is given a table, or a model of prompts none.
    """
    if not isinstance(target, Images):
        return scene_requests(limit or 1000) if data == SCENES else read_requests(data, limit)
    classes = target.raster.classes
    if classes:
        if data != SCENES:
            raise OptionError(
                f"data={data!r}: {target.adapter.name} draws of classes, each in turn; leave the "
                "data out"
            )
        return [Drawing(f"drafter/{index}", index % classes) for index in range(limit or 1000)]
    if data == SCENES:
        raise OptionError(f"{target.adapter.name} draws of prompts; give a table of them as data")
    return [Drawing(request.id, request.text) for request in read_requests(data, limit)]


def _texts(
    tokenizer: Any, device: torch.device, requests: Sequence[AnswerRequest]
) -> dict[str, Tensor]:
    """Inputs of a language model, by its chat template if it has one."""
    texts = [request.text for request in requests]
    templated = tokenizer.chat_template is not None
    if templated:
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
            )
            for text in texts
        ]
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return dict(
        tokenizer(
            texts,
            padding=True,
            padding_side="left",
            add_special_tokens=not templated,
            return_tensors="pt",
        ).to(device)
    )


def scene_requests(count: int) -> list[AnswerRequest]:
    """Requests about rendered training scenes: three captions for every question."""
    from mmdecode.zoo.scene_text import DESCRIBE, exchanges
    from mmdecode.zoo.scenes import draw_scene

    requests = []
    for seed in range(count):
        rng = random.Random(f"drafter/{seed}")
        text = DESCRIBE[rng.choices(tuple(DESCRIBE), (1, 2, 3))[0]]
        if rng.random() < 0.25:
            text = exchanges(draw_scene(seed), rng, 1)[0].request
        requests.append(
            AnswerRequest(f"scene {seed}", seed, text, (scene_image(seed),), named=True)
        )
    return requests


def scene_image(seed: int) -> Any:
    """Source of a scene's image, which is rendered when it is read."""
    from mmdecode.vlm.images import ImageSource, read_image
    from mmdecode.zoo.scenes import draw_scene, render

    name = f"scene {seed}"
    return ImageSource(name, lambda: read_image(render(draw_scene(seed)), name))
