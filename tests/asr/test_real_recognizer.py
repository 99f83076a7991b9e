"""The published recogniser on recordings of people, cut in every way there is."""

import jiwer
import numpy as np
import pytest

from mmdecode.asr import Transcriber
from mmdecode.asr.audio.reading import blocks, recording
from mmdecode.evaluation.speech.normalisers import normaliser_of
from mmdecode.zoo.real_clips import real_clips
from tests.support.moonshine import NAME, needs_wheel

RATE = 16_000
WAYS = {
    "windows of the model": {},
    "short windows": {"window_s": 10},
    "overlap": {"window_s": 10, "mode": "chunked", "overlap_s": 3.0},
    "speech detection": {"window_s": 10, "vad": True},
}


@pytest.fixture(scope="module")
def talk():
    """All clips with two and a half seconds between them, and what they say."""
    clips = real_clips()
    waves = []
    for clip in clips:
        waves += [*blocks(recording(str(clip.path)), RATE), np.zeros(5 * RATE // 2, "f4")]
    return np.concatenate(waves), " ".join(clip.text for clip in clips)


@needs_wheel
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_however_it_is_cut_words_are_neither_lost_nor_repeated(way, talk):
    if "vad" in WAYS[way]:
        pytest.importorskip("silero_vad")
    samples, text = talk
    ours = Transcriber.from_pretrained(NAME, device="cpu", **WAYS[way])
    found = ours(samples)
    clean = normaliser_of("whisper")
    errors = jiwer.process_words(clean(text), clean(found.text))
    assert errors.wer < 0.08, (errors.wer, found.text)
    assert errors.insertions <= 8 and errors.deletions <= 8
    last = 0.0
    for segment in found.segments:
        assert last <= segment.start_s < segment.end_s <= found.duration_s
        last = segment.end_s
