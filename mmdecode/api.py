"""`generate` and `attach`: ``model.generate`` with a decoder that also reads the raw inputs.

Given a callable, transformers drops ``assistant_model`` and the tokenizer for a config's
``stop_strings``, and whoever reads a ``streamer`` waits for ever if preparation fails. `generate`
passes them on to the decoder, together with the raw inputs that some guides and drafters need.
`attach` does the latter for plain ``model.generate`` and for pipelines.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from transformers import StoppingCriteriaList

from mmdecode.decoder import Decoder
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.none import NoDraft
from mmdecode.engine.request import with_stop_strings
from mmdecode.engine.trace import Round
from mmdecode.errors import IncompatibleError, OptionError, UnknownNameError

_MODES = {"image": "mmdecode.image_ar.raster"}
"""Modes with their own loop around the decoder; imported on use, since they import this module.
"""

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
    **kwargs: Any,
) -> Any:
    """Calls ``model.generate`` with a decoder.

    Args:
        model: A model of transformers.
        *args: Passed on.
        mode: ``"text"``, or ``"image"`` for image tokens: see `mmdecode.image_ar.raster.generate`,
            which takes the other arguments but for ``stop_strings`` and returns another output.
        decoder: The decoder; ``None`` decodes without a draft.
        streamer: A transformers streamer; batch 1 only.
        stop_strings: Texts that end a row; need ``tokenizer``.
        tokenizer: For ``stop_strings``.
        draft_model: Shorthand for ``Decoder(draft=Assistant(draft_model))``; ``assistant_model``,
            as transformers names it, is the same.
        request: Names of the rows for keyed noise; default: a hash of their content.
        trace: A list to which the rounds of every row are added: tokens drafted and kept.
        **kwargs: Passed on.

    Returns:
        The result of ``model.generate``.

    Raises:
        OptionError: ``stop_strings`` without a tokenizer, or in image mode.
        UnknownNameError: There is no such mode.
        IncompatibleError: A streamer with several rows, or a draft model together with a draft.
    """
    decoder = decoder or Decoder()
    draft_model = draft_model or kwargs.pop("assistant_model", None)
    if draft_model is not None:
        if not isinstance(decoder.draft, NoDraft):
            raise IncompatibleError.between(
                "draft_model",
                f"draft {type(decoder.draft).__name__}",
                "a decoder has one draft",
                "drop one of them",
            )
        decoder = replace(decoder, draft=Assistant(draft_model))
    if mode != "text":
        if args or stop_strings is not None:
            raise OptionError(
                f"mode={mode!r} takes no stop_strings, and no arguments without a name: name what "
                "to draw"
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
    kwargs |= {
        "custom_generate": decoder,
        "mm_inputs": raw,
        "mm_request": request,
        "mm_model": model,
        "mm_streamer": streamer,
        "mm_trace": trace,
    }
    return _ended(streamer, functools.partial(model.generate, *args, **kwargs))


def _of_config(model: Any, kwargs: dict[str, Any]) -> str | list[str] | None:
    """The stop strings of the call's ``generation_config``, taken out of it.

    ``generate`` looks for their tokenizer before a decoder is asked, and has dropped it by then.

    Raises:
        OptionError: They stand in the model's own config, which only the caller may change.
    """
    if getattr(getattr(model, "generation_config", None), "stop_strings", None) is not None:
        raise OptionError(
            "model.generation_config holds stop_strings, for which generate finds no tokenizer "
            "once a decoder is given; set model.generation_config.stop_strings = None and pass "
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
    """Runs ``call``, then ends the streamer."""
    try:
        return call()
    finally:
        if streamer is not None:
            streamer.end()  # also after an error: somebody may be waiting for it


@contextmanager
def attach(model: Any) -> Iterator[Any]:
    """Lets decoders see raw images and audio in plain ``model.generate`` and in pipelines.

    transformers encodes them before a decoder starts. Inside the ``with`` block, every call of
    ``model.generate`` with a `Decoder` as ``custom_generate`` hands it the raw inputs too, as
    `generate` here does. Afterwards the model is as it was.

    Args:
        model: A model of transformers; of a pipeline, its ``model``.

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
    """Raw inputs among the arguments of ``generate``; the caller's ``mm_inputs`` come first."""
    raw = {name: kwargs[name] for name in _RAW if kwargs.get(name) is not None}
    if args and model.main_input_name in _RAW:
        raw[model.main_input_name] = args[0]
    raw |= kwargs.get("mm_inputs") or {}
    return raw or None
