"""Words from tokens: where they begin, what they are made of, and the order of their times."""

import numpy as np
import pytest
from transformers import WhisperProcessor

from mmdecode.asr.alignment.words import Token, in_order, split_units, split_words, timed_words


@pytest.fixture(scope="module")
def tokenizer(trained):
    return WhisperProcessor.from_pretrained(trained).tokenizer


def words_of(tokenizer, text, language=None):
    ids = tokenizer.encode(text, add_special_tokens=False)
    words = split_words(ids, tokenizer, language)
    assert "".join(word for word, _ in words) == tokenizer.decode(ids)
    assert sum(count for _, count in words) == len(ids)
    return [word for word, _ in words]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (" Hello, world!", [" Hello,", " world!"]),
        ("Hello there", ["Hello", " there"]),
        (" it's 5 % (or $5.00)", [" it's", " 5", " %", " (or", " $5.00)"]),
        (' he said "yes" - no ... ok', [" he", " said", ' "yes"', " - no ...", " ok"]),
        (" ¿Qué? co-op", [" ¿Qué?", " co-op"]),
        (" naïve 😀 café", [" naïve", " 😀", " café"]),
        (" yes yes yes", [" yes", " yes", " yes"]),
        (" ...", [" ..."]),
        (' end "', [' end "']),
        ("", []),
    ],
)
def test_a_word_begins_at_a_space_and_keeps_its_marks(tokenizer, text, words):
    assert words_of(tokenizer, text) == words


def test_a_language_without_spaces_is_cut_into_characters(tokenizer):
    assert words_of(tokenizer, "你好、世界。「是」", "zh") == ["你", "好、", "世", "界。", "「是」"]
    assert words_of(tokenizer, "你好、世界。", None) == ["你好、世界。"]


def test_any_bytes_are_cut_where_characters_end(processor):
    """Random bytes: mostly broken UTF-8, read as the tokenizer reads them."""
    random = np.random.default_rng(0)
    for _ in range(200):
        ids = random.integers(0, 256, random.integers(1, 20)).tolist()
        units = split_units(ids, processor.tokenizer)
        text = processor.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert "".join(unit for unit, _ in units) == text
        assert sum(count for _, count in units) == len(ids)
        assert all(unit and count for unit, count in units)


def test_a_character_of_several_tokens_is_one_unit(processor):
    ids = processor.tokenizer.encode("aé😀", add_special_tokens=False)
    assert split_units(ids, processor.tokenizer) == [("a", 1), ("é", 2), ("😀", 4)]


def test_times_are_moved_as_little_as_puts_them_in_order():
    fine = [(0.1, 0.3), (0.3, 0.5), (0.9, 1.0)]
    assert in_order(fine, 1.0) == fine
    assert in_order([(0.1, 0.6), (0.5, 0.9)], 1.0) == [(0.1, 0.5), (0.5, 0.9)]
    assert in_order([(0.2, 0.2), (0.2, 0.4)], 1.0) == [(0.2, 0.22), (0.22, 0.4)]
    assert in_order([(0.8, 3.0)], 1.0) == [(0.8, 1.0)]
    assert in_order([(5.0, 6.0), (6.0, 7.0)], 1.0) == [(0.96, 0.98), (0.98, 1.0)]
    assert in_order([], 1.0) == []


def test_any_times_come_out_in_order_and_inside():
    random = np.random.default_rng(1)
    for _ in range(300):
        limit = random.uniform(0.01, 3)
        spans = random.uniform(-1, 4, (random.integers(1, 30), 2)).tolist()
        edges = [edge for span in in_order(spans, limit) for edge in span]
        assert edges == sorted(edges) and edges[0] >= 0 and edges[-1] <= limit + 1e-9
        assert all(b > a for a, b in zip(edges[::2], edges[1::2], strict=True))


def test_a_word_has_the_times_of_its_ends_and_the_mean_of_its_chances(tokenizer):
    ids = tokenizer.encode(" zebra.", add_special_tokens=False)
    assert len(ids) > 2
    chances = np.linspace(0.2, 0.8, len(ids))
    tokens = [
        Token.of(id_, 0.1 * i, 0.1 * i + 0.1, chance)
        for i, (id_, chance) in enumerate(zip(ids, chances, strict=True))
    ]
    [[], [word]] = timed_words([[], tokens], tokenizer, "en", lambda a, b: (a + 2, b + 2), 9.0)
    assert word.text == " zebra."
    assert (word.start_s, word.end_s) == (2.0, pytest.approx(2 + 0.1 * len(ids)))
    assert word.confidence == pytest.approx(0.5)


def test_a_timed_token_is_the_id_it_was():
    token = Token.of(7, 0.0, 1.0, 0.5)
    assert token == 7 and hash(token) == hash(7) and [7, 8][1:] == [token + 1]
