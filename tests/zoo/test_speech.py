import ctypes.util
import random

import numpy as np
import pytest

from mmdecode.zoo import grammar, synthesis
from mmdecode.zoo.speech import FOLDER, speech_test

needs_espeak = pytest.mark.skipif(
    ctypes.util.find_library("espeak-ng") is None,
    reason="espeak-ng, the system package that speaks the training data, is not installed",
)


def test_vocabulary_has_four_hundred_words_in_several_domains():
    assert len(grammar.vocabulary()) >= 400
    assert len(grammar.DOMAINS) >= 6


def test_a_test_sentence_is_never_a_training_sentence():
    train = set(grammar.sentences(4000, 1, "train"))
    test = set(grammar.sentences(400, 1, "test"))
    assert not train & test
    assert all(grammar.split(text) == "test" for text in test)


def test_sentences_are_the_same_for_the_same_seed():
    assert grammar.sentences(20, 3, "train") == grammar.sentences(20, 3, "train")
    assert grammar.sentences(20, 3, "train") != grammar.sentences(20, 4, "train")


def test_shipped_set_is_held_out_and_small():
    clips = speech_test()
    assert 20 <= len(clips) <= 40
    assert speech_test(long=True)[0].duration_s >= 180
    known = set(synthesis.TRAIN_VARIANTS)
    for clip in clips + speech_test(long=True):
        assert clip.voice.split("+")[1] not in known
        for sentence in clip.text.replace("?", ".").split(". "):
            text = sentence.rstrip(".") + "."
            assert "test" in (grammar.split(text), grammar.split(text[:-1] + "?")), text
    assert sum(f.stat().st_size for f in FOLDER.iterdir()) < 6e6


def test_noisy_variant_is_made_from_the_seed_at_the_stated_ratio():
    clip = speech_test()[0]
    clean, noisy = clip.samples(), clip.samples("noisy")
    assert np.array_equal(noisy, clip.samples("noisy"))
    loud = np.abs(clean) > 0.02
    ratio = 10 * np.log10(np.square(clean[loud]).mean() / np.square(noisy - clean).mean())
    assert ratio == pytest.approx(3.0, abs=0.5)


@needs_espeak
def test_espeak_speaks_alike_for_one_voice_and_unlike_for_two():
    engine = synthesis.Espeak()
    voices = [synthesis.Voice.draw(random.Random(seed)) for seed in (0, 1)]
    first, again, other = (engine.speak("A green rabbit.", v) for v in (voices[0], *voices))
    assert first.dtype == np.float32 and 0.3 < len(first) / synthesis.SAMPLING_RATE < 4
    assert len(first) == len(again)  # espeak-ng breathes at random: alike, not equal
    assert np.corrcoef(first, again)[0, 1] > 0.9
    short = min(len(first), len(other))
    assert abs(np.corrcoef(first[:short], other[:short])[0, 1]) < 0.9
