"""Weights that torchao rounds on CUDA: rows are independent, and drafted text is undrafted text.

The same tests run on the CPU among the slow ones, captured rounds on a tape.
"""

import pytest
import torch

import mmdecode as mm
from mmdecode.quantization.models import format_of
from mmdecode.quantization.weight_only import SLACK, change, round_weights
from tests.gpu.devices import DEVICES
from tests.support import seams
from tests.support.rounded import FORMATS, as_on_cuda, decoded, on

NEW = 48
"""More than a few rounds."""
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)


@pytest.fixture(autouse=True)
def by_torchao(monkeypatch):
    as_on_cuda(monkeypatch)


def refuse_old(device, to):
    if device == "cuda" and to == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")


@DTYPES
@FORMATS
@DEVICES
def test_rows_depend_on_each_other_no_more_than_in_float(device, to, dtype):
    refuse_old(device, to)
    # tiny layers, and some of the widths of a model with 7 billion weights
    assert format_of(mm.quantize(on(device, "llama", dtype), to)) == to
    sizes = [(4096, 4096), (4096, 11008), (11008, 4096)] if device == "cuda" else [(256, 512)]
    wide = torch.nn.Sequential(*[torch.nn.Linear(*size, bias=False) for size in sizes])
    wide = wide.to(device, dtype)
    floats = [change(layer, layer.weight) for layer in wide]
    weights = [layer.weight for layer in wide]
    round_weights(wide, to)
    found = [change(layer, weight) for layer, weight in zip(wide, weights, strict=True)]
    least = torch.finfo(dtype).eps
    allowed = [SLACK * max(one, least) for one in floats]
    assert all(one <= most for one, most in zip(found, allowed, strict=True)), (found, floats)


@FORMATS
@pytest.mark.parametrize("family", ["llama", "whisper"])
@DEVICES
def test_a_draft_changes_no_token_of_a_rounded_model(device, family, to):
    refuse_old(device, to)
    model = mm.quantize(on(device, family), to)
    expected, _ = decoded(model, family)
    for draft in ("lookup", "recycling:nodes=12", "layer_skip:exit_layer=1"):
        found, decoder = decoded(model, family, draft)
        assert found == expected
        assert decoder.stats.drafted > 0


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("family", ["llama", "whisper"])
@DEVICES
def test_a_rounded_copy_drafts_for_the_float_model(device, family, captured, request, monkeypatch):
    noted = []
    if captured:
        if device == "cpu":
            request.getfixturevalue("taped")
        seams.CAPTURE.plant(monkeypatch, lambda old: lambda *given: noted.append(1) or old(*given))
    model = on(device, family)
    expected, _ = decoded(model, family, None, NEW)
    found, decoder = decoded(model, family, "quantized:bits=8", NEW, compile=captured)
    assert found == expected
    assert decoder.stats.acceptance_length > 2, "most of what the copy drafts is accepted"
    assert bool(noted) == captured
    assert format_of(model) is None
