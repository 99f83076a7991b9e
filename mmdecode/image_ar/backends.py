"""How a batch of pictures is drawn: by a raster model, or by a next-scale one.

Both take requests and give `SampledImage` rows; `mmdecode.image_ar.generator` does the rest.
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
from mmdecode.engine.stats import Stats
from mmdecode.engine.target_logits import Nodes
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
        image: Its codes, integers ``(rows, columns)``, or its pixels from 0 to 1, ``(3, H, W)``.
        known: What of it stays: so many codes in raster order, or a mask of cells or of pixels,
            true where it stays.
    """

    image: Tensor
    known: int | Tensor


@dataclass(frozen=True, kw_only=True)
class SampledImage:
    """One row; see `mmdecode.image_ar.generator.GeneratedImage` for the fields."""

    codes: Tensor
    tokens: Tensor
    commits: Tensor
    pixels: Callable[[], Tensor]
    passes: int


class RasterBackend:
    """Draws with a `RasterModel` and a decoder.

    Args:
        model: With all that it takes to draw.
        decoder: How its tokens are decoded; it is copied, and counts on its own.
        guidance: ``None``: the decoder's guide, else the model's.
        sampling: What guided logits become.

    Raises:
        IncompatibleError: ``guidance`` beside a decoder's guide.
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
        """Raises where an image cannot be drawn of this."""
        self.adapter.condition(**self.model.given([condition]))

    def started(self, start: Start) -> tuple[PartlyKnown, Completion]:
        """The layout with what is given, and what that makes of the law."""
        image = start.image
        codes = codes_of(self.adapter, image) if image.is_floating_point() else image
        layout = partly_known(self.adapter.layout, codes, start.known)
        device = self.adapter.model.device  # a captured round cannot move what is given
        return holding(layout, layout.known.to(device)), completion_of(layout)

    def sample(
        self,
        conditions: Sequence[Any],
        ordinals: Sequence[int],
        seed: int,
        start: tuple[PartlyKnown, Completion] | None,
        on_tokens: OnTokens | None,
    ) -> list[SampledImage]:
        """A batch."""
        decoder, adapter = self.decoder, self.adapter
        if start is not None:
            adapter = copy.copy(adapter)
            adapter.layout = start[0]
            if isinstance(decoder.draft, NoDraft):
                decoder = replace(decoder, draft=Given())
        layout = adapter.layout
        self.stats.watch(on_tokens)
        drawn = raster.generate(
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
        commits = came[:, layout.places().flatten()].view(drawn.codes.shape)
        rows = zip(drawn.codes.cpu(), drawn.tokens.cpu(), commits, passes, strict=True)
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
        """Of whole images ``(B, layout.length)``; see `GeneratedImage`."""
        layout, tokens = self.adapter.layout, tokens.to(self.adapter.model.device)
        told, temperature = pad(tokens, (0, 1)), self.sampling.temperature
        found = torch.zeros(told.shape, device=tokens.device)

        def note(scores: Tensor, index: Tensor) -> None:
            law = (scores.float() / temperature).log_softmax(-1)
            found.scatter_(1, index, law.gather(2, told.gather(1, index)[..., None])[..., 0])

        reread(self.adapter, self.decoder.guide, tokens, note, self.model.given(conditions))
        free = (start[0] if start else layout).forced(torch.arange(layout.length)).cpu() < 0
        return (found[:, :-1].cpu() * free).sum(1).tolist()


class RowBackend(RasterBackend):
    """Draws several rows of codes at once, see `mmdecode.image_ar.rows`.

    Args:
        model: With all that it takes to draw.
        lead: Codes that a row has to be ahead of the next one.
        guidance: ``None``: the model's.
        sampling: What guided logits become.

    Raises:
        OptionError: ``lead`` or ``guidance`` are out of range.
        IncompatibleError: The model attends to the latest tokens alone.
    """

    def __init__(
        self, model: RasterModel, lead: int, guidance: float | None, sampling: Sampling
    ) -> None:
        super().__init__(model, Decoder(), guidance, sampling)
        self._rows = ZipAR(self.adapter, lead, self.guidance, sampling)
        self.guarantee = self._rows.guarantee

    def started(self, start: Start) -> tuple[PartlyKnown, Completion]:
        """Not possible.

        Raises:
            IncompatibleError: Always.
        """
        raise IncompatibleError.between(
            f"mode {ROWS!r}",
            "an image of which a part was given",
            "rows side by side begin at the first code",
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
        """A batch."""
        drawn = self._rows.generate(
            seed=seed,
            request=_requests(conditions, ordinals),
            on_tokens=on_tokens,
            **self.model.given(conditions),
        )
        self.stats.calls += 1
        self.stats.passes += drawn.passes - 1
        return [
            SampledImage(
                codes=codes,
                tokens=tokens,
                commits=drawn.commits,
                passes=drawn.passes - 1,
                pixels=partial(_pixels, self.adapter, codes),
            )
            for codes, tokens in zip(drawn.codes.cpu(), drawn.tokens.cpu(), strict=True)
        ]


class RoundCounts(Stats):
    """A decoder's counters, which also tell of the present call in which pass tokens came."""

    def watch(self, on_tokens: OnTokens | None) -> None:
        """Begins a call; ``on_tokens`` is told now and then how many tokens came to the batch."""
        self._on_tokens = on_tokens
        self._kept: list[Tensor] = []
        self._told = 0  # passes that were reported

    def of_call(self) -> Stats:
        """Itself: it serves one call at a time."""
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
        if len(self._kept) - self._told == _EVERY:
            self._tell()

    def _tell(self) -> None:
        news = self._kept[self._told :]
        if self._on_tokens is not None and news:
            self._told = len(self._kept)
            self._on_tokens(int(torch.stack(news).sum()))

    def ended(self) -> Tensor:
        """Ends a call.

        Returns:
            The pass that each token of the call came in, ``(B, length)``; 0: with the prompt. Rows
            are of one length.
        """
        self._tell()
        kept = torch.stack(self._kept, 1).cpu()  # (B, rounds)
        rounds = torch.arange(kept.shape[1])
        return torch.stack([rounds.repeat_interleave(row) for row in kept])


Note = Callable[[Tensor, Tensor], None]
"""Is told guided logits ``(B, n, V)`` without forbidden tokens, before they are sharpened and cut,
and the places that they decide, ``(B, n)``; the last place is one behind the image."""


def reread(adapter: Any, guide: Any, tokens: Tensor, note: Note, given: Mapping[str, Any]) -> None:
    """Reads images again, each token behind the ones before it, and says what their laws were.

    Args:
        adapter: Of the model.
        guide: The guide, or ``None``.
        tokens: As generated, forced ones included, ``(B, layout.length)``.
        note: Told of every place once.
        given: What the images are drawn of, as the adapter's ``condition`` takes it.
    """
    layout, device = adapter.layout, adapter.model.device
    holder = copy.copy(adapter)
    holder.layout = told = holding(layout, tokens)
    Decoder(draft=Given(), guide=guide, seed=0)(
        holder.model,
        torch.empty((len(tokens), 0), dtype=torch.long, device=device),
        logits_processor=LogitsProcessorList(
            [Grammar(layout), _Noted(note, layout.length), Grammar(told)]
        ),
        stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(layout.length)]),
        generation_config=GenerationConfig(max_length=layout.length, do_sample=True),
        mm_adapter=holder,
        **holder.condition(**given),
    )


class _Noted(LogitsProcessor):
    """Hands on what comes to it, and changes nothing."""

    def __init__(self, note: Note, length: int) -> None:
        self._note, self._length = note, length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """``(B, V)`` behind ``input_ids (B, P)``."""
        self._note(scores[:, None], torch.full_like(input_ids[:, :1], input_ids.shape[1]))
        return scores

    def at_nodes(self, scores: Tensor, nodes: Nodes) -> Tensor:
        """``(B, N + 1, V)``; a node behind the image is asked too."""
        self._note(scores, nodes.prefix_length.clamp_max(self._length))
        return scores


def _name(condition: int | str) -> bytes:
    """As adapters name rows of classes; prompts by their text, which no batch changes."""
    return b"class %d" % condition if isinstance(condition, int) else condition.encode()


def _requests(conditions: Sequence[Any], ordinals: Sequence[int]) -> list[bytes]:
    """Names of the rows for keyed noise."""
    return [
        b"%d %s" % (ordinal, _name(condition))
        for condition, ordinal in zip(conditions, ordinals, strict=True)
    ]


def _pixels(adapter: Any, codes: Tensor) -> Tensor:
    """On the CPU, ``(3, H, W)``; each image on its own, whatever it was drawn with."""
    return adapter.decode(codes[None].to(adapter.model.device))[0].cpu()
