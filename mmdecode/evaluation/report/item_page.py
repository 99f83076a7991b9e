"""HTML page of a report on questions about images, and display of single answers with images."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdecode.evaluation.report.item_comparison import compared_rows
from mmdecode.evaluation.report.layout import document, html_table
from mmdecode.evaluation.report.pages import data_url
from mmdecode.evaluation.vision.items import Item

if TYPE_CHECKING:
    from mmdecode.evaluation.report.item_report import ItemReport

ImageSource = str | Path | Callable[[str], bytes] | None
_SHOWN = 4 << 20  # bytes of an image that a page still holds
_KINDS = {b"\x89PNG": "png", b"\xff\xd8": "jpeg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}


@dataclasses.dataclass(frozen=True, repr=False)
class Shown:
    """Answers with notes, displayed with their images in a notebook.

    Attributes:
        items: Answers to display, in order.
        notes: A line of text for each answer.
        images: Source of the images, see `mmdecode.evaluation.report.item_report.ItemReport`.
    """

    items: Sequence[Item]
    notes: Sequence[str]
    images: ImageSource = None

    def as_html(self) -> str:
        """Returns images, questions and answers as HTML, without styles."""
        return "".join(
            f'<article class="clip"><h3>{html.escape(item.id)}</h3>'
            f"{image_html(item.image, self.images)}<p>{html.escape(note)}</p>"
            f"<dl><dt>asked</dt><dd>{html.escape(item.question)}</dd>"
            f"<dt>answered</dt><dd>{html.escape(item.error or item.output)}</dd></dl></article>"
            for item, note in zip(self.items, self.notes, strict=True)
        )

    def _repr_html_(self) -> str:
        return self.as_html()

    def __repr__(self) -> str:
        return "\n".join(
            f"{item.id}: {note}\n  asked    {item.question}\n  answered {item.error or item.output}"
            for item, note in zip(self.items, self.notes, strict=True)
        )

    def __len__(self) -> int:
        return len(self.items)


def image_html(name: str, images: ImageSource) -> str:
    """Returns an image as HTML; empty if it is missing, larger than 4 MiB or of an unknown type."""
    if images is None or not name:
        return ""
    if callable(images):
        data = images(name)
    else:
        path = Path(images) / name
        data = path.read_bytes() if path.is_file() and path.stat().st_size <= _SHOWN else b""
    kind = next((kind for start, kind in _KINDS.items() if data.startswith(start)), None)
    if kind is None:
        return ""
    return (
        f'<img alt="{html.escape(name)}" style="max-width:min(20em,100%)" '
        f'src="{data_url(data, f"image/{kind}")}">'
    )


def overview(report: ItemReport[Any]) -> str:
    """Returns verdict, scores, their explanation and comparisons as HTML, without styles."""
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in report.verdict())
    whole = "".join(map(html_table, report.tables()))
    tables = f"<ul>{lines}</ul>{html_table(report.brief())}<h2>All columns</h2>{whole}"
    compared = compared_rows(report.comparisons)
    differences = (
        f"<h2>Differences in points, with 95 % intervals</h2>{html_table(compared)}"
        if compared
        else ""
    )
    return f"{tables}<p>{html.escape(report.about())}</p>{differences}"


def page_of(report: ItemReport[Any]) -> str:
    """Returns one HTML file with tables, figures, and the worst answers."""
    worst = "".join(
        f"<h2>Most wrong, {html.escape(mode)}</h2>{shown.as_html()}"
        for mode in report.modes
        if (shown := report.worst(5, mode)).items
    )
    return document(report.title, overview(report), report.drawings, worst, report.conditions)
