"""What a recogniser says of a language model's candidates, by the text that they stand for.

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
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mmdecode.asr.alignment.words import SPACES
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

Tokens = tuple[int, ...]
"""Ids of the recogniser."""
Route = Literal["auto", "text", "ids"]

MARKS = ("", ",", ".", "?", "!")
"""What may follow a word, next to what the text itself has there."""
_TRAILING = ",.?!;:"
_NO_TEXT = "\ufffd"


class Spelling:
    """How a recogniser's tokenizer writes words.

    Args:
        tokenizer: A BPE that marks spaces in its tokens, as Whisper's or Moonshine's; what was
            added to its vocabulary is no text.
        end: Id of the end of a transcript.
    """

    def __init__(self, tokenizer: Any, end: int) -> None:
        self.end = end
        self._tokenizer = tokenizer
        self._ids: dict[str, Tokens] = {}
        other = {end, *tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        ids = [i for i in range(len(tokenizer)) if i not in other]
        names = tokenizer.convert_ids_to_tokens(ids)
        self.space = max(SPACES, key=lambda mark: sum(name.startswith(mark) for name in names))
        words = (name[1:] for name in names if name.startswith(self.space) and name[1:].isalpha())
        [first, *_] = tokenizer.convert_ids_to_tokens(_plain_ids(tokenizer, next(words, "a")))
        # some tokenizers put a space before every text by themselves
        self._before_word = "" if first.startswith(self.space) else " "
        ordered = sorted(zip(names, ids, strict=True))
        self._names = [name for name, _ in ordered]
        self._ordered = np.array([token for _, token in ordered])
        self.name = dict(zip(ids, names, strict=True))

    def ids(self, word: str) -> Tokens:
        """The canonical tokens of a word with a space before it."""
        if word not in self._ids:
            ids = _plain_ids(self._tokenizer, f"{self._before_word}{word}")
            # a word may look like a special token, which is no text
            self._ids[word] = tuple(token for token in ids if token in self.name)
        return self._ids[word]

    def beginning(self, piece: str) -> np.ndarray:
        """Ids of all text tokens whose bytes begin with those of ``piece``, a token's name."""
        first = bisect_left(self._names, piece)
        # names are made of characters that are all below this one
        last = bisect_left(self._names, f"{piece}\U0010ffff")
        return self._ordered[first:last]


def _plain_ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def casings(word: str) -> list[str]:
    """The ways a word may be written in small and capital letters, as it is first."""
    return [*dict.fromkeys([word, word.lower(), word[:1].upper() + word[1:], word.upper()])]


def spellings(word: str) -> list[str]:
    """The casings of a complete word with the marks that may follow it, as it is first."""
    core = word.rstrip(_TRAILING)
    if not core:
        return [word]
    marks = dict.fromkeys([word[len(core) :], *MARKS])
    return [case + mark for mark in marks for case in casings(core)]


def split(text: str) -> tuple[tuple[str, ...], str]:
    """Complete words, and the pending one, empty after white space."""
    words = text.split()
    if not words or text[-1].isspace():
        return tuple(words), ""
    return tuple(words[:-1]), words[-1]


@dataclass
class Block:
    """Tokens of one row to be read together, each after an earlier one or the cached prefix.

    Attributes:
        tokens: In an order in which parents come first.
        parents: -1 for those right after the cached prefix.
        prefixes: What is known once the token was read: all tokens up to it, from the beginning.
        kept: How many of the first stay in the cache.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    prefixes: list[Tokens] = field(default_factory=list)
    kept: int = 0

    def add(self, token: int, parent: int, prefix: Tokens) -> int:
        """A token's place."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.prefixes.append(prefix)
        return len(self.tokens) - 1


class Listener:
    """One row: scores of texts from distributions of next tokens, and those still to be read.

    Args:
        spelling: How the recogniser writes.
        first: Log-distribution at the beginning of the transcript, ``(V,)``.

    Attributes:
        wanted: Prefixes whose distributions are missing for what was asked.
    """

    def __init__(self, spelling: Spelling, first: np.ndarray) -> None:
        self.spelling = spelling
        self.wanted: set[Tokens] = set()
        self._distributions: dict[Tokens, np.ndarray] = {(): first}
        self._masses: dict[tuple[Tokens, str], float] = {}
        self._paths: dict[tuple[str, ...], tuple[Tokens, float]] = {(): ((), 0.0)}
        self._trunk: Tokens = ()
        self._cached = 0

    def fork(self) -> Listener:
        """A row that goes on by itself."""
        twin = Listener(self.spelling, self._distributions[self._trunk])
        twin._distributions, twin._masses, twin._paths = (
            dict(self._distributions),
            dict(self._masses),
            dict(self._paths),
        )
        twin._trunk, twin._cached = self._trunk, self._cached
        return twin

    def score(self, text: str, ended: bool = False) -> float | None:
        """Log-probability that a transcript begins with a text, or with ``ended`` is the text.

        Returns:
            ``None`` where distributions are missing, which are then among `wanted`.
        """
        words, pending = split(text)
        if ended:
            words = (*words, pending) if pending else words
            if not words:
                return float(self._distributions[()][self.spelling.end])
            before, value = self._path(words[:-1])
            found = self._written(before, words[-1], ended=True)
            return None if value is None or found is None else value + found[1]
        before, value = self._path(words)
        if not pending:
            own = self._mass(before, self.spelling.space) if self._all_known([before]) else None
        else:
            own = self._begun(before, pending)
        return None if value is None or own is None else value + own

    def commit(self, text: str) -> None:
        """Says that all texts asked for from now on begin with this one."""
        words, pending = split(text)
        stable = words if pending else words[:-1]  # the last one may yet end the transcript
        trunk, value = self._path(stable)
        if value is None or len(trunk) <= len(self._trunk):
            return
        self._trunk, size = trunk, len(trunk)
        self._distributions = {
            p: distribution for p, distribution in self._distributions.items() if p[:size] == trunk
        }
        self._masses = {k: mass for k, mass in self._masses.items() if k[0][:size] == trunk}

    def block(self) -> Block:
        """What is to be read for `wanted`."""
        block = Block()
        place = -1
        for end in range(self._cached + 1, len(self._trunk) + 1):
            place = block.add(self._trunk[end - 1], place, self._trunk[:end])
        block.kept = len(block.tokens)
        places = {self._trunk: place}
        for prefix in sorted(self.wanted):
            for end in range(len(self._trunk) + 1, len(prefix) + 1):
                part = prefix[:end]
                if part not in places:
                    places[part] = block.add(part[-1], places[part[:-1]], part)
        return block

    def hear(self, block: Block, distributions: Mapping[int, np.ndarray]) -> None:
        """Takes over what was read.

        Args:
            block: What `block` said.
            distributions: Log-distributions ``(V,)`` by place in it, at least those of `unread`.
        """
        for place, distribution in distributions.items():
            self._distributions[block.prefixes[place]] = distribution
        self._cached += block.kept
        self.wanted.clear()

    def unread(self, block: Block) -> list[int]:
        """Places of a block whose distributions are not known."""
        known = self._distributions
        return [
            place
            for place in range(block.kept, len(block.tokens))
            if block.prefixes[place] not in known
        ]

    def _path(self, words: tuple[str, ...]) -> tuple[Tokens, float | None]:
        """Tokens of complete words and their score; as if written so where that is not known."""
        if words in self._paths:
            return self._paths[words]
        before, value = self._path(words[:-1])
        found = self._written(before, words[-1], ended=False)
        if value is None or found is None:
            return before + self.spelling.ids(words[-1]), None
        tokens, own = found
        self._paths[words] = before + tokens, value + own
        return self._paths[words]

    def _written(self, before: Tokens, word: str, ended: bool) -> tuple[Tokens, float] | None:
        """The most likely way to write a complete word: tokens and score, with the end if asked."""
        ways = [self.spelling.ids(way) for way in spellings(word)]
        if not self._all_known([before + ids for ids in ways]):
            return None
        best: tuple[float, Tokens, float] | None = None
        for ids in ways:
            score = self._along(before, ids)
            if ended:
                behind = float(self._distributions[before + ids][self.spelling.end])
            else:
                behind = self._mass(before + ids, self.spelling.space)
            if best is None or score + behind > best[0]:
                best = score + behind, ids, score + behind if ended else score
        assert best is not None, "a word can be written as it is"
        return best[1:]

    def _begun(self, before: Tokens, pending: str) -> float | None:
        """Log-mass of what begins with a pending word, in its most likely casing."""
        ways = [self.spelling.ids(way) for way in casings(pending)]
        if not self._all_known([before + ids[:-1] for ids in ways]):
            return None
        return max(self._covered(before, ids) for ids in ways)

    def _covered(self, before: Tokens, ids: Tokens) -> float:
        """Log-mass of some canonical tokens and then one that begins with the rest, over all."""
        names = [self.spelling.name[token] for token in ids]
        masses = [
            self._along(before, ids[:place])
            + self._mass(before + ids[:place], "".join(names[place:]))
            for place in range(len(ids))
        ]
        return log_sum(np.array(masses))

    def _along(self, before: Tokens, ids: Tokens) -> float:
        places = range(len(ids))
        return sum(float(self._distributions[before + ids[:place]][ids[place]]) for place in places)

    def _mass(self, before: Tokens, piece: str) -> float:
        """Log-probability that the next token begins with a piece."""
        key = before, piece
        if key not in self._masses:
            values = self._distributions[before][self.spelling.beginning(piece)]
            self._masses[key] = log_sum(values)
        return self._masses[key]

    def _all_known(self, prefixes: Iterable[Tokens]) -> bool:
        """Whether the distributions after some prefixes were read; all that were not are wanted."""
        missing = [prefix for prefix in prefixes if prefix not in self._distributions]
        self.wanted.update(missing)
        return not missing


def log_sum(values: np.ndarray) -> float:
    """Log of the sum of what some logarithms are of; of none, minus infinity."""
    best = values.max(initial=-np.inf)
    if best == -np.inf:
        return -math.inf
    return float(best + np.log(np.exp((values - best).astype(np.float64)).sum()))


class AcousticScorer(BranchRunner):
    """A recogniser that scores a language model's most likely tokens as text.

    See `mmdecode.engine.contracts.BranchRunner`; the module says what a score is. What is heard
    comes with the call, as for `mmdecode.guide.fusion.SecondModel`.

    Args:
        call: Of the call.
        model: A recogniser that the engine has an adapter for.
        spelling: How it writes.
        prompt: Its decoder's first ids, which ask for a transcript without times.
        tokenizer: The language model's.
        pieces: Text of each of its tokens, see `pieces_of`.
        candidates: How many of its most likely tokens are scored.

    Attributes:
        choices: What the language model and the audio might have taken, each alone.
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
        self.ends = frozenset(call.request.eos_token_ids.tolist())
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
        """What a candidate stands for: a text, and whether it ends there."""
        if text is None or text.endswith(_NO_TEXT):
            return None
        if token in self.ends:
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
            for place, parent in enumerate(block.parents):
                if parent >= 0:
                    depths[row, place] = depths[row, parent] + 1
                    ancestors[row, place] |= ancestors[row, parent]
        cache, device = self.branches.cache, self.prompt.device
        states, _ = self.branches.run(
            torch.from_numpy(tokens).to(device),
            torch.from_numpy(depths).to(device),
            torch.from_numpy(ancestors).to(device),
            visible=bucket(int(cache.start.max()) + width),
        )
        places = [
            listener.unread(block) for listener, block in zip(self.listeners, blocks, strict=True)
        ]
        index = torch.tensor([(row, place) for row, own in enumerate(places) for place in own])
        wanted = states["last"][index[:, 0].to(device), index[:, 1].to(device)]
        distributions = iter(
            self.branches.adapter.head(wanted).float().log_softmax(-1).cpu().numpy()
        )
        for listener, block, own in zip(self.listeners, blocks, places, strict=True):
            listener.hear(block, {place: next(distributions) for place in own})
        cache.commit(torch.tensor([block.kept for block in blocks], device=device))


def _generated(call: Call) -> list[list[int]]:
    """The ids that each row has generated."""
    new = call.rows.ids[:, call.prompt_length :].tolist()
    return [ids[:length] for ids, length in zip(new, call.rows.length.tolist(), strict=True)]


def _paths(call: Call, proposal: Proposal) -> Iterator[list[list[int] | None]]:
    """By row, the generated ids up to the root and to each node, ``None`` for unused nodes."""
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
        tokenizer: Of the language model.
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
