"""Models with LoRA weights, layers on disk or int8 weights: what plain greedy `generate` gives."""

import copy

import pytest
import torch

from mmdecode.decoder import Decoder
from tests.support.tiny import (
    DifferentError,
    HiddenPath,
    generated,
    inputs_of,
    model_of,
    plain,
)
from tests.support.traced import Traced

# peft asks a model of transformers by a name that is on its way out
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

FAMILIES = pytest.mark.parametrize("family", ["llama", "gemma3", "whisper", "moonshine"])
OPTIONS = {"do_sample": False, "max_new_tokens": 14}
ON_DISK = {
    "llama": {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "disk",
    },
    "whisper": {
        "model.encoder": "cpu",
        "model.decoder.embed_tokens": "cpu",
        "model.decoder.embed_positions": "cpu",
        "model.decoder.layers.0": "disk",
        "model.decoder.layers.1": "disk",
        "model.decoder.layer_norm": "cpu",
        "proj_out": "cpu",
    },
}
ON_DISK["gemma3"] = ON_DISK["llama"]
ON_DISK["moonshine"] = {
    "model.encoder": "cpu",
    "model.decoder.embed_tokens": "cpu",
    "model.decoder.rotary_emb": "cpu",
    "model.decoder.layers.0": "disk",
    "model.decoder.layers.1": "disk",
    "model.decoder.norm": "cpu",
    "proj_out": "cpu",
}


def assert_same(model, family):
    """Asserts that drafted and undrafted output are the model's own, and returns it."""
    options = {**inputs_of(family, 3), **OPTIONS}
    expected = model.generate(**options)
    decoder = Traced()
    undrafted = model.generate(**options, custom_generate=decoder)
    drafted = Decoder(HiddenPath(generated(decoder.trace)))
    found = model.generate(**options, custom_generate=drafted)
    if not expected.tolist() == undrafted.tolist() == found.tolist():
        raise DifferentError(f"{undrafted.tolist()}, {found.tolist()}, not {expected.tolist()}")
    assert drafted.stats.accepted > 0
    return expected


def with_lora(family):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(copy.deepcopy(model_of(family)), config).eval()


@FAMILIES
def test_a_lora_model_decodes_with_its_adapter(family):
    expected = assert_same(with_lora(family), family)
    assert expected.tolist() != plain(family).tolist(), "the adapter changes nothing"


def test_a_lora_adapter_that_is_passed_by_is_noticed():
    model = with_lora("llama")
    call = Decoder.__call__

    def without(self, inner, *args, **options):
        with model.disable_adapter():
            return call(self, inner, *args, **options)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(DifferentError):
        patch.setattr(Decoder, "__call__", without)
        assert_same(model, "llama")


@FAMILIES
def test_a_model_with_layers_on_disk_decodes_like_one_in_memory(family, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.dispatch_model(
        copy.deepcopy(model_of(family)),
        ON_DISK[family],
        main_device="cpu",
        offload_dir=str(tmp_path),
        force_hooks=True,
    )
    assert any(parameter.is_meta for parameter in model.parameters())
    assert assert_same(model, family).tolist() == plain(family).tolist()


class Int8Linear(torch.nn.Module):
    """A layer as quantisers leave it: no float weight to get hold of, only a forward pass.

    Coarser than need be, so that the tokens are not those of the float model.
    """

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach()
        self.scale = torch.nn.Buffer(weight.abs().amax(1, keepdim=True) / 15)
        self.weight = torch.nn.Buffer((weight / self.scale).round().to(torch.int8))
        self.bias = linear.bias

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight * self.scale, self.bias)


@FAMILIES
def test_int8_weights_decode_like_generate(family):
    model = copy.deepcopy(model_of(family))
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, Int8Linear(module))
    expected = assert_same(model, family)
    assert expected.tolist() != plain(family).tolist(), "the weights are what they were"


def test_int8_weights_of_torchao_decode_like_generate():
    from torchao import quantization

    model = copy.deepcopy(model_of("llama"))
    quantization.quantize_(model.model, quantization.Int8WeightOnlyConfig())
    assert_same(model, "llama")
