"""Figures of reports on word errors, silence, yes/no answers and captions."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mmdecode.errors import MissingExtraError
from mmdecode.runs.files import MAKER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mmdecode.evaluation.report.item_comparison import ItemComparison

EDGES = (0, 2, 5, 10, 20, 30, np.inf)
"""Boundaries in seconds between the groups of recordings in `by_duration`."""


def wer_against_speed(modes: Mapping[str, Mapping[str, Any]]) -> Figure | None:
    """Plots RTFx (logarithmic) against WER, a point per mode; ``None``: nothing was timed."""
    timed = {name: mode for name, mode in modes.items() if mode["rtfx"]}
    if not timed:
        return None
    figure, axes = _figure("Word errors against speed")
    for name, mode in timed.items():
        rate = 100 * mode["wer"]
        spread = [[max(rate - 100 * mode["wer_low"], 0)], [max(100 * mode["wer_high"] - rate, 0)]]
        axes.errorbar(rate, mode["rtfx"], xerr=spread, fmt="o", capsize=3)
        where = rate, mode["rtfx"]
        axes.annotate(label(name), where, xytext=(5, 6), textcoords="offset points")
    axes.set_yscale("log")
    axes.set_xlabel("WER in %, with its 95 % interval")
    axes.set_ylabel("RTFx: seconds of audio per second")
    axes.margins(0.25)
    axes.set_xlim(left=max(0, axes.get_xlim()[0]))
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which("{x:g}")
    return figure


def error_kinds(modes: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Plots substitutions, deletions and insertions per reference word, as stacked bars."""
    figure, axes = _figure("Kinds of word errors")
    positions = np.arange(len(modes))
    bottom = np.zeros(len(modes))
    for kind in ("substitutions", "deletions", "insertions"):
        rates = np.array([100 * m[kind] / max(m["words"], 1) for m in modes.values()])
        axes.bar(positions, rates, bottom=bottom, label=kind, width=0.6)
        bottom += rates
    axes.set_xticks(positions, [label(name, 24) for name in modes])
    axes.set_ylabel("% of reference words")
    axes.legend()
    return figure


def by_duration(
    durations: Sequence[float | None], counts: Mapping[str, np.ndarray]
) -> Figure | None:
    """Plots the WER of recordings grouped by length; ``None``: no length is known.

    Args:
        durations: Length of each recording in seconds; ``None``: not known.
        counts: Counts of `mmdecode.evaluation.speech.wer.count_errors`, by mode.
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
        positions = np.arange(len(used)) + (index - (len(counts) - 1) / 2) * width
        axes.bar(positions, rates, width=width, label=label(name))
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


def words_per_minute(scores: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Plots hallucinated words per minute of non-speech, with a bar and interval for each mode.

    Args:
        scores: Scores (`mmdecode.evaluation.speech.silence.NonSpeechScore`) by class and mode.
    """
    figure, axes = _figure("Words where nobody speaks")
    modes = list(next(iter(scores.values())))
    figure.set_size_inches(10, 4)
    width = 0.8 / len(modes)
    for index, mode in enumerate(modes):
        own = [found[mode] for found in scores.values()]
        positions = np.arange(len(scores)) + (index - (len(modes) - 1) / 2) * width
        spread = [
            [max(one.rate - one.low, 0) for one in own],
            [max(one.high - one.rate, 0) for one in own],
        ]
        axes.bar(
            positions,
            [one.rate for one in own],
            width=width,
            yerr=spread,
            error_kw={"linewidth": 0.7},
            label=label(mode),
        )
    axes.set_xticks(range(len(scores)), [label(name).replace(" ", "\n", 1) for name in scores])
    axes.set_ylabel("words per minute")
    _legend(figure, axes, columns=2)
    return figure


def accuracy_against_yes(
    modes: Mapping[str, Mapping[str, Mapping[str, Any]]], controls: Mapping[str, str]
) -> Figure:
    """Plots accuracy against the share of answers yes, with a panel for each question set.

    Args:
        modes: Scores (`mmdecode.evaluation.vision.yes_no.YesNoScore`, as a mapping) by mode and
            set.
        controls: Control of each mode, by the mode's name; its point is hollow, and a line joins it
            to the mode's point.
    """
    sets = list(next(iter(modes.values())))
    figure, panels = _panels("Accuracy against the share of yes", sets)
    for name, axes in zip(sets, panels, strict=True):
        scores = {mode: found[name] for mode, found in modes.items()}
        _points(axes, scores, controls, ("yes_ratio", 100), "accuracy")
        axes.set_xlabel("answers yes in %")
    panels[0].set_ylabel("accuracy in %, with its 95 % interval")
    _legend(figure, panels[0])
    return figure


def margin_roc(margins: Mapping[str, np.ndarray], positive: np.ndarray, title: str) -> Figure:
    """Plots the ROC of the margin of yes over no, with each mode's point at margin 0.

    Args:
        margins: Margin of each question by mode, ``(questions,)``.
        positive: Whether the right answer to each question is yes, ``(questions,)``.
        title: Name of the question set.
    """
    from mmdecode.evaluation.stats.margins import auroc, roc

    figure, axes = _figure(f"Margin of yes over no, {label(title)}")
    axes.plot([0, 1], [0, 1], color="gray", linewidth=0.8, linestyle="--")
    for mode, values in margins.items():
        text = f"{label(mode)} ({float(auroc(values, positive)):.3f})"
        (line,) = axes.plot(*roc(values, positive), label=text)
        answered_yes = values > 0
        point = (
            (answered_yes & ~positive).sum() / (~positive).sum(),
            (answered_yes & positive).sum() / positive.sum(),
        )
        axes.plot(*point, "o", color=line.get_color())
    axes.set_xlabel("no-questions answered yes")
    axes.set_ylabel("yes-questions answered yes")
    axes.legend(title="AUROC; the dot answers at margin 0")
    return figure


def chair_against_recall(
    modes: Mapping[str, Mapping[str, Any]], controls: Mapping[str, str]
) -> Figure:
    """Plots CHAIR_i against recall and against caption length.

    Args:
        modes: Scores (`mmdecode.evaluation.vision.tasks.chair.ChairScore`, as a mapping) by mode.
        controls: See `accuracy_against_yes`.
    """
    figure, panels = _panels("Hallucinated mentions", ["against recall", "against length"])
    scales = (("recall", 100), "objects mentioned in %"), (("length", 1), "words per caption")
    for axes, (scale, title) in zip(panels, scales, strict=True):
        _points(axes, modes, controls, scale, "chair_i")
        axes.set_xlabel(title)
    panels[0].set_ylabel("CHAIR_i in %, with its 95 % interval")
    _legend(figure, panels[0])
    return figure


def forest(comparisons: Sequence[ItemComparison], name: str) -> Figure | None:
    """Plots a difference of each comparison with its interval; ``None``: no comparison has it.

    Args:
        comparisons: Comparisons of any number of pairs and question sets.
        name: Name of the difference, such as ``accuracy``.
    """
    shown = [found for found in comparisons if name in found.differences]
    if not shown:
        return None
    figure, axes = _figure(f"Difference of {name}")
    positions = -np.arange(len(shown))
    for row, found in zip(positions, shown, strict=True):
        one = found.differences[name]
        spread = [[max(one.value - one.low, 0) * 100], [max(one.high - one.value, 0) * 100]]
        axes.errorbar(100 * one.value, row, xerr=spread, fmt="o", capsize=3, color="C0")
    axes.axvline(0, color="gray", linewidth=0.8)
    labels = [f"{label(f.second)} against {label(f.first)}, {label(f.within)}" for f in shown]
    axes.set_yticks(positions, labels)
    width = max(8, 4 + 0.08 * max(map(len, labels)))  # inches; long names take their own
    figure.set_size_inches(width, max(3, 0.3 * len(shown) + 1))
    axes.set_xlabel("difference in points, with its 95 % interval")
    return figure


def label(name: str, longest: int = 60) -> str:
    """A name as matplotlib shows it: printable, not too long, and not hidden by a first ``_``.

    Args:
        name: The name.
        longest: Number of characters; the rest of a longer name is cut off.
    """
    text = "".join(char if char.isprintable() else "\ufffd" for char in name)
    return (text if len(text) <= longest else f"{text[: longest - 1]}…").lstrip("_") or "-"


def png(figure: Figure) -> bytes:
    """Renders a figure to PNG data; texts are shown as they are, without formulas."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
    data = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure.savefig(data, format="png", dpi=120, metadata={"Software": MAKER})
    return data.getvalue()


def drawable() -> None:
    """Checks that figures can be drawn; call it before long work.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("drawing figures needs matplotlib", extra="eval") from error


def _figure(title: str) -> tuple[Figure, Any]:
    drawable()
    from matplotlib.figure import Figure

    class Shown(Figure):
        """Figure that a notebook displays without pyplot."""

        def _repr_png_(self) -> bytes:
            return png(self)

    figure = Shown(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _points(
    axes: Any,
    modes: Mapping[str, Mapping[str, Any]],
    controls: Mapping[str, str],
    right: tuple[str, float],
    up: str,
) -> None:
    """Draws each mode's point with its interval, and a line to the hollow point of its control."""
    across, scale = right
    for index, mode in enumerate(mode for mode in modes if mode not in controls.values()):
        color, score = f"C{index % 10}", modes[mode]
        x, y = scale * score[across], 100 * score[up]
        low, high = (100 * end for end in score["intervals"][up])
        spread = [[max(y - low, 0)], [max(high - y, 0)]]
        marker = "osD^v"[index // 10 % 5]
        axes.errorbar(x, y, yerr=spread, fmt=marker, capsize=3, color=color, label=label(mode))
        if mode in controls:
            control = modes[controls[mode]]
            end = scale * control[across], 100 * control[up]
            axes.plot([x, end[0]], [y, end[1]], color=color, linewidth=0.8)
            axes.plot(*end, marker, color=color, markerfacecolor="white")
    axes.margins(0.15)


def _legend(figure: Figure, axes: Any, columns: int = 4) -> None:
    """Adds a legend below all panels; the figure grows in height, so that the panels do not shrink.

    Args:
        figure: The figure.
        axes: Axes with the labelled points.
        columns: Largest number of columns of the legend; long names reduce it.
    """
    handles, names = axes.get_legend_handles_labels()
    widest = 0.5 + 0.075 * max(map(len, names), default=0)  # inches, of a name of that size
    columns = max(1, min(columns, int(figure.get_figwidth() / widest)))
    figure.set_figheight(figure.get_figheight() + 0.17 * math.ceil(len(names) / columns))
    figure.legend(handles, names, loc="outside lower center", ncols=columns, fontsize=8)


def _panels(title: str, names: Sequence[str]) -> tuple[Figure, list[Any]]:
    """Makes axes side by side with a shared vertical scale, each with its name as title."""
    figure, first = _figure("")
    first.remove()
    figure.set_size_inches(max(6, 4 * len(names)), 4)
    panels = list(figure.subplots(1, len(names), sharey=True, squeeze=False)[0])
    figure.suptitle(title)
    for axes, name in zip(panels, names, strict=True):
        axes.set_title(label(name))
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels
