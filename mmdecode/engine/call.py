"""`Call`: what every part of a decoder is told of the call it serves.

Three things that change at different times: the request, which the caller made; the plan, which
`mmdecode.decoder.Decoder` made of it; and the rows, which the loop writes after every round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmdecode.engine.noise import Noise
from mmdecode.engine.proposal import Kind

if TYPE_CHECKING:
    from mmdecode.engine.branches import ModelRunner

WindowMode = Literal["redraw", "adaptive", "coupled", "shared"]
"""How the rest of a window is refilled after the first rejection, from the distribution along its
chain: sampled again; each token tested on its own and kept or replaced by a sample from its
residual; sampled with the noise that will decide the positions; sampled with noise of the
positions' own that decides nothing, the same in every round."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the caller asked for.

    Attributes:
        prompt_ids: ``(B, P)``.
        prompt_mask: True where the prompt is not padding, ``(B, P)``; padding is on the left.
        max_new_tokens: Most tokens any row may generate.
        eos_token_ids: Ids of which any ends a row, ``(n,)``.
        do_sample: Whether the caller samples.
        num_return_sequences: Rows that came of one prompt, one after the other.
        noise: Keyed noise of the rows.
        inputs: Raw inputs by name (pixels, audio, texts) as the caller gave them, before rows were
            copied: one entry per row, or, of pixels, per image, of which a row may have any number.
        model_kwargs: What ``generate`` prepared for the model.
    """

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
    """What makes the target distribution of the model's logits, for drafters that follow it.

    Attributes:
        guide: The call's; ``None``: there is none, or drafts shall not be guided.
        constants: What its ``begin`` made of the prompt.
        warp: What the caller's processors make of logits ``(..., V)`` alone: temperature, top-k and
            the like, of those that do not read the text. ``None``: nothing.
    """

    guide: Any = None
    constants: Any = None
    warp: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the call is decoded.

    Attributes:
        adapter: Of the main model: what drafters and guides ask about it.
        kind: How the drafter's tokens come to be, as it and the rule agreed.
        static_shapes: Whether rounds are captured: tensors stay where they are, storage is
            reserved.
        window_mode: How a rejected window is refilled; ``None``: it is not.
        drafter_invariant: See `mmdecode.engine.capabilities.RuleCapabilities`.
        main: Runs the main branch, for drafters that copy its keys and values; ``None`` before the
            prompt was read, and where a guide runs that branch itself.
        draft_target: What drafters follow that can.
        is_draft: Whether a guide is applied to a draft's logits. It does not warn there: it has
            seen the model's own.
    """

    adapter: Any = None
    kind: Kind = "deterministic"
    static_shapes: bool = False
    window_mode: WindowMode | None = None
    drafter_invariant: bool = False
    main: ModelRunner | None = None
    draft_target: DraftTarget = DraftTarget()
    is_draft: bool = False


@dataclass(kw_only=True)
class Rows:
    """How far the rows of the batch are; only the loop writes them, in place.

    Attributes:
        ids: Prompt, then generated ids, then padding, ``(B, P + capacity)``.
        length: Generated tokens per row, ``(B,)``; the last of them is the root.
        active: Rows that go on, ``(B,)``.
        rounds: Rounds each row has been through, ``(B,)``.
        cur_len: Generated tokens of the longest row at the last transfer; a host number. Where
            rounds are captured it is rounded up, so that shapes which follow from it change rarely.
    """

    ids: Tensor
    length: Tensor
    active: Tensor
    rounds: Tensor
    cur_len: int = 0

    @classmethod
    def of(cls, ids: Tensor, room: int, *, length: Tensor | int = 0, pad_id: int = 0) -> Rows:
        """Rows that all go on, before their first round.

        Args:
            ids: Prompt and generated tokens, ``(B, P + n)``.
            room: Columns after these.
            length: Generated tokens that count as committed.
            pad_id: What stands in the columns of ``room``.
        """
        zeros = torch.zeros(len(ids), dtype=torch.long, device=ids.device)
        return cls(
            ids=pad(ids, (0, room), value=pad_id),
            length=zeros + length,
            active=zeros == 0,
            rounds=zeros.clone(),
            cur_len=length if isinstance(length, int) else int(length.amax()),
        )


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
        """A call at hand: of a prompt, or amid a text.

        Args:
            prompt_ids: ``(B, P)``.
            prompt_mask: As of `Request`; ``None``: nothing is padding.
            generated: Tokens after the prompt, ``(B, n)``.
            length: How many of them count as committed; ``None``: all.
            max_new_tokens: As of `Request`.
            eos_token_ids: Likewise; ``None``: no token ends a row.
            noise: Likewise; ``None``: of seed 0, by row.
            room: Columns after these; ``None``: as many as may be generated.
            pad_id: What stands in them.
            plan: How it is decoded; ``None``: undrafted, by no adapter.
            **asked: What else a `Request` holds.
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
        """The same call with its rows, or others, at ``length (B',)``."""
        return replace(self, rows=replace(self.rows, length=length))

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

    def reserved(self, width: int) -> int:
        """Slots to reserve after a prompt of ``width`` tokens; 0 where storage may grow."""
        return width + self.rows.ids.shape[1] - self.prompt_length if self.plan.static_shapes else 0

    def last(self, count: int) -> Tensor:
        """The last ``count`` ids of each row, ``(B, count)``; clamped at the left edge."""
        columns = self.end()[:, None] - count + torch.arange(count, device=self.device)
        return self.rows.ids.gather(1, columns.clamp_min(0))
