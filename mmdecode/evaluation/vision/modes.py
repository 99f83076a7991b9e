"""Modes of decoding that are compared: guides, sampling, and controls that a guide has to beat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmdecode import registry
from mmdecode.errors import OptionError

if TYPE_CHECKING:
    from mmdecode.engine.contracts import Guide

NONE = "none"
"""Name that stands for no guide: the plain model."""
GREEDY, SAMPLED = "greedy", "sampled"
"""Names of the plain model's modes."""
CONTROLS = ("plausible", "temperature_matched", "prompt_bias", "near_ties", "margin_shift")
"""Guides that serve as controls: a method should be better than they are."""
INERT = ("plausible", "temperature_matched", "dfd")
"""Guides that never change the most likely token; they are useful with sampling only."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way of decoding.

    Attributes:
        name: Name in tables and rows.
        guide: Specification of the guide, ``NAME:OPTION=VALUE``; `NONE`: the plain model.
        seeds: Seeds of the sampled repeats; empty: greedy decoding.
        control: Whether the mode is a control, with which other modes are compared.
        against: Names of the modes that this mode is compared with.
    """

    name: str
    guide: str = NONE
    seeds: tuple[int, ...] = ()
    control: bool = False
    against: tuple[str, ...] = ()


def modes_of(
    guides: Sequence[str],
    *,
    greedy: bool = True,
    seeds: Sequence[int] = (),
    controls: bool = True,
    yes_no: bool = True,
) -> list[Mode]:
    """Lists the modes of a run: the plain model, each guide, and controls that a guide has to beat.

    Controls for yes/no questions are an instruction to answer yes, and the flip of answers with a
    small margin (sampled if there is no greedy mode). A sampled guide is compared with its
    plausibility cut alone, and with the temperature that its weights imply if their sum is not 1.
    The control with a shifted margin is computed in `mmdecode.evaluation.vision.yes_no_report`.

    Args:
        guides: Specifications of guides, ``NAME:OPTION=VALUE``; `NONE` is ignored.
        greedy: Whether to decode greedily.
        seeds: Seeds of sampling; empty: nothing is sampled.
        controls: Whether to add the controls.
        yes_no: Whether the questions are answered with yes or no.

    Raises:
        OptionError: Neither greedy decoding nor a seed is given, or a guide has no effect on greedy
            decoding and there is no seed.
        UnknownNameError: There is no such guide.
    """
    seeds = tuple(seeds)
    if not greedy and not seeds:
        raise OptionError("there is no mode to run; ask for greedy decoding or give a seed")
    found: dict[str, Mode] = {}

    def add(name: str, guide: str, sampled: bool, control: bool, *against: str) -> None:
        earlier = tuple(dict.fromkeys(one for one in against if one in found))
        mode = Mode(name=name, guide=guide, seeds=seeds * sampled, control=control, against=earlier)
        found.setdefault(name, mode)

    if greedy or controls:
        add(GREEDY, NONE, False, not greedy)
    if seeds:
        add(SAMPLED, NONE, True, bool(found), GREEDY)
    if controls and yes_no:
        for name in ("prompt_bias", "near_ties"):
            shown = name if greedy else _sampled(name)
            add(shown, name, not greedy, True, GREEDY if greedy else SAMPLED)
    for spec in dict.fromkeys(guides):
        if spec == NONE:
            continue
        guide = registry.create("guide", spec)
        kind = spec.partition(":")[0]
        control = kind in CONTROLS
        if kind in INERT and not seeds:
            raise OptionError(
                f"guide {spec!r} has no effect on greedy decoding; sample too, or leave the guide "
                "out"
            )
        if greedy and kind not in INERT:
            add(spec, spec, False, control, GREEDY)
        if seeds:
            more = [] if control or not controls else sampled_controls(guide)
            for other in more:
                add(_sampled(other), other, True, True, SAMPLED)
            add(_sampled(spec), spec, True, control, SAMPLED, *map(_sampled, more))
    return list(found.values())


def sampled_controls(guide: Guide) -> list[str]:
    """Specifications of a sampled guide's controls: its plausibility cut, its temperature."""
    beta = getattr(guide, "beta", 0.0) or getattr(guide, "relative_top", 0.0)
    total = guide.total
    found = [f"plausible:beta={beta:g}"] if beta else []
    if total is not None and total > 0 and not math.isclose(total, 1.0):
        found.append(f"temperature_matched:total={total:g},beta={beta:g}")
    return found


def _sampled(spec: str) -> str:
    return f"{spec}, {SAMPLED}"
