"""Recipes of word timestamps: labels by frame, and which heads are chosen, for every family."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

from mmdecode.asr import TranscribeOptions
from mmdecode.asr.alignment import cross_attention
from mmdecode.asr.alignment.cross_attention import Spoken, ctc_spans
from mmdecode.asr.alignment.ctc import SYMBOLS, LetterHead, LetterModel, ctc_model_of
from mmdecode.asr.alignment.words import Token, split_words
from mmdecode.asr.recognizers.moonshine import MoonshineRecognizer
from mmdecode.asr.transcriber import load
from mmdecode.checkpoints import ZOO
from mmdecode.errors import InputError, OptionError, UnsupportedModelError
from mmdecode.runs.files import overwriting
from mmdecode.train import alignment_heads as recipe
from mmdecode.train.aligner import AlignerOptions, frame_labels, train_aligner
from mmdecode.train.alignment_heads import Aligned, byte_level, score_heads, write_heads
from mmdecode.zoo.joined_words import joined_words
from tests.support.moonshine import NAME, needs_wheel
from tests.support.tiny_recognizers import moonshine

ZOO_CTC = "ctc:model=zoo:whisper-synth"


def test_characters_of_a_word_share_its_frames_and_repeats_are_separated_by_blanks():
    labels = frame_labels("Add it.", [(0.04, 0.16), (0.2, 0.28)], 0.02, 16)
    assert "".join(SYMBOLS[label] for label in labels) == "__aadd_d__iitt__"


def test_a_head_learns_from_joined_words_and_survives_its_folder(tmp_path):
    extractor = WhisperFeatureExtractor(hop_length=320, chunk_length=8, n_fft=400)
    data = joined_words()
    options = AlignerOptions(steps=2, batch=2)
    head = train_aligner(extractor, data, options)
    head.save_pretrained(tmp_path)
    again = LetterHead.from_pretrained(tmp_path)
    features = torch.randn(1, 80, 40)
    torch.testing.assert_close(again(features), head(features), atol=0.02, rtol=0.02)


def test_the_head_that_follows_the_speech_scores_best():
    weights = torch.full((3, 3, 20), 0.05)
    weights[1] = 0.0
    weights[1, 0, 2:6] = weights[1, 1, 6:12] = 0.2
    tokens = [Token.of(5, 0.08, 0.24, 1.0), Token.of(6, 0.24, 0.48, 1.0)]
    scores = score_heads([Aligned(tokens, weights, [True, True], 0.04)])
    assert scores.argmax() == 1
    assert abs(float(scores[0])) < 1e-6


def test_heads_are_written_next_to_what_was_there(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')
    with pytest.raises(OptionError, match=r"generation_config\.json: there already"):
        write_heads(tmp_path, [[1, 2]])
    with overwriting():
        write_heads(tmp_path, [[1, 2]])
    write_heads(tmp_path, [[1, 2]])
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert written == {"eos_token_id": 3, "alignment_heads": [[1, 2]]}


# Recognisers without a CTC head of their own


@pytest.fixture(scope="module")
def aligner():
    """The shipped head, which reads samples."""
    model, _ = moonshine()
    return ctc_model_of(ZOO_CTC, model, 16_000)


@pytest.mark.parametrize("mutant", [None, "cut to a window"])
def test_the_shipped_aligner_reads_samples_of_any_length(aligner, mutant, monkeypatch):
    """As they read the features of a recording; the shipped Whisper has windows of 8 s."""
    assert isinstance(aligner, LetterModel) and aligner.reads_samples
    samples = (0.1 * np.random.default_rng(0).standard_normal(11 * 16_000)).astype("f4")
    extractor = aligner.extractor
    features = extractor(
        samples, sampling_rate=16_000, return_tensors="pt", truncation=False, padding="longest"
    ).input_features
    expected = LetterHead.from_pretrained(ZOO / "whisper-synth")(features)[0]
    if mutant:
        own = lambda x, truncation, padding, **given: extractor(x, **given)  # noqa: E731
        monkeypatch.setattr(aligner, "extractor", own)
    found, step_s = aligner.emit(None, samples, 11.0)
    same = found.shape == expected.shape and torch.allclose(found, expected, atol=1e-5)
    assert same == (mutant is None)
    assert step_s == 0.02 and expected.shape == (550, len(SYMBOLS))
    with pytest.raises(UnsupportedModelError, match="16000 Hz, the recogniser at 8000 Hz"):
        LetterModel(aligner.head, extractor, 8000)


def test_times_by_samples_are_those_by_features(aligner):
    _, processor = load(str(ZOO / "whisper-synth"), "cpu", None)
    own = LetterHead.from_pretrained(ZOO / "whisper-synth")
    tokenizer, extractor = processor.tokenizer, processor.feature_extractor
    for joined in joined_words()[:4]:
        features = extractor(joined.wave, sampling_rate=16_000, return_tensors="pt").input_features
        tokens = tokenizer.encode(" " + joined.text, add_special_tokens=False)
        frames = int(np.ceil(len(joined.wave) / 640))
        window = Spoken([], tokens, [], 0.0, frames, features[0], joined.wave)
        by_features, by_samples = (
            np.array(ctc_spans(window, ctc, tokenizer, lambda _: True, 0.04))
            for ctc in (own, aligner)
        )
        assert abs(by_features - by_samples).max() <= 0.05
        edges = np.array([joined.times[0][0], joined.times[-1][1]])
        assert abs(np.array([by_samples[0, 0], by_samples[-1, 1]]) - edges).max() < 0.15


class Pieces:
    """Pieces of SentencePiece by id."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def get_vocab(self):
        return {piece: index for index, piece in enumerate(self.pieces)}

    def convert_ids_to_tokens(self, token):
        return self.pieces[token]


def test_pieces_are_read_as_bytes():
    tokenizer = byte_level(Pieces("\u2581caf", "\u00e9", "<0xC3>", "<0xBC>", "\u2581it", ".", "b"))
    assert split_words([0, 1, 4, 2, 3, 6, 5], tokenizer) == [(" caf\u00e9", 2), (" it\u00fcb.", 5)]
    plain = Pieces("\u0120it", ".")
    assert byte_level(plain) is plain


@pytest.mark.parametrize("mutant", [None, "query"])
def test_every_head_of_a_moonshine_is_scored(kit_noise, mutant, monkeypatch):
    """By the shares of attention in the tokens' times, here those of one planted head."""
    ours = MoonshineRecognizer(*moonshine(), TranscribeOptions())
    wave = kit_noise(3.0)
    [aligned] = recipe.collect(ours, [wave], ZOO_CTC)
    frames = aligned.weights.shape[-1]
    assert aligned.weights.shape[:2] == (4, len(aligned.tokens) + 1)
    assert frames * aligned.frame_s == pytest.approx(3.0) and all(aligned.spoken)
    torch.testing.assert_close(aligned.weights.sum(-1), torch.ones(aligned.weights.shape[:2]))
    starts = [token.start_s for token in aligned.tokens]
    assert starts == sorted(starts) and starts[0] >= 0 and aligned.tokens[-1].end_s <= 3.01

    def planted(self, row, count):
        """Head 2 attends to the times of the token that a query predicts."""
        given = torch.full((4, 1 + len(aligned.tokens), count), 1 / count)
        for at, token in enumerate(aligned.tokens):
            query = at + (mutant == "query")
            middle = int((token.start_s + token.end_s) / 2 / aligned.frame_s)
            given[2, query] = 0.0
            given[2, query, min(middle, count - 1)] = 1.0
        return given

    monkeypatch.setattr(cross_attention.CrossAttention, "weights", planted)
    report = recipe.find_heads(ours.model, ours.processor, [wave], ZOO_CTC, most=2)
    assert list(report["scores"]) == ["0.0", "0.1", "1.0", "1.1"] and report["recordings"] == 1
    assert (report["scores"]["1.0"] > 0.5) == (mutant is None)
    assert len(report["median_error_s_by_heads"]) == 2


def test_an_end_token_has_no_time(kit_noise):
    """It would count as a token without text."""
    ours = MoonshineRecognizer(*moonshine(0), TranscribeOptions())
    [aligned] = recipe.collect(ours, [kit_noise(0.9)], ZOO_CTC)
    assert len(aligned.tokens) < ours.most_tokens(0.9), "it has not ended"
    assert all(aligned.spoken)


@pytest.fixture
def kit_noise():
    def noise(seconds):
        return np.random.default_rng(0).standard_normal(round(seconds * 16_000)).astype("f4") / 9

    return noise


def test_what_is_no_forced_alignment_is_refused(kit_noise):
    ours = MoonshineRecognizer(*moonshine(), TranscribeOptions())
    with pytest.raises(OptionError, match="expected a forced aligner"):
        next(recipe.collect(ours, [kit_noise(1.0)], "attention"))
    with pytest.raises(InputError, match="such as 'ctc:model=zoo:whisper-synth'"):
        next(recipe.collect(ours, [kit_noise(1.0)], "ctc"))
    with pytest.raises(InputError, match="transcribes only"):
        ours.language = "en"
        next(recipe.collect(ours, [kit_noise(1.0)], ZOO_CTC, "de"))


@pytest.mark.slow
@needs_wheel
def test_the_heads_of_the_published_recogniser_are_found_again():
    """On the clips of people, whose words the shipped letters align only roughly."""
    model, processor = load(NAME, "cpu", None)
    waves = recipe.recordings(Path("zoo:real-clips"), 16_000, 20)
    report = recipe.find_heads(model, processor, waves, ZOO_CTC)
    assert report["alignment_heads"] == model.generation_config.alignment_heads == [[4, 3]]
    assert report["recordings"] == 11 and report["median_error_s_by_heads"][0] < 0.11
    assert report["scores"]["4.3"] > 0.45 > report["scores"]["0.0"] + 0.4
