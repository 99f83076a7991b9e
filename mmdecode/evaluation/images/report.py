"""`ImageReport`: ways to sample images, compared by distribution, cost and pixels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.evaluation.images.features import (
    floor,
    frechet,
    judged,
    kernel_distance,
    memory,
    nearest,
)
from mmdecode.evaluation.images.runs import AGAIN, PLAIN, ImageRow, Recorder, forced_logits
from mmdecode.evaluation.images.samples import Likelihood, likelihood
from mmdecode.evaluation.report import plots
from mmdecode.evaluation.report.layout import Rows, number, percent, without_empty
from mmdecode.evaluation.report.report import Report
from mmdecode.evaluation.stats.image_tests import (
    MARGIN,
    PERMUTATIONS,
    code_groups,
    equivalence,
    mean_of,
    neighbours,
    two_sample,
    welch,
)
from mmdecode.evaluation.stats.intervals import holm
from mmdecode.image_ar.sampling import Sampling
from mmdecode.models.image_classifier import Classifier, Judged

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BITS = 1 / np.log(2)
ALARM = 1e-3
"""A corrected p-value below this one rejects a mode's claim of plain decoding's distribution."""
TINY = 16  # side of images for distances: memorised images are found despite noise of pixels
SHOWN = 40  # images of a mode on the page
TESTS = {
    "likelihood": "mean likelihood differs from plain",
    "tokens": "tokens are no draws from their distributions",
    "first of pass": "the first tokens of passes are none",
    "pairs of these": "with the code before or above",
    "codes": "histogram at each place",
    "pairs across": "histogram of horizontal pairs",
    "pairs down": "histogram of vertical pairs",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Truth:
    """Features of reference images (not generated).

    Attributes:
        unseen: Features of images that the model was not trained on, ``(m, d)``.
        decoded: Features of the same images, encoded and decoded by the image tokenizer.
        training: Training images reduced by `small`, ``(t, k)``, and the distance of each decoded
            image, reduced likewise, to the nearest of them, ``(m,)``; ``None``: not available.
        classes: Classes of the unseen images, ``(m,)``; ``None``: not known.
    """

    unseen: Judged
    decoded: Judged
    training: tuple[np.ndarray, np.ndarray] | None
    classes: np.ndarray | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """Measurements of the images of one mode (way to sample).

    Attributes:
        rows: Records of the generated images, in order.
        codes: Codes of the images, ``(n, rows, columns)``.
        likelihood: Likelihood under the model's guided distribution, whichever mode drew them.
        judged: Output of a classifier; ``None``: there is no classifier, or no image decoder.
        points: The images reduced by `small`, ``(n, k)``; ``None``: there is no image decoder.
        shown: The first images, ``(s, H, W, 3)`` uint8; ``None``: there is no image decoder.
    """

    rows: Sequence[ImageRow]
    codes: np.ndarray
    likelihood: Likelihood
    judged: Judged | None = None
    points: np.ndarray | None = None
    shown: np.ndarray | None = None

    @property
    def conditions(self) -> list[int | str]:
        """Condition (class or prompt) of each image."""
        return [row.condition for row in self.rows]


def small(pixels: Tensor) -> np.ndarray:
    """Images ``(n, 3, H, W)``, scaled down and flattened to ``(n, k)``, for distances."""
    reduced = torch.nn.functional.interpolate(pixels, (TINY, TINY), mode="area")
    return reduced.flatten(1).numpy()


@dataclass(repr=False, eq=False)
class ImageReport(Report):
    """Report that compares modes (ways to sample images of one model) with plain decoding.

    Args:
        recorder: Recorder of the run, with its model, settings and modes.
        recorded: Records of the images of the run; failed images are left out of the scores.
        classifier: Classifies the decoded images; ``None``: no features are computed.
        truth: Reference images; ``None``: there are none.
        conditions: Settings and hardware of the run, shown in the report.
        margin: Relative margin of the test of equal likelihood (`equivalence`).
        permutations: Number of permutations of each `two_sample` test.
        resamples: Number of bootstrap resamples of distances.
        seed: Seed of permutations and resamples.

    Raises:
        OptionError: There are fewer than two images of the mode ``plain``.
    """

    recorder: Recorder
    recorded: Sequence[ImageRow]
    classifier: Classifier | None = None
    truth: Truth | None = None
    _: KW_ONLY
    conditions: dict[str, Any] = field(default_factory=dict)
    margin: float = MARGIN
    permutations: int = PERMUTATIONS
    resamples: int = 200
    seed: int = 0

    title = "Images"

    def __post_init__(self) -> None:
        adapter = self.recorder.model.adapter
        book = adapter.codebook()
        if book is None:  # codes are grouped by their index
            book = torch.arange(len(adapter.layout.ids))[:, None]
        self.groups = code_groups(book)
        self.found = dict(self._measured())
        if PLAIN not in self.found:
            raise OptionError(
                "there are fewer than two images of plain decoding, with which modes are compared; "
                "give a larger --count, or see why images failed"
            )
        self.failed = [row for row in self.recorded if row.error is not None]
        self.classes = self._known_classes()
        self._means = {
            name: mean_of(one.likelihood.per_image, one.conditions)
            for name, one in self.found.items()
        }

    def _measured(self) -> Iterator[tuple[str, Measured]]:
        """Scores the images of each mode: likelihood of their codes, classifier output, pixels."""
        model, batch, settings = self.recorder.model, self.recorder.batch, self.recorder.settings
        adapter, sampling = model.adapter, Sampling(**settings["sampling"])
        shape, device = (-1, adapter.layout.rows, adapter.layout.columns), adapter.model.device
        for mode in self.recorder.modes:
            own = [row for row in self.recorded if row.mode == mode.name and row.error is None]
            if len(own) < 2:
                continue
            codes = torch.tensor([row.codes for row in own]).view(shape)
            commits = torch.tensor([row.commits for row in own]).view(shape)
            conditions = [row.condition for row in own]

            def target(part: slice, asked: list[Any] = conditions, codes: Tensor = codes) -> Tensor:
                return forced_logits(model, asked[part], codes[part], settings["guidance"]).cpu()

            scores = likelihood(
                target, codes, sampling, commits=commits, groups=self.groups, batch=batch
            )
            decoded: dict[str, Any] = {}
            with contextlib.suppress(IncompatibleError):  # there is no image decoder
                pixels = torch.cat([adapter.decode(c.to(device)).cpu() for c in codes.split(batch)])
                shown = (pixels[:SHOWN] * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
                decoded = {"points": small(pixels), "shown": shown}
                if self.classifier is not None:
                    decoded["judged"] = self.classifier.judge(pixels.split(64))
            yield mode.name, Measured(rows=own, codes=codes.numpy(), likelihood=scores, **decoded)

    def _known_classes(self) -> dict[Any, int] | None:
        """The classifier's class of each condition, by its name or, if equally many, its number."""
        if self.classifier is None:
            return None
        model = self.recorder.model
        conditions: set[Any] = {request.condition for request in self.recorder.requests}
        names = {name.casefold(): index for index, name in enumerate(self.classifier.classes)}
        labels = {label: name.casefold() for label, name in model.labels.items()}
        if labels and set(labels.values()) <= set(names):
            return {condition: names[labels[condition]] for condition in conditions}
        if model.classes == len(self.classifier.classes):
            return {condition: condition for condition in conditions}
        return None

    @cached_property
    def summary(self) -> dict[str, Any]:
        """All numbers and settings of the report."""
        raw = {(name, test): p for name in self.found for test, p in self._p_values(name).items()}
        tests: dict[str, dict[str, Any]] = {name: {} for name in self.found}
        for ((name, test), p), corrected in zip(raw.items(), holm([*raw.values()]), strict=True):
            tests[name][test] = {"p": p, "p_holm": corrected}
        modes = {
            name: {
                "claims": self.recorder.generators[name].guarantee,
                "failed": sum(row.mode == name for row in self.failed),
                **self._likelihood(name),
                "tests": tests[name],
                "pictures": self._pixel_scores(name),
            }
            for name in self.found
        }
        return {
            "task": "images",
            "margin": self.margin,
            "permutations": self.permutations,
            "interval": {"unit": "image", "resamples": self.resamples, "seed": self.seed},
            "conditions": self.conditions,
            "modes": {name: {**mode, "verdict": verdict(mode)} for name, mode in modes.items()},
            "real_pictures": self._real(),
        }

    def _likelihood(self, name: str) -> dict[str, Any]:
        """Cost and likelihood of a mode, and the share of images that are plain decoding's too."""
        rows, one = self.found[name].rows, self.found[name].likelihood
        passes = sum(row.passes or 0 for row in rows)
        times = [row.seconds for row in rows if row.seconds is not None]
        bits = mean_of(one.per_image * BITS / one.tokens, self.found[name].conditions)
        found = {
            "images": len(rows),
            "passes": passes / len(rows),
            "tokens_per_pass": (one.tokens - 1) * len(rows) / max(passes, 1),
            "seconds": float(np.mean(times)) if times else None,
            "bits_per_token": asdict(bits),
            "outside": float(one.outside.mean()),
            "all_tokens": asdict(one.all),
            "first_of_pass": one.first and asdict(one.first),
        }
        if name != PLAIN:
            ratio = equivalence(self._means[PLAIN], self._means[name], self.margin)
            plain = {row.key()[1:]: row.codes for row in self.found[PLAIN].rows}
            same = [row.codes == plain.get(row.key()[1:]) for row in rows]
            found |= {"equivalence": asdict(ratio), "same": float(np.mean(same))}
        return found

    def _p_values(self, name: str) -> dict[str, float]:
        """P-values by test, before correction for multiple tests."""
        plain, one = self.found[PLAIN], self.found[name]
        found, first = {"tokens": one.likelihood.all.p}, one.likelihood.first
        alone = all((row.passes or 0) + 1 >= one.likelihood.tokens for row in one.rows)
        if first is not None and first.pairs_p is not None and not alone:
            found |= {"first of pass": first.p, "pairs of these": first.pairs_p}
        if name == PLAIN:
            return found
        found["likelihood"] = welch(self._means[PLAIN], self._means[name])
        groups = self.groups.numpy()
        both, strata = (plain.codes, one.codes), (plain.conditions, one.conditions)
        tables = {
            "codes": [codes.reshape(len(codes), -1, 1) for codes in both],
            "pairs across": [neighbours(codes, groups) for codes in both],
            "pairs down": [neighbours(codes, groups, down=1) for codes in both],
        }
        for test, (before, after) in tables.items():
            found[test] = two_sample(before, after, strata, self.permutations, self.seed).p
        return found

    def _pixel_scores(self, name: str) -> dict[str, Any] | None:
        one, plain = self.found[name], self.found[PLAIN]
        if one.judged is None or plain.judged is None:
            return None
        found: dict[str, Any] = {}
        if self.classes is not None:
            wanted = np.array([self.classes[condition] for condition in one.conditions])
            found |= judged(one.judged.probabilities, wanted)
        options = {"resamples": self.resamples, "seed": self.seed}
        features = one.judged.features
        if name != PLAIN:
            distances = {"from_plain": frechet, "kernel_from_plain": kernel_distance}
            for key, distance in distances.items():
                found[key] = asdict(distance(plain.judged.features, features, **options))
        if self.truth is not None:
            found["from_real"] = asdict(frechet(self.truth.decoded.features, features, **options))
            if self.truth.training is not None and one.points is not None:
                points, held_out = self.truth.training
                found["memory"] = memory(nearest(one.points, points), held_out)
        return found

    def _real(self) -> dict[str, Any] | None:
        """Classifier results for the reference images, and the distance between their halves."""
        if self.truth is None:
            return None
        features = self.truth.decoded.features
        size = min(len(features) // 2, len(self.found[PLAIN].rows))
        lost = frechet(self.truth.unseen.features, features, self.resamples, self.seed)
        found: dict[str, Any] = {
            "pictures": len(features),
            "floor": asdict(floor(features, size)),
            "floor_images": size,
            "tokenizer": asdict(lost),
        }
        if self.truth.classes is not None:
            found |= judged(self.truth.decoded.probabilities, self.truth.classes)
        return found

    def tables(self) -> list[Rows]:
        """Tables: cost and likelihood, tests of the distribution, and classifier results."""
        modes = self.summary["modes"]
        tables = [
            [_distribution_row(name, mode) for name, mode in modes.items()],
            [_test_row(name, mode) for name, mode in modes.items()],
        ]
        if all(mode["pictures"] for mode in modes.values()):
            tables.append([_pixel_row(name, mode["pictures"]) for name, mode in modes.items()])
            if real := self.summary["real_pictures"]:
                tables[-1].append(_pixel_row("real pictures, tokenized", real))
        return [without_empty(rows) for rows in tables]

    def rows(self) -> Rows:
        """Cost and likelihood of each mode."""
        return self.tables()[0]

    def brief(self) -> list[Rows]:
        """The tables; none of them is long."""
        return self.tables()

    def verdict(self) -> list[str]:
        """States which modes are shown to sample from another distribution than plain decoding."""
        modes = self.summary["modes"]
        others = {name: modes[name]["verdict"] for name in modes if name not in (PLAIN, AGAIN)}
        if not others:
            return ["Plain decoding alone was sampled."]
        apart = [name for name in others if _worst(modes[name])[1] < ALARM]
        first = f"Another distribution than {PLAIN} is shown for {', '.join(apart) or 'no mode'}."
        return [first, *(f"{name}: {text}." for name, text in others.items())]

    def about(self) -> str:
        """One paragraph that explains the numbers of the tables."""
        parts = [
            "bits per token are of the guided distribution, before top-k and top-p; "
            f"modes are held to {PLAIN!r}, and {AGAIN!r} shows what chance does: it is the same "
            "distribution under another seed",
            "p-values are corrected for all tests of this report (Holm)",
        ]
        if real := self.summary["real_pictures"]:
            parts.append(
                "the distance is the Frechet distance of a classifier's features and no FID; of "
                f"two halves of {real['floor_images']} real pictures each it is "
                f"{real['floor']['value']:.2f} on average"
            )
        parts += [f"{name}: {text}" for name, text in TESTS.items()]
        return "; ".join(parts)

    def figures(self) -> dict[str, Figure | bytes]:
        """A contact sheet per mode, with the conditions in the same order in each."""
        return {
            name: plots.sheet(one.shown, name)
            for name, one in self.found.items()
            if one.shown is not None
        }

    def failures(self) -> list[dict[str, Any]]:
        """Images that could not be generated."""
        names = "mode", "condition", "ordinal", "error"
        return [{name: getattr(row, name) for name in names} for row in self.failed]


def verdict(mode: Mapping[str, Any]) -> str:
    """States the result of the tests of a mode's distribution in words.

    Args:
        mode: Value of one mode in ``ImageReport.summary["modes"]``.
    """
    (worst, p), ratio = _worst(mode), mode.get("equivalence")
    if p < ALARM:
        wrong = "NOT EXACT" if mode["claims"] == "exact" else "another distribution"
        return f"{wrong}: {worst}, p = {p:.1g}"
    if ratio is None:
        return "the reference"
    if mode["same"] == 1:
        return "the very same images"
    shown = "shown" if ratio["shown"] else "not shown with so few images"
    return f"no difference found; equal likelihood {shown}"


def _worst(mode: Mapping[str, Any]) -> tuple[str, float]:
    """Test of a mode with the smallest corrected p-value, and this p-value."""
    corrected = {test: found["p_holm"] for test, found in mode["tests"].items()}
    return min(corrected.items(), key=lambda one: one[1])


def _distribution_row(name: str, mode: Mapping[str, Any]) -> dict[str, str]:
    ratio = mode.get("equivalence")
    return {
        "mode": name,
        "claims": mode["claims"],
        "images": str(mode["images"]),
        "failed": str(mode["failed"] or ""),
        "passes": number(mode["passes"], ".1f"),
        "tokens/pass": number(mode["tokens_per_pass"]),
        "s/image": number(mode["seconds"], ".3f"),
        "bits/token": _spread(mode["bits_per_token"], ".3f"),
        "of plain [90 %]": _spread(ratio, ".4f", "ratio"),
        "within margin": ("yes" if ratio["shown"] else "not shown") if ratio else "",
        "outside %": percent(mode["outside"]) if mode["outside"] else "",
        "same images %": percent(mode.get("same"), ".1f"),
    }


def _test_row(name: str, mode: Mapping[str, Any]) -> dict[str, str]:
    cells = {test: number(mode["tests"].get(test, {}).get("p_holm"), ".2g") for test in TESTS}
    return {"mode": name, **cells, "verdict": verdict(mode)}


def _pixel_row(name: str, found: Mapping[str, Any]) -> dict[str, str]:
    near = found.get("memory")
    return {
        "mode": name,
        "class %": _spread(found.get("accuracy"), ".1f", scale=100),
        "diversity bits": number(found.get("diversity")),
        "doubt bits": number(found.get("doubt")),
        "distance to plain": _spread(found.get("from_plain")),
        "kernel distance": _spread(found.get("kernel_from_plain"), ".4f"),
        "distance to real": _spread(found.get("from_real") or found.get("tokenizer")),
        "copies %": percent(near and near["copies"], ".1f"),
        "nearer than held-out, p": number(near and near["p"], ".2g"),
    }


def _spread(
    found: Mapping[str, float] | None, form: str = ".2f", name: str = "value", scale: float = 1
) -> str:
    if found is None:
        return ""
    value, low, high = (format(scale * found[key], form) for key in (name, "low", "high"))
    return f"{value} [{low}, {high}]"
