"""Tiny random recognisers without timestamps, as checkpoints: two Moonshines, one nobody knows."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    MoonshineConfig,
    MoonshineForConditionalGeneration,
    MoonshineStreamingConfig,
    MoonshineStreamingForConditionalGeneration,
    MoonshineStreamingProcessor,
    PreTrainedTokenizerFast,
    Speech2TextConfig,
    Speech2TextFeatureExtractor,
    Speech2TextForConditionalGeneration,
    Speech2TextProcessor,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2Processor,
)

VOCAB = 40
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}

WORDS_ONLY = {"suppress_tokens": [0, 2, 3], "begin_suppress_tokens": [1]}


def tokenizer():
    """Words that begin with a space, and letters that go on."""
    words = [f"\u2581w{number}" for number in range(24)]
    names = [*SPECIAL.values(), *words]
    names += [chr(ord("a") + number) for number in range(VOCAB - len(names))]
    ids = {name: index for index, name in enumerate(names)}
    inner = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, **SPECIAL)


def _set(config, settings):
    config._from_model_config = False  # else what is set here is lost on disk
    for name, value in (WORDS_ONLY | settings).items():
        setattr(config, name, value)


def moonshine(seed=3, **settings):
    config = MoonshineConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        encoder_num_hidden_layers=1,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=2,
        decoder_num_attention_heads=2,
        partial_rotary_factor=0.9,
        max_position_embeddings=32,
        initializer_range=0.4,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        decoder_start_token_id=0,
    )
    torch.manual_seed(seed)
    model = MoonshineForConditionalGeneration(config).eval()
    _set(model.generation_config, settings)
    features = Wav2Vec2FeatureExtractor(do_normalize=False)
    return model, Wav2Vec2Processor(feature_extractor=features, tokenizer=tokenizer())


def moonshine_streaming(seed=20, encoder=None, **settings):
    """Its encoder looks 2 states ahead; ``encoder``: further settings of the encoder."""
    config = MoonshineStreamingConfig(
        encoder_config={
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "sliding_windows": [[4, 2], [3, 0], [4, 2]],
            "initializer_range": 0.4,
            **(encoder or {}),
        },
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,  # no field of the config, but the model reads it
        max_position_embeddings=1024,
        initializer_range=0.4,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        decoder_start_token_id=0,
    )
    torch.manual_seed(seed)
    model = MoonshineStreamingForConditionalGeneration(config).eval()
    _set(model.generation_config, settings)
    features = Wav2Vec2FeatureExtractor(do_normalize=False)
    return model, MoonshineStreamingProcessor(feature_extractor=features, tokenizer=tokenizer())


def speech_to_text(seed=1, **settings):
    config = Speech2TextConfig(
        vocab_size=VOCAB,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        conv_channels=16,
        input_feat_per_channel=16,
        max_target_positions=24,
        init_std=0.6,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        decoder_start_token_id=1,
    )
    torch.manual_seed(seed)
    model = Speech2TextForConditionalGeneration(config).eval()
    _set(model.generation_config, settings)
    features = Speech2TextFeatureExtractor(feature_size=16, num_mel_bins=16)
    return model, Speech2TextProcessor(feature_extractor=features, tokenizer=tokenizer())


MODELS = {"moonshine": moonshine, "speech_to_text": speech_to_text}
