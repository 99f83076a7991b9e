"""A tiny random Whisper with windows of two seconds, recordings, and the shipped trained model."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

import mmdecode
from mmdecode import checkpoints

DATA = Path(__file__).parents[1] / "data" / "speech"
SHARED = Path(mmdecode.__file__).parents[2] / "shared" / "data" / "speech"
WINDOW_S, STEP_S = 2, 0.04
RATE = 16_000


def build_processor():
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([], vocab_size=256, show_progress=False)
    tokenizer = WhisperTokenizer(vocab=bpe.get_vocab(), merges=[])
    special = "endoftext startoftranscript en de translate transcribe startofprev nospeech".split()
    special = [f"<|{name}|>" for name in [*special, "notimestamps"]]
    special += [f"<|{i * STEP_S:.2f}|>" for i in range(round(WINDOW_S / STEP_S) + 1)]
    tokenizer.add_special_tokens({"extra_special_tokens": special})
    tokenizer.pad_token = "<|endoftext|>"
    extractor = WhisperFeatureExtractor(feature_size=20, hop_length=320, chunk_length=WINDOW_S)
    return WhisperProcessor(feature_extractor=extractor, tokenizer=tokenizer)


def build_model(processor, seed=3, scale=1.0, positions=26, **overrides):
    """Weights large enough that the audio and the text so far decide the next token."""
    ids = processor.tokenizer.convert_tokens_to_ids
    torch.manual_seed(seed)
    config = WhisperConfig(
        vocab_size=len(processor.tokenizer),
        num_mel_bins=20,
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=round(WINDOW_S / STEP_S),
        max_target_positions=positions,
        tie_word_embeddings=False,
        init_std=0.3,
        pad_token_id=ids("<|endoftext|>"),
        bos_token_id=ids("<|endoftext|>"),
        eos_token_id=ids("<|endoftext|>"),
        decoder_start_token_id=ids("<|startoftranscript|>"),
    )
    model = WhisperForConditionalGeneration(config).eval()
    model.generation_config = GenerationConfig(
        decoder_start_token_id=ids("<|startoftranscript|>"),
        bos_token_id=ids("<|endoftext|>"),
        eos_token_id=ids("<|endoftext|>"),
        pad_token_id=ids("<|endoftext|>"),
        begin_suppress_tokens=[220, ids("<|endoftext|>")],
        suppress_tokens=list(range(ids("<|startoftranscript|>"), ids("<|notimestamps|>"))),
        lang_to_id={"<|en|>": ids("<|en|>"), "<|de|>": ids("<|de|>")},
        task_to_id={"transcribe": ids("<|transcribe|>"), "translate": ids("<|translate|>")},
        no_timestamps_token_id=ids("<|notimestamps|>"),
        prev_sot_token_id=ids("<|startofprev|>"),
        max_initial_timestamp_index=25,
        return_timestamps=False,
        max_length=config.max_target_positions,
        **{"is_multilingual": True, "language": "en", "task": "transcribe", **overrides},
    )
    with torch.no_grad():
        model.proj_out.weight.mul_(scale)  # larger: surer, longer windows
    return model


def noise(seconds, seed=0, rate=RATE):
    """Bursts of coloured noise: every window of a recording differs."""
    random = np.random.default_rng(seed)
    count = round(seconds * rate)
    times = np.arange(count) / rate
    tones = sum(
        np.sin(2 * np.pi * f * times + 9 * np.sin(2 * np.pi * random.uniform(0.2, 1) * times))
        for f in random.uniform(150, 3000, 4)
    )
    loud = 0.5 + 0.5 * np.sin(2 * np.pi * random.uniform(0.3, 0.9) * times)
    return (0.1 * loud * tones + 0.01 * random.standard_normal(count)).astype(np.float32)


@pytest.fixture(scope="session")
def processor():
    return build_processor()


@pytest.fixture(scope="session")
def model(processor):
    return build_model(processor)


@pytest.fixture(scope="session")
def trained():
    """Path of the shipped trained model."""
    return str(checkpoints.ZOO / "whisper-synth")


@pytest.fixture(scope="session")
def folder(tmp_path_factory, processor, model):
    """The tiny random model as a checkpoint."""
    path = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return path


def long_features(processor, samples):
    """What transformers' long form is given for one recording."""
    return processor.feature_extractor(
        samples, sampling_rate=RATE, return_tensors="pt", truncation=False, padding="longest"
    ).input_features


def stock_long_form(model, processor, samples, **options):
    """Tokens and (start, end) of transformers' own long form, for one recording."""
    extractor = processor.feature_extractor
    output = model.generate(
        long_features(processor, samples),
        return_timestamps=True,
        return_segments=True,
        time_precision=extractor.chunk_length / model.config.max_source_positions,
        time_precision_features=extractor.hop_length / extractor.sampling_rate,
        **options,
    )
    segments = output["segments"][0]
    times = [(round(float(s["start"]), 6), round(float(s["end"]), 6)) for s in segments]
    tokens = [token for s in segments for token in s["tokens"].tolist()]
    return tokens, times


def times_of(transcript):
    return [(segment.start_s, segment.end_s) for segment in transcript.segments]


@pytest.fixture(scope="session")
def kit():
    """The functions above, for test modules, which cannot import this one."""
    return SimpleNamespace(
        build_model=build_model,
        noise=noise,
        long_features=long_features,
        stock=stock_long_form,
        times=times_of,
        rate=RATE,
        data=DATA,
        shared=SHARED,
    )
