"""What sounds made up next to a silence is skipped, and nothing else is touched."""

import math

import numpy as np
import pytest

from mmdecode.asr import TranscribeOptions, Transcriber
from mmdecode.asr.decoding.hallucinations import Verdict, WindowTimes, is_anomalous, judge
from mmdecode.asr.results import Word
from mmdecode.errors import OptionError
from mmdecode.zoo.speech import speech_test


def word(start, length=0.3, confidence=0.9, text=" word"):
    return Word(text=text, start_s=start, end_s=start + length, confidence=confidence)


def segment(start, anomalous=False, count=3):
    return [word(start + 0.4 * n, confidence=0.05 if anomalous else 0.9) for n in range(count)]


WINDOW = WindowTimes(start=60.0, end=90.0, audio_end=90.0, recording_end=300.0, previous_end=59.0)


@pytest.mark.parametrize(
    ("words", "anomalous"),
    [
        ([], False),
        ([word(0), word(1)], False),
        ([word(0, confidence=0.14), word(1, confidence=0.14)], True),
        ([word(0, confidence=0.16), word(1, confidence=0.14)], False),
        # 15 points a second below 0.133 s, one above 2 s, three in all
        ([word(n, length=0.065) for n in range(3)], True),
        ([word(n, length=0.07) for n in range(3)], False),
        ([word(n, length=0.06) for n in range(2)] + [word(9)] * 6, False),
        ([word(0, length=5.1), *[word(9)] * 6], True),
        ([word(0, length=4.9), *[word(9)] * 6], False),
        # the first eight alone
        ([word(0)] * 8 + [word(9, length=9.0)], False),
        ([word(0)] * 7 + [word(9, length=9.0)], True),
        # marks are no words
        ([word(0), word(1, length=0.0, text=".")], False),
    ],
)
def test_anomalous_words(words, anomalous):
    assert is_anomalous(words) == anomalous


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        ([segment(61), segment(70)], None),
        # speech at both sides, without a pause
        ([segment(68), segment(69.2, True), segment(70.4)], None),
        # a silence before, none after
        ([segment(66), segment(75, True), segment(76.2)], None),
        # a silence after, none before
        ([segment(68), segment(69.2, True), segment(80)], None),
        ([segment(66), segment(75, True), segment(80)], (1, 75)),
        # another doubtful one after counts as silence
        ([segment(66), segment(75, True), segment(76.2, True), segment(77.4)], (1, 75)),
        # so do the ends of the window
        ([segment(61, True), segment(70)], (0, 61)),
        ([segment(60.5, True), segment(70)], (0, 61)),
        ([segment(66), segment(87.5, True)], (1, 87.5)),
        # a window is heard again from where its first words begin
        ([segment(65, True), segment(66.2)], (0, 65)),
        ([[], segment(65, True), segment(66.2)], (0, 65)),
    ],
    ids=str,
)
def test_what_is_kept_and_where_the_next_window_begins(segments, expected):
    found = judge(segments, WINDOW, 2.5)
    assert (found and (found.keep, found.next_start)) == expected


def test_the_end_and_the_beginning_of_a_recording():
    ending = WindowTimes(
        start=60.0, end=90.0, audio_end=90.0, recording_end=90.0, previous_end=59.0
    )
    hallucinated = [segment(66), segment(87.5, True)]
    assert judge(hallucinated, ending, 2.5) == Verdict(1, math.inf)
    assert judge(hallucinated, WINDOW, 2.5) == Verdict(1, 87.5)
    first = WindowTimes(start=0.0, end=30.0, audio_end=30.0, recording_end=80.0, previous_end=0.0)
    assert judge([segment(2.2, True), segment(9)], first, 2.5).keep == 0


@pytest.fixture(scope="module")
def noisy_pauses():
    """Two recordings of three clips with noise between them, and what is said there."""
    random, clips = np.random.default_rng(0), speech_test()
    recordings = []
    for chosen in (clips[10:13], clips[15:18]):
        parts = []
        for clip in chosen:
            pause = (0.03 * random.standard_normal(12 * 16_000)).astype(np.float32)
            parts += [clip.samples(), pause]
        recordings.append((np.concatenate(parts), " ".join(clip.text for clip in chosen)))
    return recordings


def transcriber(trained, **options):
    options = {"word_timestamps": "ctc", "batch_size": 2} | options
    return Transcriber.from_pretrained(trained, device="cpu", **options)


@pytest.mark.slow
def test_words_hallucinated_in_noise_are_skipped_in_a_batch_as_alone(trained, noisy_pauses):
    waves = [wave for wave, _ in noisy_pauses]
    reference = [len(text.split()) for _, text in noisy_pauses]
    guard = transcriber(trained, hallucination_silence_threshold=1.0)
    plain = [len(found.text.split()) for found in transcriber(trained)(waves)]
    found = guard(waves)
    skipped = [len(one.text.split()) for one in found]
    hallucinated, left = (
        sum(np.subtract(counts, reference).clip(0)) for counts in (plain, skipped)
    )
    assert hallucinated >= 10 and left <= hallucinated / 2
    assert min(np.divide(skipped, reference)) > 0.85, "what was said is still there"
    assert [guard(wave).text for wave in waves] == [one.text for one in found]


def test_speech_without_silence_is_never_changed(trained):
    paths = [clip.path for clip in speech_test()[:6]]
    guard = transcriber(trained, hallucination_silence_threshold=1.0)
    for plain, guarded in zip(transcriber(trained)(paths), guard(paths), strict=True):
        assert plain == guarded


@pytest.mark.parametrize(
    "options",
    [
        {"word_timestamps": False},
        {"hallucination_silence_threshold": -1.0},
        {"hallucination_silence_threshold": math.inf},
        {"mode": "chunked"},
    ],
)
def test_what_does_not_fit_is_refused(options):
    given = {"word_timestamps": True, "hallucination_silence_threshold": 2.0} | options
    with pytest.raises(OptionError, match="hallucination_silence_threshold="):
        TranscribeOptions(**given)
