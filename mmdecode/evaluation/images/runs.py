"""Samples images of one model in several modes (ways to sample), and computes their logits.

Modes take turns batch by batch, A B B A, so that a machine that slows down affects them alike. The
images of all modes have the same conditions and the same seed, except for a second plain run with
another seed: it shows by how much two samples of one distribution differ.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmdecode.errors import InputError, OptionError
from mmdecode.guide.guidance import Guidance
from mmdecode.image_ar.backends import reread
from mmdecode.image_ar.generator import ImageGenerator
from mmdecode.image_ar.loading import RasterModel
from mmdecode.image_ar.modes import MODES, decoder_of
from mmdecode.image_ar.results import GeneratedImage, ImageRequest
from mmdecode.runs.files import complete_lines
from mmdecode.runs.items import Noted, Watch
from mmdecode.runs.rows import RowJournal

ROWS = "images.jsonl"
PLAIN, AGAIN = "plain", "plain again"
"""Names of the reference mode, and of its second run with another seed."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to sample images.

    Attributes:
        name: Name in tables and rows.
        preset: Name in `mmdecode.image_ar.modes.MODES`; ``None``: ``draft`` and ``accept`` define
            the mode.
        draft, accept: Specifications of the drafter and of the acceptance rule, as
            ``NAME:OPTION=VALUE``.
        shift: Number added to the seed of the run.
    """

    name: str
    preset: str | None = None
    draft: str | None = None
    accept: str = "auto"
    shift: int = 0


def modes_of(presets: Sequence[str], also: Sequence[str] = ()) -> list[Mode]:
    """Lists the modes of a run: plain decoding, plain decoding with another seed, then the others.

    Args:
        presets: Names in `mmdecode.image_ar.modes.MODES`, or `PLAIN`; repeated names count once.
        also: Further modes, each written ``DRAFT + RULE`` or ``DRAFT``.

    Raises:
        OptionError: A preset is unknown.
    """
    found = [Mode(name=PLAIN, preset="ar"), Mode(name=AGAIN, preset="ar", shift=1)]
    for name in dict.fromkeys(presets):
        if name not in (PLAIN, *MODES):
            known = ", ".join((PLAIN, *(m for m in MODES if m != "ar")))
            raise OptionError(f"there is no mode {name!r}; known are {known}")
        if name not in (PLAIN, "ar"):
            found.append(Mode(name=name, preset=name))
    for spec in dict.fromkeys(also):
        draft, _, accept = (part.strip() for part in spec.partition("+"))
        found.append(Mode(name=spec, draft=draft, accept=accept or "auto"))
    return found


@dataclass(frozen=True, kw_only=True)
class ImageRow:
    """Record of one generated image.

    Attributes:
        mode: Name of the mode.
        condition: Class or prompt.
        ordinal: Index among the images of that condition, from 0.
        codes: Codes in raster order; ``None``: generation failed.
        commits: Index of the forward pass that committed each code; ``None``: generation failed.
        passes: Number of target forward passes after the prefill; ``None``: generation failed.
        seconds: Time of the batch divided by its size; ``None``: not known.
        error: Error message; ``None``: generation succeeded.
    """

    mode: str
    condition: int | str
    ordinal: int
    codes: list[int] | None = None
    commits: list[int] | None = None
    passes: int | None = None
    seconds: float | None = None
    error: str | None = None

    def key(self) -> tuple[str, int | str, int]:
        """Key of the image among those of a run."""
        return self.mode, self.condition, self.ordinal

    def as_dict(self) -> dict[str, Any]:
        """The fields as a JSON row."""
        return asdict(self)


def read_images(path: Path) -> list[ImageRow]:
    """Reads the rows of a file.

    Raises:
        InputError: A line is damaged.
    """
    rows = []
    for number, line in enumerate(complete_lines(path), 1):
        try:
            rows.append(ImageRow(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise InputError(
                f"{path}, line {number} is not the row of an image; remove the line, and --resume "
                "generates the image again"
            ) from error
    return rows


class Recorder:
    """Samples images of one model in several modes.

    Args:
        model: A model of image tokens in raster order.
        modes: Modes to sample in, see `modes_of`.
        conditions: Class or prompt of each image; repetitions ask for several images.
        model_id: Name of the model, for drafters that were trained for it.
        seed: Seed of all random numbers.
        batch: Batch size, in images.
        **how: Guidance and sampling options of `ImageGenerator`.

    Attributes:
        generators: Generator of each mode, by the mode's name.
        settings: Guidance and sampling options, the same for all modes.
        requests: Requests for images, the same for each mode.
        total: Number of images of all modes.

    Raises:
        OptionError: The model does not know a condition.
        IncompatibleError: Drafter, acceptance rule and model of a mode do not work together.
    """

    def __init__(
        self,
        model: RasterModel,
        modes: Sequence[Mode],
        conditions: Sequence[int | str],
        *,
        model_id: str = "",
        seed: int = 0,
        batch: int = 16,
        **how: Any,
    ) -> None:
        self.model, self.modes, self.batch = model, list(modes), batch
        for condition in dict.fromkeys(conditions):
            model.adapter.condition(**model.given([condition]))
        at_hand = {"target": model.adapter.model, "model_id": model_id}
        self.generators = {}
        for mode in modes:
            parts = mode.preset, mode.draft, mode.accept
            decoder = decoder_of(*parts, adapter=model.adapter, **at_hand)
            self.generators[mode.name] = ImageGenerator(
                model, decoder, seed=seed + mode.shift, batch=batch, **how
            )
        self._watches = {mode.name: Watch() for mode in modes}
        first = self.generators[self.modes[0].name]
        self.settings, self.requests = first.settings, first.requests(conditions)
        self.total = len(self.requests) * len(self.modes)

    def run(
        self,
        journal: RowJournal[ImageRow] | None = None,
        progress: Callable[[ImageRow], None] | None = None,
        *,
        items: Sequence[ImageRequest] | None = None,
        noted: Noted = contextlib.nullcontext,
    ) -> list[ImageRow]:
        """Samples the images of all modes; returns their rows, mode by mode.

        Args:
            journal: File that each row is added to as soon as it is ready. Images that it holds
                already are not sampled again, unless they failed. ``None``: nothing is written.
            progress: Called with each new row.
            items: Requests for images; ``None``: all.
            noted: Records which images are being generated, see `mmdecode.runs.items.Watch`.
        """
        requests = self.requests if items is None else items
        for watch in self._watches.values():
            watch.noted = noted
        found: dict[Any, ImageRow] = {}
        if journal:
            found = {key: row for key, row in journal.rows.items() if row.error is None}
        for number, start in enumerate(range(0, len(requests), self.batch)):
            batch = requests[start : start + self.batch]
            for mode in self.modes if number % 2 == 0 else self.modes[::-1]:
                name, watch = mode.name, self._watches[mode.name]
                todo = [one for one in batch if (name, one.condition, one.ordinal) not in found]
                for image in self.generators[name].images(todo, watch=watch):
                    row = row_of(name, image)
                    found[row.key()] = row
                    if journal:
                        journal.add(row)
                    if progress:
                        progress(row)
        rows = [
            found[mode.name, one.condition, one.ordinal] for mode in self.modes for one in requests
        ]
        if journal:
            journal.finish_with(rows)
        return rows

    def failed(self, item: ImageRequest, error: str) -> list[ImageRow]:
        """Rows of an image that cannot be generated, mode by mode."""
        return [
            ImageRow(mode=mode.name, condition=item.condition, ordinal=item.ordinal, error=error)
            for mode in self.modes
        ]


def row_of(mode: str, image: GeneratedImage) -> ImageRow:
    """Converts a generated image to its row in the journal."""
    generated: dict[str, Any] = {"error": image.error}
    if image.error is None:
        generated = {
            "codes": image.codes.flatten().tolist(),
            "commits": image.commits.flatten().tolist(),
            "passes": image.passes,
            "seconds": image.seconds,
        }
    return ImageRow(mode=mode, condition=image.condition, ordinal=image.ordinal, **generated)


@torch.no_grad()
def forced_logits(
    model: RasterModel, conditions: Sequence[Any], codes: Tensor, guidance: float
) -> Tensor:
    """Computes the teacher-forced, guided logits of given images.

    Args:
        model: Model of image tokens.
        conditions: Class or prompt of each image.
        codes: Codes of the images, ``(B, rows, columns)``.
        guidance: Scale ``s`` of classifier-free guidance, ``u + s (c - u)`` for conditional logits
            ``c`` and unconditional logits ``u``.

    Returns:
        Logits over the ``C`` codes at each position, ``(B, rows * columns, C)`` float32.
    """
    adapter = model.adapter
    layout, device = adapter.layout, adapter.model.device
    ids, positions = layout.ids.to(device), layout.cell_indices().flatten().to(device)
    tokens = layout.forced(torch.arange(layout.length)).to(device).repeat(len(codes), 1)
    tokens[:, positions] = ids[codes.flatten(1).to(device)]
    found = torch.empty((len(codes), layout.length + 1, len(ids)), device=device)

    def note(scores: Tensor, index: Tensor) -> None:
        found.scatter_(1, index[..., None].expand(-1, -1, len(ids)), scores[..., ids].float())

    reread(adapter, Guidance(guidance), tokens, note, model.given(conditions))
    return found[:, positions]
