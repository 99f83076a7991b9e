"""Finds the ``alignment_heads`` of a recogniser: cross-attention heads that show word times.

The model transcribes recordings, and forced alignment gives the start and end of each token. The
score of a head is the share of a token's attention that falls between them, minus the share that
uniform attention would put there. Heads are ranked by score; the number of heads chosen is the one
whose word timestamps differ least from the forced alignment, at most ``most``.

The forced aligner is a CTC model, which need not belong to the recogniser: that of
``zoo:whisper-synth`` reads the samples of any recording (``ctc:model=zoo:whisper-synth``).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mmdecode.asr.alignment.cross_attention import (
    Spoken,
    attention_spans,
    cross_attention,
    ctc_spans,
    every_head,
)
from mmdecode.asr.alignment.ctc import ctc_model_of
from mmdecode.asr.alignment.evidence import frames_of
from mmdecode.asr.alignment.words import SPACES, Token, split_words
from mmdecode.asr.audio.reading import source_of
from mmdecode.asr.recognizers import Recognizer
from mmdecode.decoder import Decoder
from mmdecode.errors import InputError, OptionError
from mmdecode.runs.files import refuse_foreign, write_file
from mmdecode.train.drafters.medusa import recognizers_of
from mmdecode.train.drafters.transcripts import batches_of


@dataclass
class Aligned:
    """A transcribed and aligned recording.

    Attributes:
        tokens: Tokens of the transcript with their times from forced alignment.
        weights: Cross-attention weights of every head, ``(layers * heads, tokens + 1, frames)``.
        spoken: Whether each token is text, and not a timestamp.
        frame_s: Duration of an encoder frame in seconds.
    """

    tokens: list[Token]
    weights: Tensor
    spoken: list[bool]
    frame_s: float


@torch.no_grad()
def collect(
    recognizer: Recognizer, waves: Iterable[np.ndarray], method: str, language: str = "en"
) -> Iterator[Aligned]:
    """Transcribes recordings and aligns them; recordings without a spoken word are skipped.

    Args:
        recognizer: A recogniser that the engine has an adapter for.
        waves: Recordings at the model's sampling rate, truncated to the model's window.
        method: Method of forced alignment: ``ctc`` or ``ctc:model=NAME``.
        language: Language of the recordings.

    Raises:
        OptionError: The method is no forced alignment.
        InputError: The CTC model cannot be loaded, or the recogniser lacks the language.
    """
    ctc = ctc_model_of(method, recognizer.model, recognizer.rate)
    if ctc is None:
        raise OptionError(f"--method {method}; expected a forced aligner, ctc[:model=NAME]")
    model, tokenizer = recognizer.model, byte_level(recognizer.tokenizer)
    every = every_head(model)
    for wave in waves:
        wave = wave[: round(recognizer.window_s * recognizer.rate)]
        spoken_in = recognizer.language_of(source_of({"audio": wave, "language": language}, 1))
        [batch] = batches_of([recognizer], [wave], Decoder(), spoken_in)
        prompt, tokens = batch.ids[0].split((batch.prompt, batch.ids.shape[1] - batch.prompt))
        ids = [token for token in tokens.tolist() if token not in recognizer.eos_token_ids]
        if not any(map(is_text := recognizer.is_text, ids)):
            continue
        frames, frame_s = frames_of(recognizer, batch.encoded, 0)
        features = batch.encoded.inputs[0]
        window = Spoken(prompt.tolist(), ids, LogitsProcessorList(), 0.0, frames, features, wave)
        spans = ctc_spans(window, ctc, tokenizer, is_text, frame_s)
        with cross_attention(model.get_decoder(), every) as attention:
            recognizer.logits(torch.cat([prompt, prompt.new_tensor(ids)])[None], batch.encoded)
        yield Aligned(
            [Token.of(token, *span, 1.0) for token, span in zip(ids, spans, strict=True)],
            attention.weights(0, frames)[:, len(prompt) - 1 :].cpu(),
            [is_text(token) for token in ids],
            frame_s,
        )


class ByteLevel:
    """Tokenizer that names SentencePiece's pieces as a byte-level BPE tokenizer would.

    Args:
        tokenizer: A tokenizer whose pieces have `SPACES` for spaces, and ``<0x0A>`` for a byte.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._names = tokenizer, bytes_to_unicode()

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        """Returns the names of tokens, a character for each byte."""
        return ["".join(map(self._names.__getitem__, self._bytes(id_))) for id_ in ids]

    def _bytes(self, token: int) -> bytes:
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return bytes((int(piece[3:5], 16),))
        return piece.replace(SPACES[1], " ").encode()


def byte_level(tokenizer: Any) -> Any:
    """Returns a tokenizer with byte-level names, as `mmdecode.asr.alignment.words` reads them."""
    pieces = (piece.startswith(SPACES[1]) for piece in tokenizer.get_vocab())
    return ByteLevel(tokenizer) if any(pieces) else tokenizer


def score_heads(data: Sequence[Aligned]) -> Tensor:
    """Returns the mean score of each head over all text tokens, ``(heads,)``; see the module."""
    gains = []
    for aligned in data:
        frames = aligned.weights.shape[-1]
        for row, token in enumerate(aligned.tokens):
            if not aligned.spoken[row]:
                continue
            start = min(int(token.start_s / aligned.frame_s), frames - 1)
            end = min(max(start + 1, round(token.end_s / aligned.frame_s)), frames)
            gains.append(aligned.weights[:, row, start:end].sum(-1) - (end - start) / frames)
    return torch.stack(gains).mean(0)


def word_errors(data: Sequence[Aligned], heads: Sequence[int], tokenizer: Any) -> np.ndarray:
    """Returns how far word times from attention are from forced alignment, ``(2, words)``.

    Args:
        data: Aligned recordings.
        heads: Indices of the heads that word times are computed from, as `every_head` orders them.
        tokenizer: Tokenizer of the model, with byte-level names.

    Returns:
        Signed errors of the words' starts (row 0) and ends (row 1) in seconds.
    """
    missed: list[tuple[float, float]] = []
    for aligned in data:
        spans = attention_spans(aligned.weights[list(heads)], aligned.frame_s, aligned.spoken)
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
        model: A recogniser's model that the engine has an adapter for.
        processor: Processor of the model.
        waves: Recordings of English at the model's sampling rate.
        method: Method of forced alignment: ``ctc`` or ``ctc:model=NAME``.
        most: Maximum number of heads to choose.

    Returns:
        ``alignment_heads``: layer and head of the chosen heads; ``scores``: score of each head;
        ``median_error_s_by_heads``: for the 1, 2, ... best heads, the median absolute difference
        of word starts and ends from the forced alignment, in seconds; ``recordings``: number of
        recordings used.

    Raises:
        InputError: The model recognised no word in any recording, or the CTC model cannot be
            loaded.
        OptionError: The method is no forced alignment.
        UnsupportedModelError: The engine has no adapter for the model.
    """
    recognizer = recognizers_of(model, processor)[-1]  # with timestamps, if the model has them
    data = list(collect(recognizer, waves, method))
    if not data:
        raise InputError(
            "the model recognised no word in any recording; give recordings of speech in a "
            "language that the model knows"
        )
    every, tokenizer = every_head(model), byte_level(recognizer.tokenizer)
    scores = score_heads(data)
    order = scores.argsort(descending=True).tolist()[:most]
    errors = [
        float(np.median(np.abs(word_errors(data, order[: n + 1], tokenizer))))
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
            f"{file} cannot be read ({error}); expected the folder of a checkpoint"
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
