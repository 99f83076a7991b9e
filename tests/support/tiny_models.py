"""Random models as small as they get; a test names the sizes and ids that its numbers depend on."""

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
WHISPER = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}


def llama(seed=0, **config):
    """A Llama; ``config`` over the sizes in `LLAMA`."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**LLAMA | config)).eval()


def whisper(seed=0, **config):
    """A Whisper without a generation config; ``config`` over the sizes in `WHISPER`."""
    torch.manual_seed(seed)
    return WhisperForConditionalGeneration(WhisperConfig(**WHISPER | config)).eval()
