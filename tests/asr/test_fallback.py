"""Temperature fallback with real sampling against transformers, recording by recording.

With ``top_k=1`` every draw has one outcome, so that both sides can be compared exactly.
"""

import numpy as np
import pytest
import soundfile

from mmdecode import Decoder
from mmdecode.asr import FALLBACK, TranscribeOptions, Transcriber
from mmdecode.draft.lookup import PromptLookup

TEMPERATURES = (0.0, 0.6, 0.8)  # both too hot for the next window to be shown their text
GATES = {
    "logprob": {"logprob_threshold": -2.05},
    "compression": {"compression_ratio_threshold": 1.25},
    "no-speech": {"logprob_threshold": -2.05, "no_speech_threshold": 0.0015},
    "all": {
        "logprob_threshold": -2.05,
        "compression_ratio_threshold": 1.25,
        "no_speech_threshold": 0.0015,
        "condition_on_prev_tokens": True,
    },
}


@pytest.fixture(scope="module")
def one_outcome(processor, kit):
    return kit.build_model(processor, top_k=1)


class Counted(Decoder):
    """Notes rows and whether they are sampled, call by call."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.calls = []

    def __call__(self, model, input_ids, *, generation_config, **kwargs):
        self.calls.append((len(input_ids), bool(generation_config.do_sample)))
        return super().__call__(model, input_ids, generation_config=generation_config, **kwargs)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("gates", GATES)
def test_fallback_equals_transformers_recording_by_recording(one_outcome, processor, kit, gates):
    recordings = [kit.noise(seconds, seed=seed) for seed, seconds in ((2, 7.0), (6, 3.1))]
    given = GATES[gates]
    options = TranscribeOptions(
        temperatures=TEMPERATURES, loop_guard="report", batch_size=2, **given
    )
    alone = Counted(seed=0)
    found = [
        Transcriber(one_outcome, processor, alone, options)([samples])[0] for samples in recordings
    ]
    stock = Counted(seed=0)  # inside transformers' loop, to compare when windows are redone
    for samples, transcript in zip(recordings, found, strict=True):
        plain = kit.stock(one_outcome, processor, samples, temperature=TEMPERATURES, **given)
        assert (transcript.tokens, kit.times(transcript)) == plain
        kit.stock(
            one_outcome,
            processor,
            samples,
            temperature=TEMPERATURES,
            custom_generate=stock,
            **given,
        )
    assert alone.calls == stock.calls
    redone = sum(sampled for _, sampled in alone.calls)
    windows = sum(t.stats["windows"] for t in found)
    assert 0 < redone < 2 * windows, "thresholds that divide the windows"
    drafted = Transcriber(one_outcome, processor, Decoder(PromptLookup(3, 1), seed=7), options)
    for one, other in zip(found, drafted(recordings), strict=True):
        assert (one.tokens, one.stats) == (other.tokens, other.stats)
        assert [s.temperature for s in one.segments] == [s.temperature for s in other.segments]


@pytest.mark.slow
def test_the_trained_model_falls_back_as_in_transformers(trained, kit):
    given = {
        "compression_ratio_threshold": 0.78,
        "logprob_threshold": -0.5,
        "no_speech_threshold": 0.6,
    }
    assert given.keys() | {"temperatures"} == FALLBACK.keys()
    temperatures = FALLBACK["temperatures"]
    ours = Transcriber.from_pretrained(
        trained, draft="recycling", device="cpu", temperatures=temperatures, **given
    )
    ours.model.generation_config.top_k = 1
    clip = soundfile.read(kit.data / "ami-ES2011a-40s-46s.flac", dtype="float32")[0]
    hiss = np.random.default_rng(0).standard_normal(6 * kit.rate).astype(np.float32)
    samples = np.concatenate([clip, 0.1 * hiss, clip[: 3 * kit.rate]])
    found = ours(samples)
    plain = kit.stock(ours.model, ours.processor, samples, temperature=temperatures, **given)
    assert (found.tokens, kit.times(found)) == plain
    assert found.stats["attempts"] > found.stats["windows"]
    assert len(found.segments) < found.stats["windows"], "no window was skipped"
