"""Transcribers and decoders of streams: options and drafts that a stream needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mmdecode.asr.alignment.evidence import Evidence
from mmdecode.asr.options import LEAST_WINDOW_S, TranscribeOptions
from mmdecode.asr.streaming.policies import TIME, CommitPolicy, Stable
from mmdecode.asr.transcriber import Transcriber
from mmdecode.decoder import Decoder
from mmdecode.draft.first_of import FirstOf
from mmdecode.draft.none import NoDraft
from mmdecode.draft.source import Source
from mmdecode.engine.contracts import Drafter
from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.guide.stability import Stability


def refuse_no_transcriber(given: object) -> None:
    """Checks that a stream is given a transcriber.

    Raises:
        OptionError: It is something else, such as the name of a model.
    """
    if not hasattr(given, "recognizer"):
        kind = f"of type {type(given).__name__}"
        shown = repr(given) if isinstance(given, str | Path) else kind
        raise OptionError(
            f"transcriber is {shown}; expected a Transcriber: give "
            "Transcriber.from_pretrained(NAME)"
        )


def options_for(
    transcriber: Transcriber, policy: CommitPolicy, longest_s: float
) -> TranscribeOptions:
    """Returns a transcriber's options, changed so that a stream can use them.

    Args:
        transcriber: The transcriber.
        policy: Commit policy of the stream.
        longest_s: Most seconds of audio in the buffer.

    Raises:
        OptionError: The length is out of range, or the model has no evidence for the policy.
    """
    ours, options = transcriber.recognizer, transcriber.options
    timed = ours.capabilities.timestamps
    least = 1 / transcriber.sampling_rate if timed else 2 * LEAST_WINDOW_S
    if not least <= longest_s <= ours.window_s:
        lower = "more than 0" if timed else f"{least:g} s or more"
        raise OptionError(
            f"longest_s={longest_s}; expected {lower} and at most a window of the model, "
            f"{ours.window_s:g} s"
        )
    kind = policy.evidence
    if kind not in (None, TIME) and transcriber.corrector is not None:
        raise OptionError(
            f"policy {policy.name} cannot be combined with correct: its numbers are those of the "
            "recogniser's words, and correct changes them; use agreement"
        )
    try:
        if kind == TIME and not options.word_timestamps:
            options = replace(options, word_timestamps=True)
            ours.refuse(options)
        elif kind not in (None, TIME):
            Evidence(ours).check(kind)
    except OptionError as error:
        raise OptionError(
            f"policy {policy.name} needs what this model does not have: {error}; or choose another "
            "policy, such as agreement"
        ) from error
    if timed:
        return options
    return replace(options, window_s=min(options.window_s or longest_s, longest_s / 2))


def continuing(transcriber: Transcriber, policy: Stable) -> Transcriber:
    """Returns a transcriber that continues the last hypothesis of a stream.

    Raises:
        OptionError: The transcriber has a guide, or decodes in another way than greedily.
        IncompatibleError: The model cannot be guided.
    """
    decoder, options = transcriber.decoder, transcriber.options
    if decoder.guide is not None or options.beams > 1 or options.temperatures[0]:
        raise OptionError(
            "policy stable decodes greedily, without a guide; leave out guide, beams and "
            "temperature, or choose another policy, such as agreement"
        )
    try:
        return transcriber.with_options(
            replace(decoder, guide=Stability(policy.m)), **vars(options)
        )
    except IncompatibleError as error:
        raise IncompatibleError(
            f"policy stable is a guide, and {error}; or choose another policy, such as agreement"
        ) from error


def redrafting(transcriber: Transcriber) -> Decoder:
    """Returns a decoder that drafts from `Source.draft` before the transcriber's own drafter.

    It is the transcriber's decoder if the draft could change the text, or cannot be combined with
    the drafter.
    """
    decoder = transcriber.decoder
    able = transcriber.recognizer.capabilities.drafts and transcriber.options.beams == 1
    if not able or decoder.accept != "auto" or isinstance(decoder.draft, Source):
        return decoder
    copying: Drafter = Source(least=2)
    if not isinstance(decoder.draft, NoDraft):
        try:
            copying = FirstOf(copying, decoder.draft)
        except IncompatibleError:
            return decoder
    return replace(decoder, draft=copying)
