"""`generate`: ``model.generate`` with a decoder, and with what a plain callable is not given.

transformers silently drops ``streamer``, ``assistant_model`` and ``tokenizer`` when it is handed a
callable, and cannot resolve ``stop_strings`` without a tokenizer. This wrapper gives them to the
decoder, and keeps the raw inputs for guides that need them.
"""

from __future__ import annotations

from typing import Any

from transformers import StoppingCriteriaList, StopStringCriteria

from mmdecode.draft.assistant import Assistant
from mmdecode.engine.decoder import Decoder, NoDraft
from mmdecode.errors import IncompatibleError, OptionError

_RAW = ("pixel_values", "input_features", "input_values")


def generate(
    model: Any,
    *args: Any,
    decoder: Decoder | None = None,
    streamer: Any = None,
    stop_strings: str | list[str] | None = None,
    tokenizer: Any = None,
    draft_model: Any = None,
    request: Any = None,
    **kwargs: Any,
) -> Any:
    """Calls ``model.generate`` with a decoder.

    Args:
        model: A model of transformers.
        *args: Passed on.
        decoder: The decoder; ``None`` decodes without a draft.
        streamer: A transformers streamer; batch 1 only.
        stop_strings: Texts that end a row; need ``tokenizer``.
        tokenizer: For ``stop_strings``.
        draft_model: Shorthand for ``Decoder(draft=Assistant(draft_model))``; ``assistant_model``,
            as transformers names it, is the same.
        request: Names of the rows for keyed noise; default: a hash of their content.
        **kwargs: Passed on.

    Returns:
        What ``model.generate`` returns.

    Raises:
        OptionError: ``stop_strings`` without a tokenizer.
        IncompatibleError: A streamer with several rows, or a draft model beside a draft.
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
        joined = Decoder(Assistant(draft_model), decoder.guide, decoder.accept, decoder.seed)
        joined.stats = decoder.stats
        joined.trace = decoder.trace
        decoder = joined
    if stop_strings is not None:
        if tokenizer is None:
            raise OptionError("stop_strings were given without a tokenizer; pass tokenizer=...")
        criteria = StoppingCriteriaList(kwargs.pop("stopping_criteria", None) or [])
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
        kwargs["stopping_criteria"] = criteria
    raw = {name: kwargs[name] for name in _RAW if kwargs.get(name) is not None}
    if args and model.main_input_name in _RAW:
        raw[model.main_input_name] = args[0]
    raw |= kwargs.pop("mm_inputs", None) or {}
    try:
        return model.generate(
            *args,
            custom_generate=decoder,
            mm_inputs=raw or None,
            mm_request=request,
            mm_streamer=streamer,
            **kwargs,
        )
    finally:
        if streamer is not None:
            streamer.end()  # also after an error: somebody may be waiting for it
