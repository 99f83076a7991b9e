"""Tagger of punctuation, capitals and disfluencies, which sees a limited number of later words.

A Transformer over words. Each word gets three labels: the mark after it, its case, and whether it
is a filler or a part of a repair. Layer l attends to all earlier words and to ``d_l`` later ones;
the sum of all ``d_l`` is the delay d, so that the labels of a word depend on no word after the next
d. One model serves every delay: d is an argument, and varies in training.

A word is read as its letter n-grams, hashed into a small table, so that no vocabulary is needed.
Before the output, the state of a word learns whether the word is said again soon.

Source: Chen et al. 2020, arXiv:2003.01309 (controllable time-delay Transformer): the limits per
layer, and joint heads for punctuation and disfluency. Its numbers were not reproduced.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from mmdecode.checkpoints import local_path
from mmdecode.errors import InputError
from mmdecode.models.feature_drafter import SavedDrafter
from mmdecode.weights import fill, read_weights

MARKS = ("", ",", ".", "?")
"""Marks after a word, by label."""
CASES = ("lower", "first", "upper")
"""Cases of a word, by label: lower case, first letter in upper case, all letters."""
DISFLUENCIES = ("", "filler", "repair")
"""Disfluencies, by label: none; a filled pause, such as *um*; words that later words correct."""
SENTENCE_ENDS = frozenset((".", "?"))
CONTEXT = 64
"""Most words that the tagger sees at once."""
REPEATS = 3
"""Number of later words that a word is compared with."""


class Labels(NamedTuple):
    """Logits or labels of words.

    Attributes:
        marks: Indices into `MARKS`, or their logits.
        cases: The same for `CASES`.
        disfluencies: The same for `DISFLUENCIES`.
    """

    marks: Tensor
    cases: Tensor
    disfluencies: Tensor


@functools.lru_cache(maxsize=100_000)
def buckets_of(word: str, buckets: int) -> tuple[int, ...]:
    """Returns the buckets of a word's letter n-grams: the whole word, and parts of 2 to 4 letters.

    Args:
        word: A word without marks, in any case.
        buckets: Number of buckets.
    """
    edged = f"<{word.casefold()}>"
    parts = {edged} | {edged[i : i + n] for n in (2, 3, 4) for i in range(len(edged) - n + 1)}
    return tuple(sorted({zlib.crc32(part.encode()) % buckets for part in parts}))


def repeated(words: Sequence[str], delay: int | None) -> list[list[bool]]:
    """Returns, for each word, whether it and the one before it are the same as a later word.

    The columns are the comparisons with the word 1 to `REPEATS` later, first those of the word
    itself, then those of the word before it. Words later than the delay are not looked at.

    Args:
        words: Words of a text.
        delay: Number of later words; ``None``: all.
    """
    folded = [word.casefold() for word in words]

    def same(index: int, other: int, last: int) -> bool:
        return 0 <= index < other <= last and folded[index] == folded[other]

    found = []
    for index in range(len(words)):
        last = len(words) - 1 if delay is None else min(index + delay, len(words) - 1)
        pairs = [(at, at + step) for at in (index, index - 1) for step in range(1, REPEATS + 1)]
        found.append([same(*pair, last) for pair in pairs])
    return found


class PunctuationTagger(SavedDrafter):
    """Transformer that labels words.

    Args:
        config: ``buckets``, ``width``, ``inner_size``, ``heads`` and ``layers``.
    """

    kind = "punctuation"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = dict(config)
        width = config["width"]
        self.words = nn.EmbeddingBag(config["buckets"], width, mode="mean")
        self.positions = nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(
            _Layer(width, config["inner_size"], config["heads"]) for _ in range(config["layers"])
        )
        self.repeats = nn.Sequential(
            nn.Linear(2 * REPEATS, width), nn.GELU(), nn.Linear(width, width)
        )
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, len(MARKS) + len(CASES) + len(DISFLUENCIES))

    def forward(self, texts: Sequence[Sequence[str]], delay: int | None) -> Labels:
        """Computes logits of the words of texts, ``(B, L, labels)``, padded on the right.

        Args:
            texts: Words of each text, at most `CONTEXT`.
            delay: Number of later words that a word's labels may depend on; ``None``: all.
        """
        longest = max(map(len, texts))
        padded = [[*text, *[""] * (longest - len(text))] for text in texts]
        bags = [buckets_of(word, self.config["buckets"]) for text in padded for word in text]
        device = self.output.weight.device
        flat = torch.tensor([bucket for bag in bags for bucket in bag], device=device)
        starts = torch.tensor([0, *map(len, bags)], device=device).cumsum(0)[:-1]
        x = self.words(flat, starts).unflatten(0, (len(texts), longest))
        x = x + self.positions.weight[:longest]
        real = torch.arange(longest, device=device) < torch.tensor(
            [[len(text)] for text in texts], device=device
        )
        for layer, ahead in zip(self.layers, self.shares(delay), strict=True):
            x = layer(x, seen(longest, ahead).to(device) & real[:, None])
        again = torch.tensor([repeated(text, delay) for text in padded], device=device)
        found = self.output(self.norm(x + self.repeats(again.to(x))))
        return Labels(*found.split([len(MARKS), len(CASES), len(DISFLUENCIES)], -1))

    def shares(self, delay: int | None) -> list[int | None]:
        """Splits a delay among the layers, the first ones first."""
        count = len(self.layers)
        if delay is None:
            return [None] * count
        return [delay // count + (index < delay % count) for index in range(count)]

    @torch.no_grad()
    def logits(self, words: Sequence[str], delay: int | None) -> Labels:
        """Returns the logits of the words of one text, ``(L, labels)`` each; see `forward`."""
        return Labels(*(logits[0] for logits in self([words], delay)))

    @classmethod
    def from_pretrained(cls, name: str | Path) -> PunctuationTagger:
        """Loads a tagger that this package saved.

        Args:
            name: A folder, a Hub id or ``zoo:NAME``.

        Raises:
            InputError: The checkpoint holds no tagger.
        """
        config, weights = read_weights(local_path(name))
        if config.get("drafter") != cls.kind:
            raise InputError(
                f"{name} holds no tagger of punctuation; give 'zoo:punctuation', or a folder that "
                "'mmdecode train zoo punctuation' wrote"
            )
        return fill(cls(config), weights, name)


def seen(count: int, ahead: int | None) -> Tensor:
    """Returns which words a word attends to, ``(count, count)`` bool: earlier, and ``ahead`` later.

    Args:
        count: Number of words.
        ahead: Number of later words; ``None``: all.
    """
    index = torch.arange(count)
    if ahead is None:
        return torch.ones(count, count, dtype=torch.bool)
    return index <= index[:, None] + ahead


class _Layer(nn.Module):
    """Pre-norm Transformer layer with a mask."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Returns the next states ``(B, L, H)``; ``mask (B, L, L)`` is true where seen."""
        qkv = self.qkv(self.first_norm(x)).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = (part.transpose(1, 2) for part in qkv.unbind(2))
        found = scaled_dot_product_attention(queries, keys, values, attn_mask=mask[:, None])
        x = x + self.out(found.transpose(1, 2).flatten(2))
        x = x + self.down(nn.functional.gelu(self.up(self.second_norm(x))))
        return x
