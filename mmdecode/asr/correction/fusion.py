"""Scores of a recogniser for a language model's candidates, by the text that they stand for.

The two models need not share a vocabulary. A candidate is the text so far with one more token of
the language model after it, and its score is the log-probability, under the recogniser, that a
transcript begins with this text:

- Complete words, those with white space after them, are scored by their canonical tokens: those
  that the recogniser's tokenizer makes of the word after a space.
- The pending word at the end is scored by the mass of all tokens that begin with the last of its
  canonical ones, and of longer ones that cover several of these.
- Words may be written another way than the recogniser writes them. A complete word takes the
  most likely of its casings and of the marks that may follow it, the space after it counted; the
  choice stays as it is from then on. A pending word takes the most likely of its casings.
- The end token scores as a last word that is complete, and the end of the transcript.

So a score is a function of the audio and the text alone: not of how the text was cut into tokens,
of what was drafted, or of the other rows. The acoustic distribution is the softmax of these scores
over the candidates (`mmdecode.guide.fusion`), in which what they share cancels. Tokens that stand
for no text (special ones, parts of a character) are no candidates.

All that is asked about at a time is read in one pass of the recogniser's decoder, as a tree of its
tokens after a cached prefix, all rows together. Only where a complete word turns out to be written
another way than the text has it, what follows is read in a further pass.

Where both tokenizers have the same texts as tokens (`shared_ids`), the recogniser scores the whole
vocabulary by carrying ids over, which is quicker; it then follows the language model's spelling.
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
    _NO_TEXT,
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
from mmdecode.registry import adapter_for


class AcousticScorer(BranchRunner):
    """A recogniser that scores a language model's most likely tokens as text.

    See `mmdecode.engine.contracts.BranchRunner`; the module says what a score is. The audio
    comes with the call, as for `mmdecode.guide.fusion.SecondModel`.

    Args:
        call: The call.
        model: A recogniser that the engine has an adapter for.
        spelling: How it writes.
        prompt: Its decoder's first ids, which ask for a transcript without times.
        tokenizer: The language model's.
        pieces: Text of each of its tokens, see `pieces_of`.
        candidates: How many of its most likely tokens are scored.

    Attributes:
        choices: Choices of the language model and of the audio, each alone.
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

    def prefill(self, call: Call, earlier: Mapping[str, BranchOutput]) -> dict[str, BranchOutput]:
        """Hears the audio, and answers for the first token."""
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
        """Candidates after root and nodes."""
        for row, ids in enumerate(_generated(call)):
            self.listeners[row].commit(self._decoded(ids))
        return self._answer(call, proposal, earlier)

    def commit(self, path: Tensor, count: Tensor, chain: bool) -> None:
        """Notes who chose what; texts are cached when they are scored again."""
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
        """Candidates that the audio alone might take, by row and node.

        A text holds the mass of all that begin with it, so that of a token and its own beginning
        the beginning never scores less. Both are likely, with more than half of the best's mass.
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
        """Text that a candidate stands for, and whether it ends there."""
        if text is None or text.endswith(_NO_TEXT):
            return None
        if token in self.eos_token_ids:
            return text, True
        piece = self.pieces[token] if token < len(self.pieces) else None
        return None if piece is None else (text + piece, False)

    def weigh(self, asked: Sequence[Sequence[tuple[str, bool] | None]]) -> list[list[float]]:
        """Scores of texts by row, ``-inf`` for what is no text."""
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
        """One pass over what the listeners want."""
        blocks = [listener.block() for listener in self.listeners]
        rows, width = len(blocks), max(len(block.tokens) for block in blocks)
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
            listener.hear(block, {node: next(distributions) for node in own})
        cache.commit(torch.tensor([block.kept for block in blocks], device=device))


def _generated(call: Call) -> list[list[int]]:
    """The ids that each row has generated."""
    new = call.rows.ids[:, call.prompt_length :].tolist()
    return [ids[:length] for ids, length in zip(new, call.rows.length.tolist(), strict=True)]


def _paths(call: Call, proposal: Proposal) -> Iterator[list[list[int] | None]]:
    """Generated ids up to the root and to each node, by row, ``None`` for unused nodes."""
    parents = proposal.structure()[0].expand(call.batch, -1).tolist()
    tokens = proposal.tokens.tolist()
    for row, committed in enumerate(_generated(call)):
        paths: list[list[int] | None] = [committed]
        for token, parent in zip(tokens[row], parents[row], strict=True):
            above = paths[parent + 1]
            paths.append(None if token < 0 or above is None else [*above, token])
        yield paths


def pieces_of(tokenizer: Any, vocab: int) -> list[str | None]:
    """The text that each token adds after a word, ``None`` where it adds none.

    Args:
        tokenizer: Tokenizer of the language model.
        vocab: Rows of its output, which may be more than the tokenizer has.
    """
    anchor = tokenizer("a", add_special_tokens=False).input_ids[-1:]
    special = set(tokenizer.all_special_ids)
    known = range(min(vocab, len(tokenizer)))

    def decoded(rows: list[list[int]]) -> list[str]:
        return tokenizer.batch_decode(rows, clean_up_tokenization_spaces=False)

    [before] = decoded([anchor])
    found: list[str | None] = []
    for token, text in zip(known, decoded([[*anchor, token] for token in known]), strict=True):
        adds = text[len(before) :] if text.startswith(before) and token not in special else ""
        found.append(adds if adds and _NO_TEXT not in adds else None)
    return found


def shared_ids(main: Any, acoustic: Spelling, vocab: int) -> Tensor | None:
    """The recogniser's id of each id of a language model, if the two write text in the same tokens.

    Args:
        main: The language model's tokenizer.
        acoustic: How the recogniser writes.
        vocab: Rows of the language model's output.

    Returns:
        ``(vocab,)``, -1 where there is none; the end tokens belong together. ``None``: some token
        of either is none of the other.
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
    """The one that hears, for the guides of `mmdecode.guide.fusion`.

    Attributes:
        model: A recogniser that the engine has an adapter for.
        tokenizer: Its tokenizer.
        prompt: Its decoder's first ids, which ask for a transcript without times; needed where the
            calls do not give them (`mmdecode.guide.fusion.Given`).
    """

    model: Any
    tokenizer: Any
    prompt: Tokens = ()

    @cached_property
    def spelling(self) -> Spelling:
        """How it writes."""
        return Spelling(self.tokenizer, token_ids(self.model.generation_config.eos_token_id)[0])

    def branch(
        self, tokenizer: Any, vocab: int, candidates: int = 8, route: Route = "auto"
    ) -> BranchSpec:
        """The acoustic branch of a guide for a language model.

        Args:
            tokenizer: The language model's.
            vocab: Rows of its output.
            candidates: How many of its most likely tokens are scored as text.
            route: ``text`` scores candidates, ``ids`` carries ids over to the recogniser, ``auto``
                does that where the two write text in the same tokens.

        Raises:
            OptionError: There is no such route, or ids cannot be carried over.
        """
        if route not in ("auto", "text", "ids"):
            raise OptionError(f"route={route!r}; expected auto, text or ids")
        if candidates < 2:
            raise OptionError(f"candidates={candidates}; expected 2 or more, to choose from")
        ids = None
        if route != "text":
            ids = shared_ids(tokenizer, self.spelling, vocab)
        if ids is not None:
            return second_model(self.model, self.prompt, ids)
        if route == "ids":
            raise OptionError(
                "route='ids': the two tokenizers do not write text in the same tokens; use "
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
