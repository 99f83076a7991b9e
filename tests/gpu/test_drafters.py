"""Drafters on CUDA: they change no token, their rounds are captured, and they are trained there.

The same tests run on the CPU among the slow ones, captured rounds on a tape.
"""

import copy
import functools
import warnings
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import mmdecode
from mmdecode.decoder import Decoder
from mmdecode.draft.eagle import Eagle
from mmdecode.draft.hydra import Hydra
from mmdecode.draft.kangaroo import Kangaroo
from mmdecode.draft.layer_search import Clasp, Swift
from mmdecode.draft.lookahead import Lookahead
from mmdecode.draft.lookup import PromptLookup
from mmdecode.draft.medusa import Medusa
from mmdecode.draft.sparse import Sparse
from mmdecode.guide.vcd import VCD
from mmdecode.train.distributed import PRECISIONS, Worker
from mmdecode.train.drafters.recipes import RECIPES, Options
from mmdecode.train.drafters.targets import Texts
from mmdecode.train.drafters.trainer import train
from mmdecode.vlm.requests import AnswerRequest
from tests.draft.test_eagle import random_drafter, reduced
from tests.draft.test_hydra import random_heads as hydra_heads
from tests.draft.test_kangaroo import random_adapter
from tests.draft.test_seeing import random_draft
from tests.gpu.devices import DEVICES
from tests.support import seams
from tests.support.kinds import having
from tests.support.tiny import TREE, prompts, random_heads, text_model
from tests.support.tiny_vlm import IMAGE, SQUARE, pixels, vision_inputs, vision_model

FAMILIES = pytest.mark.parametrize("family", ["llama", "llava"])
LAWS = pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "coupled"])
NEW = 40
ALIKE = {
    "eagle_chain": lambda: Eagle(random_drafter(), depth=3, top_k=1),
    "eagle_tree": lambda: Eagle(random_drafter(seed=1), depth=3, top_k=3, nodes=9),
    "eagle3": lambda: Eagle(random_drafter("eagle3"), depth=2, top_k=2, nodes=5),
    "reduced": lambda: Eagle(reduced(), depth=3, top_k=2, nodes=6),
    "vispec": lambda: random_draft("vispec"),
    "dream": lambda: random_draft("dream"),
    "flash": lambda: random_draft("flash"),
    "medusa": lambda: Medusa(random_heads(layers=2), paths=TREE),
    "hydra": lambda: Hydra(hydra_heads(), top_k=2, nodes=5),
    "kangaroo": lambda: Kangaroo(random_adapter("llama"), length=3, confidence_threshold=0.05),
    "lookup": PromptLookup,
    "sparse": lambda: Sparse(2, length=3),
}
"""Drafts whose rounds can be captured."""
UNLIKE = {
    "swift": lambda: Swift(length=3, every=1),
    "clasp": lambda: Clasp(length=3),
    "lookahead": Lookahead,
}
BLIND = ("sparse",)
"""What has nothing to draft from where there is no image."""
CASES = pytest.mark.parametrize(
    ("family", "name"),
    [(f, d) for f in ("llama", "llava") for d in ALIKE | UNLIKE if f == "llava" or d not in BLIND],
)


@pytest.fixture(autouse=True)
def full_precision(monkeypatch):
    """Convolutions too, which round more by default."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@functools.cache
def model(family, device):
    found = text_model("llama") if family == "llama" else vision_model(family)
    return copy.deepcopy(found).to(device)


def decode(family, device, decoder=None, do_sample=False):
    inputs = prompts(3) if family == "llama" else vision_inputs(family, 3)
    found = mmdecode.generate(
        model(family, device),
        decoder=decoder or Decoder(seed=7),
        **{name: value.to(device) for name, value in inputs.items()},
        max_new_tokens=NEW,
        do_sample=do_sample,
        **({"top_k": 0} if do_sample else {}),
    )
    assert found.device.type == device
    return found[:, inputs["input_ids"].shape[1] :].tolist()


@functools.cache
def undrafted(family, device, do_sample, guided=False):
    return decode(family, device, Decoder(guide=VCD() if guided else None, seed=7), do_sample)


@LAWS
@CASES
@DEVICES
def test_a_drafter_changes_no_token(device, family, name, do_sample):
    decoder = Decoder((ALIKE | UNLIKE)[name](), seed=7)
    assert decode(family, device, decoder, do_sample) == undrafted(family, device, do_sample)
    assert decoder.stats.drafted > 0


@LAWS
@pytest.mark.parametrize("name", ["eagle_tree", "vispec", "dream", "flash"])
@DEVICES
def test_a_drafter_changes_no_token_of_a_guided_distribution(device, name, do_sample):
    expected = undrafted("llava", device, do_sample, guided=True)
    assert expected != undrafted("llava", device, do_sample)
    assert decode("llava", device, Decoder(ALIKE[name](), VCD(), seed=7), do_sample) == expected


@pytest.fixture
def captures(device, request, monkeypatch):
    """Notes each capture; those on a CPU are of a tape."""
    if device == "cpu":
        request.getfixturevalue("taped")
    noted = []
    seams.CAPTURE.plant(monkeypatch, lambda sound: lambda *given: noted.append(1) or sound(*given))
    return noted


@LAWS
@pytest.mark.parametrize("name", ALIKE)
@FAMILIES
@DEVICES
def test_captured_rounds_decode_as_the_loop_does(device, family, name, do_sample, captures):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what cannot be captured says so
        decoder = Decoder(ALIKE[name](), seed=7, compile=True)
        found = decode(family, device, decoder, do_sample)
    assert captures
    assert found == undrafted(family, device, do_sample)


@pytest.mark.parametrize("name", UNLIKE)
@DEVICES
def test_a_draft_whose_rounds_are_unlike_says_so(device, name, captures):
    with pytest.warns(UserWarning, match="not declared as graph_safe"):
        found = decode("llava", device, Decoder(UNLIKE[name](), seed=7, compile=True))
    assert captures, "the scoring alone"
    assert found == undrafted("llava", device, False)


def build(asked, seen, device):
    """Ragged prompts, with an image in front or without."""
    rows = []
    for request in asked:
        dice = torch.Generator().manual_seed(request.index)
        words = torch.randint(1, 60, (3 + request.index % 4,), generator=dice)
        rows.append(torch.cat([torch.full((4,), IMAGE), words]) if seen else words)
    width = max(map(len, rows))
    parts = [[F.pad(r, (width - len(r), 0)) for r in kind] for kind in (rows, ones(rows))]
    inputs = dict(zip(("input_ids", "attention_mask"), map(torch.stack, parts), strict=True))
    if seen:
        inputs |= pixels("llava", [SQUARE] * len(rows), len(rows), [*range(len(rows))])
    return {name: value.to(device) for name, value in inputs.items()}


def ones(rows):
    return [torch.ones_like(row) for row in rows]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@FAMILIES
@pytest.mark.parametrize("kind", RECIPES)
@DEVICES
def test_each_kind_is_trained(device, kind, family, precision, tmp_path):
    if precision == "fp16" and device == "cpu":
        pytest.skip("a CPU cannot scale gradients")
    if precision != "fp32":
        pytest.importorskip("accelerate")
    seen = family == "llava"
    # so deep that dream reads early layers
    target = model(family, device) if seen else text_model("llama", layers=8)
    requests = [AnswerRequest(str(i), i, str(i), (), named=True) for i in range(10)]
    pace = replace(Options().fit, steps=3, batch=3, every=3, peak_rate=5e-3)
    few = {"held_out": 2, "tested": 2, "max_new_tokens": 8, "length": 2}
    options = Options(kind=kind, fit=pace, **few, **having(kind, queries=2, exit_layer=1))
    target = copy.deepcopy(target).to(device)
    target.generation_config.suppress_tokens = [IMAGE]  # none in an answer
    given = Texts(
        target.to(PRECISIONS[precision]), functools.partial(build, seen=seen, device=device)
    )
    worker = Worker(device, precision)
    card = train(given, requests, options, tmp_path / "state", tmp_path, worker=worker)
    assert card["steps"] == 3
    assert 1 <= card["tokens_per_pass"] <= 3
    assert (tmp_path / "config.json").exists()
