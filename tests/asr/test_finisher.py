"""A finisher: words unchanged, labels with a fixed delay, the same for any calls."""

import random

import pytest
import torch

from mmdecode.asr.streaming.finisher import Finisher, bare_word, written
from mmdecode.errors import OptionError
from mmdecode.models import punctuation
from mmdecode.models.punctuation import CONTEXT, MARKS, PunctuationTagger, seen

DELAYS = (0, 1, 2, 5, None)


@pytest.fixture(scope="module")
def tagger():
    """Random weights, large enough that every label occurs."""
    torch.manual_seed(0)
    sizes = {"buckets": 128, "width": 16, "inner_size": 24, "heads": 2, "layers": 3}
    made = PunctuationTagger(sizes).eval()
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.6)
    with torch.no_grad():
        made.output.bias.zero_()
    return made


def words(count, seed=0):
    """Random words, some of which are said again soon."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        other = f" {''.join(draw.choices('abcdefgh', k=draw.randint(1, 6)))}"
        found.append(draw.choice([other, other, *found[-3:]]))
    return found


def finished(tagger, given, sizes, delay):
    made, found, at = Finisher(tagger, delay), [], 0
    for size in [*sizes, len(given)]:
        found += made.push(given[at : at + size])
        at += size
    return [*found, *made.finish()]


@pytest.mark.parametrize("delay", DELAYS)
def test_labels_do_not_depend_on_how_words_are_divided(tagger, delay):
    given = words(70)
    expected = finished(tagger, given, [], delay)
    assert [one.word for one in expected] == given
    draw = random.Random(1)
    for most in (1, 9):
        sizes = [draw.randint(0, most) for _ in range(25)]
        assert finished(tagger, given, sizes, delay) == expected
    assert len({(one.mark, one.disfluency, one.text[1:2].isupper()) for one in expected}) > 1


@pytest.mark.parametrize("delay", [0, 1, 2, 5])
def test_a_word_waits_for_as_many_words_and_depends_on_no_later_one(tagger, delay):
    given, other = words(60), words(60, 1)
    made = Finisher(tagger, delay)
    for count, word in enumerate(given, 1):
        found = made.push([word])
        assert len(found) == (count > delay)
        assert made.waiting <= delay
    for cut in (10, 25, 40):
        mixed = given[: cut + delay] + other[cut + delay :]
        first, second = (finished(tagger, one, [], delay)[:cut] for one in (given, mixed))
        assert first == second
    assert not any(later_words_matter(tagger, given, delay))


def later_words_matter(tagger, given, delay):
    """Whether marks of the first words change with what comes later, for several lengths."""
    bare = [bare_word(word) for word in given]
    whole = tagger.logits(bare, delay).marks
    for count in range(10, 40, 3):
        part = tagger.logits(bare[: count + delay], delay).marks
        yield not torch.allclose(part[:count], whole[:count], atol=1e-5)


@pytest.mark.parametrize("part", ["seen", "repeated"])
def test_a_part_that_reads_further_is_found(tagger, monkeypatch, part):
    given, delay, plain = words(60), 2, getattr(punctuation, part)
    monkeypatch.setattr(
        punctuation, part, lambda first, ahead: plain(first, None if ahead is None else ahead + 1)
    )
    assert any(later_words_matter(tagger, given, delay))


def test_repetitions_are_those_of_a_word_and_the_one_before_it():
    again = punctuation.repeated("we went We went to".split(), None)
    assert [[k for k, one in enumerate(row) if one] for row in again] == [[1], [1, 4], [4], [], []]
    assert not any(any(row[:3]) for row in punctuation.repeated("we went we went".split(), 1))


def test_the_limits_of_the_layers_add_up_to_the_delay(tagger):
    assert [tagger.shares(delay) for delay in (0, 1, 5, 7)] == [
        [0] * 3,
        [1, 0, 0],
        [2, 2, 1],
        [3, 2, 2],
    ]
    assert tagger.shares(None) == [None] * 3
    assert seen(4, 1).tolist() == [[i <= j + 1 for i in range(4)] for j in range(4)]


def test_no_limit_is_full_attention(tagger):
    given = [bare_word(word) for word in words(30)]
    every, far = tagger.logits(given, None), tagger.logits(given, 90)
    assert torch.allclose(every.marks, far.marks, atol=1e-5)


def test_a_pause_ends_the_wait_and_the_end_ends_the_sentence(tagger):
    given = words(5)
    made = Finisher(tagger, 3)
    assert len(made.push(given)) == 2
    assert len(made.push([], pause=True)) == 3
    assert made.finish() == []
    for delay in DELAYS:
        made = Finisher(tagger, delay)
        found = [*made.push(given), *made.finish()]
        text = "".join(one.text for one in found)
        assert text[-1] in ".?" or (delay == 0 and text[-1] == ",")


def test_marks_alone_at_the_end_leave_the_full_stop_to_the_end(endless):
    made = Finisher(endless, 2)
    found = [*made.push([" hello", " my", " friend", " ..."]), *made.finish()]
    assert "".join(one.text for one in found).lower() == " hello my friend."
    assert made.finish() == []


@pytest.fixture
def endless(tagger):
    """The tagger, which finds no marks."""
    with torch.no_grad():
        bias = tagger.output.bias.clone()
        tagger.output.bias[: len(MARKS)] = torch.tensor([50.0, 0.0, 0.0, 0.0])
    yield tagger
    with torch.no_grad():
        tagger.output.bias.copy_(bias)


@pytest.mark.parametrize("pause", [None, 40, 62])
@pytest.mark.parametrize("delay", [2, None])
def test_memory_is_bounded_without_ends_of_sentences(endless, delay, pause):
    made, count = Finisher(endless, delay), 0
    for number, word in enumerate(words(140), 1):
        count += len(made.push([word], pause=number == pause))
        assert made.waiting < CONTEXT // 2
        assert len(made._words) <= CONTEXT
    assert count > 100


def test_the_end_of_a_sentence_is_shown_where_its_last_word_is_hidden(endless):
    with torch.no_grad():  # every word ends a sentence
        endless.output.bias[: len(MARKS)] = torch.tensor([0.0, -50.0, 50.0, -50.0])
    given = words(40)
    made = Finisher(endless, 2, fluent=True)
    found = [*made.push(given), *made.finish()]
    hidden = [one for one in found if one.disfluency]
    assert {""} <= {one.text for one in hidden} <= {"", "."}
    shown = "".join(one.text for one in found)
    assert shown.endswith(".") and ".." not in shown


def test_a_full_stop_follows_a_hidden_last_word(tagger, monkeypatch):
    labels = iter([("", "lower", ""), (".", "lower", "filler")])
    plain = Finisher._written

    def given(self, index, *_):
        return plain(self, index, *next(labels))

    monkeypatch.setattr(Finisher, "_written", given)
    made = Finisher(tagger, 2, fluent=True)
    found = [*made.push([" so", " um"]), *made.finish()]
    assert "".join(one.text for one in found) == " so."
    assert [one.disfluency for one in found] == ["", "filler"]


@pytest.mark.parametrize(
    ("fluent", "expected"), [(True, " So we. Then"), (False, " Um so we. Then")]
)
def test_the_first_shown_word_of_a_sentence_has_a_capital(tagger, fluent, expected, monkeypatch):
    labels = iter([("", "filler"), ("", ""), (".", ""), ("", "")])
    plain = Finisher._written

    def given(self, index, mark, case, disfluency):
        mark, disfluency = next(labels)
        return plain(self, index, mark, case, disfluency)

    monkeypatch.setattr(Finisher, "_written", given)
    with torch.no_grad():  # no capitals of its own
        kept = tagger.output.bias.clone()
        tagger.output.bias[len(MARKS)] = 50.0
    made = Finisher(tagger, 0, fluent=fluent)
    found = made.push([" um", " so", " we", " then"])
    with torch.no_grad():
        tagger.output.bias.copy_(kept)
    assert "".join(one.text for one in found) == expected


@pytest.mark.parametrize(
    ("word", "mark", "case", "expected"),
    [
        (" hello,", ".", "first", " Hello."), (" 'Tis", "", "lower", " 'tis"),
        (" -5", ",", "lower", " -5,"), (" .5", "", "lower", " .5"), (" .NET", "", "upper", " .NET"),
        (" p.m.", "", "lower", " p.m."), (" p.m.", ".", "lower", " p.m."),
        (" p.m.", ",", "lower", " p.m.,"), (' "stop."', "?", "first", ' "Stop?"'),
        (" (now)", ".", "lower", " (now)."), (" 50%,", "", "lower", " 50%"),
        (" \u2013", "", "lower", " \u2013"),
        (" 3.5.", "", "lower", " 3.5"), (" 3.5.", "?", "lower", " 3.5?"),
        (" nasa's", "", "upper", " NASA's"), (" o'neil", "", "upper", " O'NEIL"),
        (" dogs'", ",", "lower", " dogs',"), (" ok…", "", "upper", " OK"),
    ],
)  # fmt: skip
def test_only_case_and_marks_at_the_end_of_a_word_change(word, mark, case, expected):
    assert written(word, mark, case) == expected


def test_words_keep_their_characters(tagger):
    given = [" Don't", " stop,", " (now)", " 3.5", " naïve?", " «", " U.S."]
    found = finished(tagger, given, [], 2)
    for one in found:
        assert bare_word(one.text).casefold() == bare_word(one.word).casefold()
    assert [one.word for one in found] == given


def test_fluent_text_leaves_out_fillers(tagger):
    given = words(80)
    plain = finished(tagger, given, [], 2)
    made = Finisher(tagger, 2, fluent=True)
    fluent = [*made.push(given), *made.finish()]
    assert [one.disfluency for one in fluent] == [one.disfluency for one in plain]
    for one, other in zip(fluent, plain, strict=True):
        assert one.text in (("", other.mark) if other.disfluency else (other.text,))
    assert any(one.disfluency for one in plain)


def test_bad_options(tagger):
    with pytest.raises(OptionError, match="delay=-1; expected 0 to 31 words"):
        Finisher(tagger, -1)
    with pytest.raises(OptionError, match="delay=32"):
        Finisher(tagger, 32)
