"""Branches: one model under one or more conditionings, scored together.

All branches of one model and stage are stacked as batch rows, branch by branch, so that a contrast
costs rows, not launches. Each row has its own write position, padding and position offset; the tree
mask is additive (a boolean one is silently wrong under eager attention) and positions are explicit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from mmdecode.engine import capture
from mmdecode.engine.cache import RaggedCache, bucket
from mmdecode.engine.contracts import Adapter, BranchSpec, Context, Needs, Prompt, Scores
from mmdecode.engine.proposal import Proposal

MAIN = BranchSpec(name="main")


class ModelBranches:
    """One model, M branches, M * B rows: see `mmdecode.engine.contracts.Scorer`.

    Args:
        adapter: How the model is run.
        specs: Its branches, in row order.
        needs: Internals wanted beside logits.
    """

    def __init__(
        self, adapter: Adapter, specs: Sequence[BranchSpec], needs: Needs | None = None
    ) -> None:
        self.adapter, self.specs, self.needs = adapter, list(specs), needs or Needs()
        self.stage = self.specs[0].stage
        self.cache: RaggedCache
        self.pads: Tensor
        self._past: Any = None
        self._forward: Callable[..., Tensor] = adapter.forward
        self.width = 0  # slots of the prompt

    def prefill(self, ctx: Context, earlier: Mapping[str, Scores]) -> dict[str, Scores]:
        """Reads the prompts of all branches in one pass; row 0 is their last position."""
        prompts = [self.adapter.prompt(ctx, spec) for spec in self.specs]
        prompt = prompts[0] if len(prompts) == 1 else self.adapter.stack(_left_pad(prompts))
        rows, width = prompt.ids.shape
        device = prompt.ids.device
        self.cache = RaggedCache(self.adapter.num_layers, rows, device, ctx.reserved(width))
        self.pads = width - prompt.mask.sum(1)
        self.width = width
        if ctx.fixed and not capture.available(device):
            self._forward = self._compiled()
        self._past = self.adapter.open(self.cache, prompt)
        states = self.run(prompt.ids, *chain(width, device), visible=bucket(width), prompt=prompt)
        self.cache.set_start(torch.full_like(self.pads, width))
        last = {key: value[:, -1:] for key, value in states.items()}
        return self._split(last, states if self.needs.prompt_hidden else {})

    def score(
        self, ctx: Context, proposal: Proposal, earlier: Mapping[str, Scores]
    ) -> dict[str, Scores]:
        """Root and nodes behind the committed slots."""
        _, depths, tree = proposal.structure()
        ancestors = None if proposal.is_chain else tree
        tokens = torch.cat([ctx.last(1), proposal.tokens], 1)
        repeat = len(self.specs)
        if repeat > 1:
            tokens = tokens.repeat(repeat, 1)
            if len(depths) > 1:
                depths = depths.repeat(repeat, 1)
                ancestors = None if ancestors is None else ancestors.repeat(repeat, 1, 1)
        depths = torch.nn.functional.pad(depths, (1, 0))
        # the longest row holds its prompt and all its tokens but the root
        visible = bucket(self.width + ctx.longest - 1 + tokens.shape[1])
        return self._split(self.run(tokens, depths, ancestors, visible=visible), {})

    def run(
        self,
        tokens: Tensor,
        depths: Tensor,
        ancestors: Tensor | None,
        *,
        visible: int,
        offset: int = 0,
        prompt: Prompt | None = None,
    ) -> dict[int | str, Tensor]:
        """One forward pass that writes behind ``start + offset`` and commits nothing.

        Args:
            tokens: ``(R, Q)``, -1 where unused.
            depths: Distance from the first of them, ``(1 or R, Q)``.
            ancestors: What each may see of the others, ``(1 or R, Q, Q)`` bool, self included;
                ``None``: all before it.
            visible: Slots that attention covers; at least every row's ``start + offset + Q``.
            offset: Slots behind ``start`` that an earlier pass wrote and that count as committed.
            prompt: What ``tokens`` are the ids of, when the prompt is read.

        Returns:
            States by layer as in `Scores.hidden`, ``(R, Q, H)``.
        """
        cache, adapter = self.cache, self.adapter
        begin = cache.start + offset
        masks = {
            kind: block_mask(
                begin, self.pads, depths, ancestors, visible, adapter.model.dtype, window
            )
            for kind, window in adapter.windows.items()
        }
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        top = None if adapter.max_positions is None else adapter.max_positions - 1
        positions = ((begin - self.pads)[:, None] + depths).clamp(min=0, max=top)
        cache.open(visible, offset)
        states: dict[int | str, Tensor] = {}
        with ExitStack() as hooks:
            for index in self.needs.hidden:
                if isinstance(index, int):
                    hooks.enter_context(_capture(adapter.layers()[index], states, index))
            if prompt is not None:
                states["last"] = adapter.prefill(prompt, mask, positions, self._past)
            else:
                states["last"] = self._forward(tokens.clamp_min(0), mask, positions, self._past)
        return states

    def _compiled(self) -> Callable[..., Tensor]:
        if all(isinstance(index, str) for index in self.needs.hidden):
            return capture.Compiled(self.adapter)
        warn("nothing is compiled: states of inner layers are taken by hooks", stacklevel=2)
        return self.adapter.forward

    def keep(self, path: Tensor, count: Tensor, chain: bool) -> None:
        """Commits root and accepted nodes of the last pass in every branch."""
        repeat = len(self.specs)
        if repeat > 1:
            path, count = path.repeat(repeat, 1), count.repeat(repeat)
        self.cache.commit(count, None if chain else path)

    def reorder(self, rows: Tensor) -> None:
        """Keeps the rows ``rows`` of every branch; repeated rows are forks."""
        batch = len(self.pads) // len(self.specs)
        rows = torch.cat([rows + branch * batch for branch in range(len(self.specs))])
        self._past.reorder_cache(rows)
        self.pads = self.pads[rows]

    def _split(
        self, states: Mapping[int | str, Tensor], prompt: Mapping[int | str, Tensor]
    ) -> dict[str, Scores]:
        logits = self.adapter.head(states["last"]).float()
        batch = len(logits) // len(self.specs)
        result = {}
        for index, spec in enumerate(self.specs):
            rows = slice(index * batch, (index + 1) * batch)
            result[spec.name] = Scores(
                logits=logits[rows],
                hidden={key: value[rows] for key, value in states.items()},
                prompt_hidden={key: value[rows] for key, value in prompt.items()},
            )
        return result


def block_mask(
    begin: Tensor,
    pads: Tensor,
    depths: Tensor,
    ancestors: Tensor | None,
    visible: int,
    dtype: torch.dtype,
    window: int | None = None,
) -> Tensor:
    """What each token of a block may attend to, as an additive mask ``(R, 1, Q, visible)``.

    Args:
        begin: Slot of the block's first token per row, ``(R,)``; everything before it is committed.
        pads: Padding slots at the left of each row, ``(R,)``.
        depths: Distance of each token from the first, ``(1 or R, Q)``; a window counts by it.
        ancestors: ``(1 or R, Q, Q)`` bool, self included; ``None``: the block is a chain.
        visible: Slots that attention covers.
        dtype: The model's.
        window: Tokens a sliding layer sees, the token itself included; ``None``: all.
    """
    slots = torch.arange(visible, device=begin.device)
    relative = slots - begin[:, None]  # (R, K)
    # a padding query would see nothing; let it see itself
    if ancestors is None:
        distance = depths[:, :, None] - relative[:, None]
        itself = distance == 0
        seen = distance >= 0
    else:
        width = ancestors.shape[-1]
        inside = (relative >= 0) & (relative < width)
        column = relative.clamp(0, width - 1)
        in_block = ancestors.expand(len(begin), -1, -1).gather(
            2, column[:, None].expand(-1, width, -1)
        )
        itself = relative[:, None] == torch.arange(width, device=begin.device)[:, None]
        seen = torch.where(inside[:, None], in_block, (relative < 0)[:, None])
        if window is not None:
            distance = distances(relative, depths.expand(len(begin), -1))
    seen &= (slots >= pads[:, None])[:, None]
    if window is not None:
        seen &= distance < window
    low = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=begin.device)
    return torch.where(seen | itself, 0.0, low)[:, None]


def distances(relative: Tensor, depths: Tensor) -> Tensor:
    """How far before each token of a block a slot lies in the text, ``(R, Q, K)``.

    A committed slot lies where it is; a slot of the block by its depth, since siblings lie in slots
    of their own.

    Args:
        relative: Each slot's distance from the block's first, ``(R, K)``.
        depths: Distance of each token from the first, ``(R, Q)``.
    """
    width = depths.shape[1]
    inside = (relative >= 0) & (relative < width)
    place = torch.where(inside, depths.gather(1, relative.clamp(0, width - 1)), relative)
    return depths[:, :, None] - place[:, None]


def _capture(module: torch.nn.Module, into: dict[int | str, Tensor], key: int) -> Any:
    def before(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        into[key] = args[0] if args else kwargs["hidden_states"]

    return module.register_forward_pre_hook(before, with_kwargs=True)


def chain(width: int, device: torch.device) -> tuple[Tensor, None]:
    """Depths ``(1, Q)`` of a chain, and no ancestors: each token sees all before it."""
    return torch.arange(width, device=device)[None], None


def _left_pad(prompts: Sequence[Prompt]) -> list[Prompt]:
    """All prompts as wide as the widest."""
    width = max(p.ids.shape[1] for p in prompts)
    padded = []
    for prompt in prompts:
        missing = (width - prompt.ids.shape[1], 0)
        ids = torch.nn.functional.pad(prompt.ids, missing)
        mask = torch.nn.functional.pad(prompt.mask, missing)
        padded.append(Prompt(ids=ids, mask=mask, inputs=prompt.inputs))
    return padded
