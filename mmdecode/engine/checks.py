"""What is refused, before any model runs."""

from __future__ import annotations

from typing import Any
from warnings import warn

from mmdecode._compat import attention_implementation
from mmdecode.engine.cache import bucket
from mmdecode.engine.contracts import Adapter, Prompt
from mmdecode.errors import InputError, OptionError
from mmdecode.runs.memory import prompt_bytes, refuse_beyond_memory

_SMALL = 2**26
"""Bytes for which nobody asks the system what is free."""
_MOST_TIMES = 100
"""How many times the length that a model was made for a prompt may have."""


def refuse_positions(adapter: Adapter, prompt: int, limit: int) -> None:
    """Refuses a prompt of ``prompt`` tokens, or with it ``limit`` new ones, that has no positions.

    Raises:
        InputError: The prompt alone is too long, or far beyond all that the model was made for.
        OptionError: With the new tokens it is.
    """
    places, name = adapter.max_positions, type(adapter.model).__name__
    if places is None:
        made_for = _made_for(adapter)
        if made_for is not None and prompt > _MOST_TIMES * made_for:
            raise InputError(
                f"a prompt of {prompt} tokens; {name} was made for {made_for} "
                f"(max_position_embeddings), and more than {_MOST_TIMES} times that is no text for "
                "it: shorten the prompt"
            )
        warn_beyond_training(adapter, prompt)
        return
    has = f"{name} has {places} positions before its table ends or its frequencies change"
    if prompt >= places:
        raise InputError(f"a prompt of {prompt} tokens; {has}: shorten the prompt")
    if prompt + limit > places:
        raise OptionError(
            f"a prompt of {prompt} and up to {limit} new tokens; {has}: lower max_new_tokens, or "
            "decode with plain generate"
        )


def warn_beyond_training(adapter: Adapter, length: int, warned: int = 0) -> None:
    """Warns of a text that is longer than what its model was made for, though it has positions.

    Args:
        adapter: Of the model.
        length: Tokens of the text.
        warned: Tokens of it of which nothing is said any more.
    """
    made_for = _made_for(adapter)
    if made_for is not None and warned <= made_for < length:
        warn(
            f"a text of {length} tokens; {type(adapter.model).__name__} was made for {made_for} "
            "(max_position_embeddings): what it writes there may make no sense",
            stacklevel=2,
        )


def _made_for(adapter: Adapter) -> int | None:
    length = getattr(_text_config(adapter), "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else None


def refuse_memory(adapter: Adapter, prompt: Prompt) -> None:
    """Refuses a prompt that a CPU has no memory to read; CUDA says so itself, in time.

    Raises:
        InputError: An estimate exceeds what is free.
    """
    config = _text_config(adapter)
    if prompt.ids.device.type != "cpu" or config is None:
        return
    rows, width = prompt.ids.shape
    needed = prompt_bytes(
        config,
        rows,
        width,
        bucket(width),
        adapter.model.dtype.itemsize,
        masked=not adapter.masks_itself(prompt) or not bool(prompt.mask.all()),
        eager=attention_implementation(config) == "eager",
    )
    if needed > _SMALL:
        what = f"a prompt of {width} tokens" + (f" in {rows} rows" if rows > 1 else "")
        refuse_beyond_memory(needed, what, "shorten it, or give fewer rows at once")


def _text_config(adapter: Adapter) -> Any:
    whole = getattr(adapter.model, "config", None)
    choose = getattr(whole, "get_text_config", None)
    return choose(decoder=True) if choose is not None else None
