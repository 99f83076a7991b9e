"""The page of a word error report, and the recordings with the most errors as players."""

from __future__ import annotations

import base64
import dataclasses
import html
from pathlib import Path
from typing import TYPE_CHECKING

from mmdecode.evaluation import plots
from mmdecode.evaluation.report import asset, marked, player
from mmdecode.evaluation.samples import Sample
from mmdecode.evaluation.wer import align_as_written

if TYPE_CHECKING:
    from mmdecode.evaluation.word_report import WERReport

_PLAYED = 4 << 20  # bytes of a recording that a page still holds


@dataclasses.dataclass(frozen=True, repr=False)
class Worst:
    """Samples with many errors; shows players and alignments in a notebook.

    Attributes:
        samples: The one with the most errors first.
        errors: Word errors of each.
        normaliser, scorer: With which they were counted.
    """

    samples: list[Sample]
    errors: list[int]
    normaliser: str
    scorer: str

    def as_html(self) -> str:
        """Players and alignments, without styles."""
        return "".join(
            self._article(sample, errors)
            for sample, errors in zip(self.samples, self.errors, strict=True)
        )

    def _article(self, sample: Sample, errors: int) -> str:
        audio = Path(sample.audio_filepath) if sample.audio_filepath else None
        small = audio is not None and audio.is_file() and audio.stat().st_size <= _PLAYED
        steps = align_as_written(sample.text, sample.pred_text, self.normaliser, self.scorer)
        failed = f'<p class="bad">{html.escape(sample.error)}</p>' if sample.error else ""
        return (
            f'<article class="clip"><h3>{html.escape(sample.id)}</h3>'
            f"<p>{errors} word error{'s' * (errors != 1)}</p>{failed}"
            f"{player(audio) if audio is not None and small else ''}"
            f"<dl><dt>said</dt><dd>{html.escape(sample.text)}</dd>"
            f"<dt>heard</dt><dd>{marked(steps)}</dd></dl></article>"
        )

    def _repr_html_(self) -> str:
        return (
            "<style>.substitute,.insert,del.delete{color:#b3261e}"
            f".substitute del{{color:gray;margin-left:.3em}}</style>{self.as_html()}"
        )

    def __repr__(self) -> str:
        lines = []
        for sample, errors in zip(self.samples, self.errors, strict=True):
            lines.append(f"{sample.id}: {errors} word errors")
            lines.append(f"  said  {sample.text}\n  heard {sample.error or sample.pred_text}")
        return "\n".join(lines)

    def __len__(self) -> int:
        return len(self.samples)


def page_of(report: WERReport) -> str:
    """One HTML file that holds everything: tables, figures, and the worst recordings."""
    figures = "".join(
        f'<figure><img alt="{html.escape(name)}" style="max-width:100%" '
        f'src="data:image/png;base64,{base64.b64encode(plots.png(figure)).decode()}"></figure>'
        for name, figure in report.figures().items()
    )
    worst = "".join(
        f"<h2>Most errors, {html.escape(mode)}</h2>{report.worst(10, mode).as_html()}"
        for mode in report.modes
    )
    facts = "".join(
        f"<tr><th>{html.escape(str(name))}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in report.conditions.items()
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Word errors</title>
<link rel="icon" href="data:,">
<style>{asset("report.css")}</style>
</head>
<body>
<h1>Word errors</h1>
{overview(report)}
<section class="figures">{figures}</section>
{worst}
<h2>Conditions</h2>
<div class="wide"><table>{facts}</table></div>
</body>
</html>
"""


def overview(report: WERReport) -> str:
    """The scores as a table, what they mean and the comparisons, without styles."""
    rows = report.rows()
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row.values()) + "</tr>"
        for row in rows
    )
    compared = "".join(f"<li>{html.escape(str(found))}</li>" for found in report.comparisons)
    return (
        f'<div class="wide"><table class="numbers"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div><p>{html.escape(report.about())}</p>"
        f"<ul>{compared}</ul>"
    )
