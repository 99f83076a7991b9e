"""Options that all demos share, and their last lines: conditions, files and duration."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmdecode.runs.console import console, print_line
from mmdecode.runs.files import refuse_foreign, write_file

PAGE = "report.html"


@dataclass(frozen=True)
class Setting:
    """Options of every demo.

    Attributes:
        out: Folder of the page.
        limit: Maximum number of inputs; ``None``: the demo's own.
        device: Device of the model; ``None``: chosen automatically.
        dtype: Dtype of the model.
        quantize: See `mmdecode.image_ar.loading.load`.
        seed: Seed of images, confidence intervals and guides.
        overwrite: Whether to replace a file that mmdecode did not write.
        started: Clock in seconds when the demo began.
    """

    out: Path
    limit: int | None
    device: str | None
    dtype: str
    quantize: str | None
    seed: int
    overwrite: bool
    started: float = field(default_factory=time.perf_counter)

    @property
    def weights(self) -> tuple[str | None, str, str | None]:
        """How a model is loaded: device, dtype and format of rounding."""
        return self.device, self.dtype, self.quantize

    def refuse(self, *more: Path) -> None:
        """Refuses to replace the page or one of further files if mmdecode did not write it."""
        refuse_foreign([self.out / PAGE, *more], self.overwrite)

    def end(
        self, page: str, summary: dict[str, Any], conditions: Mapping[str, str], *more: str
    ) -> dict[str, Any]:
        """Writes the page, and prints conditions, files and duration; adds these to a summary.

        Args:
            page: The page as HTML.
            summary: Measurements as JSON values, for ``--json``.
            conditions: Conditions of the measurements, by name.
            more: Names of files and folders next to the page.
        """
        write_file(self.out / PAGE, page, self.overwrite)
        files = {name: str(self.out / name) for name in (PAGE, *more)}
        seconds = round(time.perf_counter() - self.started, 1)
        for text in conditions.values():
            console.print(text, style="dim", markup=False, highlight=False)
        for path in files.values():
            print_line(path, console, "bold")
        console.print(f"done in {seconds:.0f} s", highlight=False)
        return summary | {"seconds": seconds, "files": files}
