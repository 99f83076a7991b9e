"""`Report`: base class of reports, which lay out scores as tables, figures and a page."""

from __future__ import annotations

import abc
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdecode.errors import MissingExtraError
from mmdecode.evaluation.report import plots
from mmdecode.evaluation.report.examples import Examples
from mmdecode.evaluation.report.layout import Rows, markdown, markdown_page
from mmdecode.evaluation.report.templates import data_url, rendered
from mmdecode.runs.files import marked_json, write_files
from mmdecode.runs.tables import WRITERS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Report(abc.ABC):
    """Base class of reports: a verdict, tables, figures and examples of the modes of a run.

    A subclass computes the scores; this class writes them to files, pages and notebooks, the
    verdict first and the full tables last.

    Attributes:
        title: Title of the page.
        conditions: Settings and hardware of the run, by name.
    """

    title = "Scores"
    conditions: dict[str, Any]

    @property
    @abc.abstractmethod
    def summary(self) -> dict[str, Any]:
        """All numbers and settings of the report."""

    @abc.abstractmethod
    def verdict(self) -> list[str]:
        """Result in one sentence, and further sentences on single modes."""

    @abc.abstractmethod
    def rows(self) -> Rows:
        """The full table of scores."""

    @abc.abstractmethod
    def about(self) -> str:
        """Explains the numbers in a sentence or two."""

    @property
    def comparisons(self) -> Sequence[Any]:
        """Paired comparisons of modes; their texts are sentences."""
        return ()

    def differences(self) -> Rows:
        """Table of the comparisons; empty: they are shown as sentences."""
        return []

    def brief(self) -> list[Rows]:
        """Short tables, which the verdict stands on."""
        return [self.rows()]

    def tables(self) -> list[Rows]:
        """Full tables, the one of `rows` first."""
        return [self.rows()]

    def figures(self) -> Mapping[str, Figure | bytes]:
        """Figures by name, as matplotlib has them or as PNG data; one without data is left out."""
        return {}

    def examples(self) -> Mapping[str, Examples]:
        """Items that the page shows, by heading."""
        return {}

    def records(self) -> list[dict[str, Any]]:
        """Results of single items, a dictionary for each."""
        return []

    def failures(self) -> list[dict[str, Any]]:
        """Items that failed: their names, and the message under ``error``."""
        return [
            {name: row.get(name) for name in ("id", "mode", "seed", "error") if name in row}
            for row in self.records()
            if row.get("error") is not None
        ]

    def further_files(self) -> Mapping[str, str | bytes]:
        """Contents of further files, by path in the output folder."""
        return {}

    def table(self) -> str:
        """The verdict, the full tables and their explanation, as Markdown."""
        verdict = "".join(f"- {line}\n" for line in self.verdict())
        return "\n".join([verdict, *map(markdown, self.tables()), f"{self.about()}\n"])

    @cached_property
    def drawings(self) -> dict[str, bytes]:
        """The figures as PNG data, by name."""
        return {
            name: figure if isinstance(figure, bytes) else plots.png(figure)
            for name, figure in self.figures().items()
        }

    def page(self) -> str:
        """Returns one HTML file with verdict, tables, figures and examples.

        Raises:
            MissingExtraError: The report has figures, and matplotlib is not installed.
        """
        return rendered(
            "report.html",
            report=self,
            figures={name: data_url(data) for name, data in self.drawings.items()},
        )

    def save(self, folder: str | os.PathLike[str], overwrite: bool = False) -> list[Path]:
        """Writes summary, tables, page, figures and further files; returns their paths.

        Args:
            folder: Output folder; created if it does not exist.
            overwrite: Whether to replace files that this library did not write.

        Raises:
            OptionError: A file that this library did not write would be replaced.
            MissingExtraError: The report has figures, and matplotlib is not installed.
        """
        lines = "".join(f"- {found}\n" for found in self.comparisons)
        files: dict[str, str | bytes] = {
            "summary.json": marked_json(self.summary, indent=1),
            "table.md": markdown_page(f"{self.table()}\n{lines}"),
            "table.csv": WRITERS[".csv"](self.rows()),
            "report.html": self.page(),
        }
        files |= {f"{name}.png": data for name, data in self.drawings.items()}
        return write_files(Path(folder), files | dict(self.further_files()), overwrite)

    def to_pandas(self) -> Any:
        """Returns the results of single items as a pandas frame.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        with MissingExtraError.instead("a frame of results needs pandas", extra="eval"):
            import pandas
        return pandas.DataFrame(self.records())

    def _repr_html_(self) -> str:
        return rendered("overview.html", report=self)

    def __repr__(self) -> str:
        return self.table()
