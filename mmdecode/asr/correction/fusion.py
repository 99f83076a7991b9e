"""Scores candidate tokens of a language model by a recogniser with another vocabulary.

While a language model corrects a transcript, its most likely next tokens are the candidates. Each
candidate stands for a text: the text so far, followed by the token. Its score is the
log-probability, under the recogniser, that a transcript begins with this text:

- A complete word, which white space follows, is scored by its canonical tokens: the tokens that the
  recogniser's tokenizer gives for the word with a space before it.
- The incomplete word at the end is scored by the probability of all token sequences whose text
  begins with it: its canonical tokens, the last of which may be replaced by a longer token, or
  several of which by one.
- Spelling may differ between the models. A complete word is scored in the most likely of its
  casings, with the most likely punctuation after it; this choice is then fixed. An incomplete word
  is scored in the most likely of its casings.
- The end token is scored as a complete last word, followed by the end of the transcript.

So a score depends on nothing but the audio and the text: not on how the text was split into tokens,
on drafts, or on other rows of the batch. The acoustic distribution is the softmax of these scores
over the candidates (`mmdecode.guide.fusion`). Tokens without text (special tokens, parts of a
character) are no candidates.

All texts of a verification round are scored in one pass of the recogniser's decoder, as a tree of
its tokens after a cached prefix, for all rows together. A further pass is needed only if the
recogniser prefers another spelling of a complete word than the text has.

If the tokens of the two vocabularies have the same texts (`shared_ids`), ids are mapped instead and
the recogniser scores the whole vocabulary. This is faster, and keeps the language model's spelling.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmdecode.asr.correction.listener import Listener
from mmdecode.asr.correction.spelling import (
    Route,
    Spelling,
    Tokens,
)
from mmdecode.engine.adapter import MAIN, BranchSpec
from mmdecode.engine.branches import ModelRunner
from mmdecode.engine.cache import bucket
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput, BranchRunner
from mmdecode.engine.proposal import Proposal
from mmdecode.engine.request import token_ids
from mmdecode.errors import OptionError
from mmdecode.guide.fusion import (
    ACOUSTIC,
    Choices,
    encoded,
    own_view,
    second_model,
    what_it_reads,
)
from mmdecode.guide.token_texts import BROKEN, token_texts
from mmdecode.registry import adapter_for


class AcousticScorer(BranchRunner):
    """Scores a language model's most likely tokens by a recogniser, as a branch of a guide.

    A branch is a further source of next-token scores, see `mmdecode.engine.contracts.BranchRunner`.
    The module's docstring defines the scores. The audio comes with the call, as for
    `mmdecode.guide.fusion.SecondModel`.

    Args:
        call: The call.
        model: A recogniser that the engine has an adapter for.
        spelling: Maps words to tokens of the recogniser.
        prompt: Ids of the recogniser's decoder prompt, for a transcript without timestamps.
        tokenizer: The language model's tokenizer.
        pieces: Text of each of the language model's tokens, see `pieces_of`.
        candidates: Number of the language model's most likely tokens that are scored.

    Attributes:
        choices: For each position, the token that the language model alone would choose, and the
            tokens that the recogniser alone might choose.
        positions: Number of positions that the recogniser's decoder has scored in this call.
    """

    stage = 2

    def __init__(
        self,
        call: Call,
        model: Any,
        spelling: Spelling,
        prompt: Sequence[int],
        tokenizer: Any,
        pieces: Sequence[str | None],
        candidates: int,
    ) -> None:
        self.model, self.spelling, self.tokenizer, self.pieces = model, spelling, tokenizer, pieces
        self.count = candidates
        self.eos_token_ids = frozenset(call.request.eos_token_ids.tolist())
        self.branches = ModelRunner(adapter_for(model), [MAIN])
        self.choices = Choices(call)
        self._given, self.prompt = what_it_reads(call, model, prompt)
        self.listeners: list[Listener] = []
        self.positions = 0

    def prefill(self, call: Call, earlier: Mapping[str, BranchOutput]) -> dict[str, BranchOutput]:
        """Encodes the audio, and scores the candidates for the first token."""
        inputs = encoded(self.model, self._given)
        nothing = call.rows.ids[:, :0]
        logits = self.branches.prefill(own_view(call, self.prompt, nothing, inputs), {})[
            "main"
        ].logits
        first = logits[:, 0].log_softmax(-1).cpu().numpy()
        self.listeners = [Listener(self.spelling, distribution) for distribution in first]
        found = self._answer(call, Proposal.empty(call.batch, call.device), earlier)
        self.choices.keep_first()
        return found

    def score(
        self, call: Call, proposal: Proposal, earlier: Mapping[str, BranchOutput]
    ) -> dict[str, BranchOutput]:
        """Scores the candidates after the last committed token and after each drafted token."""
        for row, ids in enumerate(_generated(call)):
            self.listeners[row].commit(self._decoded(ids))
        return self._answer(call, proposal, earlier)

    def commit(self, path: Tensor, count: Tensor, chain: bool) -> None:
        """Records the choices along the accepted path; the cache is updated at the next `score`."""
        self.choices.commit(path, count)

    def select_rows(self, rows: Tensor) -> None:
        """See `mmdecode.engine.contracts.BranchRunner`."""
        self.branches.select_rows(rows)
        self.listeners = [self.listeners[row].fork() for row in rows.tolist()]
        self.choices.select_rows(rows)

    def _answer(
        self, call: Call, proposal: Proposal, earlier: Mapping[str, BranchOutput]
    ) -> dict[str, BranchOutput]:
        logits = earlier["main"].logits
        best = logits.topk(min(self.count, logits.shape[-1])).indices
        most_likely = best.tolist()
        open_rows = call.rows.active.tolist()
        asked: list[list[tuple[str, bool] | None]] = []
        for row, paths in enumerate(_paths(call, proposal)):
            texts = [
                self._decoded(ids) if open_rows[row] and ids is not None else None for ids in paths
            ]
            asked.append(
                [
                    self._asked(text, token)
                    for text, tokens in zip(texts, most_likely[row], strict=True)
                    for token in tokens
                ]
            )
        scores = torch.tensor(self.weigh(asked)).reshape(best.shape).to(logits)
        self.choices.see(best[..., 0], self._likely(most_likely, scores))
        candidates = best.masked_fill(scores == -torch.inf, -1)
        return {ACOUSTIC: BranchOutput(logits=scores, candidates=candidates)}

    def _likely(self, best: list[list[list[int]]], scores: Tensor) -> list[list[frozenset[int]]]:
        """Returns the candidates that the recogniser alone might choose, by row and node.

        These are the candidates with more than half the probability of the best candidate. A
        threshold is needed since the score of a text covers all texts that begin with it, so that
        a prefix of a token never scores less than the token.
        """
        likely = scores > scores.amax(-1, keepdim=True) - math.log(2)
        return [
            [
                frozenset(token for token, taken in zip(*node, strict=True) if taken)
                for node in zip(tokens, flags, strict=True)
            ]
            for tokens, flags in zip(best, likely.tolist(), strict=True)
        ]

    def _decoded(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _asked(self, text: str | None, token: int) -> tuple[str, bool] | None:
        """Returns a candidate's text, and whether the transcript ends there; ``None``: no text."""
        if text is None or text.endswith(BROKEN):
            return None
        if token in self.eos_token_ids:
            return text, True
        piece = self.pieces[token] if token < len(self.pieces) else None
        return None if piece is None else (text + piece, False)

    def weigh(self, asked: Sequence[Sequence[tuple[str, bool] | None]]) -> list[list[float]]:
        """Scores several texts for each row of the batch.

        Args:
            asked: Texts by row, each with whether the transcript ends there; ``None`` gets the
                score ``-inf``.
        """
        while True:
            found = [
                [None if one is None else listener.score(*one) for one in texts]
                for listener, texts in zip(self.listeners, asked, strict=True)
            ]
            if not any(listener.wanted for listener in self.listeners):
                break
            self._read()
        return [[-math.inf if value is None else value for value in row] for row in found]

    def _read(self) -> None:
        """Runs one decoder pass over the prefixes whose distributions the listeners need."""
        blocks = [listener.block() for listener in self.listeners]
        rows, width = len(blocks), max(len(block.tokens) for block in blocks)
        self.positions += sum(len(block.tokens) for block in blocks)
        tokens = np.full((rows, width), -1)
        depths = np.zeros((rows, width), dtype=np.int64)
        ancestors = np.broadcast_to(np.eye(width, dtype=bool), (rows, width, width)).copy()
        for row, block in enumerate(blocks):
            tokens[row, : len(block.tokens)] = block.tokens
            for node, parent in enumerate(block.parents):
                if parent >= 0:
                    depths[row, node] = depths[row, parent] + 1
                    ancestors[row, node] |= ancestors[row, parent]
        cache, device = self.branches.cache, self.prompt.device
        states, _ = self.branches.run(
            torch.from_numpy(tokens).to(device),
            torch.from_numpy(depths).to(device),
            torch.from_numpy(ancestors).to(device),
            visible=bucket(int(cache.start.max()) + width),
        )
        nodes = [
            listener.unread(block) for listener, block in zip(self.listeners, blocks, strict=True)
        ]
        index = torch.tensor([(row, node) for row, own in enumerate(nodes) for node in own])
        wanted = states["last"][index[:, 0].to(device), index[:, 1].to(device)]
        distributions = iter(
            self.branches.adapter.head(wanted).float().log_softmax(-1).cpu().numpy()
        )
        for listener, block, own in zip(self.listeners, blocks, nodes, strict=True):
            # copies, since a row alone would keep those of all others in memory
            listener.hear(block, {node: next(distributions).copy() for node in own})
        cache.commit(torch.tensor([block.kept for block in blocks], device=device))


def _generated(call: Call) -> list[list[int]]:
    """Returns the ids that each row has generated."""
    new = call.rows.ids[:, call.prompt_length :].tolist()
    return [ids[:length] for ids, length in zip(new, call.rows.length.tolist(), strict=True)]


def _paths(call: Call, proposal: Proposal) -> Iterator[list[list[int] | None]]:
    """Yields per row the ids up to the last token and up to each node; ``None``: unused node."""
    parents = proposal.structure()[0].expand(call.batch, -1).tolist()
    tokens = proposal.tokens.tolist()
    for row, committed in enumerate(_generated(call)):
        paths: list[list[int] | None] = [committed]
        for token, parent in zip(tokens[row], parents[row], strict=True):
            above = paths[parent + 1]
            paths.append(None if token < 0 or above is None else [*above, token])
        yield paths


def pieces_of(tokenizer: Any, vocab: int) -> list[str | None]:
    """Returns the text that each token adds after a word; ``None``: it has no text.

    Args:
        tokenizer: Tokenizer of the language model.
        vocab: Size of the model's output, which may be larger than the tokenizer's vocabulary.
    """
    texts = token_texts(tokenizer, vocab)[: len(tokenizer)]
    return [None if text is None or BROKEN in text else text for text in texts]


def shared_ids(main: Any, acoustic: Spelling, vocab: int) -> Tensor | None:
    """Maps a language model's ids to the recogniser's ids, if their tokens have the same texts.

    Args:
        main: The language model's tokenizer.
        acoustic: Maps words to tokens of the recogniser.
        vocab: Size of the language model's output.

    Returns:
        Id in the recogniser's vocabulary by id of the language model, ``(vocab,)``; -1 for tokens
        without a counterpart. End tokens are mapped to each other. ``None``: a text token of one
        model is missing in the other.
    """
    own = {name: token for token, name in acoustic.name.items()}
    special = set(main.all_special_ids)
    named = {name: token for name, token in main.get_vocab().items() if token not in special}
    if own.keys() != named.keys():
        return None
    ids = torch.full((vocab,), -1)
    for name, token in named.items():
        ids[token] = own[name]
    if main.eos_token_id is not None:
        ids[main.eos_token_id] = acoustic.end
    return ids


@dataclass(frozen=True, kw_only=True)
class Acoustic:
    """The recogniser of a fusion, for the guides of `mmdecode.guide.fusion`.

    Attributes:
        model: A recogniser that the engine has an adapter for.
        tokenizer: Its tokenizer.
        prompt: Ids of its decoder prompt, for a transcript without timestamps; needed for calls
            whose audio comes without one (`mmdecode.guide.fusion.Given`).
    """

    model: Any
    tokenizer: Any
    prompt: Tokens = ()

    @cached_property
    def spelling(self) -> Spelling:
        """Maps words to tokens of the recogniser."""
        return Spelling(self.tokenizer, token_ids(self.model.generation_config.eos_token_id)[0])

    def branch(
        self, tokenizer: Any, vocab: int, candidates: int = 8, route: Route = "auto"
    ) -> BranchSpec:
        """Makes the branch of a guide that gives a language model the recogniser's scores.

        Args:
            tokenizer: The language model's tokenizer.
            vocab: Size of the language model's output.
            candidates: Number of the language model's most likely tokens that are scored as text.
            route: ``text`` scores candidates by their text, ``ids`` maps ids to the recogniser's
                ids; ``auto`` is ``ids`` if the two vocabularies have the same texts, else ``text``.

        Raises:
            OptionError: The route does not exist, or ids cannot be mapped.
        """
        if route not in ("auto", "text", "ids"):
            raise OptionError(f"route={route!r}; expected auto, text or ids")
        if candidates < 2:
            raise OptionError(f"candidates={candidates}; expected 2 or more")
        ids = None
        if route != "text":
            ids = shared_ids(tokenizer, self.spelling, vocab)
        if ids is not None:
            return second_model(self.model, self.prompt, ids)
        if route == "ids":
            raise OptionError(
                "route='ids' needs two tokenizers that split text into the same tokens; use "
                "route='text'"
            )
        build = partial(
            AcousticScorer,
            model=self.model,
            spelling=self.spelling,
            prompt=self.prompt,
            tokenizer=tokenizer,
            pieces=pieces_of(tokenizer, vocab),
            candidates=candidates,
        )
        return BranchSpec(name=ACOUSTIC, stage=2, build=build)
