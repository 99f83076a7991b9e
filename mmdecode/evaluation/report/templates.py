"""HTML pages and parts of pages from Jinja2 templates, which escape all text that they are given.

A page is a single file, in which styles, scripts, figures and recordings are embedded.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from mmdecode.runs.files import MAKER

ASSETS = Path(__file__).parent / "assets"


def rendered(template: str, **values: Any) -> str:
    """Fills in a template of the folder ``assets``.

    Args:
        template: File name of the template.
        **values: Values by the names that the template uses. Text is escaped, `Markup` is not.
    """
    return _ENVIRONMENT.get_template(template).render(values)


def asset(name: str) -> Markup:
    """Reads a file of styles or scripts from the package."""
    return Markup((ASSETS / name).read_text(encoding="utf-8"))


def recording_url(path: Path) -> str:
    """Encodes an audio file as a ``data:`` URL."""
    return data_url(path.read_bytes(), "audio/" + path.suffix.lstrip(".").lower())


def data_url(data: bytes, kind: str = "image/png") -> str:
    """Encodes data as a ``data:`` URL."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(ASSETS),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.globals |= {"asset": asset, "maker": MAKER}
_ENVIRONMENT.filters["data_url"] = data_url
