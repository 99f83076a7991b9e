"""The promises of a stream over every policy, recogniser and pool.

Words depend on the samples and the options alone: not on blocks, drafts or neighbours in a pool.
What is committed stays, the last words are never lost, and the buffer is bounded.
"""

import itertools
import random
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest

from mmdecode.asr.streaming import Stream, StreamPool
from mmdecode.asr.streaming import stream as streams
from mmdecode.asr.transcriber import Transcriber
from mmdecode.decoder import Decoder
from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.zoo.speech import speech_test
from tests.asr.test_policies import SPECS as COMMON
from tests.asr.test_stream_pool import advance_swapped, pools
from tests.asr.test_streaming import text_of, updates_of
from tests.support import tiny_recognizers
from tests.support.causal import causal_whisper

STEP_S = 0.5
SPECS = [*COMMON, "stable:m=2"]
TINY = ("moonshine", "moonshine_streaming", "speech_to_text")
MODELS = [
    "zoo:whisper-synth",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (*TINY, "causal", "moonshine:tiny-en")
    ),
]
UNTIMED = {*TINY, "moonshine:tiny-en"}
REFUSED = {*((name, "delay:s=0.5") for name in UNTIMED), ("speech_to_text", "alignatt:s=0.5")}
REFUSED |= {("speech_to_text", "stable:m=2")}  # a guide needs an adapter
"""Policies whose evidence a family has not: no times of words, no named alignment heads."""


@cache
def transcriber_for(model, drafts):
    """A transcriber; tiny models answer at random, and change their mind with every step."""
    if model in TINY:
        parts = getattr(tiny_recognizers, model)()
        if model != "speech_to_text":
            parts[0].generation_config.alignment_heads = [[0, 0]]
        draft = "lookup" if drafts and model != "speech_to_text" else None  # it has no adapter
        return Transcriber(*parts, Decoder(draft))
    if model == "causal":
        return Transcriber(*causal_whisper(8), Decoder("lookup" if drafts else None))
    if model.startswith("moonshine"):
        pytest.importorskip("moonshine_voice")
    draft = {"zoo:whisper-synth": "medusa"}.get(model, "lookup")
    return Transcriber.from_pretrained(model, draft=draft if drafts else None, device="cpu")


def wave_of(number, seconds=3.3):
    """The beginning of a clip, the last step of which is not complete."""
    clips = speech_test()
    return clips[number % len(clips)].samples()[: round(seconds * 16_000)]


def compared(updates):
    """What streams are compared by."""
    return [(u.audio_s, u.committed, u.provisional) for u in updates]


def in_pool(transcriber, spec, wave, seed):
    """Updates of a stream whose neighbours come and go, with other audio and other policies."""
    draw, pool, found = random.Random(seed), StreamPool(transcriber, most_waiting_s=1e9), []
    others = {pool.open(policy="hold:n=2", step_s=STEP_S): wave_of(2, 2.0)}
    ours = pool.open(policy=spec, step_s=STEP_S)  # with a transcriber of its own, if it needs one
    fed = 0
    while not ours.ended:
        if len(others) < 3 and draw.random() < 0.3:
            others[pool.open(policy="agreement", step_s=0.7)] = wave_of(draw.randrange(9), 1.5)
        for other, samples in list(others.items()):
            other.feed(samples[: draw.choice([0, 3000, 9000])])
            if draw.random() < 0.2:
                other.finish()
                del others[other]
        if fed < len(wave):
            size = draw.choice([0, 900, 4000, 20_000])
            ours.feed(wave[fed : fed + size])
            fed += size
            if fed >= len(wave):
                ours.finish()
        found += [update for stream, update in pool.round() if stream is ours]
    return found


def kept(model, spec, number=0):
    """Compares a stream alone, undrafted and in whole, with all other ways to take it."""
    wave = wave_of(number)
    plain, drafting = transcriber_for(model, False), transcriber_for(model, True)
    alone = Stream(plain, spec, STEP_S, redraft=False)
    longest = alone._longest
    updates = [*alone.feed(wave), alone.finish()]
    assert compared(updates)[-1][2] == []
    words = [word for update in updates for word in update.words or ()]
    assert not words or "".join(word.text for word in words) == text_of(updates)
    draw = random.Random(number)
    sizes = iter(partial(draw.choice, [0, 1, 700, 5000, 12_000, 30_000]), None)
    assert compared(updates_of(Stream(drafting, spec, STEP_S), wave, sizes)) == compared(updates)
    assert compared(in_pool(drafting, spec, wave, number)) == compared(updates)
    assert len(alone._audio) <= longest


@pytest.mark.one_in(9)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("model", MODELS)
def test_words_depend_on_the_samples_alone(model, spec):
    if (model, spec) in REFUSED:
        named = f"policy {spec.partition(':')[0]} "
        with pytest.raises((OptionError, IncompatibleError), match=named):
            Stream(transcriber_for(model, False), spec, STEP_S)
        return
    kept(model, spec)


def by_blocks(self):
    return self._taken < len(self._waiting) or (self._finished and not self.ended)


def as_they_are(transcriber):
    """A decoder that takes whatever the last hypothesis proposes."""
    return replace(redrafting(transcriber), accept="relative_threshold:share=0")


redrafting = streams.redrafting
MUTANTS = {
    "steps at the ends of blocks": (Stream, "is_due", property(by_blocks)),
    "drafts that are not checked": (streams, "redrafting", as_they_are),
    "results of a neighbour": (pools, "_decoded", advance_swapped),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_stream_that_depends_on_anything_else_is_noticed(mutant, monkeypatch):
    monkeypatch.setattr(*MUTANTS[mutant])
    with pytest.raises(AssertionError):
        kept("zoo:whisper-synth", "agreement")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "spec"), sorted({*itertools.product(TINY, SPECS)} - REFUSED, key=str)
)
def test_the_buffer_of_a_model_that_never_says_the_same_twice_is_bounded(model, spec):
    noise = np.random.default_rng(0).standard_normal(16_000 * 60).astype(np.float32) / 10
    stream = Stream(transcriber_for(model, True), spec, 2.0)
    longest = 0
    for start in range(0, len(noise), 32_000):
        stream.feed(noise[start : start + 32_000])
        longest = max(longest, len(stream._audio))
    stream.finish()
    assert longest <= stream._longest


def test_a_continued_text_ends_with_a_word_and_waits_for_tokens_of_text():
    """Timestamps that close the text are neither kept nor counted."""
    transcriber = transcriber_for("zoo:whisper-synth", False)
    stream, wave = Stream(transcriber, "stable:m=2", STEP_S), wave_of(0, 6.0)
    is_text, offered, plain = transcriber.recognizer.is_text, [], stream._commits.offer
    stream._commits.offer = lambda words, evidence: (
        offered.append(evidence) or plain(words, evidence)
    )
    for start in range(0, len(wave), 8000):
        stream.feed(wave[start : start + 8000])
        assert not stream._draft or is_text(stream._draft[-1])
    assert max(map(len, offered)) > 5
    assert all(evidence[-1] == 0 for evidence in offered if evidence)
