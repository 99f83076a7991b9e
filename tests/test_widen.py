"""Widened models predict what the trained ones predict; each step that is left out is noticed."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
)

from mmdecode.checkpoints import local_path
from mmdecode.decoder import Decoder
from mmdecode.draft import Medusa
from mmdecode.draft.medusa_heads import MedusaHeads
from mmdecode.errors import InputError, OptionError, UnsupportedModelError

ROOT = Path(__file__).parents[1]
WHISPER, HEADS, LINEAR = (f"zoo:whisper-synth{end}" for end in ("", "-medusa", "-medusa-linear"))
pytestmark = pytest.mark.filterwarnings("ignore:.*generation")


@pytest.fixture
def widen(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("widen")


@pytest.fixture
def speech(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("speech")


@pytest.fixture
def little(widen):
    """A shape with more of everything, that is quick to compute."""
    return widen.Shape(256, 4, 10, 1100, 1500, encoder_layers=7, mel_bins=90, slots=403)


@pytest.fixture(scope="module")
def trained():
    path = local_path(WHISPER)
    return WhisperForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture
def features(speech):
    extractor = WhisperFeatureExtractor.from_pretrained(local_path(WHISPER))
    return speech.windows(extractor, 2)


def decoded(speech, model, features, times, drafter=None):
    """Ids and tokens per pass."""
    decoder = Decoder(draft=drafter)
    run = speech.engine(model, decoder, times)
    return speech.clean(run(speech.encode(model, features)), model), decoder.stats


def compare(widen, speech, trained, wide, drafters, features):
    """Asserts equal ids with and without timestamps, and equal tokens per pass."""
    wide_features = widen.laid_out(features, wide.config)
    for times in (False, True):
        expected, _ = decoded(speech, trained, features, times)
        assert min(map(len, expected)) > 5
        assert decoded(speech, wide, wide_features, times)[0] == expected
        for drafter, wide_drafter in drafters:
            own, stats = decoded(speech, trained, features, times, drafter)
            ids, wide_stats = decoded(speech, wide, wide_features, times, wide_drafter)
            assert ids == own == expected
            assert wide_stats.acceptance_length == stats.acceptance_length > 1.5


@torch.no_grad()
def error(widen, trained, wide, features):
    """Largest difference of logits, and the largest logit of additional ids."""
    ids = torch.tensor([[1157, 1158, 1259, 1263, 300, 400, 500]]).expand(len(features), -1)
    expected = trained(input_features=features, decoder_input_ids=ids).logits
    wide_features = widen.laid_out(features, wide.config)
    found = wide(input_features=wide_features, decoder_input_ids=ids).logits
    vocab = expected.shape[-1]
    return (found[..., :vocab] - expected).abs().max(), found[..., vocab:].max()


@torch.no_grad()
def drafts_error(widen, speech, trained, medusa, wide, wide_medusa, features):
    """Largest difference of the heads' logits, and the largest of additional ids."""
    logits = []
    for model, drafter in ((trained, medusa), (wide, wide_medusa)):
        states = speech.encode(model, widen.laid_out(features, model.config))
        ids = torch.tensor([[1157, 1158, 1259, 1263, 300]])
        hidden = model.model.decoder(ids, encoder_hidden_states=states[:1]).last_hidden_state
        if drafter.block is not None:
            drafter.block.self_attn.config._attn_implementation = "eager"
            hidden = drafter.block(hidden, encoder_hidden_states=states[:1])
        logits.append(model.proj_out(drafter.heads(hidden[0])))
    vocab = logits[0].shape[-1]
    return (logits[1][..., :vocab] - logits[0]).abs().max(), logits[1][..., vocab:].max()


def test_a_little_shape_has_more_of_everything_and_the_same_logits(
    widen, speech, trained, little, features
):
    wide = widen.widen(trained, little)
    config = wide.config
    assert (config.d_model, config.vocab_size, config.num_mel_bins) == (256, 1500, 90)
    assert (config.encoder_layers, config.decoder_layers) == (7, 10)
    assert config.max_source_positions == 403 and not config.tie_word_embeddings
    same, padded = error(widen, trained, wide, features)
    assert same < 1e-4
    assert padded == pytest.approx(widen.PADDED_LOGIT, abs=0.01)
    for name in (HEADS, LINEAR):
        medusa = Medusa.from_pretrained(name)
        wide_medusa = widen.widen_heads(medusa, trained, little)
        found = drafts_error(widen, speech, trained, medusa, wide, wide_medusa, features)
        assert found[0] < 1e-3 and found[1] < -90


@pytest.mark.slow
def test_ids_and_tokens_per_pass_are_the_same_at_the_width_of_tiny(
    widen, speech, trained, features
):
    shape = widen.SHAPES["tiny"]
    wide = widen.widen(trained, shape)
    assert [note[:19] for note in widen.Widening(trained.config, shape).notes] == [
        "6 encoder layers in",
        "8 layers instead of",
    ]
    medusa = Medusa.from_pretrained(HEADS)
    drafters = [(medusa, widen.widen_heads(medusa, trained, shape))]
    compare(widen, speech, trained, wide, drafters, features)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "slots"), [("tiny", 1500), ("base", None), ("small", None), ("turbo", None)]
)
def test_ids_and_tokens_per_pass_are_the_same_at_published_widths(
    widen, speech, trained, features, width, slots
):
    shape = replace(widen.SHAPES[width], slots=slots)
    wide = widen.widen(trained, shape)
    drafters = [
        (medusa, widen.widen_heads(medusa, trained, shape))
        for medusa in map(Medusa.from_pretrained, (HEADS, LINEAR))
    ]
    features = features[:1] if width == "turbo" else features
    compare(widen, speech, trained, wide, drafters, features)
    options = {"do_sample": False, "language": "en", "task": "transcribe"}
    wide_features = widen.laid_out(features, wide.config)
    for times in (False, True):
        expected = trained.generate(features, return_timestamps=times, **options)
        found = wide.generate(wide_features, return_timestamps=times, **options)
        assert found.tolist() == expected.tolist()


@pytest.mark.slow
def test_ctranslate2_converts_a_small_and_finds_the_same_ids(widen, speech, tmp_path):
    pytest.importorskip("ctranslate2")
    peers = importlib.import_module("peers")
    widen.write(WHISPER, HEADS, widen.SHAPES["small"], tmp_path / "wide")
    trained = peers.Checkpoint(WHISPER, HEADS)
    heads = str(tmp_path / "wide" / "medusa")
    wide = peers.Checkpoint(str(tmp_path / "wide"), heads, folder=tmp_path / "converted")
    windows = speech.windows(wide.extractor, 4)
    for times in (False, True):
        reference = peers.ours(trained, times)
        expected = peers.rows_of(reference.decode(reference.encode(windows)), trained.settings)
        converted = peers.converted(wide, times, "float32")
        assert converted.decode(converted.encode(windows)) == expected
        drafted = peers.ours(wide, times, peers.medusa(wide))
        found = drafted.decode(widen.repeated(drafted.encode(windows), 1400))
        assert peers.rows_of(found, wide.settings) == expected
        assert drafted.stats.acceptance_length > 2


def whole_weight(widen, name):
    """A mistake: the weight of a name is copied, and not divided."""
    right = widen.Widening.weight

    def wrong(self, own, weight):
        factor = self.copies if own.endswith(name) else 1
        return right(self, own, weight) * factor

    return wrong


WHOLE = (
    *("encoder.conv2.weight", "encoder.layers.2.fc1.weight", "encoder.layers.5.fc2.weight"),
    *("decoder.layers.0.self_attn.q_proj.weight", "decoder.layers.7.encoder_attn.k_proj.weight"),
    *("decoder.layers.3.self_attn.out_proj.weight", "decoder.layers.4.fc2.weight"),
    "proj_out.weight",
)


@pytest.mark.one_in(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_one_weight_that_is_not_divided_is_noticed(
    widen, trained, little, features, monkeypatch, name
):
    monkeypatch.setattr(widen.Widening, "weight", whole_weight(widen, name))
    wide = widen.widen(trained, replace(little, slots=None))
    assert error(widen, trained, wide, features)[0] > 0.01


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RESIDUAL", ("out_proj",)),
        ("RESIDUAL", ("fc2",)),
        ("GAP", 0.0),
        ("GAP_SCORE", 0.0),
        ("SILENCED", 0.0),
    ],
)
def test_a_part_that_is_left_out_is_noticed(
    widen, trained, little, features, monkeypatch, name, value
):
    monkeypatch.setattr(widen, name, value)
    wide = widen.widen(trained, little)
    assert error(widen, trained, wide, features)[0] > 1e-3


def test_queries_that_are_not_scaled_are_noticed(widen, trained, little, features, monkeypatch):
    right = widen.Widening.weight

    def wrong(self, name, weight):
        return right(self, name, weight) / (2**0.5 if "q_proj" in name else 1)

    monkeypatch.setattr(widen.Widening, "weight", wrong)
    wide = widen.widen(trained, little)
    assert error(widen, trained, wide, features)[0] > 0.01


def test_additional_ids_of_a_zero_row_are_noticed(widen, trained, little, features, monkeypatch):
    monkeypatch.setattr(widen, "PADDED_LOGIT", 0.0)
    wide = widen.widen(trained, little)
    assert error(widen, trained, wide, features)[1] > -1


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["heads", "block", "slots"])
def test_mistakes_in_heads_are_noticed(
    widen, speech, trained, little, features, monkeypatch, mistake
):
    medusa, wide = Medusa.from_pretrained(HEADS), widen.widen(trained, little)
    if mistake == "heads":
        monkeypatch.setattr(widen.Axis, "shared", lambda axis, weight: axis.copied(weight, 1))
    elif mistake == "block":
        monkeypatch.setattr(widen.Widening, "weight", whole_weight(widen, "fc2.weight"))
    else:
        monkeypatch.setattr(widen.Widening, "hide", lambda *_: None)
    wide_medusa = widen.widen_heads(medusa, trained, little)
    found = drafts_error(widen, speech, trained, medusa, wide, wide_medusa, features)
    assert found[0] > 0.01


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("slots", [403, None])
def test_the_command_writes_a_checkpoint_that_loads(
    widen, speech, trained, little, features, tmp_path, monkeypatch, capsys, slots
):
    monkeypatch.setitem(widen.SHAPES, "tiny", replace(little, layers=4))
    words = ["widen.py", "--width", "tiny", "--out", str(tmp_path / "wide")]
    words += ["--slots", str(slots)] if slots else []
    monkeypatch.setattr(sys, "argv", words)
    widen.main()
    printed = capsys.readouterr().out
    assert "8 layers instead of 4" in printed and ("laid_out" in printed) is bool(slots)
    wide = WhisperForConditionalGeneration.from_pretrained(tmp_path / "wide")
    processor = WhisperProcessor.from_pretrained(tmp_path / "wide")
    assert processor.feature_extractor.feature_size == 80
    assert wide.generation_config.lang_to_id == trained.generation_config.lang_to_id
    pairs = [[Medusa.from_pretrained(n) for n in (HEADS, tmp_path / "wide" / "medusa")]]
    compare(widen, speech, trained, wide, pairs, features[:1])
    with pytest.raises(InputError, match="has files"):
        widen.main()


@pytest.mark.slow
@pytest.mark.parametrize("name", [WHISPER, "zoo:lm-synth"])
def test_heads_with_output_matrices_of_their_own_are_widened(widen, name):
    torch.manual_seed(0)
    trained = widen.load(name)
    vocab = trained.config.vocab_size
    heads = MedusaHeads(2, 2, 128, vocab)
    for weight in heads.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    shape = widen.Shape(256, 4, 8, 512, vocab + 9)
    wide = widen.widen_heads(Medusa(heads), trained, shape).heads
    hidden, offset = torch.randn(3, 128), widen.Widening(trained.config, shape).offset
    copies = hidden.repeat(1, 2) + (0 if offset is None else offset)
    with torch.no_grad():
        expected, found = heads.logits(hidden, None), wide.logits(copies, None)
    torch.testing.assert_close(found[..., :vocab], expected, atol=1e-4, rtol=0)
    begin = expected[..., :1].expand(-1, -1, 9)
    padded = torch.full_like(begin, -100) if offset is not None else begin
    torch.testing.assert_close(found[..., vocab:], padded, atol=0.01, rtol=0)


def test_alignment_heads_stay_with_their_layers(widen, trained, little):
    wide = widen.widen(trained, little)
    old, new = (m.generation_config.alignment_heads for m in (trained, wide))
    assert [[layer * 10 // 8, head] for layer, head in old] == new != old
    for (layer, _), (wide_layer, _) in zip(old, new, strict=True):
        bias = trained.model.decoder.layers[layer].fc2.bias
        assert torch.equal(wide.model.decoder.layers[wide_layer].fc2.bias[:128], bias)


@pytest.mark.parametrize("sizes", [(256, 8, 10, 500, 900), (256, 4, 8, 256, 802)])
def test_a_language_model_is_widened(widen, sizes):
    trained = widen.load("zoo:lm-synth")
    wide = widen.widen(trained, widen.Shape(*sizes, kv_heads=min(sizes[1], 8)))
    prompt = torch.tensor([[5, 100, 200, 300, 400], [7, 8, 600, 700, 800]])
    with torch.no_grad():
        expected, found = trained(prompt).logits, wide(prompt).logits
    assert (found[..., :802] - expected).abs().max() < 1e-4
    options = {"max_new_tokens": 24, "do_sample": False}
    expected = trained.generate(prompt, **options).tolist()
    for decoder in (None, Decoder(draft="lookup")):
        assert wide.generate(prompt, custom_generate=decoder, **options).tolist() == expected


@pytest.mark.parametrize(
    ("width", "heads", "kv_heads"), [(192, 12, 4), (192, 6, 2), (128, 8, 2), (128, 4, 2)]
)
def test_heads_stay_in_their_groups(widen, width, heads, kv_heads):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
    trained = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.2, attention_bias=True))
    for name, weight in trained.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight)
    ids = torch.randint(3, 100, (2, 20))
    wide = widen.widen(trained, widen.Shape(width, heads, 5, 200, 110, kv_heads=kv_heads))
    with torch.no_grad():
        expected, found = trained(ids).logits, wide(ids).logits
    assert (found[..., :100] - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 200}, "a width of 200 is no multiple of 128"),
        ({"heads": 2}, "2 heads are fewer than 4"),
        ({"width": 384, "heads": 8}, "heads of width 48 are no multiple of 32"),
        ({"vocab": 1000}, "1000 vocab are fewer than 1465"),
        ({"width": 128}, "additional ids need at least two copies"),
        ({"heads": 8}, "more slots need wider heads"),
    ],
)
def test_a_shape_at_which_the_function_cannot_be_kept_is_refused(
    widen, trained, little, changes, message
):
    with pytest.raises(OptionError, match=message):
        widen.widen(trained, replace(little, **changes))


def test_other_models_and_slots_are_refused(widen):
    with pytest.raises(OptionError, match="1500 slots are no multiple of 200"):
        widen.repeated(torch.zeros(1, 200, 8), 1500)
    from transformers import GPT2Config

    with pytest.raises(UnsupportedModelError, match="gpt2 cannot be widened"):
        widen.Widening(GPT2Config(), widen.SHAPES["tiny"])
