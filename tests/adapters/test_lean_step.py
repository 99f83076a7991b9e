"""The lean decoder step: used where it gives the states of the stock modules, and nowhere else."""

import copy
import warnings

import pytest
import torch
from transformers import MoonshineForConditionalGeneration
from transformers.models.moonshine import modeling_moonshine
from transformers.models.moonshine.modeling_moonshine import MoonshineDecoderLayer
from transformers.models.whisper.modeling_whisper import WhisperDecoderLayer

from mmdecode import registry
from mmdecode.adapters.audio import lean_step
from mmdecode.adapters.audio.lean_step import LeanAdapter
from mmdecode.adapters.audio.moonshine import MoonshineAdapter
from mmdecode.adapters.seq2seq.base import EncoderDecoderAdapter
from mmdecode.decoder import Decoder
from mmdecode.draft.lookup import PromptLookup
from tests.support.tiny import NEW, generated, inputs_of, model_of
from tests.support.traced import Traced

FAMILIES = ["whisper", "moonshine", "moonshine_padded"]
EACH = pytest.mark.parametrize("family", FAMILIES)
DIFFERS = "the lean decoder step differs from them by"
LAYERS = {"whisper": WhisperDecoderLayer, "moonshine": MoonshineDecoderLayer}


def fresh(family):
    """A model that nobody has checked yet."""
    return copy.deepcopy(model_of(family))


def adapter_of(model):
    """The model's adapter; warnings about the lean step are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return registry.adapter_for(model)


def assert_falls_back(model, family, match=DIFFERS):
    """Asserts that the lean step is refused, once, and that ids are those of `generate`."""
    with pytest.warns(UserWarning, match=match) as warned:
        assert not registry.adapter_for(model)._lean
    assert len(warned) == 1
    assert not adapter_of(model)._lean
    options = {**inputs_of(family, 3), "max_new_tokens": NEW, "do_sample": False}
    expected = model.generate(**options)
    decoder = Decoder(PromptLookup())
    assert model.generate(**options, custom_generate=decoder).tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@EACH
def test_the_lean_step_gives_the_states_of_the_modules(family, dtype):
    model = fresh(family).to(dtype)
    adapter = adapter_of(model)
    assert adapter._lean

    def stock(*inputs):
        return EncoderDecoderAdapter.forward(adapter, *inputs)

    expected, found = lean_step._states(adapter, stock), lean_step._states(adapter, adapter.step)
    rounding = 64 * torch.finfo(dtype).eps * float(expected.abs().amax())
    assert float((found - expected).abs().amax()) <= rounding


@EACH
def test_a_model_is_checked_once_and_uses_no_random_number(family, monkeypatch):
    model, state = fresh(family), torch.get_rng_state()
    assert adapter_of(model)._lean
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(lean_step, "_states", lambda *_: 1 / 0)
    assert adapter_of(model)._lean
    with pytest.raises(ZeroDivisionError):
        registry.adapter_for(model.to(torch.bfloat16))


@EACH
def test_a_layer_with_other_formulas_is_run_as_it_is(family, monkeypatch):
    layer = LAYERS[family.split("_")[0]]
    forward = layer.forward

    def scaled(self, hidden_states, *args, **kwargs):
        output = forward(self, hidden_states, *args, **kwargs)
        if isinstance(output, tuple):
            return (output[0] * 1.01, *output[1:])
        return output * 1.01 + 0.01

    monkeypatch.setattr(layer, "forward", scaled)
    assert_falls_back(fresh(family), family)


@pytest.mark.parametrize("module_name", ["self_attn", "encoder_attn"])
@EACH
def test_another_scale_of_scores_is_run_as_it_is(family, module_name):
    model = fresh(family)
    attention = getattr(model.get_decoder().layers[1], module_name)
    attention.scaling *= 1.5
    assert_falls_back(model, family)


def test_another_rotation_is_run_as_it_is(monkeypatch):
    apply = modeling_moonshine.apply_rotary_pos_emb

    def halves(q, k, cos, sin, unsqueeze_dim=1):
        return apply(q, k, cos, -sin, unsqueeze_dim)

    monkeypatch.setattr(modeling_moonshine, "apply_rotary_pos_emb", halves)
    assert_falls_back(fresh("moonshine"), "moonshine")


@EACH
def test_layers_without_an_expected_part_are_run_as_they_are(family, monkeypatch):
    adapter = registry.adapter_class(model_of(family).config.model_type)
    monkeypatch.setattr(adapter, "describe", staticmethod(lambda layer, *_: layer.no_such_part))
    assert_falls_back(fresh(family), family, match="fails .AttributeError")


MISTAKES = {
    "a norm left out": lambda layer: layer._replace(final_norm=layer.cross_norm),
    "another epsilon": lambda layer: layer._replace(self_norm=(*layer.self_norm[:3], 1e-2)),
    "keys for values": lambda layer: layer._replace(values=layer.keys),
    "padding of the audio": lambda layer: layer._replace(source_mask=None),
    "no activation": lambda layer: layer._replace(activation=lambda x: x[..., : x.shape[-1]]),
    "another scale": lambda layer: layer._replace(scale=0.3),
    "the first layer's cache": lambda layer: layer._replace(cache_index=0),
}


@pytest.mark.parametrize(
    ("family", "mistake"),
    [
        (family, mistake)
        for family in FAMILIES
        for mistake in MISTAKES
        if (family, mistake) != ("whisper", "padding of the audio")  # which it never has
    ],
)
def test_a_mistake_in_the_lean_step_is_found(family, mistake, monkeypatch):
    adapter = registry.adapter_class(model_of(family).config.model_type)
    model, describe = fresh(family), adapter.describe
    dice = torch.Generator().manual_seed(5)
    for parameter in model.get_decoder().parameters():  # norms of ones would be alike
        torch.nn.init.normal_(parameter, std=0.4, generator=dice)
    monkeypatch.setattr(
        adapter, "describe", staticmethod(lambda *args: MISTAKES[mistake](describe(*args)))
    )
    with pytest.warns(UserWarning, match="the lean decoder step (differs|fails)"):
        assert not registry.adapter_for(model)._lean


def test_heads_padded_with_zeros_as_on_a_gpu_give_the_same(monkeypatch):
    describe = MoonshineAdapter.describe
    monkeypatch.setattr(
        MoonshineAdapter,
        "describe",
        staticmethod(lambda layer, *args: describe(layer, *args)._replace(padding=6)),
    )
    assert adapter_of(fresh("moonshine_padded"))._lean


def test_rotations_that_change_with_the_length_are_left_to_the_modules():
    config = copy.deepcopy(model_of("moonshine").config)
    config.rope_parameters = {**config.rope_parameters, "rope_type": "dynamic", "factor": 2.0}
    model = MoonshineForConditionalGeneration(config).eval()
    assert not adapter_of(model)._lean
    options = {**inputs_of("moonshine", 2), "max_new_tokens": 8}
    expected = model.generate(**options)
    assert model.generate(**options, custom_generate=Decoder()).tolist() == expected.tolist()


def test_an_unrotated_lean_step_is_found(monkeypatch):
    embed = MoonshineAdapter.embed_at
    monkeypatch.setattr(MoonshineAdapter, "embed_at", lambda *args: (embed(*args)[0], None))
    assert_falls_back(fresh("moonshine"), "moonshine")


@EACH
def test_a_step_out_of_order_is_found_by_the_states_it_gives(family, monkeypatch):
    monkeypatch.setattr(lean_step, "run_layer", lambda layer, hidden, *_: hidden)
    assert_falls_back(fresh(family), family)


def counted(monkeypatch):
    """A list that grows with each lean step."""
    steps, step = [], LeanAdapter.step

    def noted(self, *inputs):
        steps.append(self)
        return step(self, *inputs)

    monkeypatch.setattr(LeanAdapter, "step", noted)
    return steps


@EACH
def test_a_plain_call_takes_lean_steps_alone(family, monkeypatch):
    model = fresh(family)
    adapter_of(model)
    steps = counted(monkeypatch)
    decoder = Traced()
    options = {**inputs_of(family, 2), "max_new_tokens": NEW, "do_sample": False}
    model.generate(**options, custom_generate=decoder)
    assert len(steps) >= len(generated(decoder.trace)[0])


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("module_path", ["layers.1", "layers.0.self_attn.q_proj", "embed_tokens"])
@EACH
def test_a_hook_is_heeded_also_where_it_comes_after_the_check(
    family, module_path, kind, monkeypatch
):
    model = fresh(family)
    adapter = adapter_of(model)
    assert adapter._lean
    steps, seen = counted(monkeypatch), []
    module = model.get_decoder().get_submodule(module_path)
    handle = getattr(module, kind)(lambda *args: seen.append(1))
    lean_step._states(adapter, adapter.forward)
    assert seen
    assert not adapter_of(model)._lean
    assert not steps
    handle.remove()
    lean_step._states(adapter, adapter.forward)
    assert len(steps) == 2
