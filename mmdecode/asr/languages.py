"""Language codes from the spellings that users and checkpoints have for them."""

from __future__ import annotations

from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE


def language_code(name: str) -> str:
    """Returns a language's code, ``en`` for ``English`` or ``<|en|>``; keeps names it can't map."""
    name = name.strip().lower().removeprefix("<|").removesuffix("|>")
    return TO_LANGUAGE_CODE.get(name, name)


def language_name(code: str) -> str:
    """Returns the English name of a language in lower case; keeps codes it can't map."""
    return LANGUAGES.get(code, code)
