"""``mmdecode stream``: transcribes audio while it arrives, from one or several inputs."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmdecode.cli import flags
from mmdecode.cli.output import emit_json
from mmdecode.cli.screen import Screen
from mmdecode.errors import MMDecodeError, OptionError
from mmdecode.runs.console import console, print_line, warnings_shown, without_other_bars

if TYPE_CHECKING:
    from mmdecode.asr.audio.inputs import AudioInput
    from mmdecode.asr.output.captions import Captions
    from mmdecode.asr.streaming.feeding import FedStream, Feeder
    from mmdecode.asr.streaming.finisher import Finisher
    from mmdecode.asr.transcriber import Transcriber
    from mmdecode.evaluation.speed.latency import StreamMeter, StreamReport

PANELS = {
    "Options": "model draft policy step task language word_timestamps device",
    "Silence": "vad vad_method vad_threshold vad_min_speech_s vad_min_silence_s vad_pad_s",
    "Input": "device_index list_devices real_time",
    "Output": "punctuate fluent out_dir overwrite json",
    "Decoding": "max_new_tokens dtype quantize trust_remote_code",
}
"""Parameters by section of the help."""
_LATE_S = 5.0
"""Delay of a live input from which the user is warned, if it is also more than three steps."""


def command(
    context: typer.Context,
    model: flags.Recogniser,
    paths: Annotated[flags.Texts, typer.Argument(metavar="[INPUT...]")] = None,
    device_index: Annotated[int | None, typer.Option(metavar="N")] = None,
    list_devices: bool = False,
    real_time: bool = False,
    draft: str | None = None,
    policy: str = "agreement",
    step: float = 1.0,
    task: str | None = None,
    vad: bool = False,
    vad_method: str | None = None,
    vad_threshold: float | None = None,
    vad_min_speech_s: float | None = None,
    vad_min_silence_s: float | None = None,
    vad_pad_s: float | None = None,
    word_timestamps: bool = False,
    language: str | None = None,
    punctuate: Annotated[str | None, typer.Option(metavar="WORDS")] = None,
    fluent: bool = False,
    out_dir: Path | None = None,
    overwrite: bool = False,
    max_new_tokens: flags.Limit = None,
    device: str = "auto",
    dtype: str = "auto",
    quantize: flags.Rounding = None,
    json: bool = False,
) -> None:
    """Transcribe audio while it arrives, and print words once they are stable.

    Printed words do not change any more. A terminal also shows the provisional words, dimmed. A
    file is read as fast as it can be transcribed. Ctrl-C or SIGTERM ends all inputs after the step
    at hand, and prints their provisional words. Inputs that fail are listed at the end, and the
    exit code is then 1.

    For example:

      mmdecode stream mic --model openai/whisper-small

      mmdecode stream talk.mp3 lecture.wav --real-time --out captions --model small

      ffmpeg -i talk.mkv -ac 1 -ar 16000 -f s16le - | mmdecode stream - --model small --json

    Options:
        paths: Audio files; mic for a microphone (extra mic); - for a stream on stdin: 16-bit
            little-endian samples at 16 kHz, one channel. Several are transcribed together.
        device_index: Number of the microphone, see --list-devices. [default: the system's]
        list_devices: List microphones and exit.
        real_time: Read files at their own pace, one second of audio per second.
        draft: Drafter; see 'mmdecode methods draft'.
        policy: Words that are committed, that is printed for good. agreement:n=2 commits words
            that the last n hypotheses agree on; hold:n=3 all but the last n words; delay:s=0.8
            words that ended s seconds ago; alignatt:s=0.5 words that do not attend to the last s
            seconds; ending:p=0.9 words after which the text goes on with probability p; stable:m=2
            continues the last text and commits all but its last m tokens; wait:k=3 a word per
            step, from step k on; adaptive-wait the same, words of which the model is sure earlier.
        step: Seconds of audio between updates.
        word_timestamps: Time words, and report the mean delay from a word's end to its commitment.
        punctuate: Set marks and capitals of printed words again, by a tagger that waits for so many
            later words, such as 2, or for the end of the sentence (sentence). English only.
        fluent: Leave out fillers and repairs that the tagger finds.
        out_dir (--out): Folder for captions, a WebVTT file per input, which grow while audio
            arrives. Words are timed if the model can.
        json: Print a JSON object per update, with the name of its input, and one at the end.
    """
    given = dict(locals())

    from mmdecode.asr.output.captions import Captions, refuse_existing
    from mmdecode.asr.streaming import StreamPool, policy_of
    from mmdecode.asr.streaming.feeding import Feeder
    from mmdecode.asr.transcriber import make_options

    without_other_bars()
    flags.refuse_without("--out", ["overwrite"], context, out_dir)
    flags.refuse_without("--punctuate", ["fluent"], context, punctuate)
    delay = _delay(punctuate)
    names = _names(paths or [], device_index)
    files = [name for name in names if name not in ("mic", "-")]
    flags.refuse_without("a file", ["real_time"], context, files)
    # refused before a model is loaded
    policy_of(policy)
    flags.refuse_without(flags.VAD, flags.VAD_SETTINGS, context, vad or vad_method)
    options = flags.picked(
        given,
        "language task word_timestamps max_new_tokens",
        later=" ".join(flags.VAD_SETTINGS),
    )
    options["vad"] = vad_method or vad
    make_options(options)
    captioned = _caption_paths(out_dir, names)
    refuse_existing(captioned.values(), overwrite)
    microphone = _microphone(names, device_index)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings_shown("default"))
        transcriber = _loaded(given, options, timed=out_dir is not None)
        pool, rate = StreamPool(transcriber, most_waiting_s=math.inf), transcriber.sampling_rate
        inputs = [_input(name, rate, step, real_time, microphone) for name in names]
        feeder = Feeder(pool, inputs, step, policy=policy)
        writers = [
            stack.enter_context(contextlib.closing(Captions(path, overwrite)))
            for path in captioned.values()
        ]
        screen = None if json else stack.enter_context(Screen([_shown(one) for one in inputs]))
        if microphone is not None:
            print_line(f"recording from {microphone.name}; Ctrl-C ends", console)
        progress = Progress(feeder, step, writers, screen)
        if punctuate is not None:
            progress.finish_words(delay, fluent)
        progress.run()
    progress.report(flags.picked(given, "model", later="quantize") if json else None)
    if any(one.error for one in feeder.streams):
        raise typer.Exit(1)


def _delay(punctuate: str | None) -> int | None:
    """Returns the number of words of ``--punctuate``; ``None``: to the end of the sentence.

    Raises:
        OptionError: It is neither a number nor ``sentence``.
    """
    if punctuate is None or punctuate == "sentence":
        return None
    if not punctuate.isdecimal():
        raise OptionError(
            f"--punctuate {punctuate}; expected a number of words, such as 2, or sentence"
        )
    return int(punctuate)


def refuse(given: dict[str, Any]) -> None:
    """Lists microphones instead of running, if that is asked for."""
    if not given["list_devices"]:
        return
    from mmdecode.asr.audio.microphone import input_devices

    found = input_devices()
    if given["json"]:
        emit_json({"devices": found})
    elif not found:
        print_line("no microphone was found on this machine", console)
    for one in () if given["json"] else found:
        default = " (default)" if one.is_default else ""
        print_line(f"{one.index}: {one.name}, {one.channels} in, {one.rate} Hz{default}")
    raise typer.Exit


def _names(paths: Sequence[str], device_index: int | None) -> list[str]:
    """Returns the inputs as given; the index of a microphone adds one.

    Raises:
        OptionError: There is none, or one is named twice.
    """
    from mmdecode.asr.audio.microphone import MICROPHONE

    names = list(paths)
    if device_index is not None and MICROPHONE not in names:
        names.append(MICROPHONE)
    if not names:
        raise OptionError("nothing to transcribe; give audio files, mic for a microphone, or -")
    for name, count in Counter(names).items():
        if count > 1:
            raise OptionError(f"input {name!r} is given {count} times; name each input once")
    return names


def _caption_paths(folder: Path | None, names: Sequence[str]) -> dict[str, Path]:
    """Returns the caption file of each input; none without a folder."""
    from mmdecode.asr.audio.inputs import STDIN
    from mmdecode.asr.output.formats import Names

    if folder is None:
        return {}
    files = Names()
    return {name: folder / f"{files.new(STDIN if name == '-' else name)}.vtt" for name in names}


def _microphone(names: Sequence[str], index: int | None) -> Any:
    """Returns the device that records; ``None``: no input is a microphone."""
    from mmdecode.asr.audio.microphone import MICROPHONE, find_device

    return find_device(index) if MICROPHONE in names else None


def _input(name: str, rate: int, step: float, real_time: bool, microphone: Any) -> AudioInput:
    """Makes an input of its name on the command line."""
    from mmdecode.asr.audio.inputs import FileInput, PipeInput
    from mmdecode.asr.audio.microphone import MICROPHONE, Microphone
    from mmdecode.asr.audio.reading import recording

    block = max(1, round(step * rate))
    if name == "-":
        return PipeInput(sys.stdin.buffer, rate, block)
    if name == MICROPHONE:
        return Microphone(rate, microphone)
    block = min(block, rate // 10) if real_time else block
    return FileInput(recording(name), rate, block, real_time)


def _loaded(given: dict[str, Any], options: dict[str, Any], timed: bool) -> Transcriber:
    """Loads the model; words get times if captions are written and the model has them."""
    from mmdecode.asr.transcriber import Transcriber

    loaded = flags.picked(given, "draft device dtype quantize")
    made = Transcriber.from_pretrained(given["model"], **loaded, **options)
    if timed and not made.options.word_timestamps:
        with contextlib.suppress(MMDecodeError):
            return made.with_options(word_timestamps=True)
    return made


def _shown(one: AudioInput) -> str:
    return one.name.encode("utf-8", "backslashreplace").decode()  # names need not be UTF-8


class Progress:
    """Runs streams to their end, and shows, writes and measures their updates.

    Args:
        feeder: The streams with their inputs.
        step_s: Seconds of audio between updates.
        captions: A file of captions per input, or none at all.
        screen: Where text is shown; ``None``: updates are printed as JSON.
    """

    def __init__(
        self, feeder: Feeder, step_s: float, captions: Sequence[Captions], screen: Screen | None
    ) -> None:
        from mmdecode.evaluation.speed.latency import StreamMeter

        self._feeder, self._screen = feeder, screen
        self._late_s = max(_LATE_S, 3 * step_s)
        self._captions = dict(zip(map(id, feeder.streams), captions, strict=False))
        self._meters: dict[int, StreamMeter] = {id(one): StreamMeter() for one in feeder.streams}
        self._late = self._stopped = False
        self._finishers: dict[int, Finisher] = {}

    def finish_words(self, delay: int | None, fluent: bool) -> None:
        """Sets marks and capitals of committed words, see `Finisher`."""
        from mmdecode.asr.streaming.finisher import Finisher

        tagger = Finisher().tagger
        for one in self._feeder.streams:
            self._finishers[id(one)] = Finisher(tagger, delay, fluent)

    def run(self) -> None:
        """Runs until all inputs have ended, or Ctrl-C ends them."""
        from mmdecode.asr.results import Failure

        with contextlib.ExitStack() as stack:
            for one in self._feeder.streams:
                stack.callback(one.input.close)
            asked = stack.enter_context(interrupts())
            self._feeder.start()
            while not self._feeder.ended:
                for one, found in self._feeder.step():
                    if isinstance(found, Failure):
                        self._fail(one)
                    elif one.error is None or found.audio_s:
                        self._take(one, found)
                for one in self._feeder.streams:
                    while one.input.notes:
                        print_line(one.input.notes.pop(0), console, "yellow")
                if asked() and not self._stopped:
                    self._stopped = True
                    self._feeder.stop()

    def _take(self, one: FedStream, update: Any) -> None:
        finisher = self._finishers.get(id(one))
        self._show(one, finisher.update(update, one.ended) if finisher else update)

    def _fail(self, one: FedStream) -> None:
        """Shows the committed words of a stream that failed which waited for later ones."""
        finisher = self._finishers.get(id(one))
        if finisher and finisher.waiting:
            self._show(one, finisher.rest(one.stream.audio_s))

    def _show(self, one: FedStream, update: Any) -> None:
        self._meters[id(one)].add(update)
        if id(one) in self._captions:
            self._captions[id(one)].add(update)
        name = _shown(one.input)
        if self._screen is None:
            emit_json({"input": name, **update.as_dict()})
        else:
            self._screen.show(name, update, ended=one.ended)
        delay_s = update.ready_s - update.audio_s
        if one.input.is_live and delay_s > self._late_s and not self._late:
            self._late = True
            print_line(
                f"{name}: words come {delay_s:.1f} s late, since this machine is slower than the "
                "audio, and the delay grows; nothing is dropped; a smaller model, a longer --step "
                "or a --draft is faster",
                console,
                "yellow",
            )

    def _path(self, one: FedStream) -> str | None:
        captions = self._captions.get(id(one))
        return None if captions is None else str(captions.path)

    def report(self, settings: dict[str, Any] | None) -> None:
        """Prints the statistics of each input, and why inputs failed.

        Args:
            settings: Settings to print, with the statistics, as JSON; ``None``: lines of text.
        """
        streams = self._feeder.streams
        found = [self._meters[id(one)].report() for one in streams]
        if settings is not None:
            rows = [
                _row(one, report) | {"captions": self._path(one)}
                for one, report in zip(streams, found, strict=True)
            ]
            failed = sum(one.error is not None for one in streams)
            several = {"inputs": rows, "failed": failed}
            emit_json(settings | (rows[0] if len(rows) == 1 else several))
        for one, report in zip(streams, found, strict=True):
            name = f"{_shown(one.input)}: " if len(streams) > 1 else ""
            if settings is None and (one.error is None or one.stream.audio_s):
                path = self._path(one)
                text = _summary(report, one.stream.audio_s) + (f"; captions in {path}" * bool(path))
                print_line(name + text, console)
            if one.discarded_s >= 0.05:
                text = f"stopped; {one.discarded_s:.1f} s of audio that arrived are not transcribed"
                print_line(name + text, console, "yellow")
            if one.input.lost_s:
                print_line(f"{name}{one.input.lost_s:.1f} s of audio were lost", console, "yellow")
        for one in streams:
            if one.error is not None:
                text = one.error.error.encode("utf-8", "backslashreplace").decode()
                named = text.startswith(_shown(one.input))
                text = text if named else f"{_shown(one.input)}: {text}"
                print_line(f"failed: {text}", console, "red")


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Notes Ctrl-C or SIGTERM inside the context; a second one has its usual effect.

    Yields:
        Function that returns whether one came.
    """
    asked = False
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(*_: object) -> None:
        nonlocal asked
        asked = True
        restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: asked
    finally:
        restore()


def _row(one: FedStream, report: StreamReport) -> dict[str, Any]:
    """Returns the statistics of an input as JSON."""
    return {
        "input": _shown(one.input),
        "audio_s": one.stream.audio_s,
        **report.as_dict(),
        "discarded_s": one.discarded_s,
        "lost_s": one.input.lost_s,
        "error": one.error and one.error.error,
    }


def _summary(report: StreamReport, audio_s: float) -> str:
    """Returns the line with statistics of a whole stream that is printed at its end."""
    words = f"{report.committed_words} word" + "s" * (report.committed_words != 1)
    parts = [f"{audio_s:.1f} s of audio, {words} committed"]
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
