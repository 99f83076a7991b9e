"""Models whose weights torchao rounds, as `mmdecode.quantize` does it on CUDA, on any device."""

import copy

import pytest
import torch

import mmdecode as mm
from mmdecode.quantization import models
from tests.support import tiny

FORMATS = pytest.mark.parametrize("to", ["int8", "fp8"])


def as_on_cuda(patch):
    """Rounds every model by torchao until ``patch`` is undone."""
    pytest.importorskip("torchao")
    patch.setattr(models, "device_type", lambda model: "cuda")


def on(device, family, dtype=torch.float32):
    """A tiny model of its own on a device."""
    return copy.deepcopy(tiny.model_of(family)).to(device, dtype)


def decoded(model, family, draft=None, new=16, **options):
    """Tokens, and the decoder that made them."""
    decoder = mm.Decoder(draft, seed=5, **options)
    inputs = tiny.inputs_of(family, 3)
    given = {k: v.to(model.device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    return mm.generate(model, decoder=decoder, max_new_tokens=new, **given).tolist(), decoder
