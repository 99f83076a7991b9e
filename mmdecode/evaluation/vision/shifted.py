"""The baseline that answers yes as often as a method, by a constant added to its margins."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from mmdecode.evaluation.stats import margins as margins_of
from mmdecode.evaluation.vision.items import YesNoItem


def shifted(
    plain: Sequence[YesNoItem], yes_share: np.ndarray, mode: str, seed: int = 0
) -> list[YesNoItem]:
    """Shifts a model's margins so that it answers yes as often as a method; returns the answers.

    Args:
        plain: The model's answers; answers without a margin are kept and not used for fitting.
        yes_share: Share of the method's answers to each question that are yes, see
            `mmdecode.evaluation.stats.margins.cross_fitted_shifts`.
        mode: Mode name of the returned answers.
        seed: Seed of the folds of cross-fitting.

    Raises:
        OptionError: Fewer than two images have margins.
    """
    known = np.array([item.margin is not None for item in plain])
    # a question that counts in three splits weighs three times in the yes-ratio
    repeated = np.repeat(np.arange(len(plain)), [len(item.sets) for item in plain])
    repeated = repeated[known[repeated]]
    margins = np.array([item.margin for item in plain], dtype=float)
    images = [plain[index].image or plain[index].id for index in repeated.tolist()]
    shifts = np.zeros(len(plain))
    # every repeat of a question has its image's shift
    shifts[repeated] = margins_of.cross_fitted_shifts(
        margins[repeated], yes_share[repeated], images, seed=seed
    )
    moved = margins + shifts
    return [
        item.answered(mode=mode, output="Yes" if margin > 0 else "No", margin=float(margin))
        if has_margin
        else dataclasses.replace(item, mode=mode)
        for item, margin, has_margin in zip(plain, moved, known, strict=True)
    ]
