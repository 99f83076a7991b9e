"""Language codes from the spellings that users and checkpoints have for them."""

from __future__ import annotations

from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE


def language_code(name: str) -> str:
    """Returns a language's code, ``en`` for ``English`` or ``<|en|>``; keeps names it can't map."""
    name = name.strip().lower().removeprefix("<|").removesuffix("|>")
    return TO_LANGUAGE_CODE.get(name, name)
