"""Counter-based noise: every draw is a pure function of its key, never of a generator's state.

A key is (seed, request, position, role, round, token). ``position`` counts generated tokens, so
padding and prompt length never enter; ``request`` names the row by its content or by the caller, so
batch neighbours never enter. Target Gumbel noise carries no round: that is what makes sampling with
one seed give the same tokens with and without drafting. Draws that test or repair a proposal carry
the row's round, since a position may be tested more than once.

Not here: any decision about what the noise is used for; that is `mmdecode.accept`.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

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

    def __init__(self, seed: int, requests: Tensor) -> None:
        self.seed, self.requests = seed, requests
        start = torch.full_like(requests, _signed(seed * _GOLDEN + 1))
        self._rows = _absorb(_mix(start), requests)  # (B,)

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
        state = _absorb(self._rows[:, None], positions)
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
        self, positions: Tensor, role: Role, vocab: int, trial: Tensor | None = None
    ) -> Tensor:
        """Standard Gumbel draws for each token, ``(B, Q)`` to ``(B, Q, vocab)``, float32."""
        tokens = torch.arange(vocab, device=positions.device)
        unit = _open_unit(_absorb(self._state(positions, role, trial)[..., None], tokens))
        return -(-unit.log()).log().float()

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
