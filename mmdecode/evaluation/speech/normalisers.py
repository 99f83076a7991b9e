"""Text normalisers, which decide what counts as the same word. Error rates depend on them.

`NORMALISERS` holds them by name:

* ``none``: the text as it is.
* ``basic``: Whisper's normaliser for all languages: lower case, no brackets, no symbols.
* ``whisper``: Whisper's English normaliser (openai/whisper c0d2f62, appendix C of its paper), as
  transformers ships it.
* ``leaderboard``: the Open ASR leaderboard's variant of ``whisper``
  (huggingface/open_asr_leaderboard d1e99b2): it expands ``'s`` to "is" less often, removes more
  fillers, joins acronyms, and unifies spellings of names and of compounds. Its oddities are kept:
  "O'Neil" becomes "0 neil", "10mm" becomes "10 hmm".
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from mmdecode.errors import UnknownNameError

Normaliser = Callable[[str], str]

DATA = Path(__file__).parents[1] / "data"


@lru_cache
def whisper() -> Normaliser:
    """Whisper's English normaliser with its spelling table."""
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    table = (DATA / "whisper_english_spelling.json").read_text(encoding="utf-8")
    return EnglishTextNormalizer(json.loads(table))


@lru_cache
def basic() -> Normaliser:
    """Whisper's normaliser for all languages; diacritics stay."""
    from transformers.models.whisper.english_normalizer import BasicTextNormalizer

    return BasicTextNormalizer()


@lru_cache
def leaderboard(folder: Path = DATA) -> Normaliser:
    """The Open ASR leaderboard's variant of Whisper's English normaliser."""
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    tables = json.loads((folder / "leaderboard_tables.json").read_text(encoding="utf-8"))
    normaliser = EnglishTextNormalizer(tables["spelling"])
    normaliser.ignore_patterns = rf"\b({'|'.join(tables['fillers'])})\b"
    normaliser.replacers = dict(tables["replacements"])
    numbers, spelling = normaliser.standardize_numbers, normaliser.standardize_spellings

    def compounds_and_numbers(text: str) -> str:
        for pattern, joined in tables["compounds"]:
            text = re.sub(pattern, joined, text)
        return numbers(text)

    def spelling_names_and_acronyms(text: str) -> str:
        words = (tables["names"].get(word, word) for word in spelling(text).split())
        return " ".join(join_acronyms(words))

    normaliser.standardize_numbers = compounds_and_numbers
    normaliser.standardize_spellings = spelling_names_and_acronyms
    return normaliser


def join_acronyms(words: Iterable[str]) -> Iterator[str]:
    """Joins runs of at least two single letters or digits, such as ``b b c`` to ``bbc``.

    A run that contains "a" or "i", which may be words, must have at least three.
    """
    for single, group in itertools.groupby(words, lambda word: len(word) == 1 and word.isalnum()):
        run = list(group)
        if single and len(run) >= (3 if {"a", "i"} & set(run) else 2):
            yield "".join(run)
        else:
            yield from run


NORMALISERS: Mapping[str, Callable[[], Normaliser]] = {
    "none": lambda: str.strip,
    "basic": basic,
    "whisper": whisper,
    "leaderboard": leaderboard,
}
ORIGINS = {
    "none": "texts as they are",
    "basic": "openai/whisper BasicTextNormalizer",
    "whisper": "openai/whisper EnglishTextNormalizer c0d2f62",
    "leaderboard": "huggingface/open_asr_leaderboard d1e99b2",
}
"""Source and version of each normaliser, shown in reports."""


def normaliser_of(name: str) -> Normaliser:
    """Returns the normaliser with a name.

    Raises:
        UnknownNameError: There is no such normaliser.
    """
    if name not in NORMALISERS:
        raise UnknownNameError.of("normaliser", name, NORMALISERS)
    return NORMALISERS[name]()


def is_scored(reference: str, normalise: Normaliser | None = None) -> bool:
    """Whether the leaderboard scores an utterance: its reference has words after normalisation.

    Args:
        reference: Reference text.
        normalise: Normaliser; ``None``: the leaderboard's.
    """
    text = (normalise or leaderboard())(reference).strip()
    return text not in ("", "ignore time segment in scoring")
