"""Kinds of layers and models: which are rounded, which stay in float, and what is refused."""

import copy
import warnings

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.pytorch_utils import Conv1D

import mmdecode as mm
from mmdecode.errors import OptionError, UnsupportedModelError
from mmdecode.quantization.models import quantize, refuse_learning
from mmdecode.quantization.modules import Int8Linear
from tests.support import tiny


def gpt2():
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 50}
    return GPT2LMHeadModel(GPT2Config(**sizes, eos_token_id=None)).eval()


def test_transposed_linear_layers_are_rounded_output_by_output():
    torch.manual_seed(0)
    layer = Conv1D(24, 16)  # 16 inputs
    torch.nn.init.normal_(layer.bias)
    linear = torch.nn.Linear(16, 24)
    linear.weight.data, linear.bias.data = layer.weight.data.t().contiguous(), layer.bias.data
    x = torch.randn(5, 16)
    assert torch.equal(Int8Linear.of(layer)(x), Int8Linear.of(linear)(x))
    assert torch.allclose(Int8Linear.of(layer)(x), layer(x), atol=0.02)


def test_gpt2_says_the_same_with_a_draft_and_is_saved(tmp_path):
    model = quantize(gpt2())
    assert not [m for m in model.modules() if isinstance(m, Conv1D)]
    ids = torch.tensor([[1, 2, 3, 1, 2]])
    plain = mm.generate(model, ids, max_new_tokens=16)
    drafted = mm.generate(model, ids, decoder=mm.Decoder("lookup"), max_new_tokens=16)
    assert torch.equal(drafted, plain)
    model.save_pretrained(tmp_path)
    again = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert torch.equal(mm.generate(again, ids, max_new_tokens=16), plain)


def test_a_warning_names_what_stays_in_float():
    sizes = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 40}
    model = MixtralForCausalLM(MixtralConfig(**sizes)).eval()
    with pytest.warns(UserWarning, match=r"\d\d% of the weights of MixtralForCausalLM stay in fl"):
        quantize(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize(copy.deepcopy(tiny.model_of("llama")))


def test_an_embedding_in_float_stays_so_in_a_checkpoint(tmp_path):
    model = quantize(copy.deepcopy(tiny.model_of("llama")), embeddings=False)
    ids = tiny.inputs_of("llama", 2)["input_ids"]
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert type(again.get_input_embeddings()) is torch.nn.Embedding
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_t5_is_refused_and_its_copy_drafts():
    torch.manual_seed(1)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = T5Config(**sizes, vocab_size=50, decoder_start_token_id=0, eos_token_id=None)
    model = T5ForConditionalGeneration(config).eval()
    with pytest.raises(UnsupportedModelError, match=r"bias of distances.*its int8 copy draft"):
        quantize(model)
    assert not [m for m in model.modules() if isinstance(m, Int8Linear)]
    inputs = {"input_ids": torch.randint(1, 50, (2, 7))}
    plain = mm.generate(model, decoder=mm.Decoder(), max_new_tokens=12, **inputs)
    decoder = mm.Decoder("quantized:length=4")
    assert torch.equal(mm.generate(model, decoder=decoder, max_new_tokens=12, **inputs), plain)
    assert decoder.stats.accepted > 0


def test_another_format_than_the_models_is_refused():
    model = quantize(copy.deepcopy(tiny.model_of("llama")))
    with pytest.raises(OptionError, match="has int8 weights, and quantize='fp8' asks for others"):
        quantize(model, "fp8")
    with pytest.raises(OptionError, match="quantize=8; expected one of int8, fp8"):
        quantize(model, 8)
    assert quantize(model, "int8") is model


def test_a_state_is_loaded_into_a_rounded_model():
    first, second = (quantize(copy.deepcopy(tiny.model_of("llama"))) for _ in range(2))
    ids = tiny.inputs_of("llama", 2)["input_ids"]
    for layer in second.modules():
        if isinstance(layer, Int8Linear):
            layer.matrix = Int8Linear.of(
                torch.nn.Linear(layer.in_features, layer.out_features)
            ).matrix
    assert not torch.equal(first(ids).logits, second(ids).logits)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(ids).logits, second(ids).logits)


def test_attention_that_was_changed_afterwards_is_refused():
    model = quantize(copy.deepcopy(tiny.model_of("llama")))
    model.set_attn_implementation("eager")
    inputs = tiny.inputs_of("llama", 2)
    with pytest.raises(UnsupportedModelError, match=r"int8 weights and attention 'eager'.*call"):
        mm.generate(model, decoder=mm.Decoder(), max_new_tokens=4, **inputs)


def test_rounded_models_do_not_learn():
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has int8 weights, which can"):
        refuse_learning(quantize(copy.deepcopy(tiny.model_of("llama"))))
    refuse_learning(tiny.model_of("llama"))
