"""Parts of an HTML page: its head, cards, players and marked words.

A page is one file: it holds its styles, scripts, figures and audio.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from mmdecode.evaluation.speech.wer import Step
from mmdecode.runs.files import MAKER


def head(title: str, *styles: str) -> str:
    """The beginning of a page, up to its body.

    Args:
        title: Title as HTML.
        *styles: Names of style sheets next to that of all pages.
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
    """A file of styles or scripts."""
    return (Path(__file__).parent / "assets" / name).read_text(encoding="utf-8")


def card(title: str, value: str, *notes: str) -> str:
    """A number that a page begins with.

    Args:
        title: Subject, as HTML.
        value: The number.
        *notes: Lines below it, as text.
    """
    below = "".join(f"<small>{escape(note)}</small>" for note in notes)
    return f"<div><h2>{title}</h2><p>{escape(value)}</p>{below}</div>"


def keyed(sign: str, text: str) -> str:
    """An item of a legend: a sign, and what it means next to it.

    Args:
        sign: Sign as HTML.
        text: Text as HTML.
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
"""Items of a legend: what `marked` marks."""


def player(audio: Path, name: str) -> str:
    """A recording to listen to, as HTML that holds it and says its name."""
    kind = "audio/" + audio.suffix.lstrip(".").lower()
    src = data_url(audio.read_bytes(), kind)
    label = escape(f"recording {name}")
    return f'<audio controls preload="metadata" aria-label="{label}" src="{src}"></audio>'


def data_url(data: bytes, kind: str = "image/png") -> str:
    """An address that holds what it points to."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def marked(steps: Sequence[Step], shown: Sequence[str] | None = None) -> str:
    """An alignment as HTML: the hypothesis, with the words of the reference where they differ.

    Args:
        steps: In order.
        shown: HTML of the hypothesis's words, by step; ``None``: their text.
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
