"""Texts of a vocabulary's tokens: what each adds to a text that it continues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BROKEN = "\ufffd"
"""Text of a token that is only a part of a character."""


def token_texts(tokenizer: Any, vocab: int) -> list[str | None]:
    """Returns the text that each token adds after a word; ``None``: it has no text.

    Args:
        tokenizer: Tokenizer of the model.
        vocab: Size of the model's output, which may be larger than the tokenizer's vocabulary.

    Returns:
        A text by token, with `BROKEN` for each part of a character. Tokens above the tokenizer's
        vocabulary have none.
    """
    anchor = tokenizer("a", add_special_tokens=False).input_ids[-1:]
    special = set(tokenizer.all_special_ids)
    known = range(min(vocab, len(tokenizer)))

    def decoded(rows: list[list[int]]) -> Sequence[str]:
        return tokenizer.batch_decode(rows, clean_up_tokenization_spaces=False)

    [before] = decoded([anchor])
    found: list[str | None] = []
    for token, text in zip(known, decoded([[*anchor, token] for token in known]), strict=True):
        adds = text[len(before) :] if text.startswith(before) and token not in special else ""
        found.append(adds or None)
    return found + [None] * (vocab - len(known))
