"""Recommendation of a way of decoding, from the measurements of all ways on the same recordings.

A way counts as faster than undrafted float32 if the interval of its speedup lies above 1 and the
speedup exceeds the noise, which is the ratio between the two runs of undrafted float32. A faster
way can be recommended if all its tokens are those of undrafted float32 or, with reference texts, if
the interval of the difference in word error rate does not lie above 0. Ways whose speedups differ
by less than the noise count as equally fast; among these a drafter of the float32 model comes
first, since its tokens are the same on any recording, and then a way that wrote the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mmdecode.errors import MissingExtraError
from mmdecode.evaluation.speed.draft_speed import AGAIN
from mmdecode.evaluation.speed.recogniser_speed import FP32, GENERATE, Errors, RecogniserSpeed
from mmdecode.evaluation.stats.intervals import paired_bootstrap

if TYPE_CHECKING:
    from mmdecode.asr.output.manifest import Entry


def with_errors(
    rows: list[RecogniserSpeed], entries: Sequence[Entry], language: str | None
) -> tuple[list[RecogniserSpeed], str | None]:
    """Adds word errors to measurements if all recordings have a text.

    Args:
        rows: Measurements; the first is undrafted float32.
        entries: Recordings of the rows' ``texts``.
        language: Language of all recordings, if given.

    Returns:
        The measurements; and the reason why there are no word errors, for a note; ``None``: none
        is needed.
    """
    from mmdecode.evaluation.speech.wer import count_errors, default_scorer, summed

    references = [entry.text for entry in entries if entry.text is not None]
    if not entries or len(references) < len(entries):
        return rows, None
    spoken = {language or entry.language for entry in entries}
    normaliser = "whisper" if spoken <= {None, "en"} else "basic"
    found, reference = [], None
    try:
        scorer = default_scorer(normaliser)
        for row in rows:
            if row.problem is None:
                counts = count_errors(references, row.texts, normaliser=normaliser, scorer=scorer)
                wrong, words = counts[:, 2:5].sum(1), counts[:, 0]
                reference = wrong if reference is None else reference
                rate = summed(counts, normaliser, scorer)
                more = paired_bootstrap(wrong, reference, words)
                own = {"value": rate.value, "low": rate.low, "high": rate.high}
                errors = Errors(**own, more=more.difference, more_low=more.low, more_high=more.high)
                row = replace(row, errors=errors)
            found.append(row)
    except MissingExtraError as error:
        return rows, str(error)
    return found, None


def noise_of(rows: Sequence[RecogniserSpeed]) -> float:
    """Ratio, at least 1, by which two runs of undrafted float32 may differ."""
    [again] = [row for row in rows if row.draft == AGAIN]
    _, low, high = again.speedup
    return max(high, 1 / low)


def is_broken(row: RecogniserSpeed) -> bool:
    """Whether drafted tokens differ from undrafted ones where they must not."""
    return row.problem is None and row.exact and row.same_as_undrafted < 1


def recommend(rows: Sequence[RecogniserSpeed]) -> tuple[RecogniserSpeed, str]:
    """Chooses a way of decoding.

    Args:
        rows: Measurements; the first is undrafted float32.

    Returns:
        Its measurements; and sentences that say how fast it is and what it changes.
    """
    plain, noise = rows[0], noise_of(rows)
    faster = [
        row
        for row in rows
        if row.draft not in (AGAIN, GENERATE)
        and row.problem is None
        and not is_broken(row)
        and row.speedup[0] > noise
        and row.speedup[1] > 1
    ]
    allowed = [row for row in faster if keeps_text(row)]
    chosen = plain
    words = (
        f"No way that keeps the text is faster than undrafted {FP32} by more than the noise of "
        f"this measurement, x{noise:.2f}: decode without a drafter."
    )
    if allowed:
        best = max(row.speedup[0] for row in allowed)
        near = [row for row in allowed if row.speedup[0] * noise >= best]
        chosen = max(
            near, key=lambda row: (row.precision == FP32, row.same_as_fp32 == 1, row.speedup[0])
        )
        words = _words(chosen)
    return chosen, words + _refused(faster, chosen, noise)


def keeps_text(row: RecogniserSpeed) -> bool:
    """Whether all tokens are those of undrafted float32, or its word errors are not more."""
    return row.same_as_fp32 == 1 or (row.errors is not None and row.errors.more_low <= 0)


def _words(row: RecogniserSpeed) -> str:
    """Says what a row changes."""
    value, low, high = row.speedup
    much = f"{value:.2f} times as fast as undrafted {FP32} [{low:.2f}, {high:.2f}]"
    if row.precision == FP32:
        return f"The same text, {much}: the drafter changes no token."
    return f"{much}. {_changes(row)}."


def _changes(row: RecogniserSpeed) -> str:
    """Says how the text of another model differs."""
    words = f"{row.precision} is another model: "
    if row.same_as_fp32 == 1:
        return f"{words}it wrote the same tokens on these recordings, and may not on others"
    words += f"{row.other_texts} of {len(row.texts)} recordings have another text"
    if row.errors is None:
        return words
    own = row.errors
    return (
        f"{words}, WER {100 * own.value:.1f} % instead of {100 * (own.value - own.more):.1f} % "
        f"(difference {100 * own.more:+.1f} points [{100 * own.more_low:+.1f}, "
        f"{100 * own.more_high:+.1f}])"
    )


def _refused(faster: Sequence[RecogniserSpeed], chosen: RecogniserSpeed, noise: float) -> str:
    """Names the fastest way that is not recommended because of its text, if it is faster."""
    others = [
        row for row in faster if not keeps_text(row) and row.speedup[0] > noise * chosen.speedup[0]
    ]
    if not others:
        return ""
    row = max(others, key=lambda row: row.speedup[0])
    end = "" if row.errors else "; a table with texts as --data would tell its word errors"
    return (
        f" Faster, and not recommended: {label(row)}, x{row.speedup[0]:.2f}. {_changes(row)}{end}."
    )


def label(row: RecogniserSpeed) -> str:
    """Name of a way with its precision, such as ``medusa in int8``."""
    return f"{row.draft} in {row.precision}"
