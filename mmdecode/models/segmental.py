"""Monotonic segmental attention: every label attends to a segment of the audio of its own.

The segments of a text's labels follow each other from the start of the audio; what is left after
the last one is silence. With segment ends t and labels y

    p(y, t | x) = prod_s p(t_s | t_{s-1}, y_{<s}, x) p(y_s | y_{<s}, x[t_{s-1} .. t_s]) * p(no end).

The first factor is the length model, here a product of the probabilities that a segment goes on or
ends at each of its frames; the last one is that of the frames after the last segment.

`search` is time-synchronous: at each frame every hypothesis goes on, or ends its segment with a
label. Hypotheses with the same labels and the same last end are recombined, by their maximum (the
best segmentation) or their sum (all segmentations).

Source: Zeyer et al. 2022, arXiv:2210.14742. Their length models, label units and numbers were not
read in full; this length model is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdecode.errors import InputError, OptionError

LabelIds = tuple[int, ...]
Key = TypeVar("Key", bound=Hashable)


class SegmentalModel(Protocol):
    """Probabilities of segment ends and labels of one recording.

    Attributes:
        frames: Number of its frames.
    """

    frames: int

    def end(self, labels: LabelIds, begin: int, frame: int) -> float:
        """Returns the log-odds that the open segment ends after a frame, from audio until then.

        Args:
            labels: Labels before the segment.
            begin: First frame of the segment.
            frame: The frame.
        """

    def label(self, labels: LabelIds, begin: int, stop: int) -> Tensor:
        """Returns log-probabilities ``(V,)`` of the label of a segment ``begin .. stop - 1``."""


class SegmentalHypothesis(NamedTuple):
    """A hypothesis.

    Attributes:
        labels: Its labels.
        ends: Frame after each label's segment; where hypotheses were recombined, those of the more
            likely one.
        score: Its log-probability.
    """

    labels: LabelIds
    ends: tuple[int, ...]
    score: float


def search(
    model: SegmentalModel,
    beam: int | None = None,
    total: bool = False,
    scale: float = 1.0,
    candidates: int | None = None,
) -> list[SegmentalHypothesis]:
    """Finds the most likely label sequences, best first.

    Args:
        model: The model.
        beam: Most hypotheses that are kept after a frame; ``None``: all.
        total: Whether to add the probabilities of all segmentations of a label sequence, instead
            of taking the best one.
        scale: Factor of the length model's log-probabilities.
        candidates: Most labels that a segment may end with; ``None``: all.

    Raises:
        OptionError: ``beam`` or ``candidates`` is below 1.
    """
    for name, value in (("beam", beam), ("candidates", candidates)):
        if value is not None and value < 1:
            raise OptionError(f"{name}={value}; expected 1 or more, or None for all")
    join: Callable[[float, float], float] = _logaddexp if total else max
    # by labels and first frame of the open segment
    active: dict[tuple[LabelIds, int], SegmentalHypothesis] = {
        ((), 0): SegmentalHypothesis((), (), 0.0)
    }
    for frame in range(model.frames):
        found: dict[tuple[LabelIds, int], SegmentalHypothesis] = {}
        for (labels, begin), path in active.items():
            odds = model.end(labels, begin, frame)
            ends, goes_on = -_softplus(-odds), -_softplus(odds)
            going = path._replace(score=path.score + scale * goes_on)
            _put(found, (labels, begin), going, join)
            chances = model.label(labels, begin, frame + 1)
            most = len(chances) if candidates is None else min(candidates, len(chances))
            best = chances.topk(most)
            for label, chance in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                score = path.score + scale * ends + chance
                grown = SegmentalHypothesis((*labels, label), (*path.ends, frame + 1), score)
                _put(found, (grown.labels, frame + 1), grown, join)
        kept = sorted(found.items(), key=lambda pair: -pair[1].score)[:beam]
        active = dict(kept)
    finished: dict[LabelIds, SegmentalHypothesis] = {}
    for path in active.values():
        _put(finished, path.labels, path, join)
    return sorted(finished.values(), key=lambda path: -path.score)


def _put(
    into: dict[Key, SegmentalHypothesis],
    key: Key,
    path: SegmentalHypothesis,
    join: Callable[[float, float], float],
) -> None:
    """Adds a hypothesis, recombined with the one of the same key."""
    before = into.get(key)
    if before is not None:
        best = max(before, path, key=lambda one: one.score)
        path = best._replace(score=join(before.score, path.score))
    into[key] = path


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _logaddexp(first: float, second: float) -> float:
    low, high = sorted((first, second))
    return high + math.log1p(math.exp(low - high))


class SegmentalDecoder(nn.Module):
    """Small segmental decoder on the states of a recogniser's encoder.

    A recurrent network reads the labels. A segment ends after a frame by a function of the frame's
    state, the network's state and the segment's length; its label follows from the frames that the
    network attends to within the segment.

    Args:
        vocab: Number of labels.
        source: Width of the encoder's states.
        width: Width of the network.
        longest: Number of frames from which on segments count as equally long.
    """

    def __init__(self, vocab: int, source: int, width: int = 128, longest: int = 32) -> None:
        super().__init__()
        self.longest = longest
        self.embed = nn.Embedding(vocab + 1, width)  # the last one begins a text
        self.network = nn.GRU(width, width, batch_first=True)
        self.lengths = nn.Embedding(longest, width)
        self.read, self.keys = nn.Linear(source, width), nn.Linear(source, width)
        self.end_state, self.end_out = nn.Linear(width, width), nn.Linear(width, 1)
        self.query, self.values = nn.Linear(width, width), nn.Linear(source, width)
        self.output = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, vocab))

    def context(self, labels: Tensor) -> Tensor:
        """Returns the network's states before each label and after the last, ``(L + 1, H)``."""
        ids = F.pad(labels, (1, 0), value=self.embed.num_embeddings - 1)
        found: Tensor = self.network(self.embed(ids)[None])[0][0]
        return found

    def ends(self, states: Tensor, context: Tensor, lengths: Tensor) -> Tensor:
        """Returns log-odds of ends ``(...,)``, given frames, contexts ``(..., H)`` and lengths."""
        x = self.read(states) + self.end_state(context)
        x = x + self.lengths(lengths.clamp_max(self.longest - 1))
        return self.end_out(F.gelu(x))[..., 0]

    def labels(self, states: Tensor, context: Tensor, segment: Tensor) -> Tensor:
        """Returns logits ``(L, V)`` of the labels of segments.

        Args:
            states: Encoder states, ``(S, source)``.
            context: The network's state before each label, ``(L, H)``.
            segment: Whether a frame belongs to a label's segment, ``(L, S)`` bool.
        """
        scores = self.query(context) @ self.keys(states).T / context.shape[-1] ** 0.5
        weights = scores.masked_fill(~segment, -torch.inf).softmax(-1)
        return self.output(torch.cat([weights @ self.values(states), context], -1))

    def loss(self, states: Tensor, labels: Tensor, stops: Tensor) -> Tensor:
        """Returns the negative log-likelihood of labels with their segment ends, per label.

        Args:
            states: Encoder states, ``(S, source)``.
            labels: Labels, ``(L,)``.
            stops: Frame after each segment, ``(L,)``, increasing.

        Raises:
            InputError: The stops do not increase, or lie outside the states.
        """
        given = stops.tolist()
        if given != sorted(set(given)) or not all(0 < stop <= len(states) for stop in given):
            raise InputError(
                f"stops={given} of {len(states)} states; expected increasing numbers from 1 to "
                f"{len(states)}"
            )
        frames = torch.arange(len(states), device=states.device)
        begins = torch.cat([stops.new_zeros(1), stops])
        context = self.context(labels)
        number = torch.searchsorted(stops, frames, right=True)  # segment of each frame
        odds = self.ends(states, context[number], frames - begins[number])
        ends = torch.isin(frames + 1, stops).float()
        length = F.binary_cross_entropy_with_logits(odds, ends, reduction="sum")
        segment = (frames >= begins[:-1, None]) & (frames < stops[:, None])
        logits = self.labels(states, context[:-1], segment)
        return (length + F.cross_entropy(logits, labels, reduction="sum")) / max(1, len(labels))


class Recorded:
    """A `SegmentalDecoder` on the states of one recording, as a `SegmentalModel`.

    Args:
        decoder: The decoder.
        states: Encoder states, ``(S, source)``.
    """

    def __init__(self, decoder: SegmentalDecoder, states: Tensor) -> None:
        self.decoder, self.states, self.frames = decoder, states, len(states)
        self._contexts: dict[LabelIds, Tensor] = {}

    def _context(self, labels: LabelIds) -> Tensor:
        if labels not in self._contexts:
            ids = torch.tensor(labels, dtype=torch.long)
            self._contexts[labels] = self.decoder.context(ids)[-1]
        return self._contexts[labels]

    @torch.no_grad()
    def end(self, labels: LabelIds, begin: int, frame: int) -> float:
        """See `SegmentalModel.end`."""
        length = torch.tensor(frame - begin)
        return float(self.decoder.ends(self.states[frame], self._context(labels), length))

    @torch.no_grad()
    def label(self, labels: LabelIds, begin: int, stop: int) -> Tensor:
        """See `SegmentalModel.label`."""
        own = self.states[begin:stop]
        segment = torch.ones(1, len(own), dtype=torch.bool)
        return self.decoder.labels(own, self._context(labels)[None], segment)[0].log_softmax(-1)
