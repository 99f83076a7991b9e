"""Microphones, by the package ``sounddevice`` (extra ``mic``) and the library PortAudio.

PortAudio calls a function in its own thread for each block of samples. The function only puts the
block into a queue, which holds ten minutes by default. If the queue is full, since the machine is
much slower than the audio, blocks are lost: the user is told, and silence takes their place, so
that the times of later words stay right.
"""

from __future__ import annotations

import importlib
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmdecode.asr.audio.inputs import Arrival, AudioInput
from mmdecode.asr.audio.reading import import_or_explain
from mmdecode.errors import InputError, MissingExtraError

MICROPHONE = "mic"
"""Name of a microphone in results."""
_BLOCK_S = 0.1
_PORT_AUDIO = (
    "recording needs the library PortAudio, which is missing; install it, for example with: "
    "apt-get install libportaudio2"
)


@dataclass(frozen=True)
class InputDevice:
    """A device that can record.

    Attributes:
        index: Its number, for ``--device-index``.
        name: Its name.
        channels: Most channels that it records.
        rate: Its usual sampling rate in Hz.
        is_default: Whether it is the system's default.
    """

    index: int
    name: str
    channels: int
    rate: int
    is_default: bool


def input_devices() -> list[InputDevice]:
    """Returns the devices that can record.

    Raises:
        MissingExtraError: The package ``sounddevice`` is not installed.
        InputError: PortAudio is missing, or cannot list the devices.
    """
    library = _library()
    try:
        listed, default = list(library.query_devices()), library.default.device[0]
    except library.PortAudioError as error:
        raise InputError(f"audio devices cannot be listed: {_why(error)}") from error
    return [
        InputDevice(
            index=index,
            name=str(device["name"]),
            channels=int(device["max_input_channels"]),
            rate=round(device["default_samplerate"]),
            is_default=index == default,
        )
        for index, device in enumerate(listed)
        if device["max_input_channels"] > 0
    ]


def find_device(index: int | None = None) -> InputDevice:
    """Returns a device that can record.

    Args:
        index: Its number; ``None``: the system's default, else the first one.

    Raises:
        MissingExtraError: The package ``sounddevice`` is not installed.
        InputError: PortAudio is missing, or there is no such device.
    """
    found = input_devices()
    if not found:
        raise InputError("no microphone was found on this machine; connect one, or give a file")
    if index is None:
        return next((one for one in found if one.is_default), found[0])
    for one in found:
        if one.index == index:
            return one
    known = ", ".join(f"{one.index} ({one.name})" for one in found)
    raise InputError(f"no input device has the index {index}; there are {known}")


class Microphone(AudioInput):
    """A microphone, as samples at the model's rate.

    A device that does not record at that rate is resampled, one that does not record one channel
    is averaged.

    Args:
        rate: Sampling rate of the samples in Hz.
        device: The device, see `find_device`.
        most_s: Most seconds of audio that wait to be taken.
        clock: Function that returns the time in seconds.
    """

    def __init__(
        self,
        rate: int,
        device: InputDevice,
        most_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(MICROPHONE)
        self._library, self._device = _library(), device
        self._rate, self._clock = rate, clock
        self.device_rate, self.channels = self._settings()
        self._queue: queue.Queue[tuple[int, np.ndarray, float]] = queue.Queue(
            max(1, round(most_s / _BLOCK_S))
        )
        self._gap = 0  # samples lost since the last one in the queue
        self._lost = self._noted = 0
        self._overflows = 0
        self._closed = False
        self._resampler: Any = None
        if self.device_rate != rate:
            soxr = import_or_explain("soxr", "resampling audio")
            self._resampler = soxr.ResampleStream(
                self.device_rate, rate, 1, dtype="float32", quality="HQ"
            )
        self._stream: Any = None

    @property
    def is_live(self) -> bool:
        """Always true."""
        return True

    def start(self) -> None:
        """Opens the device.

        Raises:
            InputError: It cannot be opened.
        """
        try:
            self._stream = self._library.InputStream(
                samplerate=self.device_rate,
                blocksize=round(_BLOCK_S * self.device_rate),
                device=self._device.index,
                channels=self.channels,
                dtype="float32",
                callback=self._receive,
            )
            self._stream.start()
        except self._library.PortAudioError as error:
            raise InputError(
                f"{self._shown} cannot be opened: {_why(error)}; close other programs that use it, "
                "or choose another with --device-index"
            ) from error

    @property
    def _shown(self) -> str:
        return f"microphone {self._device.index} ({self._device.name})"

    def _settings(self) -> tuple[int, int]:
        """Returns the first sampling rate and number of channels that the device takes."""
        several, why = min(2, self._device.channels), ""
        for rate in (self._rate, self._device.rate):
            for channels in (1, several):
                try:
                    self._library.check_input_settings(
                        device=self._device.index,
                        channels=channels,
                        dtype="float32",
                        samplerate=rate,
                    )
                    return rate, channels
                except self._library.PortAudioError as error:
                    why = _why(error)
        raise InputError(
            f"{self._shown} records neither {self._rate} nor {self._device.rate} Hz: {why}; choose "
            "another with --device-index"
        )

    def _receive(self, data: np.ndarray, frames: int, when: Any, status: Any) -> None:
        """Takes a block from PortAudio; runs in its thread."""
        self._overflows += bool(getattr(status, "input_overflow", False))
        block = data[:, 0].copy() if data.shape[1] == 1 else data.mean(1, dtype=np.float32)
        try:
            self._queue.put_nowait((self._gap, block, self._clock()))
            self._gap = 0
        except queue.Full:
            self._gap += frames
            self._lost += frames

    def take(self) -> Arrival | None:
        """Returns the next block that was recorded.

        Raises:
            InputError: The device stopped.
        """
        self._tell()
        try:
            gap, samples, arrived_s = self._queue.get_nowait()
        except queue.Empty:
            if not self._closed:
                if not self._stream.active:
                    raise InputError(
                        f"{self._shown} stopped recording; was it disconnected?"
                    ) from None
                return None
            self.ended = True
            return Arrival(self._at_rate(samples=np.zeros(0, np.float32), last=True))
        samples = np.concatenate([np.zeros(gap, np.float32), samples]) if gap else samples
        return Arrival(self._at_rate(samples), arrived_s)

    def _at_rate(self, samples: np.ndarray, last: bool = False) -> np.ndarray:
        if self._resampler is None:
            return samples
        found: np.ndarray = self._resampler.resample_chunk(samples, last=last)
        return found

    def _tell(self) -> None:
        """Adds a note where audio was lost for the first time."""
        self.lost_s = self._lost / self.device_rate
        if self._lost and not self._noted & 1:
            self._noted |= 1
            self.notes.append(
                f"audio of {self._shown} is lost, since the machine is much slower than it: more "
                f"than {self._queue.maxsize * _BLOCK_S:g} s wait; silence takes its place"
            )
        if self._overflows and not self._noted & 2:
            self._noted |= 2
            self.notes.append(
                f"{self._shown} lost some samples, since the machine was too busy to take them"
            )

    def close(self) -> None:
        """Stops recording; what was recorded is still returned."""
        self._closed = True
        if self._stream is not None:
            self._stream.close()


def _library() -> Any:
    """Imports ``sounddevice``."""
    try:
        with MissingExtraError.instead("recording needs sounddevice", extra="mic"):
            return importlib.import_module("sounddevice")
    except OSError as error:  # it is raised on import
        raise InputError(_PORT_AUDIO) from error


def _why(error: Exception) -> str:
    return " ".join(str(error).split())
