"""Image tokens on CUDA: drafts change none, relaxed rules run, rounds are captured.

The same tests run on the CPU among the slow ones, captured rounds on a tape.
"""

import copy
import functools
import warnings

import pytest
import torch

from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.jacobi import Jacobi
from tests.conformance.test_image_inputs import tiny_vq
from tests.gpu.devices import DEVICES
from tests.support import seams, tiny_images

FAMILIES = pytest.mark.parametrize("family", ["llamagen", "janus"])
DRAFTS = {
    "window": lambda model: Jacobi(8),
    "tree": lambda model: Jacobi(8, siblings=2),
    "above": lambda model: Jacobi(8, start="above_law"),
    "itself": lambda model: Assistant(model, 4),
    "eagle": lambda model: tiny_images.eagle_of(model, sampled=True),
    "eagle tree": lambda model: tiny_images.eagle_of(model, "tree", sampled=True),
}
RULES = {
    "rejection": "rejection",
    "lantern": "lantern:delta=0.3,k=5",
    "cool_sd": "cool_sd:delta=2,nu=0",
    "gsd": "gsd:distance=2",
}


@pytest.fixture(autouse=True)
def full_precision(monkeypatch):
    """Convolutions too, which round more by default."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@functools.cache
def model(family, device):
    return copy.deepcopy(tiny_images.image_model(family)).to(device)


@functools.cache
def tokenizer(device):
    return tiny_vq().to(device)


def draw(family, device, decoder=None, rows=(0, 1, 2), do_sample=True):
    options = {"vq": tokenizer(device)} if family == "llamagen" else {}
    found = tiny_images.draw(
        family, decoder, rows, do_sample, model=model(family, device), **options
    )
    assert found.device.type == device
    return found.tolist()


@functools.cache
def undrafted(family, device, do_sample):
    return draw(family, device, do_sample=do_sample)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "coupled"])
@pytest.mark.parametrize("draft", DRAFTS)
@FAMILIES
@DEVICES
def test_a_draft_changes_no_token(device, family, draft, do_sample):
    decoder = Decoder(DRAFTS[draft](model(family, device)))
    found = draw(family, device, decoder, do_sample=do_sample)
    assert found == undrafted(family, device, do_sample)
    assert decoder.stats.accepted > 0 or draft != "itself", "guesses of a window may all be wrong"


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "coupled"])
@FAMILIES
@DEVICES
def test_a_row_alone_is_as_in_the_batch(device, family, do_sample):
    expected = undrafted(family, device, do_sample)
    for draft in (None, Jacobi(8)):
        for row in range(3):
            decoder = Decoder(draft)
            assert draw(family, device, decoder, (row,), do_sample) == expected[row : row + 1]


@pytest.mark.parametrize("rule", RULES)
@FAMILIES
@DEVICES
def test_rules_draw_whole_images(device, family, rule):
    decoder = Decoder(Jacobi(8), accept=RULES[rule])
    rows = draw(family, device, decoder)
    assert all(len(row) == 16 and set(row) <= set(range(tiny_images.CODES)) for row in rows)
    assert decoder.stats.accepted > 0


@pytest.mark.parametrize("rule", ["coupled", *RULES])
@FAMILIES
@DEVICES
def test_captured_rounds_draw_what_plain_ones_do(device, family, rule, request, monkeypatch):
    if device == "cpu":
        request.getfixturevalue("taped")
    captured = []
    seams.CAPTURE.plant(
        monkeypatch, lambda sound: lambda *given: captured.append(1) or sound(*given)
    )
    accept = RULES.get(rule, rule)
    expected = draw(family, device, Decoder(Jacobi(8), accept=accept))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what cannot be captured says so
        found = draw(family, device, Decoder(Jacobi(8), accept=accept, compile=True))
    assert captured
    assert found == expected


@pytest.mark.parametrize("family", tiny_images.MODELS)
@DEVICES
def test_tokens_and_codes_lie_where_the_model_is(device, family):
    options = {
        "llamagen": {"vq": tokenizer("cpu")},
        "emu3": {"grid": tiny_images.GRID},
        "imagegpt": {"clusters": torch.zeros(tiny_images.CODES, 3)},
    }.get(family, {})
    adapter = registry.image_adapter_for(model(family, device), **options)
    assert adapter.layout.ids.device.type == device
    book = adapter.codebook()
    assert book is None or book.device.type == device
    assert (book is None) == (family == "llamagen_captions")
