"""`ImageReport`: ways to sample images, compared by distribution, cost and pixels."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
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
from mmdecode.evaluation.images.runs import (
    AGAIN,
    PLAIN,
    ImageRow,
    Recorder,
    forced_logits,
    groups_of,
    stacked,
)
from mmdecode.evaluation.images.samples import Likelihood, likelihood
from mmdecode.evaluation.report.layout import Rows, number, percent, without_empty
from mmdecode.evaluation.report.report import Report
from mmdecode.evaluation.stats.image_means import MARGIN, equivalence, mean_of, welch
from mmdecode.evaluation.stats.image_tables import PERMUTATIONS, marginals, neighbours, two_sample
from mmdecode.evaluation.stats.intervals import holm
from mmdecode.image_ar.loading import RasterModel
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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Truth:
    """Features of reference images (not generated).

    Attributes:
        unseen: Features of images that the model was not trained on, ``(m, d)``.
        decoded: Features of the same images, encoded and decoded by the image tokenizer.
        held_out: The decoded images reduced by `small`, ``(m, k)``.
        training: Training images reduced by `small`, ``(t, k)``; ``None``: not available.
        classes: Classes of the unseen images, ``(m,)``; ``None``: not known.
    """

    unseen: Judged
    decoded: Judged
    held_out: np.ndarray
    training: np.ndarray | None
    classes: np.ndarray | None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
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
    judged: Judged | None
    points: np.ndarray | None
    shown: np.ndarray | None

    @property
    def conditions(self) -> list[int | str]:
        """Condition (class or prompt) of each image."""
        return [row.condition for row in self.rows]


def measured(
    model: RasterModel,
    recorder: Recorder,
    rows: Sequence[ImageRow],
    classifier: Classifier | None = None,
    batch: int = 16,
) -> dict[str, Measured]:
    """Scores the images of all modes: likelihood of their codes, classifier output, pixels.

    Args:
        model: Model that generated the images.
        recorder: Recorder of the run, with its settings and modes.
        rows: Records of the images of the run.
        classifier: Classifies the decoded images; ``None``: no features are computed.
        batch: Batch size, in images.
    """
    layout = model.adapter.layout
    settings, groups = recorder.settings, groups_of(model)
    sampling = Sampling(**settings["sampling"])
    found = {}
    for mode in recorder.modes:
        own = [row for row in rows if row.mode == mode.name and row.error is None]
        if len(own) < 2:
            continue
        codes, commits = stacked(own, (layout.rows, layout.columns))
        conditions = [row.condition for row in own]

        def target(part: slice, asked: list[Any] = conditions, codes: Tensor = codes) -> Tensor:
            return forced_logits(model, asked[part], codes[part], settings["guidance"]).cpu()

        decoded = pixels_of(model, codes, batch)
        found[mode.name] = Measured(
            rows=own,
            codes=codes.numpy(),
            likelihood=likelihood(
                target, codes, sampling, commits=commits, groups=groups, batch=batch
            ),
            judged=None
            if classifier is None or decoded is None
            else classifier.judge(decoded.split(64)),
            points=None if decoded is None else small(decoded),
            shown=None if decoded is None else to_bytes(decoded[:SHOWN]),
        )
    return found


def pixels_of(model: RasterModel, codes: Tensor, batch: int = 16) -> Tensor | None:
    """Decodes codes ``(n, rows, columns)`` to pixels ``(n, 3, H, W)`` from 0 to 1.

    It returns ``None`` if the model has no image decoder.
    """
    adapter = model.adapter
    try:
        parts = [adapter.decode(part.to(adapter.model.device)).cpu() for part in codes.split(batch)]
    except IncompatibleError:
        return None
    return torch.cat(parts)


def small(pixels: Tensor) -> np.ndarray:
    """Images ``(n, 3, H, W)``, scaled down and flattened to ``(n, k)``, for distances."""
    reduced = torch.nn.functional.interpolate(pixels, (TINY, TINY), mode="area")
    return reduced.flatten(1).numpy()


def to_bytes(pixels: Tensor) -> np.ndarray:
    """Converts pixels ``(n, 3, H, W)`` from 0 to 1 to ``(n, H, W, 3)`` uint8."""
    return (pixels * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()


class ImageReport(Report):
    """Report that compares modes (ways to sample images of one model) with plain decoding.

    Args:
        found: Measurements by mode, see `measured`; plain decoding first.
        guarantees: Guarantee that each mode claims, such as ``exact``.
        groups: Group of every code, ``(C,)``, see
            `mmdecode.evaluation.stats.image_tables.code_groups`.
        failed: Images that failed: mode, condition, ordinal and error of each.
        classes: The classifier's class of each condition; ``None``: accuracy is not computed.
        truth: Reference images; ``None``: there are none.
        conditions: Settings and hardware of the run, shown in the report.
        margin: Relative margin of the test of equal likelihood (`equivalence`).
        permutations: Number of permutations of each `two_sample` test.
        resamples: Number of bootstrap resamples of distances.
        seed: Seed of permutations and resamples.

    Raises:
        OptionError: There are fewer than two images of the mode ``plain``.
    """

    title = "Images"

    def __init__(
        self,
        found: Mapping[str, Measured],
        *,
        guarantees: Mapping[str, str],
        groups: np.ndarray,
        failed: Sequence[ImageRow] = (),
        classes: Mapping[Any, int] | None = None,
        truth: Truth | None = None,
        conditions: Mapping[str, Any] | None = None,
        margin: float = MARGIN,
        permutations: int = PERMUTATIONS,
        resamples: int = 200,
        seed: int = 0,
    ) -> None:
        if PLAIN not in found:
            raise OptionError(
                "there are fewer than two images of plain decoding, with which modes are compared; "
                "give a larger --count, or see why images failed"
            )
        self.found, self.guarantees, self.groups = dict(found), guarantees, groups
        self.failed_images = [
            {
                "mode": row.mode,
                "condition": row.condition,
                "ordinal": row.ordinal,
                "error": row.error,
            }
            for row in failed
        ]
        self.failed = Counter(row.mode for row in failed)
        self.classes, self.truth = classes, truth
        self.conditions = dict(conditions or {})
        self.margin, self.permutations = margin, permutations
        self.resamples, self.seed = resamples, seed
        self._means = {
            name: mean_of(one.likelihood.per_image, one.conditions) for name, one in found.items()
        }

    @cached_property
    def summary(self) -> dict[str, Any]:
        """All numbers and settings of the report."""
        raw = {name: self._p_values(name) for name in self.found}
        asked = [(name, test) for name in raw for test in raw[name]]
        corrected = holm([raw[name][test] for name, test in asked])
        tests: dict[str, dict[str, Any]] = {name: {} for name in raw}
        for (name, test), p in zip(asked, corrected, strict=True):
            tests[name][test] = {"p": raw[name][test], "p_holm": p}
        modes = {
            name: {
                "claims": self.guarantees[name],
                "failed": self.failed[name],
                **self._cost(name),
                **self._distribution(name),
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

    def _cost(self, name: str) -> dict[str, Any]:
        rows, tokens = self.found[name].rows, self.found[name].likelihood.tokens
        passes = sum(row.passes or 0 for row in rows)
        return {
            "images": len(rows),
            "passes": passes / len(rows),
            "tokens_per_pass": (tokens - 1) * len(rows) / max(passes, 1),
            "seconds": float(np.mean([row.seconds for row in rows])),
        }

    def _distribution(self, name: str) -> dict[str, Any]:
        one = self.found[name]
        bits = one.likelihood.per_image * BITS / one.likelihood.tokens
        found = {
            "bits_per_token": dataclasses.asdict(mean_of(bits, one.conditions)),
            "outside": float(one.likelihood.outside.mean()),
            "all_tokens": dataclasses.asdict(one.likelihood.all),
            "first_of_pass": one.likelihood.first and dataclasses.asdict(one.likelihood.first),
        }
        if name != PLAIN:
            ratio = equivalence(self._means[PLAIN], self._means[name], self.margin)
            found |= {"equivalence": dataclasses.asdict(ratio), "same": self._same(one)}
        return found

    def _same(self, one: Measured) -> float:
        """Share of images equal to plain decoding's with the same condition and ordinal."""
        plain = self.found[PLAIN]
        known = {
            (row.condition, row.ordinal): codes
            for row, codes in zip(plain.rows, plain.codes, strict=True)
        }
        same = [
            np.array_equal(codes, known.get((row.condition, row.ordinal), ()))
            for row, codes in zip(one.rows, one.codes, strict=True)
        ]
        return float(np.mean(same))

    def _p_values(self, name: str) -> dict[str, float]:
        """P-values by test, before correction for multiple tests."""
        plain, one = self.found[PLAIN], self.found[name]
        found, first = {"tokens": one.likelihood.all.p}, one.likelihood.first
        alone = all((row.passes or 0) + 1 >= one.likelihood.tokens for row in one.rows)
        if first is not None and first.pairs_p is not None and not alone:
            found |= {"first of pass": first.p, "pairs of these": first.pairs_p}
        if name == PLAIN:
            return found
        found["likelihood"] = welch(self._means[PLAIN], self._means[name]).p
        tables = {
            "codes": marginals,
            "pairs across": lambda codes: neighbours(codes, self.groups),
            "pairs down": lambda codes: neighbours(codes, self.groups, down=1),
        }
        for test, table in tables.items():
            found[test] = two_sample(
                table(plain.codes),
                table(one.codes),
                (plain.conditions, one.conditions),
                self.permutations,
                self.seed,
            ).p
        return found

    def _pixel_scores(self, name: str) -> dict[str, Any] | None:
        one, plain = self.found[name], self.found[PLAIN]
        if one.judged is None or plain.judged is None:
            return None
        found: dict[str, Any] = {}
        if self.classes is not None:
            wanted = np.array([self.classes[condition] for condition in one.conditions])
            found |= judged(one.judged.probabilities, wanted).as_dict()
        options = {"resamples": self.resamples, "seed": self.seed}
        features = one.judged.features
        if name != PLAIN:
            found["from_plain"] = dataclasses.asdict(
                frechet(plain.judged.features, features, **options)
            )
            found["kernel_from_plain"] = dataclasses.asdict(
                kernel_distance(plain.judged.features, features, **options)
            )
        if self.truth is not None:
            found["from_real"] = dataclasses.asdict(
                frechet(self.truth.decoded.features, features, **options)
            )
            if self.truth.training is not None and one.points is not None:
                near = nearest(one.points, self.truth.training)
                found["memory"] = dataclasses.asdict(memory(near, self._held_out))
        return found

    @cached_property
    def _held_out(self) -> np.ndarray:
        """Distances of held-out images to their nearest training image."""
        assert self.truth is not None and self.truth.training is not None
        return nearest(self.truth.held_out, self.truth.training)

    def _real(self) -> dict[str, Any] | None:
        """Classifier results for the reference images, and the distance between their halves."""
        if self.truth is None:
            return None
        features = self.truth.decoded.features
        size = min(len(features) // 2, len(self.found[PLAIN].rows))
        found: dict[str, Any] = {
            "pictures": len(features),
            "floor": dataclasses.asdict(floor(features, size)),
            "floor_images": size,
            "tokenizer": dataclasses.asdict(
                frechet(self.truth.unseen.features, features, self.resamples, self.seed)
            ),
        }
        if self.truth.classes is not None:
            found |= judged(self.truth.decoded.probabilities, self.truth.classes).as_dict()
        return found

    def tables(self) -> list[Rows]:
        """Tables: cost and likelihood, tests of the distribution, and classifier results."""
        modes = self.summary["modes"]
        tables: list[Rows] = [
            without_empty([_distribution_row(name, mode) for name, mode in modes.items()]),
            without_empty([_test_row(name, mode) for name, mode in modes.items()]),
        ]
        if all(mode["pictures"] for mode in modes.values()):
            rows = [_pixel_row(name, mode["pictures"]) for name, mode in modes.items()]
            real = self.summary["real_pictures"]
            if real is not None:
                rows.append(_pixel_row("real pictures, tokenized", real))
            tables.append(without_empty(rows))
        return tables

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
        apart = [
            name
            for name in others
            if min(test["p_holm"] for test in modes[name]["tests"].values()) < ALARM
        ]
        if not others:
            return ["Plain decoding alone was sampled."]
        first = f"Another distribution than {PLAIN} is shown for {', '.join(apart) or 'no mode'}."
        return [first, *(f"{name}: {text}." for name, text in others.items())]

    def about(self) -> str:
        """One paragraph that explains the numbers of the tables."""
        real = self.summary["real_pictures"]
        parts = [
            "bits per token are of the guided distribution, before top-k and top-p; "
            f"modes are held to {PLAIN!r}, and {AGAIN!r} shows what chance does: it is the same "
            "distribution under another seed",
            "p-values are corrected for all tests of this report (Holm)",
        ]
        if real is not None:
            parts.append(
                "the distance is the Frechet distance of a classifier's features and no FID; of "
                f"two halves of {real['floor_images']} real pictures each it is "
                f"{real['floor']['value']:.2f} on average"
            )
        parts += [f"{name}: {text}" for name, text in TESTS.items()]
        return "; ".join(parts)

    def figures(self) -> dict[str, Figure | bytes]:
        """A contact sheet per mode, with the conditions in the same order in each."""
        shown = {name: one.shown for name, one in self.found.items() if one.shown is not None}
        return {name: sheet(images, name) for name, images in shown.items()}

    def failures(self) -> list[dict[str, Any]]:
        """Images that could not be generated."""
        return self.failed_images


def verdict(mode: Mapping[str, Any]) -> str:
    """States the result of the tests of a mode's distribution in words.

    Args:
        mode: Value of one mode in ``ImageReport.summary["modes"]``.
    """
    worst = min(mode["tests"], key=lambda test: mode["tests"][test]["p_holm"])
    p, ratio = mode["tests"][worst]["p_holm"], mode.get("equivalence")
    if p < ALARM:
        wrong = "NOT EXACT" if mode["claims"] == "exact" else "another distribution"
        return f"{wrong}: {worst}, p = {p:.1g}"
    if ratio is None:
        return "the reference"
    if mode["same"] == 1:
        return "the very same images"
    shown = "shown" if ratio["shown"] else "not shown with so few images"
    return f"no difference found; equal likelihood {shown}"


def sheet(images: np.ndarray, title: str, columns: int = 10) -> bytes:
    """Draws a contact sheet and returns it as PNG.

    Args:
        images: ``(n, H, W, 3)`` uint8.
        title: Title above the images.
        columns: Number of images in a row.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    from mmdecode.evaluation.report import plots

    plots.drawable()
    from matplotlib.figure import Figure

    rows = -(-len(images) // columns)
    padded = np.full((rows * columns, *images.shape[1:]), 255, dtype=np.uint8)
    padded[: len(images)] = images
    _, height, width, _ = images.shape
    laid = padded.reshape(rows, columns, height, width, 3).swapaxes(1, 2)
    figure = Figure(figsize=(8, 0.4 + 8 * rows * height / (columns * width)), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(laid.reshape(rows * height, columns * width, 3), interpolation="nearest")
    axes.set_title(plots.label(title), loc="left")
    axes.axis("off")
    return plots.png(figure)


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
    found = {test: mode["tests"].get(test, {}).get("p_holm") for test in TESTS}
    cells = {test: "" if p is None else f"{p:.2g}" for test, p in found.items()}
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
        "nearer than held-out, p": "" if near is None else f"{near['p']:.2g}",
    }


def _spread(
    found: Mapping[str, float] | None, form: str = ".2f", name: str = "value", scale: float = 1
) -> str:
    if found is None:
        return ""
    value, low, high = (format(scale * found[key], form) for key in (name, "low", "high"))
    return f"{value} [{low}, {high}]"
