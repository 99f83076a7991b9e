"""N-best: several texts of one window, each with a score, best first.

``beam``: transformers' beam search with as many beams, under the prompt and the processors of the
window; scores are its ``sequences_scores``, at the default length penalty the mean log-probability
per token. ``sample``: draws from the model's law at temperature 1 through the engine, equal ones
once, so that there may be fewer; scores are mean log-probabilities too.

A text is of a whole window: where windows follow one another, an unfinished last sentence comes
again in the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput

if TYPE_CHECKING:
    from transformers import LogitsProcessorList


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """One of the texts a window may hold.

    Attributes:
        text: What may have been said.
        score: Mean log-probability per token, the end token included.
        tokens: As ids, times included, without the end token.
    """

    text: str
    score: float
    tokens: list[int]


def beam_search(
    model: Any,
    prompt: Tensor,
    audio: Tensor,
    rules: LogitsProcessorList,
    beams: int,
    config: GenerationConfig,
) -> list[list[tuple[list[int], float]]]:
    """The ``beams`` best token sequences of each row, with scores; padding included.

    Args:
        model: A ``WhisperForConditionalGeneration``.
        prompt: ``(B, P)``, without padding.
        audio: Encoder states, ``(B, T, H)``.
        rules: Processors.
        beams: Beams, and sequences returned.
        config: Lengths and special tokens.
    """
    # not the model's own generate, which is the loop over windows
    output = GenerationMixin.generate(
        model,
        encoder_outputs=BaseModelOutput(last_hidden_state=audio),
        decoder_input_ids=prompt,
        logits_processor=rules,
        generation_config=config,
        num_beams=beams,
        num_return_sequences=beams,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        # among the rules already; from the checkpoint they would come again
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    tokens = output.sequences[:, prompt.shape[1] :].tolist()
    scores = output.sequences_scores.tolist()
    ranked = list(zip(tokens, scores, strict=True))
    return [ranked[row : row + beams] for row in range(0, len(ranked), beams)]
