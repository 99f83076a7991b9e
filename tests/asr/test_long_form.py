"""The window loop against transformers' own long form, and batches against one by one."""

import copy

import numpy as np
import pytest
import soundfile
import torch
from transformers import pipeline

from mmdecode import Decoder
from mmdecode.asr import TranscribeOptions, Transcriber
from mmdecode.asr.audio.reading import source_of
from mmdecode.asr.decoding.fallback import Attempts, avg_logprob, compression_ratio
from mmdecode.asr.decoding.long_form import LongForm
from mmdecode.asr.decoding.segmentation import split_segments
from mmdecode.asr.recognizers.whisper import WhisperRecognizer
from mmdecode.draft.first_of import FirstOf
from mmdecode.draft.lookup import PromptLookup
from mmdecode.draft.source import Source
from mmdecode.errors import InputError, OptionError

LENGTHS = (2.5, 7.32)  # seconds; all longer than one window of the tiny model


def transcriber(model, processor, decoder=None, **options):
    return Transcriber(model, processor, decoder, TranscribeOptions(**options))


# Against transformers, recording by recording


@pytest.mark.one_in(3)
@pytest.mark.parametrize("draft", [None, PromptLookup(length=4, ngram=1)], ids=["plain", "lookup"])
@pytest.mark.parametrize(("seed", "scale"), [(0, 1.0), (3, 1.0), (4, 3.0)])
def test_tokens_and_times_equal_transformers_long_form(processor, kit, seed, scale, draft):
    model = kit.build_model(processor, seed, scale)
    ours = transcriber(model, processor, Decoder(draft), batch_size=2)
    recordings = [kit.noise(seconds, seed=i) for i, seconds in enumerate(LENGTHS)]
    seen = set()
    for samples, found in zip(recordings, ours(recordings), strict=True):
        tokens, times = kit.stock(model, processor, samples)
        assert found.tokens == tokens
        assert kit.times(found) == times
        seen |= set(tokens)
    assert len(seen) >= 12, "a model that repeats itself would prove little"
    if draft is not None:
        assert ours.stats.accepted > 0


def test_text_before_a_window_is_shown_as_in_transformers(model, processor, kit):
    samples = kit.noise(6.0, seed=5)
    found = transcriber(model, processor, condition_on_prev_tokens=True)([samples])[0]
    tokens, times = kit.stock(model, processor, samples, condition_on_prev_tokens=True)
    assert (found.tokens, kit.times(found)) == (tokens, times)
    assert tokens != kit.stock(model, processor, samples)[0], "conditioning changed nothing"


class Greedy:
    """Takes the best token at every temperature, so that attempts can be compared exactly."""

    def __init__(self):
        self.decoder, self.calls = Decoder(), []
        self.stats, self.guide = self.decoder.stats, None

    def __call__(self, model, input_ids, *, generation_config, mm_request=None, **kwargs):
        config = copy.copy(generation_config)
        self.calls.append((len(input_ids), bool(config.do_sample)))
        config.do_sample = False
        return self.decoder(model, input_ids, generation_config=config, **kwargs)


@pytest.fixture(scope="module")
def medians(model, processor, kit):
    """Thresholds that about half of the windows of one recording fail."""
    judged = []

    class Spy(Attempts):
        def judge(self, result):
            ratio = compression_ratio(result.tokens, 316)
            judged.append((result.avg_logprob, ratio, result.no_speech_prob))
            super().judge(result)

    options = TranscribeOptions(logprob_threshold=-99.0, no_speech_threshold=1.0)
    recognizer = WhisperRecognizer(model, processor, options)
    loop = LongForm(recognizer, Decoder())
    loop.attempts = Spy(recognizer, Decoder(), options)
    list(loop.run([source_of(kit.noise(7.0, seed=2), kit.rate)]))
    logprobs, ratios, silent = (sorted(values) for values in zip(*judged, strict=True))
    middle = len(judged) // 2
    return {
        "logprob_threshold": sum(logprobs[middle - 1 : middle + 1]) / 2,
        "compression_ratio_threshold": sum(ratios[middle - 1 : middle + 1]) / 2,
        "no_speech_threshold": silent[0] * 0.99,
    }


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "thresholds",
    [
        {"logprob_threshold": None},
        {"compression_ratio_threshold": None},
        {"logprob_threshold": None, "no_speech_threshold": None},
        {"logprob_threshold": None, "condition_on_prev_tokens": True},
    ],
    ids=lambda t: "+".join(t),
)
def test_fallback_and_skipping_equal_transformers(model, processor, kit, medians, thresholds):
    temperatures = (0.0, 0.4, 0.8)
    samples = kit.noise(7.0, seed=2)
    thresholds = {k: medians[k] if v is None else v for k, v in thresholds.items()}
    ours, stock = Greedy(), Greedy()
    found = transcriber(model, processor, ours, temperatures=temperatures, **thresholds)([samples])
    tokens, times = kit.stock(
        model,
        processor,
        samples,
        temperature=temperatures,
        custom_generate=stock,
        top_k=0,
        **thresholds,
    )
    assert (found[0].tokens, kit.times(found[0])) == (tokens, times)
    assert ours.calls == stock.calls, "windows were repeated at other times"
    repeats = sum(sampled for _, sampled in ours.calls)
    assert 0 < repeats < 2 * found[0].stats["windows"], "thresholds that divide the windows"
    if "no_speech_threshold" in thresholds:
        plain = kit.stock(model, processor, samples)[0]
        assert tokens != plain, "no window was skipped"


def test_a_language_that_is_not_given_is_detected_as_in_transformers(processor, kit):
    model = kit.build_model(processor, seed=1, scale=3.0, language=None)
    recordings = [kit.noise(2.1, seed=i) for i in range(4)]
    found = transcriber(model, processor, batch_size=4)(recordings)
    names = {v: k.strip("<|>") for k, v in model.generation_config.lang_to_id.items()}
    for samples, transcript in zip(recordings, found, strict=True):
        features = kit.long_features(processor, samples)
        token = model.detect_language(features, num_segment_frames=100)
        assert transcript.language == names[int(token)]
        assert transcript.tokens == kit.stock(model, processor, samples)[0]


def test_windows_without_timestamps_follow_one_another(model, processor, kit):
    samples = kit.noise(5.0)
    found = transcriber(model, processor, timestamps=False)([samples])[0]
    assert kit.times(found) == [(0.0, 2.0), (2.0, 4.0), (4.0, 5.0)]
    features = kit.long_features(processor, samples)[..., :100]
    first = model.generate(features, force_unique_generate_call=True)[0].tolist()
    assert found.segments[0].tokens == [t for t in first[4:] if t != model.config.eos_token_id]


def test_the_trained_model_gives_the_tokens_of_transformers(trained, kit):
    ours = Transcriber.from_pretrained(trained, draft="lookup", device="cpu")
    clips = [soundfile.read(kit.data / n, dtype="float32")[0] for n in CLIPS]
    samples = np.concatenate([*clips, *clips])
    found = ours([samples])[0]
    assert found.tokens == kit.stock(ours.model, ours.processor, samples)[0]
    assert found.stats["windows"] > 1


CLIPS = ("librispeech-2412-153948-0000.flac", "librivox-0880.flac", "ami-ES2011a-40s-46s.flac")


# Batches


def mixed(kit):
    return [kit.noise(seconds, seed=i) for i, seconds in enumerate((2.5, 0.7, 3.9))]


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"condition_on_prev_tokens": True},
        {"temperatures": (0.7,)},
        {"temperatures": (0.0, 0.4, 1.0), "logprob_threshold": -2.0, "no_speech_threshold": 0.1},
        {"prompt": "ab", "hotwords": "c", "condition_on_prev_tokens": True},
        {"loop_guard": "cut", "condition_on_prev_tokens": True},
        {"n_best": 2},
        {"n_best": 2, "n_best_method": "sample"},
        {"mode": "chunked"},
        {"timestamps": False},
    ],
    ids=lambda o: "+".join(o) or "greedy",
)
@pytest.mark.parametrize(
    "draft", [FirstOf(Source(3, least=1), PromptLookup(length=3, ngram=1))], ids=["drafted"]
)
def test_a_batch_gives_each_recording_the_text_it_has_alone(model, processor, kit, options, draft):
    alone = transcriber(model, processor, Decoder(seed=0), batch_size=1, **options)
    recordings = mixed(kit)
    expected = [alone([samples])[0] for samples in recordings]
    for size in (2, 3):
        together = transcriber(model, processor, Decoder(draft, seed=0), batch_size=size, **options)
        for one, other in zip(expected, together(recordings), strict=True):
            assert other.tokens == one.tokens
            assert kit.times(other) == kit.times(one)
            assert other.stats == one.stats
            assert [s.temperature for s in other.segments] == [s.temperature for s in one.segments]
            for texts, others in zip(one.n_best or [], other.n_best or [], strict=True):
                assert [h.tokens for h in others] == [h.tokens for h in texts]


def test_sampling_depends_on_the_seed_and_differs_from_window_to_window(model, processor, kit):
    def run(seed):
        sampled = transcriber(model, processor, Decoder(seed=seed), temperatures=(1.0,))
        return sampled([np.tile(kit.noise(2.0), 3)])[0].tokens

    assert run(0) == run(0)
    assert run(0) != run(1)


def test_every_window_and_attempt_has_noise_of_its_own(model, processor, kit):
    names = []

    class Spy(Decoder):
        def __call__(self, *args, mm_request, **kwargs):
            names.extend(mm_request)
            return super().__call__(*args, mm_request=mm_request, **kwargs)

    options = {"temperatures": (0.0, 0.5), "logprob_threshold": -1e-6}
    found = transcriber(model, processor, Spy(seed=0), **options)(mixed(kit))
    assert len(names) == sum(t.stats["attempts"] for t in found) == len(set(names))


# Inside transformers' own loops


def test_a_plain_decoder_works_inside_transformers_long_form_in_a_batch(model, processor, kit):
    batch = processor.feature_extractor(
        [kit.noise(3.0, seed=1), kit.noise(5.0, seed=2)],
        sampling_rate=kit.rate,
        return_tensors="pt",
        truncation=False,
        padding="longest",
        return_attention_mask=True,
    )
    options = {"return_timestamps": True, "time_precision": 0.04, "time_precision_features": 0.02}
    plain = model.generate(**batch, **options)
    decoder = Decoder(PromptLookup(length=4, ngram=1))
    assert torch.equal(model.generate(**batch, custom_generate=decoder, **options), plain)
    assert decoder.stats.accepted > 0


def test_a_decoder_works_inside_the_speech_pipeline(model, processor, kit):
    recognise = pipeline(
        "automatic-speech-recognition",
        model=model,
        tokenizer=processor.tokenizer,
        feature_extractor=processor.feature_extractor,
    )
    samples = kit.noise(1.7)
    decoder = Decoder(PromptLookup(length=4, ngram=1))
    plain = recognise(samples.copy(), generate_kwargs={"num_beams": 1})
    drafted = recognise(
        samples.copy(), generate_kwargs={"num_beams": 1, "custom_generate": decoder}
    )
    assert drafted == plain
    assert plain["text"]
    assert decoder.stats.calls == 1


# The rules by hand; timestamps are 100, 101, ...


@pytest.mark.parametrize(
    ("tokens", "segments", "forward"),
    [
        # nothing said when: the whole window
        ([1, 2], [(0, 50, [1, 2])], None),
        # one pair of times and silence after
        ([100, 1, 120], [(0, 20, [100, 1, 120])], None),
        # a time that only opens: its own place counts as none
        ([100, 1, 2], [(0, 50, [100, 1, 2])], None),
        # cut off after a complete segment: the next window starts there
        ([100, 1, 120, 120, 2], [(0, 20, [100, 1, 120, 120])], 20),
        ([100, 1, 120, 125], [(0, 20, [100, 1, 120, 125])], 20),
        # two segments, the last one complete
        (
            [100, 1, 120, 121, 2, 140],
            [(0, 20, [100, 1, 120]), (21, 40, [121, 2, 140])],
            None,
        ),
        (
            [103, 1, 120, 121, 2, 140, 141],
            [(3, 20, [103, 1, 120]), (21, 40, [121, 2, 140, 141])],
            40,
        ),
    ],
)
def test_tokens_are_cut_where_two_times_meet(tokens, segments, forward):
    assert split_segments(tokens, 100, 50) == (segments, forward)


def test_a_window_of_repeated_tokens_compresses_well():
    assert compression_ratio([7] * 100, 50_000) > 5
    assert compression_ratio(list(range(0, 40_000, 400)), 50_000) < 1.1


def test_the_mean_log_probability_is_that_before_the_temperature():
    logits = torch.tensor([[1.0, 2.0, -torch.inf], [0.5, 0.0, 0.1]])
    tokens = torch.tensor([1, 0])
    expected = logits.log_softmax(-1)[[0, 1], tokens].mean()
    assert avg_logprob(logits, tokens, 0.0) == pytest.approx(float(expected))
    assert avg_logprob(logits / 0.5, tokens, 0.5) == pytest.approx(float(expected))


# Segment by segment


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"word_timestamps": "attention"},
        pytest.param({"timestamps": False}, marks=pytest.mark.slow),
        pytest.param({"condition_on_prev_tokens": True}, marks=pytest.mark.slow),
        {"word_timestamps": "attention", "hallucination_silence_threshold": 0.1},
    ],
    ids=str,
)
def test_segments_come_while_a_recording_is_read_and_are_those_of_a_call(kit, processor, options):
    model = kit.build_model(processor, scale=3.0)
    model.generation_config.alignment_heads = [[0, 1], [1, 0], [1, 1]]
    ours = transcriber(model, processor, max_new_tokens=9, **options)
    step, begun = ours._loop._step, []
    ours._loop._step = lambda *given: (begun.append(1), step(*given))[1]
    for seconds, seed in ((6.3, 1), (0.4, 2)):
        begun.clear()
        came = [(segment, len(begun)) for segment in ours.stream_segments(kit.noise(seconds, seed))]
        whole = ours(kit.noise(seconds, seed))
        assert [segment for segment, _ in came] == whole.segments
        if seconds > 6:
            assert came[0][1] < came[-1][1] == whole.stats["windows"]


def test_a_stream_of_segments_keeps_nothing_that_it_gave_out(kit, processor, model, monkeypatch):
    ours = transcriber(model, processor, max_new_tokens=6)
    opened, seen = ours._loop._open, []
    monkeypatch.setattr(ours._loop, "_open", lambda *given: seen.append(opened(*given)) or seen[-1])
    for _ in ours.stream_segments(kit.noise(7.0)):
        [job] = seen
        assert not job.pieces and not job.results
    assert job.windows > 3 and len(job.context) <= ours.recognizer.max_context


def test_a_stream_of_segments_raises_what_a_call_raises(kit, processor, model, tmp_path):
    ours = transcriber(model, processor)
    with pytest.raises(InputError, match=r"none\.wav: does not exist"):
        next(ours.stream_segments(tmp_path / "none.wav"))
    with pytest.raises(OptionError, match="takes one recording"):
        ours.stream_segments([kit.noise(1.0)])
    with pytest.raises(OptionError, match="mode='sequential'"):
        transcriber(model, processor, mode="chunked").stream_segments(kit.noise(1.0))
