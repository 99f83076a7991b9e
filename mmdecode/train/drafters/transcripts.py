"""A recogniser's transcripts of recordings, with the states that Medusa heads are trained on.

`transcribed` works for every recogniser that the engine has an adapter for. Recordings of unequal
length are encoded as the recogniser does it, without padding, and are stored without padding.
`collect` and `greedy` read the features of a Whisper, for recipes that have no recordings.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.modeling_outputs import BaseModelOutput

from mmdecode import registry
from mmdecode.asr.options import TranscribeOptions
from mmdecode.asr.recognizers import Recognizer
from mmdecode.asr.recognizers.contract import Encoded
from mmdecode.asr.recognizers.whisper_prompts import Prompts, processors
from mmdecode.engine.adapter import Prompt
from mmdecode.engine.cache import RaggedCache
from mmdecode.engine.masks import block_mask, chain
from mmdecode.engine.request import token_ids

SHORTEST_S = 0.1
"""Length in seconds up to which the rest of a recording is left out."""
BATCHES = {True: 8, False: 16}
"""Windows that are transcribed at once, by whether all windows have the same length."""


@dataclass
class Sample:
    """Transcript of a recording with the states that the heads are trained on.

    Attributes:
        ids: Token ids of prompt and transcript, with the end-of-sequence token, ``(L,)``.
        prompt: Number of prompt tokens, which have no loss.
        hidden: Last decoder states of the model, ``(L, H)`` float16.
        audio: Encoder states of the model without padding, ``(S, H)`` float16; ``None``: they are
            not kept, since heads without a block do not read them.
    """

    ids: Tensor
    prompt: int
    hidden: Tensor
    audio: Tensor | None


def open_past(
    adapter: Any, layers: int, ids: Tensor, source: Tensor, source_mask: Tensor | None
) -> tuple[Any, Tensor]:
    """Returns empty caches for right-padded rows, and the mask of one pass over them.

    Args:
        adapter: Adapter of an encoder-decoder.
        layers: Number of layers that are run.
        ids: Token ids, ``(B, L)``.
        source: Encoder states, ``(B, S, H)``.
        source_mask: True for states that are not padding, ``(B, S)``; ``None``: there is none.
    """
    rows, length = ids.shape
    inputs = {"source": source}
    if source_mask is not None:
        inputs["source_mask"] = source_mask
    cache = RaggedCache(layers, rows, ids.device)
    past = adapter.open(cache, Prompt(ids=ids, mask=torch.ones_like(ids).bool(), inputs=inputs))
    zero = torch.zeros(rows, dtype=torch.long, device=ids.device)
    cache.open(length)
    return past, block_mask(zero, zero, *chain(length, ids.device), length, source.dtype)


@torch.no_grad()
def samples_of(
    model: Any,
    ids: Tensor,
    prompt: int,
    ends: Collection[int],
    source: Tensor,
    source_mask: Tensor | None = None,
    audio: bool = True,
) -> Iterator[Sample]:
    """Computes the decoder states of transcripts, and yields a sample per row.

    Args:
        model: The recogniser's model.
        ids: Token ids of prompts and transcripts, ``(B, L)``.
        prompt: Number of prompt tokens.
        ends: Ids that end a transcript.
        source: Encoder states, ``(B, S, H)``.
        source_mask: True for states that are not padding, ``(B, S)``; ``None``: there is none.
        audio: Whether samples keep the encoder states.
    """
    adapter = registry.adapter_for(model)
    past, mask = open_past(adapter, adapter.num_layers, ids, source, source_mask)
    positions = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
    hidden = adapter.forward(ids, mask, positions, past).half().cpu()
    ended = torch.isin(ids[:, prompt:], ids.new_tensor(sorted(ends)))
    for row, tokens in enumerate(ids):
        found = ended[row].nonzero()
        length = prompt + int(found[0]) + 1 if len(found) else len(tokens)
        kept = source[row] if source_mask is None else source[row][source_mask[row]]
        yield Sample(
            ids=tokens[:length].cpu().clone(),
            prompt=prompt,
            hidden=hidden[row, :length].clone(),
            audio=kept.half().cpu() if audio else None,
        )


def windows_of(recognizer: Recognizer, waves: Iterable[Any]) -> list[Any]:
    """Cuts recordings ``(T,)`` into windows of the recogniser's greatest length, the rest too."""
    size, least = round(recognizer.window_s * recognizer.rate), round(SHORTEST_S * recognizer.rate)
    return [
        wave[start : start + size]
        for wave in waves
        for start in range(0, len(wave), size)
        if len(wave) - start > least
    ]


@dataclass
class Batch:
    """Windows that were transcribed together.

    Attributes:
        recognizer: The recogniser that transcribed them.
        encoded: The encoded windows.
        ids: Token ids of prompts and transcripts, ``(B, L)``.
        prompt: Number of prompt tokens.
        limits: Maximum length of each transcript in tokens; what is beyond is no part of it.
    """

    recognizer: Recognizer
    encoded: Encoded
    ids: Tensor
    prompt: int
    limits: list[int]


@torch.no_grad()
def batches_of(
    recognizers: Sequence[Recognizer],
    windows: Sequence[Any],
    decoder: Any,
    language: int | None = None,
) -> Iterator[Batch]:
    """Transcribes windows of recordings greedily, in batches.

    Windows of unequal length are transcribed in the order of their lengths.

    Args:
        recognizers: Recognisers of one model, which take turns, a batch each.
        windows: Samples ``(T,)`` of windows.
        decoder: Decoder that generates greedily; every exact drafter gives the same samples.
        language: Token of the language; ``None``: there is none.
    """
    fixed, rate = recognizers[0].capabilities.fixed_windows, recognizers[0].rate
    ordered = list(windows) if fixed else sorted(windows, key=len)
    size = BATCHES[fixed]
    for index, start in enumerate(range(0, len(ordered), size)):
        recognizer = recognizers[index % len(recognizers)]
        waves = ordered[start : start + size]
        seconds = [len(wave) / rate for wave in waves]
        encoded = recognizer.encode(recognizer.features(waves), seconds)
        assert encoded.states is not None, "the engine has an adapter"
        row = recognizer.prompt(language, [])
        prompt = torch.tensor([row] * len(waves), device=encoded.states.device)
        given = recognizer.options.max_new_tokens
        limits = [given or recognizer.most_tokens(second) for second in seconds]
        ids = recognizer.generate(
            decoder,
            prompt,
            encoded,
            recognizer.generation(len(row), max(limits)),
            0.0,
            [str(start + at) for at in range(len(waves))],
            [[] for _ in waves],
        )
        yield Batch(recognizer, encoded, ids, len(row), limits)


def transcribed(
    recognizers: Sequence[Recognizer],
    windows: Sequence[Any],
    decoder: Any,
    language: int | None = None,
    audio: bool = True,
) -> Iterator[Sample]:
    """Transcribes windows as `batches_of`, and yields transcripts and states.

    Args:
        recognizers: Recognisers of one model, which take turns, a batch each.
        windows: Samples ``(T,)`` of windows.
        decoder: Decoder that generates greedily.
        language: Token of the language; ``None``: there is none.
        audio: Whether samples keep the encoder states.
    """
    for batch in batches_of(recognizers, windows, decoder, language):
        states = batch.encoded.states
        assert states is not None, "the engine has an adapter"
        ends = batch.recognizer.eos_token_ids
        found = samples_of(
            batch.recognizer.model, batch.ids, batch.prompt, ends, states, batch.encoded.mask, audio
        )
        for sample, limit in zip(found, batch.limits, strict=True):
            length = batch.prompt + limit
            yield replace(sample, ids=sample.ids[:length], hidden=sample.hidden[:length])


@torch.no_grad()
def collect(
    model: Any, batches: Iterable[tuple[Tensor, Tensor]], decoder: Any, max_new_tokens: int
) -> Iterator[Sample]:
    """Transcribes audio with a model and yields its transcripts and states.

    Args:
        model: A Whisper.
        batches: Pairs of features ``(B, mel, frames)`` and unpadded decoder prompts ``(B, P)``.
        decoder: Decoder that generates greedily; every exact drafter gives the same samples.
        max_new_tokens: Maximum length of a transcript in tokens.
    """
    ends = token_ids(model.generation_config.eos_token_id)
    device = next(model.parameters()).device
    for features, prompt in batches:
        prompt = prompt.to(device)
        audio = model.get_encoder()(features.to(device, model.dtype)).last_hidden_state
        ids = greedy(model, audio, prompt, decoder, max_new_tokens)
        yield from samples_of(model, ids, prompt.shape[1], ends, audio)


def greedy(model: Any, audio: Tensor, prompt: Tensor, decoder: Any, max_new_tokens: int) -> Tensor:
    """Transcribes encoder states greedily, with Whisper's logits processors.

    Args:
        model: A Whisper.
        audio: Encoder states, ``(B, S, H)``.
        prompt: Decoder prompts, ``(B, P)``.
        decoder: Decoder, with or without a drafter.
        max_new_tokens: Maximum length of a transcript in tokens.

    Returns:
        Token ids of prompts and transcripts, ``(B, L)``.
    """
    config = copy.deepcopy(model.generation_config)
    width = prompt.shape[1]
    config.update(max_length=width + max_new_tokens, max_new_tokens=None, do_sample=False)
    timestamps = int(prompt[0, -1]) != config.no_timestamps_token_id
    rules = processors(config, width, TranscribeOptions(timestamps=timestamps), 0.0)
    return decoder(
        model,
        prompt,
        logits_processor=rules,
        stopping_criteria=StoppingCriteriaList(),
        generation_config=config,
        encoder_outputs=BaseModelOutput(last_hidden_state=audio),
    )


def whisper_prompt(model: Any, rows: int, timestamps: int, language: str = "en") -> Tensor:
    """Returns equal decoder prompts for a batch, ``(rows, P)``.

    Args:
        model: A Whisper.
        rows: Batch size.
        timestamps: 1 for transcripts with timestamps, 0 without.
        language: Language of the audio; used only if the checkpoint is multilingual.
    """
    config = model.generation_config
    multilingual = getattr(config, "is_multilingual", False)
    options = TranscribeOptions(
        timestamps=bool(timestamps),
        language=language if multilingual else None,
        task="transcribe" if multilingual else None,
    )
    prompts = Prompts.of(config, options)
    return torch.tensor([prompts.initial(prompts.language)]).expand(rows, -1).clone()
