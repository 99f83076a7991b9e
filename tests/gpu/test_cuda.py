"""What only a CUDA device can show; everything else is tested on the CPU with the same code.

The same tests run on the CPU among the slow ones, captured rounds on a tape.
"""

import warnings

import pytest
import torch

from mmdecode.decoder import Decoder
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.lookup import PromptLookup
from mmdecode.draft.medusa import Medusa
from mmdecode.draft.medusa_heads import MedusaHeads
from mmdecode.engine.noise import Noise, Role
from tests.gpu.devices import DEVICES
from tests.support import tiny_models


@pytest.fixture
def capturing(device, request):
    """Captures on either device: on a CPU on a tape."""
    return request.getfixturevalue("taped") if device == "cpu" else None


def llama(device, layers=3, seed=0):
    return tiny_models.llama(
        seed,
        vocab_size=61,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=60,
        bos_token_id=1,
        pad_token_id=0,
        initializer_range=0.4,
    ).to(device)


def whisper(device):
    return tiny_models.whisper(
        vocab_size=101,
        num_mel_bins=16,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=40,
        max_target_positions=60,
        decoder_start_token_id=90,
        pad_token_id=80,
        bos_token_id=80,
        eos_token_id=80,
        init_std=0.4,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    ).to(device)


@DEVICES
def test_noise_is_the_same_on_both_devices(device):
    keys, positions = [5, 9], torch.arange(6).expand(2, -1)
    here = Noise.of(3, keys).gumbel(positions, Role.TARGET, 50)
    there = Noise.of(3, keys, device).gumbel(positions.to(device), Role.TARGET, 50)
    torch.testing.assert_close(here, there.cpu(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("drafter", ["none", "lookup", "assistant", "itself"])
@pytest.mark.parametrize("sample", [False, True])
@DEVICES
def test_text_model_in_fp32_decodes_alike_with_any_draft(device, drafter, sample):
    model = llama(device)
    ids = torch.randint(1, 60, (3, 9), generator=torch.Generator().manual_seed(1)).to(device)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    draft = {
        "none": lambda: None,
        "lookup": PromptLookup,
        "assistant": lambda: Assistant(llama(device, 1, 1)),
        "itself": lambda: Assistant(model),
    }[drafter]()
    call = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": sample}
    plain = model.generate(ids, custom_generate=Decoder(seed=3) if sample else None, **call)
    drafted = model.generate(ids, custom_generate=Decoder(draft=draft, seed=3), **call)
    assert torch.equal(plain, drafted)


@DEVICES
def test_whisper_with_random_medusa_heads_decodes_as_generate_does(device):
    model = whisper(device)
    features = torch.randn(3, 16, 80, generator=torch.Generator().manual_seed(2)).to(device)
    heads = MedusaHeads(3, 1, 32)
    torch.nn.init.normal_(heads.weight, std=0.3)
    paths = [(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]
    expected = model.generate(features, do_sample=False, max_new_tokens=40)
    drafted = model.generate(
        features,
        do_sample=False,
        max_new_tokens=40,
        custom_generate=Decoder(draft=Medusa(heads, paths=paths)),
    )
    assert torch.equal(expected, drafted)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("drafter", ["none", "lookup", "assistant"])
@DEVICES
def test_captured_rounds_decode_as_the_loop_does(device, drafter, sample, capturing):
    model = llama(device)
    ids = torch.randint(1, 60, (3, 9), generator=torch.Generator().manual_seed(1)).to(device)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    make = {"none": lambda: None, "lookup": PromptLookup, "assistant": lambda: Assistant(small)}
    small = llama(device, 1, 1)
    call = {"attention_mask": mask, "max_new_tokens": 200, "do_sample": sample}
    plain = model.generate(ids, custom_generate=Decoder(make[drafter](), seed=3), **call)
    decoder = Decoder(make[drafter](), seed=3, compile=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what cannot be captured says so
        captured = model.generate(ids, custom_generate=decoder, **call)
    assert torch.equal(plain, captured)


@DEVICES
def test_captured_medusa_decodes_as_generate_does(device, capturing):
    model = whisper(device)
    features = torch.randn(3, 16, 80, generator=torch.Generator().manual_seed(2)).to(device)
    heads = MedusaHeads(3, 1, 32)
    torch.nn.init.normal_(heads.weight, std=0.3)
    draft = Medusa(heads, paths=[(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
    call = {"do_sample": False, "max_new_tokens": 40}
    expected = model.generate(features, **call)
    found = model.generate(features, custom_generate=Decoder(draft, compile=True), **call)
    assert torch.equal(expected, found)


@DEVICES
def test_half_precision_runs_without_nan(device):
    model = whisper(device).half()
    features = torch.randn(2, 16, 80, generator=torch.Generator().manual_seed(2)).to(device).half()
    output = model.generate(
        features,
        do_sample=False,
        max_new_tokens=30,
        return_dict_in_generate=True,
        output_scores=True,
        custom_generate=Decoder(draft=PromptLookup()),
    )
    assert not any(torch.isnan(step).any() for step in output.scores)
