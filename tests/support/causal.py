"""A causal Whisper with the weights of the zoo's Whisper, before any training."""

from functools import cache

from transformers import WhisperProcessor

from mmdecode.asr.recognizers.whisper_features import Mel
from mmdecode.checkpoints import local_path
from mmdecode.train.zoo.whisper_synth_stream import causal

BASE = "zoo:whisper-synth"


@cache
def causal_whisper(chunk=8, extra=0):
    """Model and processor."""
    model = causal(BASE, chunk).eval()
    model.config.extra = model.get_encoder().config.extra = extra
    return model, WhisperProcessor.from_pretrained(local_path(BASE))


def mel_of(model, processor):
    return Mel(processor.feature_extractor, 2 * model.config.max_source_positions)
