"""`Listener`: scores texts by a recogniser's next-token distributions (see `fusion`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from mmdecode.asr.correction.spelling import (
    Spelling,
    Tokens,
    casings,
    spellings,
    split,
)


@dataclass
class Block:
    """A tree of tokens after a row's cached prefix, to be scored in one decoder pass.

    Attributes:
        tokens: Token ids of the nodes; parents come before their children.
        parents: Index of each node's parent; -1: the cached prefix.
        prefixes: Tokens from the beginning of the transcript up to each node.
        kept: Number of nodes, from the first, that are kept in the cache after the pass.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    prefixes: list[Tokens] = field(default_factory=list)
    kept: int = 0

    def add(self, token: int, parent: int, prefix: Tokens) -> int:
        """Adds a node and returns its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.prefixes.append(prefix)
        return len(self.tokens) - 1


class Listener:
    """Scores texts of one row, and collects the token prefixes that the recogniser has to score.

    Args:
        spelling: Maps words to tokens of the recogniser.
        first: Log-probabilities of the first token of the transcript, ``(V,)``.

    Attributes:
        wanted: Prefixes whose next-token distributions are needed and not yet known.
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
        """Returns an independent copy."""
        twin = Listener(self.spelling, self._distributions[self._trunk])
        twin._distributions, twin._masses, twin._paths = (
            dict(self._distributions),
            dict(self._masses),
            dict(self._paths),
        )
        twin._trunk, twin._cached = self._trunk, self._cached
        return twin

    def score(self, text: str, ended: bool = False) -> float | None:
        """Returns the log-probability that a transcript begins with a text, or equals it.

        Args:
            text: The text.
            ended: Whether the transcript has to equal the text.

        Returns:
            The score; ``None``: distributions are missing, whose prefixes are added to `wanted`.
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
        """Fixes the beginning of all later texts, and drops distributions of other beginnings."""
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
        """Returns the tree of tokens to score so that all prefixes in `wanted` become known."""
        block = Block()
        node = -1
        for end in range(self._cached + 1, len(self._trunk) + 1):
            node = block.add(self._trunk[end - 1], node, self._trunk[:end])
        block.kept = len(block.tokens)
        nodes = {self._trunk: node}
        for prefix in sorted(self.wanted):
            for end in range(len(self._trunk) + 1, len(prefix) + 1):
                part = prefix[:end]
                if part not in nodes:
                    nodes[part] = block.add(part[-1], nodes[part[:-1]], part)
        return block

    def hear(self, block: Block, distributions: Mapping[int, np.ndarray]) -> None:
        """Stores the distributions of a pass.

        Args:
            block: Tree that the method `block` returned.
            distributions: Log-probabilities ``(V,)`` by node, at least for the nodes of `unread`.
        """
        for node, distribution in distributions.items():
            self._distributions[block.prefixes[node]] = distribution
        self._cached += block.kept
        self.wanted.clear()

    def unread(self, block: Block) -> list[int]:
        """Returns the nodes of a block whose distributions are not known."""
        known = self._distributions
        return [
            node
            for node in range(block.kept, len(block.tokens))
            if block.prefixes[node] not in known
        ]

    def _path(self, words: tuple[str, ...]) -> tuple[Tokens, float | None]:
        """Returns tokens and score of complete words, in their most likely spelling.

        If distributions are missing, the tokens are those of the given spelling, and the score is
        ``None``.
        """
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
        """Returns tokens and score of the most likely spelling of a complete word.

        The score includes the end token if ``ended``. ``None``: distributions are missing.
        """
        ways = [self.spelling.ids(way) for way in spellings(word)]
        if not self._all_known([before + ids for ids in ways]):
            return None
        best: tuple[float, Tokens, float] | None = None
        for ids in ways:
            score = self._along(before, ids)
            if ended:
                following = float(self._distributions[before + ids][self.spelling.end])
            else:
                following = self._mass(before + ids, self.spelling.space)
            if best is None or score + following > best[0]:
                best = score + following, ids, score + following if ended else score
        assert best is not None, "a word can be written as it is"
        return best[1:]

    def _begun(self, before: Tokens, pending: str) -> float | None:
        """Returns the log-probability of all words that begin with ``pending``, best casing."""
        ways = [self.spelling.ids(way) for way in casings(pending)]
        if not self._all_known([before + ids[:-1] for ids in ways]):
            return None
        return max(self._covered(before, ids) for ids in ways)

    def _covered(self, before: Tokens, ids: Tokens) -> float:
        """Returns the log-probability of all token sequences that begin with the text of ``ids``.

        Each sequence consists of the first ``n`` of ``ids``, for any ``n``, and one token that
        begins with the rest of the text.
        """
        names = [self.spelling.name[token] for token in ids]
        masses = [
            self._along(before, ids[:start])
            + self._mass(before + ids[:start], "".join(names[start:]))
            for start in range(len(ids))
        ]
        return log_sum(np.array(masses))

    def _along(self, before: Tokens, ids: Tokens) -> float:
        steps = range(len(ids))
        return sum(float(self._distributions[before + ids[:step]][ids[step]]) for step in steps)

    def _mass(self, before: Tokens, piece: str) -> float:
        """Returns the log-probability that the next token begins with the text ``piece``."""
        key = before, piece
        if key not in self._masses:
            values = self._distributions[before][self.spelling.beginning(piece)]
            self._masses[key] = log_sum(values)
        return self._masses[key]

    def _all_known(self, prefixes: Iterable[Tokens]) -> bool:
        """Whether the distributions after all prefixes are known; unknown ones go to `wanted`."""
        missing = [prefix for prefix in prefixes if prefix not in self._distributions]
        self.wanted.update(missing)
        return not missing


def log_sum(values: np.ndarray) -> float:
    """Returns the log-sum-exp of the values; minus infinity if there are none."""
    best = values.max(initial=-np.inf)
    if best == -np.inf:
        return -math.inf
    return float(best + np.log(np.exp((values - best).astype(np.float64)).sum()))
