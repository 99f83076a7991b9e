"""Commit policies against definitions and closed forms, and the promises of streams over all."""

import itertools
import random
from functools import partial
from types import SimpleNamespace

import pytest

from mmdecode.asr.alignment.words import Token
from mmdecode.asr.streaming import Stream, policy_of, setting
from mmdecode.asr.streaming.commits import Commits
from mmdecode.asr.streaming.hypothesis import evidence_of
from mmdecode.asr.streaming.policies import AdaptiveWait, Hypotheses, OpenWord, Wait
from mmdecode.asr.transcriber import Transcriber
from mmdecode.errors import OptionError
from mmdecode.evaluation.speed.latency import average_lagging
from mmdecode.zoo.speech import speech_test
from tests.asr.test_streaming import (
    RATE,
    WORD,
    Hearer,
    spoken,
    text_of,
    updates_of,
    words_up_to,
)

WEIGHED = ["delay:s=0.5", "alignatt:s=0.5", "ending:p=0.9", "adaptive-wait"]
SPECS = ["agreement", "agreement:n=3", "hold:n=1", "wait:k=3", *WEIGHED]


# Policies by themselves


def open_words(*numbers):
    return [OpenWord(f"w{at}", number) for at, number in enumerate(numbers)]


def stable(spec, *numbers, steps=9, committed=0):
    return policy_of(spec).stable(Hypotheses([open_words(*numbers)], steps, committed))


@pytest.mark.parametrize("spec", ["delay:s=0.5", "alignatt:s=0.5", "ending:p=0.5"])
def test_words_before_the_first_with_too_little_evidence_are_committed(spec):
    assert stable(spec, 0.9, 0.5, 0.49, 0.9) == 2
    assert stable(spec, 0.9, 0.6) == 2
    assert stable(spec, 0.1, 0.6) == stable(spec) == 0


@pytest.mark.parametrize("name", ["delay", "alignatt"])
def test_a_larger_threshold_never_commits_more(name):
    draw = random.Random(0)
    for _ in range(50):
        numbers = [draw.uniform(0, 3) for _ in range(8)]
        counts = [stable(f"{name}:s={s / 4}", *numbers) for s in range(14)]
        assert counts == sorted(counts, reverse=True) and counts[0] == 8 and counts[-1] == 0


@pytest.mark.parametrize("hold_s", [0.0, 0.3, 1.0, 5.0])
def test_on_diagonal_attention_exactly_the_tokens_before_the_last_seconds_are_committed(hold_s):
    frame_s, frames, per_word = 0.04, 60, 6
    attended = range(per_word // 2, frames, per_word)
    numbers = [(frames - frame) * frame_s for frame in attended]
    expected = sum(frame <= frames - hold_s / frame_s + 1e-9 for frame in attended)
    assert stable(f"alignatt:s={hold_s}", *numbers) == expected


# Wait-k on table models


def simultaneous(policy, table, source, probability=None):
    """Words of a translation that are committed at each step, of re-translated prefixes."""
    commits, committed, delays = Commits(policy), [], []
    for step in range(1, len(source) + 1):
        text = table(source[:step])
        numbers = [probability(word, step) for word in text] if probability else None
        begin, end = commits.offer(text, numbers)
        end = len(text) if step == len(source) else end
        committed += text[begin:end]
        delays += [float(step)] * (end - begin)
    return committed, delays


def translation(source):
    """Word t needs the source up to word t + 1; where that is missing, it is guessed."""
    known = [f"{word}.{after}" for word, after in itertools.pairwise(source)]
    return [*known, f"{source[-1]}.?", "guess", "guess"][: len(source)]


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
def test_wait_k_is_its_definition_on_every_source(k):
    """Word t is that of the translation of the first t + k - 1 words of the source."""
    for source in itertools.product("abc", repeat=5):
        found, delays = simultaneous(Wait(k), translation, source)
        read = [min(t + k, 5) for t in range(5)]
        assert found == [translation(source[:g])[t] for t, g in enumerate(read)]
        assert delays == read
        assert average_lagging(delays, 5.0) == pytest.approx(min(k, 5))
        if k >= 5:
            assert found == translation(source)  # as if all had been heard


@pytest.mark.parametrize("k", [1, 3])
def test_adaptive_wait_between_equal_bounds_is_wait_k(k):
    adaptive = AdaptiveWait(least=k, most=k, first=0.0, last=0.0)
    for source in itertools.product("ab", repeat=6):
        probability = lambda word, step: 0.5  # noqa: E731
        assert simultaneous(adaptive, translation, source, probability) == simultaneous(
            Wait(k), translation, source
        )


def test_adaptive_wait_is_its_definition_on_every_probability():
    policy = AdaptiveWait(least=1, most=3, first=0.9, last=0.1)
    assert [policy.threshold(lag) for lag in (1, 2, 3)] == pytest.approx([0.9, 0.5, 0.1])
    for numbers in itertools.product((0.05, 0.3, 0.7, 0.95), repeat=4):
        for steps in range(1, 7):
            written = 0  # read or write, one word at a time
            for number in numbers:
                lag = steps - written
                if lag < 1 or (lag <= 3 and number < policy.threshold(lag)):
                    break
                written += 1
            words = [open_words(*numbers)]
            assert policy.stable(Hypotheses(words, steps, 0)) == written


# Evidence of words


def test_a_word_has_the_least_evidence_of_its_tokens():
    names = {1: " he", 2: "llo", 3: " wor", 4: "ld", 5: "!", 9: ""}
    text = lambda ids: "".join(names[token] for token in ids).strip()  # noqa: E731
    tokens = [
        Token.weighed(token, number)
        for token, number in zip((9, 1, 2, 3, 4, 5, 9), (0.0, 3, 2, 5, 4, 1, 0.0), strict=True)
    ]
    assert evidence_of(tokens, [" hello", " world!"], text) == [2, 1]
    assert evidence_of(tokens, list("helloworld!"), text) == [3, 3, 2, 2, 2, 5, 5, 5, 4, 4, 1]


def test_tokens_of_one_character_count_together():
    """Bytes of a character, of which the text shows nothing until the last."""
    parts = {1: b" a", 2: b"\xe4\xbd", 3: b"\xa0", 4: b"\xe5\xa5", 5: b"\xbd"}

    def text(ids):
        return b"".join(parts[int(token)] for token in ids).decode(errors="replace").strip()

    tokens = [Token.weighed(at + 1, number) for at, number in enumerate((9, 8, 0.1, 0.2, 7))]
    assert evidence_of(tokens, [" a", "你", "好"], text) == [9, 0.1, 0.2]


@pytest.mark.parametrize("samples", [32_000, 32_001, 33_333])
def test_only_a_window_that_another_follows_certainly_goes_on(samples):
    """Whatever is left over of a frame: the last words of the audio have little evidence."""
    transcriber = Transcriber.from_pretrained("zoo:whisper-synth", device="cpu")
    wave = speech_test()[3].samples()[:samples]
    item = {"audio": wave, "of_stream": {"evidence": "ending"}}
    numbers = [token.evidence for segment in transcriber(item).segments for token in segment.tokens]
    assert max(numbers) > 0.9 and numbers[-1] < 0.5


def test_words_that_vanish_do_not_swallow_as_many_new_ones():
    commits = Commits(Wait(1))
    for words in (["a"], ["a", "b"], ["a", "b", "c"]):
        commits.offer(words)
    assert commits.offer([]) == (0, 0)
    commits.forget([])  # all audio so far
    assert commits.offer(["d", "e"])[0] == 0


# Streams over all policies


class Weighing(Hearer):
    """Says for each word how much evidence there is for it, as `Evidence` would."""

    def __init__(self, **options):
        super().__init__(timed=True, **options)
        self.recognizer = SimpleNamespace(**vars(Hearer.recognizer), text=self.text)
        self.names = {}

    def text(self, tokens):
        return " ".join(self.names[int(token)] for token in tokens)

    def __call__(self, item):
        found = super().__call__(item)
        length_s = len(item["audio"]) / RATE
        kind = item["of_stream"]["evidence"]
        for segment in found.segments:
            for word in segment.words:
                number = self.names.setdefault(len(self.names), word.text.strip())
                whole = number.startswith("w")
                evidence = {"attention": length_s - word.end_s}.get(kind, float(whole))
                segment.tokens.append(Token.weighed(len(self.names) - 1, evidence))
        return found


@pytest.fixture(autouse=True)
def _evidence_of_any_kind(monkeypatch):
    monkeypatch.setattr(setting, "Evidence", lambda _: SimpleNamespace(check=lambda kind: None))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("step_s", [0.5, 1.0])
def test_committed_text_is_the_whole_text_and_never_changes(spec, step_s):
    samples, wait = spoken(60), spec.startswith("wait")
    updates = updates_of(Stream(Weighing(), spec, step_s), samples)
    if not wait:  # a schedule does not look at what it commits
        assert text_of(updates) == words_up_to(60)
    words = [word for update in updates for word in update.words]
    assert "".join(word.text for word in words) == text_of(updates)
    assert not any(update.provisional for update in updates[-1:])


@pytest.mark.parametrize("spec", SPECS)
def test_blocks_do_not_matter_for_any_policy(spec):
    for seed in range(3):
        draw, samples = random.Random(seed), spoken(40)
        known = [(u.audio_s, u.committed) for u in updates_of(Stream(Weighing(), spec), samples)]
        sizes = iter(partial(draw.choice, [0, 1, 3, 10, 33, 200]), None)
        cut = updates_of(Stream(Weighing(), spec), samples, sizes)
        assert [(u.audio_s, u.committed) for u in cut] == known


@pytest.mark.parametrize("spec", SPECS)
def test_a_policy_that_never_finds_a_word_stable_loses_no_word(spec, monkeypatch):
    monkeypatch.setattr(type(policy_of(spec)), "stable", lambda self, hypotheses: 0)
    hearer = Weighing()
    updates = updates_of(Stream(hearer, spec), spoken(60))
    assert text_of(updates) == words_up_to(60)
    assert max(hearer.lengths) <= Hearer.window_s * RATE


@pytest.mark.parametrize("spec", ["alignatt:s=0.05", "delay:s=0.05"])
def test_a_word_before_the_last_seconds_is_committed_in_the_first_hypothesis_that_has_it(spec):
    """Where agreement needs two hypotheses."""
    samples, committed = spoken(60), 0
    for update in updates_of(Stream(Weighing(), spec, 0.5), samples)[:-1]:
        committed += len(update.committed)
        complete = samples[: round(update.audio_s * RATE) - 1].tolist()
        assert committed == sum(complete.count(word) == WORD for word in range(1, 61))


def test_evidence_that_a_model_cannot_give_is_refused_by_name(monkeypatch):
    def check(kind):
        raise OptionError(f"{kind} does not work with Hearer")

    monkeypatch.setattr(setting, "Evidence", lambda _: SimpleNamespace(check=check))
    with pytest.raises(OptionError, match="attention does not work with Hearer"):
        Stream(Weighing(), "alignatt")
