"""N-best lists: several texts of one window, each with a score, best first.

``beam``: transformers' beam search with at least as many beams as texts, with the prompt and the
logits processors of the window. Scores are its ``sequences_scores``: at the default length penalty
the mean log-probability per token. ``sample``: samples from the (guided) distribution at
temperature 1, by a separate decoder without a draft. Scores are mean log-probabilities too.

Hypotheses that differ in timestamps only are merged into one text with the best score, so there may
be fewer texts than requested. Each text covers a whole window: in sequential mode, an unfinished
last sentence appears again in the next window.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

from torch import Tensor

from mmdecode.asr.decoding.beams import Scored
from mmdecode.asr.decoding.fallback import Attempts
from mmdecode.asr.recognizers.contract import Encoded
from mmdecode.asr.results import Hypothesis
from mmdecode.decoder import Decoder
from mmdecode.errors import OptionError


def hypotheses(found: Iterable[Scored], text_of: Callable[[list[int]], str]) -> list[Hypothesis]:
    """Merges hypotheses of equal text, keeping the tokens with the best score; best text first.

    Args:
        found: Tokens and scores, in any order.
        text_of: Function that decodes tokens to text.
    """
    best: dict[str, Hypothesis] = {}
    for tokens, score in sorted(found, key=lambda one: -one[1]):
        text = text_of(tokens)
        best.setdefault(text, Hypothesis(text=text, score=score, tokens=tokens))
    return list(best.values())


class Alternatives:
    """Finds the N-best lists of windows, by a search separate from the transcript's.

    Args:
        attempts: Decodes the windows; its recogniser, guide, seed and options are used.

    Raises:
        OptionError: The method is ``beam``, and there is a guide.
    """

    def __init__(self, attempts: Attempts) -> None:
        self.attempts, self.count = attempts, attempts.options.n_best
        guide = attempts.decoder.guide
        self.sampler: Attempts | None = None
        if attempts.options.n_best_method == "sample":
            # a threshold that nothing fails asks for scores
            scored = dataclasses.replace(
                attempts.options,
                compression_ratio_threshold=None,
                logprob_threshold=-math.inf,
                no_speech_threshold=None,
            )
            decoder = Decoder(guide=guide, seed=attempts.decoder.seed)
            self.sampler = Attempts(attempts.recognizer, decoder, scored)
        elif guide is not None:
            raise OptionError(
                "n_best_method='beam' is transformers' beam search, which supports no guide; use "
                "n_best_method='sample', or leave the guide out"
            )

    def __call__(self, prompt: Tensor, encoded: Encoded, names: list[str]) -> list[list[Scored]]:
        """Returns the requested number of hypotheses for each window; some may be equal.

        Args:
            prompt: Prompts of one length, ``(B, P)``.
            encoded: The encoded windows.
            names: One string per row; sampling noise is derived from it and the seed.
        """
        if self.sampler is None:
            beams = max(self.count, self.attempts.options.beams)
            found = self.attempts.searched(prompt, encoded, beams, self.count)
            eos_token_ids = self.attempts.recognizer.eos_token_ids
            return [
                [([t for t in ids if t not in eos_token_ids], score) for ids, score in row]
                for row in found
            ]
        sampled = self.sampler(
            prompt.repeat_interleave(self.count, 0),
            encoded.repeated(self.count),
            1.0,
            [f"{name}/{number}" for name in names for number in range(self.count)],
            [[]] * (len(names) * self.count),
        )
        scored = [(result.tokens, result.avg_logprob or 0.0) for result in sampled]
        return [scored[row : row + self.count] for row in range(0, len(scored), self.count)]
