"""`Attempts`: decodes windows at one temperature and checks them against Whisper's thresholds.

The formulas, and the order in which thresholds are checked, follow transformers'
``generation_whisper.py``.
"""

from __future__ import annotations

import functools
import math
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmdecode.asr.decoding.repetition import first_round_end
from mmdecode.engine.trace import Round

if TYPE_CHECKING:
    from mmdecode.asr.decoding.beams import Scored
    from mmdecode.asr.options import TranscribeOptions
    from mmdecode.asr.recognizers.base import Recognizer
    from mmdecode.asr.recognizers.contract import Encoded
    from mmdecode.decoder import Decoder

HYPOTHESES = 128
"""Most hypotheses, beams of all windows together, that a beam search scores at a time."""


@dataclass
class Result:
    """Result of decoding a window once, at one temperature.

    Attributes:
        tokens: Token ids, without the end token.
        temperature: Temperature of the attempt.
        attempts: Number of attempts at the window, this one included.
        avg_logprob: Mean log-probability per token; ``None``: no option needs it.
        no_speech_prob: No-speech probability; ``None``: no option needs it, or the model does not
            predict it.
        failed: Whether the attempt failed a threshold, so that the next temperature is tried.
        silent: Whether the window is skipped as silence.
        repetitive: Whether the tokens end in a repetition loop.
        n_best: N-best list as tokens and scores; two entries may differ in timestamps only.
    """

    tokens: list[int]
    temperature: float
    attempts: int = 1
    avg_logprob: float | None = None
    no_speech_prob: float | None = None
    failed: bool = False
    silent: bool = False
    repetitive: bool = False
    n_best: list[tuple[list[int], float]] = field(default_factory=list)


class Attempts:
    """Decodes windows once, and checks the results against the thresholds.

    Args:
        recognizer: Recogniser of the model.
        decoder: Decoder of the windows.
        options: Settings; the thresholds are applied here.
    """

    def __init__(
        self, recognizer: Recognizer, decoder: Decoder, options: TranscribeOptions
    ) -> None:
        self.recognizer, self.decoder, self.options = recognizer, decoder, options
        self.trace: list[list[Round]] | None = None  # of the call at hand, where one was asked for
        self.silent = options.silence_threshold(recognizer.capabilities.silence)

    def __call__(
        self,
        prompt: Tensor,
        encoded: Encoded,
        temperature: float,
        names: list[str],
        sources: list[list[int]],
    ) -> list[Result]:
        """Decodes each window once, and checks the results against the thresholds.

        Args:
            prompt: Prompts of one length, ``(B, P)``.
            encoded: The windows.
            temperature: Sampling temperature; 0 is greedy.
            names: One string per row; sampling noise is derived from it and the seed.
            sources: Token ids that a drafter may copy from, per row.
        """
        options, width, ours = self.options, prompt.shape[1], self.recognizer
        no_speech: list[float | None] = [None] * len(prompt)
        if self.silent is not None or options.scores:
            no_speech = ours.no_speech(prompt, encoded)
        if options.beams > 1 and not temperature:
            found = self.searched(prompt, encoded, options.beams, 1)
            results = [
                Result(ids, temperature, avg_logprob=score, no_speech_prob=no_speech[row])
                for row, [(ids, score)] in enumerate(found)
            ]
            for result in results:
                self.judge(result)
            return results
        scored = options.logprob_threshold is not None or options.scores
        limits = self.limits(encoded)
        config = ours.generation(width, max(limits))
        config.update(
            do_sample=temperature > 0,
            num_beams=1,
            output_scores=scored,
            return_dict_in_generate=scored,
        )
        decoder: Any = self.decoder
        if self.trace is not None:
            decoder = functools.partial(decoder, mm_trace=self.trace)
        output = ours.generate(decoder, prompt, encoded, config, temperature, names, sources)
        sequences = (output.sequences if scored else output)[:, width:].tolist()
        results = []
        for row, ids in enumerate(sequences):
            if limits[row] < max(limits):
                ids = ids[: limits[row]]  # as it would have ended alone
            end = next(
                (at for at, token in enumerate(ids, 1) if token in ours.eos_token_ids), len(ids)
            )
            result = Result(ids[:end], temperature, no_speech_prob=no_speech[row])
            if scored:
                scores = torch.stack([step[row] for step in output.scores[:end]])
                chosen = torch.tensor(result.tokens, device=scores.device)
                result.avg_logprob = avg_logprob(scores, chosen, temperature)
            self.judge(result)
            results.append(result)
        return results

    def limits(self, encoded: Encoded) -> list[int]:
        """Returns the largest number of new tokens of each row."""
        asked = self.options.max_new_tokens
        found = [self.recognizer.most_tokens(seconds) for seconds in encoded.seconds]
        return found if asked is None else [min(asked, most) for most in found]

    def searched(
        self, prompt: Tensor, encoded: Encoded, beams: int, keep: int
    ) -> list[list[Scored]]:
        """Returns the ``keep`` best sequences per window, see `mmdecode.asr.decoding.beams`."""
        limits = self.limits(encoded)
        order = sorted(range(len(limits)), key=limits.__getitem__)
        found: dict[int, list[Scored]] = {}
        at_once = max(1, HYPOTHESES // beams)
        for start in range(0, len(order), at_once):
            rows = order[start : start + at_once]
            own = [limits[row] for row in rows]
            config = self.recognizer.generation(prompt.shape[1], max(own))
            chosen = encoded.rows(rows)
            ranked = self.recognizer.searched(prompt[rows], chosen, config, beams, keep, own)
            found |= dict(zip(rows, ranked, strict=True))
        return [found[row] for row in range(len(prompt))]

    def judge(self, result: Result) -> None:
        """Sets ``failed``, ``silent`` and ``repetitive``, and removes the end token."""
        options, tokens = self.options, result.tokens
        if options.compression_ratio_threshold is not None:
            ratio = compression_ratio(tokens, self.recognizer.model.config.vocab_size)
            result.failed = ratio > options.compression_ratio_threshold
        if options.logprob_threshold is not None and result.avg_logprob is not None:
            unlikely = result.avg_logprob < options.logprob_threshold
            result.failed |= unlikely
            silent = self.silent is not None and (result.no_speech_prob or 0.0) > self.silent
            if unlikely and silent:
                result.failed, result.silent = False, True
        if tokens[-1] in self.recognizer.eos_token_ids:
            result.tokens = tokens[:-1]
        text_tokens = [token for token in result.tokens if self.recognizer.is_text(token)]
        result.repetitive = first_round_end(text_tokens) is not None


def compression_ratio(tokens: list[int], vocab: int) -> float:
    """Returns the size of the token ids as bytes, divided by their zlib-compressed size."""
    size = int(math.log2(vocab) / 8) + 1
    data = b"".join(token.to_bytes(size, "little") for token in tokens)
    return len(data) / len(zlib.compress(data))


def avg_logprob(scores: Tensor, tokens: Tensor, temperature: float) -> float:
    """Returns the mean log-probability of the tokens at temperature 1, end token included.

    Args:
        scores: Logits after the logits processors, divided by the temperature, ``(L, V)``.
        tokens: Token ids, ``(L,)``.
        temperature: Sampling temperature; 0 for greedy decoding.
    """
    log_p = (scores * (temperature or 1.0)).float().log_softmax(-1)
    return float(log_p.gather(1, tokens[:, None]).mean())
