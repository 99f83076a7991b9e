"""Figures of reports on word errors, silence, yes/no answers, captions and images."""

from __future__ import annotations

import io
import itertools
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
    figure, (axes,) = _figure("Word errors against speed")
    for name, mode in timed.items():
        point = 100 * mode["wer"], mode["rtfx"]
        spread = _spread(point[0], 100 * mode["wer_low"], 100 * mode["wer_high"])
        axes.errorbar(*point, xerr=spread, fmt="o", capsize=3)
        axes.annotate(label(name), point, xytext=(5, 6), textcoords="offset points")
    axes.set(yscale="log", ylabel="RTFx: seconds of audio per second")
    axes.set_xlabel("WER in %, with its 95 % interval")
    axes.margins(0.25)
    axes.set_xlim(left=max(0, axes.get_xlim()[0]))
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which("{x:g}")
    return figure


def error_kinds(modes: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Plots substitutions, deletions and insertions per reference word, as stacked bars."""
    figure, (axes,) = _figure("Kinds of word errors")
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
    known = np.array(durations, dtype=float)
    buckets = np.where(np.isnan(known), -1, np.digitize(known, EDGES[1:-1]))
    labels, members = [], []
    for bucket, (low, high) in enumerate(itertools.pairwise(EDGES)):
        inside = buckets == bucket
        if count := int(inside.sum()):
            span = f"{low:g}-{high:g} s" if np.isfinite(high) else f"over {low:g} s"
            labels.append(f"{span}\n{count} recording{'s' * (count != 1)}")
            members.append(inside)
    if not labels:
        return None
    figure, (axes,) = _figure("Word errors by length of the recording")
    bars = {}
    for name, table in counts.items():
        sums = [table[inside].sum(0) for inside in members]
        bars[name] = {"height": [100 * s[2:5].sum() / max(s[0], 1) for s in sums]}
    _grouped_bars(axes, labels, bars)
    axes.set_ylabel("WER in %")
    axes.legend()
    return figure


def words_per_minute(scores: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Plots hallucinated words per minute of non-speech, with a bar and interval for each mode.

    Args:
        scores: Scores (`mmdecode.evaluation.speech.silence.NonSpeechScore`) by class and mode.
    """
    figure, (axes,) = _figure("Words where nobody speaks", size=(10, 4))
    bars = {}
    for mode in next(iter(scores.values())):
        own = [found[mode] for found in scores.values()]
        spans = np.array([(one.rate, one.low, one.high) for one in own]).T
        bars[mode] = {"height": spans[0], "yerr": _spread(*spans), "error_kw": {"linewidth": 0.7}}
    _grouped_bars(axes, [label(name).replace(" ", "\n", 1) for name in scores], bars)
    axes.set_ylabel("words per minute")
    _legend(figure, axes, columns=2)
    return figure


def accuracy_against_yes(
    modes: Mapping[str, Mapping[str, Mapping[str, Any]]], controls: Mapping[str, str]
) -> Figure:
    """Plots accuracy against the share of answers yes, with a panel for each question set.

    Args:
        modes: Scores by mode and set, as `mmdecode.evaluation.vision.yes_no_report.rates` names
            them, and their intervals.
        controls: Control of each mode, by the mode's name; its point is hollow, and a line joins it
            to the mode's point.
    """
    yes = "yes_ratio", 100, "answers yes in %"
    panels = {
        name: ({mode: found[name] for mode, found in modes.items()}, *yes)
        for name in next(iter(modes.values()))
    }
    title = "Accuracy against the share of yes"
    return _points(title, panels, "accuracy", "accuracy", controls)


def margin_roc(margins: Mapping[str, np.ndarray], positive: np.ndarray, title: str) -> Figure:
    """Plots the ROC of the margin of yes over no, with each mode's point at margin 0.

    Args:
        margins: Margin of each question by mode, ``(questions,)``.
        positive: Whether the right answer to each question is yes, ``(questions,)``.
        title: Name of the question set.
    """
    from mmdecode.evaluation.stats.margins import auroc, roc

    figure, (axes,) = _figure(f"Margin of yes over no, {label(title)}")
    axes.plot([0, 1], [0, 1], color="gray", linewidth=0.8, linestyle="--")
    for mode, values in margins.items():
        text = f"{label(mode)} ({float(auroc(values, positive)):.3f})"
        (line,) = axes.plot(*roc(values, positive), label=text)
        answered_yes = values > 0
        point = answered_yes[~positive].mean(), answered_yes[positive].mean()
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
        modes: Scores by mode, as `mmdecode.evaluation.vision.tasks.chair.rates` names them, and
            their intervals.
        controls: See `accuracy_against_yes`.
    """
    panels = {
        "against recall": (modes, "recall", 100, "objects mentioned in %"),
        "against length": (modes, "length", 1, "words per caption"),
    }
    return _points("Hallucinated mentions", panels, "chair_i", "CHAIR_i", controls)


def forest(comparisons: Sequence[ItemComparison], name: str) -> Figure | None:
    """Plots a difference of each comparison with its interval; ``None``: no comparison has it.

    Args:
        comparisons: Comparisons of any number of pairs and question sets.
        name: Name of the difference, such as ``accuracy``.
    """
    shown = [found for found in comparisons if name in found.differences]
    if not shown:
        return None
    labels = [f"{label(f.second)} against {label(f.first)}, {label(f.within)}" for f in shown]
    width = max(8, 4 + 0.08 * max(map(len, labels)))  # inches; long names take their own
    size = width, max(3, 0.3 * len(shown) + 1)
    figure, (axes,) = _figure(f"Difference of {name}", size=size)
    positions = -np.arange(len(shown))
    for row, found in zip(positions, shown, strict=True):
        one = found.differences[name]
        spread = 100 * _spread(one.value, one.low, one.high)
        axes.errorbar(100 * one.value, row, xerr=spread, fmt="o", capsize=3, color="C0")
    axes.axvline(0, color="gray", linewidth=0.8)
    axes.set_yticks(positions, labels)
    axes.set_xlabel("difference in points, with its 95 % interval")
    return figure


def sheet(images: np.ndarray, title: str, columns: int = 10) -> bytes:
    """Draws a contact sheet and returns it as PNG.

    Args:
        images: ``(n, H, W, 3)`` uint8.
        title: Title above the images.
        columns: Number of images in a row.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    rows = -(-len(images) // columns)
    padded = np.full((rows * columns, *images.shape[1:]), 255, dtype=np.uint8)
    padded[: len(images)] = images
    _, height, width, _ = images.shape
    laid = padded.reshape(rows, columns, height, width, 3).swapaxes(1, 2)
    figure, (axes,) = _figure("", size=(8, 0.4 + 8 * rows * height / (columns * width)))
    axes.imshow(laid.reshape(rows * height, columns * width, 3), interpolation="nearest")
    axes.set_title(label(title), loc="left")
    axes.axis("off")
    return png(figure)


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
    with MissingExtraError.instead("drawing figures needs matplotlib", extra="eval"):
        import matplotlib.figure  # noqa: F401


def _figure(
    title: str, panels: Sequence[str] = (), size: tuple[float, float] = (6, 4)
) -> tuple[Figure, Sequence[Any]]:
    """Makes a figure and its axes: one pair, or several side by side with one vertical scale.

    Args:
        title: Title of the figure.
        panels: Titles of the axes; none: there is one pair, without a title of its own.
        size: Width and height in inches.
    """
    drawable()
    from matplotlib.figure import Figure

    class Shown(Figure):
        """Figure that a notebook displays without pyplot."""

        def _repr_png_(self) -> bytes:
            return png(self)

    figure = Shown(figsize=size, layout="constrained")
    if panels:
        figure.suptitle(title)
    found = figure.subplots(1, max(len(panels), 1), sharey=True, squeeze=False)[0]
    for axes, name in zip(found, panels or [title], strict=True):
        axes.set_title(label(name) if panels else name)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, found


def _spread(value: Any, low: Any, high: Any) -> np.ndarray:
    """Lengths of error bars below and above values, ``(2, values)``."""
    return np.maximum([value - low, high - value], 0).reshape(2, -1)


def _grouped_bars(axes: Any, groups: Sequence[str], bars: Mapping[str, Mapping[str, Any]]) -> None:
    """Draws bars side by side in each group, by mode; they have the options of `Axes.bar`."""
    width = 0.8 / len(bars)
    for index, (mode, how) in enumerate(bars.items()):
        positions = np.arange(len(groups)) + (index - (len(bars) - 1) / 2) * width
        axes.bar(positions, width=width, label=label(mode), **how)
    axes.set_xticks(range(len(groups)), groups)


def _points(
    title: str,
    panels: Mapping[str, tuple[Mapping[str, Mapping[str, Any]], str, float, str]],
    up: str,
    up_label: str,
    controls: Mapping[str, str],
) -> Figure:
    """Plots each mode's point with its interval, and a line to the hollow point of its control.

    Args:
        title: Title of the figure.
        panels: Scores by mode; key, scale and label of the one on the horizontal axis; by panel.
        up: Key of the score on the vertical axis, a share.
        up_label: Label of this score.
        controls: See `accuracy_against_yes`.
    """
    figure, found = _figure(title, list(panels), (max(6, 4 * len(panels)), 4))
    for axes, (modes, across, scale, unit) in zip(found, panels.values(), strict=True):
        for index, mode in enumerate(mode for mode in modes if mode not in controls.values()):
            color, score = f"C{index % 10}", modes[mode]
            marker = "osD^v"[index // 10 % 5]
            how = {"fmt": marker, "capsize": 3, "label": label(mode)}
            x, y = scale * score[across], 100 * score[up]
            spread = _spread(y, *(100 * end for end in score["intervals"][up]))
            axes.errorbar(x, y, yerr=spread, color=color, **how)
            if mode in controls:
                control = modes[controls[mode]]
                end = scale * control[across], 100 * control[up]
                axes.plot([x, end[0]], [y, end[1]], color=color, linewidth=0.8)
                axes.plot(*end, marker, color=color, markerfacecolor="white")
        axes.margins(0.15)
        axes.set_xlabel(unit)
    found[0].set_ylabel(f"{up_label} in %, with its 95 % interval")
    _legend(figure, found[0])
    return figure


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
