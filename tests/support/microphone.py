"""A stand-in for the package ``sounddevice``, whose microphones record what a test gives them."""

from types import SimpleNamespace

import numpy as np


class PortAudioError(Exception):
    pass


class InputStream:
    """A stream that a test drives: `record` calls the callback, as PortAudio's thread would."""

    def __init__(self, library, callback, samplerate, blocksize, device, channels, dtype):
        library.check_input_settings(device, channels, dtype, samplerate)
        if library.busy:
            raise PortAudioError("Device unavailable [PaErrorCode -9985]")
        self.callback, self.rate, self.blocksize = callback, samplerate, blocksize
        self.channels, self.dtype = channels, dtype
        self.active = self.closed = False

    def start(self):
        self.active = True

    def close(self):
        self.active, self.closed = False, True

    def record(self, samples, overflow=False):
        """Passes mono samples in blocks, each alike in all channels."""
        for start in range(0, len(samples), self.blocksize):
            block = samples[start : start + self.blocksize].astype(self.dtype)
            status = SimpleNamespace(input_overflow=overflow)
            data = np.repeat(block[:, None], self.channels, axis=1)
            self.callback(data, len(block), None, status)
            data.fill(9)  # PortAudio uses its memory again


class SoundDevice:
    """The module.

    Args:
        devices: For each device: name, channels, usual rate.
        takes: Function that says which channels and rate a device takes.
    """

    PortAudioError = PortAudioError

    def __init__(self, devices, default=0, takes=lambda channels, rate: True):
        self.default = SimpleNamespace(device=(default, -1))
        self.devices, self.takes, self.busy, self.streams = devices, takes, False, []

    def query_devices(self):
        keys = ("name", "max_input_channels", "default_samplerate")
        return [dict(zip(keys, one, strict=True)) for one in self.devices]

    def check_input_settings(self, device, channels, dtype, samplerate):
        assert dtype == "float32" and channels <= self.devices[device][1]
        if not self.takes(channels, samplerate):
            raise PortAudioError("Invalid sample rate [PaErrorCode -9997]")

    def InputStream(self, **how):
        self.streams.append(InputStream(self, **how))
        return self.streams[-1]
