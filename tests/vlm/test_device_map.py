"""A model that is split over CPU and disk decodes as one that is not."""

import json

import pytest
import torch

from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.errors import OptionError
from mmdecode.train.drafters.recipes import RECIPES, Options
from mmdecode.vlm import Answerer
from mmdecode.vlm.loading import load

pytest.importorskip("accelerate")
TEXTS = ["Is there a red circle in the image?", "What?", "How many rings?"]
MAP = {
    "model.vision_tower": "cpu",
    "model.multi_modal_projector": "cpu",
    "model.language_model.embed_tokens": "cpu",
    "model.language_model.layers.0": "cpu",
    "model.language_model.layers.1": "disk",
    "model.language_model.norm": "disk",
    "model.language_model.rotary_emb": "cpu",
    "lm_head": "cpu",
}
DRAFTS = [
    *("lookup", "recycling", "lookahead", "amateur", "sparse", "jacobi"),
    *("layer_skip:exit_layer=1", "swift", "clasp"),
]
"""Drafters that need no training."""


DISK = [
    {"": "disk"},
    {
        "model.vision_tower": "disk",
        "model.multi_modal_projector": "cpu",
        "model.language_model": "cpu",
        "lm_head": "cpu",
    },
]
"""Maps whose first weight is on disk."""


@pytest.fixture(scope="module")
def split(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("map") / "map.json"
    path.write_text(json.dumps(MAP))
    model, processor = load(str(folder), None, None, str(path))
    assert {str(p.device) for p in model.parameters()} == {"cpu", "meta"}
    return model, processor


def answers(model, processor, kit, decoder=None, **options):
    images = [kit.image(seed) for seed in range(3)]
    found = Answerer(model, processor, decoder)(images, TEXTS, max_new_tokens=8, **options)
    assert [answer.error for answer in found] == [None] * 3
    return [answer.token_ids for answer in found]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("draft", [None, *DRAFTS])
def test_every_draft_decodes_what_the_whole_model_does(split, model, processor, kit, draft):
    expected = answers(model, processor, kit)
    found = answers(*split, kit, Decoder(draft))
    assert found == expected


@pytest.fixture(
    scope="module",
    params=[DISK[0], pytest.param(DISK[1], marks=pytest.mark.slow)],
    ids=["all", "images"],
)
def on_disk(request, folder):
    model, processor = load(str(folder), None, None, request.param)
    assert model.device.type == "meta"
    return model, processor


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")  # by 5.17
@pytest.mark.parametrize("draft", [None, *DRAFTS])
def test_the_first_weight_may_be_on_disk(on_disk, model, processor, kit, draft):
    expected = answers(model, processor, kit)
    assert answers(*on_disk, kit, Decoder(draft)) == expected


def test_tied_weights_are_on_one_device():
    split = {"model": "cpu", "model.language_model.embed_tokens": "disk", "lm_head": "cpu"}
    for given in (split, {"model": "disk", "lm_head": "cpu"}, {"model": "cpu", "lm_head": "disk"}):
        with pytest.raises(OptionError, match=r"lm_head.weight on .* one weight .*; give both"):
            load("zoo:llava-scenes", None, None, given)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", sorted(RECIPES))
def test_trained_drafters_do_too(split, model, processor, kit, kind):
    options = Options(kind=kind, exit_layer=1) if kind == "kangaroo" else Options(kind=kind)
    torch.manual_seed(0)
    untrained = RECIPES[kind].build(registry.adapter_for(model), [], options)
    for weight in untrained.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.1)
    drafter = RECIPES[kind].draft(untrained.eval(), 3)
    assert answers(*split, kit, Decoder(drafter)) == answers(model, processor, kit)


@pytest.mark.parametrize("guide", ["vcd", "m3id", "pai", "dola"])
def test_guides_do_too(split, model, processor, kit, guide):
    expected = answers(model, processor, kit, Decoder(guide=guide, seed=0))
    assert answers(*split, kit, Decoder("lookup", guide, seed=0)) == expected


def test_compiling_steps_aside_and_says_so(split, model, processor, kit):
    with pytest.warns(UserWarning, match="nothing is compiled.*split over cpu, disk"):
        found = answers(*split, kit, Decoder(compile=True))
    assert found == answers(model, processor, kit)


def test_the_command_line_takes_a_map(folder, kit, tmp_path):
    from typer.testing import CliRunner

    from mmdecode.cli.app import app

    kit.image(1).save(tmp_path / "a.png")
    (tmp_path / "map.json").write_text(json.dumps(MAP))
    words = ["ask", str(tmp_path / "a.png"), "-q", "What?", "--model", str(folder), "--json"]
    made = [
        CliRunner().invoke(app, [*words, "--max-new-tokens", "6", *more])
        for more in ([], ["--device-map", str(tmp_path / "map.json")], ["--device-map", "auto"])
    ]
    texts = [json.loads(one.stdout)["answers"][0]["token_ids"] for one in made]
    assert texts[0] == texts[1] == texts[2]
    refused = CliRunner().invoke(app, [*words, "--device-map", "auto", "--device", "cpu"])
    assert "leave out either" in str(refused.exception)


def test_maps_that_are_none(folder, tmp_path):
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "empty.json").write_text("{}")
    for given, why in (
        ("nowhere", "cannot be read: No such file"),
        (tmp_path / "list.json", "holds list"),
        (str(tmp_path / "broken.json"), "is not JSON: Expecting"),
        (tmp_path / "empty.json", "holds no module"),
        (3, "device_map=3 holds int"),
    ):
        with pytest.raises(OptionError, match=f"{why}.*; expected auto, balanced"):
            load(str(folder), None, None, given)
    missing = torch.cuda.device_count()
    for device, why in (
        ("tpu", "device_map for 'lm_head': device 'tpu' is not known"),
        (f"cuda:{missing}", f"'cuda:{missing}' cannot be used"),
        (missing, f"'cuda:{missing}' cannot be used"),
        (None, "has None for 'lm_head'; expected a device"),
    ):
        with pytest.raises(OptionError, match=why):
            load(str(folder), None, None, {"": "cpu", "lm_head": device})
    with pytest.raises(OptionError, match="leave out either"):
        load(str(folder), "cpu", None, "auto")


def test_the_offloaded_weights_are_removed_with_the_model(folder, tmp_path, monkeypatch):
    import gc
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model, _ = load(str(folder), None, None, MAP)
    assert list(tmp_path.iterdir())
    del model
    gc.collect()
    assert not list(tmp_path.iterdir())
