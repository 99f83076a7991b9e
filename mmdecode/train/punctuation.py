"""Recipe of ``zoo:punctuation``: a tagger of punctuation, capitals and disfluencies.

Training texts are paragraphs, whose marks and capitals are the labels: sentences of the zoo's
grammar, and English prose from a Debian package. Fillers, repetitions and restarts are inserted by
rule. The delay of a batch is drawn at random, so that one tagger serves them all.

The prose is *The Debian Administrator's Handbook* (package ``debian-handbook``; Raphaël Hertzog and
Roland Mas; GPL-2+ or CC BY-SA 3.0). A fifth of its sections are held out. The text itself does not
come with this package.
"""

from __future__ import annotations

import html
import random
import re
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdecode.errors import InputError
from mmdecode.models.punctuation import CONTEXT, DISFLUENCIES, MARKS, Labels, PunctuationTagger
from mmdecode.runs.files import marked_json, write_file, write_folder
from mmdecode.train.drafters.medusa import set_rate
from mmdecode.train.loop import progress
from mmdecode.zoo import grammar

HANDBOOK = Path("/usr/share/doc/debian-handbook/html/en-US")
"""Folder of the prose, as the Debian package installs it."""
DELAYS: tuple[int | None, ...] = (0, 1, 2, 3, 5, None)
FILLERS = ("um", "uh", "er", "well", "like", "you know", "i mean")
_MARK_OF = {",": ",", ":": ",", ";": ",", ".": ".", "!": ".", "?": "?"}
_QUOTES = "\u2018\u2019\u201c\u201d"
_DASHES = ("-", "\u2013", "\u2014")
_WORD = re.compile(
    rf"[\"'(\[{_QUOTES}]*(\w[\w'\u2019.-]*?)([,:;.!?]*)[\"')\]{_QUOTES}]*([,:;.!?]*)"
)


class LabelledWord(NamedTuple):
    """A word with its labels, indices into those of `mmdecode.models.punctuation`."""

    text: str
    mark: int
    case: int
    disfluency: int = 0


@dataclass(frozen=True, kw_only=True)
class PunctuationOptions:
    """Settings of the recipe.

    Attributes:
        buckets: Rows of the table of letter n-grams.
        width: Width of the tagger.
        inner: Width of its feed-forward layers.
        heads: Number of attention heads.
        layers: Number of layers.
        steps: Number of training steps.
        batch: Texts per step.
        peak_rate: Highest learning rate (AdamW, cosine schedule).
        prose: Share of the texts that are prose; the others are sentences of the grammar.
        disfluent: Share of the texts with disfluencies.
        seed: Seed of weights and data.
    """

    buckets: int = 1024
    width: int = 48
    inner: int = 128
    heads: int = 4
    layers: int = 2
    steps: int = 6000
    batch: int = 64
    peak_rate: float = 4e-3
    prose: float = 0.6
    disfluent: float = 0.3
    seed: int = 0


def labelled(paragraph: str) -> list[LabelledWord]:
    """Splits a paragraph into words with labels; words that are code or numbers keep their text."""
    found: list[LabelledWord] = []
    for piece in paragraph.split():
        match = _WORD.fullmatch(piece)
        if match is None:
            if piece in _DASHES and found and not found[-1].mark:
                found[-1] = found[-1]._replace(mark=MARKS.index(","))
            continue
        text, marks = match[1], match[2] + match[3]
        mark = MARKS.index(_MARK_OF[marks[0]]) if marks else 0
        alphabetic = [c for c in text if c.isalpha()]
        upper = len(alphabetic) > 1 and all(c.isupper() for c in alphabetic)
        found.append(LabelledWord(text.casefold(), mark, 2 if upper else int(text[0].isupper())))
    return found


def handbook(part: Literal["train", "test"], folder: Path = HANDBOOK) -> list[list[LabelledWord]]:
    """Returns the paragraphs of the handbook's sections, by a hash of their names.

    Args:
        part: ``train``, or ``test``: a fifth of the sections.
        folder: Folder of the pages.

    Raises:
        InputError: The package is not installed.
    """
    pages = sorted(folder.glob("*.html"))
    if not pages:
        raise InputError(f"no pages in {folder}; install the Debian package debian-handbook")
    found = []
    for page in pages:
        if (zlib.crc32(page.name.encode()) % 5 == 0) != (part == "test"):
            continue
        for body in re.findall(r'<div class="para">(.*?)</div>', page.read_text("utf-8"), re.S):
            if "<div" in body or "<pre" in body:
                continue
            text = html.unescape(re.sub(r"<[^>]+>", "", body))
            words = labelled(" ".join(text.split()))
            if len(words) >= 8 and words[-1].mark in (2, 3):
                found.append(words)
    return found


def grammar_paragraphs(
    count: int, seed: int, side: Literal["train", "test"]
) -> list[list[LabelledWord]]:
    """Returns paragraphs of three to eight sentences of the grammar."""
    rng = random.Random(f"paragraphs/{side}/{seed}")
    sentences = iter(grammar.sentences(9 * count, seed, side))
    return [
        labelled(" ".join(next(sentences) for _ in range(rng.randint(3, 8)))) for _ in range(count)
    ]


def disfluent(
    words: Sequence[LabelledWord], rng: random.Random, rate: float = 0.06
) -> list[LabelledWord]:
    """Inserts fillers, repetitions and restarts before words.

    Args:
        words: The fluent words.
        rng: Random generator.
        rate: Share of words before which something is inserted.
    """
    filler, repair = DISFLUENCIES.index("filler"), DISFLUENCIES.index("repair")
    found: list[LabelledWord] = []
    for index, word in enumerate(words):
        kind = rng.random() / rate
        if kind < 0.5:
            found += [LabelledWord(part, 0, 0, filler) for part in rng.choice(FILLERS).split()]
        elif kind < 0.8:  # a repetition of the next one or two words
            count = rng.randint(1, 2)
            found += [LabelledWord(w.text, 0, w.case, repair) for w in words[index : index + count]]
        elif kind < 1.0:  # up to two of the next words, a wrong one, then all of them again
            count, wrong = rng.randint(0, 2), rng.choice(words)
            attempt = [*words[index : index + count], wrong]
            found += [LabelledWord(w.text, 0, w.case, repair) for w in attempt]
        found.append(word)
    return found


def excerpt(words: Sequence[LabelledWord], rng: random.Random) -> list[LabelledWord]:
    """Returns up to `CONTEXT` words from the start of a sentence on, sometimes from anywhere."""
    starts = [0, *(i + 1 for i, word in enumerate(words[:-1]) if word.mark in (2, 3))]
    start = rng.choice(starts) if rng.random() < 0.85 else rng.randrange(len(words))
    return list(words[start : start + rng.randint(4, CONTEXT)])


def tagger_loss(logits: Labels, texts: Sequence[Sequence[LabelledWord]]) -> Tensor:
    """Sums the cross-entropies of the three kinds of labels, each per word."""
    width = logits.marks.shape[1]

    def of(column: int) -> Tensor:
        rows = [[word[column] for word in text] for text in texts]
        return torch.tensor([row + [-100] * (width - len(row)) for row in rows])

    weights = torch.tensor([1.0, 1.5, 1.5, 3.0])
    marks = F.cross_entropy(logits.marks.flatten(0, 1), of(1).flatten(), weights, ignore_index=-100)
    cases = F.cross_entropy(logits.cases.flatten(0, 1), of(2).flatten(), ignore_index=-100)
    rest = F.cross_entropy(logits.disfluencies.flatten(0, 1), of(3).flatten(), ignore_index=-100)
    return marks + 0.5 * cases + rest


def train_tagger(
    prose: Sequence[Sequence[LabelledWord]],
    sentences: Sequence[Sequence[LabelledWord]],
    options: PunctuationOptions,
) -> PunctuationTagger:
    """Trains a tagger.

    Args:
        prose: Paragraphs of prose.
        sentences: Paragraphs of the grammar.
        options: Settings.
    """
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    names = {"buckets": options.buckets, "width": options.width, "inner_size": options.inner}
    tagger = PunctuationTagger(names | {"heads": options.heads, "layers": options.layers})
    optimizer = torch.optim.AdamW(tagger.parameters(), lr=options.peak_rate, weight_decay=0.01)
    for step in progress(range(options.steps), "punctuation"):
        set_rate(optimizer, options.peak_rate, step, options.steps)
        texts = []
        for _ in range(options.batch):
            text = rng.choice(prose if rng.random() < options.prose else sentences)
            own = excerpt(text, rng)
            if rng.random() < options.disfluent:
                own = disfluent(own, rng)[:CONTEXT]
            texts.append(own)
        logits = tagger([[word.text for word in text] for text in texts], rng.choice(DELAYS))
        tagger_loss(logits, texts).backward()
        nn.utils.clip_grad_norm_(tagger.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return tagger.eval()


def run(options: PunctuationOptions, out: Path) -> dict[str, Any]:
    """Trains the tagger and writes it; needs the Debian package ``debian-handbook``."""
    began = time.time()
    tagger = train_tagger(
        handbook("train"), grammar_paragraphs(4000, options.seed, "train"), options
    )
    write_folder(out, tagger.save_pretrained)
    report = {
        "options": asdict(options),
        "parameters": sum(one.numel() for one in tagger.parameters()),
        "seconds": round(time.time() - began, 1),
    }
    write_file(out / "report.json", marked_json(report))
    return {"folder": str(out)} | report
