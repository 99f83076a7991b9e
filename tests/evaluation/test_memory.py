"""The bytes of a row, computed and alive: the peak of a decode grows by them with every row."""

import copy
import functools
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
)
from transformers.modeling_outputs import BaseModelOutput

from mmdecode.accept.relative_threshold import RelativeThreshold
from mmdecode.decoder import Decoder
from mmdecode.engine.cache import RaggedLayer
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.engine.contracts import Requirements
from mmdecode.engine.proposal import Tree
from mmdecode.evaluation.speed.memory import row_bytes
from mmdecode.guide.cfg import CFG
from mmdecode.quantization import quantize
from mmdecode.testing import drafts
from mmdecode.testing.memory import LiveStorage
from mmdecode.testing.table import decode
from tests.conformance import test_encoder_decoder
from tests.support import seams, tiny, tiny_models, tiny_vlm

LAYERS, WIDTH, FRAMES = 6, 96, 50
TOLERANCE = 0.03  # of a row: a pass of few tokens, counters, masks


@functools.cache
def model_of(family, vocab, dtype=torch.float32):
    if family == "llama":
        return tiny_models.llama(
            vocab_size=vocab,
            hidden_size=WIDTH,
            intermediate_size=96,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
        ).to(dtype)
    return tiny_models.whisper(
        vocab_size=vocab,
        d_model=WIDTH,
        decoder_layers=LAYERS,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_source_positions=FRAMES,
        max_target_positions=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=1,
    )


def peak(model, batch, prompt, new, decoder, do_sample):
    """Of a whole decode, the encoder's states included."""
    with LiveStorage() as live:
        ids = torch.randint(2, model.config.vocab_size, (batch, prompt))
        inputs = {}
        if model.config.is_encoder_decoder:
            states = torch.randn(batch, FRAMES, WIDTH)
            inputs["encoder_outputs"] = BaseModelOutput(last_hidden_state=states)
        options = {"max_new_tokens": new, "do_sample": do_sample, "request": range(batch)}
        decode(model, ids, decoder, inputs=inputs, **options)
    return live.peak


def slopes(model, prompt, new, decoder, do_sample):
    """Bytes by which the peak grows with each row, from one to two and from two to four."""
    one, two, four = (peak(model, b, prompt, new, decoder(), do_sample) for b in (1, 2, 4))
    return two - one, (four - two) / 2


CALLS = {
    "undrafted": (Decoder, {"argmax_only": True}),
    # keeps whatever is drafted, so that a long text takes few rounds
    "drafted": (
        lambda: Decoder(drafts.Random(Tree.chain(8)), accept=RelativeThreshold(0.0)),
        {"nodes": 8},
    ),
    "sampled": (lambda: Decoder(drafts.Random(), seed=1), {"nodes": 4, "do_sample": True}),
    "two branches": (lambda: Decoder(None, CFG(2.0)), {"branches": 2}),
}
SHORT, LONG = (8, 30), (8, 240)
CASES = [  # a large vocabulary where its scores are most of what a round needs
    ("llama", "undrafted", SHORT, 100),
    ("llama", "undrafted", SHORT, 4000, torch.bfloat16),
    ("llama", "drafted", LONG, 100),
    ("llama", "sampled", SHORT, 2000),
    ("whisper", "undrafted", SHORT, 100),
    ("whisper", "drafted", LONG, 100),
    ("whisper", "two branches", SHORT, 100),
]


def assert_computed(family, call, lengths, *shape):
    model = model_of(family, *shape)
    decoder, options = CALLS[call]
    row = row_bytes(model, *lengths, source=FRAMES if family == "whisper" else 0, **options)
    found = slopes(model, *lengths, decoder, options.get("do_sample", False))
    assert found == pytest.approx((row.total, row.total), rel=TOLERANCE), row


@pytest.mark.one_in(9)
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_the_peak_grows_by_what_a_row_is_computed_to_hold(case):
    assert_computed(*case)


def test_int8_speech_models_hold_rounded_states_instead_of_keys_and_values():
    whole = model_of("whisper", 100)
    rounded = quantize(copy.deepcopy(whole))
    kept, other = (row_bytes(model, 8, 30, source=FRAMES) for model in (rounded, whole))
    layers, width = whole.config.decoder_layers, whole.config.d_model
    assert other.source - kept.source == FRAMES * (layers * 2 * 4 * width - 2 * width)
    assert replace(kept, source=0) == replace(other, source=0)


# Ways to hold more


def doubled(layer, keys, values):
    """Twice the slots that are seen."""
    LAZY(layer, keys, values)
    for name in ("keys", "values"):
        setattr(layer, name, torch.nn.functional.pad(getattr(layer, name), (0, 0, 0, 64)))


def hoarding(layer, *states, **options):
    """Keeps what it has grown out of."""
    layer.old = [*getattr(layer, "old", []), getattr(layer, "keys", None)]
    return UPDATE(layer, *states, **options)


def remembering(run, proposal, scores):
    """Keeps as much as the scores of every round."""
    nodes, vocab = scores["main"].logits.shape[:2], run.call.plan.adapter.vocab
    run.all = [*getattr(run, "all", []), torch.ones(*nodes, vocab)]
    return GUIDED(run, proposal, scores)


LAZY, UPDATE, GUIDED = RaggedLayer.lazy_initialization, RaggedLayer.update, seams.GUIDE.sound
HOLDING = {
    "doubled": (RaggedLayer, "lazy_initialization", doubled),
    "hoarding": (RaggedLayer, "update", hoarding),
    "remembering": (*seams.GUIDE, remembering),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mutant", HOLDING)
def test_what_holds_more_is_found(mutant, monkeypatch):
    monkeypatch.setattr(*HOLDING[mutant])
    with pytest.raises(AssertionError, match="RowBytes"):
        assert_computed("whisper", "undrafted", SHORT, 500)


class Watcher(drafts.TestDrafter):
    """Notes in which rounds the states of the prompt are still there."""

    there = None

    def needs(self, adapter):
        return Requirements(prompt_hidden=True)

    def begin(self, call, prefill):
        self.states, self.there = weakref.ref(prefill.prompt_hidden["last"]), []
        return super().begin(call, prefill)

    def draft(self, call, budget):
        self.there.append(self.states() is not None)
        return super().draft(call, budget)


def test_the_states_of_the_prompt_are_let_go_when_it_is_read():
    draft = Watcher()
    decode(model_of("llama", 100), torch.ones(2, 9, dtype=torch.long), Decoder(draft))
    assert draft.there == [True] + [False] * 9  # nothing is drafted for the last two tokens


# A row's keys and values in every family, and the counting itself


def encoder_decoder(family, decoder):
    return test_encoder_decoder.generate(family, custom_generate=decoder)


FAMILIES = {
    **{name: functools.partial(tiny.ours, family=name) for name in (*tiny.TEXT_CONFIGS, "whisper")},
    **{name: functools.partial(encoder_decoder, name) for name in test_encoder_decoder.CONFIGS},
    **{name: functools.partial(tiny_vlm.ours, family=name) for name in tiny_vlm.CONFIGS},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_slot_is_as_large_as_computed(family, monkeypatch):
    assert_slots(lambda: FAMILIES[family](Decoder()), monkeypatch)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_key_may_be_wider_than_its_share_of_the_states(name, monkeypatch):
    if name == "llama":
        config = copy.copy(tiny.text_model(name).config)
        config.head_dim = 12
        model = AutoModelForCausalLM.from_config(config).eval()
    else:
        config = copy.copy(test_encoder_decoder.model_of(name).config)
        config.d_kv = 12
        model = AutoModelForSeq2SeqLM.from_config(config).eval()
    ids = torch.ones(2, 3, dtype=torch.long)
    options = {"max_new_tokens": 3, "do_sample": False, "custom_generate": Decoder()}
    assert_slots(lambda: model.generate(ids, **options), monkeypatch)


def test_a_captured_call_reserves_its_slots_once(taped, monkeypatch):
    model = model_of("llama", 100)
    ids, decoder = torch.ones(2, 80, dtype=torch.long), Decoder(drafts.Random(), compile=True)
    decoder.draft.capabilities = DrafterCapabilities(graph_safe=True)
    runs = watched(monkeypatch)
    decode(model, ids, decoder, max_new_tokens=40)
    row = row_bytes(model, 80, 40, nodes=4, compile=True)
    assert taped and row.growth == 0
    assert held(runs[-1]) == row.cache * 2


def assert_slots(generate, monkeypatch):
    """Asserts the bytes of keys and values that the last run of a call has kept."""
    runs = watched(monkeypatch)
    generate()
    scorer = runs[-1].runners[0]
    row = row_bytes(scorer.adapter.model, scorer.cache.layers[0].keys.shape[2], 0)
    assert row.cache * runs[-1].call.batch == held(runs[-1])


def watched(monkeypatch):
    """A list that every run is put on."""
    runs = []
    seams.DECODE.plant(monkeypatch, lambda decode: lambda run: decode(runs.append(run) or run))
    return runs


def held(run):
    layers = run.runners[0].cache.layers
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)


def test_storage_is_counted_once_and_until_it_is_let_go():
    before = torch.zeros(1000)
    with LiveStorage() as live:
        view = before[10:]
        made = torch.ones(100)
        other = made.view(10, 10)[2:]
        assert live.bytes == 400
        made += 1
        del made
        assert live.bytes == 400
        del other
        assert live.bytes == 0
        total = (before + view.sum()).sum()
    assert live.peak > 4000 and live.bytes == total.nbytes


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("device", "measured"), [("meta", " - "), ("cpu", "0.04")])
def test_the_benchmark_computes_everywhere_and_measures_on_a_device(
    device, measured, monkeypatch, capsys
):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import memory

    words = ["--device", device, "--dtype", "float32", "--scale", "tiny"]
    monkeypatch.setattr("sys.argv", ["memory.py", *words])
    memory.main()
    assert capsys.readouterr().out.count(measured) >= 4
