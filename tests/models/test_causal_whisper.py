"""Causal Whisper: no later audio is read, parts give the states of one pass, padding is ignored."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import WhisperForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from mmdecode.asr import TranscribeOptions, Transcriber
from mmdecode.asr.audio.reading import source_of
from mmdecode.asr.recognizers.causal_whisper import ADAPTER
from mmdecode.checkpoints import local_path
from mmdecode.errors import InputError, OptionError, ShapeError
from mmdecode.models import causal_whisper as ours
from mmdecode.models.causal_whisper import (
    CausalWhisperEncoder,
    CausalWhisperForConditionalGeneration,
    IncrementalWhisperEncoder,
    from_published,
    merged,
    running_features,
    window_features,
)
from mmdecode.models.causal_whisper_config import CausalWhisperConfig
from mmdecode.weights import read_tensors
from mmdecode.zoo.speech import speech_test
from tests.support.causal import BASE, causal_whisper, mel_of
from tests.support.parts import fed
from tests.support.seams import edited

KINDS = {"blocks of 8": (8, 0), "blocks of 5, three at first": (5, 2), "one block": (200, 0)}
PER_STATE = 640
"""Samples of an encoder state."""
RIGHT = 200
"""Samples after a state that it depends on: 12.5 ms."""


def speech(count=100_000):
    wave = np.concatenate([clip.samples() for clip in speech_test()[:4]])
    return torch.from_numpy(wave[:count])


@torch.no_grad()
def one_pass(model, processor, samples):
    features = window_features(mel_of(model, processor), samples)
    return model.get_encoder()(features[None]).last_hidden_state[0]


def encoder_of(model, processor):
    return IncrementalWhisperEncoder(model.get_encoder(), mel_of(model, processor))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_of_one_pass_for_any_parts(kind):
    parts = causal_whisper(*KINDS[kind])
    finals = []

    @settings(max_examples=8, deadline=None, derandomize=True)
    @given(
        count=st.integers(1, 100_000),
        sizes=st.lists(st.integers(0, 20_000), max_size=12),
        looks=st.sets(st.integers(0, 12), max_size=4),
    )
    @example(count=100_000, sizes=[1] * 205, looks={3, 85})
    @example(count=1, sizes=[], looks=set())
    @example(count=8 * PER_STATE + 100, sizes=[], looks=set())  # a whole block is not final
    @example(count=5 * 640 + RIGHT, sizes=[100, 100, 1], looks={0, 1, 2})
    def same(count, sizes, looks):
        final, rest = fed(encoder_of(*parts), speech(count), sizes, looks)
        found, expected = torch.cat([*final, rest]), one_pass(*parts, speech(count))
        assert found.shape == expected.shape
        assert (found - expected).abs().max() < 1e-5
        finals.append(len(found) - len(rest))

    same()
    assert max(finals) > 100 or kind == "one block"


MISTAKES = {
    "the level is that of the part": (
        "running_features",
        lambda e, level=-10.0: running_features(e),
    ),
    "positions begin with each block": (
        "positions",
        lambda encoder, first, count: encoder.embed_positions.weight[:count],
    ),
    "no silence after the audio": (
        "pad",
        lambda x, width: torch.nn.functional.pad(x, width, value=0.1),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_the_parts_is_found(mistake, monkeypatch):
    parts = causal_whisper(8)
    samples = torch.cat([speech(30_000), 1e-4 * speech(30_000)])
    expected = one_pass(*parts, samples)
    monkeypatch.setattr(ours, *MISTAKES[mistake])
    if mistake == "no silence after the audio":
        expected = one_pass(*parts, samples)
    final, rest = fed(encoder_of(*parts), samples, [7000] * 6)
    assert (torch.cat([*final, rest]) - expected).abs().max() > 1e-4


@pytest.mark.parametrize("block", [1, 5])
def test_later_audio_changes_no_block_that_is_complete(block):
    """A block depends on its audio and the 12.5 ms after it, bit by bit on nothing else."""
    model, processor = causal_whisper(8)
    samples = speech()
    end = 8 * block * PER_STATE + RIGHT
    changed = samples.clone()
    changed[end:] = 0.3 * torch.randn(
        len(samples) - end, generator=torch.Generator().manual_seed(0)
    )
    first, second = (one_pass(model, processor, one) for one in (samples, changed))
    assert torch.equal(first[: 8 * block], second[: 8 * block])
    assert (first[8 * block :] - second[8 * block :]).abs().max() > 0.1
    changed[end - 1] += 1.0
    assert not torch.equal(first[: 8 * block], one_pass(model, processor, changed)[: 8 * block])


def test_a_block_is_final_when_its_audio_and_the_context_are_there():
    model, processor = causal_whisper(8)
    made = encoder_of(model, processor)
    samples = speech()
    assert len(made.feed(samples[: 8 * PER_STATE + RIGHT - 1])) == 0
    assert len(made.feed(samples[8 * PER_STATE + RIGHT - 1 : 8 * PER_STATE + RIGHT])) == 8
    assert made.done == 8


def test_one_block_is_the_whole_encoder():
    """With a block of the whole window, states are those of the plain encoder."""
    model, processor = causal_whisper(200)
    plain = WhisperForConditionalGeneration.from_pretrained(local_path(BASE)).eval()
    features = processor.feature_extractor(
        speech(8 * 16_000).numpy(), sampling_rate=16_000, return_tensors="pt"
    ).input_features
    with torch.no_grad():
        found = model.get_encoder()(features).last_hidden_state
        expected = plain.get_encoder()(features).last_hidden_state
    assert (found - expected).abs().max() < 1e-5
    blocks, _ = causal_whisper(8)
    with torch.no_grad():
        assert (blocks.get_encoder()(features).last_hidden_state - expected).abs().max() > 0.1


def test_work_and_memory_of_a_part_do_not_grow():
    model, processor = causal_whisper(8)
    made = encoder_of(model, processor)
    rows = []
    handle = (
        model.get_encoder()
        .layers[0]
        .fc1.register_forward_hook(lambda module, given, output: rows.append(output.shape[1]))
    )
    samples, step = speech(), 8 * PER_STATE
    for at in range(0, len(samples), step):
        made.feed(samples[at : at + step])
        assert len(made._tail) < 2 * 400
        assert made._inputs.shape[0] < 8 + 1
    handle.remove()
    assert set(rows) == {8}
    assert len(rows) >= 15


@torch.no_grad()
def test_padded_states_change_no_logits():
    model, _ = causal_whisper(8)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2, 30, 128, generator=generator)
    states[1, 20:] = 0
    ids = torch.randint(0, 1000, (2, 7), generator=generator)

    def logits(read, rows):
        read = BaseModelOutput(last_hidden_state=read)
        return model(encoder_outputs=read, decoder_input_ids=ids[rows], use_cache=False).logits

    both = logits(states, slice(None))
    alone = logits(states[1:, :20], slice(1, 2))
    assert (both[1] - alone[0]).abs().max() < 1e-4
    plain = WhisperForConditionalGeneration.from_pretrained(local_path(BASE)).eval()
    read = BaseModelOutput(last_hidden_state=states[1:])
    unmasked = plain(encoder_outputs=read, decoder_input_ids=ids[1:]).logits
    assert (unmasked - alone).abs().max() > 1e-2  # a plain Whisper reads the padding


def test_generate_with_a_padded_batch_is_that_of_each_row():
    model, processor = causal_whisper(8)
    rows = [one_pass(model, processor, speech(n)) for n in (60_000, 30_000)]
    states = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    plain = {"max_new_tokens": 12, "language": "en", "task": "transcribe"}

    def ids(read):
        return model.generate(encoder_outputs=BaseModelOutput(last_hidden_state=read), **plain)

    both = ids(states)
    for row, own in enumerate(rows):
        alone = ids(own[None])[0]
        assert both[row, : len(alone)].tolist() == alone.tolist()


def test_features_longer_than_the_window_are_refused():
    model, processor = causal_whisper(8)
    with pytest.raises(ShapeError, match="201 encoder states; expected at most 200"):
        one_pass(model, processor, torch.zeros(200 * PER_STATE + 1))


def test_running_features_clip_at_the_level_so_far():
    energies = torch.tensor([[0.0, -9.0, 3.0, -9.0]])
    found, level = running_features(energies)
    assert found.tolist() == [[1.0, -1.0, 1.75, -0.25]]
    assert level == 3.0
    assert running_features(energies[:, 1:2], level)[0].tolist() == [[-0.25]]


def test_an_adapter_without_effect_is_the_base():
    model, _ = causal_whisper(8)
    weights = model.state_dict()
    name = "model.encoder.layers.0.self_attn.q_proj"
    lora = {
        f"{name}.lora_A.weight": torch.randn(4, 128),
        f"{name}.lora_B.weight": torch.zeros(128, 4),
    }
    same = merged(weights, lora, 2.0)
    assert all(torch.equal(same[key], value) for key, value in weights.items())
    down = {f"base_model.model.{name}.lora_A.weight": torch.ones(1, 128)}
    up = {f"base_model.model.{name}.lora_B.weight": torch.ones(128, 1)}
    added = merged(weights, down | up, 0.5)[f"{name}.weight"] - weights[f"{name}.weight"]
    assert torch.allclose(added, torch.full((128, 128), 0.5), atol=1e-6)
    with pytest.raises(InputError, match="which its base model does not have"):
        merged({}, lora, 1.0)
    with pytest.raises(InputError, match=r"has .*\.lora_A\.weight; expected pairs of"):
        merged(weights, down, 1.0)
    with pytest.raises(InputError, match=r"lora_magnitude_vector; expected pairs of"):
        merged(weights, {**lora, f"{name}.lora_magnitude_vector": torch.ones(128)}, 1.0)
    with pytest.raises(InputError, match="the adapter has no weights"):
        merged(weights, {}, 1.0)


@pytest.mark.parametrize(("name", "chunk"), [("320ms", 8), ("960ms", 24)])
def test_a_shipped_model_is_its_base_with_the_adapter_of_its_configuration(name, chunk, tmp_path):
    shipped = Path(local_path(f"zoo:whisper-synth-{name}"))
    found = Transcriber.from_pretrained(f"zoo:whisper-synth-{name}", device="cpu").recognizer.model
    assert found.config.chunk == found.get_encoder().config.chunk == chunk
    assert found.name_or_path == found.config.name_or_path == str(shipped)
    base = WhisperForConditionalGeneration.from_pretrained(local_path(BASE))
    layer, lora = "model.encoder.layers.0.self_attn.q_proj", read_tensors(shipped / ADAPTER)
    up, down = (lora[f"base_model.model.{layer}.lora_{part}.weight"].float() for part in "BA")
    expected = base.get_parameter(f"{layer}.weight") + up @ down
    assert torch.allclose(found.get_parameter(f"{layer}.weight"), expected, atol=1e-6)
    folder = Path(shutil.copytree(shipped, tmp_path / "model"))
    options = json.loads((folder / "adapter_config.json").read_text())
    for change in ({"use_rslora": True}, {"alpha_pattern": {"q": 1}}, {"lora_alpha": None}):
        (folder / "adapter_config.json").write_text(json.dumps(options | change))
        with pytest.raises(InputError, match=next(iter(change))):
            Transcriber.from_pretrained(str(folder), device="cpu")


@pytest.mark.parametrize("samples", [128_000, 128_001, 128_319, 256_001, 256_319, 256_321])
def test_recordings_that_end_with_a_part_of_a_frame_are_read(samples):
    recognizer = Transcriber(*causal_whisper(8)).recognizer
    wave = speech().repeat(3)[:samples].numpy()
    recording = recognizer.open(source_of((wave, 16_000), 16_000))
    sizes = []
    for seek in range(0, recording.frames, recognizer.window_frames):
        count = recognizer.span(recording, seek, ()).frames
        encoded = recognizer.encode([recognizer.read(recording, seek, count)], [count / 50])
        sizes.append(encoded.states.shape[1])
    assert max(sizes) == 200 and sum(sizes) == -(-recording.frames // 2)


def test_windows_longer_than_those_of_the_model_are_refused():
    with pytest.raises(OptionError, match="window_s=20; expected at most 8 s"):
        Transcriber(*causal_whisper(8), options=TranscribeOptions(window_s=20))


def test_generate_reads_no_audio_that_is_masked():
    model, processor = causal_whisper(8)
    mel, waves = mel_of(model, processor), [speech(n) for n in (64_000, 32_000)]
    longer, shorter = (window_features(mel, wave)[:, :-1] for wave in waves)
    size = shorter.shape[1]
    padding = (0, longer.shape[1] - size)
    features = torch.stack([longer, torch.nn.functional.pad(shorter, padding)])
    mask = torch.ones(2, longer.shape[1], dtype=torch.long)
    mask[1, size:] = 0
    plain = {"max_new_tokens": 12, "language": "en", "task": "transcribe"}
    alone = model.generate(shorter[None], attention_mask=mask[:1, :size], **plain)[0].tolist()
    masked = model.generate(features, attention_mask=mask, **plain)[1].tolist()
    assert masked[: len(alone)] == alone
    assert model.generate(features, **plain)[1].tolist()[: len(alone)] != alone


@pytest.mark.parametrize("fault", [None, "padding of the last block is read"])
def test_states_of_a_shorter_row_are_those_that_it_has_alone(fault, monkeypatch):
    model, processor = causal_whisper(8)
    encoder = model.model.encoder
    if fault:
        blind = edited(CausalWhisperEncoder.forward, "seen & audio[:, None] | itself", "seen")
        monkeypatch.setattr(CausalWhisperEncoder, "forward", blind)
    features = window_features(mel_of(model, processor), speech(33_280))[:, :-1]
    assert features.shape[1] // 2 % 8, "its last block is not complete"
    size = features.shape[1]
    padded = torch.nn.functional.pad(features, (0, 100))[None]
    mask = (torch.arange(size + 100) < size)[None].long()
    with torch.no_grad():
        alone = encoder(features[None]).last_hidden_state
        found = encoder(padded, mask).last_hidden_state
    assert not found[:, size // 2 :].any()
    # the convolution of the very last state reaches into the padding
    gap = (found[:, : size // 2 - 1] - alone[:, :-1]).abs().max()
    assert (gap < 1e-4) == (fault is None)


def test_blocks_without_states_are_refused():
    with pytest.raises(InputError, match=r"chunk=0, extra=0 in the model's config\.json; expected"):
        CausalWhisperForConditionalGeneration(CausalWhisperConfig(chunk=0))


def published(model):
    """A model's weights in the layout of CarelessWhisper, with an adapter of known effect."""
    names = {
        "model.": "",
        "layers": "blocks",
        "encoder_attn_layer_norm": "cross_attn_ln",
        "encoder_attn": "cross_attn",
        "self_attn_layer_norm": "attn_ln",
        "self_attn": "attn",
        "final_layer_norm": "mlp_ln",
        "fc1": "mlp.0",
        "fc2": "mlp.2",
        "q_proj": "query",
        "k_proj": "key",
        "v_proj": "value",
        "out_proj": "out",
        "encoder.layer_norm": "encoder.ln_post",
        "decoder.layer_norm": "decoder.ln",
        "embed_positions.weight": "positional_embedding",
        "embed_tokens": "token_embedding",
    }
    found = {}
    for key, value in model.state_dict().items():
        if key == "proj_out.weight":
            continue
        new = key
        for ours_, theirs in names.items():
            new = new.replace(ours_, theirs)
        if ".attn." in new or ".cross_attn." in new:
            base, kind = new.rsplit(".", 1)
            new = f"{base}.base_layer.{kind}"
            if kind == "weight":
                value = value - 1.0  # which the adapter adds
                found[f"{base}.lora_layer.lora_A"] = torch.ones(value.shape[1], 2)
                found[f"{base}.lora_layer.lora_B"] = torch.full((2, value.shape[0]), 0.5)
        found[new] = value
    config = model.config
    dims = {
        "n_vocab": config.vocab_size,
        "n_mels": config.num_mel_bins,
        "n_audio_state": config.d_model,
        "n_audio_ctx": config.max_source_positions,
        "n_text_ctx": config.max_target_positions,
        "n_audio_layer": config.encoder_layers,
        "n_audio_head": config.encoder_attention_heads,
        "n_text_state": config.d_model,
        "n_text_layer": config.decoder_layers,
        "n_text_head": config.decoder_attention_heads,
    }
    cfg = {"gran": 15, "extra_gran_blocks": 1, "rank": 2}
    return {"dims": dims, "cfg": cfg, "state_dict": found}


def test_a_published_checkpoint_is_loaded_by_its_layout(tmp_path):
    model, _ = causal_whisper(8)
    torch.save(published(model), tmp_path / "base_300.pt")
    found = from_published(tmp_path / "base_300.pt")
    assert (found.config.chunk, found.config.extra) == (15, 1)
    expected = model.state_dict()
    assert set(found.state_dict()) == set(expected)
    for name, value in found.state_dict().items():
        assert (value - expected[name].float()).abs().max() < 1e-5, name
    torch.save({"state_dict": {}}, tmp_path / "other.pt")
    with pytest.raises(InputError, match="expected 'dims', 'cfg' and 'state_dict'"):
        from_published(tmp_path / "other.pt")
    torch.save({"state_dict": {}, "dims": {"n_mels": 80}, "cfg": {"gran": 8}}, tmp_path / "few.pt")
    with pytest.raises(InputError, match=r"lack n_audio_ctx, .*, n_vocab, extra_gran_blocks; give"):
        from_published(tmp_path / "few.pt")
    (tmp_path / "text.pt").write_text("no weights")
    (tmp_path / "empty.pt").touch()
    given = {"missing.pt": "does not exist", ".": "is a folder", "empty.pt": "is empty"}
    given["text.pt"] = "cannot be read as weights"
    for name, problem in given.items():
        with pytest.raises(InputError, match=problem) as caught:
            from_published(tmp_path / name)
        assert "weights_only=False" not in str(caught.value)
