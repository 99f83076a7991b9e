"""Training of drafters that see images as a few rows: what each loss asks, on images too."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from mmdecode import registry
from mmdecode.errors import OptionError
from mmdecode.models.dream import early_layers
from mmdecode.models.eagle import EagleModel
from mmdecode.train.drafters.losses import ranking_loss
from mmdecode.train.drafters.recipes import RECIPES, Options, Sample, eagle_losses, targets_of
from mmdecode.train.drafters.targets import Texts
from mmdecode.train.drafters.trainer import collect
from tests.draft.test_seeing import random_model
from tests.support.tiny import text_model
from tests.support.tiny_vlm import vision_inputs, vision_model
from tests.train.test_drafter import build, having, requests, samples

QUIET = Options(noise=0.0, passes=1)


def batch_of(module, family="llava"):
    given = vision_inputs(family)
    answers = [Sample(r, [5, 6, 7, 8 + r.index, 3, 9]) for r in requests(3)]
    return collect(Texts(vision_model(family), lambda asked: dict(given)), module, answers)


@pytest.mark.parametrize("kind", ["vispec", "dream", "flash"])
def test_a_step_on_images_moves_all_it_has(kind):
    recipe, options = RECIPES[kind], Options(kind=kind, **having(kind, queries=2, tokens=3))
    adapter = registry.adapter_for(vision_model("llava"))
    torch.manual_seed(0)
    module = recipe.build(adapter, [], options)
    if kind == "dream":  # after closed gates nothing is learned yet
        for gate in (module.layers[1].cross_attn_attn_gate, module.layers[1].cross_attn_mlp_gate):
            torch.nn.init.constant_(gate, 0.1)
    batch = batch_of(module)
    assert (batch.rows.images > 0).any()
    optimiser = torch.optim.SGD(module.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        optimiser.zero_grad()
        loss = recipe.loss(module, batch, options, torch.Generator().manual_seed(0))
        loss.backward()
        losses.append(loss.item())
        still = [n for n, p in module.named_parameters() if p.grad is None or not p.grad.any()]
        assert still == []
        optimiser.step()
    assert losses[2] < losses[1] < losses[0]


def test_with_one_token_a_pass_flash_is_asked_what_eagle_is():
    module = random_model("flash", k=1)
    batch = batch_of(module)
    options = replace(QUIET, kind="flash", feature_weight=0.7)
    seen = {}

    class Replayed(EagleModel):
        """Makes what FLASH made."""

        def forward(self, rows, mask, past):
            return module(rows, mask, past)

    replayed = Replayed(module.config)
    replayed.prepare = module.prepare
    with torch.no_grad():
        for name, drafter in (("flash", module), ("eagle", replayed)):
            dice = torch.Generator().manual_seed(0)
            seen[name] = RECIPES[name].loss(drafter, batch, replace(options, kind=name), dice)
    torch.testing.assert_close(seen["flash"], seen["eagle"])


def test_state_i_of_flash_is_compared_with_the_token_i_plus_one_positions_ahead():
    """Planted states: each row makes exactly what the target has that many places on."""
    module = random_model("flash", k=3)
    batch = batch_of(module)
    length = batch.ids.shape[1] - 1
    ahead = [F.pad(batch.last, (0, 0, 0, 4))[:, 1 + i : 1 + i + length] for i in range(3)]

    def loss(made):
        module.forward = lambda rows, mask, past: torch.cat(made, -1)
        options = replace(QUIET, kind="flash", law_weight=0.0)
        with torch.no_grad():
            return float(RECIPES["flash"].loss(module, batch, options, torch.Generator()))

    assert loss(ahead) < 1e-6
    assert loss(ahead[::-1]) > 0.01


def test_of_several_passes_flash_says_that_it_has_one():
    adapter = registry.adapter_for(text_model("llama"))
    with pytest.raises(OptionError, match="passes=2"):
        RECIPES["flash"].build(adapter, [], Options(kind="flash", passes=2))
    with pytest.raises(OptionError, match="queries=0"):
        Options(kind="flash", queries=0)


def test_an_inner_block_learns_the_inputs_of_the_surest_early_layers():
    model = text_model("llama", layers=10)
    layers = early_layers(10)
    assert list(layers) == [1, 2]
    some = samples()
    batch = collect(Texts(model, build), random_model("dream"), some)
    chosen = set()
    for row, sample in enumerate(some):
        prompt = build([sample.request])["input_ids"][0]
        ids = torch.cat([prompt, torch.tensor(sample.answer)])[None]
        eager = model.config._attn_implementation
        model.set_attn_implementation("eager")
        with torch.no_grad():
            out = model(ids, output_hidden_states=True, output_attentions=True)
        model.set_attn_implementation(eager)
        certain = [torch.special.entr(out.attentions[layer]).sum(-1).mean(1)[0] for layer in layers]
        best = torch.stack(certain).argmin(0)
        chosen |= {*best.tolist()}
        states = torch.stack([out.hidden_states[layer][0] for layer in layers])
        expected = states[best, torch.arange(ids.shape[1])]
        found = batch.inner[row, -ids.shape[1] :]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert chosen == {0, 1}
    assert batch.size() > replace(batch, inner=None).size()


def test_what_dream_is_asked_of_a_row_is_the_state_of_its_own_token():
    module = random_model("dream")
    model = text_model("llama", layers=10)
    batch = collect(Texts(model, build), module, samples())
    module.layers[1].forward = lambda *args: batch.inner

    def forward(rows, mask, past):
        module.layers[1](rows)
        return batch.last

    module.forward = forward
    with torch.no_grad():
        args = (module, batch, replace(QUIET, kind="dream"), torch.Generator())
        assert float(RECIPES["dream"].loss(*args)) == pytest.approx(0, abs=1e-5)
        module.layers[1].forward = lambda *args: batch.inner.roll(1, 1)
        assert float(RECIPES["dream"].loss(*args)) > 0.01


def test_a_shallow_target_has_no_early_layers():
    batch = collect(Texts(text_model("llama", layers=3), build), random_model("dream"), samples())
    assert batch.inner is None


def test_the_order_of_the_most_likely_counts_and_not_their_distance_alone():
    wanted = torch.tensor([[3.0, 2.0, 1.0, -5.0]])
    right = ranking_loss(wanted, wanted, top=3)
    turned = ranking_loss(wanted[:, [2, 1, 0, 3]], wanted, top=3)
    assert turned > right
    # of three equally likely tokens each order has one chance in six
    assert ranking_loss(torch.zeros(1, 4), wanted, top=3).exp().item() == pytest.approx(6)


def test_targets_average_over_what_is_asked_alone():
    batch = batch_of(random_model("vispec"))
    targets = targets_of(batch, batch.logits(), 0)
    losses = torch.where(targets.asked, 2.0, 100.0)
    assert targets.mean(losses).item() == 2
    parts = eagle_losses(targets.features, targets.logits, targets)
    assert parts[0].item() == 0
