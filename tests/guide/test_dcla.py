"""DCLA on synthetic layers: which states are corrected, and how."""

import gc

import pytest
import torch

from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.errors import OptionError
from mmdecode.guide.dcla import DCLA
from tests.support import tiny


def layers(count, batch=2, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return list(torch.randn(count, batch, 3, 8, generator=draw))


def corrected(guide, layer, states):
    return guide.edits[0].change(layer, states[layer], states[:layer])


def test_a_drifted_state_is_mixed_with_a_mean_that_fades():
    states = layers(4)
    guide = DCLA(tau=0.0, alpha=0.7, decay=0.5)
    weights = torch.tensor([0.25, 0.5, 1.0])
    reference = sum(w * s for w, s in zip(weights / weights.sum(), states, strict=False))
    own, found = states[3], corrected(guide, 3, states)
    cosine = (own * reference).sum(-1) / own.norm(dim=-1) / reference.norm(dim=-1)
    drifted = cosine < 0
    assert 0 < drifted.sum() < drifted.numel()
    torch.testing.assert_close(found[drifted], (0.7 * own + 0.3 * reference)[drifted])
    assert torch.equal(found[~drifted], own[~drifted])


class Counted(list):
    """Outputs of layers, and how many of them were looked at."""

    looked = 0

    def __getitem__(self, index):
        found = super().__getitem__(index)
        self.looked += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self):
        return iter(self[:])


def test_what_was_summed_for_one_layer_is_not_summed_for_the_next():
    def work(depth):
        guide, before, plain = DCLA(tau=2.0), Counted(), []
        for layer, states in enumerate(layers(depth)):
            own = guide.edits[0].change(layer, states, before)
            assert torch.equal(own, DCLA(tau=2.0).edits[0].change(layer, states, plain))
            before.append(own)
            plain.append(own)
        return before.looked

    assert work(40) - work(30) == work(30) - work(20)


def test_a_sum_is_of_the_pass_at_hand():
    guide = DCLA(tau=2.0)
    for seed in (0, 1, 0):
        states = layers(4, seed=seed)
        for layer in (3, 2, 3):  # any order
            expected = corrected(DCLA(tau=2.0), layer, states)
            assert torch.equal(corrected(guide, layer, states), expected)


def test_nothing_is_left_after_a_call():
    guide = DCLA(tau=2.0)
    model, ids = tiny.text_model("llama", layers=6), torch.tensor([[5, 3, 8, 13, 21]])
    model.generate(ids, custom_generate=Decoder(guide=guide), max_new_tokens=3, do_sample=False)
    gc.collect()
    assert not list(guide._sums)


def test_states_are_corrected_by_row_and_position_alone():
    states = layers(3)
    guide = DCLA(tau=2.0)
    together = corrected(guide, 2, states)
    alone = corrected(guide, 2, [s[1:, 2:] for s in states])
    assert torch.equal(together[1:, 2:], alone)
    assert not torch.isclose(together, states[2]).any()  # above 1 every state is


def test_layers_that_agree_are_left_as_they_are():
    states = layers(1) * 4
    assert torch.equal(corrected(DCLA(), 3, states), states[3])
    torch.testing.assert_close(corrected(DCLA(tau=2.0), 3, states), states[3])
    assert torch.equal(corrected(DCLA(tau=2.0), 0, states), states[0])


def test_late_layers_alone_are_corrected_in_the_prompt_and_after_it():
    guide, calls = DCLA(layers=(0.5, 0.8)), []
    change = guide.edits[0].change

    def noted(layer, states, earlier):
        calls.append((layer, states.shape[1], len(earlier)))
        return change(layer, states, earlier)

    object.__setattr__(guide.edits[0], "change", noted)
    model = tiny.text_model("llama", layers=6)
    ids = tiny.prompts(1)["input_ids"]
    ids = ids[ids > 0][None]
    model.generate(ids, custom_generate=Decoder(guide=guide), max_new_tokens=3, do_sample=False)
    assert {layer for layer, _, _ in calls} == {2, 3, 4}
    assert all(layer == before for layer, _, before in calls)
    assert [width for layer, width, _ in calls if layer == 2] == [ids.shape[1], 1, 1]


def test_later_layers_cache_the_corrected_state_as_a_full_pass_does():
    guide, model = DCLA(tau=0.9, layers=(0.2, 1.0)), tiny.text_model("llama", layers=6)
    ids = torch.tensor([[5, 3, 8, 13, 21]])
    found = model.generate(
        ids,
        custom_generate=Decoder(guide=guide),
        max_new_tokens=5,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    before = []

    def hook(layer):
        def change(_, args, states):
            own = guide.edits[0].change(layer, states, before) if layer else states
            before.append(own)
            return own

        return change

    handles = [m.register_forward_hook(hook(i)) for i, m in enumerate(model.model.layers)]
    with torch.no_grad():
        expected = model(found.sequences[:, :-1], use_cache=False).logits[0, 4:]
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(torch.cat(found.scores), expected, atol=1e-3, rtol=1e-4)
    with torch.no_grad():
        plain = model(found.sequences[:, :-1], use_cache=False).logits[0, 4:]
    assert not torch.isclose(plain, expected, atol=1e-2).all(-1).any()


def test_options():
    assert DCLA(tau=-1).neutral and DCLA(alpha=1).neutral and not DCLA().neutral
    assert registry.create("guide", "dcla:tau=0.5,first=0.2,last=0.6").edits[0].layers == (0.2, 0.6)
    for options in ({"alpha": 1.5}, {"decay": 0}, {"layers": (0.9, 0.1)}, {"layers": (0, 2)}):
        with pytest.raises(OptionError):
            DCLA(**options)
