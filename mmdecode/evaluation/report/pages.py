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
        title: As HTML.
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
        title: What it is of, as HTML.
        value: The number.
        *notes: Lines below it, as text.
    """
    below = "".join(f"<small>{escape(note)}</small>" for note in notes)
    return f"<div><h2>{title}</h2><p>{escape(value)}</p>{below}</div>"


def keyed(sign: str, text: str) -> str:
    """An item of a legend: a sign, and what it means next to it.

    Args:
        sign: As HTML.
        text: As HTML.
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


def marked(steps: Sequence[Step], heard: Sequence[str] | None = None) -> str:
    """An alignment as HTML: what was heard, with what was said where they differ.

    Args:
        steps: In order.
        heard: HTML of what was heard, by step; ``None``: its text.
    """
    texts = [escape(step.heard) for step in steps] if heard is None else heard
    shown = []
    for step, text in zip(steps, texts, strict=True):
        said = escape(step.said)
        shown.append(
            {
                "equal": text,
                "substitute": f'<span class="substitute">{text}<del>{said}</del></span>',
                "insert": f'<span class="insert">{text}</span>',
                "delete": f'<del class="delete">{said}</del>',
            }[step.kind]
        )
    return " ".join(shown) or "<i>nothing</i>"
