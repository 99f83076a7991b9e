"""Transforms of a recording: audio that a branch reads instead of the caller's.

A guide names the transform and its change. The code that cut the window knows how a waveform
becomes model inputs.

- ``audio``: ``change(samples (T,), draw) -> samples (T,)`` of each row's window. The caller
  passes ``mm_inputs["audio"]``, a `Waveform` for each row, as `mmdecode.asr.Transcriber` does.

``draw`` is a generator seeded by the request, never by the batch, so a window is changed in the
same way in every batch.
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
"""Maps samples of a window, float32 on the CPU, and a generator to as many samples."""


class Waveform(Protocol):
    """The waveform of one window; `mmdecode.asr.recognizers.whisper_features` implements it."""

    samples: Tensor
    """Samples ``(T,)``, including those beyond both ends that the features depend on."""
    certain: bool
    """Whether the row is known to be this window; else the encoder's states are compared."""

    def features(self, samples: Tensor) -> Tensor:
        """Features of other samples, ``(mels, frames)``.

        Levels are relative to the loudest of the unchanged recording: relative to their own, a
        transform would lift silence to the level of speech.
        """


def changed(
    call: Call, spec: BranchSpec, encode: Callable[[Tensor], Tensor], source: Tensor
) -> Tensor:
    """States of each row's window after a transform of its waveform, ``(B, S, H)``.

    Args:
        call: The generation call.
        spec: The branch, whose transform is ``audio``.
        encode: The encoder: features ``(B, mels, frames)`` to states ``(B, S, H)``.
        source: States of the unchanged windows, ``(B, S, H)``.

    Raises:
        IncompatibleError: The waveforms were not given, or are not those of the rows.
        OptionError: The transform has no function ``change``.
    """
    change: Change | None = spec.transform_options.get("change")
    if change is None:
        raise OptionError(
            f"transform 'audio' of branch {spec.name!r} needs 'change', a function that no string "
            "can name; build the part in Python with transform_options={'change': ...}"
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
            asked, "a call of features", "the waveforms were not given", hint
        )
    rows = (
        [waveform for waveform in given for _ in range(call.batch // len(given))] if given else []
    )
    if len(rows) != call.batch:
        raise IncompatibleError.between(
            asked,
            f"{len(given)} waveforms for {call.batch} rows",
            "each row needs its own; plain generate drops rows where it redoes others",
            hint,
        )
    if not all(waveform.certain for waveform in rows):
        again = encode(torch.stack([waveform.features(waveform.samples) for waveform in rows]))
        if not torch.allclose(again, source, rtol=1e-2, atol=1e-2 * float(source.abs().max())):
            raise IncompatibleError.between(
                asked,
                "the waveforms of this call",
                "the model has read something else: plain generate goes through a recording by "
                "itself, and on where the model says that a segment ended",
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
