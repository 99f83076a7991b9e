"""Finds the tokens of yes and no, for guides that change how likely each is as first token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput, Guide
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.guide.linear import generated

YesNo = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids of yes, and token ids of no."""


@lru_cache(maxsize=8)
def yes_no_ids(tokenizer: Any) -> YesNo:
    """Returns the ids of all tokens for yes, and of all tokens for no; see `word_ids`."""
    return tuple(word_ids(tokenizer, "yes")), tuple(word_ids(tokenizer, "no"))


def word_ids(tokenizer: Any, word: str) -> list[int]:
    """Returns the ids of all tokens that spell a word, in any case, with or without a space."""
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    marks = "\u2581\u0120 "  # how SentencePiece and byte-level BPE write the space
    return [i for i, t in enumerate(tokens) if t and t.lstrip(marks).lower() == word]


def yes_no_margin(logits: Tensor, yes: Sequence[int], no: Sequence[int]) -> Tensor:
    """Computes the log-odds of an answer that begins with yes rather than no.

    Args:
        logits: Logits of the first token, ``(..., V)``.
        yes: Ids of all tokens for yes, see `word_ids`.
        no: Ids of all tokens for no.

    Returns:
        ``logsumexp`` of the logits of yes minus that of no, ``(...)``; positive if yes is likelier.
    """
    logits = logits.float()
    return logits[..., list(yes)].logsumexp(-1) - logits[..., list(no)].logsumexp(-1)


class FirstWord(Guide, ABC):
    """Base of guides that change yes and no as the first token; subclasses define `opening`.

    Args:
        yes: Token id or ids of yes; ``None``: found with the tokenizer.
        no: Token id or ids of no; ``None``: found with the tokenizer.
        tokenizer: Tokenizer to find the ids with; ``None``: the tokenizer that
            `mmdecode.vlm.Answerer` passes along with its questions.
    """

    def __init__(
        self,
        yes: int | Iterable[int] | None = None,
        no: int | Iterable[int] | None = None,
        tokenizer: Any = None,
    ) -> None:
        self._given, self._tokenizer = (_ids("yes", yes), _ids("no", no)), tokenizer

    def begin(self, call: Call, prefill: Mapping[str, BranchOutput]) -> tuple[Tensor, Tensor]:
        """Returns masks over the vocabulary of the tokens of yes and of no, bool ``(V,)`` each.

        Raises:
            IncompatibleError: The ids are unknown: neither they nor a tokenizer were given, or the
                tokenizer has no such tokens.
        """
        asked = call.request.inputs.get("questions") or [None]
        tokenizer = self._tokenizer or getattr(asked[0], "tokenizer", None)
        known: YesNo = ((), ()) if tokenizer is None else yes_no_ids(tokenizer)
        yes, no = (own or found for own, found in zip(self._given, known, strict=True))
        if not (yes and no):
            raise IncompatibleError.between(
                f"guide {type(self).__name__}",
                "a call without a tokenizer" if tokenizer is None else "this tokenizer",
                "the token ids of yes and no are not known",
                "use mmdecode.vlm.Answerer, or give the guide tokenizer=, or yes= and no= as ids",
            )
        vocab = torch.arange(prefill["main"].logits.shape[-1], device=call.device)
        return _among(vocab, yes), _among(vocab, no)

    def apply(
        self,
        constants: tuple[Tensor, Tensor],
        call: Call,
        proposal: Proposal,
        outputs: Mapping[str, BranchOutput],
    ) -> Tensor:
        """Changes the first token's logits by `opening`; later tokens keep the main logits."""
        main = outputs["main"].logits
        if call.rows.cur_len:
            return main  # every row is past its first token
        first = (generated(call, proposal) == 0)[..., None]
        return torch.where(first, self.opening(main, *constants), main)

    @abstractmethod
    def opening(self, main: Tensor, yes: Tensor, no: Tensor) -> Tensor:
        """Returns the guided logits of the first token, given the masks that `begin` returns."""


def _among(vocab: Tensor, ids: Sequence[int]) -> Tensor:
    return torch.isin(vocab, torch.tensor(ids, device=vocab.device))


def _ids(name: str, value: int | Iterable[int] | None) -> tuple[int, ...]:
    ids = () if value is None else (value,) if isinstance(value, (int, str)) else tuple(value)
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise OptionError(f"{name} must be a token id or several, got {value!r}")
    return tuple(int(i) for i in ids)
