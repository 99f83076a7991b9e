"""Bias: raises the scores of listed words, such as rare names, wherever the text could have one.

The text after each node is compared with the list character by character, from the beginning of
each word on and in any case. It does not matter how the tokenizer splits a word. For a text s, let
c be the number of listed words that it has completed, and d the largest part of a listed word that
its end has completed, from 0 to 1. A token's bonus is added to its log-probability:

- ``spread``: ``bonus * (c + d)`` after the token, minus that before it. So the first token of a
  word gets its part of the bonus, a token that leaves the word gives back what was paid, and a text
  gets ``bonus`` for each listed word in it.
- ``end``: ``bonus`` for the token that completes a listed word. It is not given back where the next
  token makes another word of it, as of *Ann* in *Annual*.

In greedy decoding nothing can be given back: a token that the bonus has chosen stays. With
``spread``, leaving a word costs what was paid, which favours going on. Both have to be measured: a
high bonus puts listed words where nobody said them.

Words begin after a character that is neither letter nor digit, and end before one. Characters of
scripts without spaces, such as Chinese and Thai, are words of their own. Text that the tokenizer
splits into single bytes is not compared.

Sources: Zhao et al. 2019, Shallow-fusion end-to-end contextual biasing, Interspeech (a bonus for
beginnings of words that is taken back); Gourav et al. 2021, arXiv:2102.07739 (bonuses of words that
do not depend on the table of subwords). There with finite-state transducers and in a beam, here
with a tree of characters, at each token of any decoding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmdecode.engine.adapter import Adapter
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput, Guide, Requirements
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import IncompatibleError, InputError, OptionError
from mmdecode.guide.linear import not_negative
from mmdecode.guide.listed_words import BEGIN, Bonuses, Pay, State, bonuses


class Unguided(Guide):
    """The model's own logits."""

    neutral = True

    def apply(
        self, constants: None, call: Call, proposal: Proposal, outputs: Mapping[str, BranchOutput]
    ) -> Tensor:
        """Returns the main branch's logits."""
        return outputs["main"].logits


class Bias(Guide):
    """Raises the scores of listed words, alone or after another guide.

    Args:
        words: Words and phrases, or a text file with one in each line.
        bonus: Log-probability that a listed word gains, in nats; 0: none.
        pay: How it is paid, ``spread`` or ``end``; see `mmdecode.guide.bias`.
        tokenizer: The model's tokenizer; ``None``: the one that the front end passes.
        guide: A guide whose result the bonus is added to, as in ``vcd+bias:words=FILE``; ``None``:
            the model's logits.

    The guide has no effect with ``bonus`` 0.

    Raises:
        InputError: The file cannot be read.
        OptionError: There is no word, or ``bonus`` or ``pay`` is not possible.
    """

    summary = "favours listed words, such as names; may follow another guide: `vcd+bias:words=FILE`"
    source = "Zhao et al. 2019; Gourav et al. 2021"
    on_host = True

    def __init__(
        self,
        words: str | Path | Sequence[str],
        bonus: float = 4.0,
        pay: Pay = "spread",
        tokenizer: Any = None,
        guide: Guide | None = None,
    ) -> None:
        if pay not in ("spread", "end"):
            raise OptionError(f"pay must be 'spread' or 'end', got {pay!r}")
        self.words = tuple(listed(words))
        self.bonus, self.pay = float(not_negative("bonus", bonus)), pay
        self.tokenizer, self.guide = tokenizer, guide
        self._inner = inner = Unguided() if guide is None or guide.neutral else guide
        self.branches, self.edits = inner.branches, inner.edits
        self.requires_inputs = inner.requires_inputs
        self.lookback, self.lookahead = inner.lookback, inner.lookahead
        self.neutral = not self.bonus and inner.neutral

    def after(self, guide: Guide | None, tokenizer: Any) -> Bias:
        """Returns the same bias for another tokenizer, after another guide."""
        return Bias(self.words, self.bonus, self.pay, tokenizer, guide)

    def needs(self, adapter: Adapter) -> Requirements:
        """Returns what the guide before it needs."""
        return self._inner.needs(adapter)

    def begin(self, call: Call, prefill: Mapping[str, BranchOutput]) -> tuple[Any, Bonuses]:
        """Returns the constants of the guide before it, and the bonuses of this vocabulary.

        Raises:
            IncompatibleError: The tokenizer is not known.
        """
        if self.tokenizer is None:
            raise IncompatibleError.between(
                "guide Bias",
                "a call without a tokenizer",
                "texts of tokens are not known",
                "use a Transcriber, an Answerer or the command line, or give Bias(tokenizer=...)",
            )
        vocab = prefill["main"].logits.shape[-1]
        constants = self._inner.begin(call, prefill)
        return constants, bonuses(self.tokenizer, vocab, self.words, self.pay)

    def apply(
        self,
        constants: tuple[Any, Bonuses],
        call: Call,
        proposal: Proposal,
        outputs: Mapping[str, BranchOutput],
    ) -> Tensor:
        """Adds the bonuses; see `mmdecode.engine.contracts.Guide.apply`."""
        logits = self._inner.apply(constants[0], call, proposal, outputs)
        return added(logits, constants[1], states(constants[1], call, proposal), self.bonus)

    def combine(
        self,
        constants: tuple[Any, Bonuses],
        call: Call,
        proposal: Proposal,
        outputs: Mapping[str, BranchOutput],
    ) -> Tensor | None:
        """Returns the logits of the guide before it, without its cut."""
        return self._inner.combine(constants[0], call, proposal, outputs)

    @property
    def total(self) -> float | None:
        """Returns S of the guide before it."""
        return self._inner.total

    def totals(
        self,
        constants: tuple[Any, Bonuses],
        call: Call,
        proposal: Proposal,
        outputs: Mapping[str, BranchOutput],
    ) -> float | Tensor | None:
        """Returns S of the guide before it, by position."""
        return self._inner.totals(constants[0], call, proposal, outputs)


def listed(words: str | Path | Sequence[str]) -> list[str]:
    """Returns words and phrases, of a file or as given, each once and with single spaces.

    Raises:
        InputError: The file cannot be read.
        OptionError: There is no word.
    """
    lines: Iterable[str] = words if not isinstance(words, (str, Path)) else ()
    if isinstance(words, (str, Path)):
        try:
            lines = Path(words).read_text("utf-8-sig").splitlines()
        except (OSError, UnicodeError) as error:
            raise InputError(
                f"cannot read the words in {str(words)!r}: {error}; give a text file with one word "
                "or phrase in each line"
            ) from error
    found = [*dict.fromkeys(text for line in lines if (text := " ".join(line.split())))]
    if not found:
        raise OptionError(f"bias has no words: {words!r} is empty; give one in each line")
    return found


def states(known: Bonuses, call: Call, proposal: Proposal) -> list[list[State]]:
    """Returns the state of the text at the root and at each node, by row."""
    start, reach = call.prompt_length, known.trie.longest + 2
    ids = call.rows.ids[:, start : start + call.rows.cur_len].tolist()
    parents = proposal.structure()[0].expand(call.batch, -1).tolist()
    drafted = proposal.tokens.tolist()
    found = []
    for row, length in enumerate(call.rows.length.tolist()):
        first = max(0, length - reach)  # before that nothing matters: a token has a character
        state = BEGIN if not first else ()
        for token in ids[row][first:length]:
            state = known.step(state, token)
        own = [state]
        for token, parent in zip(drafted[row], parents[row], strict=True):
            own.append(known.step(own[parent + 1], token) if token >= 0 else ())
        found.append(own)
    return found


def added(logits: Tensor, known: Bonuses, reached: list[list[State]], bonus: float) -> Tensor:
    """Adds the bonuses at root and nodes, given their states, to logits ``(B, N + 1, V)``."""
    device, shape = logits.device, logits.shape
    rows = [known.row(state) for own in reached for state in own]
    other = torch.tensor([row.other for row in rows], device=device).view(*shape[:2], 1)
    result = logits + bonus * other.to(logits.dtype)
    after_word = torch.tensor([row.after_word for row in rows]).view(*shape[:2], 1)
    if bool(after_word.any()):
        ends_word = torch.from_numpy(known.ends_word).to(device)
        result = result + bonus * after_word.to(result) * ends_word
    index = np.concatenate([row.ids + number * shape[-1] for number, row in enumerate(rows)])
    values = np.concatenate([row.values for row in rows])
    paid = torch.from_numpy(values).to(device) * bonus
    return (
        result.flatten()
        .index_add(0, torch.from_numpy(index).to(device), paid.to(result))
        .view(shape)
    )
