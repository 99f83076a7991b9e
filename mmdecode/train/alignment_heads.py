"""Finds the ``alignment_heads`` of a Whisper: cross-attention heads that give word timestamps.

The model transcribes recordings, and forced alignment gives the start and end of each token. The
score of a head is the share of a token's attention that falls between them, minus the share that
uniform attention would put there. Heads are ranked by score; the number of heads chosen is the one
whose word timestamps differ least from the forced alignment, at most ``most``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.modeling_outputs import BaseModelOutput

from mmdecode.asr.alignment.cross_attention import (
    Head,
    Spoken,
    Timer,
    attention_spans,
    cross_attention,
)
from mmdecode.asr.alignment.words import Token, split_words
from mmdecode.decoder import Decoder
from mmdecode.engine.request import token_ids
from mmdecode.errors import InputError
from mmdecode.runs.files import refuse_foreign, write_file
from mmdecode.train.drafters.transcripts import greedy, whisper_prompt


@dataclass
class Aligned:
    """A transcribed and aligned recording.

    Attributes:
        tokens: Tokens of the transcript with their times from forced alignment.
        weights: Cross-attention weights of every head, ``(layers * heads, tokens + 1, frames)``.
        spoken: Whether each token is text, and not a timestamp.
    """

    tokens: list[Token]
    weights: Tensor
    spoken: list[bool]


@torch.no_grad()
def collect(
    model: Any, processor: Any, waves: Iterable[np.ndarray], method: str, language: str = "en"
) -> Iterator[Aligned]:
    """Transcribes recordings and aligns them; recordings without a spoken word are skipped.

    Args:
        model: A Whisper.
        processor: Processor of the model.
        waves: Recordings at the model's sampling rate, truncated to the model's window.
        method: Method of forced alignment, a value of the option ``word_timestamps``.
        language: Language of the recordings; used only if the checkpoint is multilingual.
    """
    extractor, config = processor.feature_extractor, model.config
    stride = extractor.nb_max_frames // config.max_source_positions
    frame_s = stride * extractor.hop_length / extractor.sampling_rate
    eos = token_ids(model.generation_config.eos_token_id)[0]
    stamps = model.generation_config.no_timestamps_token_id + 1
    timer = Timer(
        model,
        processor.tokenizer,
        method,
        stamps=stamps,
        frame_s=frame_s,
        rate=extractor.sampling_rate,
    )
    every = every_head(model)
    prompt = whisper_prompt(model, 1, 1, language).to(model.device)
    room = config.max_target_positions - prompt.shape[1]
    for wave in waves:
        wave = wave[: extractor.n_samples]
        features = extractor(
            wave, sampling_rate=extractor.sampling_rate, return_tensors="pt"
        ).input_features.to(model.device, model.dtype)
        audio = model.get_encoder()(features).last_hidden_state
        ids = greedy(model, audio, prompt, Decoder(), room)[0].tolist()[prompt.shape[1] :]
        tokens = ids[: ids.index(eos)] if eos in ids else ids
        frames = -(-len(wave) // (stride * extractor.hop_length))
        rules = LogitsProcessorList()
        window = Spoken(prompt[0].tolist(), tokens, rules, 0.0, frames, features[0], wave)
        [timed] = timer([window], audio)
        spoken = [token < stamps for token in tokens]
        if not any(spoken):
            continue
        with cross_attention(model.get_decoder(), every) as attention:
            model(
                encoder_outputs=BaseModelOutput(last_hidden_state=audio),
                decoder_input_ids=torch.tensor([window.prompt + tokens], device=model.device),
                use_cache=False,
            )
        weights = attention.weights(0, frames)[:, len(window.prompt) - 1 :]
        yield Aligned(timed, weights.cpu(), spoken)


def every_head(model: Any) -> list[Head]:
    """Returns layer and head of all cross-attention heads of the decoder, layer by layer."""
    config = model.config
    return [
        (layer, head)
        for layer in range(config.decoder_layers)
        for head in range(config.decoder_attention_heads)
    ]


def score_heads(data: Sequence[Aligned], frame_s: float) -> Tensor:
    """Returns the mean score of each head over all text tokens, ``(heads,)``; see the module.

    Args:
        data: Aligned recordings.
        frame_s: Duration of an encoder frame in seconds.
    """
    gains = []
    for aligned in data:
        frames = aligned.weights.shape[-1]
        for row, token in enumerate(aligned.tokens):
            if not aligned.spoken[row]:
                continue
            start = min(int(token.start_s / frame_s), frames - 1)
            end = min(max(start + 1, round(token.end_s / frame_s)), frames)
            gains.append(aligned.weights[:, row, start:end].sum(-1) - (end - start) / frames)
    return torch.stack(gains).mean(0)


def word_errors(
    data: Sequence[Aligned], heads: Sequence[int], tokenizer: Any, frame_s: float
) -> np.ndarray:
    """Returns how far word times from attention are from forced alignment, ``(2, words)``.

    Args:
        data: Aligned recordings.
        heads: Indices of the heads that word times are computed from, as `every_head` orders them.
        tokenizer: Tokenizer of the model.
        frame_s: Duration of an encoder frame in seconds.

    Returns:
        Signed errors of the words' starts (row 0) and ends (row 1) in seconds.
    """
    missed: list[tuple[float, float]] = []
    for aligned in data:
        spans = attention_spans(aligned.weights[list(heads)], frame_s, aligned.spoken)
        text_spans = [
            (t, s)
            for t, s, is_text in zip(aligned.tokens, spans, aligned.spoken, strict=True)
            if is_text
        ]
        first = 0
        for _, count in split_words([token for token, _ in text_spans], tokenizer):
            own = text_spans[first : first + count]
            first += count
            missed.append((own[0][1][0] - own[0][0].start_s, own[-1][1][1] - own[-1][0].end_s))
    return np.array(missed).T


def find_heads(
    model: Any, processor: Any, waves: Iterable[np.ndarray], method: str = "ctc", most: int = 10
) -> dict[str, Any]:
    """Scores all cross-attention heads on recordings and chooses the best for word timestamps.

    Args:
        model: A Whisper.
        processor: Processor of the model.
        waves: Recordings at the model's sampling rate.
        method: Method of forced alignment.
        most: Maximum number of heads to choose.

    Returns:
        ``alignment_heads``: layer and head of the chosen heads; ``scores``: score of each head;
        ``median_error_s_by_heads``: for the 1, 2, ... best heads, the median absolute difference
        of word starts and ends from the forced alignment, in seconds; ``recordings``: number of
        recordings used.

    Raises:
        InputError: The model recognised no word in any recording.
    """
    data = list(collect(model, processor, waves, method))
    if not data:
        raise InputError(
            "the model recognised no word in any recording; give recordings of speech in a "
            "language that the model knows"
        )
    frame_s = processor.feature_extractor.chunk_length / model.config.max_source_positions
    every = every_head(model)
    scores = score_heads(data, frame_s)
    order = scores.argsort(descending=True).tolist()[:most]
    errors = [
        float(np.median(np.abs(word_errors(data, order[: n + 1], processor.tokenizer, frame_s))))
        for n in range(len(order))
    ]
    best = int(np.argmin(errors)) + 1
    return {
        "alignment_heads": sorted(list(every[index]) for index in order[:best]),
        "median_error_s_by_heads": [round(error, 4) for error in errors],
        "scores": {f"{a}.{b}": round(float(s), 4) for (a, b), s in zip(every, scores, strict=True)},
        "recordings": len(data),
    }


def recordings(manifest: Path, rate: int, limit: int) -> Iterator[np.ndarray]:
    """Yields the samples of recordings.

    Args:
        manifest: Path of a table of recordings, or of a folder of audio files.
        rate: Sampling rate in hertz to resample to.
        limit: Maximum number of recordings.
    """
    from mmdecode.asr.audio.reading import blocks
    from mmdecode.asr.output.inputs import recordings_in
    from mmdecode.asr.output.manifest import opened

    for entry in recordings_in(manifest, limit):
        yield np.concatenate(list(blocks(opened(entry), rate)))


def zoo_speech(count: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Yields synthetic speech: training sentences of the zoo's grammar; needs espeak-ng.

    Args:
        count: Number of sentences.
        seed: Seed of sentences, voices and pauses.
    """
    from mmdecode.zoo import grammar, synthesis

    rng = random.Random(f"heads/{seed}")
    engine = synthesis.Espeak()
    for text in grammar.sentences(count, seed + 77, "train"):
        lead = np.zeros(rng.randint(1600, 12_000), np.float32)
        yield np.concatenate([lead, engine.speak(text, synthesis.Voice.draw(rng)), lead])


def config_for_heads(folder: Path) -> dict[str, Any]:
    """Reads ``generation_config.json`` of a checkpoint's folder, if `write_heads` may replace it.

    Raises:
        OptionError: The file was not written by mmdecode, and overwriting is not allowed.
        InputError: The file cannot be read.
    """
    file = folder / "generation_config.json"
    refuse_foreign([file])
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"{file} cannot be read ({error}); expected the folder of a Whisper checkpoint"
        ) from error


def write_heads(folder: Path, heads: list[list[int]]) -> None:
    """Writes ``alignment_heads`` into ``generation_config.json`` of a checkpoint's folder.

    Args:
        folder: Folder of the checkpoint.
        heads: Layer and head of each alignment head.
    """
    config = config_for_heads(folder) | {"alignment_heads": heads}
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    write_file(folder / "generation_config.json", text)
