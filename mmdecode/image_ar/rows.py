"""Decodes several rows of an image in parallel: ZipAR, for models in raster order. Lossy.

START HERE: `ZipAR.generate`. A code depends mostly on codes near it, so a row may begin as soon as
the row above is a few codes ahead: the cell (i, j) is decided once row i - 1 has its cells up to
j + window - 1, or has ended. Each pass decides one cell in every row that has begun; h rows of w
cells take ``w + (h - 1) min(window, w)`` passes. Every cell is decided once, from the model's
distribution at its position in raster order; undecided cells at the ends of the rows above are
masked.

The first code of a row is predicted from the last token of the row above, which may be undecided. A
newline is known in advance; without newlines the model reads the latest decided code of the row
above in its position for this pass, and that code is then removed from the cache.

Drafters and acceptance rules are not used. The sampling noise of a code depends on its position
only, so that with a window of a whole row the image equals that of plain decoding token for token.
The output has the model's distribution if a code depends on no code of the row above that is
``window`` or more cells to its right, and another distribution otherwise.

Source: He et al. 2024 (ZipAR), arXiv:2412.04062. Differs from the published code, whose mask lets
tokens attend to empty slots of the cache; the paper's adaptive window size is not implemented.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmdecode.engine.adapter import MAIN
from mmdecode.engine.branches import ModelRunner
from mmdecode.engine.cache import bucket
from mmdecode.engine.call import Call, Plan
from mmdecode.engine.contracts import BranchOutput
from mmdecode.engine.noise import Noise, Role, request_key
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.guide.guidance import Guidance
from mmdecode.image_ar.raster import ImageTokens, ordinals
from mmdecode.image_ar.sampling import Sampling
from mmdecode.models.image_layout import Layout


@dataclass(frozen=True, eq=False)
class RowTokens(ImageTokens):
    """Result of `ZipAR.generate`.

    Attributes:
        passes: Forward passes of the model, with the prefill.
        commits: Index from 0 of the pass in which each cell was decided, ``(rows, columns)``.
    """

    passes: int
    commits: Tensor


class ZipAR:
    """Decodes the rows of an image in parallel.

    Args:
        adapter: Adapter of a model of image tokens, see `mmdecode.registry.image_adapter_for`.
        window: Number of cells by which a row must be ahead of the row below it. The width of the
            grid, or more, gives plain raster order.
        guidance: Classifier-free guidance scale s of ``u + s (c - u)``, or a `Guidance`; ``None``:
            the model family's published scale.
        sampling: Sampling settings; ``None``: the model family's published settings.

    Raises:
        OptionError: ``window`` is below 1.
        IncompatibleError: The model has no grid of codes, or has sliding-window attention.
    """

    guarantee = "heuristic"

    def __init__(
        self,
        adapter: Any,
        window: int = 8,
        guidance: float | Guidance | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        if window < 1:
            raise OptionError(
                f"window must be 1 or more, got {window}; the width of the grid gives raster order"
            )
        if adapter.layout is None:
            raise IncompatibleError.between(
                "ZipAR",
                adapter.name,
                "it decodes rows of image codes in parallel, and this model has no grid of codes",
                "use a model of image tokens in raster order, or decode without ZipAR",
            )
        if any(adapter.windows.values()):
            raise IncompatibleError.between(
                "ZipAR",
                adapter.name,
                "its sliding-window attention would read the tokens decoded last instead of those "
                "before a cell",
                "use a Jacobi window: --draft jacobi",
            )
        self.adapter, self.window = adapter, window
        scale = adapter.preset.guidance if guidance is None else guidance
        self.guidance = scale if isinstance(scale, Guidance) else Guidance(scale)
        self.sampling = sampling or Sampling(**adapter.preset.sampling)

    @torch.no_grad()
    def generate(
        self,
        *,
        do_sample: bool = True,
        seed: int | None = None,
        request: Sequence[Any] | None = None,
        on_tokens: Callable[[int], None] | None = None,
        **given: Any,
    ) -> RowTokens:
        """Generates one image per row of the batch.

        Args:
            do_sample: Whether to sample; ``False``: greedy decoding.
            seed: Seed of the sampling noise; ``None``: drawn from torch's global generator.
            request: Keys that seed each row's noise, see `mmdecode.image_ar.raster.generate`.
            on_tokens: Called after each pass with the number of tokens it adds to the batch.
            **given: Conditions of the images, see the adapter's ``condition``.

        Raises:
            OptionError: A condition is invalid, or ``request`` has the wrong length.
            IncompatibleError: Guidance is used with a model that has no unconditional input.
        """
        layout, guide = self.adapter.layout, self.guidance
        call = self._opened(do_sample, seed, request, self.adapter.condition(**given))
        every = torch.arange(layout.length, device=call.device)
        tokens = layout.forced(every).repeat(call.batch, 1)  # (B, length), -1: undecided
        known = set(every[layout.forced(every) >= 0].tolist())
        commits = torch.zeros(layout.length, dtype=torch.long)
        frontier = Frontier(self.adapter, [MAIN, *guide.branches])

        logits = {name: s.logits for name, s in frontier.prefill(call, {}).items()}
        waves = schedule(layout, self.window)
        for step, cells in enumerate(waves):
            if step:
                # feed the tokens of the last pass and the predecessor of each cell of this one
                fed = sorted({*waves[step - 1], *(cell - 1 for cell in cells)})
                shown = [p if p in known else max(k for k in known if k < p) for p in fed]
                read = frontier.feed(tokens[:, shown], fed, [p in known for p in fed])
                before = torch.tensor([fed.index(cell - 1) for cell in cells], device=call.device)
                logits = {name: part[:, before] for name, part in read.items()}
            tokens[:, cells] = self._decided(call, every[cells], logits)
            commits[cells] = step
            known.update(cells)
            if on_tokens is not None:
                on_tokens(call.batch * len(cells))
        return RowTokens(
            tokens=tokens,
            codes=layout.codes(tokens),
            adapter=self.adapter,
            passes=len(waves),
            commits=commits[layout.cell_indices()],
        )

    def _opened(
        self,
        do_sample: bool,
        seed: int | None,
        request: Sequence[Any] | None,
        inputs: Mapping[str, Any],
    ) -> Call:
        """Opens a call of the engine for the rows of a batch."""
        names = self.adapter.row_names(inputs)
        request = ordinals(names) if request is None else request
        if len(request) != len(names):
            raise OptionError(
                f"request has {len(request)} keys for {len(names)} images; give one key per image"
            )
        if seed is None:
            seed = int(torch.randint(2**62, ()))
        device = self.adapter.model.device
        empty = torch.empty((len(names), 0), dtype=torch.long, device=device)
        return Call.of(
            empty,
            max_new_tokens=self.adapter.layout.length,
            noise=Noise.of(seed, [request_key(name, 0) for name in request], device),
            room=0,
            do_sample=do_sample,
            model_kwargs=inputs,
            plan=Plan(adapter=self.adapter),
        )

    def _decided(self, call: Call, cells: Tensor, branches: Mapping[str, Tensor]) -> Tensor:
        """Returns tokens ``(B, n)`` for ``cells (n,)`` from each branch's logits ``(B, n, V)``."""
        indices = cells.expand(call.batch, -1)
        logits = branches["main"]
        if not self.guidance.neutral:  # each cell is passed to it as the root of a separate row
            roots = call.at(indices.flatten())
            nothing = Proposal.empty(indices.numel(), call.device)
            apart = {
                name: BranchOutput(logits=part.flatten(0, 1)[:, None])
                for name, part in branches.items()
            }
            logits = self.guidance.apply(None, roots, nothing, apart).view_as(logits)
        allowed = self.adapter.layout.allowed(indices, logits.shape[-1])
        logits = logits.masked_fill(~allowed, -torch.inf)
        if not call.request.do_sample:
            return logits.argmax(-1)
        return call.request.noise.sample(self.sampling.warp(logits), indices, Role.TARGET)


def schedule(layout: Layout, window: int) -> list[list[int]]:
    """Returns the indices of the tokens that each pass decides; the first pass is the prefill."""
    lead = min(window, layout.columns)
    waves: list[list[int]] = [[] for _ in range(layout.columns + (layout.rows - 1) * lead)]
    for row in range(layout.rows):
        for column in range(layout.columns):
            waves[row * lead + column].append(row * layout.stride + column)
    return waves


class Frontier(ModelRunner):
    """Runs the model on generated tokens out of raster order, at the same indices in all rows."""

    def prefill(self, call: Call, earlier: Mapping[str, BranchOutput]) -> dict[str, BranchOutput]:
        """See `ModelRunner.prefill`."""
        scores = super().prefill(call, earlier)
        self.ends = self.cache.start.clone()  # of the prompts, (R,)
        # index of the token in each slot after the prompt's
        self.held = torch.empty(0, dtype=torch.long, device=call.device)
        return scores

    def feed(
        self, tokens: Tensor, indices: Sequence[int], real: Sequence[bool]
    ) -> dict[str, Tensor]:
        """Feeds generated tokens and returns the logits after each.

        Args:
            tokens: Tokens, ``(B, Q)``.
            indices: Index of each token in raster order, rising.
            real: Whether each token is the decided token at its index. A token that only stands in
                for an undecided token is attended to by no other token and no later pass.

        Returns:
            Logits of the token after each, ``(B, Q, V)``, by branch.
        """
        device = tokens.device
        at, stays = torch.tensor(indices, device=device), torch.tensor(real, device=device)
        self.held = torch.cat([self.held, torch.where(stays, at, -1)])
        visible = bucket(self.width + len(self.held))
        mask = raster_mask(self.ends, self.pads, self.held, at, visible, self.adapter.model.dtype)
        kinds = self.adapter.windows
        masks = mask if len(kinds) == 1 else dict.fromkeys(kinds, mask)
        positions = (self.ends - self.pads)[:, None] + at
        self.cache.open(visible)
        fed = tokens.repeat(len(self.specs), 1)
        states = self.adapter.forward(fed, masks, positions, self._past)
        self.cache.commit(torch.full_like(self.pads, len(indices)))
        scores = self._split(self.specs, {"last": states}, {}, {})
        return {name: score.logits for name, score in scores.items()}


def raster_mask(
    ends: Tensor, pads: Tensor, held: Tensor, at: Tensor, visible: int, dtype: torch.dtype
) -> Tensor:
    """Returns the additive attention mask ``(R, 1, Q, visible)`` of tokens fed out of raster order.

    A token attends to the prompt, to itself, and to tokens whose index in raster order is not
    higher than its own.

    Args:
        ends: Number of cache slots of each row's prompt, padding included, ``(R,)``.
        pads: Number of padding slots on the left, ``(R,)``.
        held: Raster index of the token in each cache slot after the prompt, -1 for a masked slot,
            ``(n,)``; the last Q slots hold the tokens that are fed.
        at: Raster indices of the tokens that are fed, ``(Q,)``.
        visible: Number of cache slots that the mask covers.
        dtype: Data type of the mask.
    """
    slots = torch.arange(visible, device=ends.device)
    offset = slots - ends[:, None]  # (R, K)
    used = (offset >= 0) & (offset < len(held))
    position = torch.where(used, held[offset.clamp(0, len(held) - 1)], -1)
    seen = (position >= 0)[:, None] & (position[:, None] <= at[:, None])  # (R, Q, K)
    seen |= ((offset < 0) & (slots >= pads[:, None]))[:, None]
    own = torch.arange(len(held) - len(at), len(held), device=ends.device)
    seen |= offset[:, None] == own[:, None]
    low = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=ends.device)
    return torch.where(seen, 0.0, low)[:, None]
