"""Target models that drafters are trained for: models that generate text or image codes.

A `Target` generates answers to training requests, computes its hidden states over prompts and
answers in one forward pass, and decodes with a drafter; the trainer
(`mmdecode.train.drafters.trainer`) uses nothing else. Images are generated with classifier-free
guidance. The conditional and the unconditional branch are then rows of one batch, and a drafter is
trained on the states of both branches and on the guided distribution.
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
from mmdecode.quantization.models import refuse_learning
from mmdecode.train.drafters.recipes import Options, Sample, unguided
from mmdecode.vlm.requests import AnswerRequest, read_requests

SCENES = "zoo:scenes"
BY_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""Names of model inputs that have one value for each prompt token."""

Build = Callable[[Sequence[AnswerRequest]], dict[str, Any]]
"""Function that converts requests to model inputs, padded on the left."""


class Target(Protocol):
    """Protocol of a model that drafters are trained for.

    Attributes:
        at_once: Number of requests in a batch.
        kinds: Names of the drafter architectures that can be trained for it, see
            `mmdecode.train.drafters.recipes.RECIPES`; ``None``: all.
    """

    at_once: int
    kinds: Sequence[str] | None

    @property
    def branches(self) -> Sequence[BranchSpec]:
        """Further branches, such as the unconditional one, whose states are collected."""

    @property
    def model(self) -> Any:
        """The model."""

    @property
    def adapter(self) -> Any:
        """Adapter that runs the model."""

    def answers(self, requests: Sequence[Any], options: Options) -> list[list[int]]:
        """Generates an answer to each request; returns token ids with the end token."""

    def read(self, decoder: Decoder, samples: Sequence[Sample]) -> None:
        """Runs the model once over prompts and answers; the decoder's guide collects the states.

        Args:
            decoder: Decoder whose guide is a `mmdecode.train.drafters.trainer.Collector`.
            samples: Requests with their answers.
        """

    def guided(self, logits: Tensor) -> Tensor:
        """Returns guided logits, given the logits of all branches; see `Batch`."""

    def drafted(self, draft: Drafter, requests: Sequence[Any], options: Options) -> Decoder:
        """Generates answers with a drafter; returns the decoder with its acceptance counters."""


@dataclass
class Texts:
    """Target that generates text, with or without images in its prompts.

    Args:
        model: The model.
        build: Converts requests to model inputs, padded on the left.
        at_once: Number of requests in a batch.
        kinds: Drafter architectures that can be trained for the model; ``None``: all.
        branches: Further branches whose states are collected; none for text.
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
        """Runs the model with prompt and answer joined as the prompt of one generated token."""
        answers = [sample.answer for sample in samples]
        inputs = with_answers(self.build([sample.request for sample in samples]), answers)
        generate(self.model, decoder=decoder, **inputs, **_greedily(1))

    def guided(self, logits: Tensor) -> Tensor:
        """Returns the logits unchanged."""
        return unguided(logits)

    def drafted(
        self, draft: Drafter, requests: Sequence[AnswerRequest], options: Options
    ) -> Decoder:
        """Generates answers greedily with the drafter; returns the decoder with its counters."""
        decoder = Decoder(draft)
        for start in range(0, len(requests), self.at_once):
            inputs = self.build(requests[start : start + self.at_once])
            generate(self.model, decoder=decoder, **inputs, **_greedily(options.max_new_tokens))
        return decoder


@dataclass(frozen=True)
class Drawing:
    """Request to generate an image.

    Attributes:
        id: Id of the request, which determines its sampling noise.
        condition: Class or prompt, as `RasterModel.given` accepts it.
    """

    id: str
    condition: Any


@dataclass
class Images:
    """Target that generates images code by code, with its checkpoint's sampling and guidance.

    Args:
        raster: The model.
        at_once: Number of requests in a batch.
        kinds: Drafter architectures that can be trained for the model.
    """

    raster: RasterModel
    at_once: int = 128
    kinds: Sequence[str] | None = ("eagle", "eagle3")

    @property
    def branches(self) -> Sequence[BranchSpec]:
        """The unconditional branch, if the checkpoint is sampled with guidance."""
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
        """Samples images; returns their tokens, including tokens that the format prescribes."""
        return self._draw(Decoder(seed=options.fit.seed), requests).tokens.tolist()

    def read(self, decoder: Decoder, samples: Sequence[Sample]) -> None:
        """Runs the model with condition and image tokens joined as the prompt."""
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
        """Applies the checkpoint's guidance to the logits of both branches.

        Args:
            logits: Logits of the conditional rows, then of the unconditional rows; conditional
                rows alone if the guidance scale is 1.

        Returns:
            Guided logits in the same shape, repeated for both branches.
        """
        if self.raster.preset.guidance == 1:
            return logits
        conditional, nothing = logits.chunk(2)
        distribution = guided(conditional, nothing, self.raster.preset.guidance)
        return torch.cat([distribution, distribution])

    def drafted(self, draft: Drafter, requests: Sequence[Drawing], options: Options) -> Decoder:
        """Samples images with the drafter and exact rejection sampling; returns the decoder."""
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
    """Appends answers to the prompts of model inputs and pads them on the left again.

    Args:
        inputs: Model inputs of a batch, padded on the left.
        answers: Token ids of each row's answer.
    """
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
    """Loads a target model.

    Args:
        model_id: Language, vision-language or LlamaGen model: folder, Hub id or ``zoo:NAME``.
        device: Device of the model.
        dtype: Dtype of the weights; ``None``: float32.

    Raises:
        InputError: The checkpoint cannot be loaded.
        OptionError: The device does not exist.
        UnsupportedModelError: The checkpoint is a speech recogniser.
    """
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    from mmdecode.asr.correction.language_models import load as load_text
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
            f"{model_id} is a speech recogniser ({config.model_type}); expected a model that "
            "generates text or images: 'mmdecode train medusa' trains heads for a recogniser"
        )
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        model, tokenizer = load_text(model_id, device, dtype)
        refuse_learning(model)
        return Texts(model.eval(), partial(_texts, tokenizer, model.device))
    model, processor = load(model_id, device, dtype)
    refuse_learning(model)
    return Texts(model.eval(), Prompts(model, processor).read)


def requests_for(target: Target, data: str, limit: int | None) -> list[Any]:
    """Returns the training requests of a target.

    Args:
        target: The target. A class-conditional image model gets requests for its classes in turn.
        data: Path of a table of questions or prompts; or `SCENES`, which means rendered scenes for
            a model of text, and the classes for a class-conditional image model.
        limit: Number of requests; ``None``: the whole table, or 1,000 scenes or class requests.

    Raises:
        OptionError: A class-conditional image model was given a table, or an image model with
            prompts was given none.
    """
    if not isinstance(target, Images):
        return scene_requests(limit or 1000) if data == SCENES else read_requests(data, limit)
    classes = target.raster.classes
    if classes:
        if data != SCENES:
            raise OptionError(
                f"data={data!r}: {target.adapter.name} generates images of classes, and is trained "
                "on each class in turn; leave the data out"
            )
        return [Drawing(f"drafter/{index}", index % classes) for index in range(limit or 1000)]
    if data == SCENES:
        raise OptionError(
            f"{target.adapter.name} generates images from prompts; give a table of prompts as data"
        )
    return [Drawing(request.id, request.text) for request in read_requests(data, limit)]


def _texts(
    tokenizer: Any, device: torch.device, requests: Sequence[AnswerRequest]
) -> dict[str, Tensor]:
    """Converts requests to inputs of a language model, with its chat template if it has one."""
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
    """Returns requests about rendered training scenes: 75 % descriptions, 25 % questions."""
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
    """Returns the image source of a scene, which renders the image when it is read."""
    from mmdecode.vlm.images import ImageSource, read_image
    from mmdecode.zoo.scenes import draw_scene, render

    name = f"scene {seed}"
    return ImageSource(name, lambda: read_image(render(draw_scene(seed)), name))
