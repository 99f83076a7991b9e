"""How a decoder treats every setting and argument of ``generate`` of transformers.

`SETTINGS` and `ARGUMENTS` say for each whether a decoder honours it, whether it has no effect, or
why it is refused. `mmdecode.engine.checks` refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple


class Refused(NamedTuple):
    """Refusal of a setting or argument.

    Attributes:
        because: Why it is refused and what to do, after its name.
        neutral: Values that are accepted since they ask for nothing, in addition to ``None``.
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
"""Arguments of ``generate`` that are not in its config, and model inputs that a decoder makes
itself."""
