"""Transforms of a recording: what a branch may be given to hear instead of what was said.

A guide names the transform and says what to change; how a waveform becomes what the model takes is
known to whoever cut the window.

- ``audio``: ``change(samples (T,), draw) -> samples (T,)`` of each row's window. The caller hands
  over ``mm_inputs["audio"]``, a `Heard` for each row, as `mmdecode.asr.Transcriber` does.

``draw`` is a generator seeded by the request, never by the batch, so a window is changed alike in
every batch.
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
"""Samples of a window, float32 on the CPU, and where draws come from, to as many samples."""


class Heard(Protocol):
    """A window as a waveform; `mmdecode.asr.recognizers.whisper_features.Heard` is one."""

    samples: Tensor
    """``(T,)``, with what the features look at beyond both ends of the window."""
    certain: bool
    """Whether the row is known to be this window; else what the model has read is looked at."""

    def features(self, samples: Tensor) -> Tensor:
        """What the model is given of other samples, ``(mels, frames)``.

        Levels are counted from the loudest of the recording as it was: a transform that made its
        own would lift silence to the level of speech.
        """


def changed(
    call: Call, spec: BranchSpec, encode: Callable[[Tensor], Tensor], source: Tensor
) -> Tensor:
    """What the encoder makes of each row's window under a transform, ``(B, S, H)``.

    Args:
        call: The call.
        spec: The branch, of transform ``audio``.
        encode: The encoder, features ``(B, mels, frames)`` to states ``(B, S, H)``.
        source: What it made of the windows as they are, ``(B, S, H)``.

    Raises:
        IncompatibleError: The waveforms are not at hand, or are not those of the rows.
        OptionError: The transform lacks its function.
    """
    change: Change | None = spec.transform_options.get("change")
    if change is None:
        raise OptionError(
            f"transform 'audio' of branch {spec.name!r} needs 'change', a function that no string "
            "can name; build the part in Python with transform_options={'change': ...}"
        )
    given: Sequence[Heard] | None = call.request.inputs.get("audio")
    asked = f"branch {spec.name!r} with transform 'audio'"
    advice = (
        "use mmdecode.asr.Transcriber, or, for recordings of one window, give mmdecode.generate "
        "mm_inputs={'audio': [heard(samples, extractor), ...]}, heard from "
        "mmdecode.asr.recognizers.whisper_features"
    )
    if given is None:
        raise IncompatibleError.between(
            asked, "a call of features", "the waveforms are not at hand", advice
        )
    rows = [heard for heard in given for _ in range(call.batch // len(given))] if given else []
    if len(rows) != call.batch:
        raise IncompatibleError.between(
            asked,
            f"{len(given)} waveforms for {call.batch} rows",
            "each row needs its own; plain generate drops rows where it redoes others",
            advice,
        )
    if not all(heard.certain for heard in rows):
        again = encode(torch.stack([heard.features(heard.samples) for heard in rows]))
        if not torch.allclose(again, source, rtol=1e-2, atol=1e-2 * float(source.abs().max())):
            raise IncompatibleError.between(
                asked,
                "the waveforms of this call",
                "the model has read something else: plain generate goes through a recording by "
                "itself, and on where the model says that a segment ended",
                advice,
            )
    return encode(
        torch.stack(
            [
                heard.features(change(heard.samples, call.request.noise.generator(row, "audio")))
                for row, heard in enumerate(rows)
            ]
        )
    )
