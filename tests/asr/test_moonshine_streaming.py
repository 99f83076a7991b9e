"""MoonshineStreaming as a recogniser: windows of the encoder, whole frames, streams."""

import math

import numpy as np
import pytest
import torch

from mmdecode import Decoder
from mmdecode.asr import TranscribeOptions, Transcriber
from mmdecode.asr.audio.reading import source_of
from mmdecode.asr.decoding.long_form import LongForm
from mmdecode.asr.recognizers.base import of_type
from mmdecode.asr.recognizers.encoder_cache import EncoderCache
from mmdecode.asr.recognizers.moonshine_streaming import MoonshineStreamingRecognizer
from mmdecode.draft.lookup import PromptLookup
from mmdecode.guide.bias import Bias
from mmdecode.models.moonshine_streaming_encoder import IncrementalEncoder
from mmdecode.testing import check_recognizer
from tests.support.tiny_recognizers import moonshine_streaming

RATE = 16_000


@pytest.fixture(scope="module")
def parts():
    return moonshine_streaming()


def transcriber(parts, decoder=None, **options):
    return Transcriber(*parts, decoder, TranscribeOptions(**options))


class Short(MoonshineStreamingRecognizer):
    """Windows of two seconds, so that a check has little to decode."""

    window_s = 2.0


def check(kind, parts):
    check_recognizer(lambda options: kind(*parts, options))


def test_it_passes_the_check_of_recognisers(parts):
    assert of_type("moonshine_streaming") is MoonshineStreamingRecognizer
    check(Short, parts)


def test_the_longest_window_has_positions(parts):
    assert transcriber(parts).recognizer.window_s == 1024 * 320 / RATE  # 20.48 s
    model, processor = moonshine_streaming()
    model.get_decoder().pos_emb = torch.nn.Embedding(4096, 24)
    assert Transcriber(model, processor).recognizer.window_s == 30


def plain(recognizer, samples):
    """Tokens of plain `generate` for whole frames of samples, with a mask."""
    padded = np.pad(samples, (0, max(1600 - len(samples), 0)))
    padded = torch.tensor(np.pad(padded, (0, -len(padded) % 80)))[None]
    inputs = {"input_values": padded, "attention_mask": torch.ones_like(padded).long()}
    most = recognizer.most_tokens(len(samples) / RATE)
    found = recognizer.model.generate(**inputs, max_new_tokens=most)[0, 1:].tolist()
    return found[: found.index(1)] if 1 in found else found


@pytest.mark.parametrize(("draft", "batch_size"), [(None, 1), (PromptLookup(3, 1), 3)])
def test_a_recording_is_what_plain_generate_says_of_it(parts, kit, draft, batch_size):
    recordings = [kit.noise(s, seed=i) for i, s in enumerate((1.0, 2.0003, 0.4001))]
    assert len(recordings[1]) % 80
    ours = transcriber(parts, Decoder(draft), batch_size=batch_size)
    expected = [plain(ours.recognizer, samples) for samples in recordings]
    assert len({token for row in expected for token in row}) > 8
    assert [t.tokens for t in ours(recordings)] == expected


def test_beams_leave_the_states_as_they_are(parts, kit):
    ours = transcriber(parts, beams=3).recognizer
    encoded = ours.encode(ours.features([kit.noise(1.0)]), [1.0])
    before = encoded.states.clone()
    config = ours.generation(1, 6)
    ours.searched(torch.tensor([[0]]), encoded, config, 3, 2, [6])
    assert torch.equal(encoded.states, before)
    assert transcriber(parts, beams=3)(kit.noise(1.0)).tokens


def test_states_depend_on_nothing_beyond_their_look_ahead(parts, kit):
    ours = transcriber(parts).recognizer
    samples = kit.noise(1.0)
    changed = samples.copy()
    changed[8000:] *= -2
    states = ours.encode(ours.features([samples, changed]), [1.0, 1.0]).states
    same = (states[0] == states[1]).all(-1)
    first = int((~same).nonzero()[0])
    assert first == 8000 // 320 - 2  # two layers of (4, 2) each look one state ahead


@pytest.mark.slow
def test_drafts_change_no_token_of_a_sampled_window(parts, kit):
    options = {"temperatures": (0.8,), "logprob_threshold": -math.inf}
    recordings = [kit.noise(s, seed=i) for i, s in enumerate((1.0, 2.0, 0.4))]
    plain = transcriber(parts, Decoder(seed=7), **options)(recordings)
    drafted = transcriber(parts, Decoder(PromptLookup(3, 1), seed=7), **options)(recordings)
    assert [t.tokens for t in drafted] == [t.tokens for t in plain]


def test_guides_work(parts, kit):
    samples = kit.noise(2.0)
    guide = Bias(["w3 w7"], bonus=30.0, tokenizer=parts[1].tokenizer)
    guided = transcriber(parts, Decoder(guide=guide))(samples)
    drafted = transcriber(parts, Decoder(PromptLookup(3, 1), guide=guide))(samples)
    assert guided.tokens == drafted.tokens
    assert "w3 w7" in guided.text and "w3 w7" not in transcriber(parts)(samples).text


# Known mistakes


def alone(recognizer, recordings):
    """Tokens that a recogniser's model says of each recording, by the loop."""
    loop = LongForm(recognizer, Decoder())
    sources = [source_of(samples, RATE) for samples in recordings]
    return [
        recognizer.text_tokens([token for piece in job.pieces for token in piece.tokens])
        for job in sorted(loop.run(sources), key=lambda job: job.index)
    ]


class NoMask(Short):
    def features(self, waves):
        return [{"input_values": one["input_values"]} for one in super().features(waves)]


def test_an_encoder_without_mask_is_noticed(parts, kit):
    samples = [kit.noise(s, seed=i) for i, s in enumerate((1.0, 2.0, 0.4))]
    right, wrong = (kind(*parts, TranscribeOptions()) for kind in (Short, NoMask))
    expected = alone(right, samples)
    assert expected == [plain(right, one) for one in samples]
    assert alone(wrong, samples) != expected


class NoWholeFrames(Short):
    def features(self, waves):
        return super(MoonshineStreamingRecognizer, self).features(waves)


def test_samples_that_fill_no_frame_are_noticed(parts):
    with pytest.raises((AssertionError, RuntimeError)):
        check(NoWholeFrames, parts)


class ByLength(EncoderCache):
    """Takes a window that has grown for the one before, whatever its samples are."""

    def window(self, samples):
        found = [entry for entry in self._entries if len(entry.samples) == len(samples)]
        return found[0] if found else super().window(samples)


class Confused(Short):
    def encoder_cache(self):
        encoder = self.model.get_encoder()
        return ByLength(lambda: IncrementalEncoder(encoder), 10**6)


def test_a_cache_that_changes_states_is_noticed(parts):
    with pytest.raises(AssertionError, match="encoder_cache a window of samples 1"):
        check(Confused, parts)
