"""Parts of an HTML page: head, cards with numbers, audio players and marked word errors.

A page is a single file, in which styles, scripts, figures and audio are embedded.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from mmdecode.evaluation.speech.wer import Step
from mmdecode.runs.files import MAKER


def head(title: str, *styles: str) -> str:
    """Returns the beginning of a page, up to its body.

    Args:
        title: Title as HTML.
        *styles: File names of further style sheets; ``report.css`` is always included.
    """
    sheets = "".join(map(asset, ("report.css", *styles)))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="{MAKER}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{sheets}</style>
</head>
"""


def asset(name: str) -> str:
    """Reads a file of styles or scripts from the package."""
    return (Path(__file__).parent / "assets" / name).read_text(encoding="utf-8")


def card(title: str, value: str, *notes: str) -> str:
    """Returns a card as HTML: a number with a title and notes, at the top of a page.

    Args:
        title: Title, as HTML.
        value: The number as text.
        *notes: Lines below the number, as plain text.
    """
    below = "".join(f"<small>{escape(note)}</small>" for note in notes)
    return f"<div><h2>{title}</h2><p>{escape(value)}</p>{below}</div>"


def keyed(sign: str, text: str) -> str:
    """Returns an entry of a legend as HTML: a sign and its meaning.

    Args:
        sign: Sign as HTML.
        text: Meaning as HTML.
    """
    return f'<li><span class="key">{sign}</span> <span>{text}</span></li>'


LEGEND = "".join(
    keyed(sign, text)
    for sign, text in (
        ('<span class="substitute">heard<del>said</del></span>', "another word"),
        ('<span class="insert">heard</span>', "word too many"),
        ('<del class="delete">said</del>', "word missing"),
    )
)
"""Legend of the word errors that `marked` marks, as HTML."""


def player(audio: Path, name: str) -> str:
    """Returns an audio player as HTML, with the recording embedded and its name as label."""
    kind = "audio/" + audio.suffix.lstrip(".").lower()
    src = data_url(audio.read_bytes(), kind)
    label = escape(f"recording {name}")
    return f'<audio controls preload="metadata" aria-label="{label}" src="{src}"></audio>'


def data_url(data: bytes, kind: str = "image/png") -> str:
    """Encodes data as a ``data:`` URL."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def marked(steps: Sequence[Step], shown: Sequence[str] | None = None) -> str:
    """Returns an alignment as HTML: the hypothesis, and the reference's words where they differ.

    Args:
        steps: Steps of the alignment, in order.
        shown: HTML of the hypothesis's words in each step; ``None``: the words as plain text.
    """
    texts = [escape(step.hypothesis) for step in steps] if shown is None else shown
    words = []
    for step, text in zip(steps, texts, strict=True):
        expected = escape(step.reference)
        words.append(
            {
                "equal": text,
                "substitute": f'<span class="substitute">{text}<del>{expected}</del></span>',
                "insert": f'<span class="insert">{text}</span>',
                "delete": f'<del class="delete">{expected}</del>',
            }[step.kind]
        )
    return " ".join(words) or "<i>nothing</i>"
