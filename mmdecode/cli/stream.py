"""``mmdecode stream``: transcribes audio while it arrives."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer
from rich.live import Live
from rich.text import Text

from mmdecode.cli import flags
from mmdecode.cli.output import emit_json
from mmdecode.errors import InputError
from mmdecode.runs.console import console, out, without_other_bars

if TYPE_CHECKING:
    import numpy as np

    from mmdecode.asr.streaming import Update
    from mmdecode.evaluation.speed.latency import StreamReport


def command(
    path: Annotated[str, typer.Argument()],
    model: flags.Recogniser,
    draft: str | None = None,
    policy: str = "agreement",
    step: float = 1.0,
    vad: bool = False,
    word_timestamps: bool = False,
    language: str | None = None,
    max_new_tokens: flags.Limit = None,
    device: str = "auto",
    dtype: str = "auto",
    quantize: flags.Rounding = None,
    json: bool = False,
) -> None:
    """Transcribe audio while it arrives, and print words once they are stable.

    Printed words do not change any more. A terminal also shows the provisional words, dimmed. A
    file is read as fast as it can be transcribed. Ctrl-C ends a stream.

    For example:

      arecord -f S16_LE -r 16000 -c 1 -t raw | mmdecode stream - --model openai/whisper-small

      ffmpeg -i talk.mkv -ac 1 -ar 16000 -f s16le - | mmdecode stream - --model small --json

    Options:
        path: An audio file, or - for a stream on stdin: 16-bit little-endian samples at 16 kHz, one
            channel.
        draft: Drafter; see 'mmdecode methods draft'.
        policy: Words that are committed, that is printed for good: agreement:n=2 commits words
            that the last n hypotheses agree on, hold:n=3 all but the last n words.
        step: Seconds of audio between updates.
        word_timestamps: Time words, and report the mean delay from a word's end to its commitment.
        json: Print a JSON object per update, and one at the end.
    """
    given = dict(locals())

    from mmdecode.asr.audio.reading import blocks, recording
    from mmdecode.asr.output.inputs import STDIN
    from mmdecode.asr.streaming import Stream, policy_of
    from mmdecode.asr.transcriber import Transcriber
    from mmdecode.evaluation.speed.latency import StreamMeter

    without_other_bars()
    policy_of(policy)  # refused before a model is loaded
    names = "draft device dtype quantize language vad word_timestamps max_new_tokens"
    transcriber = Transcriber.from_pretrained(model, **flags.picked(given, names))
    stream, meter = Stream(transcriber, policy, step), StreamMeter()
    with contextlib.ExitStack() as stack:
        screen = None if json else stack.enter_context(_Screen())

        def take(updates: list[Update]) -> None:
            for update in updates:
                meter.add(update)
                screen.show(update) if screen else emit_json(update.as_dict())

        spoken = path == STDIN
        samples = _spoken(sys.stdin.buffer) if spoken else blocks(recording(path), stream.rate)
        follow(samples, stream.feed, round(step * stream.rate), take)
        take([stream.finish()])
    report = meter.report()
    if json:
        emit_json(flags.picked(given, "model", later="quantize") | report.as_dict())
    else:
        console.print(_summary(report, stream.audio_s), highlight=False, soft_wrap=True)


def follow(
    blocks: Iterable[np.ndarray],
    feed: Callable[[np.ndarray], list[Update]],
    size: int,
    take: Callable[[list[Update]], None],
) -> None:
    """Passes samples to a stream until they end or Ctrl-C is pressed.

    After Ctrl-C no more samples are awaited, but a step that is being transcribed is finished.

    Args:
        blocks: Blocks of samples as they arrive.
        feed: Function that transcribes samples, see `mmdecode.asr.streaming.Stream.feed`.
        size: Samples per call of ``feed``; Ctrl-C is checked after each call.
        take: Function that is called with the updates of each call of ``feed``.
    """
    waiting, asked = True, False

    def interrupted(*_: object) -> None:
        nonlocal asked
        asked = True
        if waiting:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        for block in blocks:
            waiting = False
            for at in range(0, len(block), size):
                take(feed(block[at : at + size]))
                if asked:
                    return
            waiting = True
    except KeyboardInterrupt:
        return
    finally:
        signal.signal(signal.SIGINT, before)


def _spoken(file: BinaryIO) -> Iterator[np.ndarray]:
    """Reads 16-bit samples from an open file, and yields float32 blocks as they arrive."""
    import numpy as np

    rest, started = b"", False
    while data := file.read1(1 << 16):  # type: ignore[attr-defined]
        data = rest + data
        if not started and data.startswith((b"RIFF", b"fLaC", b"OggS", b"ID3")):
            raise InputError(
                "standard input holds an audio file; expected samples without a header: convert it "
                "with ffmpeg -i - -ac 1 -ar 16000 -f s16le -, or give the file's path"
            )
        started = True
        whole = len(data) - len(data) % 2
        rest = data[whole:]
        yield np.frombuffer(data[:whole], "<i2").astype(np.float32) / 32768


class _Screen:
    """Prints committed words as running text, and on a terminal provisional words, dimmed."""

    def __init__(self) -> None:
        self._line = ""
        self._live = Live(console=out, transient=True, auto_refresh=False)

    def __enter__(self) -> _Screen:
        if out.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()
        out.print(self._line if out.is_terminal else "", markup=False, highlight=False)

    def show(self, update: Update) -> None:
        """Shows an update."""
        if not out.is_terminal:  # rich prints whole lines only
            out.file.write(update.text if self._line else update.text.lstrip())
            out.file.flush()
            self._line = self._line or update.text
            return
        self._line = (self._line + update.text).lstrip()
        if self._line.endswith((".", "?", "!")) or len(self._line) > out.width:
            out.print(self._line, markup=False, highlight=False)
            self._line = ""
        open_words = "".join(update.provisional), "dim"
        self._live.update(Text.assemble(self._line, open_words), refresh=True)


def _summary(report: StreamReport, audio_s: float) -> str:
    """Returns the line with statistics of a whole stream that is printed at its end."""
    parts = [f"{audio_s:.1f} s of audio, {report.committed_words} words committed"]
    if report.received.al is not None:
        parts.append(
            f"lagging (AL, DAL) {report.received.al:.2f} and {report.received.dal:.2f} s of audio, "
            f"{report.ready.al:.2f} and {report.ready.dal:.2f} s on the wall"
        )
    if report.lag_s is not None:
        parts.append(f"committed {report.lag_s:.2f} s after their ends")
    changed = 100 * report.provisional_change_rate
    parts.append(f"{changed:.0f} % of the words shown were provisional and changed")
    parts.append(f"updates at most {report.delay_s:.2f} s late")
    return "; ".join(parts)
