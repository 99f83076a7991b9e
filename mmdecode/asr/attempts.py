"""`Attempts`: windows decoded once, and judged by Whisper's gates.

Formulas and their order follow transformers' ``generation_whisper.py``.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor
from transformers.modeling_outputs import BaseModelOutput

from mmdecode.asr.beams import Scored, beam_search
from mmdecode.asr.cuts import text_tokens
from mmdecode.asr.loops import first_round_end
from mmdecode.asr.prompts import Prompts, processors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mmdecode.asr.features import Heard
    from mmdecode.asr.options import TranscribeOptions
    from mmdecode.engine.decoder import Decoder


@dataclass
class Result:
    """One attempt at a window.

    Attributes:
        tokens: Without the end token.
        temperature: At which it was decoded.
        attempts: How many there were at the window, this one included.
        avg_logprob: ``None``: nothing asked for it.
        no_speech_prob: ``None``: nothing asked for it.
        failed: Whether it is to be redone.
        silent: Whether it is to be skipped.
        looped: Whether it ends in a loop.
        n_best: Alternatives, tokens and score; two may have one text and other times.
    """

    tokens: list[int]
    temperature: float
    attempts: int = 1
    avg_logprob: float | None = None
    no_speech_prob: float | None = None
    failed: bool = False
    silent: bool = False
    looped: bool = False
    n_best: list[tuple[list[int], float]] = field(default_factory=list)


class Attempts:
    """Decodes windows once.

    Args:
        model: A ``WhisperForConditionalGeneration``.
        decoder: How.
        options: Settings.
        prompts: What the model's windows start with.
    """

    def __init__(
        self, model: Any, decoder: Decoder, options: TranscribeOptions, prompts: Prompts
    ) -> None:
        self.model, self.decoder, self.options, self.prompts = model, decoder, options, prompts
        self.config = model.generation_config

    def __call__(
        self,
        prompt: Tensor,
        audio: Tensor,
        features: Tensor,
        temperature: float,
        names: list[str],
        sources: list[list[int]],
        heard: Sequence[Heard] = (),
    ) -> list[Result]:
        """One judged attempt at each window.

        Args:
            prompt: Of one length, ``(B, P)``.
            audio: Encoder states, ``(B, T, H)``.
            features: ``(B, mels, window frames)``.
            temperature: 0 is greedy.
            names: What noise is keyed by.
            sources: What a draft may copy from.
            heard: The windows as waveforms, for a guide that changes them.
        """
        options, width = self.options, prompt.shape[1]
        no_speech: list[float | None] = [None] * len(prompt)
        if options.no_speech_threshold is not None or options.scores:
            no_speech = self._no_speech(prompt, audio)
        if options.beams > 1 and not temperature:
            found = self.searched(prompt, audio, options.beams, 1)
            results = [
                Result(ids, temperature, avg_logprob=score, no_speech_prob=no_speech[row])
                for row, [(ids, score)] in enumerate(found)
            ]
            for result in results:
                self.judge(result)
            return results
        scored = options.logprob_threshold is not None or options.scores
        config = self.generation(width)
        config.update(
            do_sample=temperature > 0,
            num_beams=1,
            output_scores=scored,
            return_dict_in_generate=scored,
        )
        raw: dict[str, Any] = {"input_features": features, "source_ids": sources}
        if heard:
            raw["audio"] = heard
        output = self.decoder(
            self.model,
            prompt,
            logits_processor=processors(self.config, width, options, temperature),
            stopping_criteria=StoppingCriteriaList(),
            generation_config=config,
            encoder_outputs=BaseModelOutput(last_hidden_state=audio),
            mm_inputs=raw,
            mm_request=names,
        )
        sequences = (output.sequences if scored else output)[:, width:].tolist()
        results = []
        for row, ids in enumerate(sequences):
            end = ids.index(self.prompts.eos) + 1 if self.prompts.eos in ids else len(ids)
            result = Result(ids[:end], temperature, no_speech_prob=no_speech[row])
            if scored:
                scores = torch.stack([step[row] for step in output.scores[:end]])
                chosen = torch.tensor(result.tokens, device=scores.device)
                result.avg_logprob = avg_logprob(scores, chosen, temperature)
            self.judge(result)
            results.append(result)
        return results

    def searched(self, prompt: Tensor, audio: Tensor, beams: int, keep: int) -> list[list[Scored]]:
        """The ``keep`` best of ``beams`` beams at each window, see `mmdecode.asr.beams`."""
        rules = processors(self.config, prompt.shape[1], self.options, 0.0)
        # generate makes the others by itself, from the checkpoint's settings
        times = [rule for rule in rules if isinstance(rule, WhisperTimeStampLogitsProcessor)]
        config = self.generation(prompt.shape[1])
        return beam_search(self.model, prompt, audio, times, config, beams, keep)

    def judge(self, result: Result) -> None:
        """Sets ``failed``, ``silent`` and ``looped``, and takes the end token off."""
        options, tokens = self.options, result.tokens
        if options.compression_ratio_threshold is not None:
            ratio = compression_ratio(tokens, self.model.config.vocab_size)
            result.failed = ratio > options.compression_ratio_threshold
        if options.logprob_threshold is not None and result.avg_logprob is not None:
            unlikely = result.avg_logprob < options.logprob_threshold
            result.failed |= unlikely
            threshold = options.no_speech_threshold
            if threshold is not None and unlikely and (result.no_speech_prob or 0.0) > threshold:
                result.failed, result.silent = False, True
        if tokens[-1] == self.prompts.eos:
            result.tokens = tokens[:-1]
        said = text_tokens(result.tokens, self.prompts.timestamp_begin)
        result.looped = first_round_end(said) is not None

    def generation(self, width: int) -> GenerationConfig:
        """Lengths and special tokens behind a prompt of ``width`` tokens."""
        most = self.model.config.max_target_positions
        if self.options.max_new_tokens is not None:
            most = min(width + self.options.max_new_tokens, most)
        elif self.config.max_new_tokens is not None:
            most = min(width + self.config.max_new_tokens, most)
        elif self.config.max_length is not None:
            most = min(width + self.config.max_length, most)
        return GenerationConfig(
            max_length=most,
            eos_token_id=self.config.eos_token_id,
            pad_token_id=self.prompts.pad,
        )

    def logits_at_end(self, ids: Tensor, audio: Tensor) -> Tensor:
        """What the model says behind ``ids (B, P)``, ``(B, V)``."""
        encoded = BaseModelOutput(last_hidden_state=audio)
        output = self.model(encoder_outputs=encoded, decoder_input_ids=ids, use_cache=False)
        return output.logits[:, -1]

    def _no_speech(self, prompt: Tensor, audio: Tensor) -> list[float | None]:
        """The probability of the no-speech token where the transcript starts."""
        language = self.prompts.language
        if language is None and self.prompts.languages:
            language = self.prompts.languages[0]  # any: its place alone counts
        at = prompt.shape[1] - len(self.prompts.initial(language))
        law = self.logits_at_end(prompt[:, : at + 1], audio).float().softmax(-1)
        return law[:, self.prompts.no_speech].tolist()


def compression_ratio(tokens: list[int], vocab: int) -> float:
    """Bytes of the ids over their zlib-compressed bytes."""
    size = int(math.log2(vocab) / 8) + 1
    data = b"".join(token.to_bytes(size, "little") for token in tokens)
    return len(data) / len(zlib.compress(data))


def avg_logprob(scores: Tensor, tokens: Tensor, temperature: float) -> float:
    """Mean log-probability of the tokens, end token included, before the temperature.

    Args:
        scores: Processed, ``(L, V)``.
        tokens: ``(L,)``.
        temperature: What the scores were divided by; 0 for none.
    """
    log_p = (scores * (temperature or 1.0)).float().log_softmax(-1)
    return float(log_p.gather(1, tokens[:, None]).mean())
