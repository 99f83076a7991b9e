"""Backends of `ImageGenerator` that sample batches of images with a model in raster order.

A backend takes conditions and returns a `SampledImage` for each. The backend of next-scale models
is in `mmdecode.image_ar.next_scale_backend`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from mmdecode.decoder import Decoder
from mmdecode.draft.none import NoDraft
from mmdecode.engine.nodes import Nodes
from mmdecode.engine.stats import Stats
from mmdecode.errors import IncompatibleError
from mmdecode.image_ar import raster
from mmdecode.image_ar.completion import (
    Completion,
    Given,
    PartlyKnown,
    codes_of,
    completion_of,
    holding,
    partly_known,
)
from mmdecode.image_ar.grammar import Grammar
from mmdecode.image_ar.loading import RasterModel
from mmdecode.image_ar.modes import ROWS, guarantee_of
from mmdecode.image_ar.rows import ZipAR
from mmdecode.image_ar.sampling import Sampling

OnTokens = Callable[[int], None]
_EVERY = 8  # passes between reports of progress, each of which waits for the device


@dataclass(frozen=True, kw_only=True)
class Start:
    """An image to complete.

    Attributes:
        image: Codes, integers ``(rows, columns)``, or pixels from 0 to 1, ``(3, H, W)``.
        known: Part of the image to keep: a number of codes in raster order, or a mask of codes or
            pixels, true where the image is kept.
    """

    image: Tensor
    known: int | Tensor


@dataclass(frozen=True, kw_only=True)
class SampledImage:
    """One image of a batch, with the fields of `mmdecode.image_ar.results.GeneratedImage`.

    ``pixels`` is a function that decodes the codes when it is called.
    """

    codes: Tensor
    tokens: Tensor
    commits: Tensor
    pixels: Callable[[], Tensor]
    passes: int


class RasterBackend:
    """Samples images with a `RasterModel` and a decoder.

    Args:
        model: The model with its default settings.
        decoder: Decoder of its tokens; a copy with separate counters is used.
        guidance: Classifier-free guidance scale; ``None``: the decoder's guide, else the model's
            scale.
        sampling: Sampling settings, applied to guided logits.

    Raises:
        IncompatibleError: Both ``guidance`` and a decoder's guide are given.
        OptionError: ``guidance`` is out of range.
    """

    def __init__(
        self,
        model: RasterModel,
        decoder: Decoder,
        guidance: float | None,
        sampling: Sampling,
    ) -> None:
        self.model, self.adapter = model, model.adapter
        self.stats = RoundCounts()
        self.classes, self.labels = model.classes, model.labels
        guide = raster.guide_of(decoder, guidance, model.preset.guidance)
        self.decoder = replace(decoder, guide=guide, stats=self.stats)
        self.guidance: float | None = getattr(self.decoder.guide, "scale", None)
        self.sampling = sampling
        self.tokens = self.adapter.layout.length
        self.grid = (self.adapter.layout.rows, self.adapter.layout.columns)
        self.guarantee = guarantee_of(self.decoder)

    def check(self, condition: Any) -> None:
        """Raises the adapter's error if no image can be generated from a condition."""
        self.adapter.condition(**self.model.given([condition]))

    def started(self, start: Start) -> tuple[PartlyKnown, Completion]:
        """Returns the layout with the given codes, and whether the rest is sampled exactly."""
        image = start.image
        codes = codes_of(self.adapter, image) if image.is_floating_point() else image
        layout = partly_known(self.adapter.layout, codes, start.known)
        device = self.adapter.model.device  # codes cannot be moved within a captured round
        return holding(layout, layout.known.to(device)), completion_of(layout)

    def sample(
        self,
        conditions: Sequence[Any],
        ordinals: Sequence[int],
        seed: int,
        start: tuple[PartlyKnown, Completion] | None,
        on_tokens: OnTokens | None,
    ) -> list[SampledImage]:
        """Samples a batch, one image per condition.

        Args:
            conditions: Classes or prompts.
            ordinals: Index of each image among the images of the same condition.
            seed: Seed of the sampling noise.
            start: Given codes, as `started` returns them; ``None``: no codes are given.
            on_tokens: Called every few passes with the number of new tokens.
        """
        decoder, adapter = self.decoder, self.adapter
        if start is not None:
            adapter = copy.copy(adapter)
            adapter.layout = start[0]
            if isinstance(decoder.draft, NoDraft):
                decoder = replace(decoder, draft=Given())
        layout = adapter.layout
        self.stats.watch(on_tokens)
        sampled = raster.generate(
            adapter.model,
            decoder=decoder,
            adapter=adapter,
            sampling=self.sampling,
            seed=seed,
            request=_requests(conditions, ordinals),
            **self.model.given(conditions),
        )
        came = self.stats.ended()
        passes = came.amax(1).tolist()
        if start is not None:
            came = came.masked_fill(start[0].known.cpu() >= 0, -1)
        commits = came[:, layout.cell_indices().flatten()].view(sampled.codes.shape)
        rows = zip(sampled.codes.cpu(), sampled.tokens.cpu(), commits, passes, strict=True)
        return [
            SampledImage(
                codes=codes,
                tokens=tokens,
                commits=when,
                passes=count,
                pixels=partial(_pixels, self.adapter, codes),
            )
            for codes, tokens, when, count in rows
        ]

    def log_likelihood(
        self,
        conditions: Sequence[Any],
        tokens: Tensor,
        start: tuple[PartlyKnown, Completion] | None,
    ) -> list[float]:
        """Returns log-likelihoods of images ``(B, layout.length)``; see `GeneratedImage`."""
        layout, tokens = self.adapter.layout, tokens.to(self.adapter.model.device)
        padded, temperature = pad(tokens, (0, 1)), self.sampling.temperature
        found = torch.zeros(padded.shape, device=tokens.device)

        def note(scores: Tensor, index: Tensor) -> None:
            log_probs = (scores.float() / temperature).log_softmax(-1)
            own = padded.gather(1, index)[..., None]
            found.scatter_(1, index, log_probs.gather(2, own)[..., 0])

        reread(self.adapter, self.decoder.guide, tokens, note, self.model.given(conditions))
        free = (start[0] if start else layout).forced(torch.arange(layout.length)).cpu() < 0
        return (found[:, :-1].cpu() * free).sum(1).tolist()


class RowBackend(RasterBackend):
    """Decodes several rows of codes in parallel, see `mmdecode.image_ar.rows`.

    Args:
        model: The model with its default settings.
        lead: Number of codes by which a row must be ahead of the row below it.
        guidance: Guidance scale; ``None``: the model's.
        sampling: Sampling settings, applied to guided logits.

    Raises:
        OptionError: ``lead`` or ``guidance`` is out of range.
        IncompatibleError: The model has sliding-window attention.
    """

    def __init__(
        self, model: RasterModel, lead: int, guidance: float | None, sampling: Sampling
    ) -> None:
        super().__init__(model, Decoder(), guidance, sampling)
        self._rows = ZipAR(self.adapter, lead, self.guidance, sampling)
        self.guarantee = self._rows.guarantee

    def started(self, start: Start) -> tuple[PartlyKnown, Completion]:
        """Refuses to complete an image.

        Raises:
            IncompatibleError: Always.
        """
        raise IncompatibleError.between(
            f"mode {ROWS!r}",
            "an image to complete",
            "this mode generates all codes of an image",
            "use another mode",
        )

    def sample(
        self,
        conditions: Sequence[Any],
        ordinals: Sequence[int],
        seed: int,
        start: tuple[PartlyKnown, Completion] | None,
        on_tokens: OnTokens | None,
    ) -> list[SampledImage]:
        """Samples a batch; see `RasterBackend.sample`."""
        sampled = self._rows.generate(
            seed=seed,
            request=_requests(conditions, ordinals),
            on_tokens=on_tokens,
            **self.model.given(conditions),
        )
        self.stats.calls += 1
        self.stats.passes += sampled.passes - 1
        return [
            SampledImage(
                codes=codes,
                tokens=tokens,
                commits=sampled.commits,
                passes=sampled.passes - 1,
                pixels=partial(_pixels, self.adapter, codes),
            )
            for codes, tokens in zip(sampled.codes.cpu(), sampled.tokens.cpu(), strict=True)
        ]


class RoundCounts(Stats):
    """Counters of a decoder that also record in which pass each token of a call was decided."""

    def watch(self, on_tokens: OnTokens | None) -> None:
        """Starts counting a call; every few passes ``on_tokens`` gets the number of new tokens."""
        self._on_tokens = on_tokens
        self._kept: list[Tensor] = []
        self._reported = 0  # passes

    def of_call(self) -> Stats:
        """Returns itself, since it counts one call at a time."""
        return self

    def prefilled(self, counts: Tensor) -> None:
        """See `Stats.prefilled`."""
        super().prefilled(counts)
        self._note(counts)

    def scored(self, counts: Tensor) -> None:
        """See `Stats.scored`."""
        super().scored(counts)
        self._note(counts)

    def _note(self, counts: Tensor) -> None:
        self._kept.append(counts[:, 3].clone())
        if len(self._kept) - self._reported == _EVERY:
            self._report()

    def _report(self) -> None:
        news = self._kept[self._reported :]
        if self._on_tokens is not None and news:
            self._reported = len(self._kept)
            self._on_tokens(int(torch.stack(news).sum()))

    def ended(self) -> Tensor:
        """Ends a call and returns when each token was decided.

        Returns:
            Index of the pass in which each token was decided, ``(B, length)``; 0: prefill. All rows
            have the same length.
        """
        self._report()
        kept = torch.stack(self._kept, 1).cpu()  # (B, rounds)
        rounds = torch.arange(kept.shape[1])
        return torch.stack([rounds.repeat_interleave(row) for row in kept])


Note = Callable[[Tensor, Tensor], None]
"""Callback for logits ``(B, n, V)`` and the indices ``(B, n)`` of the tokens that they predict. The
logits are guided, -inf at tokens that cannot occur, and before temperature, top-k and top-p. An
index may be the image's length, one past its last token."""


def reread(adapter: Any, guide: Any, tokens: Tensor, note: Note, given: Mapping[str, Any]) -> None:
    """Runs the model over given images and passes the guided logits of every token to ``note``.

    Args:
        adapter: Adapter of the model.
        guide: The guide, or ``None``.
        tokens: The generated tokens, forced ones included, ``(B, layout.length)``.
        note: Callback that gets the logits of every index once.
        given: Conditions, as arguments of the adapter's ``condition``.
    """
    layout, device = adapter.layout, adapter.model.device
    holder = copy.copy(adapter)
    holder.layout = full = holding(layout, tokens)
    Decoder(draft=Given(), guide=guide, seed=0)(
        holder.model,
        torch.empty((len(tokens), 0), dtype=torch.long, device=device),
        logits_processor=LogitsProcessorList(
            [Grammar(layout), _Noted(note, layout.length), Grammar(full)]
        ),
        stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(layout.length)]),
        generation_config=GenerationConfig(max_length=layout.length, do_sample=True),
        mm_adapter=holder,
        **holder.condition(**given),
    )


class _Noted(LogitsProcessor):
    """Passes scores to a function, and returns them unchanged."""

    def __init__(self, note: Note, length: int) -> None:
        self._note, self._length = note, length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Passes on scores ``(B, V)`` of the token after ``input_ids (B, P)``."""
        self._note(scores[:, None], torch.full_like(input_ids[:, :1], input_ids.shape[1]))
        return scores

    def at_nodes(self, scores: Tensor, nodes: Nodes) -> Tensor:
        """Passes on scores ``(B, N + 1, V)`` of root and nodes; see `Note` for the image's end."""
        self._note(scores, nodes.prefix_length.clamp_max(self._length))
        return scores


def _name(condition: int | str) -> bytes:
    """Returns a condition's part of the key that seeds its noise: the class, or the prompt."""
    return b"class %d" % condition if isinstance(condition, int) else condition.encode()


def _requests(conditions: Sequence[Any], ordinals: Sequence[int]) -> list[bytes]:
    """Returns the keys that seed each row's noise: its ordinal and its condition."""
    return [
        b"%d %s" % (ordinal, _name(condition))
        for condition, ordinal in zip(conditions, ordinals, strict=True)
    ]


def _pixels(adapter: Any, codes: Tensor) -> Tensor:
    """Decodes one image, ``(3, H, W)`` on the CPU, so that it does not depend on its batch."""
    return adapter.decode(codes[None].to(adapter.model.device))[0].cpu()
