"""FSPAD: embeddings gate features, and a row's logits and its feature come from separate states."""

from dataclasses import replace

import pytest
import torch

from mmdecode import registry
from mmdecode.draft.eagle import Eagle
from mmdecode.draft.vispec import ViSpec
from mmdecode.errors import OptionError
from mmdecode.models import eagle, vispec
from mmdecode.models.feature_drafter import Rows
from mmdecode.train.drafters.recipes import RECIPES, Batch, Options, Unrolled, targets_of
from tests.draft.test_eagle import SIZES, decode, model_of, random_drafter
from tests.support.commands import invoke
from tests.support.tiny import VOCAB, WIDTH

OWN = {"feature_sampling": True}


def rows_of(seed=0):
    generator = torch.Generator().manual_seed(seed)
    embeds, features = torch.randn(2, 2, 5, WIDTH, generator=generator)
    return Rows(embeds=embeds, features=features, positions=torch.arange(5).expand(2, -1))


def run(drafter, rows):
    length = rows.embeds.shape[1]
    hidden = ~torch.ones(length, length, dtype=torch.bool).tril()
    return drafter(rows, (hidden * torch.finfo(torch.float32).min)[None, None], Unrolled())


@torch.no_grad()
def test_without_a_gate_and_with_two_like_halves_it_is_eagle():
    plain, sampled = random_drafter(), random_drafter(**OWN)
    sampled.fc.fc.load_state_dict(plain.fc.state_dict())
    sampled.fc.mlp.down_proj.weight.zero_()
    weights = plain.layers[0].state_dict()
    weights["mlp.down_proj.weight"] = weights["mlp.down_proj.weight"].repeat(2, 1)
    sampled.layers[0].load_state_dict(weights)
    rows = rows_of()
    expected, found = run(plain, rows), run(sampled, rows)
    torch.testing.assert_close(found, expected.repeat(1, 1, 2))


@torch.no_grad()
def test_the_embedding_alone_opens_the_gate():
    drafter = random_drafter(**OWN).fc
    both = torch.randn(1, 1, 2 * WIDTH)
    low = replace_half(both, torch.zeros(WIDTH))
    assert torch.equal(drafter(low), drafter.fc(low))  # silu(0) = 0
    assert not torch.allclose(drafter(both), drafter.fc(both))


def replace_half(both, embeds):
    return torch.cat([embeds.expand_as(both[..., :WIDTH]), both[..., WIDTH:]], -1)


@torch.no_grad()
def test_a_row_hands_on_its_second_half_and_says_its_first():
    drafter, rows = random_drafter(**OWN), rows_of()
    states = run(drafter, rows)
    assert states.shape[-1] == 2 * WIDTH
    again = run(drafter, replace(rows, features=states))
    assert torch.equal(again, run(drafter, replace(rows, features=states[..., WIDTH:])))
    adapter = registry.adapter_for(model_of("llama"))
    assert torch.equal(drafter.logits(states, adapter), adapter.head(states[..., :WIDTH]))


def batch_of():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (2, 6), generator=generator)
    rows = rows_of()
    return Batch(
        rows=replace(rows, kept=torch.ones(2, 5).bool(), images=torch.zeros(2, 5).long()),
        ids=ids,
        last=torch.randn(2, 6, WIDTH, generator=generator),
        words=torch.ones_like(ids).bool(),
        asked=torch.arange(6).expand(2, -1) > 1,
        adapter=registry.adapter_for(model_of("llama")),
    )


def test_each_half_has_the_loss_that_is_its_own():
    drafter, batch = random_drafter(**OWN), batch_of()
    weight = drafter.layers[0].mlp.down_proj.weight
    moved = {}
    for name, weights in (("features", (1.0, 0.0)), ("laws", (0.0, 1.0))):
        drafter.zero_grad()
        options = Options(
            feature_sampling=True, feature_weight=weights[0], law_weight=weights[1], noise=0.0
        )
        RECIPES["eagle"].loss(drafter, batch, options, torch.Generator()).backward()
        moved[name] = [bool(half.any()) for half in weight.grad.split(WIDTH)]
    assert moved == {"features": [False, True], "laws": [True, False]}


def test_the_feature_is_compared_with_the_targets():
    drafter, batch = random_drafter(**OWN), batch_of()
    logits = batch.logits()
    targets = targets_of(batch, logits, 0)
    wrong = torch.randn(2, 5, WIDTH)
    options = Options(feature_sampling=True, feature_weight=1.0, law_weight=0.0)

    def loss(predicted, made):
        states = torch.cat([predicted, made], -1)
        return RECIPES["eagle"].pass_loss(drafter, states, logits[:, :5], targets, options)

    assert loss(wrong, targets.features) == 0
    assert loss(targets.features, wrong) > 0


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "coupled"])
@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
def test_a_random_drafter_changes_no_token(family, do_sample):
    expected, _ = decode(family, do_sample=do_sample)
    torch.manual_seed(0)
    for draft in (
        Eagle(random_drafter(**OWN), depth=3, top_k=2, nodes=6),
        ViSpec(vispec.ViSpecModel({**SIZES, **OWN, "num_queries": 3}), depth=3, top_k=1),
    ):
        found, decoder = decode(family, draft, do_sample=do_sample)
        assert found == expected
        assert decoder.stats.drafted > 0


@pytest.mark.parametrize("recorded", [True, False], ids=["ours", "published"])
def test_a_checkpoint_is_read_back(recorded, tmp_path):
    drafter = random_drafter(**OWN)
    for parameter in drafter.parameters():
        parameter.data = parameter.data.half().float()
    drafter.save_pretrained(tmp_path)
    if not recorded:  # the authors' configuration does not say
        eagle.EagleModel(SIZES).save_pretrained(tmp_path / "plain")
        config = (tmp_path / "plain" / "config.json").read_text()
        assert "feature_sampling" not in config
        (tmp_path / "config.json").write_text(config)
    found = Eagle.from_pretrained(tmp_path).drafter
    assert found.config["feature_sampling"] is True
    with torch.no_grad():
        assert torch.equal(run(found, rows_of()), run(drafter, rows_of()))


def test_other_kinds_have_no_such_form():
    with pytest.raises(OptionError, match="eagle3"):
        Options(kind="eagle3", feature_sampling=True)


def test_the_command_names_every_kind():
    shown = invoke("train", "drafter", "--help", env={"COLUMNS": "400"}).output
    assert all(f"'{kind}'" in shown for kind in RECIPES)
