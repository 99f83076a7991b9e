"""A stream's windows have the states that each has alone, and nothing is encoded twice."""

import numpy as np
import pytest
import torch

from mmdecode.asr import TranscribeOptions, Transcriber
from mmdecode.asr.audio.reading import source_of
from mmdecode.asr.recognizers import encoder_cache
from mmdecode.asr.recognizers.encoder_cache import EncoderCache, StreamInputs
from mmdecode.asr.recognizers.whisper import WhisperRecognizer
from mmdecode.asr.streaming import Stream
from mmdecode.models.moonshine_streaming_encoder import IncrementalEncoder
from tests.support.tiny_recognizers import moonshine, moonshine_streaming

RATE = 16_000


@pytest.fixture(scope="module")
def parts():
    return moonshine_streaming()


@pytest.fixture(scope="module")
def ours(parts):
    return Transcriber(*parts).recognizer


@pytest.fixture
def work(parts):
    """Number of states that passed the first layer of the encoder, in each pass."""
    counts = []
    handle = (
        parts[0]
        .get_encoder()
        .layers[0]
        .mlp.register_forward_hook(lambda module, given, output: counts.append(output.shape[1]))
    )
    yield counts
    handle.remove()


def noise(count, seed=0):
    return 0.1 * torch.randn(count, generator=torch.Generator().manual_seed(seed))


def alone(ours, samples):
    """States of a window that is encoded from its beginning."""
    return ours.encode(ours.features([samples.numpy()]), [len(samples) / RATE]).states[0]


def assert_alone(ours, cache, samples):
    found, expected = cache.window(samples).states, alone(ours, samples)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-5


def test_windows_have_the_states_that_they_have_alone(ours):
    random, cache = np.random.default_rng(0), ours.encoder_cache()
    sound, kinds = noise(30_000), set()
    begin, end = 0, 2000
    for _ in range(30):  # as a stream: windows grow, stay, are cut and begin again
        kind = random.choice(["grows", "stays", "is cut", "begins"])
        if kind == "grows":
            end = min(end + int(random.integers(1, 9000)), 30_000)
        elif kind == "is cut":
            end = max(begin + 1600, end - int(random.integers(1, 3000)))
        elif kind == "begins":
            begin = int(random.integers(0, max(1, end - 1600)))
            end = max(end, begin + 1600)
        kinds.add(str(kind))
        assert_alone(ours, cache, sound[begin:end])
    assert len(kinds) == 4


def test_only_new_samples_are_encoded(ours, work):
    cache, sound = ours.encoder_cache(), noise(64_000)
    cache.window(sound[:32_000])
    work.clear()
    cache.window(sound[:32_000])
    assert not work, "a window that did not change"
    cache.window(sound[:48_000])
    assert sum(work) == 50 + 1, "its states are frozen but those that wait for others"
    work.clear()
    cache.window(sound[8000:48_000])
    assert sum(work) == 125, "another beginning"
    work.clear()
    cache.window(sound[:64_000])
    cache.window(sound[8000:64_000])
    assert sum(work) == 2 * (50 + 1), "several windows are kept"
    work.clear()
    cache.window(sound[:40_000])
    assert sum(work) == 125, "another end"


def test_the_windows_used_last_are_kept(ours, work):
    encoder = ours.model.get_encoder()
    cache = EncoderCache(lambda: IncrementalEncoder(encoder), 30_000)
    one, two, three = (noise(10_000, i) for i in range(3))
    for samples in (one, two, three, one, noise(10_000, 4)):
        cache.window(samples)
    assert cache.kept == 30_000
    work.clear()
    for samples in (three, one):
        cache.window(samples)
    assert not work
    cache.window(two)
    assert work, "used least"
    cache.window(noise(40_000, 5))
    assert cache.kept == 40_000, "the newest is kept, however long"


def test_a_caller_that_changes_states_changes_no_later_ones(ours):
    cache, sound = ours.encoder_cache(), noise(32_000)
    window = StreamInputs(*ours.features([sound.numpy()]), cache, sound)
    first = ours.encode([window], [2.0]).states
    before = first.clone()
    first += 1
    assert torch.equal(ours.encode([window], [2.0]).states, before)


def test_windows_with_and_without_a_cache_are_encoded_together(ours):
    cache, long, short = ours.encoder_cache(), noise(32_000), noise(16_000, 1)
    inputs = ours.features([long.numpy(), short.numpy()])
    expected = ours.encode(inputs, [2.0, 1.0])
    for cached in (0, 1):
        mixed = [
            StreamInputs(one, cache, one["input_values"][0]) if row == cached else one
            for row, one in enumerate(inputs)
        ]
        found = ours.encode(mixed, [2.0, 1.0])
        assert torch.equal(found.mask, expected.mask)
        assert (found.states - expected.states).abs().max() < 1e-5


def test_other_families_have_none(parts, model, processor):
    assert Transcriber(*moonshine()).recognizer.encoder_cache() is None
    assert WhisperRecognizer(model, processor, TranscribeOptions()).encoder_cache() is None


@pytest.mark.parametrize("count", [700, 1601, 3200])
def test_it_comes_with_a_recording_and_changes_no_states(ours, count):
    cache, samples = ours.encoder_cache(), noise(count).numpy()
    found = []
    for item in ({"audio": samples, "of_stream": {"encoder_cache": cache}}, {"audio": samples}):
        recording = ours.open(source_of(item, RATE))
        inputs = ours.read(recording, 0, count)
        assert isinstance(inputs, StreamInputs) == ("of_stream" in item)
        found.append(ours.encode([inputs], [count / RATE]).states)
    assert cache.kept == max(count, 1600)
    assert found[0].shape == found[1].shape
    assert (found[0] - found[1]).abs().max() < 1e-5


# ---- streams


def spoken(seconds, seed=0):
    """Bursts of noise of 0.4 to 2 s with pauses between them."""
    random, found = np.random.default_rng(seed), []
    while sum(map(len, found)) < seconds * RATE:
        found.append(0.2 * random.standard_normal(round(random.uniform(0.4, 2) * RATE)))
        found.append(1e-4 * random.standard_normal(round(random.uniform(0.2, 0.5) * RATE)))
    return np.concatenate(found).astype("f4")[: round(seconds * RATE)]


def streamed(parts, samples, block, cached, longest_s=5.0, step_s=0.5):
    """Updates of a stream, and how many windows its cache keeps."""
    stream = Stream(Transcriber(*parts), step_s=step_s, longest_s=longest_s)
    if not cached:
        stream._encoder_cache = None
    updates, cache = [], stream._encoder_cache
    for at in range(0, len(samples), block):
        updates += stream.feed(samples[at : at + block])
    updates.append(stream.finish())
    kept = cache.kept / RATE / stream.transcriber.recognizer.window_s if cached else 0
    return [(one.committed, one.provisional) for one in updates], kept


def test_a_stream_says_the_same_and_encodes_a_fraction(parts, work):
    samples = spoken(9)
    plain, _ = streamed(parts, samples, 8000, cached=False)
    before = sum(work) / 9
    work.clear()
    found, windows = streamed(parts, samples, 8000, cached=True)
    assert found == plain
    assert len({word for committed, _ in plain for word in committed}) > 8
    after = sum(work) / 9
    assert after < 3 * 50 and after < 0.6 * before, (before, after)
    assert 0 < windows <= 2


@pytest.mark.slow
def test_blocks_of_any_size_give_the_same_and_the_work_does_not_grow(parts, work):
    samples = spoken(60, 1)
    plain, _ = streamed(parts, samples, 8000, cached=False)
    for block in (777, 100_000):
        work.clear()
        found, windows = streamed(parts, samples, block, cached=True)
        assert found == plain
        assert sum(work) / 60 < 3 * 50
        assert 0 < windows <= 2


# Known mistakes


def test_a_cache_that_does_not_compare_samples_is_noticed(ours, monkeypatch):
    def by_length(one, other):
        return len(one) == len(other)

    case = ours, ours.encoder_cache()
    for samples in (noise(8000), noise(16_000, 1)):
        assert_alone(*case, samples)
    monkeypatch.setattr(encoder_cache.torch, "equal", by_length)
    case = ours, ours.encoder_cache()
    assert_alone(*case, noise(8000))
    with pytest.raises(AssertionError):
        assert_alone(*case, noise(16_000, 1))
