"""Every refusal of the engine.

Before any model runs: settings and arguments of ``generate`` (`mmdecode.engine.settings`), inputs,
and parts that do not fit each other or the model. In each round: a proposal that is not of the
agreed kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from warnings import warn

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer

from mmdecode._compat import text_config
from mmdecode.engine import prefill
from mmdecode.engine.adapter import MAIN, Adapter, Prompt
from mmdecode.engine.attention import AttentionEdit
from mmdecode.engine.capabilities import Part, refuse_near_misses, refuse_other_kinds
from mmdecode.engine.contracts import (
    AcceptanceRule,
    BranchRunner,
    Drafter,
    DraftSession,
    Guide,
    Outcome,
    Requirements,
    StateEdit,
)
from mmdecode.engine.prefill import Cost, Pass
from mmdecode.engine.proposal import MAX_NODES, Kind, Proposal
from mmdecode.engine.settings import ARGUMENTS, SETTINGS, Refused, Verdict
from mmdecode.errors import IncompatibleError, InputError, OptionError
from mmdecode.runs.memory import refuse_beyond_memory

_SMALL = 2**26
"""Estimates below this many bytes are not compared with the free memory."""


def _refused(table: Mapping[str, Verdict]) -> dict[str, Refused]:
    return {name: verdict for name, verdict in table.items() if isinstance(verdict, Refused)}


_REFUSED_SETTINGS = _refused(SETTINGS)
_REFUSED_ARGUMENTS = _refused(ARGUMENTS) | {"token_healing": _REFUSED_SETTINGS["token_healing"]}


def refuse_settings(config: GenerationConfig) -> None:
    """Refuses settings of a call's config that a decoder cannot honour.

    Raises:
        IncompatibleError: A setting cannot be honoured; the message says what to do.
    """
    _raise_for(_REFUSED_SETTINGS, vars(config))


def refuse_arguments(given: Mapping[str, Any]) -> None:
    """Refuses arguments of ``generate`` that a decoder cannot honour.

    Raises:
        IncompatibleError: An argument cannot be honoured; the message says what to do.
    """
    positions = given.get("position_ids")
    if positions is not None and positions.ndim > 2:  # multimodal, read by the model's adapter
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
    """Refuses a model whose forward passes are not deterministic.

    Raises:
        IncompatibleError: It is in training mode, with dropout or without a cache.
    """
    if not model.training:
        return
    keeps_no_cache = any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    parts = (m.p for m in model.modules() if isinstance(m, torch.nn.Dropout) and m.training)
    configs = {id(m.config): vars(m.config) for m in model.modules() if hasattr(m, "config")}
    settings = [(name, value) for config in configs.values() for name, value in config.items()]
    rates = [value for name, value in settings if "drop" in name and isinstance(value, float)]
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
    """Refuses prompts whose ids are not known.

    Args:
        input_ids: Ids of the prompt, ``(B, P)``.
        inputs: Further arguments of the call.
        own_prompt: Whether the adapter makes the prompt, so that ``input_ids`` may be empty.

    Raises:
        IncompatibleError: The prompt is given as embeddings only.
    """
    if input_ids.shape[1] == 0 and not own_prompt:
        raise IncompatibleError(
            "the prompt came as inputs_embeds, without ids; drafts, processors and stop rules of a "
            "mmdecode decoder read ids: pass input_ids, and with them inputs_embeds if these "
            "differ from the embeddings of the ids, one for each"
        )
    embeds = inputs.get("inputs_embeds")
    if embeds is not None and embeds.shape[:2] != input_ids.shape:
        raise IncompatibleError(
            f"inputs_embeds of shape {tuple(embeds.shape)} came with ids of shape "
            f"{tuple(input_ids.shape)}; expected one per id, or leave inputs_embeds out"
        )


def _held(past: Any) -> int:
    """Number of tokens in a cache of transformers; ``None`` and empty caches hold 0."""
    if past is None:
        return 0
    parts = [
        getattr(past, name, None) for name in ("self_attention_cache", "cross_attention_cache")
    ]
    inner = [part for part in parts if part is not None] or getattr(past, "layers", None)
    if inner:
        return max(map(_held, inner))
    return int(past.get_seq_length()) if hasattr(past, "get_seq_length") else 0


def continued(past: Any, input_ids: Tensor) -> DynamicCache | None:
    """Returns the caller's cache if it holds tokens.

    Args:
        past: The call's ``past_key_values``.
        input_ids: The prompt, ``(B, P)``.

    Raises:
        IncompatibleError: It is no cache, has other rows than the prompt, holds tokens otherwise
            than a `DynamicCache`, or holds as many as the prompt has.
    """
    hint = (
        "leave past_key_values out and pass the whole prompt, earlier turns included, as input_ids"
    )
    if past is not None and not callable(getattr(past, "get_seq_length", None)):
        raise IncompatibleError(
            f"past_key_values of type {type(past).__name__} are not supported; {hint}"
        )
    count = _held(past)
    if not count:
        return None
    others = {type(layer).__name__ for layer in getattr(past, "layers", [past])}
    if not isinstance(past, DynamicCache) or others != {DynamicLayer.__name__}:
        raise IncompatibleError(
            f"past_key_values hold tokens ({count}) in layers of type {', '.join(sorted(others))}; "
            f"only a DynamicCache whose layers hold every token can be continued (DynamicCache() "
            f"without a config): {hint}"
        )
    (batch, width), rows = input_ids.shape, past.layers[0].keys.shape[0]
    if rows != batch:
        raise IncompatibleError(
            f"past_key_values hold {rows} rows, the prompt has {batch}; take or repeat rows of the "
            "cache first: past_key_values.batch_select_indices(rows) or "
            "batch_repeat_interleave(num_return_sequences)"
        )
    if count >= width:
        raise IncompatibleError(
            f"past_key_values hold {count} tokens, the prompt has {width}; pass the whole text as "
            "input_ids: what the cache holds, and at least one token after it"
        )
    return past


def refuse_positions(adapter: Adapter, prompt: int, limit: int) -> None:
    """Refuses a text longer than the model's position table.

    Args:
        adapter: Adapter of the model.
        prompt: Tokens of the prompt.
        limit: Most new tokens.

    Raises:
        InputError: The prompt alone is too long.
        OptionError: The prompt with the new tokens is too long.
    """
    positions, name = adapter.max_positions, type(adapter.model).__name__
    if positions is None:
        warn_beyond_training(adapter, prompt)
        return
    has = f"{name} has {positions} positions before its table ends or its frequencies change"
    if prompt >= positions:
        raise InputError(f"a prompt of {prompt} tokens; {has}: shorten the prompt")
    if prompt + limit > positions:
        raise OptionError(
            f"a prompt of {prompt} and up to {limit} new tokens; {has}: lower max_new_tokens, or "
            "decode with plain generate"
        )


def warn_beyond_training(adapter: Adapter, length: int, warned: int = 0) -> None:
    """Warns of a text longer than its model was trained for, if positions are unbounded.

    Args:
        adapter: Adapter of the model.
        length: Tokens of the text.
        warned: Length up to which a warning was already given.
    """
    made_for = length_made_for(adapter)
    if made_for is not None and warned <= made_for < length:
        warn(
            f"a text of {length} tokens; {type(adapter.model).__name__} was made for {made_for} "
            "(max_position_embeddings): what it writes there may make no sense",
            stacklevel=2,
        )


def length_made_for(adapter: Adapter) -> int | None:
    """Tokens of the longest text that a model was made for, from its config."""
    length = getattr(text_config(adapter.model), "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else None


def refuse_memory(adapter: Adapter, prompt: Prompt, passes: Sequence[Pass]) -> None:
    """Refuses a prompt for which a CPU has too little memory; CUDA raises by itself.

    Args:
        adapter: Adapter of the model.
        prompt: The prompt.
        passes: The passes that will read it.

    Raises:
        InputError: The estimate exceeds the free memory.
    """
    rows, width = prompt.ids.shape
    if prompt.ids.device.type != "cpu" or rows * width < prefill.LONG:
        return
    needed = Cost.of(adapter).of_passes(prompt, passes)
    if needed > _SMALL:
        what = f"a prompt of {width} tokens" + (f" in {rows} rows" if rows > 1 else "")
        refuse_beyond_memory(needed, what, "shorten it, or give fewer rows at once")


_BASES: dict[str, type[Part]] = {
    "draft": Drafter,
    "guide": Guide,
    "accept": AcceptanceRule,
    "adapter": Adapter,
    "runner": BranchRunner,
}
_MEMBERS = {
    "draft": ("begin",),
    "guide": ("neutral", "apply"),
    "accept": ("guarantee", "kinds", "modes", "__call__"),
    "adapter": ("model", "vocab", "num_layers", "forward", "head"),
    "runner": ("prefill", "score", "commit"),
}
"""Members that each kind of part must define itself."""


def refuse_no_part(part: str, given: Any) -> None:
    """Refuses an object that is not a part of the kind ``part``; ``None`` is a valid guide.

    A string is valid as ``accept``: names of rules are resolved later.

    Raises:
        OptionError: Its class does not inherit from the base of such parts, or lacks a member.
    """
    if given is None and part == "guide":
        return
    if isinstance(given, str) and part == "accept":
        return
    base = _BASES[part]
    if part == "draft" and isinstance(given, torch.nn.Module) and not isinstance(given, base):
        raise OptionError(
            f"draft={type(given).__name__} is a model, not a drafter: use "
            "mmdecode.generate(..., draft_model=small), or "
            "draft=mmdecode.draft.Assistant(small), where small is that model"
        )
    missing = [name for name in _MEMBERS[part] if _lacks(given, name, base)]
    if isinstance(given, type):
        why = "it is a class; make one"
    elif missing:
        why = f"no {', '.join(missing)}"
    elif not isinstance(given, base):
        why = f"its class {type(given).__name__} is no subclass of mmdecode.{base.__name__}"
    else:
        kind: Any = type(given)
        refuse_near_misses(tuple(vars(given)), kind)
        return refuse_other_kinds(vars(given), kind)
    hint = (
        f"make an object of a class that inherits from mmdecode.{base.__name__}"
        if part in ("adapter", "runner")
        else f"give a name as 'mmdecode methods {part}' lists them, with options as "
        f"name:key=value, or an object of a class that inherits from mmdecode.{base.__name__}"
    )
    raise OptionError(f"{part}={given!r} is no {part} ({why}); {hint}")


def _lacks(given: Any, name: str, base: type) -> bool:
    """Whether a part lacks a member, or only has the base's placeholder for it."""
    own = getattr(type(given), name, None)
    return not hasattr(given, name) or (own is not None and own is vars(base).get(name))


def refuse_no_session(drafter: Drafter, given: Any) -> DraftSession:
    """The session that a drafter's ``begin`` returned.

    Raises:
        OptionError: The object returned is no `DraftSession`, or was not initialised.
    """
    name = type(drafter).__name__
    if isinstance(given, DraftSession):
        if hasattr(given, "call"):
            return given
        raise OptionError(
            f"{name}.begin returned a {type(given).__name__} without its call; begin its __init__ "
            "with super().__init__(call)"
        )
    raise OptionError(
        f"{name}.begin returned {given!r}; expected an object of a class that inherits from "
        "mmdecode.DraftSession"
    )


def refuse_no_outcome(rule: AcceptanceRule, given: Any) -> Outcome:
    """The outcome that a rule returned.

    Raises:
        OptionError: The object returned is no `Outcome`.
    """
    if isinstance(given, Outcome):
        return given
    raise OptionError(
        f"{type(rule).__name__} returned {given!r}; expected a mmdecode.engine.contracts.Outcome"
    )


def refuse_lookaround(guide: Guide | None) -> None:
    """Refuses a guide that reads scores of earlier or later positions.

    Raises:
        IncompatibleError: The guide declares ``lookback`` or ``lookahead``.
    """
    if guide is not None and (guide.lookback or guide.lookahead):
        where = ["back"] * guide.lookback + ["ahead"] * guide.lookahead
        raise IncompatibleError.between(
            f"guide {type(guide).__name__}",
            "Decoder",
            f"the guide looks {' and '.join(where)}, but a round scores the root and drafted nodes "
            "only, each with its own prefix",
            "leave the guide out, or write it as a function of a node's own prefix and scores",
        )


def refuse_mode(rule: AcceptanceRule, do_sample: bool) -> None:
    """Refuses a rule that does not work in the call's mode, greedy or sampling.

    Raises:
        IncompatibleError: The mode is not among the rule's ``modes``.
    """
    mode = "sample" if do_sample else "greedy"
    if mode not in rule.modes:
        raise IncompatibleError.between(
            f"accept {type(rule).__name__}",
            f"do_sample={do_sample}",
            f"the rule works in mode {' and '.join(sorted(rule.modes))} only",
            "use accept='auto', which follows do_sample",
        )


def agreed_kind(rule: AcceptanceRule, draft: Drafter) -> Kind:
    """The kind of proposal that the rule prefers among those that the drafter makes.

    Raises:
        IncompatibleError: They have no kind in common.
    """
    for kind in rule.kinds:
        if kind in draft.kinds:
            return kind
    raise IncompatibleError.between(
        f"accept {type(rule).__name__}",
        f"draft {type(draft).__name__}",
        f"the rule takes proposals of kind {', '.join(rule.kinds)}, the draft makes "
        f"{', '.join(draft.kinds)}",
        f"use accept='auto', or {draft.capabilities.hint}",
    )


def refuse_guide(guide: Guide | None, needs: Requirements, adapter: Adapter) -> None:
    """Refuses a guide whose branches clash, or that needs more than the adapter provides.

    Raises:
        IncompatibleError: The message names both sides.
    """
    if guide is None:
        return
    name = f"guide {type(guide).__name__}"
    passes = [MAIN, *(s for s in guide.branches if s.build is None and s.model is None)]
    stages = {spec.name: spec.stage for spec in passes}
    for spec in guide.branches:
        replaced = spec.replaces_after_prefill
        sharing = [n for n, stage in stages.items() if stage == stages.get(replaced or "")]
        if len(sharing) > 1:
            raise IncompatibleError.between(
                name,
                "Decoder",
                f"branch {spec.name!r} replaces {replaced!r} after prefill, which shares a forward "
                f"pass with {', '.join(n for n in sharing if n != replaced)}",
                "give the other branches of its stage a later stage",
            )
    refuse_closed(name, adapter, guide.edits, needs)
    missing = [kind for kind in guide.requires_inputs if kind not in adapter.inputs]
    if missing:
        reads = " and ".join(sorted(adapter.inputs)) or "ids alone"
        raise IncompatibleError.between(
            name,
            adapter.name,
            f"the guide requires inputs of kind {' and '.join(missing)}, and this model reads "
            f"{reads} itself",
            f"use a model that reads {' and '.join(missing)}; one that hands such inputs to an "
            "inner model needs mmdecode.generate, or generate inside mmdecode.attach(model)",
        )


def refuse_closed(
    part: str, adapter: Adapter, edits: Sequence[AttentionEdit | StateEdit], needs: Requirements
) -> None:
    """Refuses a part that needs layers or attention of a model, if its adapter gives no access.

    Raises:
        IncompatibleError: The message names both.
    """
    inside = edits or needs.attention or needs.text_attention or needs.early_exit_logits
    if inside and not adapter.shows_inside:
        raise IncompatibleError.between(
            part,
            adapter.name,
            f"{type(adapter).__name__} gives no access to the model's layers and attention",
            "use it with a decoder-only or vision-language model",
        )


def refuse_rows(streamer: Any, batch: int) -> None:
    """Refuses a streamer for more than one row.

    Raises:
        IncompatibleError: The batch has several rows.
    """
    if streamer is not None and batch > 1:
        raise IncompatibleError(
            f"a streamer shows one row, the batch has {batch}; decode one row at a time"
        )


def refuse_proposal(proposal: Proposal, kind: Kind, draft: Drafter, rule: AcceptanceRule) -> None:
    """Refuses a proposal of another kind than agreed, or with too many nodes.

    Raises:
        IncompatibleError: It is of another kind.
        OptionError: It has more than `MAX_NODES` nodes.
    """
    if proposal.kind != kind:
        raise IncompatibleError.between(
            f"draft {type(draft).__name__}",
            f"accept {type(rule).__name__}",
            f"a proposal of kind {kind!r} was agreed, this one is {proposal.kind!r}",
            "repair the draft: call.plan.kind says which was agreed",
        )
    if proposal.size > MAX_NODES:
        raise OptionError(
            f"draft {type(draft).__name__} proposes {proposal.size} nodes; at most "
            f"{MAX_NODES} are scored at once: make its tree smaller"
        )
