"""Language codes from the spellings that users and checkpoints have for them."""

from __future__ import annotations

from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE


def language_code(name: str) -> str:
    """Code of a language: ``en`` for ``en``, ``English`` or ``<|en|>``; unknown names unchanged."""
    name = name.strip().lower().removeprefix("<|").removesuffix("|>")
    return TO_LANGUAGE_CODE.get(name, name)
