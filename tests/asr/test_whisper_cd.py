"""Contrastive decoding of recordings: the window it hears, batches, drafts, silence."""

import numpy as np
import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

import mmdecode as mm
from mmdecode.asr.audio.reading import source_of
from mmdecode.asr.recognizers.whisper_features import Mel, Speech, WindowWaveform, window_waveform
from mmdecode.asr.transcriber import Transcriber, make_options
from mmdecode.decoder import Decoder
from mmdecode.draft.layer_skip import LayerSkip
from mmdecode.draft.lookup import PromptLookup
from mmdecode.draft.recycling import Recycling
from mmdecode.engine.adapter import BranchSpec
from mmdecode.errors import IncompatibleError, InputError
from mmdecode.evaluation.speech.non_speech import sound
from mmdecode.guide.whisper_cd import WhisperCD, silent
from mmdecode.zoo.speech import speech_test
from tests.support.traced import Traced

SECONDS = (5.3, 1.2, 3.9, 2.0)  # of windows of two seconds


@pytest.fixture(scope="module")
def waves(kit):
    return [kit.noise(seconds, seed=number) for number, seconds in enumerate(SECONDS)]


def transcripts(model, processor, waves, guide=None, draft=None, **options):
    decoder = Decoder(draft, guide, seed=0)
    found = Transcriber(model, processor, decoder, make_options({"batch_size": 3} | options))(waves)
    return [one.tokens for one in found]


def hearing(change, **options):
    """A guide all of whose branches hear ``change``."""
    guide = WhisperCD(gate=0, **options)
    guide.branches = [
        BranchSpec(name=spec.name, transform="audio", transform_options={"change": change})
        for spec in guide.branches
    ]
    return guide


def unchanged(samples, draw):
    return samples


# Features


def speech_of(kit, processor, seconds, padding="auto"):
    mel = Mel(processor.feature_extractor, 100)
    return Speech(source_of((kit.noise(seconds), kit.rate), kit.rate), mel, padding)


@pytest.mark.parametrize("padding", ["zeros", "silence"])
def test_an_unchanged_waveform_has_the_features_of_its_window(kit, processor, padding):
    speech = speech_of(kit, processor, 5.3, padding)
    for seek, count in ((0, None), (0, 40), (80, None), (100, 7), (100, None), (200, None)):
        features, window = speech.window(seek, count), speech.window_waveform(seek, count)
        assert torch.equal(window.features(window.samples), features)


def test_silence_lies_at_the_floor_of_the_recording_and_no_lower(kit, processor):
    speech = speech_of(kit, processor, 1.5)
    window = speech.window_waveform(0)
    floor = (speech.peak - 8 + 4) / 4
    found = window.features(silent(window.samples, None))
    torch.testing.assert_close(found, torch.full_like(found, floor))
    # by a maximum of its own it would have no floor but that of the logarithm
    alone = WindowWaveform(window.samples, window.mel, -10.0).features(
        torch.zeros_like(window.samples)
    )
    assert (alone < floor - 0.1).all()


def test_a_louder_view_keeps_the_levels_of_the_recording(kit, processor):
    window = speech_of(kit, processor, 1.5).window_waveform(0)
    features = window.features(window.samples)
    louder = window.features(10 * window.samples)
    above = features > features.min()
    torch.testing.assert_close(louder[above], features[above] + 0.5, atol=1e-4, rtol=0)


def test_a_recording_of_one_window_has_the_features_of_the_processor(kit, processor):
    wave = kit.noise(1.3)
    extractor = processor.feature_extractor
    expected = extractor(wave, sampling_rate=kit.rate, return_tensors="pt").input_features[0]
    window = window_waveform(wave, extractor)
    torch.testing.assert_close(window.features(window.samples), expected, atol=1e-4, rtol=0)
    with pytest.raises(InputError, match="longer than one window"):
        window_waveform(kit.noise(2.5), extractor)


# Decoding


@pytest.fixture(scope="module")
def plain(model, processor, waves):
    return transcripts(model, processor, waves)


@pytest.mark.parametrize("mode", ["sequential", "chunked"])
def test_negatives_that_hear_what_the_model_hears_change_nothing(model, processor, waves, mode):
    same = transcripts(model, processor, waves, hearing(unchanged, alpha=2.0, beta=0), mode=mode)
    assert same == transcripts(model, processor, waves, mode=mode)


def test_a_branch_that_read_the_first_window_again_would_be_found(
    model, processor, waves, plain, monkeypatch
):
    stock = Speech.window_waveform
    kept = {}
    first = lambda s, seek, count: kept.setdefault(s.key, stock(s, seek, count))  # noqa: E731
    monkeypatch.setattr(Speech, "window_waveform", first)
    assert transcripts(model, processor, waves, hearing(unchanged, alpha=2.0, beta=0)) != plain


def test_without_strength_nothing_is_run_and_every_token_stays(model, processor, waves, plain):
    neutral = WhisperCD(0, beta=0, gate=0)
    assert transcripts(model, processor, waves, neutral) == plain
    assert transcripts(model, processor, waves, WhisperCD()) != plain, "it never does a thing"


@pytest.mark.parametrize("options", [{}, {"timestamps": False}], ids=["times", "no_times"])
def test_a_batch_has_the_texts_of_its_recordings_alone(model, processor, waves, options):
    guide = WhisperCD(gate=0.3, structure=0.0)
    together = transcripts(model, processor, waves, guide, **options)
    alone = [transcripts(model, processor, [wave], guide, **options)[0] for wave in waves]
    assert together == alone


@pytest.mark.one_in(6)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "fallback"])
@pytest.mark.parametrize(
    "draft",
    [
        lambda: PromptLookup(length=4),
        lambda: Recycling(nodes=8),
        lambda: LayerSkip(exit_layer=1, length=3),
    ],
    ids=["lookup", "recycling", "layer_skip"],
)
def test_drafts_leave_the_contrasted_text_as_it_is(model, processor, waves, draft, sampled):
    options = {}
    if sampled:
        options = {"temperatures": (0.0, 0.8), "logprob_threshold": -0.1}
    guide = WhisperCD(gate=0.3)
    expected = transcripts(model, processor, waves, guide, **options)
    assert transcripts(model, processor, waves, guide, draft(), **options) == expected


def test_n_best_lists_are_sampled_from_the_contrasted_distribution(model, processor, waves):
    options = make_options({"n_best": 2, "n_best_method": "sample"})
    guided = Transcriber(model, processor, Decoder(None, WhisperCD(), seed=0), options)
    free = Transcriber(model, processor, Decoder(seed=0), options)
    found, other = (one(waves[:2]) for one in (guided, free))
    lists = [[h.text for h in found[0].n_best[0]], [h.text for h in other[0].n_best[0]]]
    assert lists[0] != lists[1]


def generated(model, processor, clips, guide, **options):
    extractor = processor.feature_extractor
    features = extractor(clips, sampling_rate=16_000, return_tensors="pt").input_features
    return mm.generate(
        model,
        input_features=features,
        decoder=Decoder(guide=guide, seed=0),
        mm_inputs={"audio": [window_waveform(clip, extractor) for clip in clips]},
        max_new_tokens=8,
        **options,
    ).tolist()


def test_a_plain_call_of_generate_hears_its_recordings(model, processor, waves, kit):
    clips = [wave[: kit.rate] for wave in waves[:2]]
    begin = processor.tokenizer.convert_tokens_to_ids("<|startoftranscript|>")
    one_call = {"suppress_tokens": [*range(begin, len(processor.tokenizer))]}
    plain = generated(model, processor, clips, None, **one_call)
    same = hearing(unchanged, alpha=2.0, beta=0)
    assert generated(model, processor, clips, same, **one_call) == plain
    assert generated(model, processor, clips, WhisperCD(2.0), **one_call) != plain


def test_a_call_in_which_generate_moves_on_inside_the_window_is_refused(
    model, processor, waves, kit
):
    clip = [waves[1][: kit.rate]]  # the model writes a time, and generate goes on from there
    assert len(generated(model, processor, clip, None)[0]) > 8
    with pytest.raises(IncompatibleError, match="has read other audio"):
        generated(model, processor, clip, hearing(unchanged, alpha=2.0, beta=0))


def test_branches_in_one_pass_say_what_each_says_alone(model, processor, waves, kit):
    """Scores of a stacked pass against the model's own, encoder state by encoder state."""
    extractor = processor.feature_extractor
    window = window_waveform(waves[1], extractor)
    guide = WhisperCD(gate=0, snr=None, shift=0.5)
    decoder = Traced(guide=guide, seed=0)
    features = window.features(window.samples)[None]
    mm.generate(
        model,
        input_features=features,
        decoder=decoder,
        mm_inputs={"audio": [window]},
        max_new_tokens=3,
    )
    opening = decoder.trace[0][0].opening
    start = processor.tokenizer.convert_tokens_to_ids
    ids = torch.tensor(
        [[start(f"<|{n}|>") for n in ("startoftranscript", "en", "transcribe", "notimestamps")]]
    )
    for spec in guide.branches:
        changed = window.features(spec.transform_options["change"](window.samples, None))[None]
        encoded = model.get_encoder()(changed).last_hidden_state
        alone = model(
            encoder_outputs=BaseModelOutput(last_hidden_state=encoded), decoder_input_ids=ids
        ).logits[0, -1]
        torch.testing.assert_close(opening[spec.name], alone, atol=1e-4, rtol=1e-4)


# Silence


def test_silence_is_what_contrast_alone_cannot_stop_and_the_gate_does(model, processor, kit):
    nothing = [np.zeros(kit.rate * seconds, np.float32) for seconds in (1, 3)]
    plain = transcripts(model, processor, nothing)
    assert transcripts(model, processor, nothing, WhisperCD(2.0, beta=0, gate=0)) == plain
    begin = processor.tokenizer.convert_tokens_to_ids("<|0.00|>")
    assert any(token < begin for tokens in plain for token in tokens), "it says nothing anyway"
    for options in ({}, {"timestamps": False}):
        found = transcripts(model, processor, nothing, WhisperCD(0, beta=0, gate=0.01), **options)
        assert all(token >= begin for tokens in found for token in tokens)


@pytest.mark.parametrize("prompt", [None, [5, 6, 7]], ids=["alone", "after_a_prompt"])
def test_the_gate_reads_the_no_speech_probability_of_the_transcriber(
    model, processor, waves, kit, prompt
):
    """Noise a hundred decibels below the window leaves that probability as it is."""
    clip = [waves[1]]
    options = make_options(
        {"prompt": prompt, "no_speech_threshold": 1.0, "logprob_threshold": -100.0}
    )
    segments = Transcriber(model, processor, Decoder(seed=0), options)(waves[1]).segments
    known = segments[0].no_speech_prob
    begin = processor.tokenizer.convert_tokens_to_ids("<|0.00|>")
    has_text = []
    for threshold in (0.99 * known, 1.01 * known):
        guide = WhisperCD(0, beta=0, gate=0, snr=100.0, no_speech=threshold)
        (tokens,) = transcripts(model, processor, clip, guide, prompt=prompt)
        has_text.append(any(token < begin for token in tokens))
    assert has_text == [False, True]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "gates"),
    [
        ("white", "gate=0.9"),
        ("pink", "gate=0,no_speech=0.004,snr=20"),
        ("babble", "gate=0,structure=0.6"),
    ],
    ids=["silence", "no_speech", "structure"],
)
def test_the_trained_model_is_silent_in_noise_and_hears_speech_as_before(kind, gates):
    clips = speech_test()[:3]
    waves = [sound(kind, -20, 8.0, seed=0), *(clip.samples() for clip in clips)]
    guide = {"guide": f"whisper_cd:alpha=0,beta=0,{gates}"}
    found = [
        Transcriber.from_pretrained("zoo:whisper-synth", device="cpu", **options)(waves)
        for options in ({}, guide, guide | {"draft": "medusa"})
    ]
    plain, guided, drafted = ([one.tokens for one in each] for each in found)
    assert found[0][0].text and not found[1][0].text
    assert guided[1:] == plain[1:]
    assert drafted == guided
