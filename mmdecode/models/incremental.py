"""Convolutions over inputs that arrive in blocks, for encoders of streams."""

from __future__ import annotations

from torch import Tensor, cat, nn
from torch.nn.functional import conv1d


class IncrementalConvolution:
    """A convolution over blocks of inputs; keeps the inputs that later outputs still read.

    Args:
        conv: The convolution of the model.
        left: Number of zeros before the first input.
    """

    def __init__(self, conv: nn.Conv1d, left: int) -> None:
        self._conv = conv
        self._span = (conv.kernel_size[0] - 1) * conv.dilation[0] + 1
        self._kept: Tensor = conv.weight.new_zeros(1, conv.in_channels, left)

    def __call__(self, x: Tensor, last: bool) -> Tensor:
        """Returns the outputs ``(1, C', S)`` that inputs ``(1, C, T)`` complete.

        Args:
            x: The next inputs.
            last: Whether to keep nothing of these inputs.
        """
        conv, x = self._conv, cat([self._kept, x], 2)
        count = max(0, (x.shape[2] - self._span) // conv.stride[0] + 1)
        if not last:
            self._kept = x[..., count * conv.stride[0] :].clone()
        if not count:
            return x.new_zeros(1, conv.out_channels, 0)
        return conv1d(x, conv.weight, conv.bias, conv.stride, dilation=conv.dilation)
