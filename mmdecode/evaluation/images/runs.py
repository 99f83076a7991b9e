"""Samples images in several modes of one model, in turns, and computes their logits.

Modes take turns batch by batch, A B B A, so that a machine that slows down slows all of them. The
images of all modes have the same conditions and the same seed, except for a second plain run with
another seed: it shows by how much two samples of one distribution differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmdecode.errors import InputError, OptionError
from mmdecode.evaluation.stats.image_tables import code_groups
from mmdecode.guide.guidance import Guidance
from mmdecode.image_ar.backends import reread
from mmdecode.image_ar.generator import ImageGenerator
from mmdecode.image_ar.loading import RasterModel
from mmdecode.image_ar.modes import MODES, decoder_of
from mmdecode.image_ar.results import GeneratedImage
from mmdecode.runs.files import complete_lines
from mmdecode.runs.items import Watch
from mmdecode.runs.journal import Journal

ROWS = "images.jsonl"
PLAIN, AGAIN = "plain", "plain again"
"""The reference, and the same with another seed."""
ALIASES = {PLAIN: "ar"}
"""Names of `mmdecode.image_ar.modes.MODES` that a mode may also be given by."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to sample images.

    Attributes:
        name: Name in tables and rows.
        preset: One of `mmdecode.image_ar.modes.MODES`; ``None``: draft and rule are given.
        draft, accept: Specifications for the registry.
        shift: Number added to the seed.
    """

    name: str
    preset: str | None = None
    draft: str | None = None
    accept: str = "auto"
    shift: int = 0


def modes_of(presets: Sequence[str], also: Sequence[str] = ()) -> list[Mode]:
    """The modes of a run: plain decoding first, and again under another seed.

    Args:
        presets: Names of `mmdecode.image_ar.modes.MODES`, or `PLAIN`.
        also: Others as ``DRAFT + RULE``, or ``DRAFT``.

    Raises:
        OptionError: There is no such preset, or one is given twice.
    """
    found = [Mode(name=PLAIN, preset="ar"), Mode(name=AGAIN, preset="ar", shift=1)]
    for name in dict.fromkeys(presets):
        preset = ALIASES.get(name, name)
        if preset not in MODES:
            known = ", ".join((PLAIN, *(m for m in MODES if m not in ALIASES.values())))
            raise OptionError(f"there is no mode {name!r}; known are {known}")
        if preset not in ALIASES.values():
            found.append(Mode(name=name, preset=preset))
    for spec in dict.fromkeys(also):
        draft, _, accept = (part.strip() for part in spec.partition("+"))
        found.append(Mode(name=spec, draft=draft, accept=accept or "auto"))
    return found


@dataclass(frozen=True, kw_only=True)
class ImageRow:
    """One image of one mode.

    Attributes:
        mode: Its name.
        condition: Class or prompt.
        ordinal: Index among the images of that condition, from 0.
        codes: Codes in raster order; ``None``: it failed.
        commits: Index of the pass in which each code was committed.
        passes: Scoring passes after the prompt was read.
        seconds: Time of its batch, shared out evenly.
        error: Why it failed; ``None``: it did not.
    """

    mode: str
    condition: int | str
    ordinal: int
    codes: list[int] | None = None
    commits: list[int] | None = None
    passes: int | None = None
    seconds: float | None = None
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The fields as a JSON row."""
        return asdict(self)


def journal_of(
    folder: Path, settings: Mapping[str, Any], resume: bool, overwrite: bool = False
) -> Journal[ImageRow]:
    """The images of a run, in a folder; see `Journal`."""
    return Journal(folder / ROWS, read_images, _key, settings, resume, overwrite)


def read_images(path: Path) -> list[ImageRow]:
    """Rows of a file; of several for one image the last counts.

    Raises:
        InputError: A line is damaged.
    """
    found: dict[Any, ImageRow] = {}
    for number, line in enumerate(complete_lines(path), 1):
        try:
            row = ImageRow(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise InputError(
                f"{path}, line {number} is no image; remove the line, and --resume draws it again"
            ) from error
        found[_key(row)] = row
    return list(found.values())


def _key(row: ImageRow) -> tuple[str, int | str, int]:
    return row.mode, row.condition, row.ordinal


class Recorder:
    """Samples images in several modes.

    Args:
        model: A model of image tokens in raster order.
        modes: See `modes_of`.
        conditions: Classes or prompts, one an image; they may repeat.
        model_id: Its name, for drafts that belong to it.
        seed: Seed of the keyed noise.
        batch: Images drawn at once.
        **how: Guidance and sampling, see `ImageGenerator`.

    Attributes:
        generators: Generators by the name of their mode.
        requests: Requests of each mode.

    Raises:
        OptionError: The model does not know a condition.
        IncompatibleError: Draft and rule of a mode, or they and the model, do not fit.
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
        self.modes, self.batch = list(modes), batch
        for condition in dict.fromkeys(conditions):
            model.adapter.condition(**model.given([condition]))
        self.generators = {
            mode.name: ImageGenerator(
                model,
                decoder_of(
                    mode.preset,
                    mode.draft,
                    mode.accept,
                    adapter=model.adapter,
                    target=model.adapter.model,
                    model_id=model_id,
                ),
                seed=seed + mode.shift,
                batch=batch,
                **how,
            )
            for mode in modes
        }
        self._watches = {mode.name: Watch() for mode in modes}
        self.requests = self.generators[self.modes[0].name].requests(conditions)

    @property
    def total(self) -> int:
        """Number of rows."""
        return len(self.requests) * len(self.modes)

    @property
    def settings(self) -> dict[str, Any]:
        """Guidance and sampling of all modes."""
        return self.generators[self.modes[0].name].settings

    @property
    def guarantees(self) -> dict[str, str]:
        """Guarantee of each mode, see `GeneratedImage`."""
        return {name: generator.guarantee for name, generator in self.generators.items()}

    def run(
        self,
        journal: Journal[ImageRow] | None = None,
        progress: Callable[[ImageRow], None] | None = None,
    ) -> list[ImageRow]:
        """Rows of all modes, images in order.

        Args:
            journal: Where rows go as they come; images that are there are left out, failed ones are
                tried again.
            progress: Called with each row.
        """
        found: dict[Any, ImageRow] = {}
        if journal:
            found = {key: row for key, row in journal.done.items() if row.error is None}
        for number, start in enumerate(range(0, len(self.requests), self.batch)):
            batch = self.requests[start : start + self.batch]
            for mode in self.modes if number % 2 == 0 else self.modes[::-1]:
                todo = [
                    one for one in batch if (mode.name, one.condition, one.ordinal) not in found
                ]
                for image in self.generators[mode.name].images(
                    todo, watch=self._watches[mode.name]
                ):
                    row = row_of(mode.name, image)
                    found[_key(row)] = row
                    if journal:
                        journal.add(row)
                    if progress:
                        progress(row)
        rows = [
            found[mode.name, one.condition, one.ordinal]
            for mode in self.modes
            for one in self.requests
        ]
        if journal:
            journal.finish(rows)
        return rows


def row_of(mode: str, image: GeneratedImage) -> ImageRow:
    """The row of the journal for an image."""
    generated = image.error is None
    return ImageRow(
        mode=mode,
        condition=image.condition,
        ordinal=image.ordinal,
        codes=image.codes.flatten().tolist() if generated else None,
        commits=image.commits.flatten().tolist() if generated else None,
        passes=image.passes if generated else None,
        seconds=image.seconds if generated else None,
        error=image.error,
    )


def stacked(rows: Sequence[ImageRow], shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Codes and commit passes of the images that did not fail, ``(n, rows, columns)`` each."""
    generated = [row for row in rows if row.error is None]
    codes = torch.tensor([row.codes for row in generated]).view(-1, *shape)
    return codes, torch.tensor([row.commits for row in generated]).view(-1, *shape)


def groups_of(model: RasterModel) -> Tensor:
    """Codes of like meaning, see `code_groups`; by their number where no codebook is at hand."""
    book = model.adapter.codebook()
    numbers = torch.arange(len(model.adapter.layout.ids))[:, None]
    return code_groups(numbers if book is None else book)


@torch.no_grad()
def forced_logits(
    model: RasterModel, conditions: Sequence[Any], codes: Tensor, guidance: float
) -> Tensor:
    """Guided logits of given images, over codes, each after the codes before it.

    Args:
        model: The model.
        conditions: One an image.
        codes: ``(B, rows, columns)``.
        guidance: s of ``u + s (c - u)``.

    Returns:
        ``(B, rows * columns, C)`` float32.
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
