"""Pools of streams: each stream has the text that it has alone, whatever the others do."""

import itertools
import random
import re
import threading
import time

import numpy as np
import pytest

from mmdecode.asr.results import Failure
from mmdecode.asr.streaming import CommitPolicy, Stream, StreamPool
from mmdecode.asr.streaming import pool as pools
from mmdecode.asr.streaming import stream as streams
from mmdecode.asr.transcriber import Transcriber
from mmdecode.errors import InputError, OptionError, OverloadError
from mmdecode.evaluation.speed.latency import StreamMeter
from mmdecode.zoo.speech import speech_test
from tests.asr.test_streaming import RATE, Hearer, Options, spoken, text_of, updates_of, words_up_to

KINDS = [
    {},
    {"policy": "agreement:n=3", "step_s": 0.5},
    {"policy": "hold:n=2"},
    {"policy": "wait:k=4", "step_s": 0.5},
]


class Several(Hearer):
    """Hears several recordings at once, in any order; counts the batches."""

    def __init__(self, **options):
        super().__init__(**options)
        self.batches, self.broken = [], set()

    def with_options(self, **options):
        return self

    def stream(self, requests, batch_size):
        self.batches.append(len(requests))
        for index, request in random.sample(list(enumerate(requests)), len(requests)):
            if int(request["audio"].max()) in self.broken:
                yield Failure(source="?", index=index, error="too much", kind="OutOfMemoryError")
            else:
                found = self(request)
                yield type(found)(**vars(found) | {"index": index})


class Speaker:
    """Says words at random moments, in blocks of any size, pauses, and leaves at the end."""

    def __init__(self, seed, most=50):
        draw = random.Random(seed)
        self.samples = spoken(draw.randint(1, most), draw.choice([3, 5, 100]), first=1 + 100 * seed)
        self.kind, self.at, self.draw = draw.choice(KINDS), 0, draw

    def alone(self):
        return known(text_of(updates_of(Stream(Hearer(), **self.kind), self.samples)))

    def say(self, stream):
        """Whether there is more to say."""
        block = self.samples[self.at : self.at + self.draw.choice([0, 0, 1, 7, 30])]
        self.at += len(block)
        stream.feed(block)
        if self.at == len(self.samples):
            stream.finish()
        return self.at < len(self.samples)


def known(text):
    """The text without the numbers of words that were made up."""
    return re.sub(r"x\d+", "x", text)


def simulated(seeds, pool):
    """Texts of streams that join and leave a pool at random moments."""
    draw = random.Random(len(seeds))
    waiting, speaking, texts = list(seeds), {}, {}
    while waiting or speaking or len(pool):
        if waiting and draw.random() < 0.5:
            speaker = Speaker(waiting.pop())
            stream = pool.open(**speaker.kind)
            speaking[stream], texts[stream] = speaker, ""
        for stream, speaker in list(speaking.items()):
            if draw.random() < 0.8 and not speaker.say(stream):
                del speaking[stream]
        for stream, update in pool.round():
            texts[stream] += update.text
    return sorted(map(known, texts.values()))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("batch_size", [64, 5])
def test_64_streams_have_the_texts_that_they_have_alone(batch_size):
    pool = StreamPool(Several(), batch_size=batch_size, most_waiting_s=1e9)
    expected = sorted(Speaker(seed).alone() for seed in range(64))
    assert simulated(range(64), pool) == expected
    assert max(pool.transcriber.batches) <= batch_size


def advance_swapped(batch):
    found = decoded(batch)
    results = list(found.values())
    return dict(zip(found, results[1:] + results[:1], strict=True))


decoded = pools._decoded


def test_a_result_for_a_neighbour_is_noticed(monkeypatch):
    monkeypatch.setattr(pools, "_decoded", advance_swapped)
    expected = sorted(Speaker(seed).alone() for seed in range(8))
    assert simulated(range(8), StreamPool(Several())) != expected


def test_two_steps_of_a_stream_are_never_joined():
    """However much of it waits: its text depends on the steps."""
    pool = StreamPool(Several(), most_waiting_s=1e9)
    samples, seen = spoken(30), []
    stream = pool.open(step_s=1.0)
    stream.feed(samples)
    stream.finish()
    while found := pool.round():
        seen += [update.audio_s for _, update in found]
    assert seen == [min(step, len(samples) / RATE) for step in range(1, len(seen) + 1)]


def test_a_stream_that_joins_is_in_the_next_round_and_one_that_pauses_holds_nobody_up():
    pool = StreamPool(Several())
    first, second = pool.open(), pool.open()
    first.feed(spoken(9))
    assert [one for one, _ in pool.round()] == [first]
    second.feed(spoken(9))
    assert {one for one, _ in pool.round()} == {first, second}
    second.leave()
    assert [one for one, _ in pool.round()] == [first] and len(pool) == 1


def test_all_streams_get_their_turn_where_a_batch_is_too_small_for_all():
    pool = StreamPool(Several(), batch_size=2, most_waiting_s=1e9)
    streams = [pool.open() for _ in range(5)]
    for number, stream in enumerate(streams):
        stream.feed(spoken(100 if number < 2 else 30))  # two that could fill every batch
    turns = [one for _ in range(5) for one, _ in pool.round()]
    assert all(turns.count(stream) == 2 for stream in streams)


def test_too_much_that_waits_is_refused_whole_and_can_be_given_again():
    pool = StreamPool(Several(), most_waiting_s=3.0)
    stream, samples = pool.open(name="hall"), spoken(20)
    text, at = "", 0
    while at < len(samples):
        try:
            stream.feed(samples[at : at + 20])
            at += 20
        except OverloadError as error:
            assert re.match(r"stream hall has [23].0 s of audio waiting, .* 3 s;", str(error))
            assert stream.waiting_s <= 3.0 and pool.delay_s == stream.waiting_s
            text += text_of([update for _, update in pool.round()])
    stream.finish()
    text += text_of([update for _, update in pool.drain()])
    assert text == text_of(updates_of(Stream(Hearer()), samples))


def test_a_failure_ends_its_stream_alone():
    pool = StreamPool(Several())
    streams = [pool.open(name=name) for name in "ab"]
    pool.transcriber.broken = {5}
    streams[0].feed(spoken(3))
    streams[1].feed(spoken(5))
    streams[0].finish()
    updates = list(pool.drain())
    assert text_of([update for one, update in updates if one is streams[0]]) == " w1 w2 w3"
    failure = streams[1].failure
    assert (streams[1], failure) in updates
    assert (failure.source, failure.kind, failure.error) == ("b", "OutOfMemoryError", "too much")
    assert streams[1].ended and len(pool) == 0


def test_updates_are_ready_when_their_round_ends_and_pauses_are_no_delay():
    now = 0.0
    pool = StreamPool(Several(), clock=lambda: now)
    stream = pool.open()
    stream.feed(spoken(9)[:10])
    now = 0.4
    [(_, update)] = pool.round()
    assert (update.audio_s, update.ready_s) == (1.0, 1.4)
    now = 100.0
    stream.feed(spoken(9)[10:20])
    now = 102.5  # the machine was busy
    [(_, update)] = pool.round()
    assert (update.audio_s, update.ready_s) == (2.0, 4.5)


def ends_on_a_step():
    """Updates of a stream whose audio ends with a step, at which words are committed."""
    pool = StreamPool(Several(), clock=iter(itertools.count(0, 0.1)).__next__)
    stream = pool.open(step_s=1.0)
    samples = spoken(30)
    stream.feed(samples[: len(samples) // RATE * RATE])
    found = [update for _, update in pool.drain()]
    stream.finish()
    return [*found, *(update for _, update in pool.drain())]


def test_words_are_ready_in_their_order_where_audio_ends_with_a_step(monkeypatch):
    updates = ends_on_a_step()
    assert not updates[-1].provisional and updates[-1].audio_s == updates[-2].audio_s
    times = [update.ready_s for update in updates]
    assert times == sorted(times)
    meter = StreamMeter()
    for update in updates:
        meter.add(update)
    assert meter.report().delay_s > 0
    monkeypatch.setattr(streams, "max", lambda *values: values[-1], raising=False)
    times = [update.ready_s for update in ends_on_a_step()]
    assert times != sorted(times)


def test_what_is_wrong_is_refused_before_anything_is_taken():
    pool = StreamPool(Several())
    with pytest.raises(OptionError, match="batch_size=0"):
        StreamPool(Several(), batch_size=0)
    with pytest.raises(OptionError, match="a step of 9"):
        pool.open(step_s=9.0)
    assert len(pool) == 0
    for made in (Stream, StreamPool):
        with pytest.raises(OptionError, match="transcriber is 'zoo:x'; expected a Transcriber"):
            made("zoo:x")
        with pytest.raises(OptionError, match="transcriber is of type ndarray; expected"):
            made(np.zeros(3))
    stream = pool.open(name="a")
    with pytest.raises(OptionError, match="another stream of this pool is named 'a'"):
        pool.open(name="a")
    numbered = pool.open(name="0"), pool.open(), pool.open()
    assert [one.name for one in numbered] == ["0", "1", "2"]
    for one in numbered:
        one.leave()
    with pytest.raises(InputError, match="int16"):
        stream.feed(np.zeros(3, np.int16))
    with pytest.raises(OptionError, match="max_tokens"):
        pool.open(max_tokens=3)
    stream.finish()
    with pytest.raises(OptionError, match="is finished"):
        stream.feed(np.zeros(3, np.float32))
    assert [one for one, _ in pool.drain()] == [stream]
    with pytest.raises(OptionError, match="finished already"):
        stream.finish()
    gone = pool.open(name="b")
    gone.leave()
    with pytest.raises(OptionError, match="stream b has left"):
        gone.feed(spoken(3))


# What goes wrong


def test_an_error_of_a_batch_ends_its_streams_and_no_others():
    """Streams whose options the model refuses only when it decodes."""

    class Refuses(Several):
        def stream(self, requests, batch_size):
            raise OptionError("no such thing")

    pool = StreamPool(Several())
    good = pool.open(name="good")
    pool.transcriber, other = Refuses(), pool.transcriber
    pool.transcriber.options = Options("other")
    bad = [pool.open(name="bad"), pool.open(name="worse")]
    pool.transcriber = other
    for stream in (good, *bad):
        stream.feed(spoken(10))
    seen = list(pool.drain())
    assert [(one.failure.source, one.failure.error) for one in bad] == [
        ("bad", "no such thing"), ("worse", "no such thing"),
    ]  # fmt: skip
    with pytest.raises(OptionError, match="stream bad has failed: no such thing; open another"):
        bad[0].feed(spoken(3))
    good.finish()
    seen += pool.drain()
    assert text_of([update for one, update in seen if one is good]) == words_up_to(10)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_round_has_taken_no_step(error):
    class Interrupted(Several):
        raises = True

        def stream(self, requests, batch_size):
            found = list(super().stream(requests, batch_size))
            if self.raises and len(self.batches) > 3:
                self.raises = False
                raise error
            yield from found

    pool = StreamPool(Interrupted())
    streams = [pool.open() for _ in range(3)]
    for stream in streams:
        stream.feed(spoken(12))
        stream.finish()
    seen = []
    with pytest.raises(error):
        for found in pool.drain():
            seen.append(found)
    seen += pool.drain()
    for stream in streams:
        assert text_of([update for one, update in seen if one is stream]) == words_up_to(12)


def test_a_policy_that_raises_ends_its_stream_alone():
    class Broken(CommitPolicy):
        def stable(self, hypotheses):
            raise ZeroDivisionError("by zero")

    pool = StreamPool(Several())
    streams = [pool.open(), pool.open(Broken()), pool.open()]
    for stream in streams:
        stream.feed(spoken(12))
        stream.finish()
    seen = list(pool.drain())
    assert streams[1].failure.kind == "ZeroDivisionError"
    for stream in (streams[0], streams[2]):
        assert text_of([update for one, update in seen if one is stream]) == words_up_to(12)


def test_streams_are_fed_from_threads_while_rounds_are_decoded():
    pool = StreamPool(Several(), batch_size=3, most_waiting_s=3.0)
    speakers = [Speaker(seed) for seed in range(6)]
    streams = [pool.open(**speaker.kind) for speaker in speakers]

    def feed(stream, speaker):
        samples, at = speaker.samples, 0
        while at < len(samples):
            size = speaker.draw.choice([1, 4, 9])
            try:
                stream.feed(samples[at : at + size])
                at += size
            except OverloadError:
                time.sleep(0.001)
        stream.finish()

    pairs = zip(streams, speakers, strict=True)
    threads = [threading.Thread(target=feed, args=pair) for pair in pairs]
    texts = dict.fromkeys(streams, "")
    for thread in threads:
        thread.start()
    while len(pool):
        for stream, update in pool.round():
            texts[stream] += update.text
    assert [known(texts[one]) for one in streams] == [one.alone() for one in speakers]


def test_rounds_in_several_threads_take_no_step_twice():
    class Slow(Several):
        def stream(self, requests, batch_size):
            time.sleep(0.002)
            return super().stream(requests, batch_size)

    pool, seen = StreamPool(Slow()), []
    stream = pool.open()
    stream.feed(spoken(30))
    stream.finish()
    threads = [threading.Thread(target=lambda: seen.extend(pool.drain())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    updates = sorted((update for _, update in seen), key=lambda update: update.audio_s)
    assert text_of(updates) == words_up_to(30)


def test_options_are_those_of_each_stream_and_equal_ones_share_a_batch():
    made = []

    class Other(Several):
        def with_options(self, decoder=None, **options):
            made.append(Other())
            made[-1].options = Options(options["language"])
            return made[-1]

    pool = StreamPool(Other())
    streams = [pool.open(language=name) for name in ("en", "fr", "en")] + [pool.open()]
    for stream in streams:
        stream.feed(spoken(5))
    pool.round()
    used = [(one.options.word_timestamps, one.batches) for one in made if one.batches]
    assert used == [("en", [2]), ("fr", [1])] and pool.transcriber.batches == [1]


def test_less_than_a_step_never_keeps_a_long_block_out():
    pool = StreamPool(Several(), most_waiting_s=2.0)
    stream = pool.open()
    stream.feed(spoken(20)[:5])
    stream.feed(spoken(20)[5:])  # no step is due, so that no round would make room
    with pytest.raises(OverloadError):
        stream.feed(spoken(1))


def test_a_finish_after_a_pause_is_no_delay():
    now = 0.0
    pool = StreamPool(Several(), clock=lambda: now)
    stream = pool.open()
    stream.feed(spoken(9)[:13])
    pool.round()
    now = 100.0
    stream.finish()
    now = 100.25
    [(_, update)] = pool.round()
    assert update.ready_s - update.audio_s == pytest.approx(0.25)


# With models

WAYS = [
    {"policy": "agreement", "step_s": 1.0},
    {"policy": "alignatt:s=0.8", "step_s": 0.5},
    {"policy": "ending:p=0.99", "step_s": 0.7},
    {"policy": "hold:n=2", "step_s": 1.5, "redraft": False},
]


def together(transcriber, waves, seed):
    """Texts of streams of a pool that are fed in blocks of any size."""
    draw, pool = random.Random(seed), StreamPool(transcriber, batch_size=5, most_waiting_s=1e9)
    streams = [pool.open(**WAYS[number % len(WAYS)]) for number in range(len(waves))]
    texts, fed = dict.fromkeys(streams, ""), dict.fromkeys(streams, 0)
    while len(pool):
        for stream, wave in zip(streams, waves, strict=True):
            if fed[stream] < len(wave):
                size = draw.choice([0, 0, 1000, 8000, 30_000])
                stream.feed(wave[fed[stream] : fed[stream] + size])
                fed[stream] += size
                if fed[stream] >= len(wave):
                    stream.finish()
        for stream, update in pool.round():
            texts[stream] += update.text
    return [texts[stream] for stream in streams]


def one_by_one(transcriber, waves):
    """Texts of the same streams, each alone."""
    found = []
    for number, wave in enumerate(waves):
        stream = Stream(transcriber, **WAYS[number % len(WAYS)])
        found.append(text_of([*stream.feed(wave), stream.finish()]))
    return found


@pytest.mark.parametrize(
    "model",
    ["zoo:whisper-synth", pytest.param("moonshine:tiny-en", marks=pytest.mark.slow)],
)
def test_models_give_streams_of_a_pool_the_texts_that_they_have_alone(model):
    if model.startswith("moonshine"):
        pytest.importorskip("moonshine_voice")
    transcriber = Transcriber.from_pretrained(model, device="cpu")
    waves = [clip.samples()[:40_000] for clip in speech_test()[:4]]
    assert together(transcriber, waves, 0) == one_by_one(transcriber, waves)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["zoo:whisper-synth", "moonshine:tiny-en"])
def test_32_streams_of_a_model_have_the_texts_that_they_have_alone(model):
    if model.startswith("moonshine"):
        pytest.importorskip("moonshine_voice")
    draft = None if model.startswith("moonshine") else "medusa"
    transcriber = Transcriber.from_pretrained(model, draft=draft, device="cpu")
    waves = [clip.samples()[: 16_000 * 6] for clip in [*speech_test(), *speech_test()[:2]]]
    assert together(transcriber, waves, 1) == one_by_one(transcriber, waves)
