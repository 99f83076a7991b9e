"""Figures of reports on questions about images: what is drawn, and where."""

import numpy as np
import pytest

from mmdecode.evaluation.report import plots
from mmdecode.evaluation.report.item_comparison import Difference, ItemComparison
from mmdecode.evaluation.stats.margins import auroc, roc


def scores(**values):
    spans = {name: (value - 0.02, value + 0.03) for name, value in values.items()}
    return values | {"intervals": spans}


def points(axes):
    """``(points, 2)``, coordinates of the markers."""
    return np.array([line.get_xydata()[0] for line in axes.lines if line.get_marker() in "osD^v"])


def test_accuracy_stands_over_the_share_of_yes():
    modes = {
        "plain": {"random": scores(accuracy=0.8, yes_ratio=0.4)},
        "vcd": {"random": scores(accuracy=0.85, yes_ratio=0.5)},
        "plain shifted to vcd": {"random": scores(accuracy=0.84, yes_ratio=0.51)},
    }
    figure = plots.accuracy_against_yes(modes, {"vcd": "plain shifted to vcd"})
    (axes,) = figure.axes
    np.testing.assert_allclose(points(axes), [(40, 80), (50, 85), (51, 84)])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["plain", "vcd"]
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert [line.get_xydata()[0].tolist() for line in hollow] == [[51, 84]]


def test_each_set_has_a_panel():
    modes = {"plain": {name: scores(accuracy=0.8, yes_ratio=0.4) for name in ("a", "b", "c")}}
    figure = plots.accuracy_against_yes(modes, {})
    assert [axes.get_title() for axes in figure.axes] == ["a", "b", "c"]


def test_the_curve_encloses_the_auroc_and_the_dot_answers():
    random = np.random.default_rng(0)
    positive = random.random(300) < 0.5
    margins = np.round(random.normal(size=300) + positive, 1)
    false, true = roc(margins, positive)
    assert np.trapezoid(true, false) == pytest.approx(float(auroc(margins, positive)))
    figure = plots.margin_roc({"plain": margins}, positive, "random")
    (dot,) = points(figure.axes[0])
    answered_yes = margins > 0
    assert dot == pytest.approx((answered_yes[~positive].mean(), answered_yes[positive].mean()))


def test_chair_stands_over_recall_and_length():
    modes = {"plain": scores(chair_i=0.1, recall=0.7, length=60.0)}
    left, right = plots.chair_against_recall(modes, {}).axes
    np.testing.assert_allclose([*points(left), *points(right)], [(70, 10), (60, 10)])


def test_differences_and_their_intervals():
    found = [
        ItemComparison(
            first="plain",
            second=name,
            within="random",
            differences={"accuracy": Difference(value=value, low=value - 0.01, high=0.09, p=0.5)},
            flips=None,
        )
        for name, value in (("vcd", 0.02), ("ritual", -0.03))
    ]
    (axes,) = plots.forest(found, "accuracy").axes
    np.testing.assert_allclose(points(axes), [(2, 0), (-3, -1)])
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        *["vcd against plain, random", "ritual against plain, random"]
    ]
    assert plots.forest(found, "chair_i") is None


def test_figures_can_be_written():
    modes = {"a_b$": {"random": scores(accuracy=1.0, yes_ratio=0.0)}}
    assert plots.png(plots.accuracy_against_yes(modes, {})).startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["vcd {}", "temperature_matched:total=4,beta=0.1, sampled {}"])
def test_a_legend_stays_inside_the_figure_however_long_the_names(name):
    modes = {
        name.format(number): {"random": scores(accuracy=0.5, yes_ratio=number / 9)}
        for number in range(6)
    }
    figure = plots.accuracy_against_yes(modes, {})
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box, whole = legend.get_window_extent(), figure.bbox
    assert box.x0 >= whole.x0 and box.x1 <= whole.x1
