"""Sentences of three domains, in training and test parts, for language models of a domain.

- ``grammar``: the zoo's grammar (`mmdecode.zoo.grammar`).
- ``docstrings``: docstrings of Python's standard library, split by module.
- ``general``: references of the N-best lists that ship with the package, from LibriSpeech and
  Common Voice, without case and punctuation.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

from mmdecode.asr.correction.n_best_lists import read_lists
from mmdecode.errors import OptionError
from mmdecode.evaluation.nbest.n_best import SHIPPED
from mmdecode.evaluation.speech.normalisers import normaliser_of
from mmdecode.zoo import grammar
from mmdecode.zoo.real_clips import all_clips

Domain = Literal["grammar", "docstrings", "general"]
DOMAINS: tuple[Domain, ...] = ("grammar", "docstrings", "general")
WORDS = range(5, 21)
"""Allowed numbers of words in a sentence of ``docstrings`` and ``general``."""
NO_MODULES = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "__pycache__",
}
SENTENCE = re.compile(r"[A-Z][A-Za-z',;-]*( [A-Za-z][A-Za-z',;-]*)+[.?]")
"""A sentence without names of code, numbers or brackets."""


@cache
def docstring_sentences(part: Literal["train", "test"]) -> list[str]:
    """Returns the distinct prose sentences in docstrings of the running Python's library.

    A fifth of the top-level modules and packages are the test part, by a hash of their names. A
    sentence that occurs in modules of both parts is a training sentence.

    Args:
        part: ``train`` or ``test``.
    """
    library = Path(sysconfig.get_path("stdlib"))
    found: dict[str, bool] = {}
    for path in sorted(library.rglob("*.py")):
        inside = path.relative_to(library)
        if NO_MODULES & set(inside.parts):
            continue
        held_out = zlib.crc32(inside.parts[0].removesuffix(".py").encode()) % 5 == 0
        for text in _sentences_of(path):
            found[text] = found.get(text, True) and held_out
    return [text for text, held_out in found.items() if held_out == (part == "test")]


def _sentences_of(path: Path) -> Iterator[str]:
    """Yields the prose sentences of a source file's docstrings."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for paragraph in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                text = " ".join(paragraph.split())
                for sentence in re.split(r"(?<=[.?]) (?=[A-Z])", text):
                    if SENTENCE.fullmatch(sentence) and len(sentence.split()) in WORDS:
                        yield sentence


@cache
def general_sentences() -> list[str]:
    """Returns the distinct references of the shipped N-best lists, without those of real clips."""
    normalise = normaliser_of("whisper")
    tests = {normalise(clip.text) for clip in all_clips()}
    texts = [one.reference or "" for path in SHIPPED.values() for one in read_lists(path)]
    usable = (text for text in texts if len(text.split()) in WORDS)
    return [text for text in dict.fromkeys(usable) if not any(normalise(text) in t for t in tests)]


def _listed(domain: Domain) -> list[str]:
    """Returns all training sentences of a domain other than the grammar."""
    return docstring_sentences("train") if domain == "docstrings" else general_sentences()


def training_sentences(domain: Domain, count: int, seed: int) -> list[str]:
    """Samples training sentences of a domain.

    Args:
        domain: One of `DOMAINS`.
        count: Number of sentences. Sentences of the grammar are generated; the other domains have a
            limited number, which are all used before any is repeated.
        seed: Seed of the sample.

    Raises:
        OptionError: There is no such domain.
    """
    if domain not in DOMAINS:
        raise OptionError(f"domain {domain!r}; expected one of {', '.join(DOMAINS)}")
    if domain == "grammar":
        return grammar.sentences(count, seed, "train")
    texts = _listed(domain)
    rng = random.Random(f"{domain}/{seed}")
    sample: list[str] = []
    while len(sample) < count:
        sample += rng.sample(texts, len(texts))
    return sample[:count]


def vocabulary(domain: Domain) -> set[str]:
    """Returns the words of a domain's training sentences, in lower case, without punctuation."""
    if domain == "grammar":
        return grammar.vocabulary()
    texts = _listed(domain)
    return {word.lower().strip(".,;?'-") for text in texts for word in text.split()} - {""}
