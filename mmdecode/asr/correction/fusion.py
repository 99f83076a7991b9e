"""A recogniser's scores for candidate tokens of a language model, by their text.

The two models need not share a vocabulary. A candidate is the text so far followed by one more
token of the language model, and its score is the log-probability, under the recogniser, that a
transcript begins with this text:

- Complete words, those followed by white space, are scored by their canonical tokens: those of the
  recogniser's tokenizer for the word after a space.
- The incomplete word at the end is scored by the probability mass of all tokens that begin with the
  last of its canonical ones, and of longer ones that cover several of these.
- Spelling may differ between the models. A complete word takes the most likely of its casings and
  of the punctuation that may follow it, the space after it included; the choice is then fixed. An
  incomplete word takes the most likely of its casings.
- The end token scores as a complete last word and the end of the transcript.

So a score depends on the audio and the text alone: not on how the text was split into tokens, on
drafts, or on the other rows. The acoustic distribution is the softmax of these scores over the
candidates (`mmdecode.guide.fusion`), in which common terms cancel. Tokens without text (special
ones, parts of a character) are no candidates.

All texts of a round are scored in one pass of the recogniser's decoder, as a tree of its tokens
after a cached prefix, all rows together. A further pass is needed only where the recogniser
prefers another spelling of a complete word than that of the text.

Where both vocabularies consist of the same texts (`shared_ids`), the recogniser scores the whole
vocabulary by mapping ids, which is faster; it then follows the language model's spelling.
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
    """Branch that scores a language model's most likely tokens as text by a recogniser.

    See `mmdecode.engine.contracts.BranchRunner`; the module's docstring defines the scores. The
    audio comes with the call, as for `mmdecode.guide.fusion.SecondModel`.

    Args:
        call: The call.
        model: A recogniser that the engine has an adapter for.
        spelling: Its spelling of words.
        prompt: Ids of its decoder prompt, for a transcript without timestamps.
        tokenizer: The language model's tokenizer.
        pieces: Text of each of the language model's tokens, see `pieces_of`.
        candidates: Number of the language model's most likely tokens that are scored.

    Attributes:
        choices: The token that the language model alone, and those that the recogniser alone would
            choose, at each position.
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
        """Scores the candidates after the root and each node of the proposal."""
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
        """Candidates that the recogniser alone might choose, by row and node.

        They have more than half of the best one's mass. A threshold instead of the maximum, since a
        text has the mass of all texts that begin with it: the prefix of a token never scores less
        than the token.
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
        """Text of a candidate, and whether the transcript ends with it; ``None``: no candidate."""
        if text is None or text.endswith(_NO_TEXT):
            return None
        if token in self.eos_token_ids:
            return text, True
        piece = self.pieces[token] if token < len(self.pieces) else None
        return None if piece is None else (text + piece, False)

    def weigh(self, asked: Sequence[Sequence[tuple[str, bool] | None]]) -> list[list[float]]:
        """Scores texts by row.

        Args:
            asked: Texts and whether the transcript ends with them; ``None`` scores ``-inf``.
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
        """One decoder pass over the prefixes that the listeners need."""
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
    """Yields, for each row, the generated ids up to the root and each node; ``None``: unused."""
    parents = proposal.structure()[0].expand(call.batch, -1).tolist()
    tokens = proposal.tokens.tolist()
    for row, committed in enumerate(_generated(call)):
        paths: list[list[int] | None] = [committed]
        for token, parent in zip(tokens[row], parents[row], strict=True):
            above = paths[parent + 1]
            paths.append(None if token < 0 or above is None else [*above, token])
        yield paths


def pieces_of(tokenizer: Any, vocab: int) -> list[str | None]:
    """Text that each token adds after a word; ``None``: none.

    Args:
        tokenizer: Tokenizer of the language model.
        vocab: Size of its output, which may be larger than the tokenizer's vocabulary.
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
    """Maps ids of a language model to a recogniser's, if their vocabularies have the same texts.

    Args:
        main: The language model's tokenizer.
        acoustic: The recogniser's spelling of words.
        vocab: Size of the language model's output.

    Returns:
        ``(vocab,)``, -1 for tokens without a counterpart; end tokens are mapped to each other.
        ``None``: a text token of one model is missing in the other.
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
        prompt: Ids of its decoder prompt, for a transcript without timestamps; needed where the
            calls do not have one (`mmdecode.guide.fusion.Given`).
    """

    model: Any
    tokenizer: Any
    prompt: Tokens = ()

    @cached_property
    def spelling(self) -> Spelling:
        """The recogniser's spelling of words."""
        return Spelling(self.tokenizer, token_ids(self.model.generation_config.eos_token_id)[0])

    def branch(
        self, tokenizer: Any, vocab: int, candidates: int = 8, route: Route = "auto"
    ) -> BranchSpec:
        """The acoustic branch of a guide for a language model.

        Args:
            tokenizer: The language model's tokenizer.
            vocab: Size of its output.
            candidates: Number of its most likely tokens that are scored as text.
            route: ``text`` scores candidates, ``ids`` maps ids to the recogniser's, ``auto`` maps
                ids where both vocabularies have the same texts, else scores candidates.

        Raises:
            OptionError: There is no such route, or ids cannot be mapped.
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
