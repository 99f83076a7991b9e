"""Figures of a word error report."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mmdecode.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EDGES = (0, 2, 5, 10, 20, 30, np.inf)
"""Seconds that separate the bars of `by_duration`."""


def wer_against_speed(modes: Mapping[str, Mapping[str, Any]]) -> Figure | None:
    """WER to the right, RTFx up on a logarithmic axis; ``None``: nothing was timed."""
    timed = {name: mode for name, mode in modes.items() if mode["rtfx"]}
    if not timed:
        return None
    figure, axes = _figure("Word errors against speed")
    for name, mode in timed.items():
        rate = 100 * mode["wer"]
        spread = [[max(rate - 100 * mode["wer_low"], 0)], [max(100 * mode["wer_high"] - rate, 0)]]
        axes.errorbar(rate, mode["rtfx"], xerr=spread, fmt="o", capsize=3)
        axes.annotate(
            name, (rate, mode["rtfx"]), xytext=(5, 6), textcoords="offset points", parse_math=False
        )
    axes.set_yscale("log")
    axes.set_xlabel("WER in %, with its 95 % interval")
    axes.set_ylabel("RTFx: seconds of audio per second")
    axes.margins(0.25)
    axes.set_xlim(left=max(0, axes.get_xlim()[0]))
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which("{x:g}")
    return figure


def error_kinds(modes: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Substitutions, deletions and insertions per reference word, as stacked bars."""
    figure, axes = _figure("Kinds of word errors")
    places = np.arange(len(modes))
    bottom = np.zeros(len(modes))
    for kind in ("substitutions", "deletions", "insertions"):
        rates = np.array([100 * m[kind] / max(m["words"], 1) for m in modes.values()])
        axes.bar(places, rates, bottom=bottom, label=kind, width=0.6)
        bottom += rates
    axes.set_xticks(places, [name[:24] for name in modes], parse_math=False)
    axes.set_ylabel("% of reference words")
    axes.legend()
    return figure


def by_duration(
    durations: Sequence[float | None], counts: Mapping[str, np.ndarray]
) -> Figure | None:
    """WER of recordings of like length, with their number; ``None``: no length is known.

    Args:
        durations: Seconds of each recording.
        counts: Of `mmdecode.evaluation.wer.count_errors`, by mode.
    """
    known = np.array([np.nan if d is None else d for d in durations])
    if np.isnan(known).all():
        return None
    buckets = np.digitize(known, EDGES[1:-1])
    used = [b for b in range(len(EDGES) - 1) if ((buckets == b) & ~np.isnan(known)).any()]
    figure, axes = _figure("Word errors by length of the recording")
    width = 0.8 / len(counts)
    for index, (name, table) in enumerate(counts.items()):
        sums = [table[(buckets == bucket) & ~np.isnan(known)].sum(0) for bucket in used]
        rates = [100 * s[2:5].sum() / max(s[0], 1) for s in sums]
        places = np.arange(len(used)) + (index - (len(counts) - 1) / 2) * width
        axes.bar(places, rates, width=width, label=name.lstrip("_") or name)
    labels = []
    for bucket in used:
        low, high = EDGES[bucket : bucket + 2]
        span = f"{low:g}-{high:g} s" if np.isfinite(high) else f"over {low:g} s"
        count = int(((buckets == bucket) & ~np.isnan(known)).sum())
        labels.append(f"{span}\n{count} recording{'s' * (count != 1)}")
    axes.set_xticks(range(len(used)), labels)
    axes.set_ylabel("WER in %")
    axes.legend()
    return figure


def png(figure: Figure) -> bytes:
    """A figure as a file of type PNG."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120)
    return data.getvalue()


def _figure(title: str) -> tuple[Figure, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("drawing figures needs matplotlib", extra="eval") from error

    class Shown(Figure):
        """Drawn by a notebook without pyplot."""

        def _repr_png_(self) -> bytes:
            return png(self)

    figure = Shown(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
