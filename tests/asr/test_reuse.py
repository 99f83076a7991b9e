"""What a window left unfinished, and what was said before, drafts the next window."""

import numpy as np
import pytest
import soundfile

from mmdecode import Decoder
from mmdecode.asr import TranscribeOptions, Transcriber
from mmdecode.asr.decoding.segmentation import split_segments, unfinished
from mmdecode.draft.first_of import FirstOf
from mmdecode.draft.lookup import PromptLookup
from mmdecode.draft.recycling import Recycling
from mmdecode.draft.source import Source
from mmdecode.zoo.speech import speech_test


class Spy(Decoder):
    """Notes the source texts its draft is given."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.sources = []

    def __call__(self, *args, mm_inputs, **kwargs):
        self.sources.append(mm_inputs["source_ids"])
        return super().__call__(*args, mm_inputs=mm_inputs, **kwargs)


@pytest.mark.parametrize(
    ("tokens", "rest"),
    [
        ([100, 1, 120, 120, 2, 3], [120, 2, 3]),
        ([100, 1, 120, 125, 2, 140, 140, 4], [140, 4]),
        ([100, 1, 120, 125], []),
    ],
)
def test_the_unfinished_part_begins_with_its_time(tokens, rest):
    segments, stamps = split_segments(tokens, 100, 50)
    assert stamps is not None
    assert unfinished(tokens, segments) == rest


@pytest.fixture(scope="module")
def speaker(processor, kit):
    """A random model whose windows end unfinished, and a recording of many."""
    return kit.build_model(processor, seed=3), kit.noise(7.0, seed=2)


def test_the_next_window_is_given_what_was_left_with_its_times_moved(speaker, processor):
    model, samples = speaker
    begin = model.generation_config.no_timestamps_token_id + 1
    spy, windows = Spy(), []
    ours = Transcriber(model, processor, spy)
    advance = ours._loop._advance
    ours._loop._advance = lambda w, r: (windows.append((w.seek, r.tokens)), advance(w, r))
    [found] = ours([samples])
    assert spy.sources[0] == [[]]
    left = 0
    for (seek, tokens), (following, _), [source] in zip(
        windows, windows[1:], spy.sources[1:], strict=False
    ):
        moved = (following - seek) // 2  # frames to the encoder's steps
        segments, stamps = split_segments(tokens, begin, 50)
        rest = unfinished(tokens, segments) if stamps is not None else []
        left += bool(rest)
        wanted = [token - moved if token >= begin else token for token in rest]
        assert source[: len(rest)] == wanted
        assert all(token >= begin for token in source[:1])
        assert source[len(rest) :] == [token for _, _, part in segments for token in part]
    assert left > 1, "no window ended unfinished"
    assert found.stats["windows"] == len(windows)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "draft",
    [
        Source(least=1),
        FirstOf(Source(least=1), PromptLookup()),
        FirstOf(Source(least=1), Recycling(keep=True)),
        Recycling(keep=True),
    ],
    ids=["source", "source, lookup", "source, recycling", "recycling"],
)
@pytest.mark.parametrize("temperatures", [(0.0,), (0.9,)], ids=["greedy", "sampled"])
def test_drafting_from_the_last_window_changes_no_token(speaker, processor, draft, temperatures):
    model, samples = speaker
    options = TranscribeOptions(temperatures=temperatures, batch_size=2)
    inputs = [samples, samples[20_000:], samples[:30_000]]
    plain = Transcriber(model, processor, Decoder(seed=0), options)(inputs)
    decoder = Decoder(draft, seed=0)
    drafted = Transcriber(model, processor, decoder, options)(inputs)
    assert [t.tokens for t in drafted] == [t.tokens for t in plain]
    if temperatures == (0.0,):
        assert decoder.stats.accepted > 0


def test_a_window_that_is_redone_is_given_the_attempt_that_failed(trained, kit):
    clip = soundfile.read(speech_test()[0].path, dtype="float32")[0]
    fallback = {"temperatures": (0.0, 0.2), "compression_ratio_threshold": 0.1}

    def run(draft):
        ours = Transcriber.from_pretrained(trained, draft=draft, device="cpu", **fallback)
        return ours([clip])[0], ours.stats

    plain, without = run(None)
    found, stats = run(Source(least=1))
    assert found.tokens == plain.tokens
    assert found.stats["attempts"] == 2 * found.stats["windows"]
    # nearly all of the second attempt is the first
    assert without.passes > 1.5 * stats.passes


def test_a_table_that_is_kept_saves_passes_from_window_to_window(trained):
    clip = np.tile(soundfile.read(speech_test()[0].path, dtype="float32")[0], 3)
    passes = {}
    for keep in (False, True):
        ours = Transcriber.from_pretrained(trained, draft=Recycling(keep=keep), device="cpu")
        ours([clip])
        passes[keep] = ours.stats.passes
    assert passes[True] < 0.8 * passes[False]
