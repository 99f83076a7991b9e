"""Names of languages, as every recogniser takes them."""

from __future__ import annotations

from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE


def language_code(name: str) -> str:
    """``en`` of ``en``, ``English`` or ``<|en|>``; a name that is not known stays as it is."""
    name = name.strip().lower().removeprefix("<|").removesuffix("|>")
    return TO_LANGUAGE_CODE.get(name, name)
