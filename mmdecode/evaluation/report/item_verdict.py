"""Verdict of a report on questions about images, in sentences: which methods help, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmdecode.evaluation.report.item_comparison import ItemComparison
    from mmdecode.evaluation.report.item_report import ItemReport

LEVEL = 0.05
"""A difference counts as shown if its corrected p-value is below this level."""
_LISTED = 3  # names of methods in the first sentence


def verdict_of(report: ItemReport[Any], judged: Sequence[str]) -> list[str]:
    """Writes a sentence on all methods, one on the baseline, and one or two on each method.

    A method helps if, in at least one question set, it is significantly better than its baseline
    and than every control.

    Args:
        report: Report with the comparisons.
        judged: Names of the methods.
    """
    baseline = report.modes[0]
    known = {(one.first, one.second, one.within): one for one in report.comparisons}
    sets = list(dict.fromkeys(one.within for one in report.comparisons)) or _sets(report)
    hardest = min(sets, key=lambda name: report.level(baseline, name))
    where = f" in {hardest}, where it scores lowest" if len(sets) > 1 else ""
    plain = f"{baseline}{where}: {report.summary_line(baseline, hardest)}."
    if not judged:
        return [plain]
    found = {mode: _judged(report, mode, known, sets, hardest) for mode in judged}
    helping = [mode for mode, (helps, _) in found.items() if helps]
    more = f" and {len(helping) - _LISTED} more" if len(helping) > _LISTED else ""
    if helping:
        first = (
            f"{len(helping)} of {len(judged)} methods help: {'; '.join(helping[:_LISTED])}{more}"
        )
    elif len(judged) == 1:
        first = f"{judged[0]} is not shown to help"
    else:
        first = f"None of the {len(judged)} methods is shown to help"
    tests = len(report.comparisons)
    basis = f" (p below {LEVEL} after Holm's correction for {tests} comparison{'s' * (tests > 1)})"
    return [f"{first}{basis}.", plain, *(line for _, line in found.values())]


def _judged(
    report: ItemReport[Any],
    mode: str,
    known: dict[tuple[str, str, str], ItemComparison],
    sets: Sequence[str],
    hardest: str,
) -> tuple[bool, str]:
    """Decides whether a method helps, and describes its result in a sentence or two."""
    baseline = report.against(mode)[0]
    rivals = report.rivals(mode)
    beats = {name: _sign(report, known[baseline, mode, name]) for name in sets}
    better = [name for name in sets if beats[name] > 0]
    worse = [name for name in sets if beats[name] < 0]
    unbeaten = {
        name: [pair for pair in rivals if _sign(report, known[*pair, name]) <= 0] for name in sets
    }
    helps = [name for name in better if not unbeaten[name]]
    if helps:
        controls = " and than every control" if rivals else ""
        finding = f"better than {baseline}{controls}{_within(helps, sets)}"
    elif better:
        names = sorted({_rival(pair, mode) for name in better for pair in unbeaten[name]})
        finding = f"better than {baseline}{_within(better, sets)}, but not than {'; '.join(names)}"
    elif not worse:
        finding = f"no difference from {baseline} shown"
    else:
        finding = ""
    if worse:
        finding += f"{', ' * bool(finding)}worse than {baseline}{_within(worse, sets)}"
    held = [f"against {_rival(pair, mode)} {_difference(known[*pair, hardest])}" for pair in rivals]
    control = f"; {', '.join(held)}" if held else ""
    where = f"{hardest}: " if len(sets) > 1 else ""
    return bool(helps), (
        f"{mode}: {finding}. {where}{report.summary_line(mode, hardest)}; against {baseline} "
        f"{_difference(known[baseline, mode, hardest], p=True)}{control}."
    )


def _sets(report: ItemReport[Any]) -> list[str]:
    """Names of the question sets; ``all`` if the report has none."""
    return list(getattr(report, "sets", None) or ["all"])


def _sign(report: ItemReport[Any], found: ItemComparison) -> int:
    """Returns 1 if a gain is shown, -1 if a loss is shown, and 0 otherwise."""
    value = report.gain * next(iter(found.differences.values())).value
    p = found.p if found.p_holm is None else found.p_holm
    return 0 if p >= LEVEL or not value else 1 if value > 0 else -1


def _rival(pair: tuple[str, str], mode: str) -> str:
    """Name of the control in a pair; if not the mode but its copy is compared, both are named."""
    return pair[0] if pair[1] == mode else f"{pair[0]} (as {pair[1]})"


def _within(names: Sequence[str], sets: Sequence[str]) -> str:
    return (
        ""
        if len(sets) == 1
        else " in all sets"
        if len(names) == len(sets)
        else (f" in {', '.join(names)}")
    )


def _difference(found: ItemComparison, p: bool = False) -> str:
    name, one = next(iter(found.differences.items()))
    shown = f"{100 * one.value:+.1f} points [{100 * one.low:+.1f}, {100 * one.high:+.1f}]"
    if not p:
        return shown
    corrected = found.p if found.p_holm is None else found.p_holm
    return f"{name} {shown}, p = {corrected:.3f}"
