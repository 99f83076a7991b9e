"""CHAIR: share of the objects mentioned in captions that are not in the image.

CHAIR_i = hallucinated mentions / mentions, and CHAIR_s = captions with a hallucinated mention /
captions; repeated mentions are counted each time. Both fall when captions get shorter, so recall
and length are reported too, and `shortened` cuts captions to the mean length of other captions
before a comparison. The reference code tags and lemmatises words with nltk; here a word is looked
up as it is and in its possible singular forms, which changes the scores by a few tenths of a point.

Source: Rohrbach et al. 2018, arXiv:1809.02156.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mmdecode.errors import InputError, OptionError
from mmdecode.evaluation.vision.answers import words_of
from mmdecode.evaluation.vision.items import (
    QUESTION,
    CaptionItem,
    LeftOut,
    field_of,
    items_of,
    read_bytes,
    text_hash,
)
from mmdecode.evaluation.vision.task import ZOO

COLUMNS = ("hallucinated", "mentions", "hallucinating", "captions", "found", "present", "words")
"""Columns of `count_mentions`, in order."""
IRREGULAR = {
    "children": "child",
    "people": "person",
    "mice": "mouse",
    "geese": "goose",
    "oxen": "ox",
}


class Vocabulary:
    """Words for objects; finds the objects that a text mentions.

    Args:
        synonyms: Further words and phrases for each object, by the object's name.
        merges: Phrases that are replaced by a word: ``{"passenger train": "train"}``. A phrase with
            the word ``""`` mentions no object: ``{"home plate": ""}``. If phrases overlap, the
            longest is used.
        overruled: Words that are ignored if another word occurs in the text: ``{"seat": "toilet"}``
            ignores "seat" in a text with "toilet".

    Attributes:
        names: Names of the objects.
        hash: Hash of the vocabulary; equal vocabularies have equal hashes.

    Raises:
        OptionError: A word is a synonym of two objects, or there are no objects.
    """

    def __init__(
        self,
        synonyms: Mapping[str, Sequence[str]],
        merges: Mapping[str, str] | None = None,
        overruled: Mapping[str, str] | None = None,
    ) -> None:
        written: dict[tuple[str, ...], str] = {}
        for name, words in synonyms.items():
            for word in (name, *words):
                phrase = tuple(words_of(word))
                if not phrase or written.setdefault(phrase, name) != name:
                    raise OptionError(
                        f"{word!r} is a word for {written.get(phrase)!r} and {name!r}"
                    )
        if not written:
            raise OptionError("the vocabulary is empty; expected synonyms by name")
        self._name_of: dict[tuple[str, ...], str | None] = {**written}
        for several, word in (merges or {}).items():
            self._name_of.setdefault(tuple(words_of(several)), written.get(tuple(words_of(word))))
        self._known = {word for phrase in self._name_of for word in phrase}
        self._longest = max(map(len, self._name_of))
        self._overruled = dict(overruled or {})
        self.names = tuple(synonyms)
        self.hash = text_hash(
            repr((sorted(self._name_of.items(), key=str), sorted(self._overruled.items())))
        )

    def objects(self, text: str) -> list[str]:
        """Names of the objects that a text mentions, in order, with repeats."""
        words = [self._base(word) for word in words_of(text)]
        present = set(words)
        found, start = [], 0
        while start < len(words):
            for size in range(min(self._longest, len(words) - start), 0, -1):
                phrase = tuple(words[start : start + size])
                if phrase in self._name_of:
                    name = self._name_of[phrase]
                    if name is not None and self._overruled.get(phrase[0]) not in present:
                        found.append(name)
                    break
            start += size
        return found

    def _base(self, word: str) -> str:
        """Returns the word, or its singular if only the singular is in the vocabulary."""
        return next((form for form in _forms(word) if form in self._known), word)


def read_synonyms(path: Path) -> dict[str, list[str]]:
    """Reads synonyms by name: one line per object, separated by commas, its name first.

    Raises:
        InputError: The file cannot be read.
    """
    lines = read_bytes(path).decode(errors="replace").splitlines()
    words = [[word.strip() for word in line.split(",")] for line in lines if line.strip()]
    return {name: others for name, *others in words}


@cache
def coco_vocabulary() -> Vocabulary:
    """The 80 COCO categories, with the synonyms and merged phrases of the reference code."""
    animals = "bird cat dog horse sheep cow elephant bear zebra giraffe animal cub".split()
    return Vocabulary(
        read_synonyms(Path(__file__).parents[2] / "data" / "coco_synonyms.txt"),
        merges={f"{age} {animal}": animal for age in ("baby", "adult") for animal in animals}
        | {f"passenger {vehicle}": vehicle for vehicle in ("jet", "train")}
        | {"toilet seat": "toilet", "home plate": "", "train track": ""},
        overruled={"seat": "toilet"},
    )


def vocabulary_of(synonyms: str | None) -> Vocabulary:
    """Returns the words for the objects that captions may mention.

    Args:
        synonyms: Path of a file in the format of `read_synonyms`; `ZOO`: the words of the zoo's
            scenes; ``None``: COCO's.

    Raises:
        InputError: The file cannot be read.
    """
    if synonyms is None:
        return coco_vocabulary()
    if synonyms == ZOO:
        from mmdecode.zoo.scene_sets import FOLDER

        return Vocabulary(read_synonyms(FOLDER / "synonyms.txt"))
    return Vocabulary(read_synonyms(Path(synonyms)))


def count_mentions(
    captions: Sequence[str], objects: Sequence[Sequence[str]], vocabulary: Vocabulary
) -> np.ndarray:
    """Counts mentions, objects and words of each caption.

    Args:
        captions: Texts of the captions.
        objects: Names of the objects in the image of each caption, as in the vocabulary.
        vocabulary: Vocabulary of the objects.

    Returns:
        ``(captions, 7)``; the columns are `COLUMNS`.

    Raises:
        OptionError: Captions and objects differ in length, or are empty.
    """
    if len(captions) != len(objects) or not captions:
        raise OptionError(f"{len(captions)} captions for {len(objects)} images; expected pairs")
    rows = []
    for caption, present in zip(captions, objects, strict=True):
        mentioned = vocabulary.objects(caption)
        wrong = sum(name not in present for name in mentioned)
        found = len({*mentioned} & {*present})
        length = len(caption.split())
        rows.append((wrong, len(mentioned), wrong > 0, 1, found, len({*present}), length))
    return np.array(rows, dtype=np.int64)


def rates(counts: np.ndarray) -> dict[str, np.ndarray]:
    """Computes shares and means from summed counts; 0 where the denominator is 0.

    Args:
        counts: ``(..., 7)``, see `COLUMNS`.

    Returns:
        Each of them, of shape ``(...)``, by name: shares of hallucinated mentions, of captions with
        one, and of the objects in the images that are mentioned; words and mentions per caption.
    """
    wrong, mentions, wrong_captions, captions, found, present, words = np.moveaxis(counts, -1, 0)
    return {
        "chair_i": wrong / np.maximum(mentions, 1),
        "chair_s": wrong_captions / np.maximum(captions, 1),
        "recall": found / np.maximum(present, 1),
        "length": words / np.maximum(captions, 1),
        "mentions": mentions / np.maximum(captions, 1),
    }


def shortened(captions: Sequence[str], mean_length: float) -> list[str]:
    """Cuts captions to a common maximum length, chosen so that their mean is ``mean_length``.

    Args:
        captions: Texts of the captions.
        mean_length: Wanted mean number of words; if the captions are shorter, nothing is cut.
    """
    lengths = np.array([len(caption.split()) for caption in captions])
    caps = np.arange(lengths.max(initial=0) + 1)
    means = np.minimum(lengths, caps[:, None]).mean(1)
    cap = int(np.abs(means - mean_length).argmin())
    return [_cut(caption, cap) for caption in captions]


def read_chair(objects: Path, left_out: LeftOut = None) -> list[CaptionItem]:
    """Reads images to be captioned.

    Args:
        objects: JSON lines, also gzipped, with the keys ``objects`` and ``image`` or, for COCO's
            val2014, ``image_id``; optionally the instruction to the model, under a key of
            `QUESTION`.
        left_out: See `mmdecode.evaluation.vision.items.leaving_out`.

    Raises:
        InputError: The file cannot be read, or a line lacks a field.
    """
    return items_of(objects, _item, left_out, "image")


def _item(row: dict[str, Any], where: str) -> CaptionItem:
    names = row.get("objects")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{where} has {names!r} under 'objects'; expected a list of names")
    image = row.get("image")
    if image is None and isinstance(row.get("image_id"), int):
        image = coco_image(row["image_id"])
    if not isinstance(image, str):
        raise InputError(f"{where} has neither 'image' nor 'image_id'")
    given = any(row.get(name) is not None for name in QUESTION)
    question = field_of(row, QUESTION, where) if given else CaptionItem.question
    return CaptionItem(id=image, image=image, objects=tuple(names), question=question)


def coco_image(number: int) -> str:
    """File name of an image of COCO's val2014."""
    return f"COCO_val2014_{number:012d}.jpg"


def _forms(word: str) -> Iterator[str]:
    """A word and its possible singulars; "es" is cut off only after s, x, z, ch, sh or o."""
    yield word
    if word in IRREGULAR:
        yield IRREGULAR[word]
    if word.endswith("men"):
        yield f"{word[:-3]}man"
    if word.endswith("ies"):
        yield f"{word[:-3]}y"
    if word.endswith("ves"):
        yield from (f"{word[:-3]}f", f"{word[:-3]}fe")
    if word.endswith("s") and not word.endswith("ss"):
        yield word[:-1]
    if word.endswith(("ses", "xes", "zes", "ches", "shes", "oes")):
        yield word[:-2]


def _cut(text: str, words: int) -> str:
    found = re.match(rf"(\s*\S+){{0,{words}}}", text)
    return found[0] if found else text
