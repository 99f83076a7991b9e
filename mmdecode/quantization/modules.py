"""Modules of transformers' models with int8 weights: linear layers and embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from mmdecode.quantization.kernels import run_linears
from mmdecode.quantization.products import Matrix, rounded

LINEAR = (nn.Linear, Conv1D)
"""Classes of linear layers that are rounded; `Conv1D` of transformers has its matrix transposed."""


class Int8Linear(nn.Module):
    """A linear layer whose output for a row does not depend on other rows, to the bit.

    Computes in float32 and returns its input's dtype. Its ``state_dict`` has ``weight``, int8
    ``(O, I)``, and ``weight_scale``, float32 ``(O,)``; in memory there is `matrix` alone, once
    `pack` has been called.

    Args:
        in_features: Width I of the input.
        out_features: Width O of the output.
        bias: Whether there is a bias.
        many: Whether inputs have many rows, see `Matrix`.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, many: bool = False
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.many = in_features, out_features, many
        self.weight: Any = _constant(torch.empty(out_features, in_features, dtype=torch.int8))
        self.weight_scale: Any = _constant(torch.empty(out_features, dtype=torch.float32))
        self.bias = _constant(torch.empty(out_features)) if bias else None
        self.matrix: Matrix | None = None
        self.groups: dict[tuple[int, bool], list[Matrix]] = {}

    @classmethod
    def like(cls, linear: Any, many: bool = False) -> Int8Linear:
        """Builds a layer of the same widths as one of `LINEAR`, without memory for its weights."""
        inputs, outputs = linear.weight.shape[:: 1 if isinstance(linear, Conv1D) else -1]
        with torch.device("meta"):
            return cls(inputs, outputs, linear.bias is not None, many)

    @classmethod
    def of(cls, linear: Any, many: bool = False) -> Int8Linear:
        """Rounds the weights of one of `LINEAR`, output by output."""
        module = cls.like(linear, many)
        weight = linear.weight.t() if isinstance(linear, Conv1D) else linear.weight
        module._hold(Matrix.of(weight, many))
        if linear.bias is not None:
            module.bias = _constant(linear.bias.detach())
        return module.train(linear.training)

    def pack(self) -> None:
        """Prepares loaded weights for products."""
        if self.matrix is None:  # copies, since those are parts of a file that stays mapped
            given = self.weight.detach().clone(), self.weight_scale.detach().clone()
            self._hold(Matrix(*given, self.many))

    def _hold(self, matrix: Matrix) -> None:
        self.matrix = matrix
        self._parameters.pop("weight"), self._parameters.pop("weight_scale")

    @property
    def packed(self) -> Matrix:
        """The matrix, which `pack` has made of loaded weights."""
        assert self.matrix is not None, "loaded, and not packed"
        return self.matrix

    def packed_bytes(self) -> int:
        """Bytes of the matrix, and of those that `grouped` made of it; 0 before `pack`."""
        made = [matrix for group in self.groups.values() for matrix in group]
        return sum(one.nbytes for one in (self.matrix, *made) if one is not None)

    def grouped(self, groups: int, transposed: bool = False) -> list[Matrix]:
        """Returns the matrices ``(O / G, I)`` of G groups of outputs, made once.

        Args:
            groups: Number G of groups.
            transposed: Whether the matrices are ``(I, O / G)``, with inputs that are multiplied by
                the scales of the outputs before.
        """
        key = (groups, transposed)
        if key not in self.groups:
            ints, scale = self.packed.ints()
            self.groups[key] = [
                Matrix(part.t().contiguous()) if transposed else Matrix(part, own)
                for part, own in zip(ints.chunk(groups), scale.chunk(groups), strict=True)
            ]
        return self.groups[key]

    def forward(self, x: Tensor) -> Tensor:
        """Multiplies ``(..., I)`` to ``(..., O)``."""
        bias = self.bias
        if x.dtype == torch.float32:
            return self.packed(x, bias)
        return self.packed(x.float(), None if bias is None else bias.float()).to(x.dtype)

    def __getattr__(self, name: str) -> Any:
        # of a packed matrix; slow, and for those who ask for a dtype or a shape
        if name in ("weight", "weight_scale") and self.__dict__.get("matrix") is not None:
            return self.matrix.ints()[name == "weight_scale"]  # type: ignore[union-attr]
        return super().__getattr__(name)

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        names = [prefix + name for name in ("weight", "weight_scale")]
        if self.matrix is not None and all(name in state for name in names):
            ints, scale = (state.pop(name) for name in names)
            self.matrix, self.groups = Matrix(ints, scale, self.many), {}
        super()._load_from_state_dict(state, prefix, *args)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.matrix is not None:
            ints, scale = self.matrix.ints()
            destination[prefix + "weight"] = ints
            destination[prefix + "weight_scale"] = scale

    def extra_repr(self) -> str:
        """Widths, as ``nn.Linear`` shows them."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


class Int8Embedding(nn.Module):
    """An embedding whose rows are int8, each with a scale of its own.

    Args:
        num_embeddings: Number V of tokens.
        embedding_dim: Width H.
        padding_idx: Id of padding, whose row is like any other here.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_idx
        self.weight = _constant(torch.empty(num_embeddings, embedding_dim, dtype=torch.int8))
        self.weight_scale = _constant(torch.empty(num_embeddings))

    @classmethod
    def like(cls, embedding: nn.Embedding) -> Int8Embedding:
        """Builds an embedding of the same size, without memory for its rows."""
        with torch.device("meta"):
            return cls(embedding.num_embeddings, embedding.embedding_dim, embedding.padding_idx)

    @classmethod
    def of(cls, embedding: nn.Embedding) -> Int8Embedding:
        """Rounds the rows of an embedding."""
        module = cls.like(embedding)
        ints, scale = rounded(embedding.weight)
        module.weight = _constant(ints)
        module.weight_scale = _constant(scale.to(embedding.weight.dtype))
        return module.train(embedding.training)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns rows ``(..., H)`` of ids ``(...)``, in the dtype of the scales."""
        return self.weight[ids] * self.weight_scale[ids][..., None]


def multiplier(modules: Sequence[Any]) -> Callable[[Tensor], list[Tensor]]:
    """Returns a function that applies several `Int8Linear` to one input, which is scaled once."""
    matrices = [one.packed.packed for one in modules]
    biases = [None if one.bias is None else one.bias.detach().float() for one in modules]
    steps = modules[0].packed.steps

    def multiply(x: Tensor) -> list[Tensor]:
        if x.dtype == torch.float32:
            return run_linears(x, matrices, biases, steps)
        return [found.to(x.dtype) for found in run_linears(x.float(), matrices, biases, steps)]

    return multiply


def _constant(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)
