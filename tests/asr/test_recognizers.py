"""Recognisers without timestamps: what plain `generate` says of windows that end at pauses."""

import itertools
import logging
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmdecode import Decoder
from mmdecode.asr import FALLBACK, Failure, TranscribeOptions, Transcriber
from mmdecode.asr.audio.reading import source_of
from mmdecode.asr.decoding import beams, fallback
from mmdecode.asr.decoding.chunks import join_windows
from mmdecode.asr.decoding.fallback import Result
from mmdecode.asr.recognizers.generic import FAINTEST, LEAST_S
from mmdecode.asr.recognizers.pauses import pause_in
from mmdecode.asr.results import Piece
from mmdecode.draft.lookup import PromptLookup
from mmdecode.errors import IncompatibleError, OptionError, UnsupportedModelError
from tests.support.tiny_recognizers import MODELS, tokenizer

RATE = 16_000
KINDS = pytest.mark.parametrize("kind", MODELS)
QUICK = pytest.mark.parametrize(
    "kind", ["moonshine", pytest.param("speech_to_text", marks=pytest.mark.slow)]
)


@pytest.fixture(scope="module")
def parts():
    """Model and processor of each kind."""
    return {kind: make() for kind, make in MODELS.items()}


@pytest.fixture
def made(parts):
    def make(kind, decoder=None, **options):
        return Transcriber(*parts[kind], decoder, TranscribeOptions(**options))

    return make


def alone(transcriber, samples, **options):
    """Tokens of plain `generate` for one window, without start and end."""
    samples = np.pad(samples, (0, max(0, RATE // 10 - len(samples))))
    inputs = transcriber.processor.feature_extractor(
        samples, sampling_rate=RATE, return_tensors="pt"
    )
    most = transcriber.recognizer.most_tokens(len(samples) / RATE)
    found = transcriber.model.generate(**inputs, max_new_tokens=most, **options)[0, 1:].tolist()
    return found[: found.index(1)] if 1 in found else found


def spoken(*seconds, seed=0):
    """Bursts of noise with pauses of 0.3 s between them."""
    random = np.random.default_rng(seed)
    parts = [np.zeros(0)]
    for length in seconds:
        parts += [0.2 * random.standard_normal(round(length * RATE)), np.zeros(round(0.3 * RATE))]
    return (np.concatenate(parts) + 1e-4 * random.standard_normal(sum(map(len, parts)))).astype(
        "f4"
    )


@pytest.mark.parametrize(
    ("kind", "batch_size"), [("moonshine", 1), ("moonshine", 3), ("speech_to_text", 3)]
)
def test_a_recording_of_one_window_is_what_plain_generate_says_of_it(made, kit, kind, batch_size):
    recordings = [kit.noise(s, seed=i) for i, s in enumerate((1.0, 2.0, 0.05, 3.3, 0.7))]
    ours = made(kind, batch_size=batch_size)
    expected = [alone(ours, samples) for samples in recordings]
    assert len({len(row) for row in expected}) > 1 or kind != "moonshine", "no row ends early"
    assert [t.tokens for t in ours(recordings)] == expected


def test_drafts_and_batches_change_no_token_of_moonshine(made, kit):
    recordings = [kit.noise(s, seed=i) for i, s in enumerate((1.0, 2.0, 0.4, 3.3))]
    for temperature in (0.0, 0.8):
        options = {"temperatures": (temperature,), "logprob_threshold": -math.inf}
        plain = made("moonshine", Decoder(seed=7), batch_size=1, **options)
        expected = [(t.tokens, t.segments) for t in plain(recordings)]
        for draft in (None, PromptLookup(3, 1)):
            decoder = Decoder(draft, seed=7)
            found = made("moonshine", decoder, batch_size=4, **options)(recordings)
            assert [t.tokens for t in found] == [tokens for tokens, _ in expected]
            for transcript, (_, segments) in zip(found, expected, strict=True):
                for one, other in zip(transcript.segments, segments, strict=True):
                    assert one.avg_logprob == pytest.approx(other.avg_logprob, abs=1e-4)


@QUICK
def test_a_sampled_window_does_not_depend_on_its_neighbours(made, kit, kind):
    recordings = [kit.noise(s, seed=i) for i, s in enumerate((1.0, 2.0, 0.5))]
    ours = made(kind, Decoder(seed=4), temperatures=(1.0,))
    expected = [ours(samples).tokens for samples in recordings]
    assert [t.tokens for t in ours(recordings)] == expected
    other = made(kind, Decoder(seed=5), temperatures=(1.0,))
    assert [t.tokens for t in other(recordings)] != expected


@KINDS
def test_a_long_recording_is_its_windows_and_they_follow_each_other(made, kind):
    samples = spoken(0.7, 0.9, 0.6, 1.1, 0.5)
    ours = made(kind, window_s=1.5, batch_size=2)
    found = ours(samples)
    assert found.timed_by == "windows"
    assert found.stats["windows"] == len(found.segments) > 3
    times = [round(t * RATE) for s in found.segments for t in (s.start_s, s.end_s)]
    assert times[0] == 0 and times[-1] == len(samples)
    assert times[1:-1:2] == times[2:-1:2], "no sample is heard twice or not at all"
    windows = [samples[a:b] for a, b in zip(times[::2], times[1::2], strict=True)]
    assert all(LEAST_S * RATE / 2 <= len(window) <= 1.5 * RATE for window in windows)
    quiet = [abs(samples[at - 80 : at + 80]).max() for at in times[1:-1:2]]
    assert max(quiet) < 0.01, "cut in the middle of speech"
    assert [s.tokens for s in found.segments] == [alone(ours, window) for window in windows]
    assert found.text == " ".join(s.text for s in found.segments if s.text)
    assert [s.text for s in ours.stream_segments(samples)] == [s.text for s in found.segments]


LOUD = st.lists(st.tuples(st.floats(0.02, 2.0), st.sampled_from([0.0, 1e-3, 0.3])), max_size=12)


def test_windows_hold_every_sample_and_none_is_too_long_or_short(parts):
    ends = set()

    @settings(max_examples=60, deadline=None)
    @given(sound=LOUD, rest=st.integers(1, 4000), window_s=st.sampled_from([0.5, 1.0, 2.3]))
    @example(sound=[(2.0, 0.3)] * 3, rest=100, window_s=0.5)  # no pause
    @example(sound=[(0.4, 0.3), (0.4, 0.0)] * 3, rest=100, window_s=1.0)
    def hold(sound, rest, window_s):
        ends.update(ends_of_windows(parts, sound, rest, window_s))

    hold()
    assert ends == {"joined", "apart", "last"}


def ends_of_windows(parts, sound, rest, window_s):
    """How the windows of a recording end, each checked."""
    found = []
    random = np.random.default_rng(len(sound))
    samples = np.concatenate(
        [a * random.standard_normal(round(s * RATE)) for s, a in sound] + [np.full(rest, 0.1)]
    )
    ours = Transcriber(*parts["moonshine"], None, TranscribeOptions(window_s=window_s)).recognizer
    recording = ours.open(source_of(samples.astype("f4"), RATE))
    seek, whole, joins = 0, ours.window_frames, False
    while seek < recording.frames:
        span = ours.span(recording, seek, [])
        assert 0 < span.frames <= whole
        if seek or span.following < recording.frames:
            assert span.frames >= min(LEAST_S * RATE, whole // 4)
        ends = seek + span.frames
        assert span.following == ends or (span.joined and seek < span.following < ends)
        if span.following == recording.frames:
            assert ends == recording.frames and not span.joined
            found.append("last")
        else:
            found.append("joined" if span.joined else "apart")
        seek, joins = span.following, span.joined
    assert seek == recording.frames and not joins
    return found


def test_a_window_ends_in_the_middle_of_its_longest_pause():
    samples = np.concatenate([spoken(1.0, 0.4), np.zeros(RATE // 5), spoken(0.6)])
    assert abs(pause_in(samples, RATE, 0) / RATE - 1.95) < 0.03  # 1.7 to 2.2
    assert abs(pause_in(samples[: round(1.8 * RATE)], RATE, 0) / RATE - 1.15) < 0.03
    assert pause_in(spoken(3.0)[: 3 * RATE], RATE, 0) is None
    assert pause_in(np.zeros(RATE), RATE, 0) is None
    assert pause_in(np.zeros(100), RATE, 0) is None


# ---- windows that overlap

WORDS = range(10, 100)
"""Tokens that begin a word; 100 to 200 go on."""


def joined(left, right, begin, starts=lambda token: token in WORDS):
    """From (start, end, tokens), the tokens."""
    made = [[Piece(a, b, t, Result([], 0.0)) for a, b, t in part] for part in (left, right)]
    found = join_windows(*made, begin, lambda token: token < 300, starts)
    for one, other in itertools.pairwise(found):
        assert one.start < one.end <= other.start
    return [piece.tokens for piece in found]


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        # words in the overlap are said once; both windows stay segments
        (
            [(0, 9, [11, 12, 13, 14, 15, 16, 17, 18, 19])],
            [(6, 15, [17, 18, 19, 20, 21, 22, 23, 24, 25])],
            [[11, 12, 13, 14, 15, 16, 17], [18, 19, 20, 21, 22, 23, 24, 25]],
        ),
        # nothing in common: each has the words of its half of the overlap
        (
            [(0, 9, [11, 12, 13, 14, 15, 16, 17, 18, 19])],
            [(6, 15, [30, 31, 32, 33, 34, 35, 36, 37, 38])],
            [[11, 12, 13, 14, 15, 16, 17], [31, 32, 33, 34, 35, 36, 37, 38]],
        ),
        # a short last window keeps what it alone heard
        (
            [(0, 9, [11, 12, 13, 14, 15, 16, 17, 18, 19])],
            [(6, 10, [30, 31, 32, 33])],
            [[11, 12, 13, 14, 15, 16, 17], [31, 32, 33]],
        ),
        # the shared tokens are in the middle of a word
        (
            [(0, 9, [11, 12, 13, 14, 15, 16, 107, 108, 19])],
            [(6, 15, [107, 108, 109, 21, 22, 23, 24, 25, 26])],
            [[11, 12, 13, 14, 15, 16, 107, 108, 109], [21, 22, 23, 24, 25, 26]],
        ),
        # a pause at the end of the first: its words seem later than they are
        (
            [(0, 9, [11, 12, 13, 14, 15, 16, 17, 18, 19])],
            [(6, 15, [18, 19, 20])],
            [[11, 12, 13, 14, 15, 16, 17, 18], [19, 20]],
        ),
        ([(0, 9, [11, 12, 13])], [], [[11, 12, 13]]),
        ([], [(6, 15, [11, 12, 13])], [[11, 12, 13]]),
        # a last window that has one word of its own, which both heard
        ([(0, 9, [11, 12, 13])], [(6, 9.2, [13])], [[11, 12], [13]]),
    ],
)
def test_texts_of_overlapping_windows_meet_at_a_word(left, right, expected):
    assert joined(left, right, 6.0) == expected


def test_texts_without_spaces_meet_anywhere():
    left, right = [(0, 9, list(range(101, 110)))], [(6, 15, list(range(107, 116)))]
    assert joined(left, right, 6.0) == [list(range(101, 108)), list(range(108, 116))]


@QUICK
def test_a_recording_without_pauses_has_windows_that_overlap_and_segments_that_do_not(
    made, kit, kind
):
    samples = np.random.default_rng(2).standard_normal(5 * RATE).astype("f4") * 0.1
    for options in ({"window_s": 1.5}, {"mode": "chunked", "overlap_s": 0.5, "window_s": 1.5}):
        ours = made(kind, **options)
        found = ours(samples)
        assert found.stats["windows"] > 3
        for one, other in itertools.pairwise(found.segments):
            assert one.start_s < one.end_s <= other.start_s
        start = ours.recognizer.starts_word
        for segment in found.segments[1:]:
            assert start(segment.tokens[0]) or not any(map(start, segment.tokens))
        assert any(start(segment.tokens[0]) for segment in found.segments[1:])
        all_tokens = [t for segment in found.segments for t in segment.tokens]
        assert all_tokens == found.tokens and found.tokens
    for batch_size in (1, 2):  # what was given out is not said again by a window that overlaps it
        ours = made(kind, window_s=1.5, batch_size=batch_size)
        found = ours(samples).segments
        assert [(s.start_s, s.tokens) for s in ours.stream_segments(samples)] == [
            (s.start_s, s.tokens) for s in found
        ]


# ---- refusals


@KINDS
@pytest.mark.parametrize(
    "options",
    [
        {"word_timestamps": "attention"},
        {"word_timestamps": True, "hallucination_silence_threshold": 1.0},
        {"task": "translate"},
        {"language": "de"},
        {"prompt": "names"},
        {"hotwords": "names"},
        {"condition_on_prev_tokens": True},
        {"no_speech_threshold": 0.6, "logprob_threshold": -1.0},
        {"padding": "silence"},
    ],
    ids=str,
)
def test_what_a_family_cannot_do_is_refused_by_name_and_works_without_it(made, kind, options):
    name = next(iter(options))
    with pytest.raises(OptionError, match=rf"^{name}=.*leave it out, or name a model.*--model"):
        made(kind, **options)


def test_whisper_is_refused_a_length_of_windows(model, processor, folder):
    with pytest.raises(OptionError, match=r"^window_s=5.*leave it out.*moonshine:tiny-en"):
        Transcriber.from_pretrained(folder, window_s=5)


@KINDS
def test_a_language_is_taken_where_the_configuration_names_it(kind):
    model, processor = MODELS[kind](language="en")
    for language in ("en", "English", "<|en|>"):
        Transcriber(model, processor, None, TranscribeOptions(language=language))
    with pytest.raises(
        OptionError, match=r"'de'.*transcribes only 'en'; leave the language out.*--model"
    ):
        Transcriber(model, processor, None, TranscribeOptions(language="de"))


def test_drafts_and_guides_need_an_adapter_and_views_of_the_waveform_a_family_that_has_them(made):
    with pytest.raises(IncompatibleError, match=r"no adapter.*leave them out.*mmdecode\.adapters"):
        made("speech_to_text", Decoder(PromptLookup()))
    with pytest.raises(IncompatibleError, match="no adapter"):
        made("speech_to_text", Decoder(guide="whisper_cd"))
    with pytest.raises(IncompatibleError, match=r"changes the waveform.*leave the guide out"):
        made("moonshine", Decoder(guide="whisper_cd"))


def test_a_processor_without_a_part_is_refused_and_the_part_is_named(parts):
    model, processor = parts["moonshine"]
    for given_, missing in (
        (processor.feature_extractor, "tokenizer"),
        (SimpleNamespace(tokenizer=tokenizer()), "feature extractor"),
    ):
        with pytest.raises(UnsupportedModelError, match=f"without a {missing}.*AutoProcessor"):
            Transcriber(model, given_)


# ---- searches and gates


@QUICK
def test_the_fallback_leaves_out_the_gate_that_needs_a_probability_of_silence(made, kit, kind):
    recordings = [kit.noise(s, seed=i) for i, s in enumerate((1.0, 2.0, 1.4))]
    ours = made(kind, Decoder(seed=0), **FALLBACK | {"temperatures": (0.0, 0.6)})
    together = ours(recordings)
    assert any(t.stats["attempts"] > 1 for t in together)
    assert [t.tokens for t in together] == [ours(samples).tokens for samples in recordings]
    assert all(s.no_speech_prob is None for t in together for s in t.segments)
    assert all(s.avg_logprob < 0 for t in together for s in t.segments)


@QUICK
def test_beams_are_those_of_generate_for_each_recording_alone(made, kit, kind):
    recordings = [kit.noise(s, seed=i) for i, s in enumerate((1.0, 2.0, 1.0, 0.3))]
    ours = made(kind, beams=3)
    expected = [alone(ours, samples, num_beams=3) for samples in recordings]
    assert [t.tokens for t in ours(recordings)] == expected


def test_windows_of_all_lengths_are_searched_at_once_and_each_ends_at_its_own_limit(made, kit):
    recordings = [kit.noise(s, seed=i) for i, s in enumerate((1.0, 2.0, 1.4, 0.3))]
    ours = made("moonshine", beams=3)
    expected = [alone(ours, samples, num_beams=3) for samples in recordings]
    rows = []
    ours.model.get_decoder().register_forward_pre_hook(
        lambda module, args, given: rows.append(len(given["input_ids"])), with_kwargs=True
    )

    def found(part=None, name="", value=None):
        rows.clear()
        with pytest.MonkeyPatch.context() as changed:
            if part is not None:
                changed.setattr(part, name, value)
            return [t.tokens for t in ours(recordings)]

    assert found() == expected
    assert max(rows) == 12, "three beams of four windows"
    assert found(fallback, "HYPOTHESES", 6) == expected
    assert max(rows) == 6

    # without limits of their own, short windows get text that belongs to no audio
    def never(self, input_ids, scores):
        return torch.zeros(len(input_ids), dtype=torch.bool)

    assert found(beams.RowLimits, "__call__", never) != expected
    # beams that do not take their keys and values along read those of other beams
    assert found(beams.BeamCache, "reorder_cache", lambda self, order: None) != expected


@QUICK
@pytest.mark.parametrize("method", ["beam", "sample"])
def test_n_best_lists_do_not_depend_on_the_batch(made, kit, kind, method):
    recordings = [kit.noise(s, seed=i) for i, s in enumerate((1.0, 0.6))]
    ours = made(kind, Decoder(seed=1), n_best=3, n_best_method=method)
    together = ours(recordings)
    for samples, transcript in zip(recordings, together, strict=True):
        other = ours(samples)
        assert transcript.tokens == other.tokens
        [window], [expected] = transcript.n_best, other.n_best
        assert [h.tokens for h in window] == [h.tokens for h in expected]
        assert len(window) > 1
        assert [h.score for h in window] == pytest.approx([h.score for h in expected], abs=1e-4)


# ---- bad input


@KINDS
def test_odd_recordings_are_transcribed_or_fail_alone(made, kit, kind, tmp_path):
    (tmp_path / "broken.wav").write_bytes(b"RIFF nothing")
    wave = kit.noise(1.0)
    odd = {
        "one sample": np.full(1, 0.1, "f4"),
        "0.05 s": wave[: RATE // 20],
        "96 kHz": (np.repeat(wave, 6), 96_000),
        "silence": np.zeros(RATE, "f4"),
        "nothing": np.zeros(0, "f4"),
        "not a number": np.full(RATE, np.nan, "f4"),
        "broken": str(tmp_path / "broken.wav"),
        "good": wave,
    }
    ours = made(kind, batch_size=4)
    found = dict(zip(odd, ours(list(odd.values())), strict=True))
    failed = {name for name, one in found.items() if isinstance(one, Failure)}
    assert failed == {"nothing", "not a number", "broken"}
    assert found["good"].tokens == alone(ours, wave)
    assert found["0.05 s"].duration_s == 0.05
    assert found["silence"].text == "" and found["silence"].duration_s == 1


@QUICK
def test_windows_without_any_sound_are_not_decoded(made, kit, kind):
    wave, nothing = kit.noise(1.0), np.full(2 * RATE, FAINTEST, "f4")
    ours = made(kind, window_s=1.0, batch_size=3)
    found = ours(np.concatenate([wave, nothing, wave]))
    voiced = [segment for segment in found.segments if segment.text]
    assert voiced and all(one.start_s < 1 or one.end_s > 3 for one in voiced)
    assert ours(nothing).segments == [] and ours(nothing).duration_s == 2
    assert ours(2 * nothing).segments, "what is louder is decoded"


def test_states_of_silence_are_numbers(parts):
    ours = Transcriber(*parts["speech_to_text"]).recognizer
    [inputs] = ours.features([np.zeros(RATE, "f4")])
    assert all(torch.isfinite(value).all() for value in inputs.values())


def test_no_cut_leaves_a_rest_too_short_to_hold_a_word(made):
    samples = spoken(1.2, 0.05)[: round(1.55 * RATE)]  # the pause is from 1.2 to 1.5 s
    ours = made("moonshine", window_s=1.5).recognizer
    span = ours.span(ours.open(source_of(samples, RATE)), 0, [1.4])
    assert span.joined and len(samples) - span.following >= 1.5 * RATE / 4
    samples = spoken(0.8, 0.4, 0.05)  # there is one before, from 0.8 to 1.1 s
    span = ours.span(ours.open(source_of(samples, RATE)), 0, [])
    assert not span.joined and 0.8 * RATE < span.following < 1.1 * RATE


@QUICK
def test_hardly_any_temperature_is_greedy(made, kit, kind):
    samples = kit.noise(1.0)
    ours = made(kind, Decoder(seed=4), temperatures=(1e-3,))
    assert ours(samples).tokens == alone(ours, samples)


def test_nothing_is_warned_of_where_the_pad_is_the_end(kit, caplog, monkeypatch):
    model, processor = MODELS["moonshine"](pad_token_id=1)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    Transcriber(model, processor)([kit.noise(1.0), kit.noise(1.0, 1)])
    assert "attention mask" not in caplog.text


def test_the_gate_of_the_fallback_is_whispers_where_there_is_one():
    options = TranscribeOptions(**FALLBACK)
    assert (options.silence_threshold(True), options.silence_threshold(False)) == (0.6, None)
    for wrong in ("loud", 1.5):
        with pytest.raises(OptionError, match="expected a probability, or 'auto'"):
            TranscribeOptions(no_speech_threshold=wrong, logprob_threshold=-1.0)
