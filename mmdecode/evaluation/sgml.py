"""Alignments as sclite writes them with ``-o sgml``, for comparisons with systems scored there."""

from __future__ import annotations

import re
from pathlib import Path

from mmdecode.errors import InputError
from mmdecode.evaluation.wer import Kind, Step

_KINDS: dict[str, Kind] = {"C": "equal", "S": "substitute", "D": "delete", "I": "insert"}
_PATH = re.compile(r'<PATH id="([^"]*)"(?:[^">]|"[^"]*")*>(.*?)</PATH>', re.DOTALL | re.IGNORECASE)
_WORD = re.compile(r'(?:^|:)([CSDI]),("[^"]*")?,("[^"]*")?')


def read_sgml(path: Path) -> dict[str, list[Step]]:
    """Alignments by utterance, for `mmdecode.evaluation.statistics.mapsswe`.

    Raises:
        InputError: The file cannot be read or holds no alignment.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    found = {
        name: [
            Step(_KINDS[kind], said.strip('"'), heard.strip('"'))
            for kind, said, heard in _WORD.findall(body.strip())
        ]
        for name, body in _PATH.findall(text)
    }
    if not found:
        raise InputError(f"{path} holds no alignment; expected what sclite writes with -o sgml")
    return found
