"""The `Request` of a call of ``generate``: prompt, limits, keys of its rows' noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from mmdecode.engine.call import Request
from mmdecode.engine.noise import Noise, request_key
from mmdecode.errors import IncompatibleError, OptionError


def with_stop_strings(
    criteria: StoppingCriteriaList, strings: str | list[str], tokenizer: Any
) -> StoppingCriteriaList:
    """The criteria, and one that ends a row whose text contains one of the strings.

    Raises:
        OptionError: There is no tokenizer.
    """
    if tokenizer is None:
        raise OptionError(
            f"stop_strings={strings!r} need a tokenizer, and none came with them: pass "
            "tokenizer=..., and if you did, call mmdecode.generate(model, ..., decoder=decoder, "
            "stop_strings=..., tokenizer=...)"
        )
    return StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, strings)])


def token_ids(value: Any) -> list[int]:
    """An id, a list of ids, a tensor or ``None``, as a list."""
    if value is None:
        return []
    if isinstance(value, Tensor):
        return [int(v) for v in value.reshape(-1).tolist()]
    return [int(v) for v in value] if isinstance(value, (list, tuple)) else [int(value)]


def up_to_end(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """Generated tokens up to the first end token, which is included."""
    lengths = (length for length, token in enumerate(tokens, 1) if token in ends)
    return tokens[: next(lengths, None)]


def end_ids(
    criteria: StoppingCriteriaList, config: GenerationConfig, device: torch.device
) -> Tensor:
    """Ids that end a row, ``(n,)``.

    End tokens of the caller's own criteria replace those of the config, as in transformers.
    """
    own = [c.eos_token_id for c in criteria if type(c) is EosTokenCriteria]
    ends = [i for value in own or [config.eos_token_id] for i in token_ids(value)]
    return torch.tensor(ends, dtype=torch.long, device=device)


def request_of(
    input_ids: Tensor,
    config: GenerationConfig,
    model_kwargs: Mapping[str, Any],
    *,
    seed: int,
    inputs: Mapping[str, Any] | None,
    names: Any,
    criteria: StoppingCriteriaList,
    named: bool,
    adapter: Any,
) -> Request:
    """The request of a call of ``generate``.

    Args:
        input_ids: Prompt, ``(B, P)``.
        config: Config of the call.
        model_kwargs: The model's arguments as ``generate`` prepared them.
        seed: Seed of the keyed noise.
        inputs: Raw inputs by name.
        names: The caller's names of the rows; ``None``: rows are named by their content.
        criteria: The caller's stopping criteria.
        named: Whether any part uses the rows' noise.
        adapter: Adapter of the model.

    Raises:
        OptionError: There is no room for a token, or names do not match the rows.
        IncompatibleError: A prompt is padded on the right.
    """
    width = input_ids.shape[1]
    lengths = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
    most = min([int(config.max_length), *lengths]) - width
    if most < 1:
        raise OptionError(
            f"max_length={config.max_length} leaves no room after a prompt of {width} tokens; "
            "raise max_length or set max_new_tokens"
        )
    mask = model_kwargs.get("decoder_attention_mask")
    if mask is None and "encoder_outputs" not in model_kwargs:
        mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else left_padded(mask)
    inputs = dict(inputs or {})
    keys = [0] * len(input_ids)
    if named:
        keys = _requests(input_ids, mask, config, inputs, names, adapter)
    return Request(
        prompt_ids=input_ids,
        prompt_mask=mask.bool(),
        max_new_tokens=most,
        eos_token_ids=end_ids(criteria, config, input_ids.device),
        noise=Noise.of(seed, keys, input_ids.device),
        do_sample=bool(config.do_sample),
        num_return_sequences=int(config.num_return_sequences or 1),
        inputs=inputs,
        model_kwargs=model_kwargs,
    )


def left_padded(mask: Tensor) -> Tensor:
    """An attention mask as bool, checked to be padded on the left.

    Raises:
        IncompatibleError: A row has padding after a token.
    """
    mask = mask.bool()
    if bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise IncompatibleError(
            "the attention mask has padding on the right or in the middle of a row; pad prompts on "
            "the left (tokenizer.padding_side = 'left')"
        )
    return mask


def pad_id(config: GenerationConfig) -> int:
    """The id that fills a row after its end: the padding token, else the first end token."""
    ids = token_ids(config.pad_token_id) or token_ids(config.eos_token_id)
    return ids[0] if ids else 0


_CONTENT = ("input_features", "input_values")


def _requests(
    ids: Tensor,
    mask: Tensor,
    config: GenerationConfig,
    mm_inputs: dict[str, Any],
    given: Any,
    adapter: Any,
) -> list[int]:
    """Noise keys, one per row: from the caller's name or the row's content, and its return index.

    The content is the ids, raw audio if there is one entry per row, and images as the adapter
    assigns them to rows; inputs that only a drafter reads never count. Whisper's own ``generate``
    passes no audio on and drops rows between fallback attempts: rows that cannot be distinguished
    share their noise, which does not change the distribution of each row. To avoid this, name the
    rows, or use the Transcriber.
    """
    num_return_sequences = int(config.num_return_sequences or 1)
    if given is not None:
        names = [given] if isinstance(given, (str, int, bytes)) else list(given)
        if len(names) * num_return_sequences == len(ids):
            names = [name for name in names for _ in range(num_return_sequences)]
        if len(names) != len(ids):
            raise OptionError(
                f"mm_request names {len(names)} requests for {len(ids)} rows; give one per row"
            )
        return [request_key(name, row % num_return_sequences) for row, name in enumerate(names)]
    known = {name: mm_inputs[name] for name in _CONTENT if name in mm_inputs}
    known = {
        name: value
        for name, value in known.items()
        if len(value) * num_return_sequences == len(ids)
    }
    seen = adapter.contents(mm_inputs, ids[::num_return_sequences])
    keys = []
    rows, masks = ids.tolist(), mask.bool().tolist()
    for row, (tokens, real) in enumerate(zip(rows, masks, strict=True)):
        parts: list[Any] = [t for t, r in zip(tokens, real, strict=True) if r]
        for name, value in known.items():
            parts += [name, _bytes(value[row // num_return_sequences])]
        parts += [_bytes(image) for image in seen[row // num_return_sequences]]
        keys.append(request_key(*parts, row % num_return_sequences))
    return keys


def _bytes(item: Any) -> bytes:
    if isinstance(item, str):
        return item.encode()
    if not isinstance(item, Tensor):
        item = torch.from_numpy(np.ascontiguousarray(item))
    return item.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
