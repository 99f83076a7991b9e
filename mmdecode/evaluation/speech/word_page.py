"""The page of a word error report, with audio players for the recordings with the most errors."""

from __future__ import annotations

import dataclasses
import html
from pathlib import Path
from typing import TYPE_CHECKING

from mmdecode.evaluation.report import plots
from mmdecode.evaluation.report.layout import document, html_table
from mmdecode.evaluation.report.pages import marked, player
from mmdecode.evaluation.speech.samples import Sample
from mmdecode.evaluation.speech.wer import align_as_written

if TYPE_CHECKING:
    from mmdecode.evaluation.speech.word_report import WERReport

PLAYED = 4 << 20
"""Size in bytes of the largest recording that is embedded in a page."""
MARKS = ".substitute,.insert,del.delete{color:#b3261e}.substitute del{color:gray;margin-left:.3em}"
"""Styles of an alignment in a notebook; pages use ``report.css``."""


@dataclasses.dataclass(frozen=True, repr=False)
class Worst:
    """Samples with many errors; displayed in a notebook with audio players and alignments.

    Attributes:
        samples: Samples, the one with the most errors first.
        errors: Word errors of each sample.
        normaliser, scorer, segmented: Options with which the errors were counted.
    """

    samples: list[Sample]
    errors: list[int]
    normaliser: str
    scorer: str
    segmented: bool = False

    def as_html(self) -> str:
        """Audio players and alignments as HTML, without styles."""
        return "".join(
            self._article(sample, errors)
            for sample, errors in zip(self.samples, self.errors, strict=True)
        )

    def _article(self, sample: Sample, errors: int) -> str:
        audio = Path(sample.audio_filepath) if sample.audio_filepath else None
        small = audio is not None and audio.is_file() and audio.stat().st_size <= PLAYED
        steps = align_as_written(
            sample.text, sample.pred_text, self.normaliser, self.scorer, self.segmented
        )
        failed = f'<p class="bad">{html.escape(sample.error)}</p>' if sample.error else ""
        return (
            f'<article class="clip"><h3>{html.escape(sample.id)}</h3>'
            f"<p>{errors} word error{'s' * (errors != 1)}</p>{failed}"
            f"{player(audio, sample.id) if audio is not None and small else ''}"
            f"<dl><dt>reference</dt><dd>{html.escape(sample.text)}</dd>"
            f"<dt>hypothesis</dt><dd>{marked(steps)}</dd></dl></article>"
        )

    def _repr_html_(self) -> str:
        return f"<style>{MARKS}</style>{self.as_html()}"

    def __repr__(self) -> str:
        lines = []
        for sample, errors in zip(self.samples, self.errors, strict=True):
            lines.append(f"{sample.id}: {errors} word errors")
            lines.append(f"  reference  {sample.text}")
            lines.append(f"  hypothesis {sample.error or sample.pred_text}")
        return "\n".join(lines)

    def __len__(self) -> int:
        return len(self.samples)


def page_of(report: WERReport) -> str:
    """Returns one HTML file with tables, figures, and the recordings with the most errors."""
    worst = "".join(
        f"<h2>Most errors, {html.escape(mode)}</h2>{report.worst(10, mode).as_html()}"
        for mode in report.modes
    )
    figures = {name: plots.png(figure) for name, figure in report.figures().items()}
    return document("Word errors", overview(report), figures, worst, report.conditions)


def overview(report: WERReport) -> str:
    """Table of the scores, its explanation and the comparisons as HTML, without styles."""
    compared = "".join(f"<li>{html.escape(str(found))}</li>" for found in report.comparisons)
    marks = report.mark_rows()
    table = html_table(marks) if marks else ""
    about = html.escape(report.about())
    return f"{html_table(report.rows())}<p>{about}</p>{table}<ul>{compared}</ul>"
