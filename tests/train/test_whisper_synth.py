import ctypes.util

import numpy as np
import pytest
import torch

from mmdecode.train.speech_windows import (
    STEP_S,
    WINDOW_S,
    SpecialIds,
    Windows,
    collate,
    ctc_ids,
)
from mmdecode.train.zoo.whisper_synth import (
    CTCHead,
    WhisperSynthOptions,
    build_model,
    build_processor,
    encode,
    export,
    losses,
    rate_at,
    run,
)
from mmdecode.zoo import grammar

OPTIONS = WhisperSynthOptions(width=32, encoder_layers=1, decoder_layers=2, merges=60)


@pytest.fixture(scope="module")
def processor():
    return build_processor(OPTIONS.merges)


@pytest.fixture
def corpus(tmp_path):
    rng = np.random.default_rng(0)
    texts = grammar.sentences(12, 0, "train")
    waves = [rng.normal(0, 3000, 16_000 * 2 + 500 * i).astype(np.int16) for i in range(12)]
    ends = np.cumsum([len(w) for w in waves])
    np.savez(tmp_path / "0000000.npz", samples=np.concatenate(waves), ends=ends, texts=texts)
    return tmp_path


def test_encoding_without_the_full_window_equals_the_stock_encoder_on_it(processor):
    model = build_model(OPTIONS, processor).eval()
    features = torch.randn(2, 80, 400)
    with torch.no_grad():
        expected = model.get_encoder()(features).last_hidden_state
        torch.testing.assert_close(encode(model, features), expected)
        assert encode(model, features[..., :160]).shape == (2, 80, 32)


def test_special_ids_follow_the_layout_of_whisper(processor):
    ids = SpecialIds.of(processor.tokenizer)
    assert ids.sot == ids.eot + 1
    assert ids.first_timestamp == ids.no_timestamps + 1
    stamps = processor.tokenizer.convert_tokens_to_ids(["<|0.00|>", "<|8.00|>"])
    assert stamps == [ids.first_timestamp, ids.first_timestamp + round(WINDOW_S / STEP_S)]
    assert processor.tokenizer.prefix_tokens[0] == ids.sot


def test_windows_ask_for_the_spoken_text_and_its_times(processor, corpus):
    windows = Windows(corpus, processor, seed=1)
    windows.refresh()
    ids, seen = windows.ids, set()
    for _ in range(60):
        window = windows.draw(full=True)
        assert len(window.ids) == len(window.targets)
        if window.ids == [ids.sot]:
            assert window.targets == [ids.no_speech] and window.ctc_targets is None
            seen.add("silence")
            continue
        begin = window.ids.index(ids.sot)
        assert window.targets[begin] == ids.en
        asked = [t for t in window.targets[begin + 1 :] if t != -100]
        transcript = window.ids[begin + 3 + (window.ids[begin + 3] == ids.no_timestamps) :]
        assert asked == [*transcript, ids.eot]
        stamps = [t for t in transcript if t >= ids.first_timestamp]
        assert stamps == sorted(stamps)
        seen.add("times" if stamps else "plain")
        if stamps and len(stamps) % 2:
            assert window.ctc_targets is None  # the last utterance is cut: its start alone is asked
            seen.add("cut")
    assert seen == {"silence", "times", "plain", "cut"}


def test_one_step_lowers_both_losses_and_the_rate_ends_low(processor, corpus):
    windows = Windows(corpus, processor, seed=2)
    windows.refresh()
    model, head = build_model(OPTIONS, processor), CTCHead(OPTIONS.width)
    batch = collate([windows.draw(False) for _ in range(4)], processor.feature_extractor, False, 0)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=3e-3)
    first = last = None
    for _ in range(12):
        ce, ctc = losses(model, head, batch)
        (ce + ctc).backward()
        optimizer.step()
        optimizer.zero_grad()
        last = (float(ce.detach()), float(ctc.detach()))
        first = first or last
    assert last[0] < first[0] and last[1] < first[1]
    assert rate_at(0.0, 0, 1.0) < 0.01 and rate_at(1.0, 10**6, 1.0) == pytest.approx(0.02)


def test_shifted_windows_shift_their_times_and_their_positions(processor, corpus):
    windows = Windows(corpus, processor, seed=3)
    windows.refresh()
    sampled = [windows.draw(False) for _ in range(16)]
    extractor = processor.feature_extractor
    plain, moved = (collate(sampled, extractor, False, windows.ids.eot) for _ in range(2))
    moved = windows.shift(moved)
    first = windows.ids.first_timestamp
    assert moved.offset > 0
    stamps = plain.ids >= first
    assert stamps.any()
    assert torch.equal(moved.ids[stamps], plain.ids[stamps] + moved.offset)
    assert torch.equal(moved.ids[~stamps], plain.ids[~stamps])
    asked = plain.targets >= first
    assert torch.equal(moved.targets[asked], plain.targets[asked] + moved.offset)
    model = build_model(OPTIONS, processor).eval()
    with torch.no_grad():
        at_zero, at_offset = encode(model, plain.features), encode(model, plain.features, 40)
    assert not torch.allclose(at_zero, at_offset)


def test_ctc_ids_of_a_text():
    assert "".join("_ 'abcdefghijklmnopqrstuvwxyz"[i] for i in ctc_ids("It's 3 Cats!")) == (
        "it's cats"
    )


def test_exported_folder_loads_as_a_whisper_in_float32(processor, tmp_path):
    from transformers import AutoProcessor, WhisperForConditionalGeneration

    export(build_model(OPTIONS, processor), processor, OPTIONS, tmp_path)
    model = WhisperForConditionalGeneration.from_pretrained(tmp_path)
    assert model.dtype == torch.float32
    assert model.generation_config.no_timestamps_token_id is not None
    assert AutoProcessor.from_pretrained(tmp_path).feature_extractor.hop_length == 320


@pytest.mark.slow
@pytest.mark.skipif(
    ctypes.util.find_library("espeak-ng") is None,
    reason="espeak-ng, the system package that speaks the training data, is not installed",
)
def test_recipe_runs_and_resumes(tmp_path):
    options = WhisperSynthOptions(
        minutes=0.2, utterances=2000, width=32, encoder_layers=1, decoder_layers=1, batch=4
    )
    first = run(options, tmp_path / "work", tmp_path / "out")
    longer = WhisperSynthOptions(**{**vars(options), "minutes": 0.3})
    second = run(longer, tmp_path / "work", tmp_path / "out")
    assert second["step"] > first["step"]
    assert (tmp_path / "out" / "model.safetensors").exists()
