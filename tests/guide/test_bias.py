"""Bias towards listed words: bonuses over texts, in two ways of paying them."""

import itertools
import random

import numpy as np
import pytest

from mmdecode import registry
from mmdecode.asr import Transcriber
from mmdecode.asr.transcriber import load
from mmdecode.decoder import Decoder
from mmdecode.errors import IncompatibleError, InputError, OptionError
from mmdecode.guide.bias import Bias, listed
from mmdecode.guide.listed_words import BEGIN, Bonuses, Trie
from mmdecode.zoo.speech import speech_test

WORDS = ["Ann", "Anna Lee", "cat", "lee", "O'Brien", "can"]
TEXTS = [None, "a", "n", "c", "t", " ", "l", "e", "an", "ann", " ann", "na", " le", "cat", "nna l"]
TEXTS += ["ee", ".", "ual", "\ufffd", "o'", " o'b", "rien", "'s", "cats", " cat ", "n's cat", "e"]


def completed(text):
    """Number of listed words in a text, and the largest part of one at its end; by search."""
    text = text.casefold()
    starts = [0] + [i + 1 for i, c in enumerate(text) if not c.isalnum()]
    count, part = 0, 0.0
    for start, word in itertools.product(starts, (word.casefold() for word in WORDS)):
        rest = text[start:]
        if rest.startswith(word) and len(rest) > len(word) and not rest[len(word)].isalnum():
            count += 1
        if rest and word.startswith(rest):
            part = max(part, len(rest) / len(word))
    return count, part


def paid(known, tokens):
    """The bonus of each token of a text."""
    state, found = BEGIN, []
    for token in tokens:
        row = known.row(state)
        value = row.other + row.after_word * known.ends_word[token]
        if token in row.ids:
            value += row.values[np.searchsorted(row.ids, token)]
        found.append(float(value))
        state = known.step(state, token)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_what_a_text_is_paid_is_its_listed_words_and_the_part_of_one_at_its_end(seed):
    known = Bonuses(Trie(WORDS), TEXTS, "spread")
    draw = random.Random(seed)
    for _ in range(300):
        tokens = [draw.choice(range(1, len(TEXTS))) for _ in range(draw.randint(1, 9))]
        tokens = [token for token in tokens if TEXTS[token] != "\ufffd"]
        text = "".join(TEXTS[token] for token in tokens)
        count, part = completed(text)
        assert sum(paid(known, tokens)) == pytest.approx(count + part, abs=1e-5), text


@pytest.mark.parametrize("seed", range(3))
def test_the_end_of_a_word_is_paid_with_the_token_that_completes_it(seed):
    known = Bonuses(Trie(WORDS), TEXTS, "end")
    draw = random.Random(seed)
    for _ in range(300):
        tokens = [draw.choice(range(1, 18)) for _ in range(draw.randint(1, 9))]
        before = ""
        for token, value in zip(tokens, paid(known, tokens), strict=True):
            after = before + TEXTS[token]
            ended, _ = completed(after)
            inside = ended - completed(before)[0]
            if after[len(before)] in " .'":  # that was paid before
                inside -= sum(
                    before[s:].casefold() in map(str.casefold, WORDS) for s in starts(before)
                )
            whole = sum(after[s:].casefold() in map(str.casefold, WORDS) for s in starts(after))
            assert value == inside + whole, (before, TEXTS[token])
            before = after


@pytest.fixture(scope="module")
def zoo():
    return load("zoo:whisper-synth", "cpu", None)


@pytest.fixture(scope="module")
def clip():
    return next(one for one in speech_test() if one.duration_s < 6)


def written(zoo, clip, guide, draft=None):
    made = registry.create("guide", guide, **registry.context_of(*zoo))
    [found] = Transcriber(*zoo, Decoder(draft, made, seed=0))([str(clip.path)])
    return found.text


def test_a_word_is_written_instead_of_one_like_it(zoo, clip, tmp_path):
    """A high bonus puts it there; a low one, and one for words that are not like it, do not."""
    plain = written(zoo, clip, "bias:words=X,bonus=0".replace("X", str(listing(tmp_path, ["x"]))))
    word = plain.split()[-1].strip(".?")
    other = word[:-1] + ("a" if word[-1] != "a" else "e")
    words = listing(tmp_path, [other])
    found = written(zoo, clip, f"bias:words={words},bonus=60")
    assert other in found and word not in found.split()
    assert written(zoo, clip, f"bias:words={words},bonus=60", "lookup") == found
    assert written(zoo, clip, f"bias:words={words},bonus=0.01") == plain


def listing(folder, words):
    path = folder / "words.txt"
    path.write_text("\n".join(words) + "\n\n", encoding="utf-8")
    return path


def test_it_follows_another_guide_and_alone_another_may_not(tmp_path):
    words = listing(tmp_path, ["Marion", "Marion", " two  words "])
    both = registry.create("guide", f"vcd:alpha=0.5+bias:words={words},bonus=3")
    assert isinstance(both, Bias) and both.words == ("Marion", "two words")
    assert both.guide.weights == [1.5, -0.5] and both.branches == both.guide.branches
    assert both.requires_inputs == ("image",) and both.total == 1.0 and not both.neutral
    assert registry.create("guide", f"vcd+bias:words={words},bonus=0").neutral is False
    assert registry.create("guide", f"bias:words={words},bonus=0").neutral
    with pytest.raises(
        OptionError, match="names 2 guides, expected one: vcd cannot follow another"
    ):
        registry.create("guide", f"bias:words={words}+vcd")


def test_a_list_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "words.txt"
    path.write_bytes("\ufeffOkonkwo\n\nMarion  Lee\nOkonkwo\n".encode())
    assert listed(path) == ["Okonkwo", "Marion Lee"]


def test_what_it_cannot_do_is_refused(tmp_path, zoo, clip):
    with pytest.raises(
        InputError, match=r"cannot read the words in 'nowhere.txt'.*one word or phr"
    ):
        Bias("nowhere.txt")
    with pytest.raises(OptionError, match="bias has no words"):
        Bias(listing(tmp_path, [" "]))
    with pytest.raises(OptionError, match="pay must be 'spread' or 'end', got 'start'"):
        Bias(["x"], pay="start")
    with pytest.raises(OptionError, match="bonus must be >= 0"):
        Bias(["x"], -1)
    with pytest.raises(IncompatibleError, match="texts of tokens are not known"):
        Transcriber(*zoo, Decoder(guide=Bias(["x"]), seed=0))([str(clip.path)])


def test_words_of_scripts_without_spaces_begin_and_end_anywhere():
    known = Bonuses(
        Trie(["\u6771\u4eac", "caf\u00e9"]),
        ["\u6771", "\u4eac", "\u90fd", "Caf", "\u00c9"],
        "spread",
    )
    assert paid(known, [2, 0, 1, 2]) == [0.0, 0.5, 0.5, 0.0]
    assert paid(known, [3, 4, 2]) == [0.75, 0.25, 0.0]
    assert paid(known, [3, 3]) == [0.75, -0.75]


def starts(text):
    return [0] + [i + 1 for i, c in enumerate(text) if not c.isalnum()]
