"""Recipes of word timestamps: labels by frame, and which heads are chosen."""

import json

import pytest
import torch
from transformers import WhisperFeatureExtractor

from mmdecode.asr.alignment.ctc import SYMBOLS, LetterHead
from mmdecode.asr.alignment.words import Token
from mmdecode.errors import OptionError
from mmdecode.runs.files import overwriting
from mmdecode.train.aligner import AlignerOptions, frame_labels, train_aligner
from mmdecode.train.alignment_heads import Aligned, score_heads, write_heads
from mmdecode.zoo.joined_words import joined_words


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
    scores = score_heads([Aligned(tokens, weights, [True, True])], 0.04)
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
