"""Encoder-decoders that read text: token for token what plain greedy `generate` gives."""

import functools

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    BlenderbotConfig,
    BlenderbotSmallConfig,
    MarianConfig,
    MBartConfig,
    MT5Config,
    PegasusConfig,
    PLBartConfig,
    T5Config,
    UMT5Config,
)

from mmdecode import registry
from mmdecode.adapters.seq2seq.bart import BartAdapter
from mmdecode.adapters.seq2seq.base import SourcePast
from mmdecode.adapters.seq2seq.t5 import T5Adapter, UMT5Adapter
from mmdecode.decoder import Decoder
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.layer_skip import LayerSkip
from mmdecode.draft.lookup import PromptLookup
from mmdecode.draft.medusa import Medusa
from mmdecode.engine.adapter import BranchSpec, Prompt
from mmdecode.engine.cache import RaggedCache
from mmdecode.errors import IncompatibleError, OptionError, UnsupportedModelError
from mmdecode.guide.linear import Linear
from mmdecode.testing import drafts
from tests.support.tiny import (
    PROCESSORS,
    TREE,
    VOCAB,
    WIDTH,
    DifferentError,
    HiddenPath,
    assert_generates,
    prompts,
    random_heads,
)
from tests.support.traced import Traced

NEW = 14
COMMON = {"vocab_size": VOCAB, "d_model": WIDTH, "pad_token_id": 0, "decoder_start_token_id": 1}
BART = {
    **COMMON,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 40,
}
T5 = {
    **COMMON,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,  # farther than some tokens look back, not all
}
CONFIGS = {
    "t5": (T5Config, T5),
    "t5, gated and untied": (
        T5Config,
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "mt5": (MT5Config, T5),
    "umt5": (UMT5Config, T5),
    "bart": (BartConfig, BART),
    "mbart": (MBartConfig, BART),
    "pegasus": (PegasusConfig, BART),
    "marian": (MarianConfig, BART),
    "blenderbot": (BlenderbotConfig, BART),
    "blenderbot-small": (BlenderbotSmallConfig, BART),
    "plbart": (PLBartConfig, BART),
}
MAIN = ("t5", "umt5", "bart")  # one for each adapter
EACH = pytest.mark.parametrize("family", MAIN)
OTHERS = pytest.mark.parametrize("family", sorted({*CONFIGS} - {*MAIN}))
DECODER_PROMPT = {
    "decoder_input_ids": torch.tensor([[1, 5, 7, 9], [0, 0, 1, 8], [0, 1, 4, 4]]),
    "decoder_attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1]]),
}
DRAFTS = {
    "none": lambda model, rows: None,
    "lookup": lambda model, rows: PromptLookup(length=5),
    "assistant_is_target": lambda model, rows: Assistant(model, length=3),
    "layer_skip": lambda model, rows: LayerSkip(exit_layer=1, length=3),
    "medusa_tree": lambda model, rows: Medusa(random_heads(), paths=TREE),
    "known": lambda model, rows: drafts.Known(rows, length=4, wrong_at=[2, 9]),
    "known_tree": lambda model, rows: HiddenPath(rows),
    "random_trees": lambda model, rows: drafts.RandomTrees(),
}


@functools.cache
def model_of(family, attention="sdpa"):
    """Embeddings and an output matrix of its own that are large: no token leads to itself."""
    cls, options = CONFIGS[family]
    model = AutoModelForSeq2SeqLM.from_config(cls(**options), attn_implementation=attention).eval()
    model.set_output_embeddings(torch.nn.Linear(WIDTH, VOCAB, bias=False))
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            large = any(part in name for part in ("embed", "shared", "lm_head"))
            std = 2.0 if "relative" in name else 1.0 if large else 0.15
            torch.nn.init.normal_(weight, std=std)
    if hasattr(model, "final_logits_bias"):
        torch.nn.init.normal_(model.final_logits_bias, std=2.0)
    for name in ("eos_token_id", "bos_token_id", "forced_eos_token_id"):
        setattr(model.generation_config, name, None)
    return model


@functools.cache
def reference(family, attention, options):
    """Plain output, and the generated rows."""
    expected = generate(family, attention, **dict(options))
    rows = expected[:, -NEW:].tolist()
    assert len({token for row in rows for token in row}) >= 8, "the model repeats itself too much"
    return expected, rows


def generate(family, attention="sdpa", processors="no_processor", prompt=False, **options):
    """Sources of 7, 3 and 9 tokens, padded."""
    options = {**prompts(3), **PROCESSORS[processors](), "max_new_tokens": NEW, **options}
    if prompt:
        options |= DECODER_PROMPT
    return model_of(family, attention).generate(**options, do_sample=False)


def assert_same(family, draft, attention="sdpa", **options):
    expected, rows = reference(family, attention, tuple(sorted(options.items())))
    decoder = Traced(DRAFTS[draft](model_of(family, attention), rows))
    call = functools.partial(generate, family, attention, custom_generate=decoder, **options)
    assert_generates(decoder, draft, call, expected)
    return decoder


@pytest.mark.one_in(10)
@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("processors", ["no_processor", "penalties", "prefix_bias"])
@pytest.mark.parametrize("draft", DRAFTS)
@EACH
def test_drafted_tokens_are_those_of_generate(family, draft, processors, prompt):
    assert_same(family, draft, processors=processors, prompt=prompt)


@pytest.mark.parametrize("draft", DRAFTS)
@EACH
def test_eager_attention_gives_the_same(family, draft):
    assert_same(family, draft, attention="eager", prompt=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("draft", "prompt"), [("known_tree", False), ("assistant_is_target", True)]
)
@OTHERS
def test_every_family_generates_what_transformers_does(family, draft, prompt):
    assert_same(family, draft, prompt=prompt)


@pytest.mark.slow
def test_mt5_is_scaled_by_nothing_and_runs_eagerly_too():
    for attention in ("sdpa", "eager"):
        assert_same("mt5", "known_tree", attention=attention, processors="prefix_bias", prompt=True)


@EACH
def test_an_end_inside_an_accepted_block_ends_the_row_there(family):
    row, *others = reference(family, "sdpa", ())[1]
    seen = {token for other in others for token in other}
    position = next(i for i in range(2, NEW) if row[i] not in {*row[:i], *seen})
    decoder = assert_same(family, "known", eos_token_id=row[position], pad_token_id=0)
    last = decoder.trace[0][-1]
    assert (*last.accepted, last.decided)[last.kept - 1] == row[position]


@EACH
def test_a_source_padded_on_the_right_is_the_source_alone(family):
    batch = prompts(3)
    right = {
        name: torch.stack(
            [
                row.roll(int(mask.sum()))
                for row, mask in zip(value, batch["attention_mask"], strict=True)
            ]
        )
        for name, value in batch.items()
    }
    expected = generate(family, **right)
    decoder = Decoder(HiddenPath(expected[:, -NEW:].tolist()))
    assert generate(family, **right, custom_generate=decoder).tolist() == expected.tolist()
    alone = model_of(family).generate(
        batch["input_ids"][1:2, -3:],
        max_new_tokens=NEW,
        do_sample=False,
        custom_generate=Decoder(PromptLookup()),
    )
    assert alone[0].tolist() == expected[1].tolist()


@EACH
def test_stacked_branches_read_their_own_sources(family):
    expected, rows = reference(family, "sdpa", (("prompt", True),))
    guide = Linear([BranchSpec(name="again")], [0.5, 0.5])
    decoder = Decoder(HiddenPath(rows), guide)
    assert generate(family, prompt=True, custom_generate=decoder).tolist() == expected.tolist()


def test_reordered_rows_take_their_source_along():
    ids = torch.ones(3, 2, dtype=torch.long)
    source = torch.arange(3.0)[:, None, None].expand(3, 4, WIDTH)
    read = torch.arange(4) < torch.tensor([[1], [2], [3]])
    prompt = Prompt(
        ids=ids,
        mask=torch.tensor([[1, 1], [0, 1], [1, 1]]).bool(),
        inputs={"source": source, "source_mask": read},
    )
    past = SourcePast(RaggedCache(2, 3, ids.device), prompt)
    past.reorder_cache(torch.tensor([2, 1]))
    assert past.source[:, 0, 0].tolist() == [2.0, 1.0]
    assert (past.source_mask == 0).sum((1, 2, 3)).tolist() == [3, 2]
    assert past.pads.tolist() == [0, 1]


def test_an_assistant_that_cannot_read_the_targets_encoder_is_refused():
    small = AutoModelForSeq2SeqLM.from_config(T5Config(**{**T5, "d_model": 16}))
    with pytest.raises(IncompatibleError, match="width 16"):
        generate("t5", custom_generate=Decoder(Assistant(small.eval())))


@pytest.mark.parametrize(("family", "layer"), [("t5", 1), ("umt5", 0), ("bart", 0), ("marian", 0)])
def test_any_layer_may_be_skipped(family, layer):
    expected, _ = reference(family, "sdpa", ())
    decoder = Decoder(LayerSkip(skip=[layer], length=3))
    assert generate(family, custom_generate=decoder).tolist() == expected.tolist()
    assert decoder.stats.drafted > 0


def test_the_layer_that_holds_the_bias_of_all_is_kept():
    with pytest.raises(UnsupportedModelError, match="keep layer 0"):
        generate("t5", custom_generate=Decoder(LayerSkip(skip=[0])))


def test_a_table_of_positions_is_not_overrun():
    assert generate("bart", max_new_tokens=39, custom_generate=Decoder()).shape == (3, 40)
    with pytest.raises(OptionError, match="40 positions"):
        generate("bart", max_new_tokens=40, custom_generate=Decoder())


@pytest.mark.parametrize("family", ["bart", "umt5"])
def test_every_hook_is_removed(family, monkeypatch):
    decoder = model_of(family).get_decoder()
    hooked = (
        decoder.embed_positions if family == "bart" else decoder.block[1].layer[0].SelfAttention
    )
    generate(family, custom_generate=Decoder())
    assert not (hooked._forward_hooks or hooked._forward_pre_hooks)
    monkeypatch.setattr(type(hooked), "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        registry.adapter_for(model_of(family)).forward(
            torch.ones(1, 1, dtype=torch.long),
            torch.zeros(1, 1, 1, 1),
            torch.zeros(1, 1, dtype=torch.long),
            empty_past(),
        )
    assert not (hooked._forward_hooks or hooked._forward_pre_hooks)


def empty_past():
    ids = torch.ones(1, 1, dtype=torch.long)
    cache = RaggedCache(2, 1, ids.device)
    cache.open(1)
    source = {"source": torch.zeros(1, 3, WIDTH), "source_mask": torch.ones(1, 3).bool()}
    return SourcePast(cache, Prompt(ids=ids, mask=ids.bool(), inputs=source))


# Known mistakes


def assert_noticed(family, draft, **options):
    with pytest.raises(DifferentError):
        assert_same(family, draft, **options)


@EACH
def test_padding_of_the_source_that_is_attended_to_is_noticed(family, monkeypatch):
    assert_same(family, "known")
    begin = SourcePast.__init__

    def unmasked(self, cache, prompt):
        begin(self, cache, prompt)
        self.source_mask = torch.zeros_like(self.source_mask)

    monkeypatch.setattr(SourcePast, "__init__", unmasked)
    assert_noticed(family, "known")


@EACH
def test_positions_off_by_one_after_the_prompt_are_noticed(family, monkeypatch):
    assert_same(family, "known", prompt=True)
    if family != "bart":
        correct = T5Adapter._distance

        def shifted(self, mask, depths, past):
            late = past.cache.start[:, None] > 0
            return correct(self, mask, depths + late, past)

        monkeypatch.setattr(T5Adapter, "_distance", shifted)
    else:
        forward = BartAdapter.forward

        def shifted(self, tokens, mask, positions, past):
            late = past.cache.start[:, None] > 0
            return forward(self, tokens, mask, positions + late, past)

        monkeypatch.setattr(BartAdapter, "forward", shifted)
    assert_noticed(family, "known", prompt=True)


@EACH
def test_positions_by_slot_instead_of_depth_are_noticed(family, monkeypatch):
    assert_same(family, "known_tree")
    adapter = {"t5": T5Adapter, "umt5": UMT5Adapter, "bart": BartAdapter}[family]
    forward = adapter.forward

    def by_slot(self, tokens, mask, positions, past):
        order = torch.arange(tokens.shape[1])
        return forward(self, tokens, mask, positions[:, :1] + order, past)

    monkeypatch.setattr(adapter, "forward", by_slot)
    assert_noticed(family, "known_tree")


def test_padding_of_the_decoder_that_is_no_position_is_noticed(monkeypatch):
    begin = SourcePast.__init__

    def unpadded(self, cache, prompt):
        begin(self, cache, prompt)
        self.pads = torch.zeros_like(self.pads)

    monkeypatch.setattr(SourcePast, "__init__", unpadded)
    assert_noticed("bart", "known", prompt=True)


def test_a_dropped_bias_of_logits_is_noticed(monkeypatch):
    monkeypatch.setattr(BartAdapter, "head", BartAdapter.unembed)
    assert_noticed("bart", "known")


@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_a_dropped_scale_of_logits_is_noticed(family, monkeypatch):
    monkeypatch.setattr(T5Adapter, "unembed", lambda self, hidden: self._head(hidden))
    assert_noticed(family, "known", processors="prefix_bias")


def test_a_scale_that_the_model_does_not_have_is_noticed(monkeypatch):
    monkeypatch.setattr(T5Adapter, "scales", staticmethod(UMT5Adapter.scales))
    assert_noticed("mt5", "known", processors="prefix_bias")


def test_the_first_layers_bias_in_all_layers_is_noticed(monkeypatch):
    assert_same("umt5", "known")
    monkeypatch.setattr(UMT5Adapter, "_run", T5Adapter._run)
    assert_noticed("umt5", "known")
