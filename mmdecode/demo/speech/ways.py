"""Transcribers of the speech demo, without and with a drafter, whose decoders are timed."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mmdecode import registry
from mmdecode.asr.transcriber import Transcriber, load
from mmdecode.decoder import Decoder
from mmdecode.demo.speech.clips_page import TIMES
from mmdecode.draft.medusa import Medusa
from mmdecode.runs.conditions import now
from mmdecode.runs.console import only_our_output

if TYPE_CHECKING:
    from mmdecode.asr.results import Transcript
    from mmdecode.engine.trace import Round


@dataclass
class Way:
    """Transcriber whose decoder is timed.

    Attributes:
        transcriber: The transcriber.
        seconds: Seconds spent in the decoder during the last transcription.
        ids: Token ids that the decoder returned during the last transcription, by call.
    """

    transcriber: Transcriber
    seconds: float = 0.0
    ids: list[list[list[int]]] = field(default_factory=list)

    def __call__(
        self, audio: Any, trace: list[list[Round]] | None = None
    ) -> tuple[Transcript, float, float]:
        """Transcribes a recording.

        Args:
            audio: Recording in any form that the transcriber accepts.
            trace: List to which the rounds of each window are appended; ``None``: not recorded.

        Returns:
            Transcript, seconds in the decoder, seconds in total.
        """
        self.seconds, self.ids = 0.0, []
        self.transcriber.decoder.stats.reset()
        began = time.perf_counter()
        transcript = self.transcriber(audio, trace=trace)
        return transcript, self.seconds, time.perf_counter() - began


@dataclass
class Part:
    """Model with a drafter, for one part of the demo.

    Attributes:
        model, draft: Names of model and drafter.
        ways: Transcribers without and with the drafter.
    """

    model: str
    draft: str
    ways: tuple[Way, Way]

    @classmethod
    def load(cls, model: str, draft: str, *placing: Any) -> Part:
        """Loads a model and a drafter."""
        only_our_output()
        network, processor = load(model, *placing)
        if draft.partition(":")[0] in registry.names("draft"):
            known = registry.context_of(network, processor, model)
            drafter = registry.create("draft", draft, **known)
        else:
            drafter = Medusa.from_pretrained(draft)

        class Watched(Decoder):
            """Decoder that records the time and the token ids of each call."""

            way: Way

            # generate inspects the signature
            @functools.wraps(Decoder.__call__)
            def __call__(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
                began = now(network.device)
                ids = super().__call__(*args, **kwargs)
                self.way.seconds += now(network.device) - began
                self.way.ids.append(ids.tolist())
                return ids

        def watched(decoder: Watched) -> Way:
            decoder.way = Way(Transcriber(network, processor, decoder))
            return decoder.way

        return cls(model, draft, (watched(Watched()), watched(Watched(draft=drafter))))

    def compare(self, clip: Any, repeats: int = 0) -> tuple[dict[str, Any], Transcript]:
        """Transcribes a recording without and with the drafter.

        Args:
            clip: The recording.
            repeats: Number of timed runs, in alternation, of which the median counts; 0: the first
                runs are timed.

        Returns:
            Fields of `mmdecode.demo.speech.clips_page.Decoded`, and the transcript.
        """
        plain, drafted = self.ways
        windows: list[list[Round]] = []
        _, *first = plain(clip.path)
        plain_ids, plain_passes = plain.ids, plain.transcriber.decoder.stats.passes
        transcript, *second = drafted(clip.path, windows)
        stats, identical = drafted.transcriber.decoder.stats.as_dict(), drafted.ids == plain_ids
        times: list[list[Sequence[float]]] = [[], []]  # way, repeat, (decoding, everything)
        for turn in range(repeats):
            for way in (0, 1) if turn % 2 == 0 else (1, 0):
                times[way].append(self.ways[way](clip.path)[1:])
                identical &= self.ways[way].ids == plain_ids
        medians = np.median(times if repeats else [[first], [second]], axis=1)
        return {
            "name": clip.name,
            "audio": clip.path,
            "reference": clip.text,
            "hypothesis": transcript.text,
            "windows": windows,
            "tokens": stats["tokens"],
            "plain_passes": plain_passes,
            "passes": stats["passes"],
            "tokens_per_pass": stats["acceptance_length"],
            **dict(zip(TIMES, medians.T.ravel().tolist(), strict=True)),
            "identical": identical,
        }, transcript
