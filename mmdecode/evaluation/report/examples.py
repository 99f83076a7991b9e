"""Single items of a run, shown on pages and in notebooks with their image or recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmdecode.errors import InputError
from mmdecode.evaluation.report.templates import data_url, recording_url, rendered
from mmdecode.evaluation.speech.wer import Step

ImageSource = str | Path | Callable[[str], bytes] | None
MOST = 4 << 20
"""Size in bytes of the largest image or recording that a page embeds."""
_KINDS = {b"\x89PNG": "png", b"\xff\xd8": "jpeg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}


@dataclass(frozen=True, kw_only=True)
class Example:
    """One item with its result.

    Attributes:
        name: Id of the item.
        note: A line about the result.
        lines: Labels with texts, or with the steps of an alignment, whose errors are marked.
        image, audio: Data URL of the item's image or recording; empty: not shown.
        error: Why the item has no result; empty: it has one.
    """

    name: str
    note: str
    lines: Sequence[tuple[str, str | Sequence[Step]]]
    image: str = ""
    audio: str = ""
    error: str = ""


class Examples(tuple[Example, ...]):
    """Items to look at, displayed in a notebook."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return rendered("examples.html", examples=self)

    def __repr__(self) -> str:
        lines = []
        for one in self:
            lines.append(f"{one.name}: {one.note}")
            width = max((len(label) for label, _ in one.lines), default=0)
            for label, text in one.lines:
                plain = text if isinstance(text, str) else " ".join(s.hypothesis for s in text)
                lines.append(f"  {label:{width}} {plain}")
            if one.error:
                lines.append(f"  {one.error}")
        return "\n".join(lines)


def image_url(name: str, images: ImageSource) -> str:
    """Returns an image as a data URL; empty if missing, larger than `MOST` or of an unknown type.

    Args:
        name: Name of the image.
        images: Folder of the images, or a function from a name to the bytes of a file.
    """
    if images is None or not name:
        return ""
    if callable(images):
        try:
            data = images(name)
        except InputError:  # a name that no scene has
            return ""
    else:
        path = Path(images) / name
        data = path.read_bytes() if _embedded(path) else b""
    kind = next((kind for start, kind in _KINDS.items() if data.startswith(start)), None)
    return "" if kind is None else data_url(data, f"image/{kind}")


def audio_url(path: str | Path | None) -> str:
    """Returns a recording as a data URL; empty if there is no such file or it exceeds `MOST`."""
    return recording_url(Path(path)) if path is not None and _embedded(Path(path)) else ""


def _embedded(path: Path) -> bool:
    """Whether there is such a file and it does not exceed `MOST`."""
    try:
        return path.is_file() and path.stat().st_size <= MOST
    except OSError:  # such as a name that is too long
        return False
