"""Voice activity without a detector: where a CTC head finds only blanks, nobody speaks.

Source: Inaguma and Kawahara 2021, arXiv:2107.07509, who end a block after a run of blanks; here the
pause is removed, too, but for some padding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from mmdecode import registry
from mmdecode.asr.audio.reading import Source, blocks
from mmdecode.asr.audio.vad import Silero, Stretch, VoiceActivity
from mmdecode.checkpoints import ZOO
from mmdecode.errors import IncompatibleError
from mmdecode.models.ctc_head import BLANK, CTCHead
from mmdecode.models.placed import Placed

if TYPE_CHECKING:
    from mmdecode.asr.options import TranscribeOptions
    from mmdecode.asr.recognizers.base import Recognizer

LONGEST_S = 30.0
"""Longest window that is encoded at once, in seconds."""


class Blanks(VoiceActivity):
    """Speech where a CTC head finds labels; everything between labels far apart is silence.

    The recording is encoded in windows that overlap, so that every frame has audio on either side.
    A frame of speech is one whose blank has a probability below ``1 - vad_threshold``. The head has
    to find words where they are spoken; one that was trained without their times is often late, and
    needs more ``vad_pad_s``.

    Args:
        options: Settings.
        recognizer: Recogniser whose encoder the head reads.
        head: The head.
    """

    def __init__(self, options: TranscribeOptions, recognizer: Recognizer, head: CTCHead) -> None:
        super().__init__(options)
        self._recognizer, self._head = recognizer, head.eval()
        self._placed = Placed(self._head)
        self._window = round(min(recognizer.window_s, LONGEST_S) * recognizer.rate)

    def stretches(self, probabilities: Iterable[float], duration_s: float) -> list[Stretch]:
        """Returns the stretches of speech; times may lie in the padding, since labels have none."""
        found = super().stretches(probabilities, duration_s)
        return [replace(one, start=one.begin, end=one.stop) for one in found]

    @cached_property
    def frame_s(self) -> float:  # type: ignore[override]
        """Seconds per frame, found by encoding a window of silence once."""
        silence = np.zeros(self._window, np.float32)
        return self._window / self._recognizer.rate / len(self._chances(silence))

    def listen(self, source: Source) -> tuple[list[float], float]:
        """Returns the speech probability of each frame, and the length of the audio in seconds."""
        rate, found = self._recognizer.rate, list[float]()
        margin = round(self._window / 8 / rate / self.frame_s)  # frames on either side
        step = round(margin * self.frame_s * rate)
        held, samples, first = np.zeros(0, np.float32), 0, True
        for part in itertools.chain(blocks(source, rate), [None]):
            if part is not None:
                samples += len(part)
                held = np.concatenate([held, part])
            while len(held) > self._window or (part is None and len(held)):
                last = len(held) <= self._window
                chances = self._chances(held[: self._window])
                begin = 0 if first else margin
                found += chances[begin:] if last else chances[begin : len(chances) - margin]
                held = held[:0] if last else held[self._window - 2 * step :]
                first = False
        return found, samples / rate

    @torch.no_grad()
    def _chances(self, wave: np.ndarray) -> list[float]:
        """Returns the probability of a label for each frame of a waveform."""
        ours, seconds = self._recognizer, len(wave) / self._recognizer.rate
        encoded = ours.encode(ours.features([wave]), [seconds])
        if encoded.states is None:
            raise IncompatibleError(
                f"vad 'ctc' reads encoder states, which {ours.name} does not return; use vad=True"
            )
        head = self._placed.like(encoded.states)
        given = head.arguments(encoded.states, encoded.mask, ours.model.get_input_embeddings())
        blank = head.log_probs(*given)[0, :, BLANK].exp()
        if ours.capabilities.fixed_windows:  # padded to the whole window
            blank = blank[: max(1, round(len(blank) * seconds / ours.window_s))]
        return (1 - blank).tolist()


def detector_for(options: TranscribeOptions, recognizer: Recognizer) -> VoiceActivity | None:
    """Returns the detector that the options ask for; ``None``: none.

    Args:
        options: The options.
        recognizer: Recogniser of the recordings.

    Raises:
        MissingExtraError: silero-vad is asked for and not installed.
        OptionError: No CTC head ships with the model.
        IncompatibleError: The head was trained for another model.
    """
    if not options.vad_by_head:
        return Silero(options) if options.vad else None
    named = str(options.vad).partition("head=")[2] or None
    folder = Path(recognizer.model.name_or_path)
    own = None if folder.is_dir() else f"{folder}"  # a folder may be one of the cache
    name = f"zoo:{folder.name}" if folder.parent == ZOO else own
    head = CTCHead.of_option(named, name, "vad 'ctc'")
    head.refuse_misfit(registry.adapter_for(recognizer.model), "vad 'ctc'")
    return Blanks(options, recognizer, head)
