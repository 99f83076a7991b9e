"""The tables of the hallucination report, from its summaries; no model is needed.

A method helps on POPE where, in one of the three splits, it is more often right than plain decoding
*and* than plain decoding with its margins shifted until it says yes as often (cross-fitted by
image), each by the exact test of McNemar. Where tokens are drawn, it has to beat plain sampling,
its plausibility cut alone, its hidden temperature, and greedy decoding with the shift, by bootstrap
over images; all corrected by Holm for the comparisons of the run, some hundred. Captions are
compared at equal length, the longer ones cut: what share of the mentioned objects is made up, and
what share of those in the image is found, by bootstrap, corrected for both and all modes; bold
where one is better and the interval of neither lies on the worse side. What is not shown may still
be there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from pages import table

from mmdecode.evaluation.stats.intervals import holm

Summary = dict[str, Any]
SPLITS = ("random", "popular", "adversarial")
HARDEST = "adversarial"
SAMPLED = ", sampled"
LEVEL = 0.05


def read(folder: Path) -> dict[str, Summary]:
    """Summaries by task, and what was chosen on the development scenes."""
    names = ("pope", "chair", "mme", "spatial")
    found = {name: json.loads((folder / name / "summary.json").read_text()) for name in names}
    return found | {"tuned": json.loads((folder / "tuned.json").read_text())}


def mean_of(mode: Summary, name: str) -> float:
    """A score of POPE, on average over the splits."""
    return float(np.mean([mode["sets"][split][name] for split in SPLITS]))


def compared(summary: Summary, first: str, second: str) -> dict[str, Summary]:
    """Comparisons of two modes, by set."""
    return {
        one["within"]: one
        for one in summary["comparisons"]
        if (one["first"], one["second"]) == (first, second)
    }


def points(one: Summary | None, name: str = "accuracy") -> str:
    """A difference in points with its interval."""
    if one is None:
        return ""
    found = one["differences"][name]
    return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * found[k] for k in ("value", "low", "high")))


def better(found: dict[str, Summary], sign: int = 1) -> set[str]:
    """Splits in which the second is significantly better than the first (worse: ``sign=-1``)."""
    return {
        split
        for split, one in found.items()
        if sign * one["differences"]["accuracy"]["value"] > 0 and one["p_holm"] < LEVEL
    }


def settings(summary: Summary) -> list[str]:
    """Greedy modes that are neither controls nor computed."""
    controls = {"greedy", "prompt_bias", "near_ties"}
    return [
        name
        for name, mode in summary["modes"].items()
        if name not in controls and not mode["computed"] and not name.endswith("sampled")
    ]


def sampled_modes(summary: Summary) -> list[str]:
    """Sampled modes of methods."""
    controls = ("plausible", "temperature_matched")
    return [
        name
        for name, mode in summary["modes"].items()
        if name.endswith(SAMPLED) and not mode["computed"] and not name.startswith(controls)
    ]


def greedy_verdict(summary: Summary, mode: str) -> str:
    """Where a method helps, or what its gain was."""
    plain = compared(summary, "greedy", mode)
    shift = compared(summary, f"greedy shifted to {mode}", mode)
    both = better(plain) & better(shift)
    if both:
        return f"**helps** ({', '.join(s for s in SPLITS if s in both)})"
    if better(plain):
        return "beats greedy, not the shift"
    if better(plain, -1):
        return "hurts"
    return "none shown"


def rivals(summary: Summary, mode: str) -> list[str]:
    """Modes that a sampled mode is compared with: plain sampling and its controls."""
    firsts = [one["first"] for one in summary["comparisons"] if one["second"] == mode]
    return [name for name in dict.fromkeys(firsts) if not name.startswith("greedy")]


def sampled_verdict(summary: Summary, mode: str) -> str:
    """Verdict on a sampled mode; shifted greedy decoding is its strictest rival."""
    named = rivals(summary, mode)
    helps = set.intersection(*(better(compared(summary, first, mode)) for first in named))
    if helps:
        shown = ", ".join(split for split in SPLITS if split in helps)
        greedy = better(compared(summary, f"greedy shifted to {mode}", mode))
        if helps & greedy:
            return f"**helps** ({shown})"
        return f"beats sampling ({shown}), not greedy's shift"
    plain = compared(summary, "sampled", mode)
    if better(plain):
        return "beats sampling, not its controls"
    return "hurts" if better(plain, -1) else "none shown"


def pope_table(summary: Summary) -> str:
    """Greedy decoding."""
    rows = []
    for name in ["greedy", "prompt_bias", "near_ties", *settings(summary)]:
        mode = summary["modes"][name]
        plain = compared(summary, "greedy", name).get(HARDEST)
        shift = compared(summary, f"greedy shifted to {name}", name).get(HARDEST)
        margin = mode["sets"][HARDEST]["margin"] or {}
        rows.append(
            [
                f"`{name}`",
                " / ".join(f"{100 * mode['sets'][split]['accuracy']:.1f}" for split in SPLITS),
                f"{100 * mean_of(mode, 'yes_ratio'):.0f}",
                "" if margin.get("missing", 1) else f"{margin['auroc']:.3f}",
                points(plain),
                points(shift),
                greedy_verdict(summary, name) if shift else "control" if plain else "",
            ]
        )
    header = ["guide", "random / popular / adversarial %", "yes %", "AUROC, adv."]
    header += ["adv., over greedy", "adv., over the shifted", "verdict"]
    return table(header, rows)


def sampled_table(summary: Summary) -> str:
    """Sampling: the mean over seeds."""
    rows = []
    controls = [n for n in summary["modes"] if n.startswith(("plausible", "temperature_matched"))]
    for name in ["sampled", *controls, *sampled_modes(summary)]:
        mode = summary["modes"][name]
        plain = compared(summary, "sampled", name).get(HARDEST)
        own = [compared(summary, one, name)[HARDEST] for one in rivals(summary, name)[1:]]
        least = min(own, key=lambda one: one["differences"]["accuracy"]["value"], default=None)
        greedy = compared(summary, f"greedy shifted to {name}", name).get(HARDEST)
        rows.append(
            [
                f"`{name.removesuffix(SAMPLED)}`",
                " / ".join(f"{100 * mode['sets'][split]['accuracy']:.1f}" for split in SPLITS),
                f"{100 * mode['sets'][HARDEST]['seed_sd']['accuracy']:.2f}",
                f"{100 * mean_of(mode, 'yes_ratio'):.0f}",
                points(plain),
                points(least),
                points(greedy),
                sampled_verdict(summary, name) if greedy else "control" if plain else "",
            ]
        )
    header = ["guide", "random / popular / adversarial %", "sd of seeds, adv.", "yes %"]
    header += ["adv., over sampled", "adv., over its strongest control"]
    header += ["adv., over greedy, shifted", "verdict"]
    return table(header, rows)


def at_equal_length(summary: Summary, mode: str) -> Summary | None:
    """A caption mode against plain decoding, the longer one cut."""
    for first, second in ((f"greedy cut to {mode}", mode), ("greedy", f"{mode} cut to greedy")):
        if found := compared(summary, first, second):
            return found["all"]
    return None


def caption_verdicts(summary: Summary) -> dict[str, str]:
    """Verdict on each mode at equal length: hallucinated share and recall."""
    found = {mode: at_equal_length(summary, mode) for mode in summary["modes"]}
    alike = {mode: one["differences"] for mode, one in found.items() if one}
    p = holm([one[name]["p"] for one in alike.values() for name in ("chair_i", "recall")])
    verdicts = {}
    for row, (mode, one) in enumerate(alike.items()):
        signs = {
            name: np.sign(one[name]["value"]) * (p[2 * row + index] < LEVEL)
            for index, name in enumerate(("chair_i", "recall"))
        }
        parts = []
        if signs["chair_i"]:
            parts.append("makes up less" if signs["chair_i"] < 0 else "makes up more")
        if signs["recall"]:
            parts.append("finds more" if signs["recall"] > 0 else "finds less")
        verdict = ", ".join(parts) or "none shown"
        worse = one["chair_i"]["low"] > 0 or one["recall"]["high"] < 0
        gains = signs["recall"] > 0 or signs["chair_i"] < 0
        verdicts[mode] = f"**{verdict}**" if gains and not worse else verdict
    return verdicts


def caption_table(summary: Summary) -> str:
    """Greedy captions."""
    rows, verdicts = [], caption_verdicts(summary)
    for name, mode in summary["modes"].items():
        if mode["computed"]:
            continue
        alike = at_equal_length(summary, name)
        rows.append(
            [
                f"`{name}`",
                f"{100 * mode['chair_i']:.1f}",
                f"{100 * mode['chair_s']:.1f}",
                f"{100 * mode['recall']:.1f}",
                f"{mode['length']:.1f}",
                points(alike, "chair_i") if alike else "",
                points(alike, "recall") if alike else "",
                verdicts.get(name, ""),
            ]
        )
    header = ["guide", "CHAIR_i %", "CHAIR_s %", "recall %", "words"]
    header += ["CHAIR_i at equal length", "recall at equal length", "verdict"]
    return table(header, rows)


def other_table(mme: Summary, spatial: Summary) -> str:
    """MME's own score, and relations."""
    sets = list(next(iter(spatial["modes"].values()))["sets"])
    rows = []
    for name, mode in mme["modes"].items():
        if mode["computed"] or name not in spatial["modes"]:
            continue
        cells = [f"`{name}`", f"{mode['task']['hallucination']:.1f}"]
        for which in sets:
            score = spatial["modes"][name]["sets"][which]["individual"]
            cells += [
                f"{100 * score:.1f}",
                points(compared(spatial, "greedy", name).get(which), "individual"),
            ]
        rows.append(cells)
    header = ["guide", "MME-style, of 800"]
    for which in sets:
        header += [f"{which} %", f"{which}, over greedy"]
    return table(header, rows)


def main_table(found: dict[str, Summary]) -> str:
    """One row per method: the better of its two settings on the development scenes."""
    pope, chosen = found["pope"], found["tuned"]["tuned"]
    rows, captions = [], caption_verdicts(found["chair"])
    for method, setting in chosen.items():
        sampled_mode = f"{setting}{SAMPLED}"
        greedy = setting in pope["modes"]
        plain = compared(pope, "greedy", setting).get(HARDEST)
        rows.append(
            [
                f"`{setting}`",
                points(plain) if greedy else "greedy unchanged",
                greedy_verdict(pope, setting) if greedy else "",
                sampled_verdict(pope, sampled_mode) if sampled_mode in pope["modes"] else "",
                captions.get(setting, ""),
            ]
        )
        if method not in setting:
            raise ValueError(f"{setting!r} is no setting of {method!r}")
    header = ["guide, tuned on the development scenes", "POPE adversarial, over greedy"]
    header += ["POPE, greedy", "POPE, sampled", "captions"]
    return table(header, rows)


def conditions(summaries: Iterable[Summary]) -> str:
    """Sizes, settings and versions of the runs; everything else is in the summaries."""
    kept = ("model", "dtype", "threads", "max_new_tokens", "batch_size", "suffix", "part", "limit")
    kept += ("torch", "transformers", "load_average")
    lines = []
    for summary in summaries:
        settings = summary["conditions"]
        values = [
            f"{name} {settings[name]}" for name in kept if settings.get(name) not in (None, "")
        ]
        sizes = f"{summary['questions']} questions on {summary['images']} images"
        lines.append(f"- {summary['task']}: {sizes}; {', '.join(values)}")
    return "\n".join(lines)


def tables(found: dict[str, Summary]) -> str:
    """Everything between the marks of the page."""
    pope, chair, tuned = found["pope"], found["chair"], found["tuned"]
    parts = [
        "### In short\n",
        main_table(found),
        "\n### POPE, the most likely token\n",
        pope_table(pope),
        "\n### POPE, sampled tokens\n",
        sampled_table(pope),
        "\n### Captions\n",
        caption_table(chair),
        "\n### MME-style pairs and relations\n",
        other_table(found["mme"], found["spatial"]),
        "\n### Conditions\n",
        f"Settings were chosen on {tuned['questions']} questions of the development scenes "
        f"(greedy {100 * tuned['greedy']:.1f} %). Runs on the test scenes:\n",
        conditions([pope, chair, found["mme"], found["spatial"]]),
    ]
    return "\n".join(parts)
