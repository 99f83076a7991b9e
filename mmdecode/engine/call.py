"""`Call`: the one handle that every part of a decoder is given.

It holds three things: the request, which the caller made; the plan, which
`mmdecode.decoder.Decoder` made from it; and the rows, which the loop updates in every round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmdecode.engine.cache import Reserve
from mmdecode.engine.noise import Noise
from mmdecode.engine.proposal import Kind

if TYPE_CHECKING:
    from mmdecode.engine.branches import ModelRunner
    from mmdecode.engine.prompt_cache import PromptCache

WindowMode = Literal["redraw", "adaptive", "coupled", "shared"]
"""How the rest of a window is refilled after the first rejection, from the distribution along its
chain. ``redraw``: sampled again; ``adaptive``: each token is tested on its own, and kept or
replaced by a sample from its residual; ``coupled``: sampled with the noise that will decide the
positions; ``shared``: sampled with other noise of the positions, the same in every round."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A caller's request.

    Attributes:
        prompt_ids: ``(B, P)``.
        prompt_mask: True where the prompt is not padding, ``(B, P)``; padding is on the left.
        max_new_tokens: Most tokens that any row may generate.
        eos_token_ids: Ids that end a row, ``(n,)``.
        do_sample: Whether tokens are sampled.
        num_return_sequences: Number of consecutive rows that share a prompt.
        noise: Keyed noise of the rows.
        inputs: Raw inputs by name (pixels, audio, texts) as the caller gave them, before rows were
            repeated: one entry per row; pixels one entry per image, any number of them in a row.
        model_kwargs: The model's arguments as ``generate`` prepared them.
    """

    uncaptured: ClassVar = {"inputs", "model_kwargs"}  # read with the prompt

    prompt_ids: Tensor
    prompt_mask: Tensor
    max_new_tokens: int
    eos_token_ids: Tensor
    noise: Noise
    do_sample: bool = False
    num_return_sequences: int = 1
    inputs: Mapping[str, Any] = field(default_factory=dict)
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DraftTarget:
    """How model logits become the target distribution, for drafters that follow it.

    Attributes:
        guide: The call's guide; ``None``: there is none, or ``draft_guided=False``.
        constants: Result of the guide's ``begin``.
        warp: The caller's processors that read logits ``(..., V)`` only, not ids:
            temperature, top-k and the like. ``None``: there are none.
    """

    guide: Any = None
    constants: Any = None
    warp: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the call is decoded.

    Attributes:
        adapter: Adapter of the main model.
        kind: Kind of proposals that the drafter makes, agreed with the rule.
        static_shapes: Whether rounds are captured: storage is reserved, and tensors are updated in
            place.
        window_mode: How a Jacobi window is refilled after a rejection; ``None``: there is no
            window.
        drafter_invariant: See `mmdecode.engine.capabilities.RuleCapabilities`.
        main: Runner of the main branch, for drafters that copy its keys and values; ``None`` during
            prefill, and if a guide runs that branch itself.
        draft_target: Distribution for drafters with ``follows_target``.
        lease: The call's `mmdecode.engine.arena.Lease`, for captured rounds.
        past: Cache of transformers that holds the beginning of the prompt; ``None``: none.
        prompt_cache: Prefixes of prompts that were read before; ``None``: prompts are read whole.
        is_draft: Whether a guide is being applied to a draft model's logits. Guides do not warn
            then: they warn where they are applied to the target model's.
    """

    uncaptured: ClassVar = {"lease", "past", "prompt_cache"}

    adapter: Any = None
    kind: Kind = "deterministic"
    static_shapes: bool = False
    window_mode: WindowMode | None = None
    drafter_invariant: bool = False
    main: ModelRunner | None = None
    draft_target: DraftTarget = DraftTarget()
    lease: Any = None
    past: Any = None
    prompt_cache: PromptCache | None = None
    is_draft: bool = False


@dataclass(kw_only=True)
class Rows:
    """Progress of the batch's rows; only the loop writes it, in place.

    Attributes:
        ids: Prompt, then generated ids, then padding, ``(B, P + capacity)``.
        length: Generated tokens per row, ``(B,)``; the last one is the root.
        active: Rows that have not ended, ``(B,)``.
        rounds: Rounds that each row took part in, ``(B,)``.
        cur_len: Generated tokens of the longest row at the last transfer; a host number. Where
            rounds are captured it is rounded up, so that shapes that depend on it change rarely.
        even: Whether every active row has as many tokens as the longest one, as far as the host
            knows.
        full: Whether every row is active, as far as the host knows.
    """

    ids: Tensor
    length: Tensor
    active: Tensor
    rounds: Tensor
    cur_len: int = 0
    even: bool = False
    full: bool = False

    @classmethod
    def of(cls, ids: Tensor, room: int, *, length: Tensor | int = 0, pad_id: int = 0) -> Rows:
        """Rows before their first round, all active.

        Args:
            ids: Prompt and generated tokens, ``(B, P + n)``.
            room: Columns to reserve after ``ids``.
            length: Generated tokens that count as committed.
            pad_id: Id that fills the reserved columns.
        """
        zeros = torch.zeros(len(ids), dtype=torch.long, device=ids.device)
        return cls(
            ids=pad(ids, (0, room), value=pad_id),
            length=zeros + length,
            active=zeros == 0,
            rounds=zeros.clone(),
            cur_len=length if isinstance(length, int) else int(length.amax()),
        )

    def append(self, tokens: Tensor, count: Tensor, prompt: int) -> None:
        """Writes the first ``count (B,)`` of ``tokens (B, D + 1)`` after each row's last token.

        Args:
            tokens: The block.
            count: Tokens of it to keep; 0 in rows that are not active.
            prompt: Columns of the prompt.
        """
        if self.full and self.even and tokens.shape[1] == 1:
            self.ids.narrow(1, prompt + self.cur_len, 1).copy_(tokens)
        else:
            order = torch.arange(tokens.shape[1], device=tokens.device)
            columns = (self.length + prompt)[:, None] + order
            kept = torch.where(order < count[:, None], tokens, self.ids.gather(1, columns))
            self.ids.scatter_(1, columns, kept)
        # in place: a captured round finds its tensors where they were
        self.length += count
        self.rounds += self.active
        self.even = False  # until the next transfer


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a decoder, as every part reads it."""

    request: Request
    plan: Plan
    rows: Rows

    @classmethod
    def of(
        cls,
        prompt_ids: Tensor,
        prompt_mask: Tensor | None = None,
        *,
        generated: Tensor | None = None,
        length: Tensor | int | None = None,
        max_new_tokens: int = 64,
        eos_token_ids: Tensor | None = None,
        noise: Noise | None = None,
        room: int | None = None,
        pad_id: int = 0,
        plan: Plan | None = None,
        **asked: Any,
    ) -> Call:
        """A call made without a decoder: a prompt, and tokens generated after it.

        Args:
            prompt_ids: ``(B, P)``.
            prompt_mask: See `Request`; ``None``: nothing is padding.
            generated: Tokens after the prompt, ``(B, n)``.
            length: Number of generated tokens that count as committed; ``None``: all.
            max_new_tokens: See `Request`.
            eos_token_ids: See `Request`; ``None``: no token ends a row.
            noise: See `Request`; ``None``: seed 0, rows named by their index.
            room: Columns to reserve after the tokens; ``None``: ``max_new_tokens``.
            pad_id: Id that fills the reserved columns.
            plan: How the call is decoded; ``None``: a plan without an adapter.
            **asked: Further fields of `Request`.
        """
        batch, device = len(prompt_ids), prompt_ids.device
        ids = prompt_ids if generated is None else torch.cat([prompt_ids, generated], 1)
        if length is None:
            length = ids.shape[1] - prompt_ids.shape[1]
        if prompt_mask is None:
            prompt_mask = torch.ones_like(prompt_ids)
        request = Request(
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask.bool(),
            max_new_tokens=max_new_tokens,
            eos_token_ids=prompt_ids.new_empty(0) if eos_token_ids is None else eos_token_ids,
            noise=noise or Noise.of(0, range(batch), device),
            **asked,
        )
        room = max_new_tokens if room is None else room
        rows = Rows.of(ids, room, length=length, pad_id=pad_id)
        return cls(request=request, plan=plan or Plan(), rows=rows)

    def at(self, length: Tensor) -> Call:
        """Copy of the call with other numbers of generated tokens; there may be more than B."""
        return replace(self, rows=replace(self.rows, length=length, even=False, full=False))

    @property
    def batch(self) -> int:
        """Number of rows, B."""
        return self.rows.ids.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the ids live."""
        return self.rows.ids.device

    @property
    def prompt_length(self) -> int:
        """Columns of the prompt, padding included."""
        return self.request.prompt_ids.shape[1]

    def end(self) -> Tensor:
        """Columns of ``rows.ids`` in use per row, ``(B,)``."""
        return self.rows.length + self.prompt_length

    def reserved(self, width: int, more: int = 0) -> Reserve | None:
        """Storage to reserve for a cache; ``None`` where it may grow.

        Args:
            width: Slots of the prompt.
            more: Slots beyond those of the longest text and the nodes of a round.
        """
        if not self.plan.static_shapes:
            return None
        slots = width + self.rows.ids.shape[1] - self.prompt_length + more
        return (
            Reserve(slots) if self.plan.lease is None else Reserve(slots, self.plan.lease.allocate)
        )

    def last(self, count: int) -> Tensor:
        """The last ``count`` ids of each row, ``(B, count)``; clamped at the left edge."""
        end = self.prompt_length + self.rows.cur_len
        if self.rows.even and self.rows.full and count <= end:
            return self.rows.ids[:, end - count : end]
        columns = self.end()[:, None] - count + torch.arange(count, device=self.device)
        return self.rows.ids.gather(1, columns.clamp_min(0))
