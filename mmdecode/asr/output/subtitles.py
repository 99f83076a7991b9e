"""Makes subtitle cues of segments, within limits of line width, line count and reading speed.

A cue is a text that is shown from a start to an end time. A segment that does not fit into one cue
is split at word boundaries, into lines of about equal width. If the segment has ``words``, its cues
get the times of their words; otherwise its duration is divided in proportion to their characters. A
cue is shown at least for the minimum duration, and longer if its text takes longer to read, but
only until the next cue starts; cues do not overlap.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmdecode.errors import OptionError

if TYPE_CHECKING:
    from mmdecode.asr.results import Segment


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Limits of subtitles; the defaults are those of many broadcasters and streaming services.

    Attributes:
        max_line_width: Maximum width of a line in columns; a wide character, as in Chinese, takes
            two columns. ``None``: no limit, so that each segment is one cue.
        max_line_count: Maximum number of lines of a cue.
        max_reading_speed: Maximum reading speed, in characters per second. A cue that is spoken
            faster is shown longer, at most until the next cue; text is never left out. ``None``: no
            limit.
        min_duration_s: Minimum duration of a cue in seconds; the next cue is delayed if necessary.

    Raises:
        OptionError: A value is out of range.
    """

    max_line_width: int | None = 42
    max_line_count: int = 2
    max_reading_speed: float | None = 20.0
    min_duration_s: float = 5 / 6

    def __post_init__(self) -> None:
        if self.max_line_width is not None and self.max_line_width < 2:
            raise OptionError(f"max_line_width={self.max_line_width}; expected at least 2")
        if self.max_line_count < 1:
            raise OptionError(f"max_line_count={self.max_line_count}; expected at least 1")
        if self.max_reading_speed is not None and not self.max_reading_speed > 0:
            raise OptionError(
                f"max_reading_speed={self.max_reading_speed}; expected more than 0, or None"
            )
        if not 0 <= self.min_duration_s < float("inf"):
            raise OptionError(f"min_duration_s={self.min_duration_s}; expected seconds, 0 or more")


DEFAULT = Layout()


@dataclass(frozen=True, kw_only=True)
class Cue:
    """A subtitle: lines of text that are shown from a start to an end time.

    Attributes:
        start_ms, end_ms: Start and end, in milliseconds from the beginning of the recording.
        lines: Its lines of text, from top to bottom.
    """

    start_ms: int
    end_ms: int
    lines: tuple[str, ...]

    @property
    def characters(self) -> int:
        """Number of characters; wide characters count twice."""
        return sum(map(width, self.lines))


def cues(segments: Iterable[Segment], layout: Layout = DEFAULT) -> list[Cue]:
    """Makes cues of segments, ordered by time and without overlap; skips segments without text."""
    found = [cue for segment in segments for cue in _split(segment, layout)]
    found.sort(key=lambda cue: cue.start_ms)
    shown: list[Cue] = []
    free = 0
    for number, cue in enumerate(found):
        start = max(cue.start_ms, free)
        following = found[number + 1].start_ms if number + 1 < len(found) else None
        end = max(cue.end_ms, start)
        if layout.max_reading_speed is not None:
            end = max(end, start + round(1000 * cue.characters / layout.max_reading_speed))
        if following is not None:
            end = min(end, following)
        end = max(end, start + round(1000 * layout.min_duration_s))
        shown.append(Cue(start_ms=start, end_ms=end, lines=cue.lines))
        free = end
    return shown


def clean(text: str) -> str:
    """Puts a text on one line, with single spaces and without control characters."""
    text = " ".join(text.split())
    return "".join(c for c in text if unicodedata.category(c) != "Cc")


def width(text: str) -> int:
    """Returns the width of a text in columns; wide characters have two, combining ones none."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) > 0 for c in text)


def wrap(text: str, columns: int) -> list[tuple[int, int]]:
    """Breaks a text into lines, and returns start and end index of each; breaks too wide words."""
    lines: list[tuple[int, int]] = []
    for begin, end in _breakable(text, columns):
        if lines and width(text[lines[-1][0] : end]) <= columns:
            lines[-1] = lines[-1][0], end
        else:
            lines.append((begin, end))
    return lines


def _breakable(text: str, columns: int) -> Iterator[tuple[int, int]]:
    """Yields start and end index of words, and of the parts of words wider than a line."""
    for word in re.finditer(r"\S+", text):
        begin = word.start()
        if width(word[0]) > columns:  # scripts without spaces are one long word
            for end in range(begin + 1, word.end()):
                if width(text[begin : end + 1]) > columns:
                    yield begin, end
                    begin = end
        yield begin, word.end()


def _split(segment: Segment, layout: Layout) -> list[Cue]:
    text = clean(segment.text)
    if not text:
        return []
    lines = [(0, len(text))]
    if layout.max_line_width is not None:
        lines = _balanced(text, layout.max_line_width)
    times = _Times(segment, text)
    cues = []
    for first in range(0, len(lines), layout.max_line_count):
        part = lines[first : first + layout.max_line_count]
        start, end = times.of(part[0][0], part[-1][1])
        shown = tuple(text[begin:stop] for begin, stop in part)
        cues.append(Cue(start_ms=round(1000 * start), end_ms=round(1000 * end), lines=shown))
    return cues


def _balanced(text: str, columns: int) -> list[tuple[int, int]]:
    """Breaks a text into as few lines as possible, all of about equal width."""
    lines = wrap(text, columns)
    for narrower in range(columns - 1, 1, -1):
        found = wrap(text, narrower)
        if len(found) > len(lines) or max(map(width, text.split())) > narrower:
            break
        lines = found
    return lines


class _Times:
    """Finds the times of parts of a segment's text."""

    def __init__(self, segment: Segment, text: str) -> None:
        self.start, self.end = max(segment.start_s, 0.0), max(segment.end_s, segment.start_s, 0.0)
        self.length = len(text)
        self.words = _located(text, getattr(segment, "words", None) or ())

    def of(self, begin: int, stop: int) -> tuple[float, float]:
        """Returns start and end in seconds of the characters ``begin`` to ``stop``."""
        inside = [(s, e) for at, s, e in self.words if begin <= at < stop]
        if inside:
            return inside[0][0], max(end for _, end in inside)
        per_character = (self.end - self.start) / self.length
        return self.start + begin * per_character, self.start + stop * per_character


def _located(text: str, words: Sequence[Any]) -> list[tuple[int, float, float]]:
    """Returns position in the text, start and end of each word; empty if a word is not found."""
    found, at = [], 0
    for word in words:
        bare = clean(word.text)
        at = text.find(bare, at)
        if at < 0:
            return []
        found.append((at, word.start_s, word.end_s))
        at += len(bare)
    return found
