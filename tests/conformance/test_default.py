"""Causal language models without an adapter: right through the default one, or refused."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    FalconConfig,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoXConfig,
    GptOssConfig,
    HyperCLOVAXConfig,
    MambaConfig,
    MptConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    RwkvConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from mmdecode import registry
from mmdecode.adapters import default
from mmdecode.adapters.default import DefaultAdapter
from mmdecode.decoder import Decoder
from mmdecode.draft.layer_skip import LayerSkip
from mmdecode.draft.medusa import Medusa
from mmdecode.errors import IncompatibleError, OptionError, UnsupportedModelError
from mmdecode.testing import drafts
from tests.support import seams
from tests.support.tiny import HiddenPath, prompts, random_heads

NEW = 14
COMMON = {
    "vocab_size": 80,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.4,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
POSITIONS = {"max_position_embeddings": 64}
RIGHT = {
    "phi": (PhiConfig, {"intermediate_size": 48}),
    "phi3, one window for all": (Phi3Config, {"intermediate_size": 48, "sliding_window": 4}),
    "gpt_neox": (GPTNeoXConfig, {"intermediate_size": 48}),
    "gpt2, learned positions": (GPT2Config, POSITIONS),
    "opt, learned positions with an offset": (OPTConfig, {**POSITIONS, "ffn_dim": 48}),
    "cohere, scaled logits": (CohereConfig, {"intermediate_size": 48, "logit_scale": 0.25}),
    "falcon, rotary": (FalconConfig, {"alibi": False}),
    "gpt_oss, attention sinks and two kinds of layers": (
        GptOssConfig,
        {
            "intermediate_size": 48,
            "head_dim": 8,
            "num_key_value_heads": 2,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
}
REFUSED = {
    "bloom, positions from the mask": (BloomConfig, {}),
    "falcon, positions from the mask": (FalconConfig, {"alibi": True}),
    "mpt, positions from the slots": (MptConfig, {"d_model": 32, "n_heads": 4, "n_layers": 2}),
    "gpt_neo, a mask of its own": (
        GPTNeoConfig,
        {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4},
    ),
    "gpt_neo, a window that takes long to check": (
        GPTNeoConfig,
        {
            "attention_types": [[["global", "local"], 1]],
            "num_layers": 2,
            "num_heads": 4,
            "window_size": 300,
        },
    ),
    "mamba, no keys and values": (MambaConfig, {}),
    "rwkv, no keys and values": (RwkvConfig, {}),
    "hyperclovax, logits scaled the other way": (
        HyperCLOVAXConfig,
        {"intermediate_size": 48, "logits_scaling": 2.0, "num_key_value_heads": 4},
    ),
}


def model_of(cls, options):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(cls(**{**COMMON, **options})).eval()


@pytest.fixture
def gpt_neox():
    """A model that nothing has checked yet."""
    return model_of(*RIGHT["gpt_neox"])


@pytest.mark.parametrize("name", RIGHT)
def test_a_family_without_adapter_generates_what_transformers_does(name):
    model = model_of(*RIGHT[name])
    options = {**prompts(3), "max_new_tokens": NEW, "do_sample": False}
    expected = model.generate(**options)
    rows = expected[:, -NEW:].tolist()
    assert len({token for row in rows for token in row}) >= 8, "the model repeats itself too much"
    skip = LayerSkip(exit_layer=1, length=3)
    for draft in (None, HiddenPath(rows), Medusa(random_heads(vocab=80)), skip):
        found = model.generate(**options, custom_generate=Decoder(draft))
        assert found.tolist() == expected.tolist()
    assert isinstance(registry.adapter_for(model), DefaultAdapter)


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_it_cannot_run_is_refused(name):
    model = model_of(*REFUSED[name])
    with pytest.raises(UnsupportedModelError, match="plain generate") as refusal:
        model.generate(**prompts(2), max_new_tokens=4, use_cache=True, custom_generate=Decoder())
    reasons = ("layers of linear_attention", "failed its start-up check", "logits at")
    assert any(reason in str(refusal.value) for reason in reasons)


def test_an_encoder_decoder_is_not_taken_for_a_causal_model():
    config = T5Config(vocab_size=80, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    assert not DefaultAdapter.fits(T5ForConditionalGeneration(config))


def test_a_vision_language_model_is_not_taken_for_a_text_model(gpt_neox, monkeypatch):
    assert DefaultAdapter.fits(gpt_neox)
    monkeypatch.setattr(type(gpt_neox), "input_modalities", ("image", "text"), raising=False)
    assert not DefaultAdapter.fits(gpt_neox)


def test_a_bidirectional_model_is_refused(gpt_neox, monkeypatch):
    forward = type(gpt_neox).forward

    def both_ways(self, input_ids, **options):
        if options.get("use_cache") is False:
            options["attention_mask"] = torch.zeros(1, 1, *[input_ids.shape[1]] * 2)
        return forward(self, input_ids, **options)

    monkeypatch.setattr(type(gpt_neox), "forward", both_ways)
    with pytest.raises(UnsupportedModelError, match="what follows matters"):
        registry.adapter_for(gpt_neox)


# What the check is for, one mistake at a time


def shifted(adapter, monkeypatch):
    forward = adapter.forward

    def run(self, tokens, mask, positions, past):
        return forward(self, tokens, mask, positions + (past.start > 0)[:, None], past)

    monkeypatch.setattr(adapter, "forward", run)


def by_slot(adapter, monkeypatch):
    forward = adapter.forward

    def run(self, tokens, mask, positions, past):
        order = torch.arange(tokens.shape[1])
        return forward(self, tokens, mask, positions[:, :1] + order, past)

    monkeypatch.setattr(adapter, "forward", run)


def unpadded(adapter, monkeypatch):
    seams.BLOCK_MASK.plant(monkeypatch, seams.padding_is_seen)


def siblings(adapter, monkeypatch):
    def chains(additive):  # as if every block were one
        return lambda begin, pads, depths, ancestors, *rest: additive(
            begin, pads, depths, None, *rest
        )

    seams.BLOCK_MASK.plant(monkeypatch, chains)


def unmoved(adapter, monkeypatch):
    seams.COMMIT_TO_CACHE.plant(monkeypatch, seams.nodes_stay_where_they_were_written)


def scaled(adapter, monkeypatch):
    monkeypatch.setattr(adapter, "head", lambda self, hidden: self._head(hidden) * 1.01)


@pytest.mark.parametrize("mistake", [shifted, by_slot, unpadded, siblings, unmoved, scaled])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_notices(mistake, dtype, gpt_neox, monkeypatch):
    if mistake is scaled and dtype == torch.bfloat16:
        pytest.skip("one per cent is within what bfloat16 differs by")
    mistake(DefaultAdapter, monkeypatch)
    with pytest.raises(UnsupportedModelError, match="logits at"):
        registry.adapter_for(gpt_neox.to(dtype))


def test_the_check_notices_a_window_that_the_config_does_not_tell(monkeypatch):
    model = model_of(*RIGHT["phi3, one window for all"])
    seams.BLOCK_MASK.plant(monkeypatch, seams.without_window)
    with pytest.raises(UnsupportedModelError, match="logits at"):
        registry.adapter_for(model)


def test_no_mistake_in_bfloat16_is_no_refusal(gpt_neox):
    registry.adapter_for(gpt_neox.to(torch.bfloat16))


def test_a_model_is_checked_once_and_again_with_other_attention(gpt_neox, monkeypatch):
    calls = []
    monkeypatch.setattr(default, "check", calls.append)
    for _ in range(2):
        registry.adapter_for(gpt_neox)
    assert len(calls) == 1
    gpt_neox.set_attn_implementation("eager")
    registry.adapter_for(gpt_neox)
    assert len(calls) == 2


def test_a_view_of_a_checked_model_is_not_checked(gpt_neox, monkeypatch):
    calls, check = [], default.check
    monkeypatch.setattr(default, "check", lambda adapter: (calls.append(adapter), check(adapter)))
    decoder = Decoder(LayerSkip(skip=[0]))
    for _ in range(2):
        gpt_neox.generate(**prompts(2), max_new_tokens=3, do_sample=False, custom_generate=decoder)
    assert len(calls) == 1 and decoder.stats.drafted > 0


def test_an_input_that_only_the_family_knows_is_refused():
    model = model_of(*RIGHT["gpt2, learned positions"])
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(IncompatibleError, match="token_type_ids"):
        model.generate(
            ids, token_type_ids=torch.ones_like(ids), max_new_tokens=4, custom_generate=Decoder()
        )


def test_a_table_of_positions_is_not_overrun():
    model = model_of(*RIGHT["gpt2, learned positions"])
    ids = torch.arange(60)[None]
    options = {"do_sample": False, "custom_generate": Decoder(drafts.RandomTrees())}
    assert model.generate(ids, max_new_tokens=4, **options).shape == (1, 64)
    with pytest.raises(OptionError, match="64 positions"):
        model.generate(ids, max_new_tokens=5, **options)


ROPE = {"rope_theta": 1e4}
MOVING = {
    "switched": (
        Phi3Config,
        {
            "intermediate_size": 48,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                **ROPE,
                "rope_type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [8.0] * 4,
            },
        },
    ),
    "stretched": (
        GPTNeoXConfig,
        {
            "intermediate_size": 48,
            "max_position_embeddings": 32,
            "rope_parameters": {
                **ROPE,
                "rope_type": "dynamic",
                "factor": 4.0,
                "partial_rotary_factor": 1.0,
            },
        },
    ),
}


@pytest.mark.parametrize("name", MOVING)
def test_frequencies_that_move_with_the_length_are_not_overrun(name):
    model = model_of(*MOVING[name])
    ids = torch.arange(20)[None]
    options = {"do_sample": False, "max_new_tokens": 12}
    expected = model.generate(ids, **options)
    for draft in (HiddenPath(expected[:, 20:].tolist()), drafts.Constant(3, length=11)):
        decoder = Decoder(draft)  # the last nodes are beyond the end, and unused
        assert model.generate(ids, custom_generate=decoder, **options).tolist() == expected.tolist()
    with pytest.raises(OptionError, match="32 positions"):
        model.generate(ids, custom_generate=Decoder(), **{**options, "max_new_tokens": 13})
