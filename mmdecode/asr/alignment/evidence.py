"""`Evidence`: numbers per token by which a stream decides which words are final.

One teacher-forced pass over prompts and decoded tokens gives them, whatever drafter the tokens came
from. The kinds of evidence are

- ``attention``: seconds of audio behind the encoder frame that a token attends to most. The weights
  are the plain mean over the alignment heads, for the query that predicts the token; the softmax is
  over the frames of the row's own audio;
- ``ending``: probability that the text goes on after a token, hence that the token is not the last
  one: 1 minus the probability of all ids that can end the text (`Recognizer.ends`);
- ``confidence``: probability of the token;
- ``logit``: the raw logit of the token.

Probabilities are those of the raw logits, in float32.

Source: Papi et al. 2023, arXiv:2305.11408 (AlignAtt), for ``attention``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmdecode.asr.alignment.cross_attention import cross_attention, named_heads
from mmdecode.asr.recognizers.base import Recognizer
from mmdecode.asr.recognizers.contract import Encoded
from mmdecode.errors import OptionError, UnknownNameError

KINDS = ("attention", "ending", "confidence", "logit")


class Evidence:
    """Computes numbers per token of decoded windows; see the module for their kinds.

    Args:
        recognizer: Recogniser that encoded and decoded the windows.
    """

    def __init__(self, recognizer: Recognizer) -> None:
        self.recognizer = recognizer
        self.heads = named_heads(recognizer.model)

    def check(self, kind: str) -> None:
        """Checks that the model gives a kind of evidence; reads no audio.

        Raises:
            UnknownNameError: There is no such kind.
            OptionError: The model cannot give it.
        """
        ours = self.recognizer
        if kind not in KINDS:
            raise UnknownNameError.of("evidence", kind, KINDS)
        if type(ours).logits is Recognizer.logits:
            raise OptionError(
                f"{kind} does not work with {ours.name}: {type(ours).__name__} defines no logits; "
                "define the method, or choose a policy without evidence"
            )
        if kind == "attention" and (self.heads is None or not ours.capabilities.drafts):
            raise OptionError(
                f"{kind} does not work with {ours.name}: its generation_config.json names no "
                "alignment_heads; find them with 'mmdecode train alignment-heads --model MODEL "
                "--out FOLDER', or choose a policy without attention"
            )

    @torch.no_grad()
    def __call__(
        self,
        kinds: Sequence[str],
        prompts: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        encoded: Encoded,
    ) -> list[list[float]]:
        """Returns a number for each token of each window.

        Args:
            kinds: Kind of evidence of each row.
            prompts: Ids of the decoder prompt of each row.
            tokens: Decoded ids of each row, without the end token.
            encoded: The encoded windows.

        Raises:
            UnknownNameError: There is no such kind.
            OptionError: The model cannot give it.
        """
        for kind in set(kinds):
            self.check(kind)
        rows = [row for row, ids in enumerate(tokens) if ids]
        found: list[list[float]] = [[] for _ in tokens]
        if not rows:
            return found
        ours = self.recognizer
        encoded = encoded.rows(rows)
        ids = [torch.tensor([*prompts[row], *tokens[row]]) for row in rows]
        # padded on the right with any id: the decoder is causal
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(ours.model.device)
        attending: Any = contextlib.nullcontext()
        if "attention" in kinds:
            attending = cross_attention(ours.model.get_decoder(), self.heads or ())
        with attending as attention:
            logits = ours.logits(padded, encoded)
        for index, row in enumerate(rows):
            first, count = len(prompts[row]) - 1, len(tokens[row])  # query that predicts the first
            if kinds[row] == "attention":
                frames, frame_s = frames_of(ours, encoded, index)
                weights = attention.weights(index, frames)[:, first : first + count]
                attended = weights.mean(0).argmax(-1).tolist()
                found[row] = [(frames - frame) * frame_s for frame in attended]
            elif kinds[row] == "ending":
                ends = ours.ends(encoded.seconds[index])
                ending = _probabilities(logits[index, first + 1 :][:count])[:, ends].sum(-1)
                found[row] = (1 - ending).clamp_min(0).tolist()
            else:
                chosen = padded[index, first + 1 :][:count, None]
                scores = logits[index, first:][:count].float()
                scores = scores if kinds[row] == "logit" else scores.softmax(-1)
                found[row] = scores.gather(1, chosen)[:, 0].tolist()
        return found


def frames_of(recognizer: Recognizer, encoded: Encoded, row: int) -> tuple[int, float]:
    """Returns the number of encoder frames of a window's audio, and the seconds per frame.

    Args:
        recognizer: Recogniser that encoded the window.
        encoded: Encoded windows, with encoder states.
        row: Row of the window.
    """
    assert encoded.states is not None, "the windows are encoded"
    seconds, whole = encoded.seconds[row], encoded.states.shape[1]
    if recognizer.capabilities.fixed_windows:  # padded to one length before the encoder
        frame_s = recognizer.window_s / whole
        return min(whole, math.ceil(round(seconds / frame_s, 6))), frame_s
    frames = whole if encoded.mask is None else int(encoded.mask[row].sum())
    return frames, seconds / frames


def _probabilities(logits: Tensor) -> Tensor:
    return logits.float().softmax(-1)
