"""Streams: on recordings of ten samples a second whose values are words, and on the zoo's model."""

import contextlib
import itertools
import pickle
import random
import time
from collections import namedtuple
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from mmdecode.asr.results import Segment, Transcript, Word
from mmdecode.asr.streaming import Stream, policy_of
from mmdecode.asr.streaming.commits import Commits, covered
from mmdecode.asr.streaming.hypothesis import words_of
from mmdecode.asr.streaming.policies import Agreement, Hold, Hypotheses, OpenWord
from mmdecode.asr.streaming.stream import redrafting
from mmdecode.asr.transcriber import Transcriber
from mmdecode.decoder import Decoder
from mmdecode.draft.source import Source
from mmdecode.errors import InputError, OptionError, UnknownNameError
from mmdecode.evaluation.speed.latency import StreamMeter
from tests.support import tiny_recognizers

RATE, WINDOW_S, WORD, GAP = 10, 8.0, 3, 1


def spoken(count, sentence=5, pause=5, first=1):
    """Word n is three samples of n; sentences have pauses after them."""
    samples = []
    for word in range(first, first + count):
        samples += [word] * WORD + [0] * (pause if word % sentence == 0 else GAP)
    return np.array(samples, np.float32)


def words_up_to(count, first=1):
    return "".join(f" w{word}" for word in range(first, first + count))


Options = namedtuple("Options", "word_timestamps")


class Hearer:
    """Hears whole words; of a word that is cut off it makes up another, and perhaps of more.

    Args:
        timed: Whether words have times.
        wild: How many of the last words it makes up.
        in_silence: What it makes up where nobody speaks.
    """

    sampling_rate, window_s = RATE, WINDOW_S
    recognizer = SimpleNamespace(
        kept_s=WINDOW_S,
        window_s=WINDOW_S,
        capabilities=SimpleNamespace(timestamps=True, drafts=False),
        encoder_cache=lambda: None,
    )
    decoder = corrector = None

    def __init__(self, timed=False, wild=0, in_silence=""):
        self.options = Options(timed)
        self.wild, self.in_silence = wild, in_silence
        self.ghosts, self.lengths = 0, []

    def invented(self):
        self.ghosts += 1
        return f"x{self.ghosts}"

    def __call__(self, item):
        samples = [int(value) for value in item["audio"]]
        self.lengths.append(len(samples))
        sentences, at = [[]], 0
        while at < len(samples):
            end = at
            while end < len(samples) and samples[end] == samples[at]:
                end += 1
            if samples[at]:
                text = f"w{samples[at]}" if end - at == WORD else self.invented()
                sentences[-1].append([text, at / RATE, end / RATE])
            elif end - at > GAP and sentences[-1]:
                sentences.append([])
            at = end
        sentences = [words for words in sentences if words]
        for word in [word for words in sentences for word in words][::-1][: self.wild]:
            word[0] = self.invented()
        segments = [self.segment(words) for words in sentences]
        if not segments and self.in_silence:
            segments = [self.segment([[w, 0.0, 1.0] for w in self.in_silence.split()])]
        text = "".join(segment.text for segment in segments)
        return Transcript(
            source="", index=0, text=text, segments=segments, language="en",
            duration_s=len(samples) / RATE, tokens=[], stats={},
        )  # fmt: skip

    def segment(self, words):
        timed = [Word(text=f" {w}", start_s=a, end_s=b, confidence=1.0) for w, a, b in words]
        return Segment(
            start_s=words[0][1],
            end_s=words[-1][2],
            text=" ".join(word for word, _, _ in words),
            tokens=[],
            words=timed if self.options.word_timestamps else None,
        )


def blocks_of(samples, sizes):
    at = 0
    while at < len(samples):
        size = next(sizes)
        yield samples[at : at + size]
        at += size


def updates_of(stream, samples, sizes=None):
    sizes = sizes or iter(lambda: 7, None)
    found = [update for block in blocks_of(samples, sizes) for update in stream.feed(block)]
    return [*found, stream.finish()]


def text_of(updates):
    return "".join(update.text for update in updates)


# What is said once


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("policy", ["agreement", "agreement:n=3", "hold:n=1"])
@pytest.mark.parametrize("step_s", [0.5, 1.0, 2.0])
def test_every_word_is_committed_once_whatever_was_hallucinated_in_between(timed, policy, step_s):
    updates = updates_of(Stream(Hearer(timed), policy, step_s), spoken(60))
    assert text_of(updates) == words_up_to(60)
    assert sum(len(update.committed) for update in updates) == 60


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("wild", [0, 2])
def test_blocks_do_not_matter(seed, wild):
    draw, samples = random.Random(seed), spoken(50)
    known = [
        (u.audio_s, u.committed, u.provisional)
        for u in updates_of(Stream(Hearer(wild=wild)), samples)
    ]
    sizes = iter(lambda: draw.choice([0, 1, 3, 10, 33, 200]), None)
    cut = updates_of(Stream(Hearer(wild=wild)), samples, sizes)
    assert [(u.audio_s, u.committed, u.provisional) for u in cut] == known


@pytest.mark.parametrize("seed", range(20))
def test_committed_words_are_not_repeated_where_the_model_changes_its_mind(seed):
    """Hypotheses of a growing text, in which any word may be heard wrongly, dropped or doubled."""
    draw, commits, shown = random.Random(seed), Commits(Agreement(2)), []
    for length in range(3, 60):
        words = []
        for word in range(length):
            kind = draw.random() if word < length - 4 else 1.0  # it changes its mind on old words
            words += [f"w{word}"] * (2 if kind < 0.01 else kind > 0.02)
            if kind > 0.98 and kind < 1:
                words[-1:] = ["other"]
        begin, end = commits.offer(words)
        assert 0 <= begin <= end <= len(words)
        shown += words[begin:end]
    right = [f"w{word}" for word in range(len(shown))]
    wrong = sum(a != b for a, b in zip(shown, right, strict=True))
    assert wrong <= 2 and len(shown) >= 50


def test_words_agree_whatever_their_case_and_marks_and_the_newest_is_committed():
    commits = Commits(Agreement(2))
    assert commits.offer([" The", " end."]) == (0, 0)
    assert commits.offer([" the", " end,", " of"]) == (0, 2)
    assert commits.offer([" The", " end", " Of", " it"]) == (2, 3)


def stable(policy, *texts):
    return policy.stable(Hypotheses([list(map(OpenWord, text)) for text in texts]))


def test_policies():
    assert stable(Agreement(2), "ab") == 0
    assert stable(Agreement(2), "abc", "abde") == 2
    assert stable(Agreement(2), "a", "bc", "bcd") == 2
    assert stable(Agreement(3), "a", "bc", "bcd") == 0
    assert stable(Agreement(1), "ab") == 2
    assert stable(Hold(3), "a", "abcd") == 1
    assert stable(Hold(3), "ab") == 0


@pytest.mark.parametrize(
    ("committed", "words", "count"),
    [
        ("", "a b", 0),
        ("a b", "a b c", 2),
        ("a b c", "a b", 2),
        ("a b", "b c", 1),  # the first is not heard any more
        ("a b c", "a x c d", 3),
        ("a b c", "a c d e", 2),
        ("a b", "a x b c", 2),  # as likely replaced as put between
        ("no no", "no no no", 2),
        ("a b", "x y z", 0),  # made up, and taken back
        ("a", "x y z", 1),
        ("a b", "", 0),
    ],
)
def test_where_committed_words_end_in_a_new_hypothesis(committed, words, count):
    assert covered(committed.split(), words.split()) == count


# What cannot go on for ever


@pytest.mark.one_in(2)
@pytest.mark.parametrize("timed", [False, True])
def test_memory_and_steps_do_not_grow_with_three_hours(timed):
    hearer = Hearer(timed, wild=1)
    stream, samples, sizes, words = Stream(hearer), spoken(1000), [], 0
    rounds = 3 * 3600 * RATE // len(samples)
    for _ in range(rounds):
        words += sum(len(update.committed) for update in stream.feed(samples))
        hearer.lengths = [max(hearer.lengths)]
        state = {key: value for key, value in vars(stream).items() if key != "transcriber"}
        sizes.append(len(pickle.dumps(state)))
    assert max(hearer.lengths) <= WINDOW_S * RATE
    assert max(sizes) < 3 * sizes[0]
    assert words > 0.95 * 1000 * rounds


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("step_s", [0.5, 3.0])
@pytest.mark.parametrize("sentence", [5, 10_000])
def test_where_nothing_is_ever_agreed_on_text_comes_all_the_same(timed, step_s, sentence):
    hearer = Hearer(timed, wild=10_000)
    updates = updates_of(Stream(hearer, step_s=step_s), spoken(200, sentence))
    assert max(hearer.lengths) <= WINDOW_S * RATE
    committed_at = [0.0, *(u.audio_s for u in updates if u.committed)]
    waits = [later - before for before, later in pairwise(committed_at)]
    assert max(waits) <= WINDOW_S + step_s
    assert sum(len(update.committed) for update in updates) >= 190


@pytest.mark.parametrize("timed", [False, True])
def test_a_sentence_longer_than_any_window_loses_no_word_but_where_one_is_cut(timed):
    updates = updates_of(Stream(Hearer(timed)), spoken(100, sentence=10_000))
    words = text_of(updates).split()
    assert len(words) >= 95
    if timed:  # cuts are between words
        assert text_of(updates) == words_up_to(100)


@pytest.mark.parametrize("noise", ["", "thank you", " ".join(["thank you"] * 30)])
@pytest.mark.parametrize("timed", [False, True])
def test_a_long_pause_neither_loops_nor_holds_up_what_comes_after(noise, timed):
    pause = np.zeros(120 * RATE, np.float32)
    samples = np.concatenate([spoken(10), pause, spoken(10, first=11)])
    hearer = Hearer(timed, in_silence=noise)
    updates = updates_of(Stream(hearer), samples)
    text = text_of(updates)
    assert text.count("thank") <= 120 / (WINDOW_S / 2) + 1  # once per window at most
    assert text.replace(" thank", "").replace(" you", "") == words_up_to(20)
    assert max(hearer.lengths) <= WINDOW_S * RATE


# Ends and errors


def test_nothing_in_is_nothing_out():
    hearer = Hearer()
    update = Stream(hearer).finish()
    assert (update.audio_s, update.ready_s, update.committed, update.provisional) == (0, 0, [], [])
    stream = Stream(hearer)
    assert stream.feed(np.zeros(0, np.float32)) == []
    assert stream.finish().committed == []
    assert hearer.lengths == []


def test_what_is_pending_at_the_end_is_committed_without_another_pass():
    hearer = Hearer()
    stream = Stream(hearer)
    stream.feed(spoken(5, sentence=100)[:20])
    passes = len(hearer.lengths)
    update = stream.finish()
    assert update.text.endswith(" w5") and update.provisional == []
    assert len(hearer.lengths) == passes


def test_a_finished_stream_takes_nothing_more():
    stream = Stream(Hearer())
    stream.finish()
    with pytest.raises(OptionError, match="is finished; make a new"):
        stream.feed(np.zeros(3, np.float32))


class Flaky(Hearer):
    """Raises in some of its calls."""

    def __init__(self, *calls):
        super().__init__()
        self.calls = list(calls)

    def __call__(self, item):
        found = super().__call__(item)
        if len(self.lengths) in self.calls:
            raise InputError("not now")
        return found


@pytest.mark.parametrize("calls", [(1,), (3,), (2, 3), (4, 5, 6), range(1, 30)])
@pytest.mark.parametrize("size", [7, 25, 1000])
def test_a_step_that_raises_is_taken_again_and_loses_no_word(calls, size):
    hearer, samples, updates = Flaky(*calls), spoken(8), []
    stream = Stream(hearer)
    for block in blocks_of(samples, iter(lambda: size, None)):
        with contextlib.suppress(InputError):
            updates += stream.feed(block)
    while not stream.ended:
        with contextlib.suppress(InputError):
            updates.append(stream.finish())
    assert text_of(updates) == words_up_to(8)
    assert max(hearer.lengths) <= WINDOW_S * RATE


def test_updates_know_when_they_would_have_been_ready(monkeypatch):
    clock = iter(np.arange(0, 100, 1.5))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    updates = Stream(Hearer()).feed(spoken(10)[:30])
    assert [update.audio_s for update in updates] == [1, 2, 3]
    assert [update.ready_s for update in updates] == [2.5, 4.0, 5.5]  # each waits for the last


@pytest.mark.parametrize(
    ("samples", "rate", "message"),
    [
        (np.zeros(5, np.int16), None, "samples are int16 .* divide 16-bit integers by 32768"),
        (np.zeros(5), None, "samples are float64 of shape"),
        (np.zeros((2, 5), np.float32), None, r"shape \(2, 5\); expected .* of one channel"),
        ([0.0], None, "samples are list"),
        (np.array([0, np.nan], np.float32), None, "NaN or infinite, after 1 s"),
        (np.array([0, np.inf], np.float32), None, "NaN or infinite"),
        (np.zeros(5, np.float32), 44_100, "at 44100 Hz; the model takes 10 Hz"),
    ],
)
def test_samples_that_cannot_be_read_are_refused_and_change_nothing(samples, rate, message):
    stream = Stream(Hearer())
    first = stream.feed(spoken(10)[:12])
    with pytest.raises(InputError, match=message):
        stream.feed(samples, rate)
    rest = stream.feed(spoken(10)[12:], RATE)
    assert text_of([*first, *rest, stream.finish()]) == words_up_to(10)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"policy": "agrement"}, UnknownNameError, "no policy named 'agrement'; did you mean"),
        ({"policy": "agreement:n=0"}, OptionError, "a whole number from 1 on"),
        ({"policy": "hold:n=1.5"}, OptionError, "policy hold: n=1.5; expected a whole number"),
        ({"policy": "hold:k=1"}, OptionError, "no option 'k'; expected 'hold:n=3'"),
        ({"step_s": 0.0}, OptionError, r"a step of 0.0 s \(step_s\); expected more than 0"),
        ({"step_s": 5.0}, OptionError, "at most 4 s, half of the audio"),
        ({"longest_s": 9.0}, OptionError, "at most a window of the model, 8 s"),
        ({"longest_s": 0.0}, OptionError, "longest_s=0.0"),
        ({"step_s": float("nan")}, OptionError, "a step of nan s"),
    ],
)
def test_options_out_of_range_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        Stream(Hearer(), **options)


def test_a_policy_from_a_string():
    assert policy_of("agreement") == Agreement(2)
    assert policy_of("hold:n=5") == Hold(5)


def test_words_of_languages_without_spaces_are_characters():
    segment = Segment(start_s=0, end_s=1, text="你好", tokens=[])
    assert words_of(segment, "zh") == ["你", "好"]
    assert words_of(segment, None) == [" 你好"]


# With a model


@pytest.fixture(scope="module")
def clip():
    from mmdecode.zoo.speech import speech_test

    return next(clip for clip in speech_test() if 4 < clip.duration_s < 5)


def test_a_clip_as_it_comes_has_the_words_of_the_whole(trained, clip):
    transcriber = Transcriber.from_pretrained(trained, device="cpu", word_timestamps="ctc")
    sizes = iter(lambda: 3001, None)
    updates = updates_of(Stream(transcriber), clip.samples(), sizes)
    whole = transcriber(clip.samples())
    assert text_of(updates).strip() == whole.text
    words = [word for update in updates for word in update.words]
    assert "".join(word.text for word in words) == text_of(updates)
    ends = [word.end_s for word in words]
    assert ends == sorted(ends) and ends[-1] <= clip.duration_s + 0.01
    early = [word for update in updates for word in update.words if word.start_s > update.audio_s]
    assert not early
    meter = StreamMeter()
    for update in updates:
        meter.add(update)
    report = meter.report(len(clip.text.split()))
    assert report.committed_words == len(words) and 0 < report.lag_s < 3
    drafted = Transcriber.from_pretrained(
        trained, draft="lookup", device="cpu", word_timestamps="ctc"
    )
    again = updates_of(Stream(drafted), clip.samples(), sizes)
    assert [(u.committed, u.provisional) for u in again] == [
        (u.committed, u.provisional) for u in updates
    ]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("draft", "most"), [(None, 0.65), ("medusa", 0.9)])
def test_the_last_hypothesis_drafts_and_changes_no_word(clip, draft, most):
    found, passes = [], []
    for redraft in (False, True):
        transcriber = Transcriber.from_pretrained("zoo:whisper-synth", draft=draft, device="cpu")
        stream = Stream(transcriber, step_s=0.5, redraft=redraft)
        updates = updates_of(stream, clip.samples(), iter(lambda: 4000, None))
        found.append([(update.committed, update.provisional) for update in updates])
        passes.append(stream.transcriber.stats.as_dict()["row_passes"])
    assert found[0] == found[1]
    assert passes[1] <= most * passes[0], passes


def test_a_draft_that_could_change_the_text_is_not_put_before_another(trained):
    plain = Transcriber.from_pretrained(trained, device="cpu")
    assert isinstance(redrafting(plain).draft, Source)
    searching = plain.with_options(beams=2)
    assert redrafting(searching) is searching.decoder
    relaxed = plain.with_options(Decoder("lookup", accept="typical"))
    assert redrafting(relaxed) is relaxed.decoder


def test_the_language_is_not_settled_before_the_first_word():
    asked = []

    class Detects(Hearer):
        def __call__(self, item):
            asked.append(item["language"])
            return super().__call__(item)

    updates_of(Stream(Detects(), step_s=1.0), spoken(30), itertools.repeat(10))
    settled = asked.index("en")
    assert settled >= 2 and set(asked[settled:]) == {"en"} and set(asked[:settled]) == {None}


SAMPLE_RATE = 16_000


@pytest.fixture(scope="module")
def windowed():
    """A recogniser whose windows are cut at pauses."""
    return Transcriber(*tiny_recognizers.moonshine())


def bursts(count, seed=0):
    """Noise with pauses."""
    random = np.random.default_rng(seed)
    part = [
        0.2 * random.standard_normal(SAMPLE_RATE),
        1e-4 * random.standard_normal(SAMPLE_RATE // 3),
    ]
    return np.concatenate(part * count).astype("f4")


def test_a_model_without_timestamps_streams_in_windows_cut_at_pauses(windowed, monkeypatch):
    samples, texts = bursts(20), []
    for size in (len(samples), 7_777):
        stream = Stream(windowed, "hold:n=1", step_s=1.0, longest_s=4.0)
        lengths = []
        hear = stream.transcriber.recognizer.read

        def noted(recording, seek, count, hear=hear, lengths=lengths):
            lengths.append(count)
            return hear(recording, seek, count)

        monkeypatch.setattr(stream.transcriber.recognizer, "read", noted)
        updates = []
        for at in range(0, len(samples), size):
            updates += stream.feed(samples[at : at + size])
            assert len(stream._audio) <= 4.0 * SAMPLE_RATE
        updates.append(stream.finish())
        texts.append("".join(update.text for update in updates))
        assert max(lengths) <= 2.0 * SAMPLE_RATE, "windows are half of what is kept"
    assert texts[0] == texts[1] and texts[0].strip()
    assert windowed.options.window_s is None, "the transcriber itself stays as it is"


def test_what_a_stream_keeps_by_itself_is_short_where_windows_are_cut(windowed):
    assert Stream(windowed)._longest == 12 * SAMPLE_RATE
    with pytest.raises(OptionError, match="longest_s=31"):
        Stream(windowed, longest_s=31)
    short = Stream(windowed.with_options(window_s=5.0))
    assert short._longest == 12 * SAMPLE_RATE and short.transcriber.options.window_s == 5.0
    with pytest.raises(OptionError, match=r"longest_s=0.9; expected 1 s or more"):
        Stream(windowed, step_s=0.4, longest_s=0.9)
