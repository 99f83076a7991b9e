"""Counter-based noise: every draw is a pure function of its key, never of a generator's state.

A key is (seed, request, position, role, round, token). ``position`` counts generated tokens, so
padding and prompt length never enter; ``request`` names the row by its content or by the caller, so
batch neighbours never enter. Target Gumbel noise carries no round: that is what makes sampling with
one seed give the same tokens with and without drafting. Draws that test or repair a proposal carry
the row's round, since a position may be tested more than once.

A token's draw has 52 bits: 31 of a hash in 32-bit arithmetic, which is fast over a vocabulary, and
21 that are computed only where they can decide.

Not here: any decision about what the noise is used for; that is `mmdecode.accept`.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor

from mmdecode.engine import host

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


class Role(enum.IntEnum):
    """Purpose of a draw; draws of different roles are independent."""

    TARGET = 1  # Gumbel noise of the target itself, shared by every drafter
    ACCEPT = 2
    RESIDUAL = 3
    DRAFT = 4
    WINDOW = 5
    GUIDE = 6
    WINDOW_ACCEPT = 7


def _mix(x: Tensor) -> Tensor:
    """The splitmix64 finaliser on int64 tensors; multiplication wraps, shifts are made logical."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _absorb(state: Tensor, value: Tensor | int) -> Tensor:
    return _mix((state ^ value) + _signed(_GOLDEN))


def request_key(*parts: bytes | str | int) -> int:
    """A stable 63-bit key of a request, from whatever identifies it."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest(), "little") >> 1


class Noise:
    """Keyed draws for the rows of one batch.

    Args:
        seed: The caller's seed.
        requests: One key per row, int64 ``(B,)``; see `request_key`.
    """

    uncaptured: ClassVar = {"seed"}  # the rows' states hold it

    def __init__(self, seed: int, requests: Tensor) -> None:
        self.seed, self.requests = seed, requests
        self._made: Tensor | None = None

    @classmethod
    def of(cls, seed: int, requests: Iterable[int], device: torch.device | str = "cpu") -> Noise:
        """Noise of rows whose keys are plain integers."""
        return cls(seed, torch.tensor([_signed(r) for r in requests], device=device))

    def generator(self, row: int, *parts: str | int) -> torch.Generator:
        """A CPU generator for draws of a row before its first token; ``parts`` name the purpose.

        It is the same for a row in any batch and on any device; reads the row's key on the host.
        """
        key = request_key(self.seed, int(self.requests[row]), *parts)
        return torch.Generator().manual_seed(key)

    def _state(self, positions: Tensor, role: Role, trial: Tensor | None) -> Tensor:
        if self._made is None:  # for the first draw of a call
            start = torch.full_like(self.requests, _signed(self.seed * _GOLDEN + 1))
            self._made = _absorb(_mix(start), self.requests)  # (B,)
        state = _absorb(self._made[:, None], positions)
        state = _absorb(state, int(role))
        return state if trial is None else _absorb(state, trial[:, None] + 1)

    def uniform(self, positions: Tensor, role: Role, trial: Tensor | None = None) -> Tensor:
        """Draws in the open interval (0, 1), float64.

        Args:
            positions: Indices of generated tokens, ``(B, Q)``.
            role: Purpose of the draws.
            trial: Round of each row, ``(B,)``, for draws that a position may need more than once.
        """
        return _open_unit(self._state(positions, role, trial))

    def gumbel(
        self,
        positions: Tensor,
        role: Role,
        tokens: int | Tensor,
        trial: Tensor | None = None,
    ) -> Tensor:
        """Standard Gumbel draws at tokens, ``(B, Q)`` to ``(B, Q, K)``, float32.

        From the upper bits of each draw: within 2e-5 of the exact value, which `sample` uses,
        between -2 and 10. Values end at -2.81 and 22.2.

        Args:
            positions: Indices of generated tokens, ``(B, Q)``.
            role: Purpose of the draws.
            tokens: Ids ``(K,)``; a number K stands for the ids below K.
            trial: Round of each row, ``(B,)``, for draws that a position may need more than once.
        """
        if not isinstance(tokens, Tensor):
            tokens = torch.arange(tokens, device=positions.device)
        return _gumbel(_upper_bits(self._state(positions, role, trial), tokens))

    def sample(
        self,
        scores: Tensor,
        positions: Tensor,
        role: Role,
        trial: Tensor | None = None,
        index: Tensor | None = None,
    ) -> Tensor:
        """Tokens sampled by the Gumbel-max trick: the argmax of scores plus draws, ``(B, Q)``.

        The sums are compared in float64, with all bits of the draws; of equal ones the lowest id
        wins. On a CPU the draws of most tokens are bounded only: those whose sum could be the
        largest are computed. Scores that are -inf are never chosen, unless all are.

        Args:
            scores: Unnormalised log-probabilities, float32 ``(B, Q, V)``.
            positions: See `gumbel`, ``(B or 1, P)``.
            role: Purpose of the draws.
            trial: See `gumbel`.
            index: Index of each score row's position, ``(B or 1, Q)``, where several rows share
                one; ``None``: P = Q, in order.
        """
        shape = scores.shape[:-1]
        state = self._state(positions, role, trial)
        if host.may_read(scores.device):
            if index is not None:
                state = state.expand(len(scores), -1).gather(1, index.expand(shape))
            return _largest(scores, state.expand(shape))
        if index is not None:
            index = index.expand(shape)[..., None]
        return _chunked(scores, state, index)

    def pairs(self, queries: Tensor, keys: Tensor, layer: int, heads: int) -> Tensor:
        """Draws in (0, 1) for every pair of a query and a key in a layer, float32.

        They do not depend on a key's slot in the cache, nor on other tokens of the pass. Computing
        them takes several times the memory of the result: ask for few queries at a time.

        Args:
            queries: Tokens before each query, padding not counted, ``(B, Q)``.
            keys: Tokens before each key, ``(B, K)``.
            layer: Index of the layer.
            heads: Number of heads, H.

        Returns:
            ``(B, H, Q, K)``.
        """
        state = _absorb(self._state(queries, Role.GUIDE, None), layer)[:, None]  # (B, 1, Q)
        state = _absorb(state, torch.arange(heads, device=queries.device)[:, None])
        return _open_unit(_absorb(state[..., None], keys[:, None, None])).float()


def _open_unit(state: Tensor) -> Tensor:
    return ((state & ((1 << 52) - 1)).double() + 0.5) / (1 << 52)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A logical right shift of int32."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _upper_bits(state: Tensor, tokens: Tensor) -> Tensor:
    """31 bits by state ``(...)`` and token ``(K,)`` or ``(..., K)``, int32 ``(..., K)``.

    A bijection of 32 bits in two keyed rounds, of the kind of Wellons' lowbias32.
    """
    low, high = (part.to(torch.int32)[..., None] for part in (state, state >> 32))
    x = tokens.to(torch.int32) * _GOLDEN32 + low
    x ^= _shifted(x, 16)
    x *= 0x7FEB352D
    x ^= _shifted(x, 15)
    x += high
    x *= _FACTOR
    x ^= _shifted(x, 16)
    return x & 0x7FFFFFFF


_GOLDEN32 = 0x9E3779B9 - (1 << 32)
_FACTOR = 0x846CA68B - (1 << 32)
_CHUNK = 1 << 18
_SUMS = 1 << 22
"""Most sums that are held at a time on a device from which nothing is read."""
_SLACK = 1.0
"""More than `_gumbel` differs from `_exact`; where all upper bits are 0 it may be lower by more."""


def _gumbel(upper: Tensor) -> Tensor:
    """Gumbel values by the upper bits alone, float32; a small uniform is a large value."""
    unit = upper.to(torch.float32).add_(0.5).mul_(-(2.0**-31)).clamp_(min=2.0**-24 - 1)
    return unit.log1p_().neg_().log_().neg_()


def _exact(upper: Tensor, state: Tensor, tokens: Tensor) -> Tensor:
    """Gumbel values by all bits, float64; arguments are broadcast."""
    lower = _absorb(state, tokens) & ((1 << 21) - 1)
    unit = ((upper.long() << 21) + lower).double().add_(0.5).mul_(-(2.0**-52))
    return unit.log1p_().neg_().log_().neg_()


def _chunked(scores: Tensor, state: Tensor, index: Tensor | None) -> Tensor:
    """`Noise.sample` without reading values: ``state (B or 1, P)``, ``index (B, Q, 1)``.

    Ids are taken in chunks: draws and sums are float64, and there is no tensor of all of them.
    """
    rows, vocab = scores.shape[:-1], scores.shape[-1]
    step = max(1, _SUMS // max(1, rows.numel()))
    best = chosen = None
    for begin in range(0, vocab, step):
        tokens = torch.arange(begin, min(begin + step, vocab), device=scores.device)
        draws = _exact(_upper_bits(state, tokens), state[..., None], tokens)
        if index is not None:
            draws = draws.expand(len(scores), -1, -1)
            draws = draws.gather(1, index.expand(-1, -1, len(tokens)))
        value, token = (scores[..., begin : begin + step] + draws).max(-1)
        if best is None or chosen is None:
            best, chosen = value, token
            continue
        above = (value > best) | (value.isnan() & ~best.isnan())  # of equal ones the first
        best, chosen = torch.where(above, value, best), torch.where(above, token + begin, chosen)
    assert chosen is not None, "a vocabulary has tokens"
    return chosen


def _largest(scores: Tensor, state: Tensor) -> Tensor:
    """`Noise.sample` on a CPU, a few rows at a time, so that they stay in the processor's cache."""
    vocab = scores.shape[-1]
    if scores.numel() > _CHUNK and len(scores) > 1:
        apart = zip(scores.split(1), state.split(1), strict=True)
        return torch.cat([_largest(*row) for row in apart])
    rows, keys = scores.reshape(-1, vocab), state.reshape(-1)
    step = max(1, _CHUNK // vocab)
    bounded = int((rows > -torch.inf).count_nonzero()) * 8 > rows.numel()
    draws = _Bounds(keys, vocab, step) if bounded else None  # nodes of one depth share their draws
    chosen = []
    for begin in range(0, len(rows), step):
        part = slice(begin, begin + step)
        possible = draws.possible(rows[part], part) if draws else rows[part] > -torch.inf
        chosen.append(_largest_of(rows[part], keys[part], possible))
    return torch.cat(chosen).view(scores.shape[:-1])


class _Bounds:
    """Draws by upper bits for rows of a batch, made once for all rows of one key."""

    def __init__(self, keys: Tensor, vocab: int, step: int) -> None:
        tokens = torch.arange(vocab)
        different, self.index = keys.unique(return_inverse=True)
        self.draws = torch.empty(len(different), vocab)
        self.too_low: list[tuple[int, int]] = []
        for begin in range(0, len(different), step):
            upper = _upper_bits(different[begin : begin + step], tokens)
            self.draws[begin : begin + step] = _gumbel(upper)
            for row, token in (upper == 0).nonzero().tolist():
                self.too_low.append((begin + row, token))

    def possible(self, rows: Tensor, part: slice) -> Tensor:
        """Tokens of some rows ``(R, V)`` whose sum may be the largest, bool."""
        index = self.index[part]
        sums = self.draws[index].add_(rows)
        possible = sums >= sums.amax(-1, keepdim=True) - 2 * _SLACK
        for row, token in self.too_low:
            possible[index == row, token] = True
        return possible


def _largest_of(rows: Tensor, keys: Tensor, possible: Tensor) -> Tensor:
    """The token of the largest sum among possible ones, ``(R,)``."""
    row, token = possible.nonzero(as_tuple=True)
    key, last = keys[row], rows.shape[1] - 1
    sums = rows[row, token] + _exact(_upper_bits(key, token[:, None])[:, 0], key, token)
    best = sums.new_full((len(rows),), -torch.inf).scatter_reduce_(0, row, sums, "amax")
    token = token.masked_fill(sums < best[row], last)
    chosen = torch.full_like(keys, last).scatter_reduce_(0, row, token, "amin")
    without = best == -torch.inf  # of -inf alone, or with a NaN
    if bool(without.any()):
        chosen[without] = rows[without].argmax(-1)
    return chosen
