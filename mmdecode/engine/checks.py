"""What is refused, before any model runs.

`SETTINGS` and `ARGUMENTS` say of everything that ``generate`` of transformers takes whether a
decoder honours it, whether it has no effect, or why it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple
from warnings import warn

import torch
from torch import Tensor
from transformers import GenerationConfig

from mmdecode._compat import attention_implementation
from mmdecode.engine.cache import bucket
from mmdecode.engine.contracts import Adapter, Prompt
from mmdecode.errors import IncompatibleError, InputError, OptionError
from mmdecode.runs.memory import prompt_bytes, refuse_beyond_memory

_SMALL = 2**26
"""Bytes for which nobody asks the system what is free."""


class Refused(NamedTuple):
    """Why something that ``generate`` takes is refused, and what to do.

    ``neutral`` are the values that ask for nothing, beside ``None``.
    """

    because: str
    neutral: tuple[Any, ...] = (False,)


Verdict = Literal["honoured", "no effect"] | Refused

_ASSISTED = (
    "asks for assisted generation of transformers, which a custom decoder replaces; draft with it: "
)
_METHOD = "asks for another decoding method of transformers, which a custom decoder replaces; "
_DROP = "leave it out, or drop custom_generate"

SETTINGS: Mapping[str, Verdict] = {
    # length
    "max_length": "honoured",
    "max_new_tokens": "honoured",
    "min_length": "honoured",
    "min_new_tokens": "honoured",
    "max_time": "honoured",
    "stop_strings": "honoured",
    "early_stopping": "no effect",  # ends beams
    # method
    "do_sample": "honoured",
    "num_beams": Refused(
        "does not fit a mmdecode decoder, which decodes single sequences; pass num_beams=1 (the "
        "transformers ASR pipeline sets 5: give generate_kwargs={'num_beams': 1, ...}), or drop "
        "custom_generate to search with beams",
        (1,),
    ),
    "num_beam_groups": Refused("groups beams, and a decoder has none; " + _DROP, (1,)),
    "diversity_penalty": "no effect",  # of groups of beams
    "length_penalty": "no effect",  # of beams
    "constraints": Refused(
        "asks for a search with beams under constraints, so they would not be met; drop "
        "custom_generate, or forbid tokens by prefix_allowed_tokens_fn",
        ([],),
    ),
    "force_words_ids": Refused(
        "asks for a search with beams that holds these words, so they would be missing; drop "
        "custom_generate, or steer by sequence_bias or prefix_allowed_tokens_fn",
        ([],),
    ),
    "penalty_alpha": Refused(
        _METHOD + "drop penalty_alpha or custom_generate, or use guide='contrastive'", (0,)
    ),
    "dola_layers": Refused(_METHOD + "drop dola_layers or custom_generate"),
    "low_memory": Refused("belongs to contrastive search of transformers; " + _DROP),
    # the cache, which is the decoder's own
    "use_cache": Refused(
        "does not fit a mmdecode decoder, which keeps a cache of its own; leave use_cache out",
        (True,),
    ),
    "cache_implementation": Refused(
        "asks for a cache of transformers, and a mmdecode decoder keeps one of its own, as large "
        "as what it holds and on the model's device; " + _DROP,
        ("dynamic", "static", "sliding_window", "hybrid", "hybrid_chunked"),
    ),
    "cache_config": "no effect",  # of a quantised cache
    "max_cache_len": "no effect",  # of a static cache: storage grows as it is needed
    "prefill_chunk_size": Refused("splits the prompt, which a decoder reads in one pass; " + _DROP),
    "compile_config": "no effect",  # of a static cache: see Decoder(compile=True)
    "disable_compile": "no effect",
    "continuous_batching_config": "no effect",  # read by generate_batch alone
    # the distribution
    "temperature": "honoured",
    "top_k": "honoured",
    "top_p": "honoured",
    "min_p": "honoured",
    "top_h": "honoured",
    "typical_p": "honoured",
    "epsilon_cutoff": "honoured",
    "eta_cutoff": "honoured",
    "repetition_penalty": "honoured",
    "encoder_repetition_penalty": "honoured",
    "no_repeat_ngram_size": "honoured",
    "encoder_no_repeat_ngram_size": "honoured",
    "bad_words_ids": "honoured",
    "renormalize_logits": "honoured",
    "forced_bos_token_id": "honoured",
    "forced_eos_token_id": "honoured",
    "remove_invalid_values": "honoured",
    "exponential_decay_length_penalty": "honoured",
    "suppress_tokens": "honoured",
    "begin_suppress_tokens": "honoured",
    "sequence_bias": "honoured",
    "guidance_scale": "honoured",
    "watermarking_config": "honoured",  # SynthID's is refused with the processors
    # what comes in and out
    "token_healing": Refused(
        "needs the tokenizer, which generate does not hand on; heal the prompt first: "
        "model.heal_tokens(input_ids, tokenizer)"
    ),
    "num_return_sequences": "honoured",
    "output_scores": "honoured",
    "output_logits": "honoured",
    "output_attentions": Refused(
        "is not recorded by a drafted loop; ask for output_scores or output_logits, or run a "
        "forward pass over the result"
    ),
    "output_hidden_states": Refused(
        "is not recorded by a drafted loop; ask for output_scores or output_logits, or run a "
        "forward pass over the result"
    ),
    "return_dict_in_generate": "honoured",
    "pad_token_id": "honoured",
    "bos_token_id": "honoured",
    "eos_token_id": "honoured",
    "decoder_start_token_id": "honoured",
    # assisted generation
    "use_mtp": Refused(_ASSISTED + "Decoder(draft=...), see `mmdecode methods draft`"),
    "prompt_lookup_num_tokens": Refused(_ASSISTED + "Decoder(draft='lookup:length=...')"),
    "assistant_early_exit": Refused(_ASSISTED + "Decoder(draft='layer_skip')"),
    "speculation_type": Refused(_ASSISTED + "Decoder(draft=...), see `mmdecode methods draft`"),
    "is_assistant": Refused(
        "marks a model that assists another, which a decoder does not; " + _DROP
    ),
    "num_assistant_tokens": "no effect",  # read with an assistant alone, which is refused
    "num_assistant_tokens_schedule": "no effect",
    "assistant_confidence_threshold": "no effect",
    "max_matching_ngram_size": "no effect",
    "assistant_lookbehind": "no effect",
    "target_lookbehind": "no effect",
    "assistant_ensemble_weight": "no effect",
    # records of where a config comes from
    "transformers_version": "no effect",
    "_commit_hash": "no effect",
    "_from_model_config": "no effect",
}
"""Fields of a ``GenerationConfig``."""

_DRAFT_MODEL = (
    "is not handed to a decoder by generate; draft with it: "
    "Decoder(draft=mmdecode.draft.Assistant(assistant_model)), or call mmdecode.generate"
)

ARGUMENTS: Mapping[str, Verdict] = {
    "inputs": "honoured",
    "generation_config": "honoured",
    "logits_processor": "honoured",
    "stopping_criteria": "honoured",
    "prefix_allowed_tokens_fn": "honoured",
    "negative_prompt_ids": "honoured",
    "negative_prompt_attention_mask": "honoured",
    "custom_generate": "honoured",
    "streamer": "honoured",
    "tokenizer": "honoured",  # for stop_strings
    "assistant_model": Refused(_DRAFT_MODEL),
    "assistant_tokenizer": Refused(_DRAFT_MODEL),
    "synced_gpus": Refused(
        "lets every process run as long as the longest, which a decoder does not; decode with "
        "plain generate, or gather the model's weights in each process"
    ),
    "trust_remote_code": "no effect",  # of a custom_generate that is named, not given
    "position_ids": Refused(
        "was given, and a decoder counts positions itself, from the attention mask; leave it out"
    ),
    "decoder_position_ids": Refused(
        "was given, and a decoder counts positions itself, from the attention mask; leave it out"
    ),
    "decoder_inputs_embeds": Refused(
        "stands for a prompt whose ids are not known; pass decoder_input_ids"
    ),
}
"""Arguments of ``generate`` beside these, and inputs of models that a decoder makes itself."""


def _refused(table: Mapping[str, Verdict]) -> dict[str, Refused]:
    return {name: verdict for name, verdict in table.items() if isinstance(verdict, Refused)}


_REFUSED_SETTINGS = _refused(SETTINGS)
_REFUSED_ARGUMENTS = _refused(ARGUMENTS) | {"token_healing": _REFUSED_SETTINGS["token_healing"]}


def refuse_settings(config: GenerationConfig) -> None:
    """Refuses what a call's config asks for and a decoder cannot do.

    Raises:
        IncompatibleError: Named, with what to do.
    """
    _raise_for(_REFUSED_SETTINGS, vars(config))


def refuse_arguments(given: Mapping[str, Any]) -> None:
    """Refuses arguments of ``generate`` that a decoder cannot honour.

    Raises:
        IncompatibleError: Named, with what to do.
    """
    places = given.get("position_ids")
    if places is not None and places.ndim > 2:  # of images: their adapter reads them
        given = {name: value for name, value in given.items() if name != "position_ids"}
    _raise_for(_REFUSED_ARGUMENTS, given)


def _raise_for(refused: Mapping[str, Refused], given: Mapping[str, Any]) -> None:
    for name, verdict in refused.items():
        value = given.get(name)
        if value is None:
            continue
        plain = isinstance(value, (bool, int, float, str, list))
        if not (plain and value in verdict.neutral):
            shown = f"{name}={value!r}" if plain else name
            raise IncompatibleError(f"{shown} {verdict.because}")


def refuse_training(model: Any) -> None:
    """Refuses a model whose passes differ from one to the next.

    Raises:
        IncompatibleError: It is in training mode, and drops states, layers or its cache.
    """
    if not model.training:
        return
    keeps_no_cache = any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    parts = (m.p for m in model.modules() if isinstance(m, torch.nn.Dropout) and m.training)
    configs = {id(m.config): vars(m.config) for m in model.modules() if hasattr(m, "config")}
    said = [(name, value) for config in configs.values() for name, value in config.items()]
    rates = [value for name, value in said if "drop" in name and isinstance(value, float)]
    if keeps_no_cache or any(rate > 0 for rate in (*parts, *rates)):
        raise IncompatibleError(
            f"{type(model).__name__} is in training mode, where "
            + (
                "checkpointing keeps no cache"
                if keeps_no_cache
                else "dropout makes every pass another"
            )
            + ", so that no draft can be checked; call model.eval()"
        )


def refuse_inputs(input_ids: Tensor, inputs: Mapping[str, Any], own_prompt: bool) -> None:
    """Refuses prompts that are not told by ids alone; ``own_prompt``: an adapter makes it.

    Raises:
        IncompatibleError: Tokens are in a cache already, or came as embeddings.
    """
    past = inputs.get("past_key_values")
    if past is not None and not callable(getattr(past, "get_seq_length", None)):
        raise IncompatibleError(
            f"past_key_values of type {type(past).__name__} are not supported; leave "
            "past_key_values out and pass the whole prompt as input_ids"
        )
    held = 0 if past is None else _held(past)
    if held:
        raise IncompatibleError(
            f"past_key_values already hold tokens ({held}); a mmdecode decoder keeps a cache of "
            "its own, in which each row grows by itself, and cannot go on from one of "
            "transformers: leave past_key_values out and pass the whole prompt, earlier turns "
            "included, as input_ids"
        )
    if input_ids.shape[1] == 0 and not own_prompt:
        raise IncompatibleError(
            "the prompt came as inputs_embeds, without ids; drafts, processors and stop rules of a "
            "mmdecode decoder read ids: pass input_ids, beside inputs_embeds if these differ from "
            "the embeddings of the ids, one for each"
        )
    embeds = inputs.get("inputs_embeds")
    if embeds is not None and embeds.shape[:2] != input_ids.shape:
        raise IncompatibleError(
            f"inputs_embeds of shape {tuple(embeds.shape)} came beside ids of shape "
            f"{tuple(input_ids.shape)}; expected one per id, or leave inputs_embeds out"
        )


def _held(past: Any) -> int:
    """Tokens in a cache of transformers, in whichever of its parts and layers they are."""
    both = ("self_attention_cache", "cross_attention_cache")
    parts = [getattr(past, name) for name in both if hasattr(past, name)]
    parts = parts or getattr(past, "layers", None) or [past]
    if parts == [past]:
        return int(past.get_seq_length()) if hasattr(past, "get_seq_length") else 0
    return max(map(_held, parts))


def refuse_positions(adapter: Adapter, prompt: int, limit: int) -> None:
    """Refuses a prompt of ``prompt`` tokens, or with it ``limit`` new ones, that has no positions.

    Raises:
        InputError: The prompt alone is too long.
        OptionError: With the new tokens it is.
    """
    places, name = adapter.max_positions, type(adapter.model).__name__
    if places is None:
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
    made_for = length_made_for(adapter)
    if made_for is not None and warned <= made_for < length:
        warn(
            f"a text of {length} tokens; {type(adapter.model).__name__} was made for {made_for} "
            "(max_position_embeddings): what it writes there may make no sense",
            stacklevel=2,
        )


def length_made_for(adapter: Adapter) -> int | None:
    """Tokens of the longest text that a model was made for, as its config says."""
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
