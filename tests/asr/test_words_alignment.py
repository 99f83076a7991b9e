"""When words were said: against transformers, planted times, and in whole transcriptions."""

import dataclasses
import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import (
    GenerationMixin,
    Wav2Vec2Config,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForCTC,
    Wav2Vec2Processor,
    WhisperProcessor,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.whisper.generation_whisper import _dynamic_time_warping

from mmdecode import Decoder
from mmdecode.asr import TranscribeOptions, Transcriber
from mmdecode.asr.alignment import cross_attention as alignment
from mmdecode.asr.alignment.cross_attention import (
    Spoken,
    Timer,
    attention_spans,
    cross_attention,
    forced_spans,
    probabilities,
    token_starts,
    warp,
)
from mmdecode.asr.alignment.ctc import SYMBOLS, LetterHead
from mmdecode.asr.alignment.words import around_words
from mmdecode.asr.output.formats import FORMATS
from mmdecode.asr.output.subtitles import Layout, clean
from mmdecode.asr.recognizers import whisper_prompts as prompts
from mmdecode.asr.results import Word
from mmdecode.errors import InputError, OptionError
from mmdecode.zoo.speech import speech_test

HEADS = [[0, 1], [1, 0], [1, 1]]
SENTENCES = 2  # clips that tests of whole transcriptions use


@pytest.fixture(scope="module")
def aligned(kit, processor):
    """The tiny random model with alignment heads."""
    model = kit.build_model(processor, scale=3.0)
    model.generation_config.alignment_heads = HEADS
    return model


@pytest.fixture(scope="module")
def features(kit, processor):
    waves = [kit.noise(2, seed) for seed in range(3)]
    return processor.feature_extractor(
        waves, sampling_rate=kit.rate, return_tensors="pt"
    ).input_features


@pytest.fixture
def eager(kit, processor, aligned):
    twin = kit.build_model(processor, scale=3.0)
    twin.load_state_dict(aligned.state_dict())
    twin.set_attn_implementation("eager")
    return twin


# Dynamic time warping


def random_costs():
    random = np.random.default_rng(0)
    for _ in range(40):
        shape = random.integers(1, 25, 2)
        yield random.standard_normal(shape)
        yield random.integers(0, 3, shape).astype(float)  # many ways are equally cheap


def test_warping_equals_that_of_transformers():
    for cost in random_costs():
        for ours, theirs in zip(warp(cost), _dynamic_time_warping(cost), strict=True):
            np.testing.assert_array_equal(ours, theirs)


# Cross-attention


def read(model, audio, ids, heads=HEADS):
    with cross_attention(model.get_decoder(), heads) as attention, torch.no_grad():
        model(
            encoder_outputs=BaseModelOutput(last_hidden_state=audio),
            decoder_input_ids=ids,
            use_cache=False,
        )
    return attention


@pytest.mark.parametrize("mutant", [None, "heads", "prompt", "transposed"])
def test_token_times_equal_those_of_transformers(aligned, eager, features, mutant, monkeypatch):
    """It takes the rows where tokens are read, so that the prompt's last row is left out here."""
    config = aligned.generation_config
    prompt = [config.decoder_start_token_id, *first_ids(aligned), config.no_timestamps_token_id]
    output = GenerationMixin.generate(
        eager,
        input_features=features,
        decoder_input_ids=torch.tensor([prompt] * len(features)),
        output_attentions=True,
        return_dict_in_generate=True,
        min_new_tokens=18,
        max_new_tokens=18,
        do_sample=False,
    )
    stock = eager._extract_token_timestamps(
        output, HEADS, time_precision=0.04, num_input_ids=len(prompt)
    )
    if mutant == "transposed":
        monkeypatch.setattr(alignment, "warp", lambda cost: warp(cost.T))
    heads = [[0, 0], [1, 0], [1, 1]] if mutant == "heads" else HEADS
    first = 0 if mutant == "prompt" else len(prompt)
    audio = aligned.get_encoder()(features).last_hidden_state
    attention = read(aligned, audio, output.sequences[:, :-1], heads)
    same, seen = [], set()
    for row, theirs in enumerate(stock[:, len(prompt) : -1].tolist()):
        weights = attention.weights(row, audio.shape[1])[:, first:]
        ours = (token_starts(weights.detach()) * 0.04).tolist()
        same.append(ours == pytest.approx(theirs) if len(ours) == len(theirs) else False)
        seen |= set(theirs)
    assert all(same) == (mutant is None)
    assert len(seen) > 8


def first_ids(model):
    config = model.generation_config
    return [config.lang_to_id["<|en|>"], config.task_to_id["transcribe"]]


@pytest.mark.parametrize("mutant", [None, "heads", "prompt", "padding"])
def test_weights_are_those_of_eager_attention(aligned, eager, features, mutant, monkeypatch):
    """What a timer reads: its heads, the rows that predicted the tokens, the recording's frames."""
    seen = []
    monkeypatch.setattr(
        alignment,
        "attention_spans",
        lambda weights, *_: seen.append(weights) or [(0.0, 0.0)] * (weights.shape[1] - 1),
    )
    windows = [
        Spoken(prompt, tokens, [], 0.0, frames, features[row])
        for row, (prompt, tokens, frames) in enumerate(
            [([257, 258, 261], [300, 5, 6, 7], 50), ([257, 258], [9, 8], 20)]
        )
    ]
    audio = aligned.get_encoder()(features[:2]).last_hidden_state
    timer_of(aligned, "attention")(windows, audio)
    for row, (window, weights) in enumerate(zip(windows, seen, strict=True)):
        with torch.no_grad():
            found = eager(
                encoder_outputs=BaseModelOutput(last_hidden_state=audio[row : row + 1]),
                decoder_input_ids=torch.tensor([window.prompt + window.tokens]),
                output_attentions=True,
            ).cross_attentions
        heads = [[1, 0], [0, 1], [1, 1]] if mutant == "heads" else HEADS
        first = 0 if mutant == "prompt" else len(window.prompt) - 1
        stock = torch.stack([found[layer][0, head] for layer, head in heads])[:, first:]
        stock = stock[:, : weights.shape[1]]
        if mutant != "padding":
            stock = stock[..., : window.frames]
            stock = stock / stock.sum(-1, keepdim=True)
        same = stock.shape == weights.shape and torch.allclose(stock, weights, atol=1e-5)
        if not (mutant == "padding" and row == 0):  # a full window has none
            assert same == (mutant is None)
    assert len(seen) == 2


_PROCESSORS = {}


def timer_of(model, method, tokenizer=None):
    return Timer(
        model,
        tokenizer or _PROCESSORS["tiny"].tokenizer,
        method,
        stamps=model.generation_config.no_timestamps_token_id + 1,
        frame_s=0.04,
        rate=16_000,
    )


@pytest.fixture(autouse=True, scope="module")
def tiny_tokenizer(processor):
    _PROCESSORS["tiny"] = processor


def planted(times, frames, tail=0.01, heads=2, seed=0):
    """Weights ``(heads, rows + 1, frames)`` that attend to each row's time, and noise elsewhere."""
    random = np.random.default_rng(seed)
    weights = tail * random.random((heads, len(times) + 1, frames))
    for row, (start, end) in enumerate(times):
        weights[:, row, start:end] += 1.0
    weights[:, -1, -2:] += 1.0
    return torch.tensor(weights)


def test_planted_times_are_found():
    times = [(3, 10), (10, 14), (14, 25), (25, 31), (31, 40)]
    spans = attention_spans(planted(times, 44), 0.04, [True] * 5)
    found = np.array(spans) / 0.04
    assert np.abs(found - np.array(times))[1:-1].max() <= 1.5


def test_a_pause_stretches_neither_the_word_before_nor_the_one_after():
    times = [(5, 12), (12, 20), (20, 27), (90, 98), (98, 105), (105, 112)]
    spans = np.array(attention_spans(planted(times, 120), 0.04, [True] * 6)) / 0.04
    assert np.abs(spans - np.array(times))[2:4].max() <= 10
    loose = np.diff(token_starts(planted(times, 120)))  # the mutant: nothing is cut
    assert max(loose) > 40 and max(spans[:, 1] - spans[:, 0]) <= 25


def test_frames_of_timestamps_are_not_cut():
    """A timestamp may stand for a pause."""
    times = [(2, 40), (40, 46), (46, 52)]
    spans = attention_spans(planted(times, 56), 0.04, [False, True, True])
    assert spans[0][1] - spans[0][0] > 1.2


@pytest.mark.parametrize("rows", [1, 2])
def test_short_windows_have_times(rows):
    for frames in (1, 2, 3, 8, 50):
        weights = torch.rand(2, rows + 1, frames).softmax(-1)
        spans = attention_spans(weights, 0.04, [True] * rows)
        assert len(spans) == rows and np.isfinite(spans).all()
        assert 0 <= spans[0][0] <= spans[-1][1] <= frames * 0.04 + 1e-9


def test_a_pass_leaves_no_trace(aligned, features):
    audio = aligned.get_encoder()(features[:1]).last_hidden_state
    before = aligned.config.to_dict(), aligned.generation_config.to_dict()
    hooks = sum(len(m._forward_hooks) for m in aligned.modules())
    implementation = aligned.config._attn_implementation
    window = Spoken([257, 258], [9, 8], [], 0.0, 50, features[0])
    timer_of(aligned, "attention")([window], audio)
    with pytest.raises(RuntimeError), cross_attention(aligned.get_decoder(), HEADS):
        raise RuntimeError
    assert (aligned.config.to_dict(), aligned.generation_config.to_dict()) == before
    assert aligned.config._attn_implementation == implementation == "sdpa"
    assert sum(len(m._forward_hooks) for m in aligned.modules()) == hooks == 0


def test_without_named_heads_the_upper_half_is_read(model):
    assert alignment.alignment_heads(model) == [(1, 0), (1, 1)]


# Confidence


def test_probabilities_are_those_of_the_decoded_distribution(aligned, features):
    """Stock processors, prefix by prefix."""
    config = aligned.generation_config
    options = TranscribeOptions()
    prompt = [config.decoder_start_token_id, *first_ids(aligned)]
    rules = prompts.processors(config, len(prompt), options, 0.0)
    found = Transcriber(aligned, _PROCESSORS["tiny"], Decoder(seed=0), options)
    tokens = found(np.asarray(features[0].flatten()[:30000])).tokens[:8]
    audio = aligned.get_encoder()(features[:1]).last_hidden_state
    ids = torch.tensor([prompt + tokens])
    with torch.no_grad():
        logits = aligned(
            encoder_outputs=BaseModelOutput(last_hidden_state=audio), decoder_input_ids=ids
        ).logits[0, len(prompt) - 1 :]
    ours = probabilities(logits, Spoken(prompt, tokens, rules, 0.0, 50, features[0]))
    stock = [
        rules(ids[:, : len(prompt) + i], logits[i : i + 1]).softmax(-1)[0, token].item()
        for i, token in enumerate(tokens)
    ]
    assert ours == pytest.approx(stock, abs=1e-6)
    assert len(ours) == len(tokens) > 2


# Forced alignment


def ctc_log_probs(times, frames):
    """Log-probabilities of a head that hears ``times``: symbol, first frame, last frame + 1."""
    log_probs = torch.full((frames, len(SYMBOLS)), -8.0)
    log_probs[:, 0] = 0.0
    for symbol, start, end in times:
        log_probs[start:end, 0] = -8.0
        log_probs[start:end, SYMBOLS.index(symbol)] = 0.0
    return log_probs.log_softmax(-1)


def test_characters_are_found_at_their_frames():
    log_probs = ctc_log_probs([("o", 3, 6), ("n", 6, 9), ("i", 30, 32), ("t", 32, 35)], 40)
    spans = forced_spans(log_probs, [" on", " it", "."], LetterHead())
    assert spans == [(3, 9), (30, 35), (35, 35)]


def test_a_number_gets_the_time_between_its_neighbours():
    occurrences = [
        ("o", 3, 6),
        ("n", 6, 9),
        ("t", 14, 17),
        ("e", 17, 20),
        ("n", 20, 23),
        ("i", 30, 34),
    ]
    spans = forced_spans(ctc_log_probs(occurrences, 40), [" on", " 10", " i"], LetterHead())
    assert spans[0] == (3, 9) and spans[2] == (30, 34)
    assert spans[1] == (14, 23)


def test_repeats_are_kept_apart():
    log_probs = ctc_log_probs([("n", 2, 5), ("o", 5, 9), ("n", 14, 17), ("o", 17, 20)], 30)
    assert forced_spans(log_probs, [" no", " no"], LetterHead()) == [(2, 9), (14, 20)]


@pytest.mark.parametrize("texts", [[], ["..."], [" far too many letters", " for it"]])
def test_what_cannot_be_aligned_shares_the_time(texts):
    spans = forced_spans(ctc_log_probs([], 6), texts, LetterHead())
    assert len(spans) == len(texts)
    assert not spans or (spans[0][0], spans[-1][1]) == (0, 6)


def test_opening_marks_stand_at_the_word_after_them():
    log_probs = ctc_log_probs([("i", 3, 6), ("o", 20, 26)], 30)
    assert forced_spans(log_probs, [" i", " (", "o", ")"], LetterHead()) == [
        (3, 6),
        (20, 20),
        (20, 26),
        (26, 26),
    ]


def test_joined_words_are_within_a_tenth_of_a_second():
    """The bar; words are given, see the benchmark."""
    path = Path(__file__).parents[2] / "benchmarks" / "word_times.py"
    spec = importlib.util.spec_from_file_location("word_times", path)
    word_times = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(word_times)
    model, processor = word_times.load("zoo:whisper-synth", "cpu", None)
    found = word_times.measure(model, processor, "ctc", word_times.joined_words())
    assert found["words"] == 58 and found["monotone_and_inside"]
    assert max(found["median_start_s"], found["median_end_s"]) <= 0.1
    assert found["p90_s"] <= 0.1
    loose = word_times.measure(model, processor, "attention", word_times.joined_words())
    assert loose["words"] == 58 and loose["monotone_and_inside"]


# Whole transcriptions


@pytest.fixture(scope="module")
def clips():
    return [clip.samples() for clip in speech_test()[2 : 2 + SENTENCES]]


def check(transcript):
    end = 0.0
    for segment in transcript.segments:
        assert "".join(word.text for word in segment.words).strip() == segment.text
        for word in segment.words:
            assert end <= word.start_s < word.end_s <= transcript.duration_s + 1e-6
            assert 0 <= word.confidence <= 1
            end = word.end_s
    bounds = [time for s in transcript.segments for time in (s.start_s, s.end_s)]
    assert bounds == sorted(bounds)
    spoken = [segment for segment in transcript.segments if segment.words]
    assert spoken or not transcript.text
    ends = [(segment.words[0].start_s, segment.words[-1].end_s) for segment in spoken]
    assert [(segment.start_s, segment.end_s) for segment in spoken] == ends
    return [word for segment in spoken for word in segment.words]


def without_words(transcript):
    """Segments as they are where no words are timed; their times are those of the words else."""
    return [
        dataclasses.replace(segment, words=None, start_s=0.0, end_s=0.0)
        for segment in transcript.segments
    ]


def times_by_format(transcript):
    """Start and end of each spoken segment in milliseconds, as each format has them."""
    exact = Layout(max_line_width=None, max_reading_speed=None, min_duration_s=0.0)
    written = {kind: write(transcript, exact) for kind, write in FORMATS.items()}
    clock = re.compile(r"(\d+):(\d+):(\d+)[.,](\d+) --> (\d+):(\d+):(\d+)[.,](\d+)")

    def shown(text):
        numbers = [list(map(int, found)) for found in clock.findall(text)]
        return [
            tuple(((h * 60 + m) * 60 + s) * 1000 + ms for h, m, s, ms in (n[:4], n[4:]))
            for n in numbers
        ]

    def spans_in(segments, start="start_s", end="end_s"):
        spoken = (s for s in segments if clean(s["text"]))
        return [(round(1000 * s[start]), round(1000 * s[end])) for s in spoken]

    rows = [line.split("\t") for line in written["tsv"].splitlines()[1:]]
    return {
        "srt": shown(written["srt"]),
        "vtt": shown(written["vtt"]),
        "tsv": [(int(start), int(end)) for start, end, _ in rows],
        "json": spans_in(json.loads(written["json"])["segments"]),
        "jsonl": spans_in(map(json.loads, written["jsonl"].splitlines())),
        "whisper-json": spans_in(json.loads(written["whisper-json"])["segments"], "start", "end"),
    }


@pytest.mark.parametrize("method", [True, "attention"])
def test_words_change_nothing_else_and_no_draft_changes_them(trained, clips, method):
    plain = Transcriber.from_pretrained(trained)(clips)
    timed = Transcriber.from_pretrained(trained, word_timestamps=method)
    drafted = Transcriber.from_pretrained(
        "zoo:whisper-synth", draft="medusa", word_timestamps=method
    )(clips)
    found = timed(clips)
    for ours, theirs, base in zip(found, drafted, plain, strict=True):
        assert len(check(ours)) > 5
        assert ours.segments == theirs.segments
        assert without_words(ours) == without_words(base) and ours.text == base.text
    assert [timed(clip).segments for clip in clips] == [one.segments for one in found]


def test_zoo_words_are_where_they_were_spoken(trained, clips):
    """Words lie between the times that the model itself says its sentences have."""
    [transcript, *_] = Transcriber.from_pretrained(trained, word_timestamps=True)(clips[:1])
    for segment in transcript.segments:
        assert segment.words[0].start_s == pytest.approx(segment.start_s, abs=0.12)
        assert segment.words[-1].end_s == pytest.approx(segment.end_s, abs=0.12)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"timestamps": False},
        {"condition_on_prev_tokens": True},
        {"temperatures": (0.8,)},
        {"mode": "chunked"},
        {"loop_guard": "cut"},
    ],
    ids=str,
)
def test_random_text_over_many_windows_is_timed_in_order(kit, processor, aligned, options):
    settings = TranscribeOptions(word_timestamps="attention", scores=True, **options)
    transcriber = Transcriber(aligned, processor, Decoder(seed=0), settings)
    for transcript in transcriber([kit.noise(7.3, 1), kit.noise(0.05, 2), np.zeros(100)]):
        check(transcript)
        expected, *others = times_by_format(transcript).values()
        assert all(other == expected for other in others)


def test_segments_without_words_stay_between_the_words_around_them():
    """Whatever the model says of the times of segments, those of their words count."""
    counts = set()

    @given(st.lists(st.tuples(*[st.floats(0, 9)] * 2, st.integers(0, 3)), max_size=6))
    @settings(max_examples=60, deadline=None)
    @example([(0.0, 2.0, 2), (1.0, 3.0, 0), (2.0, 1.0, 1)])
    @example([(0.0, 2.0, 0), (1.0, 3.0, 0)])
    def stay(intervals):
        words = assert_stay_between(intervals)
        counts.update((bool(own), any(words)) for own in words)

    stay()
    assert counts == {(True, True), (False, True), (False, False)}


def assert_stay_between(intervals):
    """The words of each segment, of which the drawn ones are start, length and number of words."""
    spans, words, at = [], [], 0.0
    for start, length, count in intervals:
        spans.append((start, start + length))
        own = [
            Word(text=" a", start_s=at + i, end_s=at + i + 0.5, confidence=1.0)
            for i in range(count)
        ]
        words.append(own or None)
        at += count
    found = around_words(spans, words)
    for (start, end), own in zip(found, words, strict=True):
        assert start <= end and (not own or (start, end) == (own[0].start_s, own[-1].end_s))
        for other in words:
            assert not other or own is other or end <= other[0].start_s or other[-1].end_s <= start
    if not any(words):
        assert found == spans
    return words


@pytest.fixture(scope="module")
def ctc_folder(tmp_path_factory):
    """A tiny random CTC model of upper-case letters."""
    folder = tmp_path_factory.mktemp("ctc")
    symbols = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ'"]
    (folder / "vocab.json").write_text(
        "{" + ", ".join(f'"{s}": {i}' for i, s in enumerate(symbols)) + "}"
    )
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        vocab_size=len(symbols),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        conv_dim=(8,) * 7,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        pad_token_id=0,
    )
    Wav2Vec2ForCTC(config).eval().save_pretrained(folder)
    Wav2Vec2Processor(
        feature_extractor=Wav2Vec2FeatureExtractor(),
        tokenizer=Wav2Vec2CTCTokenizer(folder / "vocab.json"),
    ).save_pretrained(folder)
    return folder


def test_any_ctc_model_may_time_the_words(trained, clips, ctc_folder):
    transcriber = Transcriber.from_pretrained(trained, word_timestamps=f"ctc:model={ctc_folder}")
    recording = np.concatenate(clips)  # of more than one window
    words = check(transcriber(recording))
    assert len(words) > 10
    ctc = transcriber._loop.timer.ctc
    assert ctc.symbols(" Café") == [ctc.vocabulary[c] for c in "CAFE"]


def test_methods_that_do_not_exist_are_refused(aligned, processor):
    def make(method):
        options = TranscribeOptions(word_timestamps=method)
        return Transcriber(aligned, processor, options=options)

    with pytest.raises(OptionError, match="expected True, 'attention'"):
        make("whisperx")
    with pytest.raises(InputError, match="has no aligner"):
        make("ctc")
    with pytest.raises(InputError, match="does not exist"):
        make("ctc:model=./nowhere")
    assert make(True)._loop.timer.ctc is None  # no head: cross-attention


def test_the_processor_of_a_zoo_model_is_enough(trained):
    assert timer_of(
        Transcriber.from_pretrained(trained).model,
        True,
        WhisperProcessor.from_pretrained(trained).tokenizer,
    ).ctc
