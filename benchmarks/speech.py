"""Shared by the speech benchmarks: the shipped clips, and our loop after Whisper's encoder."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.modeling_outputs import BaseModelOutput

from mmdecode.asr.options import TranscribeOptions
from mmdecode.asr.recognizers.whisper_prompts import processors
from mmdecode.train.drafters.transcripts import whisper_prompt

HERE = Path(__file__).parent


def clips(extractor, limit=None):
    """Test clips that fit one window, as ``(clip, variant)``; after them their noisy variants.

    Args:
        extractor: The model's feature extractor.
        limit: Number of clips; ``None``: the clean ones.
    """
    from mmdecode.zoo.speech import speech_test

    longest = extractor.n_samples / extractor.sampling_rate
    short = [clip for clip in speech_test() if clip.duration_s <= longest]
    found = [(clip, variant) for variant in ("clean", "noisy") for clip in short]
    return found[: len(short) if limit is None else limit]


def windows(extractor, limit=None):
    """Features of `clips`, ``(N, mel, frames)``; shipped ones, repeated, without soundfile."""
    if find_spec("soundfile") is None:
        from safetensors.torch import load_file

        shipped = load_file(HERE / "data" / "windows.safetensors")["features"].float()
        return shipped.repeat(-(-(limit or 1) // len(shipped)), 1, 1)[:limit]
    waves = [clip.samples(variant) for clip, variant in clips(extractor, limit)]
    return extractor(waves, sampling_rate=16_000, return_tensors="pt").input_features


@torch.no_grad()
def encode(model, features):
    """Encoder states, ``(B, S, H)``."""
    return model.get_encoder()(features.to(model.dtype)).last_hidden_state


def engine(model, decoder, timestamps, temperature=0.0, most=None, **options):
    """Our loop after the encoder: ``audio (B, S, H)`` to token ids after the prompt.

    Args:
        model: A Whisper.
        decoder: The decoder.
        timestamps: Whether timestamps are predicted.
        temperature: 0 is greedy.
        most: Largest number of tokens; ``None``: all that the model has positions for.
        **options: Further entries of the generation configuration; where these ask for an output
            object, it is returned whole.
    """
    config = model.generation_config
    prompt = whisper_prompt(model, 1, int(timestamps)).to(model.device)
    width = prompt.shape[1]
    rules = processors(config, width, TranscribeOptions(timestamps=timestamps), temperature)
    call = GenerationConfig(
        max_length=width + most if most else model.config.max_target_positions,
        do_sample=temperature > 0,
        num_beams=1,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        **options,
    )

    def run(audio, **inputs):
        found = decoder(
            model,
            prompt.expand(len(audio), -1),
            logits_processor=rules,
            stopping_criteria=StoppingCriteriaList(),
            generation_config=call,
            # a new tensor, so that what a call derives from the states is computed in each call
            encoder_outputs=BaseModelOutput(last_hidden_state=audio.detach()),
            **inputs,
        )
        return found if call.return_dict_in_generate else found[:, width:]

    return run


def clean(ids, model):
    """Rows up to the end-of-sequence token, as lists."""
    eos = model.generation_config.eos_token_id
    rows = []
    for row in ids.tolist():
        rows.append(row[: row.index(eos)] if eos in row else row)
    return rows
