"""Token times from a decoder's cross-attention, or by CTC forced alignment.

``attention``: after decoding, one pass over prompt and tokens gives the weights of some heads of
the decoder's cross-attention, by token and frame. They are normalised over tokens, median-filtered
over frames and averaged over heads; dynamic time warping then finds the frame at which each token
begins, as in openai/whisper's ``timing.py``. The weights are computed from the layers' queries and
keys, which temporary hooks record, so the model can keep any attention implementation. The weights
of a token are those of the query that predicts it, as in openai/whisper; transformers'
``return_token_timestamps`` takes the query one position later.

``ctc``: a CTC model gives character probabilities by frame (`mmdecode.asr.alignment.ctc`), and
torchaudio's forced alignment places the text on them. Text without characters of the vocabulary
(digits, symbols, other scripts) is aligned as a wildcard, which matches any character.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LogitsProcessorList
from transformers.modeling_outputs import BaseModelOutput

from mmdecode.adapters.audio.whisper_timestamps import NODE_PROCESSORS
from mmdecode.asr.alignment.ctc import CharacterModel, ctc_model_of
from mmdecode.asr.alignment.words import Token, is_marks, opens, split_units
from mmdecode.asr.audio.reading import import_or_explain
from mmdecode.engine.call import Call
from mmdecode.engine.processors import Processors
from mmdecode.engine.proposal import Proposal
from mmdecode.engine.target_logits import TargetLogits

Head = tuple[int, int]
"""An attention head: index of its decoder layer, and its index in that layer."""
Span = tuple[float, float]
"""Start and end, in seconds from the start of a window."""

MEDIAN_WIDTH = 7
_LONGEST_S = (0.5, 1.0)  # bounds of the longest duration of a token that contains no pause
_WILDCARD_COST = 1.0  # nats: a character matches its own symbol better than a wildcard next to it


@dataclass(frozen=True)
class Spoken:
    """A decoded window whose tokens are to be timed.

    Attributes:
        prompt: Ids of the decoder prompt.
        tokens: Generated ids, without the end token.
        rules: Logits processors that it was decoded with, without the temperature.
        offset_s: Start of the window, in seconds of the audio that the model is given.
        frames: Number of its encoder frames, padding not counted.
        features: Log-mel features, ``(mels, feature frames)``.
        samples: Samples at the model's rate; ``None``: the method does not need them.
    """

    prompt: list[int]
    tokens: list[int]
    rules: LogitsProcessorList
    offset_s: float
    frames: int
    features: Tensor
    samples: np.ndarray | None = None


# Cross-attention


def every_head(model: Any) -> list[Head]:
    """Returns layer and head of all cross-attention heads of the decoder, layer by layer."""
    return [
        (layer, head)
        for layer, block in enumerate(model.get_decoder().layers)
        for head in range(block.encoder_attn.q_proj.out_features // block.encoder_attn.head_dim)
    ]


def named_heads(model: Any) -> list[Head] | None:
    """Returns ``generation_config.alignment_heads``; ``None``: the checkpoint names none.

    `mmdecode.train.alignment_heads` finds good heads for a checkpoint without that entry.
    """
    named = getattr(model.generation_config, "alignment_heads", None)
    return [(int(layer), int(head)) for layer, head in named] if named else None


def alignment_heads(model: Any) -> list[Head]:
    """Returns the heads that the checkpoint names, else all heads of the upper half of layers."""
    middle = len(model.get_decoder().layers) // 2
    return named_heads(model) or [head for head in every_head(model) if head[0] >= middle]


class CrossAttention:
    """Queries and keys of the decoder's cross-attention in one forward pass, by layer."""

    def __init__(self, heads: Sequence[Head]) -> None:
        self.heads = list(heads)
        self.queries: dict[int, Tensor] = {}
        self.keys: dict[int, Tensor] = {}

    def weights(self, row: int, frames: int) -> Tensor:
        """Returns the attention weights of a batch row, float32 ``(heads, tokens, frames)``.

        Only the first ``frames`` encoder frames count; the weights sum to one over them.
        """
        scores = []
        for layer, head in self.heads:
            queries, keys = self.queries[layer][row], self.keys[layer][row]
            shared = head * len(keys) // len(queries)  # consecutive query heads may share keys
            scores.append(queries[head].float() @ keys[shared, :frames].float().T)
        return torch.stack(scores).softmax(-1)


@contextmanager
def cross_attention(decoder: Any, heads: Sequence[Head]) -> Iterator[CrossAttention]:
    """Records the queries and keys of a decoder's cross-attention inside the context.

    Args:
        decoder: Decoder whose layers have cross-attention as Whisper's, BART's or Moonshine's:
            ``encoder_attn`` with ``q_proj``, ``k_proj``, ``head_dim`` and ``scaling``, and without
            positions.
        heads: The heads whose weights are wanted.
    """
    read = CrossAttention(heads)
    handles = []

    def reader(held: dict[int, Tensor], layer: int, size: int, scale: float) -> Any:
        def hook(module: Any, inputs: Any, output: Tensor) -> None:
            held[layer] = (output * scale).unflatten(-1, (-1, size)).transpose(1, 2)

        return hook

    try:
        for layer in sorted({layer for layer, _ in heads}):
            attention = decoder.layers[layer].encoder_attn
            for module, held, scale in (
                (attention.q_proj, read.queries, attention.scaling),
                (attention.k_proj, read.keys, 1.0),
            ):
                hook = reader(held, layer, attention.head_dim, scale)
                handles.append(module.register_forward_hook(hook))
        yield read
    finally:
        for handle in handles:
            handle.remove()


def token_starts(weights: Tensor, median_width: int = MEDIAN_WIDTH) -> np.ndarray:
    """Returns the first frame of each token, ``(tokens,)``, by dynamic time warping.

    Args:
        weights: Attention weights, ``(heads, tokens, frames)``.
        median_width: Width of the median filter, in frames.
    """
    spread = weights.std(1, keepdim=True, unbiased=False)
    # a single row has no spread: all frames then get the same value
    normal = (weights - weights.mean(1, keepdim=True)) / spread.clamp_min(1e-12)
    matrix = median_filter(normal, median_width).mean(0)
    rows, frames = warp(-matrix.double().cpu().numpy())
    return frames[np.flatnonzero(np.diff(rows, prepend=-1))]


def median_filter(values: Tensor, width: int) -> Tensor:
    """Median-filters the last axis, mirrored at its ends; returns too short values unchanged."""
    if values.shape[-1] <= width // 2 or width == 1:
        return values
    mirrored = F.pad(values, (width // 2, width // 2), mode="reflect")
    return mirrored.unfold(-1, width, 1).median(-1).values


def warp(cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Finds the cheapest monotone path between opposite corners (dynamic time warping).

    Cells of an antidiagonal depend on earlier antidiagonals only, so they are computed together.

    Args:
        cost: Cost of each cell, ``(rows, columns)``.

    Returns:
        Rows and columns of the cells of the path. Among equally cheap predecessors, the one in the
        same row is taken.
    """
    height, width = cost.shape
    total = np.full((height + 1, width + 1), np.inf)
    total[0, 0] = 0.0
    steps = np.array([(1, 1), (1, 0), (0, 1)])
    chosen = np.empty((height + 1, width + 1), dtype=np.int8)
    chosen[0], chosen[:, 0] = 2, 1
    for diagonal in range(2, height + width + 1):
        i = np.arange(max(1, diagonal - width), min(height, diagonal - 1) + 1)
        j = diagonal - i
        both, down, along = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        way = np.where((both < down) & (both < along), 0, 2)
        way[(down < both) & (down < along)] = 1
        total[i, j] = cost[i - 1, j - 1] + np.choose(way, (both, down, along))
        chosen[i, j] = way
    cell = np.array([height, width])
    path = []
    while cell.any():
        path.append(cell - 1)
        cell = cell - steps[chosen[tuple(cell)]]
    found = np.array(path[::-1])
    return found[:, 0], found[:, 1]


def attention_spans(
    weights: Tensor, frame_s: float, spoken: Sequence[bool], median_width: int = MEDIAN_WIDTH
) -> list[Span]:
    """Returns start and end of each token of a window, in seconds.

    Dynamic time warping assigns a pause to one of the tokens next to it. A text token longer than a
    limit (three times the median length, within bounds) is therefore cut to the stretch of that
    length with the most attention, less the edges with hardly any attention.

    Args:
        weights: Attention weights, ``(heads, tokens + 1, frames)``; the last row is of the end
            token.
        frame_s: Length of a frame, in seconds.
        spoken: Whether each token is text; other tokens are not cut.
        median_width: Width of the median filter, in frames.
    """
    frames = weights.shape[-1]
    edges = [*token_starts(weights, median_width).tolist(), frames]
    spans = [(edges[i], edges[i + 1]) for i in range(len(spoken))]
    lengths = [
        end - start for (start, end), is_spoken in zip(spans, spoken, strict=True) if is_spoken
    ]
    usual = 3 * float(np.median(lengths or [0])) * frame_s
    longest = max(1, round(min(max(usual, _LONGEST_S[0]), _LONGEST_S[1]) / frame_s))
    attended = weights.mean(0)
    for row, (start, end) in enumerate(spans):
        if spoken[row] and end - start > longest:
            start += int(attended[row, start:end].unfold(0, longest, 1).sum(-1).argmax())
            inside = attended[row, start : start + longest]
            kept = (inside >= inside.max() / 10).nonzero()[:, 0]
            spans[row] = (start + int(kept[0]), start + int(kept[-1]) + 1)
    return [(start * frame_s, end * frame_s) for start, end in spans]


# CTC


def forced_spans(log_probs: Tensor, texts: Sequence[str], ctc: CharacterModel) -> list[Span]:
    """Returns first frame and last frame + 1 of each text, by CTC forced alignment.

    Punctuation takes no time: its span is empty, at the edge of the text that it belongs to. If the
    texts have more symbols than there are frames, or no symbol at all, the frames are divided
    evenly among them.

    Args:
        log_probs: Log-probabilities of the CTC model, ``(frames, symbols)``.
        texts: Pieces of text in the order in which they are spoken.
        ctc: The CTC model, which maps characters to symbols.
    """
    functional = import_or_explain("torchaudio.functional", "forced alignment")
    wildcard = log_probs.shape[-1]
    targets: list[int] = []
    owners: list[int] = []
    for number, text in enumerate(texts):
        own = ctc.symbols(text)
        if not own and not is_marks(text):
            own = [wildcard]
        if own and targets and text[0].isspace() and ctc.delimiter is not None:
            targets.append(ctc.delimiter)
            owners.append(-1)
        targets += own
        owners += [number] * len(own)
    repeats = sum(a == b for a, b in itertools.pairwise(targets))
    if not targets or len(targets) + repeats > len(log_probs):
        edges = np.linspace(0, len(log_probs), len(texts) + 1).tolist()
        return list(itertools.pairwise(edges))
    speech = log_probs.clone()
    speech[:, ctc.blank] = -torch.inf
    any_letter = speech.logsumexp(-1, keepdim=True) - _WILDCARD_COST
    scores = torch.cat([log_probs, any_letter], -1).float().cpu()[None]
    path, values = functional.forced_align(scores, torch.tensor([targets]), blank=ctc.blank)
    merged = functional.merge_tokens(path[0], values[0], blank=ctc.blank)
    found: dict[int, Span] = {}
    for owner, span in zip(owners, merged, strict=True):
        found[owner] = (found.get(owner, (span.start, 0))[0], span.end)
    spoken = sorted(found.keys() - {-1})
    for number, text in enumerate(texts):
        if number not in found:
            after = next((other for other in spoken if other > number), None)
            before = next((other for other in reversed(spoken) if other < number), None)
            if before is None or (opens(text) and after is not None):
                assert after is not None, "something is spoken"
                found[number] = (found[after][0],) * 2
            else:
                found[number] = (found[before][1],) * 2
    return [found[number] for number in range(len(texts))]


def ctc_spans(
    window: Spoken,
    ctc: CharacterModel,
    tokenizer: Any,
    is_text: Callable[[int], bool],
    frame_s: float,
) -> list[Span]:
    """Returns start and end of each token of a window in seconds, by CTC forced alignment.

    Args:
        window: The window; its prompt and rules are not read.
        ctc: The CTC model.
        tokenizer: A byte-level BPE tokenizer.
        is_text: Whether a token is text; the span of other tokens is (0, 0).
        frame_s: Length of a frame of the window, in seconds.
    """
    units = split_units([token for token in window.tokens if is_text(token)], tokenizer)
    log_probs, step_s = ctc.emit(window.features, window.samples, window.frames * frame_s)
    spans = forced_spans(log_probs, [text for text, _ in units], ctc)
    by_token = iter(
        (start * step_s, end * step_s)
        for (start, end), (_, count) in zip(spans, units, strict=True)
        for _ in range(count)
    )
    return [next(by_token) if is_text(token) else (0.0, 0.0) for token in window.tokens]


# Windows


class Timer:
    """Gives the tokens of decoded windows times and probabilities.

    Args:
        model: A ``WhisperForConditionalGeneration``.
        tokenizer: Its tokenizer.
        method: ``attention``, ``ctc`` or ``ctc:model=NAME``; ``True`` is ``ctc`` where the
            checkpoint has a head for it, else ``attention``.
        stamps: Id of the first timestamp token; text tokens have lower ids.
        frame_s: Seconds per encoder frame.
        rate: Sampling rate of the audio, in Hz.

    Raises:
        OptionError: There is no such method.
        InputError: A model that the method needs cannot be loaded.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        method: str | bool,
        *,
        stamps: int,
        frame_s: float,
        rate: int,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.stamps, self.frame_s = stamps, frame_s
        self.special = frozenset(tokenizer.all_special_ids)
        self.ctc = ctc_model_of(method, model, rate)
        self.reads_samples = self.ctc is not None and self.ctc.reads_samples
        self.heads = [] if self.ctc else alignment_heads(model)
        self.median_width = getattr(model.config, "median_filter_width", MEDIAN_WIDTH)

    @torch.no_grad()
    def __call__(self, windows: Sequence[Spoken], audio: Tensor) -> list[list[Token]]:
        """Returns the tokens of each window with times and probabilities.

        Args:
            windows: Decoded windows.
            audio: Encoder states, one row per window, ``(B, S, H)``.
        """
        rows = [row for row, window in enumerate(windows) if window.tokens]
        timed: list[list[Token]] = [[] for _ in windows]
        if not rows:
            return timed
        ids = [torch.tensor(windows[row].prompt + windows[row].tokens) for row in rows]
        # padded on the right with any id: the decoder is causal
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        with cross_attention(self.model.get_decoder(), self.heads) as attention:
            logits = self.model(
                encoder_outputs=BaseModelOutput(last_hidden_state=audio[rows]),
                decoder_input_ids=padded.to(audio.device),
                use_cache=False,
            ).logits
        for index, row in enumerate(rows):
            window = windows[row]
            first = len(window.prompt) - 1  # the query that predicts the first token
            last = first + len(window.tokens) + 1
            chances = probabilities(logits[index, first:last].float(), window)
            if self.ctc is None:
                weights = attention.weights(index, window.frames)[:, first:last]
                spans = self._by_attention(window, weights)
            else:
                spans = ctc_spans(window, self.ctc, self.tokenizer, self._is_text, self.frame_s)
            timed[row] = [
                Token.of(token, window.offset_s + start, window.offset_s + end, chance)
                for token, (start, end), chance in zip(window.tokens, spans, chances, strict=True)
            ]
        return timed

    def _by_attention(self, window: Spoken, weights: Tensor) -> list[Span]:
        spoken = [self._is_text(token) for token in window.tokens]
        return attention_spans(weights, self.frame_s, spoken, self.median_width)

    def _is_text(self, token: int) -> bool:
        return token < self.stamps and token not in self.special


def probabilities(logits: Tensor, window: Spoken) -> list[float]:
    """Returns the probability of each token of a window, after the window's logits processors.

    Args:
        logits: Logits at the prompt's last token and at each token, ``(tokens + 1, V)``.
        window: The decoded window.
    """
    device = logits.device
    prompt = torch.tensor([window.prompt], device=device)
    tokens = torch.tensor([window.tokens], device=device)
    most = len(window.tokens) + 1
    call = Call.of(prompt, generated=tokens, length=0, max_new_tokens=most)
    proposal = Proposal(tokens=tokens, kind="deterministic")
    distribution = TargetLogits(
        logits[None], call, proposal, Processors(window.rules, NODE_PROCESSORS)
    )
    scores = distribution.along(torch.arange(len(window.tokens), device=device)[None])[0, :-1]
    return scores.softmax(-1).gather(1, tokens[0, :, None])[:, 0].tolist()
