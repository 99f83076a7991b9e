"""Parsers of answers in free text: to yes, no or neither, or to one of several options.

`PARSERS` contains five rules of published projects, which disagree, and the recommended rule
``leading``. It looks only at the first word, does not depend on the right answer, and leaves an
answer that is neither yes nor no unparsed. Scores under different rules cannot be compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from mmdecode.errors import OptionError, UnknownNameError

Label = Literal["yes", "no"]
_LABELS: dict[str, Label] = {"yes": "yes", "no": "no"}


@dataclass(frozen=True)
class Parser:
    """A rule that parses answers.

    Attributes:
        name: Name in `PARSERS`.
        origin: Project and file that the rule comes from.
        parse: Function from an answer and its label (the right answer) to yes, no, or ``None`` for
            neither.
        drops_unparsed: Whether unparsed answers to yes-questions are left out of the recall, as in
            the original project, and are not counted as missed.
    """

    name: str
    origin: str
    parse: Callable[[str, Label], Label | None]
    drops_unparsed: bool = False


def leading(text: str, label: Label | None = None) -> Label | None:
    """The recommended rule: the first word, without signs around it; ``None``: neither yes nor no.

    For example ``**Yes**, there is`` is yes.
    """
    found = re.match(r"[\W_]*(yes|no)(?![\w'\u2019]|[-/]\w)", text, re.IGNORECASE)
    return _LABELS.get(found[1].lower()) if found else None


def original(text: str, label: Label | None = None) -> Label:
    """POPE's rule: no if the first sentence has the word No, no or not; everything else is yes."""
    words = text.partition(".")[0].replace(",", "").split(" ")
    return "no" if {"No", "no", "not"} & set(words) else "yes"


def vcd(text: str, label: Label) -> Label:
    """VCD's rule: right if the label occurs anywhere as a substring, even "no" in "know"."""
    other: Label = "no" if label == "yes" else "yes"
    return label if label in text.lower() else other


def lmms(text: str, label: Label | None = None) -> Label | None:
    """The rule of lmms-eval: the whole answer must be the word; "Yes." is unparsed."""
    return _LABELS.get(text.lower().strip())


def vlmevalkit(text: str, label: Label | None = None) -> Label | None:
    """The rule of VLMEvalKit: yes or no if exactly one of the two words occurs, else unparsed."""
    found = set(re.findall(r"\w+", text.lower())) & {"yes", "no"}
    return _LABELS[found.pop()] if len(found) == 1 else None


def mme(text: str, label: Label | None = None) -> Label | None:
    """The rule of MME and Otter: yes, or else no, in the first four characters; or only y or n."""
    answer = text.lower().strip().replace(".", "")
    if len(answer) == 1:
        return "yes" if answer == "y" else "no" if answer == "n" else None
    return "yes" if "yes" in answer[:4] else "no" if "no" in answer[:4] else None


PARSERS = {
    parser.name: parser
    for parser in (
        Parser("leading", "the first word", leading),
        Parser("original", "AoiDragon/POPE evaluate.py", original),
        Parser("vcd", "DAMO-NLP-SG/VCD experiments/eval/eval_pope.py", vcd),
        Parser("lmms", "EvolvingLMMs-Lab/lmms-eval tasks/pope/utils.py", lmms, drops_unparsed=True),
        Parser("vlmevalkit", "open-compass/VLMEvalKit dataset/utils/yorn.py", vlmevalkit),
        Parser("mme", "MME's tool, lmms-eval tasks/mme/utils.py", mme),
    )
}


def parser_of(name: str) -> Parser:
    """Returns the rule with a name.

    Raises:
        UnknownNameError: There is no such rule.
    """
    if name not in PARSERS:
        raise UnknownNameError.of("parser", name, PARSERS)
    return PARSERS[name]


def choice(text: str, options: Sequence[str]) -> str | None:
    """Finds the option that an answer names in whole words; ``None``: it names none, or several.

    If an option is part of a longer option in the answer ("on" in "on top of"), only the longer
    option counts. The "on" in "on the left" does not count as the option "on".

    Args:
        text: The answer.
        options: The possible answers, all different.

    Raises:
        OptionError: There are no options, one is empty, or two are the same.
    """
    words = {option: " ".join(words_of(option)) for option in options}
    if not words or "" in words.values() or len(set(words.values())) < len(words):
        raise OptionError(f"the options are {list(options)}; expected one or more different words")
    answer = re.sub(r"\bon (?=the (?:left|right)\b)", "", " ".join(words_of(text)))
    rest, named = f" {answer} ", set()
    for option in sorted(words, key=lambda option: -len(words[option])):
        if f" {words[option]} " in rest:
            named.add(option)
            rest = rest.replace(f" {words[option]} ", " | ")
    return named.pop() if len(named) == 1 else None


def words_of(text: str) -> list[str]:
    """Words of a text in lower case; an underscore separates them too."""
    return re.findall(r"[^\W_]+", text.lower())
