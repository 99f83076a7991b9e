"""Keys and values of a source that grows: those of all its states, each computed once."""

import pytest
import torch
from torch import nn

from mmdecode.asr import Transcriber
from mmdecode.asr.streaming import Stream
from mmdecode.decoder import Decoder
from mmdecode.engine import growing_source
from mmdecode.engine.growing_source import GrowingSource, common_prefix
from mmdecode.zoo.speech import speech_test
from tests.support.causal import causal_whisper

LAYERS = 3


@pytest.fixture
def projections():
    torch.manual_seed(0)
    return [(nn.Linear(4, 6), nn.Linear(4, 6, bias=False)) for _ in range(LAYERS)]


def states(count, seed=0):
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))


def opened(given, projections):
    return GrowingSource().extend(given, projections[0][0], projections)


def assert_same(found, expected):
    for own, other in zip(found, expected, strict=True):
        for one, two in zip(own, other, strict=True):
            assert torch.allclose(one, two, atol=1e-6)


@torch.no_grad()
def test_extending_in_parts_is_opening_with_all(projections):
    every, source = states(20), GrowingSource()
    for count in (3, 3, 8, 20, 11, 0, 5):  # grows, repeats, and shrinks
        found = source.extend(every[:count], projections[0][0], projections)
        assert_same(found, opened(every[:count], projections))


@torch.no_grad()
def test_states_that_changed_are_computed_again(projections):
    source, every = GrowingSource(), states(12)
    source.extend(every, projections[0][0], projections)
    changed = every.clone()
    changed[7, 2] += 1.0
    found = source.extend(changed, projections[0][0], projections)
    assert_same(found, opened(changed, projections))


@torch.no_grad()
def test_trusting_the_length_alone_is_found(projections, monkeypatch):
    source, every = GrowingSource(), states(12)
    source.extend(every, projections[0][0], projections)
    changed = every.clone()
    changed[7] += 1.0
    monkeypatch.setattr(growing_source, "common_prefix", lambda first, second: len(first))
    found = source.extend(changed, projections[0][0], projections)
    with pytest.raises(AssertionError):
        assert_same(found, opened(changed, projections))


@torch.no_grad()
def test_every_state_is_projected_once(projections):
    rows = []
    projections[1][0].register_forward_hook(lambda module, given, output: rows.append(len(output)))
    source, every = GrowingSource(), states(20)
    for count in (5, 11, 20):
        source.extend(every[:count], projections[0][0], projections)
    assert rows == [5, 6, 9]


@torch.no_grad()
def test_decoders_do_not_share_keys(projections):
    source, every = GrowingSource(), states(6)
    source.extend(every, projections[0][0], projections)
    other = [(nn.Linear(4, 6), nn.Linear(4, 6)) for _ in range(LAYERS)]
    found = source.extend(every, other[0][0], other)
    assert_same(found, opened(every, other))
    del other, found
    assert len(source._kept) == 1  # a decoder that is gone keeps nothing


def test_common_prefix():
    every = states(5)
    other = every.clone()
    other[3] = 0
    assert [common_prefix(every, one) for one in (every, other, every[:2], every[:0])] == [
        5,
        3,
        2,
        0,
    ]


def test_streams_decode_as_without_shared_keys(monkeypatch):
    """The texts of a stream, whether its calls share keys and values or not."""
    model, processor = causal_whisper(8)
    wave = speech_test()[1].samples()

    def texts():
        stream = Stream(Transcriber(model, processor, Decoder("lookup")))
        found = [(u.committed, u.provisional) for u in stream.feed(wave)]
        return [*found, stream.finish().committed]

    shared = texts()
    monkeypatch.setattr(GrowingSource, "__bool__", lambda self: False, raising=False)
    assert texts() == shared
