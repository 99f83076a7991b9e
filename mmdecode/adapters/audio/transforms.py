"""Transform ``audio``: a branch of a guide reads a changed waveform of each recording.

The guide provides a function ``change(samples (T,), draw) -> samples (T,)``, which is applied to
the waveform of each row's window. The caller passes ``mm_inputs["audio"]``, a `Waveform` for each
row, as `mmdecode.asr.Transcriber` does; it computes the model's input features from samples.

``draw`` is a random generator that is seeded by the request, not by the batch, so a window is
changed in the same way in every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mmdecode.engine.adapter import BranchSpec
from mmdecode.engine.call import Call
from mmdecode.errors import IncompatibleError, OptionError

Change = Callable[[Tensor, torch.Generator], Tensor]
"""Function of a window's samples, float32 on the CPU, and a generator; returns as many samples."""


class Waveform(Protocol):
    """The waveform of one window; `mmdecode.asr.recognizers.whisper_features` implements it."""

    samples: Tensor
    """Samples ``(T,)`` of the window, and those beyond both ends that its features depend on."""
    certain: bool
    """Whether the model surely reads this window; otherwise encoder states are compared."""

    def features(self, samples: Tensor) -> Tensor:
        """Computes the features ``(mels, frames)`` of changed samples.

        Levels are normalised by the maximum of the unchanged recording. Normalised by their own
        maximum, silent samples would be lifted to the level of speech.
        """


def changed(
    call: Call, spec: BranchSpec, encode: Callable[[Tensor], Tensor], source: Tensor
) -> Tensor:
    """Encodes the changed waveforms of all rows, and returns the states, ``(B, S, H)``.

    Args:
        call: The generation call.
        spec: The branch, whose transform is ``audio``.
        encode: The encoder, a function of features ``(B, mels, frames)`` that returns states ``(B,
            S, H)``.
        source: Encoder states of the unchanged windows, ``(B, S, H)``.

    Raises:
        IncompatibleError: The waveforms were not given, or do not belong to the rows.
        OptionError: The transform has no function ``change``.
    """
    change: Change | None = spec.transform_options.get("change")
    if change is None:
        raise OptionError(
            f"transform 'audio' of branch {spec.name!r} needs 'change', a function, which a "
            "string cannot give; build the guide in Python with transform_options={'change': ...}"
        )
    given: Sequence[Waveform] | None = call.request.inputs.get("audio")
    asked = f"branch {spec.name!r} with transform 'audio'"
    hint = (
        "use mmdecode.asr.Transcriber, or, for recordings of one window, give mmdecode.generate "
        "mm_inputs={'audio': [window_waveform(samples, extractor), ...]}, by "
        "mmdecode.asr.recognizers.whisper_features.window_waveform"
    )
    if given is None:
        raise IncompatibleError.between(
            asked, "a call with features only", "the waveforms were not given", hint
        )
    rows = (
        [waveform for waveform in given for _ in range(call.batch // len(given))] if given else []
    )
    if len(rows) != call.batch:
        raise IncompatibleError.between(
            asked,
            f"{len(given)} waveforms for {call.batch} rows",
            "each row needs its own; plain generate drops rows when it decodes others again",
            hint,
        )
    if not all(waveform.certain for waveform in rows):
        again = encode(torch.stack([waveform.features(waveform.samples) for waveform in rows]))
        if not torch.allclose(again, source, rtol=1e-2, atol=1e-2 * float(source.abs().max())):
            raise IncompatibleError.between(
                asked,
                "the waveforms of this call",
                "the model has read other audio: plain generate cuts a recording into windows "
                "itself, each beginning where the model ended the last segment",
                hint,
            )
    return encode(
        torch.stack(
            [
                waveform.features(
                    change(waveform.samples, call.request.noise.generator(row, "audio"))
                )
                for row, waveform in enumerate(rows)
            ]
        )
    )
