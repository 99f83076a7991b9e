"""Scripts of characters: which are written without spaces, and how texts are split into units.

A character's script is the first word of its Unicode name: ``LATIN``, ``CYRILLIC``, ``HIRAGANA``;
for Han characters it is ``CJK``.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache

SPACELESS = frozenset(
    "CJK IDEOGRAPHIC HIRAGANA KATAKANA KATAKANA-HIRAGANA BOPOMOFO THAI LAO KHMER MYANMAR".split()
)
"""Scripts without spaces between words."""
_WIDTHS = ("FULLWIDTH", "HALFWIDTH")


@lru_cache(maxsize=8192)
def script(character: str) -> str:
    """Returns the script of a letter or number; empty for punctuation, marks and spaces."""
    if unicodedata.category(character)[0] not in "LN":
        return ""
    words = [w for w in unicodedata.name(character, "").split() if w not in _WIDTHS]
    return words[0] if words else ""


def is_spaceless(text: str) -> bool:
    """Whether a text contains a letter of a script that is written without spaces."""
    return not text.isascii() and any(script(character) in SPACELESS for character in text)


def units(text: str) -> list[str]:
    """Splits a text at spaces, and text in scripts without spaces into single characters.

    A character keeps its combining marks. For example ``我用 laptop`` has the units ``我``, ``用``
    and ``laptop``.
    """
    if not is_spaceless(text):
        return text.split()
    found: list[str] = []
    for word in text.split():
        started = joined = False  # whether the next character may continue the last unit
        for character in word:
            is_mark = unicodedata.category(character)[0] == "M"
            alone = script(character) in SPACELESS
            if (is_mark and started) or (joined and not alone):
                found[-1] += character
            else:
                found.append(character)
            started, joined = True, joined if is_mark else not alone
    return found
