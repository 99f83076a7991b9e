"""Selects one hypothesis of a list: by minimum Bayes risk, a language model, or self-certainty.

Among equally good hypotheses the first is taken. Each method also returns its gain over the first
hypothesis, in a unit of its own, so that small gains can be refused by a threshold
(`mmdecode.evaluation.nbest.methods`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from mmdecode.asr.correction.guard import edits_of, words_of
from mmdecode.asr.correction.n_best_lists import NBestList
from mmdecode.checkpoints import code_trusted, dtype_of, loading, local_path, placed
from mmdecode.errors import InputError, OptionError, ShapeError, UnsupportedModelError

Weights = Literal["uniform", "scores"]
WEIGHTS = ("uniform", "scores")


@dataclass(frozen=True)
class Choice:
    """A selected hypothesis.

    Attributes:
        index: Its index in the list, from 0.
        gain: Improvement over the first hypothesis; 0 if it is the first hypothesis.
    """

    index: int
    gain: float


def highest(values: Sequence[float]) -> Choice:
    """Chooses the hypothesis with the highest value; its gain is the difference to the first value.

    Args:
        values: One value per hypothesis.
    """
    best = max(range(len(values)), key=lambda index: values[index])
    return Choice(best, values[best] - values[0] if best else 0.0)


def expected_edits(one: NBestList, weights: Weights = "uniform") -> list[float]:
    """Returns the expected word errors of each hypothesis, the risk of minimum Bayes risk decoding.

    For hypothesis i this is ``sum_j w_j d(h_i, h_j)`` over all hypotheses j, with the word edit
    distance d and weights w that sum to 1. Case and punctuation are ignored. Each duplicate of a
    hypothesis counts.

    Source: Stolcke, Konig and Weintraub, 1997, "Explicit word error minimization in N-best list
    rescoring".

    Args:
        one: The list.
        weights: ``uniform``, or ``scores`` for the softmax of the list's scores. Scores of the
            transcriber are means per token, so this is flatter than the model's posterior.

    Raises:
        InputError: The weights are ``scores``, and the list has no scores.
        OptionError: ``weights`` has another value.
    """
    if weights not in WEIGHTS:
        raise OptionError(f"weights={weights!r}; expected {' or '.join(WEIGHTS)}")
    scores = scores_of(one) if weights == "scores" else (0.0,) * len(one.hypotheses)
    likely = [math.exp(score - max(scores)) for score in scores]
    votes: dict[str, float] = {}
    for text, weight in zip(one.hypotheses, likely, strict=True):
        votes[text] = votes.get(text, 0.0) + weight / sum(likely)
    words = {text: words_of(text) for text in votes}
    risks = {
        text: sum(w * edits_of(words[text], words[other]) for other, w in votes.items())
        for text in votes
    }
    return [risks[text] for text in one.hypotheses]


def least_risk(one: NBestList, weights: Weights = "uniform") -> Choice:
    """Chooses the hypothesis with the fewest `expected_edits`; its gain is in expected edits."""
    return highest([-risk for risk in expected_edits(one, weights)])


def scores_of(one: NBestList) -> tuple[float, ...]:
    """Returns the recogniser's scores of a list.

    Raises:
        InputError: The list has no scores.
    """
    if one.scores is None:
        raise InputError(
            f"the list {one.id!r} has no scores; choose a method without scores, or make lists "
            "with scores (mmdecode transcribe --n-best)"
        )
    return one.scores


def joined_scores(one: NBestList, language: Sequence[float], weight: float) -> list[float]:
    """Adds ``weight`` times a language model's scores to the recogniser's scores.

    Args:
        one: The list, with scores.
        language: Scores of a language model, one per hypothesis.
        weight: Weight of the language model; 0 ignores it.

    Raises:
        InputError: The list has no scores.
        ShapeError: ``language`` does not have one score per hypothesis.
    """
    own = scores_of(one)
    if len(language) != len(own):
        raise ShapeError(
            f"the list {one.id!r} has {len(own)} hypotheses and {len(language)} scores of a "
            "language model; expected one score per hypothesis"
        )
    if weight == 0:
        return list(own)
    return [score + weight * other for score, other in zip(own, language, strict=True)]


def self_certainty(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns the self-certainty of a text: the mean of KL(uniform || distribution) over tokens.

    The formula is ``-1/T sum_t (1/V sum_v log p_t(v) + log V)``, in nats. It needs the recogniser's
    distribution at each token of the text, from a teacher-forced pass or from decoding. Logits have
    to be raw: with a suppressed token (``-inf``) the divergence would be infinite. Files of N-best
    lists hold no distributions, so `mmdecode.evaluation` does not offer this method.

    Source: Kang, Zhao and Song, 2025, arXiv:2502.18581.

    Args:
        logits: Raw logits, ``(..., T, V)``.
        mask: True at tokens that count, ``(..., T)``; ``None``: all tokens count.

    Returns:
        Self-certainty, ``(...)``, float32; 0 if every distribution is uniform.

    Raises:
        OptionError: A logit at a token that counts is not finite.
    """
    keep = torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device)
    keep = keep if mask is None else mask.bool()
    distributions = logits.float().log_softmax(-1)
    divergence = -distributions.mean(-1) - math.log(logits.shape[-1])
    if not divergence[keep].isfinite().all():
        raise OptionError(
            "self-certainty is infinite for logits of -inf; give raw logits, before suppressed "
            "tokens are set to -inf"
        )
    return torch.where(keep, divergence, 0.0).sum(-1) / keep.sum(-1).clamp_min(1)


def most_certain(distributions: Sequence[Tensor]) -> Choice:
    """Chooses the hypothesis with the highest `self_certainty`; its gain is in nats per token.

    Args:
        distributions: Raw logits at the tokens of each hypothesis, ``(T, V)``.
    """
    return highest([float(self_certainty(one)) for one in distributions])


@dataclass(frozen=True)
class TextScore:
    """Score of a text by a language model.

    Attributes:
        total: Log-probability in nats, the end token included.
        tokens: Number of tokens that were scored, the end token included.
    """

    total: float
    tokens: int

    @property
    def mean(self) -> float:
        """Log-probability per token; minus infinity for a text without tokens."""
        return self.total / self.tokens if self.tokens else -math.inf


class TextScorer:
    """Computes log-probabilities of texts by a causal language model of transformers.

    A text is scored after a ``bos`` token, or ``eos`` if there is no ``bos``, and with ``eos`` at
    its end if the tokenizer has that. Rows are padded on the right, where a causal model does not
    attend, so scores do not depend on the batch, up to rounding.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        batch_size: Number of texts scored at once.

    Raises:
        UnsupportedModelError: The model is an encoder-decoder.
        OptionError: The tokenizer has neither ``bos`` nor ``eos``.
    """

    def __init__(self, model: Any, tokenizer: Any, *, batch_size: int = 16) -> None:
        if model.config.is_encoder_decoder:
            raise UnsupportedModelError(
                f"{type(model).__name__} is an encoder-decoder; scoring texts needs a causal model"
            )
        self.model, self.tokenizer, self.batch_size = model.eval(), tokenizer, batch_size
        eos = tokenizer.eos_token_id
        start = eos if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if start is None:
            raise OptionError(
                "the tokenizer has neither a bos nor an eos token, so that the first word has no "
                "probability; set tokenizer.bos_token"
            )
        self._start, self._end = [start], [] if eos is None else [eos]

    @classmethod
    def from_pretrained(
        cls,
        model_id: str | os.PathLike[str],
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        quantize: str | None = None,
        batch_size: int = 16,
    ) -> TextScorer:
        """Loads a model and its tokenizer.

        Args:
            model_id: A folder, a Hub id or ``zoo:NAME``.
            device: Device of the model; ``None``: CUDA if available.
            dtype: ``None``: float32; ``auto``: see `mmdecode.checkpoints.dtype_of`.
            quantize: ``int8`` or ``fp8``, see `mmdecode.quantize`; ``None``: weights as loaded.
            batch_size: Number of texts scored at once.

        Raises:
            InputError: The checkpoint cannot be loaded.
            OptionError: The device, dtype or format does not exist.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        kind, path = dtype_of(dtype, model_id, device), local_path(str(model_id))
        with loading(str(model_id)):
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=kind, trust_remote_code=code_trusted()
            )
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=code_trusted())
        model = placed(model.eval(), device, quantize)
        return cls(model, tokenizer, batch_size=batch_size)

    def __call__(self, texts: Sequence[str]) -> list[TextScore]:
        """Scores texts, in order; duplicates are computed once."""
        distinct = list(dict.fromkeys(texts))
        rows = {text: self._ids(text) for text in distinct}
        by_length = sorted(distinct, key=lambda text: len(rows[text]))
        found: dict[str, TextScore] = {}
        for start in range(0, len(by_length), self.batch_size):
            batch = by_length[start : start + self.batch_size]
            scores = self._scored([rows[text] for text in batch])
            found |= dict(zip(batch, scores, strict=True))
        return [found[text] for text in texts]

    def of_lists(self, lists: Sequence[NBestList]) -> list[list[TextScore]]:
        """Returns the scores of all hypotheses, by list."""
        flat = self([text for one in lists for text in one.hypotheses])
        ends = [0, *accumulate(len(one.hypotheses) for one in lists)]
        return [flat[start:end] for start, end in pairwise(ends)]

    def _ids(self, text: str) -> list[int]:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*self._start, *ids, *self._end]

    @torch.inference_mode()
    def _scored(self, rows: Sequence[list[int]]) -> list[TextScore]:
        width = max(map(len, rows))
        device = self.model.device
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
        lengths = torch.tensor([len(row) for row in rows], device=device)
        mask = torch.arange(width, device=device) < lengths[:, None]
        logits = self.model(ids, attention_mask=mask.long()).logits[:, :-1].float()
        own = logits.gather(-1, ids[:, 1:, None]).squeeze(-1) - logits.logsumexp(-1)
        totals = torch.where(mask[:, 1:], own.double(), 0.0).sum(-1).tolist()
        return [TextScore(total, len(row) - 1) for total, row in zip(totals, rows, strict=True)]
