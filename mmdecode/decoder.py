"""`Decoder`: a drafter, a guide and an acceptance rule, as ``custom_generate`` of transformers.

``model.generate`` prepares inputs, logits processors and stopping criteria. `Decoder` then finds
the adapter of the model, checks that model, options and parts fit, and runs the decoding loop of
`mmdecode.engine.loop`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList
from transformers.generation.logits_process import (
    ClassifierFreeGuidanceLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from mmdecode import registry
from mmdecode._compat import arguments_of_generate
from mmdecode.accept.exact import Coupled, GreedyMatch, SampleMatch
from mmdecode.accept.rejection import Rejection
from mmdecode.draft.none import NoDraft
from mmdecode.engine import attention, capture, checks, flex, request
from mmdecode.engine.adapter import Adapter
from mmdecode.engine.arena import Arena, aliases
from mmdecode.engine.attention import AttentionEdit
from mmdecode.engine.call import Call, DraftTarget, Plan, Rows
from mmdecode.engine.contracts import AcceptanceRule, Drafter, Guide, Requirements
from mmdecode.engine.loop import Run
from mmdecode.engine.output import Listener, Recorder, Stream, output
from mmdecode.engine.past import keep_text
from mmdecode.engine.processors import Processors, prefix_free
from mmdecode.engine.prompt_cache import PromptCache
from mmdecode.engine.proposal import MAX_NODES, Kind
from mmdecode.engine.runners import main_runner, runners_of
from mmdecode.engine.stats import Stats
from mmdecode.engine.stop import Stopping
from mmdecode.engine.trace import NoTrace, Round, Tracer
from mmdecode.errors import IncompatibleError, OptionError

if TYPE_CHECKING:
    from transformers import GenerationConfig, StoppingCriteriaList

MODES = ("auto", "fastest")


@dataclass(frozen=True, eq=False)
class Decoder:
    """A drafter, a guide and an acceptance rule, as a callable for ``generate``.

    A decoder is immutable and may be used by several threads at once;
    ``dataclasses.replace(decoder, draft=...)`` makes another decoder, with all checks.

    Args:
        draft: A `Drafter`, or its name with options (``"lookup:length=8"``); ``None``: no drafting.
        guide: A `Guide`, or its name with options (``"cfg:scale=3"``); ``None``: the model's own
            distribution.
        accept: A rule, its name, ``"auto"`` or ``"fastest"``. With ``auto``, greedy decoding
            accepts exact matches, and sampling uses the coupled rule: for one seed it gives the
            same tokens with any drafter and in any batch. With ``fastest``, sampling uses an exact
            rule that accepts more tokens, such as speculative sampling (rejection).
        seed: Seed of the sampling noise; ``None``: drawn per call from torch's global generator.
        compile: On CUDA, capture decoding rounds in CUDA graphs, which are kept, with their
            storage, for later calls of the same shape; elsewhere, compile the forward pass, which
            takes up to a minute per shape. A part that cannot be captured or compiled
            runs as usual, with a warning that says why. See `mmdecode.engine.capture`.
        draft_guided: Whether drafters that support it draft from the guided distribution instead
            of the model's; ``None``: only for image tokens. See `docs/guided_drafts.md`.
        flex: With ``compile`` on CUDA, compute attention in captured rounds by FlexAttention,
            which is compiled in the first call. Other models than decoder-only ones, and guides
            that edit attention, run as without it. See `mmdecode.engine.flex`.
        stats: Counters, to which every finished call adds its own; ``None``: new counters.
            Decoders made by ``dataclasses.replace`` share them.

    Raises:
        UnknownNameError: A name is not registered.
        IncompatibleError: The rule cannot verify this drafter's kind of proposals, or the guide
            needs logits of other positions than the current one.
    """

    draft: Drafter
    guide: Guide | None
    accept: AcceptanceRule | str
    seed: int | None
    compile: bool
    draft_guided: bool | None
    flex: bool
    stats: Stats
    _arena: Arena = field(init=False, repr=False, compare=False)

    def __init__(
        self,
        draft: Drafter | str | None = None,
        guide: Guide | str | None = None,
        accept: AcceptanceRule | str = "auto",
        seed: int | None = None,
        compile: bool = False,
        draft_guided: bool | None = None,
        flex: bool = False,
        stats: Stats | None = None,
    ) -> None:
        if draft is None:
            draft = NoDraft()
        if isinstance(accept, str) and accept not in MODES:
            accept = registry.create("accept", accept)
        made: dict[str, Any] = {
            "draft": registry.create("draft", draft) if isinstance(draft, str) else draft,
            "guide": registry.create("guide", guide) if isinstance(guide, str) else guide,
            "accept": accept,
        }
        for name, given in made.items():
            checks.refuse_no_part(name, given)
        if not isinstance(accept, str):
            checks.agreed_kind(accept, made["draft"])
        if seed is not None and (isinstance(seed, bool) or not hasattr(seed, "__index__")):
            raise OptionError(f"seed={seed!r}; expected a whole number, or None to draw one")
        checks.refuse_lookaround(made["guide"])
        made |= {"seed": seed, "compile": compile, "draft_guided": draft_guided, "flex": flex}
        for name, value in {**made, "stats": stats or Stats(), "_arena": Arena()}.items():
            object.__setattr__(self, name, value)

    @torch.no_grad()
    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        mm_inputs: Mapping[str, Any] | None = None,
        mm_request: Any = None,
        mm_streamer: Any = None,
        mm_model: Any = None,
        mm_adapter: Any = None,
        mm_trace: list[list[Round]] | None = None,
        mm_prompt_cache: PromptCache | None = None,
        stop_strings: str | list[str] | None = None,
        token_healing: bool | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Decodes a batch; ``generate`` calls it as its ``custom_generate``.

        Args:
            model: The model that decodes.
            input_ids: Prompt, padded on the left, ``(B, P)``.
            logits_processor: Logits processors and warpers of the call.
            stopping_criteria: Stopping criteria of the call.
            generation_config: Generation config of the call.
            mm_inputs: Raw inputs for guides and drafters, by name, with one entry per row or, for
                pixels, per image.
            mm_request: One name per row, which seeds its noise; ``None``: a hash of its content.
            mm_streamer: A streamer, for a batch of one row; the caller ends it. The argument
                ``streamer`` of ``generate`` is also found, and ended here.
            mm_model: The model that ``generate`` was called on, if ``model`` is a submodel of it.
            mm_adapter: An adapter to use instead of the registered one. It builds prompts itself,
                so that ``input_ids`` may be empty, ``(B, 0)``, for example for a model whose output
                vocabulary is not its input vocabulary.
            mm_prompt_cache: Prefixes of prompts to continue from, and to add to; see
                `mmdecode.engine.prompt_cache`.
            mm_trace: A list, to which a list of `mmdecode.engine.trace.Round` per row is appended;
                each round then waits for the device.
            stop_strings: Texts that end a row; they need ``tokenizer`` of ``generate``.
            token_healing: Not supported; raises an error if it is set.
            **model_kwargs: Inputs that ``generate`` prepared.

        Returns:
            Ids ``(B, P + new)``, or an output object if ``return_dict_in_generate`` is set.

        Raises:
            IncompatibleError: Beam search, or another setting that is not supported: see
                `mmdecode.engine.checks.SETTINGS`.
            OptionError: Stop strings are given without a tokenizer.
        """
        given = arguments_of_generate(model)
        streamer = given.get("streamer")
        try:
            checks.refuse_arguments({**given, "token_healing": token_healing})
            if stop_strings is not None:
                stopping_criteria = request.with_stop_strings(
                    stopping_criteria, stop_strings, given.get("tokenizer")
                )
            return self._decode(
                model,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                model_kwargs,
                mm_inputs=mm_inputs,
                mm_request=mm_request,
                mm_model=mm_model,
                mm_adapter=mm_adapter,
                trace=mm_trace,
                prompt_cache=mm_prompt_cache,
                past=given.get("past_key_values"),
                streamer=mm_streamer or streamer,
                greets=mm_streamer is not None,
            )
        finally:
            if streamer is not None:
                streamer.end()  # also after an error: a thread may be waiting for its next text

    def _decode(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        model_kwargs: Mapping[str, Any],
        *,
        mm_inputs: Mapping[str, Any] | None,
        mm_request: Any,
        mm_model: Any,
        mm_adapter: Any,
        trace: list[list[Round]] | None,
        prompt_cache: PromptCache | None,
        past: Any,
        streamer: Any,
        greets: bool,
    ) -> Any:
        """See `__call__`; with ``greets``, the streamer gets the prompt first."""
        checks.refuse_settings(config)
        checks.refuse_inputs(input_ids, model_kwargs, own_prompt=mm_adapter is not None)
        checks.refuse_training(model)
        processors, guide = take_over_guidance(logits_processor, self.guide)
        if guide is not None and guide.neutral:
            guide = None
        rule, kind = self.resolve_rule(bool(config.do_sample))
        static = self.compile and not capture.is_split(model)
        if static:  # the arena moves a call's tensors, but never the caller's
            input_ids, model_kwargs, mm_inputs = aliases((input_ids, model_kwargs, mm_inputs))
        seed = self.seed
        if seed is None:
            seed = int(torch.randint(2**62, ())) if config.do_sample else 0
        adapter = mm_adapter or registry.adapter_for(model, mm_model)
        if mm_adapter is not None or not isinstance(adapter, Adapter):
            checks.refuse_no_part("adapter", adapter)
        wanted = Requirements() if guide is None else guide.needs(adapter)
        checks.refuse_guide(guide, wanted, adapter)
        asked = request.request_of(
            input_ids,
            config,
            model_kwargs,
            seed=seed,
            inputs=mm_inputs,
            names=mm_request,
            criteria=criteria,
            named=bool(config.do_sample) or guide is not None,
            adapter=adapter,
        )
        shape = (input_ids.shape, asked.max_new_tokens, asked.do_sample, kind)
        mode = (torch.is_inference_mode_enabled(), torch.is_autocast_enabled())
        lease = self._arena.lease((id(model), *shape, *mode, *map(type, processors)))
        own = self.draft.needs(adapter)
        needs = own.union(wanted)
        plan = Plan(
            adapter=adapter,
            kind=kind,
            static_shapes=static,
            window_mode=own.window_modes.get(kind),
            drafter_invariant=rule.capabilities.drafter_invariant,
            draft_target=self._draft_target(guide, processors, mm_adapter is not None),
            lease=lease,
            past=checks.continued(model_kwargs.get("past_key_values"), input_ids),
            prompt_cache=prompt_cache if prompt_cache and prompt_cache.max_bytes else None,
        )
        # columns after the last token are scratch space for the tokens of a round
        room = asked.max_new_tokens + MAX_NODES + 1
        rows = Rows.of(input_ids, room, pad_id=request.pad_id(config))
        rows.even = rows.full = not static
        call = Call(request=asked, plan=plan, rows=rows)
        checks.refuse_positions(adapter, call.prompt_length, asked.max_new_tokens)
        checks.refuse_rows(streamer, call.batch)
        recorder = Recorder(config, call.batch)
        listeners: list[Listener] = [recorder] if recorder.rows else []
        if streamer is not None:
            listeners.append(Stream(streamer))
        tracer = NoTrace()
        if trace is not None:
            tracer = Tracer(guide, call.batch)
            listeners.append(tracer)
            trace.extend(tracer.rows)
        read = processors or recorder.rows or guide is not None or trace is not None
        parts = self.draft.capabilities, rule.capabilities
        needs = replace(needs, argmax_only=not read and all(part.argmax_only for part in parts))
        stats = self.stats.of_call()
        run = Run(
            call=call,
            drafter=self.draft,
            guide=guide,
            rule=rule,
            runners=runners_of(adapter, guide, needs, call, registry.adapter_for),
            processors=Processors(processors, adapter.node_processors()),
            stopping=Stopping(criteria, asked.eos_token_ids, asked.max_new_tokens),
            stats=stats,
            listeners=listeners,
            trace=tracer,
        )
        if greets:
            streamer.put(input_ids.cpu())
        switch = _attention(guide, needs, flex.NAME if self.flex and static else None)
        encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", 0))
        with lease, attention.switched(model, switch) if switch else nullcontext():
            cur_len = run.run()
            found = output(call, config, recorder, cur_len, encoder_decoder)
            if isinstance(past, DynamicCache) and not encoder_decoder:
                keep_text(past, main_runner(run.runners), call, cur_len)
                if config.return_dict_in_generate:
                    found.past_key_values = past
        stats.ran([lease])
        self.stats.merge(stats)
        checks.warn_beyond_training(adapter, call.prompt_length + cur_len, call.prompt_length)
        return found

    def _draft_target(
        self, guide: Guide | None, processors: LogitsProcessorList, images: bool
    ) -> DraftTarget:
        """Returns the distribution to draft from: guide, and processors that ignore the prefix.

        Guide and processors are left out for text drafters that do not follow a guide.
        """
        asked = images if self.draft_guided is None else self.draft_guided
        followed = guide if asked and self.draft.capabilities.follows_target else None
        warped = images or followed is not None
        return DraftTarget(guide=followed, warp=prefix_free(processors) if warped else None)

    def resolve_rule(self, do_sample: bool) -> tuple[AcceptanceRule, Kind]:
        """Returns the acceptance rule of a call, and the kind of proposals that it verifies."""
        if not isinstance(self.accept, str):
            checks.refuse_mode(self.accept, do_sample)
            return self.accept, checks.agreed_kind(self.accept, self.draft)
        rules: list[AcceptanceRule] = [GreedyMatch()]
        if do_sample:
            rules = [Coupled()] if self.accept == "auto" else [Rejection(), SampleMatch()]
        for rule in rules:
            if set(rule.kinds) & set(self.draft.kinds):
                return rule, checks.agreed_kind(rule, self.draft)
        raise IncompatibleError.between(
            f"accept={self.accept!r}",
            f"draft {type(self.draft).__name__}",
            f"no exact rule takes proposals of kind {', '.join(self.draft.kinds)}",
            "use accept='auto'",
        )


def take_over_guidance(
    processors: LogitsProcessorList, guide: Guide | None
) -> tuple[LogitsProcessorList, Guide | None]:
    """Replaces transformers' processor for classifier-free guidance by the guide ``cfg``.

    The processor has a cache that advances by one token per call and cannot be rolled back, so that
    with drafting it would silently change the text. The guide depends only on each node's prefix.
    Returns the other processors, and the guide.

    Raises:
        IncompatibleError: A guide is given too, or a processor watermarks with SynthID.
    """
    kept = LogitsProcessorList()
    for processor in processors:
        if isinstance(processor, ClassifierFreeGuidanceLogitsProcessor):
            raise IncompatibleError(
                f"a ClassifierFreeGuidanceLogitsProcessor of scale {processor.guidance_scale} "
                "expects a batch that holds every prompt twice; expected guidance as a branch: "
                "give the prompts once, and Decoder(guide='cfg:scale=...'), or guidance_scale=... "
                "to generate"
            )
        if isinstance(processor, SynthIDTextWatermarkLogitsProcessor):
            raise IncompatibleError(
                "the SynthID watermark keeps state from token to token and cannot be evaluated at "
                "drafted nodes; drop watermarking_config or custom_generate"
            )
        if not isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
            kept.append(processor)
            continue
        if guide is not None and not guide.neutral:
            raise IncompatibleError.between(
                f"guidance_scale={processor.guidance_scale}",
                f"guide {type(guide).__name__}",
                "each would set the distribution",
                "leave out either",
            )
        context = processor.unconditional_context
        guide = registry.create(
            "guide",
            "cfg",
            scale=processor.guidance_scale,
            negative_ids=context["input_ids"],
            negative_mask=context["attention_mask"],
        )
    return kept, guide


def _attention(guide: Guide | None, needs: Requirements, usual: str | None) -> str | None:
    """Returns the name of the attention function of a call; ``None``: the model's own.

    Args:
        guide: The guide, which may edit attention.
        needs: Internals that the parts read; attention may be among them.
        usual: The name where attention weights are neither edited nor read.
    """
    edits = [edit for edit in (guide.edits if guide else ()) if isinstance(edit, AttentionEdit)]
    return attention.NAME if edits or needs.attention or needs.text_attention else usual
