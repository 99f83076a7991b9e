"""Where the tests of this folder run: on CUDA, and among the slow ones on the CPU."""

import pytest
import torch

no_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cuda", marks=[pytest.mark.gpu, no_cuda]),
        pytest.param("cpu", marks=pytest.mark.slow),
    ],
)
