"""Positions of the codes of an image among the generated tokens of a raster model.

A model generates ``rows`` rows of ``columns`` codes. Depending on the model, a newline token
follows each row, and a fixed sequence of tokens (the tail) follows the last row. Newlines and tail
are called forced: their index alone determines them. Index 0 is the first generated token; tokens
that a model reads before the codes (image size, begin-of-image token) belong to its prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmdecode.errors import OptionError, ShapeError


@dataclass(frozen=True, eq=False)
class Layout:
    """Order of the codes and forced tokens of an image.

    Args:
        rows: Rows of codes, h.
        columns: Codes per row, w.
        ids: Token id of each code in the model's vocabulary, ``(C,)``.
        newline: Id of the token after every row; ``None``: there is no such token.
        tail: Ids of the tokens after the last row.

    Raises:
        OptionError: ``rows`` or ``columns`` is less than 1.
    """

    rows: int
    columns: int
    ids: Tensor
    newline: int | None = None
    tail: tuple[int, ...] = ()
    _masks: dict[tuple[int, torch.device], Tensor] = field(
        default_factory=dict, init=False, repr=False
    )
    _codes: dict[tuple[int, torch.device], Tensor] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1:
            raise OptionError(f"a grid of {self.rows} x {self.columns} codes has no cell")

    @property
    def stride(self) -> int:
        """Returns the number of tokens from a code to the code below it."""
        return self.columns + (self.newline is not None)

    @property
    def length(self) -> int:
        """Returns the number of tokens of a whole image, forced tokens included."""
        return self.rows * self.stride + len(self.tail)

    @property
    def has_forced(self) -> bool:
        """Returns whether any token is forced."""
        return self.newline is not None or bool(self.tail)

    def forced(self, index: Tensor) -> Tensor:
        """Returns the token that is forced at each index, -1 if none is; any shape."""
        result = torch.full_like(index, -1)
        if self.newline is not None:
            result = result.masked_fill(index % self.stride == self.columns, self.newline)
        body = self.rows * self.stride
        for offset, token in enumerate(self.tail):
            result = result.masked_fill(index == body + offset, token)
        return result.masked_fill(index >= self.length, self.tail[-1]) if self.tail else result

    def left(self, index: Tensor) -> Tensor:
        """Returns the index of the code to the left, -1 in column 0 and at forced tokens."""
        free = self.forced(index) < 0
        return torch.where(free & (index % self.stride > 0), index - 1, -1)

    def above(self, index: Tensor) -> Tensor:
        """Returns the index of the code one row up, -1 in row 0 and at forced tokens."""
        free = self.forced(index) < 0
        return torch.where(free & (index >= self.stride), index - self.stride, -1)

    def allowed(self, index: Tensor, vocab: int) -> Tensor:
        """Returns the mask of tokens that can occur at each index, bool ``(..., V)``."""
        codes = self._is_code(vocab, index.device)
        if not self.has_forced:
            return codes.expand(*index.shape, vocab)
        forced = self.forced(index)[..., None]
        tokens = torch.arange(vocab, device=index.device)
        return torch.where(forced >= 0, tokens == forced, codes)

    def binds(self, vocab: int) -> bool:
        """Returns whether `allowed` excludes any token at any index."""
        return self.has_forced or len(self.ids) < vocab

    def _is_code(self, vocab: int, device: torch.device) -> Tensor:
        """Returns the mask of tokens that are codes, bool ``(V,)``; cached for CUDA graphs."""
        if (vocab, device) not in self._masks:
            tokens = torch.arange(vocab, device=device)
            self._masks[vocab, device] = torch.isin(tokens, self.ids.to(device))
        return self._masks[vocab, device]

    def codes_of(self, vocab: int, device: torch.device) -> Tensor:
        """Returns the code of each token, -1 if the token is no code, ``(V,)``; cached."""
        if (vocab, device) not in self._codes:
            ids = self.ids.to(device)
            codes = torch.full((vocab,), -1, device=device)
            self._codes[vocab, device] = codes.scatter(
                0, ids, torch.arange(len(ids), device=device)
            )
        return self._codes[vocab, device]

    def cell_indices(self) -> Tensor:
        """Returns the index of every code among the generated tokens, ``(rows, columns)``."""
        first = torch.arange(self.rows)[:, None] * self.stride
        return first + torch.arange(self.columns)

    def codes(self, tokens: Tensor) -> Tensor:
        """Extracts the codes of whole images, ``(B, length)`` to ``(B, rows, columns)``.

        Raises:
            ShapeError: The number of tokens is wrong, or a token at a code's index is no code.
        """
        if tokens.shape[-1] < self.rows * self.stride - (self.newline is not None):
            raise ShapeError(
                f"{tokens.shape[-1]} tokens were generated; an image of {self.rows} x "
                f"{self.columns} codes has {self.length}"
            )
        cells = tokens[:, self.cell_indices().to(tokens.device).flatten()]
        code_of = self.codes_of(int(self.ids.max()) + 2, tokens.device)
        codes = code_of[cells.clamp(0, len(code_of) - 1)]
        if bool((codes < 0).any()):
            raise ShapeError("a token at the index of a code is no image code")
        return codes.view(-1, self.rows, self.columns)
