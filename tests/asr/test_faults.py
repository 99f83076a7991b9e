"""Whatever one recording raises, wherever, it fails alone, and the others have their texts."""

from dataclasses import replace

import pytest

from mmdecode.asr import TranscribeOptions, Transcriber
from mmdecode.asr.audio.reading import source_of
from mmdecode.asr.correction.corrector import Correction
from mmdecode.asr.correction.n_best_lists import NBestList
from mmdecode.asr.correction.transcripts import Corrected, ListCorrection
from mmdecode.asr.output.manifest import Entry
from mmdecode.asr.results import DecidedWord
from mmdecode.decoder import Decoder
from mmdecode.errors import OptionError
from mmdecode.evaluation.speech import runs
from tests.support.faults import ERRORS, FEW, Faulty, failure_of

SECONDS = (1.6, 0.8, 1.2, 0.6)
BAD = 2
OPTIONS = TranscribeOptions(batch_size=3, timestamps=False)
DECODING = ("begin", "propose", "observe")
STAGES = ("open", "read", "score", "correct", *DECODING)


def sources(kit, error=None, stage="open"):
    """Recordings, of which one may raise when it is opened, or after its first block."""

    def source(clip):
        whole = source_of(kit.noise(SECONDS[clip], seed=clip), kit.rate)

        def read():
            for block in whole.read():
                if stage == "open" and clip == BAD and error is not None:
                    raise error()
                yield block
                if clip == BAD and error is not None:
                    raise error()

        return replace(whole, name=f"clip {clip}", read=read)

    return [source(clip) for clip in range(len(SECONDS))]


class Loud:
    """Whether a window of the bad recording is among those that are decoded: by its features."""

    def __init__(self, marks):
        self.marks = marks

    def __call__(self, call):
        return any(marked(one) in self.marks for one in call.request.inputs["input_features"])


def marked(features):
    return round(float(features.double().sum()), 3)


class Writing:
    """A tokenizer that raises where the bad recording's text is made; else the processor's own."""

    def __init__(self, tokenizer, tokens, error):
        self.__dict__.update(_own=tokenizer, _tokens=tokens, _error=error)

    def __getattr__(self, name):
        return getattr(self._own, name)

    def __len__(self):
        return len(self._own)

    def decode(self, tokens, **options):
        if list(tokens) == self._tokens:
            raise self._error()
        return self._own.decode(tokens, **options)


class Wrong(ListCorrection):
    """A correction that raises for the bad recording, and leaves the others as they are."""

    def __init__(self, error):
        self._error = error

    @property
    def count(self):
        return 2

    @property
    def batch_size(self):
        return 3

    def __call__(self, lists: list[NBestList], audio=None):
        if any(one.id.startswith(f"clip {BAD}#") for one in lists):
            raise self._error()
        found = [
            Correction(id=one.id, index=index, text=one.best, best=one.best)
            for index, one in enumerate(lists)
        ]
        words = [DecidedWord(text=word, by="both") for word in "no words are left".split()]
        return [Corrected(correction=one, words=words) for one in found]


def marks_of(model, processor, kit):
    """Of the features of the bad recording's first window."""
    loop = Transcriber(model, processor, options=OPTIONS)._loop
    return {marked(mel) for _, mel in loop._read(loop._open(0, sources(kit)[BAD]), 1)}


@pytest.fixture(scope="module")
def expected(model, processor, kit):
    found = Transcriber(model, processor, options=OPTIONS)(sources(kit))
    return {one.source: one.tokens for one in found}


def faulty(error, stage, model, processor, kit, tokens, monkeypatch):
    """A transcriber that raises where it decodes or writes the recording of these tokens."""
    decoder = None
    if stage in DECODING:
        decoder = Decoder(Faulty(Loud(marks_of(model, processor, kit)), error, stage))
    transcriber = Transcriber(model, processor, decoder, OPTIONS)
    if stage == "score":
        text_tokens = list(transcriber.recognizer.text_tokens(tokens))
        writing = Writing(processor.tokenizer, text_tokens, error)
        monkeypatch.setattr(transcriber.recognizer, "tokenizer", writing)
    return transcriber


def check(name, stage, model, processor, kit, expected, monkeypatch):
    error, bad = ERRORS[name], f"clip {BAD}"
    given = sources(kit, error if stage in ("open", "read") else None, stage)
    transcriber = faulty(error, stage, model, processor, kit, expected[bad], monkeypatch)
    if stage == "correct":
        transcriber.corrector = transcriber._correcting(Wrong(error))
    found = {one.source: one for one in transcriber.stream(given)}
    failed = found.pop(bad)
    text, kind = failure_of(name)
    if name == "StopIteration" and stage in ("open", "read"):
        kind = "RuntimeError"  # Python makes that of it where a generator raises it
    assert text in failed.error and failed.kind == kind, (failed, stage)
    assert {n: one.tokens for n, one in found.items()} == {
        n: tokens for n, tokens in expected.items() if n != bad
    }


@pytest.mark.parametrize("stage", STAGES)
def test_a_recording_that_raises_fails_alone(stage, model, processor, kit, expected, monkeypatch):
    name = FEW[STAGES.index(stage) % len(FEW)]
    check(name, stage, model, processor, kit, expected, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_every_error_at_every_stage_fails_its_recording_alone(model, processor, kit, expected):
    count = 0
    for stage in STAGES:
        for name in ERRORS:
            with pytest.MonkeyPatch.context() as patch:
                check(name, stage, model, processor, kit, expected, patch)
            count += 1
    print(f"{count} errors of recordings: {len(ERRORS)} kinds at {len(STAGES)} stages")


def test_a_window_that_fails_is_not_counted(model, processor, kit):
    alone = Transcriber(model, processor, options=OPTIONS)
    alone([one for clip, one in enumerate(sources(kit)) if clip != BAD])
    decoder = Decoder(Faulty(Loud(marks_of(model, processor, kit)), ERRORS["ValueError"]))
    transcriber = Transcriber(model, processor, decoder, OPTIONS)
    transcriber(sources(kit))
    assert transcriber.stats.tokens == alone.stats.tokens


def test_what_fits_no_recording_is_the_jobs_error(model, processor, kit):
    def error():
        return OptionError("value=1; expected 2")

    transcriber = Transcriber(model, processor, Decoder(Faulty(lambda call: True, error)), OPTIONS)
    with pytest.raises(OptionError, match="value=1"):
        list(transcriber.stream(sources(kit)))


# Evaluated


def evaluated(name, stage, model, processor, kit, expected, monkeypatch):
    error, bad = ERRORS[name], f"clip {BAD}"
    given = sources(kit, error if stage in ("open", "read") else None, stage)
    transcriber = faulty(error, stage, model, processor, kit, expected[bad], monkeypatch)
    known = {one.name: one for one in given}
    monkeypatch.setattr(runs, "opened", lambda entry, language: known[entry.id])
    entries = [Entry(id=one.name, audio="x.wav", text="what was said") for one in given]
    found = {one.id: one for one in runs.record({"plain": transcriber}, entries, warmup=0)}
    assert failure_of(name)[0] in found.pop(bad).error
    assert {n: tuple(one.token_ids) for n, one in found.items()} == {
        n: tuple(tokens) for n, tokens in expected.items() if n != bad
    }


@pytest.mark.parametrize(
    ("stage", "name"), [("read", "RuntimeError"), ("begin", "OptionError"), ("score", "allocator")]
)
def test_a_recording_that_raises_is_scored_as_missed(
    stage, name, model, processor, kit, expected, monkeypatch
):
    evaluated(name, stage, model, processor, kit, expected, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_every_error_at_every_stage_of_an_evaluation_is_its_recordings(
    model, processor, kit, expected
):
    stages = ("open", "read", "score", *DECODING)
    for stage in stages:
        for name in ERRORS:
            with pytest.MonkeyPatch.context() as patch:
                evaluated(name, stage, model, processor, kit, expected, patch)
    count = len(ERRORS) * len(stages)
    print(f"{count} errors of evaluated recordings: {len(ERRORS)} kinds at {len(stages)} stages")
