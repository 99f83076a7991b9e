"""Drafting by a smaller model with the same vocabulary, one token after the other.

Each round begins with a pass of the drafting model over the last two committed tokens. This pass
overwrites the cache entries of rejected tokens, and adds the last token of a fully accepted draft,
which the drafting model has not read yet. All rows are therefore treated alike.

A text-only drafter for a vision-language model reads only the text tokens of the prompt, at
consecutive positions; its drafts do not depend on the image.

Sources: Leviathan et al. 2023, arXiv:2211.17192; Gagrani et al. 2024, arXiv:2404.08856 (a language
model drafts for a vision-language model). A Whisper assistant reads the target's encoder states
when both have the same width (distil-Whisper shares the encoder).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from mmdecode import registry
from mmdecode.checkpoints import code_trusted, config_of, loading, local_path
from mmdecode.draft.target import TargetDistribution, branches_of, noise_of, why_unguided
from mmdecode.engine import host
from mmdecode.engine.adapter import MAIN, BranchSpec
from mmdecode.engine.branches import ModelRunner
from mmdecode.engine.cache import bucket
from mmdecode.engine.call import Call, DraftTarget
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.engine.contracts import Block, BranchOutput, Drafter, DraftSession, Guide
from mmdecode.engine.masks import chain
from mmdecode.engine.proposal import Kind, Proposal
from mmdecode.errors import IncompatibleError, InputError, MMDecodeError, OptionError


class Assistant(Drafter):
    """Drafts ``length`` tokens per round with a second, smaller model.

    Args:
            model: The drafting model, with the target's vocabulary, or its name as `mmdecode.load`
            takes it.
        length: Number of tokens drafted per round; 0 drafts nothing.
        guide: Guide applied to the draft's logits; the drafting model runs its branches. ``None``:
            the call's guide. It must not edit attention or hidden states of the model.
        warp: Change to the draft's logits before a token is chosen, such as a temperature;
            ``None``: the logits warpers of the call.
        text_only: Whether image tokens are left out of the prompt; ``None``: they are if the target
            reads images and ``model`` does not.
        max_rejection_probability: Drafting ends in a row after the token at which the estimated
            probability that any drafted token is rejected exceeds this value; see `Going`. With 1
            all ``length`` tokens are drafted.

    The acceptance rule decides the kind of proposal: argmax tokens (``deterministic``), samples
    with their distribution (``iid``), or the argmax of log q plus the target's own Gumbel noise
    (``coupled``).

    Raises:
        InputError: There is no checkpoint of that name.
    """

    summary = "a smaller model drafts a chain"
    source = "Leviathan et al. 2023"
    kinds: tuple[Kind, ...] = ("deterministic", "iid", "coupled")
    # its cache lacks tokens that another drafter proposed
    capabilities = DrafterCapabilities(
        graph_safe=True, composable=False, follows_target=True, argmax_only=True
    )

    def __init__(
        self,
        model: Any,
        length: int = 5,
        guide: Guide | None = None,
        warp: Callable[[Tensor], Tensor] | None = None,
        text_only: bool | None = None,
        max_rejection_probability: float = 1.0,
    ) -> None:
        if length < 0 or not 0 <= max_rejection_probability <= 1:
            raise OptionError(
                f"length={length}, max_rejection_probability={max_rejection_probability}; expected "
                "length >= 0 and a probability from 0 to 1"
            )
        if isinstance(model, (str, os.PathLike)):
            model = local_path(os.fspath(model))
            _type_of(model)  # refuse before anything is decoded
        self.model, self.length, self.guide, self.warp = model, length, guide, warp
        self.text_only, self.max_rejection_probability = text_only, max_rejection_probability
        # models by the target's class, device and dtype
        self._loaded: dict[tuple[type, torch.device, torch.dtype], Any] = {}
        self._lock = Lock()

    @classmethod
    def from_options(
        cls,
        model: Any,
        length: int = 5,
        text_only: bool | None = None,
        max_rejection_probability: float = 1.0,
    ) -> Assistant:
        """Builds the drafter from options; ``model`` is a folder, a Hub id or a model.

        A model that is given by name is loaded when decoding begins, with the target's device and
        dtype, and with the target's class if the model types agree.

        Raises:
            InputError: There is no checkpoint with that name.
        """
        return cls(
            model, length, text_only=text_only, max_rejection_probability=max_rejection_probability
        )

    def begin(self, call: Call, prefill: BranchOutput) -> AssistantSession:
        """Opens a session, in which the drafting model reads the prompt."""
        adapter = self._adapter(call, prefill)
        text_only, target_reads_images = self.text_only, _reads_images(call.plan.adapter)
        if text_only is None:
            text_only = target_reads_images and not _reads_images(adapter)
        words = text_only and target_reads_images
        asked = call.plan.draft_target
        target = DraftTarget(guide=self.guide or asked.guide, warp=self.warp or asked.warp)
        unguided = None if self.guide else _unguided(target.guide, adapter, words)
        if unguided is None:
            try:
                return self._opened(call, adapter, words, target, None)
            except IncompatibleError as error:
                if self.guide or target.guide is None:
                    raise
                unguided = str(error)  # for example a transform that this model lacks
        return self._opened(call, adapter, words, replace(target, guide=None), unguided)

    def _opened(
        self,
        call: Call,
        adapter: Any,
        words: bool,
        target: DraftTarget,
        unguided: str | None,
    ) -> AssistantSession:
        """Opens a session and reads the prompt, or only its text if ``words`` is set."""
        main = _words(call) if words else MAIN
        branch = ModelRunner(adapter, [main, *branches_of(target)[1:]])
        outputs = branch.prefill(call, {})
        if target.guide is not None:
            # the prompt was read before the first token was committed
            start = call.at(torch.zeros_like(call.rows.length))
            start = replace(start, plan=replace(start.plan, is_draft=True))
            target = replace(target, constants=target.guide.begin(start, outputs))
        followed = TargetDistribution(call, target, unguided)
        return AssistantSession(call, branch, followed, self.length, self.max_rejection_probability)

    def _adapter(self, call: Call, prefill: BranchOutput) -> Any:
        """Returns the adapter of the drafting model.

        Raises:
            IncompatibleError: The vocabularies of drafting model and target differ in size.
        """
        model = self._loaded_for(call) if isinstance(self.model, str) else self.model
        adapter = adapter_like(call.plan.adapter, model)
        if adapter.vocab != prefill.logits.shape[-1]:
            raise IncompatibleError.between(
                f"assistant {type(model).__name__}",
                "the target model",
                f"its vocabulary has {adapter.vocab} tokens, the target's "
                f"{prefill.logits.shape[-1]}",
                "use an assistant with the same tokenizer",
            )
        return adapter

    def _loaded_for(self, call: Call) -> Any:
        """Returns the model given by name, on the target's device and in its dtype."""
        target = call.plan.adapter.model
        key = type(target), call.device, target.dtype
        with self._lock:
            if key not in self._loaded:
                loaded = _loaded(self.model, target)
                self._loaded[key] = loaded.to(device=call.device, dtype=target.dtype)
            return self._loaded[key]


class AssistantSession(DraftSession):
    """Session of an `Assistant`, or of another drafter in which a model drafts a chain.

    Args:
        call: The generation call.
        branch: Runner of the drafting model's passes, which has read the prompt.
        target: Guide and warpers that turn the drafting model's logits into the distribution to
            draft from.
        length: Number of tokens drafted per round.
        max_rejection_probability: Threshold that ends drafting early, see `Assistant`.

    Attributes:
        lag: Number of last committed tokens that the first pass of each round reads.
    """

    lag = 2

    def __init__(
        self,
        call: Call,
        branch: ModelRunner,
        target: TargetDistribution,
        length: int,
        max_rejection_probability: float = 1.0,
    ) -> None:
        super().__init__(call)
        self.branch, self.target, self.length = branch, target, length
        self.max_rejection_probability = max_rejection_probability
        self.unguided = target.unguided

    def propose(self, budget: int) -> Proposal:
        """Drafts a chain of up to ``length`` tokens per row."""
        call, branch, kind = self.call, self.branch, self.call.plan.kind
        length = min(self.length, budget)
        if length <= 0:
            return Proposal.empty(call.batch, call.device)
        tokens: list[Tensor] = []
        scores: list[Tensor] = []
        going = self.going()
        feed, offset = call.last(self.read_again()), 0
        # since the transfer each row grew by one block, at most self.length + 1 tokens
        longest = min(call.rows.cur_len + self.length + 1, call.request.max_new_tokens)
        visible = bucket(branch.width + longest + length)
        for step in range(length):
            block = chain(feed.shape[1], call.device)
            feed = feed.repeat(len(branch.specs), 1)
            states, _ = branch.run(feed, *block, visible=visible, offset=offset)
            offset += feed.shape[1]
            position = (call.rows.length + step)[:, None]
            logits = self.target(branch.adapter.head(states["last"][:, -1:]), position)
            noise = noise_of(kind, call, position, logits.shape[-1])
            token = (logits if noise is None else logits + noise)[:, 0].argmax(-1)
            logits = logits[:, 0]
            scores.append(logits)
            tokens.append(going.submitted(token))
            feed = token[:, None]
            if going.ended(logits, token):
                break
        log_q = torch.stack(scores, 1) if kind == "iid" else None
        return Proposal(tokens=torch.stack(tokens, 1), kind=kind, log_q=log_q)

    def going(self) -> Going:
        """Returns the stop condition of a round."""
        return Going(self.max_rejection_probability, self.call)

    def read_again(self) -> int:
        """Returns how many committed tokens a round reads first: `lag`, or all if fewer."""
        return min(self.lag, self.call.prompt_length + self.call.rows.cur_len + 1)

    def observe(self, proposal: Proposal, output: BranchOutput, block: Block) -> None:
        """Moves the cache's write position back to the first token that the next round reads."""
        start = self.branch.width + self.call.rows.length - self.read_again()
        self.branch.cache.set_start(start.repeat(len(self.branch.specs)))


class Going:
    """Stop condition per row: drafting ends once a rejection is too likely.

    The token at which the threshold is exceeded is still proposed, so whether a row stops depends
    only on proposed tokens, and the acceptance of sampled drafts stays exact. Later tokens of the
    row are not proposed. On a CPU the loop over tokens ends when all rows have stopped. On other
    devices reading the condition would need a synchronisation, so all steps are run, and only the
    verification of the later tokens is avoided.

    Args:
        max_rejection_probability: The threshold, see `Assistant`.
        call: The generation call.

    Source: Huang et al. 2024 (SpecDec++), arXiv:2405.19715, section 3: stop where one minus the
    product of acceptance probabilities exceeds a threshold. Differs from the paper: a token's
    acceptance probability is not predicted by a trained head, but is the probability that the
    drafting model gives it.
    """

    def __init__(self, max_rejection_probability: float, call: Call) -> None:
        self.max_rejection_probability = max_rejection_probability
        self.may_sync = host.may_read(call.device) and not call.plan.static_shapes
        self.kept = call.rows.active.float()  # probability that no token so far is rejected

    def submitted(self, token: Tensor) -> Tensor:
        """Returns the tokens to propose, ``(B,)``: ``token``, but -1 in rows that have stopped."""
        return (
            token
            if self.max_rejection_probability >= 1
            else token.masked_fill(1 - self.kept > self.max_rejection_probability, -1)
        )

    def ended(self, logits: Tensor, token: Tensor) -> bool:
        """Adds tokens ``(B,)`` drafted from logits ``(B, V)``; returns whether all rows stop."""
        if self.max_rejection_probability >= 1:
            return False
        self.kept *= self.chance(logits.softmax(-1), token)
        return self.may_sync and bool((1 - self.kept > self.max_rejection_probability).all())

    def chance(self, probs: Tensor, token: Tensor) -> Tensor:
        """Estimates the acceptance probability of tokens ``(B,)`` drafted from ``probs (B, V)``."""
        return probs.gather(1, token[:, None])[:, 0]


def adapter_like(adapter: Any, model: Any) -> Any:
    """Returns the adapter of a drafting model, given the adapter of its target."""
    # an image model's adapter shares the layout of its images
    return adapter.companion(model) or registry.adapter_for(model)


def _unguided(guide: Guide | None, adapter: Any, words: bool) -> str | None:
    """Returns why a drafting model cannot apply a guide; ``None`` if no reason is known.

    Args:
        guide: Guide of the call.
        adapter: Adapter of the drafting model.
        words: Whether the drafting model reads only the text of the prompt.
    """
    if guide is None:
        return None
    if words:
        return "the drafting model reads the words of the prompt alone"
    if guide.edits:
        return f"guide {type(guide).__name__} edits attention or states inside the model"
    return why_unguided(guide, adapter)


def _reads_images(adapter: Any) -> bool:
    """Whether the model of an adapter reads images."""
    return "image" in adapter.inputs


def _words(call: Call) -> BranchSpec:
    """Returns the prompt without its image tokens.

    The last token is always kept, since the first round reads it again.
    """
    keep = call.request.prompt_mask & ~call.plan.adapter.spans("image", call.request.prompt_ids)
    keep[:, -1] = True
    width = int(keep.sum(1).amax())
    order = keep.long().argsort(dim=1, stable=True)[:, -width:]
    ids, mask = call.request.prompt_ids.gather(1, order), keep.gather(1, order)
    return BranchSpec(name="main", prompt=ids, prompt_mask=mask)


def _loaded(path: str, target: Any) -> Any:
    """Loads a checkpoint with the target's class if the model types match, else by an Auto class.

    Raises:
        IncompatibleError: Transformers has no class that generates text with this checkpoint.
        InputError: The checkpoint cannot be loaded.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSpeechSeq2Seq

    found = _type_of(path)
    with loading(path):
        # not always the class for text: the weight names of Emu3's whole model do not fit that
        if isinstance(target, PreTrainedModel) and found == target.config.model_type:
            return type(target).from_pretrained(path, trust_remote_code=code_trusted()).eval()
        try:
            encoder_decoder = getattr(config_of(path), "is_encoder_decoder", False)
            auto = AutoModelForSpeechSeq2Seq if encoder_decoder else AutoModelForCausalLM
            return auto.from_pretrained(path, trust_remote_code=code_trusted()).eval()
        except MMDecodeError:
            raise
        except ValueError as error:
            raise IncompatibleError.between(
                f"assistant {path!r}",
                type(target).__name__,
                f"transformers cannot load its model type {found!r} as a model that generates text",
                "use an assistant of the target's model type, or give a loaded model",
            ) from error


def _type_of(path: str) -> str:
    """Returns the model type of a checkpoint, from its configuration.

    Raises:
        InputError: There is no configuration, or it has no ``model_type``.
    """
    with loading(path):
        found = PreTrainedConfig.get_config_dict(path)[0].get("model_type")
    if found is None:
        raise InputError(
            f"{path} has no config.json that names a model_type; give the folder of a checkpoint, "
            "a Hub id or zoo:NAME"
        )
    return str(found)
