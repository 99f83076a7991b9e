"""`generate` and `attach`: run ``model.generate`` with a decoder that also gets the raw inputs.

``model.generate(custom_generate=decoder)`` drops some arguments: ``assistant_model``, and the
tokenizer of a config's ``stop_strings``; and if it fails early, a reader of the ``streamer`` waits
for ever. `generate` passes these arguments to the decoder, with the raw inputs (pixels, audio) that
some guides and drafters need. `attach` adds the raw inputs to plain ``model.generate`` and to
pipelines.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from transformers import StoppingCriteriaList

from mmdecode.decoder import Decoder
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.none import NoDraft
from mmdecode.engine.prompt_cache import PromptCache, refuse_no_cache
from mmdecode.engine.request import with_stop_strings
from mmdecode.engine.trace import Round
from mmdecode.errors import IncompatibleError, OptionError, UnknownNameError

_MODES = {"image": "mmdecode.image_ar.raster"}
"""Modules whose ``generate`` runs other modes than text; they are imported on use."""

_RAW = (
    "pixel_values",
    "pixel_attention_mask",
    "image_sizes",
    "image_grid_thw",
    "pixel_values_videos",
    "video_grid_thw",
    "qformer_input_ids",
    "qformer_attention_mask",
    "input_features",
    "input_values",
)


_PIXELS = ("pixel_values", "pixel_values_videos")
"""Raw inputs that ``generate`` of transformers encodes before a decoder starts, from 5.23 on."""


def generate(
    model: Any,
    *args: Any,
    mode: str = "text",
    decoder: Decoder | None = None,
    streamer: Any = None,
    stop_strings: str | list[str] | None = None,
    tokenizer: Any = None,
    draft_model: Any = None,
    request: Any = None,
    trace: list[list[Round]] | None = None,
    prompt_cache: PromptCache | None = None,
    **kwargs: Any,
) -> Any:
    """Calls ``model.generate`` with a decoder.

    Args:
        model: A model of transformers.
        *args: Passed to ``model.generate``.
        mode: ``"text"``, or ``"image"`` to generate image tokens with
            `mmdecode.image_ar.raster.generate`, which does not take ``stop_strings``.
        decoder: The decoder; ``None``: a decoder without a drafter.
        streamer: A transformers streamer, for a batch of one row.
        stop_strings: Texts that end a row; they need ``tokenizer``.
        tokenizer: Tokenizer of ``stop_strings``.
        draft_model: A smaller model, or its name as `mmdecode.load` takes it: shorthand for
            ``Decoder(draft=Assistant(draft_model))``; transformers' name ``assistant_model`` is
            accepted too.
        request: One name per row, which seeds its sampling noise; ``None``: a hash of its content.
        trace: A list, to which one list of decoding rounds (drafted and committed tokens) per row
            is appended.
        prompt_cache: Prefixes of prompts to continue from, and to add to: what prompts have in
            common up to the end of their images is read once. In text mode only.
        **kwargs: Passed to ``model.generate``.

    Returns:
        The result of ``model.generate``; in image mode an `mmdecode.image_ar.raster.ImageTokens`.

    Raises:
        OptionError: ``stop_strings`` are given without a tokenizer, or in image mode; or
            ``prompt_cache`` is none.
        UnknownNameError: ``mode`` is unknown.
        IncompatibleError: A streamer is given for several rows, or ``draft_model`` for a decoder
            that has a drafter.
    """
    refuse_no_cache(prompt_cache)
    decoder = decoder or Decoder()
    draft_model = draft_model or kwargs.pop("assistant_model", None)
    if draft_model is not None:
        if not isinstance(decoder.draft, NoDraft):
            raise IncompatibleError.between(
                "draft_model",
                f"draft {type(decoder.draft).__name__}",
                "a decoder has one drafter",
                "leave out either",
            )
        decoder = replace(decoder, draft=Assistant(draft_model))
    if mode != "text":
        if args or stop_strings is not None:
            raise OptionError(
                f"mode={mode!r} takes no stop_strings and no positional arguments; pass conditions "
                "by keyword, such as classes=[1]"
            )
        if tokenizer is not None:
            kwargs["tokenizer"] = tokenizer
        kwargs |= {"decoder": decoder, "streamer": streamer, "request": request, "trace": trace}
        return _ended(streamer, functools.partial(_of_mode(mode), model, **kwargs))
    stop_strings = _of_config(model, kwargs) if stop_strings is None else stop_strings
    if stop_strings is not None:
        criteria = StoppingCriteriaList(kwargs.pop("stopping_criteria", None) or [])
        kwargs["stopping_criteria"] = with_stop_strings(criteria, stop_strings, tokenizer)
    raw = _raw(model, args, kwargs)
    if prompt_cache is not None and prompt_cache.max_bytes and _encodes_images(model):
        # the decoder encodes images that it has not read yet
        kwargs = {name: value for name, value in kwargs.items() if name not in _PIXELS}
    kwargs |= {
        "custom_generate": decoder,
        "mm_prompt_cache": prompt_cache,
        "mm_inputs": raw,
        "mm_request": request,
        "mm_model": model,
        "mm_streamer": streamer,
        "mm_trace": trace,
    }
    return _ended(streamer, functools.partial(model.generate, *args, **kwargs))


def _encodes_images(model: Any) -> bool:
    """Whether ``model.generate`` encodes images before a decoder starts."""
    return "mm_encoder_outputs" in inspect.signature(model.forward).parameters


def _of_config(model: Any, kwargs: dict[str, Any]) -> str | list[str] | None:
    """Removes the stop strings from the call's ``generation_config``, and returns them.

    Left there, they would make ``generate`` fail: it drops the tokenizer before it builds their
    stopping criterion.

    Raises:
        OptionError: The model's own config holds stop strings; only the caller may change that.
    """
    if getattr(getattr(model, "generation_config", None), "stop_strings", None) is not None:
        raise OptionError(
            "model.generation_config holds stop_strings, and with a decoder model.generate loses "
            "their tokenizer; set model.generation_config.stop_strings = None and pass "
            "stop_strings=... and tokenizer=... to mmdecode.generate"
        )
    config = kwargs.get("generation_config")
    strings: str | list[str] | None = getattr(config, "stop_strings", None)
    if strings is not None:
        kwargs["generation_config"] = copy.deepcopy(config)
        kwargs["generation_config"].stop_strings = None
    return strings


def _of_mode(mode: str) -> Callable[..., Any]:
    if mode not in _MODES:
        raise UnknownNameError.of("mode", mode, ["text", *_MODES])
    return importlib.import_module(_MODES[mode]).generate


def _ended(streamer: Any, call: Callable[[], Any]) -> Any:
    """Runs ``call``, then ends the streamer, also after an error."""
    try:
        return call()
    finally:
        if streamer is not None:
            streamer.end()  # a thread may be waiting for its next text


@contextmanager
def attach(model: Any) -> Iterator[Any]:
    """Passes raw images and audio to decoders in plain ``model.generate`` and in pipelines.

    transformers encodes images and audio before a decoder starts. Inside the ``with`` block, every
    ``model.generate`` with a `Decoder` as ``custom_generate`` also passes it the raw inputs. The
    original ``model.generate`` is restored afterwards.

    Args:
        model: A model of transformers; for a pipeline, its attribute ``model``.

    Yields:
        The model.
    """
    stock, before = model.generate, vars(model).get("generate")

    @functools.wraps(stock)
    def generate_with_raw_inputs(*args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("custom_generate"), Decoder):
            kwargs["mm_inputs"] = _raw(model, args, kwargs)
            kwargs["mm_model"] = model
        return stock(*args, **kwargs)

    model.generate = generate_with_raw_inputs
    try:
        yield model
    finally:
        if before is None:
            del model.generate
        else:
            model.generate = before


def _raw(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the raw inputs among the arguments of ``generate``; ``mm_inputs`` override them."""
    raw = {name: kwargs[name] for name in _RAW if kwargs.get(name) is not None}
    if args and model.main_input_name in _RAW:
        raw[model.main_input_name] = args[0]
    raw |= kwargs.get("mm_inputs") or {}
    return raw or None
