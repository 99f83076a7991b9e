"""Reads audio files, bytes and arrays as mono float32 blocks at the model's sampling rate.

Files are decoded block by block, so that memory does not grow with the length of a recording.
soundfile reads wav, flac, ogg, opus, mp3, aiff and others; PyAV (extra ``media``) reads containers
such as m4a, mp4 and webm; librosa is tried where PyAV is not installed. Channels are averaged, and
soxr resamples block by block. Damaged recordings are refused: files that are shorter than their
header says, samples that are NaN or infinite, and files without samples.

Inputs may also be the bytes of a file, a file that is open for reading, an array at the model's
rate, or ``(array, rate)``. Arrays have the shape ``(samples,)`` or ``(channels, samples)``. Nothing
is downloaded.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import re
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, BinaryIO, TypeGuard

import numpy as np

from mmdecode.errors import InputError, MissingExtraError
from mmdecode.runs.inputs import content_of, refuse_address

if TYPE_CHECKING:
    from mmdecode.asr.recognizers.encoder_cache import EncoderCache

LOWEST_RATE, HIGHEST_RATE = 8_000, 192_000
SUFFIXES = frozenset(
    ".wav .flac .ogg .oga .opus .mp3 .aif .aiff .aifc .au .caf .w64 .rf64 .m4a .mp4 .mkv .webm "
    ".aac .wma .mka .mov .amr .ac3 .3gp".split()
)
"""Extensions of the files that count as audio in a folder; a file given by path may have any."""
BLOCK = 1 << 18
"""Samples decoded at once, all channels together."""
_CLAIM = re.compile(r"^ *(?:data|SSND|Data Size|riff) +: (\d+) \(should be (\d+)\)", re.MULTILINE)
"""libsndfile's note about a wav, aiff, au or w64 file that is shorter than its header says."""
_TOLERANCE_S = 0.25  # a container may end this much earlier than its header says
_TIMED = ("mov", "matroska", "asf", "avi")
"""Formats whose header holds the duration; for other formats PyAV only estimates it."""
_MOST_CHANNELS = 64  # more rows than this are samples, not channels
_EMPTY = "holds no samples; expected a recording with at least one"

Blocks = Iterator[tuple[int, np.ndarray]]
"""Iterator over blocks: sampling rate in Hz, and float32 samples ``(frames, channels)``."""


class Truncated(InputError):
    """A file is shorter than its header says; raised after all readable blocks were yielded."""


@dataclass(frozen=True)
class Source:
    """A recording that is not read yet: its name, and a function that reads it.

    Attributes:
        name: Its name in results and errors: the path, or for example ``array 2``.
        read: Function that reads it from the beginning; may be called more than once. For a
            truncated file it yields the blocks that can be read, then raises `Truncated`.
        language: Language of this recording; ``None``: the language of the options.
        allow_truncated: Whether a truncated file is read as far as possible without an error.
        missing: List to which reading adds a description of a truncated file's missing part.
        draft: Token ids that a drafter may copy from, such as those of an earlier hypothesis.
        evidence: Kind of evidence that the tokens of the transcript get, see
            `mmdecode.asr.alignment.evidence`; ``None``: none.
        encoder_cache: Cache of a stream, see `mmdecode.asr.recognizers.base.Recognizer`; ``None``:
            every window is encoded from its beginning.
    """

    name: str
    read: Callable[[], Blocks]
    language: str | None = None
    allow_truncated: bool = False
    missing: list[str] = field(default_factory=list, compare=False)
    draft: Sequence[int] = ()
    evidence: str | None = None
    encoder_cache: EncoderCache | None = field(default=None, compare=False)


def recording(
    path: str | os.PathLike[str],
    name: str | None = None,
    shown: str | None = None,
    *,
    block: int = BLOCK,
) -> Source:
    """Makes the source of a file; the file is not opened yet.

    Args:
        path: Path of the file.
        name: Name of the source; ``None``: the path.
        shown: Name in errors; ``None``: the path.
        block: Samples decoded at once, all channels together.
    """

    def read() -> Blocks:
        refuse_address(path)
        yield from _file(Path(path), block)

    return Source(name or str(path), _naming(shown or str(path), read))


def encoded(item: bytes | BinaryIO, name: str, *, block: int = BLOCK) -> Source:
    """Makes the source of an audio file's bytes, or of a file that is open for reading.

    Args:
        item: Bytes, or an open file, which is read once, from its current position.
        name: Name of the source.
        block: Samples decoded at once, all channels together.
    """
    content = functools.cache(lambda: bytes(item) if _is_bytes(item) else content_of(item))

    def read() -> Blocks:
        if not content():
            raise InputError("is empty (0 bytes); expected an audio file")
        yield from _decoded(content(), block)

    return Source(name, _naming(name, read))


def _naming(name: str, read: Callable[[], Blocks]) -> Callable[[], Blocks]:
    """Wraps ``read`` so that its errors begin with the recording's name."""

    def named() -> Blocks:
        try:
            yield from read()
        except InputError as error:
            raise type(error)(f"{name}: {error}") from error

    return named


def part(source: Source, start_s: float, length_s: float | None = None) -> Source:
    """Makes the source of a part of a recording; audio after the part is not read.

    Args:
        source: The recording.
        start_s: Start of the part in seconds, rounded to a sample.
        length_s: Length of the part in seconds; ``None``: to the end of the recording.

    Returns:
        The part, under the recording's name. Reading it raises `InputError` if the recording ends
        before the part does.
    """

    def read() -> Blocks:
        position = found = 0
        rate = 1
        for rate, frames in source.read():
            start = round(start_s * rate)
            stop = None if length_s is None else round((start_s + length_s) * rate)
            inside = frames[max(start - position, 0) : None if stop is None else stop - position]
            position, found = position + len(frames), found + len(inside)
            if len(inside):
                yield rate, inside
            if stop is not None and position >= stop:
                break
        if not found or (length_s is not None and length_s - found / rate > _TOLERANCE_S):
            lasting = "" if length_s is None else f" and lasts {length_s:g} s"
            raise InputError(
                f"{source.name}: has {found / rate:g} s of the part that begins at {start_s:g} s"
                f"{lasting}; correct 'offset' and 'duration', in seconds"
            )

    return replace(source, read=read)


def source_of(item: Any, rate: int, index: int = 0, *, block: int = BLOCK) -> Source:
    """Converts a recording in any form that users may pass into a source.

    Args:
        item: A path, the bytes of an audio file, a file that is open for reading, an array at
            ``rate``, ``(array, rate)``, a mapping with ``array`` and ``sampling_rate``, a `Source`,
            or a mapping with one of these as ``audio`` and the spoken ``language``; a stream adds
            other fields of `Source` as ``of_stream``.
        rate: Sampling rate in Hz of arrays that are given without a rate.
        index: Index in the input, which names recordings without a path, as ``array 2``.
        block: Samples decoded at once, all channels together; a `Source` keeps its own.

    Raises:
        InputError: The item is none of these.
    """
    if isinstance(item, Source):
        return item
    if isinstance(item, Mapping) and "audio" in item:
        language = item.get("language")
        if not isinstance(language, (str, NoneType)):
            raise InputError(
                f"recording {index}: language is {language!r}; expected a name such as 'en'"
            )
        source = source_of(item["audio"], rate, index, block=block)
        return replace(source, language=language, **item.get("of_stream", {}))
    if isinstance(item, (str, os.PathLike)):
        return recording(item, block=block)
    if _is_bytes(item):
        return encoded(item, f"bytes {index}", block=block)
    if hasattr(item, "read"):
        name = getattr(item, "name", None)
        return encoded(item, name if isinstance(name, str) else f"file {index}", block=block)
    name = f"array {index}"
    if isinstance(item, Mapping) and {"array", "sampling_rate"} <= set(item):
        name, item = str(item.get("path") or name), (item["array"], item["sampling_rate"])
    pair = isinstance(item, tuple) and len(item) == 2
    if pair and np.ndim(item[0]) > 0 and np.ndim(item[1]) == 0:
        item, rate = item[0], item[1]
    if not isinstance(rate, (int, float, np.number, np.ndarray)) and not hasattr(rate, "item"):
        raise InputError(f"{name}: its rate is {rate!r}; expected samples a second, such as 16000")
    try:
        array = np.asarray(item)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name}: cannot be converted to an array ({error}); expected a path, bytes, an open "
            "file, an array of samples or (array, rate)"
        ) from error
    return Source(name, lambda: _array(name, array, rate, block))


def _is_bytes(item: Any) -> TypeGuard[bytes]:
    return isinstance(item, (bytes, bytearray, memoryview))


def blocks(source: Source, rate: int) -> Iterator[np.ndarray]:
    """Reads a source as mono float32 samples at ``rate``, block by block, each ``(samples,)``.

    Raises:
        InputError: The recording cannot be read or is damaged; the message starts with its name.
    """
    import_or_explain("soxr", "resampling audio")
    import soxr

    stream: Any = None
    for given, frames in _readable(source):
        if not LOWEST_RATE <= given <= HIGHEST_RATE:
            raise InputError(
                f"{source.name}: the sampling rate is {given} Hz; expected {LOWEST_RATE} to "
                f"{HIGHEST_RATE} Hz: resample it, or correct the rate (in Hz, not kHz)"
            )
        mono = frames[:, 0] if frames.shape[1] == 1 else frames.mean(1, dtype=np.float32)
        if not np.isfinite(mono).all():
            raise InputError(
                f"{source.name}: has samples that are NaN or infinite; expected finite numbers: "
                "export it again, or clean it with numpy.nan_to_num"
            )
        if given == rate:
            yield mono
            continue
        if stream is None:
            stream = soxr.ResampleStream(given, rate, 1, dtype="float32", quality="HQ")
        yield stream.resample_chunk(np.ascontiguousarray(mono))
    if stream is not None:
        yield stream.resample_chunk(np.zeros(0, np.float32), last=True)


def _readable(source: Source) -> Blocks:
    """Reads a source; a truncated file is an error unless ``allow_truncated`` is set."""
    empty = True
    try:
        for block in source.read():
            empty = False
            yield block
    except Truncated as error:
        if empty or not source.allow_truncated:
            raise InputError(str(error)) from error
        source.missing[:] = [str(error).partition(";")[0]]


def import_or_explain(module: str, purpose: str, extra: str = "asr") -> Any:
    """Imports a module.

    Raises:
        MissingExtraError: The module is not installed; the message names the extra to install.
    """
    with MissingExtraError.instead(f"{purpose} needs {module}", extra=extra):
        return importlib.import_module(module)


def _array(name: str, array: np.ndarray, rate: Any, block: int) -> Blocks:
    if array.dtype == bool or not (
        np.issubdtype(array.dtype, np.floating) or np.issubdtype(array.dtype, np.integer)
    ):
        raise InputError(
            f"{name}: holds {array.dtype}; expected real numbers, floats in [-1, 1] or integers"
        )
    if array.ndim not in (1, 2):
        raise InputError(
            f"{name}: has shape {array.shape}; expected (samples,) or (channels, samples): pass "
            "one recording at a time"
        )
    if array.ndim == 2 and array.shape[0] > min(array.shape[1], _MOST_CHANNELS):
        raise InputError(
            f"{name}: has shape {array.shape}, which looks like (samples, channels); expected "
            "(channels, samples): pass array.T"
        )
    if array.size == 0:
        raise InputError(f"{name}: {_EMPTY}")
    frames = np.atleast_2d(array)
    for start in range(0, frames.shape[1], block):
        part = frames[:, start : start + block].T
        if np.issubdtype(part.dtype, np.integer):
            limits = np.iinfo(part.dtype)
            middle = 0 if limits.min < 0 else (limits.max + 1) // 2  # unsigned audio is centred
            scale = -limits.min if limits.min < 0 else middle
            part = (part.astype(np.float64) - middle) / scale
        yield int(rate), part.astype(np.float32)


def _file(path: Path, block: int) -> Blocks:
    try:
        found = path.stat()
    except FileNotFoundError:
        raise InputError("does not exist; check the path") from None
    except OSError as error:  # a name too long, a folder that may not be read
        raise InputError(f"cannot be read: {error.strerror}; check the path") from error
    if stat.S_ISDIR(found.st_mode):
        raise InputError("is a folder; expected an audio file")
    if not stat.S_ISREG(found.st_mode):
        raise InputError("is no regular file; to read a pipe, connect it to stdin and give '-'")
    if found.st_size == 0:
        raise InputError("is empty (0 bytes); expected an audio file")
    yield from _decoded(path, block)


def _decoded(content: Path | bytes, block: int) -> Blocks:
    """Decodes a file or its bytes."""
    soundfile = import_or_explain("soundfile", "reading audio files")
    try:
        file = soundfile.SoundFile(_openable(content))
    except (soundfile.LibsndfileError, TypeError, ValueError, RuntimeError) as error:
        yield from _other_readers(content, error)
        return
    with file:
        # libsndfile's guess for any .au file without a header
        if (file.format, file.subtype) == ("RAW", "ULAW"):
            raise _unreadable("it has no header", "check its format")
        yield from _soundfile(content, file, block)


def _openable(content: Path | bytes) -> str | io.BytesIO:
    return io.BytesIO(content) if isinstance(content, bytes) else str(content)


def _soundfile(content: Path | bytes, file: Any, block: int) -> Blocks:
    import soundfile

    claimed = _CLAIM.search(file.extra_info)
    seen, size = 0, max(1, block // file.channels)
    try:
        while len(frames := file.read(size, dtype="float32", always_2d=True)):
            seen += len(frames)
            yield file.samplerate, frames
    except (soundfile.LibsndfileError, RuntimeError) as error:
        raise _truncated(f"cannot be decoded after {seen} samples: {_reason(error)}") from error
    # a writer that could not seek back leaves 0 or the largest sizes, which claim nothing
    if claimed and int(claimed[2]) < int(claimed[1]) < 0x7FFFF000:
        raise _truncated(f"has {claimed[2]} of {claimed[1]} bytes of samples")
    if file.frames - seen > file.samplerate // 10 and file.frames < 1 << 62:
        raise _truncated(f"has {seen} of {file.frames} samples")
    if file.format == "OGG" and not _ogg_is_complete(content):
        raise _truncated(f"lacks the last page of its Ogg stream, after {seen} samples")
    if not seen:
        raise InputError(_EMPTY)


def _ogg_is_complete(content: Path | bytes) -> bool:
    """Whether the last page of an Ogg file is complete and marked as the end of its stream."""
    if isinstance(content, bytes):
        tail = content[-(1 << 17) :]
    else:
        with content.open("rb") as file:
            file.seek(max(0, content.stat().st_size - (1 << 17)))
            tail = file.read()
    page = tail.rfind(b"OggS")
    if page < 0 or len(tail) < page + 27:
        return False
    lengths = tail[page + 27 : page + 27 + tail[page + 26]]
    whole = len(tail) >= page + 27 + tail[page + 26] + sum(lengths)
    return whole and bool(tail[page + 5] & 4)


def _other_readers(content: Path | bytes, error: Exception) -> Blocks:
    """Reads formats that soundfile does not open: by PyAV if it is installed, else by librosa."""
    av: Any = None
    with contextlib.suppress(ImportError):
        av = importlib.import_module("av")
    if av is not None:
        try:
            # bytes may be a list of files or a session description, and may open nothing
            options = {"protocol_whitelist": ""} if isinstance(content, bytes) else {}
            container = av.open(_openable(content), options=options)
        except (av.error.FFmpegError, ValueError, OSError) as reason:
            raise _unreadable(
                f"{_reason(error)}; PyAV: {_reason(reason)}", "convert it"
            ) from reason
        with container:
            yield from _container(container, av)
        return
    import librosa

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            samples, rate = librosa.load(_openable(content), sr=None, mono=False)
        except Exception as reason:  # audioread's readers raise whatever they like
            hint = "read containers with: pip install 'mmdecode[media]'; or convert the file"
            raise _unreadable(_reason(error), hint) from reason
    if samples.size == 0:
        raise InputError(_EMPTY)
    yield int(rate), np.atleast_2d(samples).T.astype(np.float32)


def _container(container: Any, av: Any) -> Blocks:
    if not container.streams.audio:
        raise InputError("is not audio: it holds no audio stream; expected a recording")
    stream = container.streams.audio[0]
    resampler = av.AudioResampler(format="fltp")
    seen, end_s = 0, 0.0
    try:
        # video packets are not decoded, but their times show where the file ends
        for packet in container.demux():
            if packet.pts is not None:
                end_s = max(end_s, float((packet.pts + (packet.duration or 0)) * packet.time_base))
            if packet.stream.index != stream.index:
                continue
            for frame in packet.decode():
                for part in resampler.resample(frame):
                    frames = np.ascontiguousarray(part.to_ndarray().T)
                    seen += len(frames)
                    yield part.sample_rate, frames
    except (av.error.FFmpegError, ValueError) as error:
        raise _truncated(f"cannot be decoded after {seen} samples: {_reason(error)}") from error
    if not seen:
        raise InputError(_EMPTY)
    if container.format.name == "caf" and stream.frames > seen:  # has no time of its end
        raise _truncated(f"has {seen} of {stream.frames} samples")
    claimed = (container.duration or 0) / av.time_base
    if container.format.name.startswith(_TIMED) and claimed - end_s > _TOLERANCE_S:
        raise _truncated(f"has {end_s:.1f} of {claimed:.1f} seconds")


def _truncated(what: str) -> Truncated:
    return Truncated(
        f"is truncated or damaged: it {what}; copy or download it again, convert what is left with "
        "ffmpeg, or transcribe what is left with --allow-truncated (allow_truncated=True)"
    )


def _unreadable(reason: str, hint: str) -> InputError:
    reason = " ".join(reason.split())
    return InputError(
        f"is not audio that an installed library can read ({reason}); expected wav, flac, ogg, mp3 "
        f"or a common container: {hint}"
    )


def _reason(error: Exception) -> str:
    """Returns an error's message without the path, which may be that of a temporary file."""
    return str(getattr(error, "error_string", None) or getattr(error, "strerror", None) or error)
