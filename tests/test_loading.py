"""`mmdecode.load`: any checkpoint by name, with its processor."""

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration, Wav2Vec2Config, Wav2Vec2ForCTC

import mmdecode as mm
from mmdecode.asr import Transcriber
from mmdecode.errors import InputError, MMDecodeError, UnsupportedModelError
from tests.support.hub import publish


@pytest.mark.parametrize(
    ("name", "model", "processor"),
    [
        ("whisper-synth", "WhisperForConditionalGeneration", "WhisperProcessor"),
        ("llava-scenes", "LlavaForConditionalGeneration", "LlavaProcessor"),
        ("lm-synth", "LlamaForCausalLM", "TokenizersBackend"),
        ("llava-scenes-text", "LlamaForCausalLM", "NoneType"),
        ("llamagen-digits", "LlamaGenForImageGeneration", "NoneType"),
        ("var-scenes-small", "VarForImageGeneration", "NoneType"),
    ],
)
def test_a_shipped_model_is_of_the_class_that_its_configuration_names(name, model, processor):
    found = mm.load(f"zoo:{name}", "cpu")
    assert [type(part).__name__ for part in found] == [model, processor]
    assert not found[0].training
    assert found[0].dtype == torch.float32


def test_a_model_is_loaded_by_a_short_name_in_another_dtype():
    publish("llava-hf/llava-1.5-7b-hf")
    model, processor = mm.load("llava-1.5-7b", "cpu", "bfloat16")
    assert model.dtype == torch.bfloat16
    assert processor.tokenizer("ring").input_ids


def test_an_encoder_decoder_of_text_has_its_tokenizer_where_there_is_one(tmp_path):
    config = T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    model, _ = mm.load(tmp_path, "cpu")
    assert isinstance(model, T5ForConditionalGeneration)


@pytest.mark.parametrize("name", ["zoo:llava-scenes-eagle", "zoo:whisper-synth-medusa"])
def test_a_drafter_is_no_model(name):
    with pytest.raises(InputError, match=f"{name}.*drafter|drafter.*{name}"):
        mm.load(name, "cpu")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("zoo:punctuation", "punctuation"), ("zoo:whisper-synth-medusa", "medusa"), ("ctc", "ctc")],
)
def test_a_recogniser_is_not_made_of_a_part_for_one(name, kind, tmp_path):
    if name == "ctc":
        name = str(tmp_path)
        (tmp_path / "config.json").write_text('{"drafter": "ctc"}')
    with pytest.raises(InputError, match=f"{name} holds no model, but a part .*'{kind}'"):
        Transcriber.from_pretrained(name, device="cpu")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match="cannot be loaded"):
        Transcriber.from_pretrained(str(tmp_path), device="cpu")


@pytest.mark.parametrize("name", ["zoo:scene-classifier", "zoo:var-scenes-tokenizer", "zoo:nobody"])
def test_what_generates_nothing_is_refused_by_name(name):
    with pytest.raises(MMDecodeError, match=name.removeprefix("zoo:")):
        mm.load(name, "cpu")


def test_a_character_model_is_refused_with_what_is_expected(tmp_path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Wav2Vec2Config(
        **sizes, intermediate_size=8, conv_dim=[8], conv_stride=[2], conv_kernel=[2],
        num_conv_pos_embeddings=2, num_conv_pos_embedding_groups=1,
    )  # fmt: skip
    Wav2Vec2ForCTC(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="wav2vec2 model; expected a model that gen"):
        mm.load(tmp_path, "cpu")
